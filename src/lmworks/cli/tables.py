"""What is known about a corpus, and a resolved recipe with the origin of every value, as people read them on a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from lmworks.recipe.changes import as_tree
from lmworks.recipe.keys import Keys, display, item_names
from lmworks.recipe.load import Origin, Resolved
from lmworks.recipe.phases import positions, warnings
from lmworks.recipe.weights import start_context
from lmworks.ui.amounts import compact, percent, short_size, significant

if TYPE_CHECKING:
    from lmworks.corpus.analysis.diff import SourceDifference
    from lmworks.corpus.analysis.prepared import SampledDocument
    from lmworks.corpus.analysis.trace import Trace
    from lmworks.corpus.engine.dedup_preview import SourceDuplicates
    from lmworks.shards.lineage import DocumentLocation


_MOST_ROWS = 20
_BEGINNING = 100
_DECISION = ("id", "origin", "bytes", "language", "fate", "reason", "detail", "copy_of", "variant_of")


def analysis_tables(found: Mapping[str, Any]) -> Iterator[Table]:
    """Per source and domain, per language, and by reason."""
    yield _sides(found)
    languages = Table(title="Languages", title_justify="left", header_style="bold")
    for name in ("language", "documents read", "to train on", "MB read"):
        languages.add_column(name, justify="left" if name == "language" else "right")
    train = found["whole"]["train"]["languages"]
    for name, one in list(found["whole"]["read"]["languages"].items())[:_MOST_ROWS]:
        kept = train.get(name, {"documents": 0})["documents"]
        languages.add_row(name, f"{one['documents']:,}", f"{kept:,}", f"{one['bytes'] / 1e6:,.2f}")
    yield languages
    dropped = Table(title="Dropped", title_justify="left", header_style="bold")
    for name in ("step", "reason", "documents", "MB", "median bytes", "median perplexity"):
        dropped.add_column(name, justify="left" if name in ("step", "reason") else "right")
    for one in found["whole"]["dropped"][:_MOST_ROWS]:
        perplexity = significant(one["median_perplexity"], 3) if one["median_perplexity"] else ""
        numbers = f"{one['documents']:,}", f"{one['bytes'] / 1e6:,.2f}", f"{one['median_bytes']:,.0f}", perplexity
        dropped.add_row(one["step"], one["reason"], *numbers)
    yield dropped


def _sides(found: Mapping[str, Any]) -> Table:
    table = Table(title=f"Corpus of {found['name']}: read, and to train on", title_justify="left", header_style="bold")
    columns = ("", "documents", "kept", "MB", "kept", "words", "tokens", "median bytes", "perplexity", "duplicates")
    for name in columns:
        table.add_column(name, justify="right" if name else "left")
    for one in found["sources"]:
        table.add_row(*_row(one["name"], one))
    table.add_section()
    for name, one in found["domains"].items():
        table.add_row(*_row(f"domain {name}", one))
    table.add_section()
    table.add_row(*_row("all", found["whole"]), style="bold")
    measured = found["whole"]["train"]["measured"]
    table.caption = f"words, tokens and perplexity from {measured['documents']:,} documents to train on, {short_size(measured['bytes'])}"
    return table


def _row(name: str, one: Mapping[str, Any]) -> list[str]:
    read, train = one["read"], one["train"]
    copies = sum(kind["documents"] for kind in one["duplicates"].values())
    return [
        name,
        f"{train['documents']:,}",
        _part(train["documents"], read["documents"]),
        f"{train['bytes'] / 1e6:,.2f}",
        _part(train["bytes"], read["bytes"]),
        *(compact(train[what]) if train[what] else "" for what in ("words", "tokens")),
        _arrow(read["lengths"], train["lengths"]),
        _arrow(read["perplexity"], train["perplexity"]),
        _part(copies, read["documents"]),
    ]


def _part(some: float, whole: float) -> str:
    return percent(some / whole) if whole else "–"


def _arrow(read: Mapping[str, Any], train: Mapping[str, Any]) -> str:
    return " → ".join(significant(one["quantiles"]["50%"], 3) if one["count"] else "–" for one in (read, train))


def document(drawn: SampledDocument, characters: int) -> Group:
    """A document of a sample: what is known about it, and how it begins."""
    decision = drawn.decision
    fate = " ".join(part for part in (decision["fate"], decision["reason"], decision["detail"]) if part)
    about = [f"{decision['bytes']:,} bytes", decision["language"]]
    about += [f"{name} {significant(value, 3)}" for name, value in decision.items() if name not in _DECISION and value is not None]
    about += [f"copy of {decision['copy_of']}"] if decision["copy_of"] else []
    about += [f"variant of {decision['variant_of']}"] if decision["variant_of"] else []
    head = Text.assemble((decision["id"], "bold"), f"  {drawn.output or fate}\n", (f"{decision['origin']}  {', '.join(about)}", "dim"))
    text = drawn.text[:characters] + (" ..." if len(drawn.text) > characters else "")
    return Group(head, Text(text.rstrip(), overflow="fold"), Text())


def way(found: Trace, place: DocumentLocation | None) -> Group:
    """The way of a document."""
    lines = [Text.assemble((found.id, "bold"), f"  {found.source}, {found.domain}"), Text(found.origin, style="dim")]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for moment in found.moments:
        facts = "".join(f"  {name}={value if isinstance(value, str) else significant(value)}" for name, value in moment.facts.items())
        told = Text(moment.outcome + facts)
        for line in moment.changed:
            told.append(f"\n{line}", style={"-": "red", "+": "green"}.get(line[:1], ""))
        table.add_row(Text(moment.stage, style="bold"), told)
    if place:
        tokens = f"tokens {place.start:,} to {place.stop:,} of {place.source} ({place.split})"
        table.add_row(Text("shards", style="bold"), Text(f"{place.shard}, document {place.document:,}: {tokens}"))
    end = []
    if not found.agrees:
        why = "done again, the steps end otherwise than was written down: the source, a file of a step, or lmworks has changed since"
        end.append(Text(why, style="yellow"))
    return Group(*lines, table, *end, Text(found.text.rstrip(), style="dim", overflow="fold"), Text())


def duplicate_tables(found: Iterable[SourceDuplicates]) -> Iterator[RenderableType]:
    """What deduplication would drop, by source and method, then some documents of each."""
    table = Table(title="Deduplication would drop", title_justify="left", header_style="bold")
    for name in ("source", "method", "documents", "share", "MB"):
        table.add_column(name, justify="left" if name in ("source", "method") else "right")
    examples: list[RenderableType] = []
    for source in found:
        table.add_row(Text(source.source, style="bold"), "came", f"{source.came.documents:,}", "", f"{source.came.bytes / 1e6:,.2f}")
        for method, one in source.dropped.items():
            share = _part(one.documents, source.came.documents)
            table.add_row("", method.replace("_", " "), f"{one.documents:,}", share, f"{one.bytes / 1e6:,.2f}")
            for example in source.examples[method]:
                head = f"{method.replace('_', ' ')} of {example.copy_of}" if example.copy_of else method.replace("_", " ")
                texts = [_beginning(text) for text in (example.text, example.copied_text) if text]
                examples.append(Group(Text.assemble((example.id, "bold"), f"  {head}"), *texts))
    yield table
    yield from examples


def _beginning(text: str) -> Text:
    return Text(" ".join(text.split())[:_BEGINNING], style="dim")


def difference_table(found: Iterable[SourceDifference]) -> Table:
    """What differs between two corpora, by source and kind."""
    table = Table(title="Documents of A and B", title_justify="left", header_style="bold")
    for name in ("source", "", "documents", "MB", "in A", "in B", "for example"):
        table.add_column(name, justify="right" if name in ("documents", "MB") else "left", overflow="fold")
    for one in found:
        renamed = f", {one.renamed:,} of them under another origin" if one.renamed else ""
        table.add_row(Text(one.name, style="bold"), "same", f"{one.same:,}", "", f"{one.before:,} kept", f"{one.after:,} kept{renamed}", "")
        for group in one.groups:
            example = " → ".join(dict.fromkeys(group.examples[0].values()))
            numbers = f"{group.documents:,}", f"{group.bytes / 1e6:,.2f}"
            table.add_row("", group.kind, *numbers, Text(group.before), Text(group.after), Text(example))
    return table


_STYLES = {"default": "dim", "preset": "magenta", "recipe": "cyan", "override": "yellow", "derived": "green"}


def recipe_tree(resolved: Resolved, changed_only: bool = False) -> Tree:
    """The recipe as a tree of `key: value  origin` lines; `changed_only` leaves the defaults out."""
    values = as_tree(resolved.recipe)
    root = Tree(Text(f"{resolved.path}  fingerprint {resolved.fingerprint[:12]}", style="bold"), guide_style="dim")
    _grow(root, values, values, (), resolved.origins, changed_only)
    return root


def growing_batches(resolved: Resolved) -> list[str]:
    """A line for each phase whose batch grows with the loss, with the growths of the run if it has begun."""
    from lmworks.watch.batch_growth import describe, read_growths

    phases = resolved.recipe.train.phases
    grows = any(phase.loss_ramp is not None for phase in phases)
    return describe(phases, read_growths(Path(str(resolved.recipe.run_dir)))) if grows else []


def phase_positions(resolved: Resolved) -> Text:
    """The positions of each phase, and what is unwise about them."""
    found = positions(resolved.recipe)
    lines = [f"positions of {here.phase} ({here.length:,} tokens): {here.text}" for here in found]
    warned = [(f"\nwarning: {line}", "yellow") for line in warnings(resolved.recipe, start_context(resolved.recipe))]
    return Text.assemble("\n".join(lines), *warned)


def _grow(branch: Tree, whole: Any, value: Any, keys: Keys, origins: dict[str, Origin], changed_only: bool) -> None:
    many = isinstance(value, list)
    entries = (
        list(zip(item_names(value), range(len(value)), value, strict=True)) if many else [(key, key, item) for key, item in value.items()]
    )
    for label, key, item in entries:
        below = (*keys, key)
        path = display(whole, below)
        origin = origins.get(path)
        if origin is None:
            inside = Tree(Text(str(label), style="bold"), guide_style="dim")
            _grow(inside, whole, item, below, origins, changed_only)
            if inside.children:
                branch.children.append(inside)
        elif not (changed_only and origin.kind == "default"):
            branch.add(Text.assemble(f"{label}: ", (_plain(item), "bold"), "  ", (str(origin), _STYLES[origin.kind])))


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def recipe_as_json(resolved: Resolved, changed_only: bool = False) -> dict[str, Any]:
    """The same for machines: the recipe, the origin of each leaf by path, positions and warnings, the fingerprint and the file."""
    values = as_tree(resolved.recipe)
    origins = {path: origin for path, origin in resolved.origins.items() if not (changed_only and origin.kind == "default")}
    return {
        "path": str(resolved.path),
        "fingerprint": resolved.fingerprint,
        "recipe": _kept(values, values, (), origins) if changed_only else values,
        "positions": {here.phase: here.text for here in positions(resolved.recipe)},
        "warnings": list(warnings(resolved.recipe, start_context(resolved.recipe))),
        "origins": {path: str(origin) for path, origin in origins.items()},
    }


def _kept(whole: Any, value: Any, keys: Keys, origins: Mapping[str, Origin]) -> Any:
    """A node with the leaves that have an origin here, and without the nodes below it that have none."""
    found = {}
    for key, item in enumerate(value) if isinstance(value, list) else value.items():
        below = (*keys, key)
        if display(whole, below) in origins:
            found[key] = item
        elif isinstance(item, dict | list) and (inside := _kept(whole, item, below, origins)):
            found[key] = inside
    return list(found.values()) if isinstance(value, list) else found
