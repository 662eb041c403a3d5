"""Arms are compared where they were measured on the same: what is refused before a run, and what the files of finished runs tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from given_results import BITS, results

from lmworks.ablate.document import document, markdown, save
from lmworks.ablate.measures import Measure, Reading
from lmworks.ablate.results import Results
from lmworks.ablate.sample import samples
from lmworks.errors import UserError
from lmworks.pages.ablation_page import write_ablation_page
from tiny_run import Tiny

CODE = "validation/code/bits_per_byte"
MEASURES = [
    Measure(BITS, "bits/byte", "lower"), Measure(CODE, "bits/byte", "lower"),
    Measure("evaluation/docs/bits_per_byte", "bits/byte", "lower"),
    Measure("train/loss", "nats/token", "lower"), Measure("train/source/code/loss", "nats/token", "lower"),
    Measure("perf/step_seconds", "s", "lower"), Measure("needle/accuracy", "", "higher"),
]  # fmt: skip
COLORS = "evaluate.benchmarks=[{name: colors, path: x}]"


@pytest.mark.parametrize(
    ("override", "keys", "error"),
    [
        (
            "train.validation_bytes_per_domain=6000 bytes", {},
            f"measures: the arms base and other would measure {BITS} on other held-out text, because they differ in "
            "train.validation_bytes_per_domain; give all arms the same, with set",
        ),
        (
            "train.validation_bytes_per_domain=6000 bytes", {"measures": ["evaluation/bits_per_byte"]},
            "arm other equals arm base in all that is trained or measured",
        ),
        (
            "evaluate.every_items=7", {"measures": ["eval/colors/cloze-0-shot"], "set": [COLORS, "evaluate.every=50%"]},
            "would measure eval/colors/cloze-0-shot on other items, because they differ in evaluate.every_items",
        ),
        (
            "evaluate.benchmark_items=7", {"measures": ["evaluation/colors"], "set": [COLORS]},
            "would measure evaluation/colors on other items, because they differ in evaluate.benchmark_items",
        ),
        (
            "train.phases.general.mixture={code: 0.5, docs: 0.5}", {"measures": ["train/loss"]},
            "would measure train/loss on other text, because they differ in train.phases.general.mixture; compare held-out text instead",
        ),
        (
            "train.phases.long.sequence_length=32 tokens", {"measures": ["validation/position/0"]},
            "on other held-out text, because they differ in the sequence length of the last phase",
        ),
    ],
)  # fmt: skip
def test_arms_that_would_be_measured_on_something_else_are_refused(
    tiny: Tiny, tmp_path: Path, override: str, keys: dict[str, Any], error: str
) -> None:
    with pytest.raises(UserError) as raised:
        results(tiny, tmp_path, {"base": [2.0], "other": [2.0]}, **({"arms": {"base": [], "other": [override]}} | keys))
    assert error in str(raised.value) and "\n" not in str(raised.value)


def test_arms_of_other_data_are_not(tiny: Tiny, tmp_path: Path) -> None:
    """The ordinary data ablation: which text is held out shows when the runs have finished."""
    data = ["corpus.max_document_bytes=8KB"]
    mixture = ["train.phases.general.mixture={code: 0.5, docs: 0.5}"]
    assert results(tiny, tmp_path, {"base": [2.0], "a": [2.0], "b": [2.0]}, arms={"base": [], "a": data, "b": mixture})


def _changed(run: Tiny, split: str, domain: str) -> None:
    """Other text in a domain of the corpus."""
    (path,) = (run.run_dir / "corpus" / split / domain).glob("*.parquet")
    table = pq.read_table(path)
    texts = pa.array([f"{text} more" for text in table["text"].to_pylist()])
    pq.write_table(table.set_column(table.column_names.index("text"), "text", texts), path)
    manifest = run.run_dir / "corpus" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"changed": split}))


def test_a_sample_is_the_held_out_text_and_not_the_corpus(tiny: Tiny, tmp_path: Path) -> None:
    recipe, reading = tiny.resolve().recipe, Reading()
    found = samples(tiny.run_dir, recipe, MEASURES, reading)
    assert set(found) == {measure.name for measure in MEASURES} - {"perf/step_seconds"}
    other = tiny.copy(tmp_path / "run")
    _changed(other, "train", "docs")
    assert samples(other.run_dir, recipe, MEASURES, reading) == found, "other training text, the same held-out text"
    _changed(other, "validation", "docs")
    changed = {name for name, one in samples(other.run_dir, recipe, MEASURES, reading).items() if one != found[name]}
    assert changed == {BITS, "evaluation/docs/bits_per_byte", "needle/accuracy"}, "and not that of the domain code"
    more = tiny.resolve("train.validation_bytes_per_domain=700 bytes").recipe
    assert samples(tiny.run_dir, more, MEASURES, reading)[CODE] != found[CODE]
    shards = other.run_dir / "shards" / "manifest.json"
    tree = json.loads(shards.read_text())
    next(one for one in tree["sources"] if one["name"] == "docs")["train"]["shards"][0]["sha256"][".bin"] = "0" * 64
    shards.write_text(json.dumps(tree))
    again = samples(other.run_dir, recipe, MEASURES, reading)
    assert again["train/loss"] != found["train/loss"] and again["train/source/code/loss"] == found["train/source/code/loss"]
    assert samples(tmp_path / "nothing", recipe, MEASURES, reading) == {}


def test_a_sample_of_a_score_is_its_items_and_their_form(tiny: Tiny) -> None:
    score = Measure("evaluation/colors", "", "higher", has_items=True)
    recipe, name = tiny.resolve(COLORS).recipe, score.name

    def sample(form: str, items: dict[str, float], count: int) -> str:
        return samples(tiny.run_dir, recipe, [score], Reading(forms={name: form}, items={name: items}, counts={name: count}))[name]

    first = sample("colors/cloze/0-shot", {"a 1": 1.0, "b 2": 0.0}, 2)
    assert first == sample("colors/cloze/0-shot", {"b 2": 1.0, "a 1": 1.0}, 2), "whatever was right"
    assert first != sample("colors/cloze/0-shot", {"a 1": 1.0, "c 3": 0.0}, 2)
    assert first != sample("colors/letters/5-shot", {"a 1": 1.0, "b 2": 0.0}, 2)
    assert sample("colors/cloze/0-shot", {}, 2) != sample("colors/cloze/0-shot", {}, 3), "not recorded"


VALUES = {"base": [2.0, 2.01, 2.02], "held": [1.5, 1.51, 1.52], "same": [1.8, 1.81, 1.82]}


def on(found: Results, sample: str, *arms: str) -> Results:
    """The runs of these arms were measured on something."""
    for run in found.experiment.runs:
        if run.arm.name in arms:
            found.readings[run.directory].samples[BITS] = sample
    return found


def test_an_arm_with_other_held_out_text_gets_no_verdict(tiny: Tiny, tmp_path: Path) -> None:
    found = on(on(results(tiny, tmp_path, VALUES), "a", "base", "same"), "b", "held")
    written = document(found)
    assert [(one["arm"], one["verdict"]) for one in written["verdicts"]] == [("same", "better")]
    (line,) = written["not_measured"]
    assert line.startswith(f"{BITS} of held is not compared, because it was measured on other held-out text than the baseline's")
    measure = written["measures"][BITS]
    assert measure["sample"] == "a" and measure["other_sample"] == ["held"] and set(measure["curves"]) == {"base", "same"}
    alone = document(on(results(tiny, tmp_path, {name: VALUES[name] for name in ("base", "same")}), "a", "base", "same"))
    assert measure["quality"] == alone["measures"][BITS]["quality"] and measure["noise"] == alone["measures"][BITS]["noise"]
    text = markdown(written)
    assert "| 2.01 | 1.51 (measured on other data) | 1.81 |" in text and line in text
    save(found)
    assert "is not compared" in write_ablation_page(found.experiment.out).read_text()
    assert len(document(on(found, "a", "held"))["verdicts"]) == 2


def test_a_noise_floor_of_other_held_out_text_is_not_assumed(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "earlier").mkdir()
    earlier = results(tiny, tmp_path / "earlier", {"a": [2.0, 2.1, 1.9, 2.05], "b": [2.02, 2.11, 1.88, 2.04]})
    save(on(earlier, "then", "a", "b"))
    for sample, word in (("then", "better"), ("now", "no verdict")):
        one = results(tiny, tmp_path, {"base": [2.0], "good": [1.5]}, noise=str(earlier.experiment.out))
        written = document(on(one, sample, "base", "good"))
        assert [verdict["verdict"] for verdict in written["verdicts"]] == [word]
        told = f"{BITS}: the noise floor of {earlier.experiment.out} is of other held-out text, so it is not assumed"
        assert (told in written["not_measured"]) is (sample == "now")
