"""Every option, value and metric that a deployment names, compared with what the pinned version of its engine has.

The lists in `tests/recorded` were recorded from the engines (`tests/recorded/record.py`), so that a misspelling is found without them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
from test_sizing import GLM_355B, LLAMA_70B, source

from lmworks.deploy import engines, monitoring
from lmworks.deploy.deploy import plan_deployment
from lmworks.deploy.engines import ENGINES
from lmworks.deploy.monitoring import engine_metrics
from lmworks.deploy.request import _REASONING_FORMS, _TOOL_PARSERS, Launch
from lmworks.deploy.sizing import GB, SCENARIOS, Hardware, parse_gpus
from lmworks.deploy.source import Source
from lmworks.errors import UserError
from recorded.facts import facts

VERSIONS = {
    "vllm": f"vllm-{engines.VLLM_VERSION}",
    "sglang": f"sglang-{engines.SGLANG_VERSION}",
    "llama.cpp": f"llama.cpp-{engines._LLAMA_CPP_VERSION}",
}
DENSE = LLAMA_70B.model_copy(update={"num_hidden_layers": 4})
assert GLM_355B.moe is not None
EXPERTS = GLM_355B.model_copy(update={"num_hidden_layers": 4, "moe": GLM_355B.moe.model_copy(update={"n_routed_experts": 8})})
SOURCES: list[Source] = [
    source(DENSE), source(DENSE, 8, template=""), source(EXPERTS), source(EXPERTS, 8, mtp=0),
    source(DENSE, 4, template="<tool_call>{\"name\": <think> enable_thinking", dtype="float32"),
]  # fmt: skip
HARDWARE = [Hardware("cpu", 1, 400 * GB), *map(parse_gpus, ("h100", "8xh100", "8xh200", "8xb200", "8xmi300x"))]


def launches(engine: str) -> Iterator[tuple[Hardware, Launch]]:
    """How the engine is started for each model and machine that it can be, in turn for each purpose."""
    for number, (model, hardware) in enumerate(product(SOURCES, HARDWARE)):
        with suppress(UserError):
            yield hardware, plan_deployment(model, engine, list(SCENARIOS)[number % 3], hardware, context=8192).launch


@pytest.mark.parametrize("engine", VERSIONS)
def test_the_engine_has_every_option(engine: str) -> None:
    seen: set[str] = set()
    for hardware, launch in launches(engine):
        known = facts("sglang-0.5.14" if engine == "sglang" and hardware.amd else VERSIONS[engine])
        for flag in launch.flags:
            if flag.note:
                continue
            assert flag.name in known.env if flag.env else (wrong := known.wrong(flag.name, flag.value)) is None, wrong or flag.name
            seen.add(flag.name)
        kind, name = launch.key
        assert name in (known.env if kind == "env" else known.options)
        assert all(known.wrong(option, "x") is None for option in launch.model_option)
    assert {"vllm": {"--tensor-parallel-size", "--speculative-config", "--tool-call-parser", "VLLM_CPU_KVCACHE_SPACE"},
            "sglang": {"--tp-size", "--ep-size", "--speculative-num-steps", "--tool-call-parser"},
            "llama.cpp": {"--threads", "--n-gpu-layers", "--split-mode"}}[engine] <= seen  # fmt: skip


def test_the_pinned_image_for_amd_is_of_the_recorded_version() -> None:
    assert engines.SGLANG_AMD_VERSION == "0.5.14"


@pytest.mark.parametrize("version", [VERSIONS["vllm"], VERSIONS["sglang"], "sglang-0.5.14"])
def test_the_engine_has_every_parser(version: str) -> None:
    known, at = facts(version), 0 if version.startswith("vllm") else 1
    for names in _TOOL_PARSERS.values():
        assert known.wrong("--tool-call-parser", names[at]) is None
    for form in _REASONING_FORMS:
        assert known.wrong("--reasoning-parser", (form.vllm, form.sglang)[at]) is None


@pytest.mark.parametrize("version", [*VERSIONS.values(), "sglang-0.5.14"])
def test_the_engine_reports_every_metric(version: str) -> None:
    """Panels and alerts ask for names that the engine has, and for rates of counters and of parts of histograms alone."""
    engine = version.rpartition("-")[0]
    known, metrics = facts(version).metrics, engine_metrics(engine)
    expressions = [query for panel in metrics.panels for query in panel.queries.values()]
    expressions += [rule["expr"] for group in monitoring.alert_rules(engine, training=False)["groups"] for rule in group["rules"]]
    ours = re.compile(r"lmworks_\w+|up")
    for expression in expressions:
        bare = re.sub(r'"[^"]*"|\[[^\]]*\]|by \([^)]*\)', "", expression)  # without labels' values, ranges and groups
        bare = re.sub(r"\{[^}]*\}", "", bare)
        names = {name for name in re.findall(r"[a-zA-Z_][\w:]*", bare) if "_" in name or ":" in name or name == "up"}
        names -= {"histogram_quantile"}
        assert names, expression
        for name in names:
            assert ours.fullmatch(name) or name in known, f"{name} in {expression}"
        for name in re.findall(r"rate\(([\w:]+)", expression):
            assert known[name] in ("counter", "histogram"), name
        for name in re.findall(r"(?:sum|avg|max|min)\(([\w:]+)\)", expression):
            assert ours.fullmatch(name) or known[name] == "gauge", name


def test_the_built_in_server_has_every_option() -> None:
    from lmworks.cli.main import command_tree

    serve = command_tree().commands["serve"]
    options = {option for parameter in serve.params for option in parameter.opts}
    variables = {variable for parameter in serve.params for variable in [getattr(parameter, "envvar", None)] if variable}
    for _, launch in launches("lmworks"):
        assert {flag.name for flag in launch.flags if not flag.note} <= options
        assert launch.key == ("env", "LMWORKS_API_KEY") and "LMWORKS_API_KEY" in variables


def test_images_are_of_the_hardware() -> None:
    """AMD's GPUs get images of ROCm, B200 a CUDA that knows it, and no image is without a version."""
    for engine in ENGINES:
        for hardware, launch in launches(engine):
            images = re.findall(r"^FROM (\S+)", launch.containerfile, flags=re.M)
            assert images and all(re.search(r":v?\d", image) for image in images), images
            assert any("rocm" in image for image in images) == hardware.amd, (engine, hardware.device, images)
            for version in re.findall(r"nvidia/cuda:(\d+)\.(\d+)", launch.containerfile):
                assert tuple(map(int, version)) >= (12, 8)  # CUDA 12.8 is the first that compiles for compute capability 10.0


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[1] / "recorded").glob("*.txt")), ids=lambda path: path.stem)
def test_the_lists_are_lists(path: Path) -> None:
    known = facts(path.stem)
    assert len(known.options) > 100 and all(name.startswith("-") for name in known.options if name)
