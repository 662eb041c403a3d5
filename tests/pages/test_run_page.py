"""The run page from whole, partial, torn and hostile run directories."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tomllib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from page_runs import HOSTILE, STEPS, recipe, write_metrics, write_samples

from lmworks import pages
from lmworks.errors import UserError
from lmworks.io.files import read_json, write_json
from lmworks.pages import overview
from lmworks.pages.read_run import read_run
from lmworks.pages.run_page import write_page
from lmworks.recipe.changes import as_tree
from lmworks.recipe.schema.layout import Cluster
from lmworks.watch.ledger import Ledger, RunLock


class Page(HTMLParser):
    """Elements by tag, texts, and whether every element that was opened is closed in order."""

    VOID = {"meta", "link", "input", "br", "img", "path", "circle"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.figures: dict[str, str] = {}  # id -> text
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "figure":
            self.begun = len(self.texts)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag
        if tag == "figure":
            begun = "".join(self.texts[self.begun :])
            self.figures[str(self.of("figure")[-1]["id"])] = re.sub(r"\s+", " ", begun)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.elements if name == tag]

    @property
    def ids(self) -> set[str]:
        return {str(attrs["id"]) for _, attrs in self.elements if "id" in attrs}

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.texts))


def page_of(run: Path, cluster: Cluster | None = None) -> Page:
    path = write_page(run, cluster)
    assert path == run / "report.html"
    return Page(path.read_text())


def data_of(run: Path) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', (run / "report.html").read_text(), re.DOTALL)
    assert found
    assert "window.hacked" not in found[1] or not re.search("[<>&]", found[1])  # nothing that could end the element
    return json.loads(found[1])


def test_everything_is_shown(run_dir: Path) -> None:
    page = page_of(run_dir)
    assert {
        "loss",
        "held-out",
        "samples",
        "evaluation",
        "experts",
        "optimizer",
        "machine",
        "corpus",
        "export",
        "ledger",
        "recipe",
    } <= page.ids
    for text in (
        "finished",
        "trial",
        "Mixture of 4 experts, 2 per token",
        "general (2.56k tokens) then anneal (1.28k tokens)",
        "1.5k",
        "31%",
        "2.5 GB",
        "−22% against xz",
        "On July 4, 1776,",
        "the people 60",
        "above chance",
        "at chance",
        "base says hello",
        "word count",
        "b could not be had: no network",
        "Bad step",
        "train.save_every: 10% to 5%",
        "Pretraining finished",
        "1.5e−6",
        "xz -9e 2.3",
    ):
        assert text in page.text, text
    assert len([one for one in page.of("figure") if "chart" in str(one["class"])]) >= 12
    assert sum(bool(one.get("aria-label")) for one in page.of("div") if "data-chart" in one) == len(page.of("figure"))
    assert len(page.of("figure")) == len(page.of("details")) - 1, "each has its numbers as a table; and there is the recipe"
    marks = {kind for chart in data_of(run_dir)["charts"].values() for _, kind, _ in chart["marks"]}
    assert marks == {"bad", "checkpoint", "resume", "recipe"}


def test_the_curve_is_the_record(run_dir: Path) -> None:
    page_of(run_dir)
    data = data_of(run_dir)
    (line,) = data["charts"]["pretrain-loss"]["lines"]
    assert (line["style"], line["run"]) == ("smooth", 0)
    recorded = {line["step"]: line["train/loss"] for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())}
    drawn = dict(zip(data["steps"][line["steps"]], line["values"], strict=True))
    assert (recorded.pop(20), drawn.pop(20)) == (None, None), "not finite: the line is interrupted"
    assert drawn == pytest.approx(recorded, rel=1e-4)
    assert data["charts"]["pretrain-loss"]["steps"] == [1, STEPS]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_cost(run_dir: Path, device: str) -> None:
    cluster = Cluster(name="two", tflops=1.0, memory_gib=1.0, dollars_per_device_hour=3.0, watts_per_device=500)
    for number, line in enumerate(lines := [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]):
        line["time"] = 1_800_000_000 + 60 * number + (100_000 if number >= 30 else 0)  # a long pause at the resume
        line["perf/elapsed_seconds"] = 60 * (number + 1 if number < 30 else number - 29)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ledger = [json.loads(text) for text in (run_dir / "ledger.jsonl").read_text().splitlines()]
    for event in ledger:
        event["time"] = 1_800_000_000 - 60 if event["event"] == "start" else lines[30]["time"] - 60
        event |= {"ranks": 8, "threads": 2, "device": device}
    (run_dir / "ledger.jsonl").write_text("".join(json.dumps(event) + "\n" for event in ledger))
    assert read_run(run_dir).pretrain.seconds == 60 * 60  # the pause is left out, the first step of each process is not
    text = page_of(run_dir, cluster).text
    assert "$24.00" in text  # 8 devices, one hour, 3 dollars
    assert ("16 core-hours" if device == "cpu" else "8 GPU-hours") + " at $3 per device and hour (two)" in text
    assert "4 kWh at 500 W per device" in text
    text = page_of(run_dir).text
    assert ("16 core-hours" if device == "cpu" else "8 GPU-hours") in text and "$" not in text.split("Cost of training")[1][:100]
    tree = read_json(run_dir / "resolved.json")
    write_json(run_dir / "resolved.json", tree | {"metrics": tree["metrics"] | {"dollars_per_device_hour": 0.5, "watts_per_device": 10}})
    assert "$4.00" in (text := page_of(run_dir).text) and "80 Wh at 10 W per device" in text


def test_a_chart_without_a_finite_value_is_a_sentence(run_dir: Path) -> None:
    """Wherever it stands, with one line or more, or as a heat map; beside a line with a finite value, others keep their place."""
    dead = ("train/loss", "validation/bits_per_byte", "experts/load_cv", "experts/load_cv/1", "experts/load_cv/2", "experts/load_max")
    path = run_dir / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**one, **{name: None for name in dead if name in one}}) + "\n" for one in records))
    figures = page_of(run_dir).figures
    told = {name for name, text in figures.items() if "Nothing to draw: no value has been finite." in text}
    assert told == {"pretrain-loss", "pretrain-bpb-overall", "pretrain-cv", "pretrain-cv-heat"}
    assert set(data_of(run_dir)["charts"]) == {name for name, text in figures.items() if "Numbers" in text} == set(figures) - told
    assert "busiest not finite" in figures["pretrain-ratio"]


def test_troubles_are_marked_and_told(run_dir: Path) -> None:
    with Ledger(run_dir / "ledger.jsonl") as ledger:
        limits = {"loss_limit": 4.0, "grad_norm": 1.0, "grad_norm_limit": 3.0, "in_a_row": 1, "batch": None}
        ledger.write("spike", stage="pretrain", step=11, loss=9.5, action="skip", **limits)
        ledger.write("rollback", stage="pretrain", step=12, to_step=5, skip=[8, 13], reason="2 spikes in a row")
        ledger.write("corruption", stage="pretrain", step=13, ranks=[3], certain=True, what="two results of one product differ")
        ledger.write("slow_rank", stage="pretrain", step=14, rank=5, what="arithmetic", seconds=0.5, median=0.2)
        ledger.write("stage_began", name="evaluate")
        ledger.write("stage_ended", name="evaluate", seconds=61.0)
    page = page_of(run_dir)
    told = {kind: (step, text) for step, kind, text in data_of(run_dir)["charts"]["pretrain-loss"]["marks"]}
    assert told["spike"] == (12, "spike of the loss or gradient norm (skip)")
    assert told["rollback"] == (13, "rolled back to step 5")
    assert told["corruption"] == (14, "silent corruption on rank 3")
    assert told["slow_rank"] == (14, "rank 5 is slow (arithmetic)")
    back = "step 13: back to step 5, without the data of steps 9 to 13"
    words = "loss 9.5, limit 4", back, "rank 3: two results", "500 ms against 200 ms", "took 1 min 01 s"
    for text in words:
        assert text in page.text, text


def test_what_was_measured_of_an_earlier_model_is_told(run_dir: Path) -> None:
    """A phase was added to a finished run: its figures are of the model before."""
    with Ledger(run_dir / "ledger.jsonl") as ledger:
        ledger.write("resume", stage="pretrain", step=STEPS, tokens=64 * STEPS, steps=STEPS + 20, planned_tokens=64 * (STEPS + 20))
    write_metrics(run_dir, STEPS + 1, STEPS + 10)
    stamp = read_json(run_dir / "checkpoints" / "stage.json")
    write_json(run_dir / "checkpoints" / "stage.json", stamp | {"done": False})
    page = page_of(run_dir)
    assert "4.48k of 5.12k tokens, step 70 of 80" in page.text
    assert "evaluation and export are of an earlier model" in page.text
    assert "the evaluation is of an earlier model" in page.text.split("Held-out bits per byte")[1]  # the tile
    assert page.text.count("Of an earlier model") == 3
    # the stage is done, but what the evaluation has read is not what is there
    write_json(run_dir / "checkpoints" / "stage.json", stamp)
    assert not read_run(run_dir).stale("evaluate")
    of = read_json(run_dir / "evaluate" / "stage.json") | {"inputs": {"checkpoints/": "0123456789abcdef"}}
    write_json(run_dir / "evaluate" / "stage.json", of)
    assert read_run(run_dir).stale("evaluate") and not read_run(run_dir).stale("export")
    assert read_run(run_dir).state == "stopped"


def test_the_curve_is_compared_with_what_is_of_the_same_text(run_dir: Path) -> None:
    page_of(run_dir)
    assert data_of(run_dir)["charts"]["pretrain-bpb-prose"]["levels"] == [[2.4, "l0"]]  # 1000 bytes: all of it is measured on the way
    results = read_json(run_dir / "evaluate" / "results.json")
    for model in results["models"].values():
        model["bits_per_byte"]["prose"]["bytes"] = 100_000
    write_json(run_dir / "evaluate" / "results.json", results)
    page = page_of(run_dir)
    assert not any(chart["levels"] for name, chart in data_of(run_dir)["charts"].items() if "bpb" in name)
    assert "on the same sample, at most 65.5k bytes of each domain" in page.text


def test_a_section_that_one_of_the_runs_has_is_null_in_another(run_dir: Path) -> None:
    run = read_run(run_dir)
    trees = ({"tune": None, "seed": 1}, {"tune": {"lr": 1.0, "data": {"x": 2}}, "seed": 1}, {"seed": 1})
    found = overview.comparison([replace(run, tree=tree) for tree in trees], None)["differences"]
    assert found == [("tune.lr", ["null", "1.0", "–"]), ("tune.data.x", ["null", "2", "–"])]


def test_runs_are_compared(run_dir: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run_dir, other)
    tree = read_json(other / "resolved.json")
    write_json(other / "resolved.json", tree | {"name": "other", "seed": 7})
    text = (other / "metrics.jsonl").read_text().replace('"optim/grad_norm":', '"was":')
    (other / "metrics.jsonl").write_text(text)
    path = write_page(run_dir, others=[other])
    assert path == run_dir / "comparison.html"
    page = Page(path.read_text())
    assert "comparison" in page.ids and re.search("seed ?1 ?7", page.text) and re.search("State ?finished ?finished", page.text)
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found
    charts = json.loads(found[1])["charts"]
    assert [line["run"] for line in charts["pretrain-loss"]["lines"]] == [0, 1]
    assert [line["run"] for line in charts["pretrain-norm"]["lines"]] == [0]  # the other has none


@pytest.mark.parametrize(
    "missing", ["resolved.json", "metrics.jsonl", "ledger.jsonl", "samples.jsonl", "corpus", "tokenizer", "evaluate", "export"]
)
def test_any_part_may_be_missing(run_dir: Path, missing: str) -> None:
    path = run_dir / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert "trial" in page_of(run_dir).text


@pytest.mark.parametrize(
    "name", ["resolved.json", "metrics.jsonl", "ledger.jsonl", "samples.jsonl", "corpus/report.json", "evaluate/results.json"]
)
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1, 2]\n", b"\xff\xfe\n", b'{"event": 7, "step": "x", "sources": null, "models": [1], "time": null}\n']
)
def test_any_file_may_be_broken(run_dir: Path, name: str, content: bytes) -> None:
    (run_dir / name).write_bytes(content)
    page_of(run_dir)


def test_every_prefix_of_the_records_makes_a_page(run_dir: Path) -> None:
    whole = {name: (run_dir / name).read_bytes() for name in ("metrics.jsonl", "ledger.jsonl", "samples.jsonl")}
    for part in range(20):
        for name, data in whole.items():
            (run_dir / name).write_bytes(data[: len(data) * part // 20])
        page_of(run_dir)


def test_states(run_dir: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    write_json(empty / "resolved.json", as_tree(recipe()))
    page = page_of(empty)
    assert "not started" in page.text
    assert "Nothing has been measured yet" in page.text
    assert read_run(empty).state == "not started"
    with RunLock(empty):
        write_json(empty / "corpus" / "stage.json", {"done": False})
        assert read_run(empty).state == "running"
    assert read_run(empty).state == "stopped"
    assert read_run(run_dir).state == "finished"
    write_json(run_dir / "export" / "stage.json", {"done": False})
    assert read_run(run_dir).state == "stopped"
    with RunLock(run_dir):
        assert read_run(run_dir).state == "running"
    (run_dir / "lock").write_text(json.dumps({"pid": 2**22 + 1, "host": os.uname().nodename, "since": 0}))  # above the largest pid
    assert read_run(run_dir).state == "stopped"
    with pytest.raises(UserError, match="is not a run directory"):
        write_page(tmp_path / "nowhere")


def test_a_folder_without_records_of_a_run_is_left_alone(run_dir: Path, tmp_path: Path) -> None:
    """It got an empty page in place of its own report.html."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "report.html").write_text("mine")
    for runs in ([own], [own, run_dir], [run_dir, own]):
        with pytest.raises(UserError, match="own has no records of a run: neither resolved"):
            write_page(runs[0], others=runs[1:])
    assert {path.name: path.read_text() for path in own.iterdir()} == {"report.html": "mine"}
    assert not (run_dir / "comparison.html").exists()
    write_json(own / "ablation.json", {})
    with pytest.raises(UserError, match=r"is an ablation and not a run; its page is .*/own/ablation\.html"):
        write_page(own)
    (own / "ledger.jsonl").write_text("")
    write_page(own)  # a copy of a part of a run


def test_why_it_stopped(run_dir: Path) -> None:
    write_json(run_dir / "export" / "stage.json", {"done": False})
    with Ledger(run_dir / "ledger.jsonl") as ledger:
        ledger.write("stopped", step=50, reason="bad steps in a row", in_a_row=10)
    assert "stopped: bad steps in a row" in page_of(run_dir).text


def test_time_to_go(run_dir: Path) -> None:
    with Ledger(run_dir / "ledger.jsonl") as ledger:
        ledger.write("start", stage="pretrain", steps=120, tokens=64 * 120)
    lines = [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line | {"perf/elapsed_seconds": 10 * line["step"]}) + "\n" for line in lines))
    write_json(run_dir / "export" / "stage.json", {"done": False})
    with RunLock(run_dir):
        text = page_of(run_dir).text
    assert "3.84k of 7.68k tokens, step 60 of 120" in text
    assert "10 min 00 s to go" in text  # 60 steps of 10 seconds
    assert "to go" not in page_of(run_dir).text  # stopped: nothing goes


def test_hostile_text_stays_text(run_dir: Path) -> None:
    write_samples(run_dir / "samples.jsonl", HOSTILE, HOSTILE)
    tree = read_json(run_dir / "resolved.json")
    write_json(run_dir / "resolved.json", tree | {"name": HOSTILE})
    with Ledger(run_dir / "ledger.jsonl") as ledger:
        ledger.write(HOSTILE, stage="pretrain", step=3, detail=HOSTILE)
        ledger.write("recipe_changed", allowed=[{"key": HOSTILE, "old": "1", "new": "2"}])
        ledger.write("resume", stage="pretrain", step=30, tokens=5)
        ledger.write("phase", stage="pretrain", phase=HOSTILE, step=45, sequence_length=32)
    results = read_json(run_dir / "evaluate" / "results.json")
    results["models"][HOSTILE] = results["models"].pop("base")
    results["references"]["how"][HOSTILE] = HOSTILE
    write_json(run_dir / "evaluate" / "results.json", results)
    report = read_json(run_dir / "corpus" / "report.json")
    report["sources"][0]["name"] = report["sources"][0]["license"] = HOSTILE
    write_json(run_dir / "corpus" / "report.json", report)
    text = (run_dir / "metrics.jsonl").read_text()
    (run_dir / "metrics.jsonl").write_text(
        text.replace("validation/prose/", "validation/" + json.dumps(HOSTILE.replace("/", "|"))[1:-1] + "/")
    )
    page = page_of(run_dir)
    assert len(page.of("script")) == 2
    assert not page.of("img")
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on")]
    assert "49" not in page.of("h1") and "{{ 7 * 7 }}" in page.text
    assert page.text.count("window.hacked=1") > 10
    assert any("window.hacked=1" in name for name in data_of(run_dir)["charts"]), "the script's data has it too, and nothing that ends them"
    assert any(HOSTILE in name for chart in data_of(run_dir)["charts"].values() for _, name in chart["phases"])


def test_every_class_that_is_styled_is_used() -> None:
    """A class under another spelling in the style sheet leaves its elements unstyled."""
    sources = [path for path in Path(pages.__file__).parent.iterdir() if path.suffix in (".html", ".js", ".py")]
    sources.append(Path(pages.__file__).parent / "uplot" / "uPlot.min.css")
    words = set(re.findall(r"[\w-]+", "".join(path.read_text(encoding="utf-8") for path in sources)))
    for sheet in Path(pages.__file__).parent.glob("*.css"):
        selectors = re.sub(r"\{[^{}]*\}", "{}", sheet.read_text(encoding="utf-8"))
        styled = set(re.findall(r"\.([a-z][\w-]*)", selectors))
        numbered = {name for name in styled if re.fullmatch(r"(is|part)-\w+|[cq]\d+", name)}  # the pages put these names together
        assert styled - numbered <= words, sheet.name


def test_it_needs_nothing_else(run_dir: Path) -> None:
    page = page_of(run_dir)
    assert all(str(attrs.get(name, "data:")).startswith(("data:", "#")) for _, attrs in page.elements for name in ("src", "href"))
    text = (run_dir / "report.html").read_text()
    styles = "".join(re.findall("<style>(.*?)</style>", text, re.DOTALL))
    assert styles and "url(" not in styles and "@import" not in styles
    policy = next(str(one["content"]) for one in page.of("meta") if one.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


def test_a_long_run_makes_a_page_of_the_same_size(run_dir: Path) -> None:
    page_of(run_dir)
    write_metrics(run_dir, 1, 4000)
    page_of(run_dir)
    shorter = (run_dir / "report.html").stat().st_size
    write_metrics(run_dir, 4001, 12_000)
    page_of(run_dir)
    longer = (run_dir / "report.html").stat().st_size
    assert longer < 1.25 * shorter < 1_500_000
    assert read_run(run_dir).pretrain.series["train/loss"].count == 11_999


def test_a_long_ledger_is_cut_in_the_middle(run_dir: Path) -> None:
    lines = [
        json.dumps({"time": 1e9 + n, "event": "checkpoint", "step": n, "path": "p", "bytes": 10, "metric": None, "seconds": 1.0})
        for n in range(1, 5000)
    ]
    (run_dir / "ledger.jsonl").write_text("\n".join(lines) + "\n")
    run = read_run(run_dir)
    assert len(run.events) == 300
    assert run.events_omitted == 4999 - 300
    assert len(run.pretrain.marks) <= 800
    assert run.events[0]["step"] == 1 and run.events[-1]["step"] == 4999
    assert "4,699 entries in the middle are left out" in page_of(run_dir).text


def test_samples_of_a_resumed_run_come_once(run_dir: Path) -> None:
    write_samples(run_dir / "samples.jsonl", "Hello", "first")
    data = (run_dir / "samples.jsonl").read_bytes()
    (run_dir / "samples.jsonl").write_bytes(data + data[: data.index(b"60")].rsplit(b"\n", 1)[0].split(b"\n")[3] + b"\n")  # step 40 again
    steps = [one["step"] for one in read_run(run_dir).pretrain.samples["Hello"]]
    assert steps == [10, 20, 30, 40]


def test_the_chart_library_is_the_published_one_and_travels_with_the_package(run_dir: Path) -> None:
    """uPlot as npm has it, with its license; a change of one byte, or another version without its checksums, is seen."""
    folder = Path(pages.__file__).parent / "uplot"
    origin = read_json(folder / "origin.json")
    assert (origin["package"], origin["license"]) == ("uplot", "MIT")
    assert {path.name for path in folder.iterdir()} == {*origin["sha256"], "origin.json"} and "LICENSE" in origin["sha256"]
    for name, expected in origin["sha256"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == expected, name
    code = (folder / "uPlot.iife.min.js").read_text(encoding="utf-8")
    assert f"(v{origin['version']})" in code and "</script" not in code
    page_of(run_dir)
    assert code in (run_dir / "report.html").read_text(encoding="utf-8")
    packaged = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["lmworks"]
    assert "pages/uplot/*" in packaged


def test_on_a_phone_each_cell_has_the_name_of_its_column(run_dir: Path) -> None:
    page = page_of(run_dir)
    cells = [str(one["data-label"]) for tag, one in page.elements if tag == "td" and "data-label" in one]
    assert {"base model", "tuned model", "xz -9e", "first", "lowest", "highest", "last"} <= set(cells)
