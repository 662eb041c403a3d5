"""Code that must parse, and Python that must run: real files of this machine, and broken ones."""

from __future__ import annotations

import sys
import sysconfig
from contextlib import closing
from pathlib import Path

import pytest
from step_documents import outcomes_of, step_of

from lmworks.corpus.document import Document, Drop, Outcome
from lmworks.corpus.transform import checks
from lmworks.corpus.transform.checks import KNOWN, parse_code, suffix
from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.recipe.schema.steps import Code
from lmworks.recipe.schema.units import Seconds
from lmworks.untrusted.limited_process import LimitedProcess
from lmworks.untrusted.sandbox import Limits, run_python
from patience import PATIENCE

STDLIB = Path(sysconfig.get_path("stdlib"))
SOUND = {
    "sh": "#!/bin/sh\nfor name in a b; do\n  echo \"$name\"\ndone\n",
    "c": "#include <stdio.h>\nint main(void) {\n  printf(\"%d\\n\", 1);\n  return 0;\n}\n",
    "cpp": "#include <vector>\ntemplate <class T> T first(const std::vector<T>& v) { return v.at(0); }\n",
    "cs": "class A {\n  static void Main() { System.Console.WriteLine(1); }\n}\n",
    "css": "body { color: red; }\na:hover { color: blue; }\n",
    "go": "package main\n\nfunc main() {\n\tprintln(1)\n}\n",
    "java": "class A {\n  public static void main(String[] args) { System.out.println(1); }\n}\n",
    "js": "const f = async (x) => {\n  return x + 1;\n};\n",
    "json": '{"a": [1, 2, {"b": null}]}',
    "php": "<?php\nfunction f($x) { return $x + 1; }\n",
    "py": "def f(x):\n    return x + 1\n",
    "rb": "def f(x)\n  x + 1\nend\n",
    "rs": "fn main() {\n    println!(\"{}\", 1);\n}\n",
    "ts": "function f(x: number): number {\n  return x + 1;\n}\n",
    "tsx": "const A = (p: {x: number}) => <b>{p.x}</b>;\n",
}  # fmt: skip
PROSE = "It was a bright cold day in April, and the clocks were striking thirteen; nobody (not even he) knew why.\n" * 3


def outcome_text(outcome: Outcome) -> str:
    return "kept" if isinstance(outcome, Document) else outcome.reason


def outcome_of_code(text: str, path: str, domain: str = "code", **options: object) -> str:
    return outcome_text(outcomes_of(step_of(Code(**options)), [text], domain=domain, origin=path)[0])


@pytest.mark.parametrize("kind", SOUND)
def test_sound_code_parses_and_prose_does_not(kind: str) -> None:
    if kind not in ("py", "json"):
        pytest.importorskip("tree_sitter", reason="no tree-sitter: pip install 'lmworks[code]'")
    assert parse_code(SOUND[kind], kind).share == 0
    assert outcome_of_code(SOUND[kind], f"src/main.{kind}") == "kept"
    prose = "<?php\n" + PROSE if kind == "php" else PROSE
    assert outcome_of_code(prose, f"src/main.{kind}", max_error_fraction=0.0) == "unparsable"


def test_every_suffix_has_its_grammar() -> None:
    pytest.importorskip("tree_sitter", reason="no tree-sitter: pip install 'lmworks[code]'")
    for kind in KNOWN:
        assert 0 <= parse_code("x", kind).share <= 1


def test_the_share_of_errors_decides() -> None:
    pytest.importorskip("tree_sitter", reason="no tree-sitter: pip install 'lmworks[code]'")
    good = "".join(f"int f{number}(int x) {{ return x + {number}; }}\n" for number in range(50))
    share = parse_code(good + "int broken( {\n", "c").share
    assert 0 < share < 0.05
    assert outcome_of_code(good + "int broken( {\n", "a.c") == "kept"
    assert outcome_of_code(good + "int broken( {\n", "a.c", max_error_fraction=0.0) == "unparsable"
    assert parse_code("int f() { return 1", "c").share > 0, "cut off in the middle"


def test_the_standard_library_compiles_and_its_halves_mostly_do_not() -> None:
    files = sorted(STDLIB.glob("*.py"))[:40]
    assert [outcome_of_code(path.read_text("utf-8"), str(path)) for path in files] == ["kept"] * len(files)
    halves = [path.read_text("utf-8") for path in files]
    assert sum(bool(parse_code(text[: len(text) // 2], "py").share) for text in halves) > 20


@pytest.mark.parametrize(
    "text", ["(" * 100_000, "[" * 50_000 + "]" * 50_000, "x = 1\0", "-" * 100_000 + "1", "a." * 100_000, "if x:\n" * 200, "\ud800"]
)
def test_hostile_code_is_only_dropped(text: str) -> None:
    assert outcome_of_code(text, "a.py") == "unparsable"


@pytest.mark.parametrize("kind", ["c", "js", "json", "rs"])
def test_deep_nesting_crashes_no_parser(kind: str) -> None:
    pytest.importorskip("tree_sitter", reason="no tree-sitter: pip install 'lmworks[code]'")
    for text in ("(" * 100_000, "[" * 100_000 + "]" * 100_000, "{" * 100_000, "\x00" * 1000):
        assert 0 <= parse_code(text, kind).share <= 1


@pytest.mark.parametrize("kind", ["cpp", "py"])
def test_code_that_fills_the_memory_is_only_dropped(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both take many times their length to parse; the limit is set low, so that little is enough."""
    if kind == "cpp":
        pytest.importorskip("tree_sitter", reason="no tree-sitter: pip install 'lmworks[code]'")
    with closing(LimitedProcess("lmworks.corpus.transform.checks:parser", PATIENCE, 64 << 20)) as parser:
        monkeypatch.setattr(checks, "_parser", parser)
        hostile = "a<" * 30_000 if kind == "cpp" else "a\n" * 200_000
        assert outcome_of_code(hostile, f"a.{kind}") == "unparsable"
        assert outcome_of_code(SOUND[kind], f"a.{kind}") == "kept"


def test_code_that_takes_for_ever_to_parse_is_only_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(LimitedProcess("lmworks.corpus.transform.checks:parser", 0.3, 2 << 30)) as parser:
        monkeypatch.setattr(checks, "_parser", parser)
        assert parse_code("a\n" * 3_000_000, "py") == (1.0, "parsing it takes too much time")


def test_paths_languages_and_domains() -> None:
    assert [suffix(path) for path in ("a/b.PY", "b.py:12", "Makefile", "x.tar.gz", "", "a.b/c")] == ["py", "py", "", "gz", "", ""]
    assert outcome_of_code("whatever (", "Makefile") == "kept"
    assert outcome_of_code("whatever (", "Makefile", unknown="drop") == "unknown_code"
    assert outcome_of_code("not code (", "a.py", domain="docs") == "kept"
    outcome = outcomes_of(step_of(Code()), ["x = ("], domain="code", origin="shard.jsonl:7", facts={"path": "src/a.py"})[0]
    assert isinstance(outcome, Drop) and outcome.detail.startswith("line 1:") and outcome.facts["code_errors"] == 1.0


def test_a_missing_grammar_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    checks._grammar.cache_clear()
    monkeypatch.setitem(sys.modules, "tree_sitter", None)
    with pytest.raises(UserError, match=r"needs a grammar for \.go files: pip install 'lmworks\[code\]'"):
        parse_code("package main", "go")
    checks._grammar.cache_clear()


def test_the_step_runs_python() -> None:
    if (ran := run_python("pass", Limits(seconds=PATIENCE))).outcome == "refused":
        pytest.skip(ran.detail)
    step = step_of(Code(run=True, timeout=Seconds.parse("20 s")))
    texts = ["assert 2 + 2 == 4", "assert 2 + 2 == 5", "import no_such_module_anywhere"]
    assert [outcome_text(one) for one in outcomes_of(step, texts, domain="code", origin="a.py")] == ["kept", "run_failed", "run_failed"]
    assert [outcome_text(one) for one in outcomes_of(step, texts[1:], domain="code", origin="a.pyi")] == ["kept", "kept"]


def test_without_a_sandbox_nothing_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(machine.VARIABLE, "sandbox=no")
    from lmworks.corpus.transform import steps

    steps._trial.cache_clear()
    with pytest.raises(UserError, match=r"run: true: the sandbox does not work here .this machine has none.; leave run out"):
        step_of(Code(run=True))
    steps._trial.cache_clear()
