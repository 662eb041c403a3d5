"""The corpus page: one static HTML file that shows what `lmworks.corpus.analysis.analyze` has found. Nothing is loaded.

Distributions before and after are outlines over one scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks.corpus.histogram import Histogram
from lmworks.io.files import write_text
from lmworks.pages.charts import Chart, Line
from lmworks.pages.frame import page
from lmworks.ui.amounts import SHOWN, compact, percent, short_size, significant

_MOST_BINS = 48
_EDGE = 0.002  # of the values at either end are drawn with their neighbors


@dataclass(frozen=True)
class Distribution:
    """Histograms (as `Histogram.as_json`) by name, each as shares of its own documents. `tones` are classes of page.css."""

    id: str
    title: str
    hint: str
    sides: Mapping[str, Mapping[str, Any]]
    tones: Sequence[str] = ("c6", "c0")
    shown: str = "number"
    log: bool = True
    unit: str = "value"

    def chart(self) -> Chart:
        """Outlines over the same bins: a line over their lower edges, which ends at the highest edge."""
        (low, high), show = self._range(), SHOWN[self.shown]
        bins, log = self._bins(), self.log and low > 0
        edges = [low * (high / low) ** (place / bins) if log else low + (high - low) * place / bins for place in range(bins + 1)]
        shares = {name: _shares(value, edges) for name, value in self.sides.items() if value["count"]}
        lines = [
            Line(f"{name}, median {show(_middle(self.sides[name]))}", list(zip(edges, [*one, one[-1]], strict=True)), tone, style="area")
            for tone, (name, one) in zip(self.tones, shares.items(), strict=False)
        ]
        return Chart(
            self.id, self.title, self.hint, lines, (edges[0], edges[-1]), shown="percent", group=self.id, zero=True,
            across=self.unit, across_shown=self.shown, log_x=log,
        )  # fmt: skip

    def _range(self) -> tuple[float, float]:
        whole = Histogram()
        for value in self.sides.values():
            whole.merge(Histogram.from_json(dict(value)))
        low, high = whole.quantile(_EDGE), whole.quantile(1 - _EDGE)
        return (low, high) if high > low else (low - abs(low) / 2, low + (abs(low) / 2 or 1.0))

    def _bins(self) -> int:
        """Twice the cube root of their number (Rice's rule), so that few documents are no comb."""
        most = max((value["count"] for value in self.sides.values()), default=0)
        return max(8, min(_MOST_BINS, round(2 * most ** (1 / 3))))


def _middle(value: Mapping[str, Any]) -> float:
    return float(value["quantiles"]["50%"])


def _shares(value: Mapping[str, Any], edges: Sequence[float]) -> list[float]:
    """Share of the values between each two edges; bins that an edge cuts are divided as if they were even."""
    found = [0.0] * (len(edges) - 1)
    for low, high, count in value["bins"]:
        inside = [max(0.0, min(high, edges[place + 1]) - max(low, edges[place])) for place in range(len(found))]
        width = sum(inside)
        if width:
            for place, part in enumerate(inside):
                found[place] += count * part / width
        else:
            place = 0 if high <= edges[0] else len(found) - 1 if low >= edges[-1] else _holding(low, edges)
            found[place] += count
    return [one / value["count"] for one in found]


def _holding(value: float, edges: Sequence[float]) -> int:
    return next(place for place in range(len(edges) - 1) if value <= edges[place + 1])


Json = Mapping[str, Any]
_MOST_DOMAINS = 9
_MOST_REASONS = 24


def write_corpus_page(path: Path, analysis: Json) -> None:
    """Write the page. `analysis` is what `analyze` returns; its size grows with the number of sources only."""
    write_text(path, render(analysis))


def render(analysis: Json) -> str:
    """The page as text."""
    charts, domains = ([one.chart() for one in part] for part in (_charts(analysis), _by_domain(analysis)))
    return page(
        "corpus.html",
        [*charts, *domains],
        name=analysis["name"],
        tiles=_tiles(analysis),
        funnel=_funnel(analysis),
        charts=charts,
        domains=domains,
        rare=_rare(analysis["statistics"]),
        reasons=_reasons(analysis),
        copies=_copies(analysis),
        languages=_languages(analysis["whole"]),
        sources=[_source(source) for source in analysis["sources"]],
        notes=list(_notes(analysis)),
    )


def _tiles(analysis: Json) -> list[tuple[str, str, str]]:
    whole = analysis["whole"]
    read, train = whole["read"], whole["train"]
    copies = sum(one["documents"] for one in whole["duplicates"].values())
    return [
        ("documents", compact(train["documents"]), f"of {compact(read['documents'])} read, {_share(train, read, 'documents')}"),
        ("text", short_size(train["bytes"]), f"of {short_size(read['bytes'])} read, {_share(train, read, 'bytes')}"),
        *(_measured(name, train, read) for name in ("tokens", "words") if train[name]),
        ("duplicates", _part(copies, read["documents"]), f"{copies:,} of the documents read"),
        ("held out", compact(whole["validation"]["documents"]), f"documents, {short_size(whole['validation']['bytes'])}"),
        ("languages", f"{len(train['languages'])}", ", ".join(list(train["languages"])[:4])),
        ("sources", f"{len(analysis['sources'])}", f"in {len(analysis['domains'])} domains"),
    ]


def _measured(name: str, train: Json, read: Json) -> tuple[str, str, str]:
    about = f"of {compact(read[name])} read" if read[name] else "to train on"
    return name, compact(train[name]), f"{about}, {significant(train['bytes'] / train[name], 3)} bytes each"


def _part(some: float, whole: float) -> str:
    return percent(some / whole) if whole else "–"


def _share(train: Json, read: Json, what: str) -> str:
    return _part(train[what], read[what])


def _funnel(analysis: Json) -> list[dict[str, Any]]:
    """Per source the shares of its bytes; what steps have edited counts as dropped."""
    rows = [("all sources", "", analysis["whole"]), *((one["name"], one["domain"], one) for one in analysis["sources"])]
    found = []
    for name, domain, one in rows:
        came = one["read"]["bytes"] or 1
        aside = sum(why["bytes"] for why in one["dropped"] if why["step"] == "max_bytes")
        train, held = one["train"]["bytes"], one["validation"]["bytes"]
        parts = [("train", train), ("validation", held), ("dropped", max(came - train - held - aside, 0)), ("left aside", aside)]
        parts = [(kind, value) for kind, value in parts if value]
        found.append({
            "name": name,
            "domain": domain,
            "came": short_size(one["read"]["bytes"]),
            "parts": [(kind, short_size(value), value / came) for kind, value in parts],
        })
    return found[:1] if len(found) == 2 else found


def _charts(analysis: Json) -> Iterator[Distribution]:
    whole = analysis["whole"]
    yield Distribution("lengths", "Length of documents", "bytes, as they were read", _sides(whole, "lengths"), shown="bytes", unit="bytes")
    if whole["train"]["perplexity"]["count"]:
        hint = "per byte, under a small model of the held-out text: high is unlike the corpus, low is like it or repeats it"
        yield Distribution("perplexity", "Perplexity", hint, _sides(whole, "perplexity"), unit="perplexity")
    for fact, sides in analysis["statistics"].items():
        if _varies(sides):
            named = {"read": sides["read"], "to train on": sides["train"]}
            wide = max(value.get("most", 0) for value in named.values()) > 20
            yield Distribution(f"fact-{fact}", fact.replace("_", " "), "as a step has measured it", named, log=wide)


def _varies(sides: Json) -> bool:
    """Whether there is a distribution to see: documents differ, and not only a few of them."""
    return any(value["count"] and value["quantiles"]["5%"] < value["quantiles"]["95%"] for value in sides.values())


def _rare(statistics: Json) -> list[tuple[str, str, str, str]]:
    """(fact, value of nearly all documents, highest before, after) of what hardly varies."""
    return [
        (fact.replace("_", " "), _median(sides["read"]), _most(sides["read"]), _most(sides["train"]))
        for fact, sides in statistics.items()
        if sides["read"]["count"] and not _varies(sides)
    ]


def _sides(one: Json, what: str) -> dict[str, Any]:
    return {"read": one["read"][what], "to train on": one["train"][what]}


def _most(histogram: Json) -> str:
    return significant(histogram["most"], 3) if histogram["count"] else "–"


def _by_domain(analysis: Json) -> Iterator[Distribution]:
    """Perplexity of each domain, of those with the most text."""
    ranked = sorted(analysis["domains"].items(), key=lambda pair: -pair[1]["train"]["bytes"])
    for name, one in ranked[:_MOST_DOMAINS] if len(ranked) > 1 else ():
        if one["train"]["perplexity"]["count"]:
            hint, sides = f"perplexity, {short_size(one['train']['bytes'])}", _sides(one, "perplexity")
            yield Distribution(f"domain-{name}", name, hint, sides, unit="perplexity")


def _reasons(analysis: Json) -> list[dict[str, Any]]:
    """By number of documents. What `max_bytes` left aside was not dropped for what it is: it has no bar, which would flatten the others."""
    whole, examples = analysis["whole"], analysis["examples"]
    most = max((one["documents"] for one in whole["dropped"] if one["step"] != "max_bytes"), default=1)
    return [
        {
            "step": one["step"],
            "reason": one["reason"].replace("_", " "),
            "documents": f"{one['documents']:,}",
            "bytes": short_size(one["bytes"]),
            "median": short_size(one["median_bytes"]),
            "perplexity": significant(one["median_perplexity"], 3) if one["median_perplexity"] else "",
            "share": None if one["step"] == "max_bytes" else one["documents"] / most,
            "examples": [example for example in examples if example["reason"] == one["reason"]],
        }
        for one in sorted(whole["dropped"][:_MOST_REASONS], key=lambda one: one["step"] == "max_bytes")
    ]


def _copies(analysis: Json) -> dict[str, Any] | None:
    copied = analysis["copied"]
    if not copied["documents"]:
        return None
    most = max(copied["copies"].values())
    return {
        "kinds": [(name.replace("_", " "), f"{one['documents']:,}") for name, one in analysis["whole"]["duplicates"].items()],
        "documents": f"{copied['documents']:,}",
        "sizes": [(int(number), f"{count:,}", count / most) for number, count in list(copied["copies"].items())[:12]],
        "most": copied["most"][:8],
    }


def _languages(whole: Json) -> list[dict[str, Any]]:
    read, train = whole["read"]["languages"], whole["train"]["languages"]
    most = max((one["bytes"] for one in read.values()), default=1) or 1
    nothing = {"documents": 0, "bytes": 0}
    return [
        {
            "name": name,
            "read": f"{before['documents']:,}",
            "train": f"{train.get(name, nothing)['documents']:,}",
            "bytes": short_size(train.get(name, nothing)["bytes"]),
            "before": before["bytes"] / most,
            "after": train.get(name, nothing)["bytes"] / most,
        }
        for name, before in list(read.items())[:20]
    ]


def _source(source: Json) -> dict[str, Any]:
    read, train = source["read"], source["train"]
    copies = sum(one["documents"] for one in source["duplicates"].values())
    return {
        "name": source["name"],
        "about": f"{source['domain']}, {source['language']}, {source['license']}",
        "read": f"{read['documents']:,}",
        "train": f"{train['documents']:,}",
        "kept": _share(train, read, "bytes"),
        "bytes": short_size(train["bytes"]),
        "tokens": compact(train["tokens"] or train["words"] or 0),
        "length": short_size(train["lengths"]["quantiles"]["50%"]) if train["lengths"]["count"] else "–",
        "perplexity": " → ".join(_median(side["perplexity"]) for side in (read, train)),
        "duplicates": _part(copies, read["documents"]),
    }


def _median(histogram: Json) -> str:
    return significant(histogram["quantiles"]["50%"], 3) if histogram["count"] else "–"


def _notes(analysis: Json) -> Iterator[str]:
    measured, model = analysis["whole"]["train"]["measured"], analysis["reference"]
    documents = f"{measured['documents']:,} of the documents to train on ({short_size(measured['bytes'])})"
    yield f"Words, tokens and perplexity were measured on {documents}."
    yield f"The model behind the perplexity has read {short_size(model['bytes'])} of held-out text."
    for name, why in analysis["unread"].items():
        yield f"What was dropped of {name} could not be looked at: {why}."
    for name, why in analysis["missing"].items():
        yield f"{name} could not be had: {why}."
