"""Code that must parse, and Python that must run: real files of this machine, broken ones, and programs that mean harm."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from step_documents import outcomes_of, step_of

from lmworks import sandbox
from lmworks.corpus.document import Document, Drop, Outcome
from lmworks.corpus.parsing import KNOWN, error_share, python_error, suffix
from lmworks.errors import UserError
from lmworks.recipe.text_steps import Code
from lmworks.recipe.units import Seconds
from lmworks.sandbox import Limits, run_python

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


def verdict(outcome: Outcome) -> str:
    return "kept" if isinstance(outcome, Document) else outcome.reason


def judge(text: str, path: str, domain: str = "code", **options: object) -> str:
    return verdict(outcomes_of(step_of(Code(**options)), [text], domain=domain, origin=path)[0])


@pytest.mark.parametrize("kind", SOUND)
def test_sound_code_parses_and_prose_does_not(kind: str) -> None:
    if kind not in ("py", "json"):
        pytest.importorskip("tree_sitter", reason="no tree-sitter: pip install 'lmworks[code]'")
    assert error_share(SOUND[kind], kind) == 0
    assert judge(SOUND[kind], f"src/main.{kind}") == "kept"
    prose = "<?php\n" + PROSE if kind == "php" else PROSE
    assert judge(prose, f"src/main.{kind}", errors=0.0) == "unparsable"


def test_every_suffix_has_its_grammar() -> None:
    pytest.importorskip("tree_sitter", reason="no tree-sitter: pip install 'lmworks[code]'")
    for kind in KNOWN:
        assert 0 <= error_share("x", kind) <= 1


def test_the_share_of_errors_decides() -> None:
    pytest.importorskip("tree_sitter", reason="no tree-sitter: pip install 'lmworks[code]'")
    good = "".join(f"int f{number}(int x) {{ return x + {number}; }}\n" for number in range(50))
    share = error_share(good + "int broken( {\n", "c")
    assert 0 < share < 0.05
    assert judge(good + "int broken( {\n", "a.c") == "kept"
    assert judge(good + "int broken( {\n", "a.c", errors=0.0) == "unparsable"
    assert error_share("int f() { return 1", "c") > 0, "cut off in the middle"


def test_the_standard_library_compiles_and_its_halves_mostly_do_not() -> None:
    files = sorted(STDLIB.glob("*.py"))[:40]
    assert [judge(path.read_text("utf-8"), str(path)) for path in files] == ["kept"] * len(files)
    halves = [path.read_text("utf-8") for path in files]
    assert sum(python_error(text[: len(text) // 2]) is not None for text in halves) > 20


@pytest.mark.parametrize(
    "text", ["(" * 100_000, "[" * 50_000 + "]" * 50_000, "x = 1\0", "-" * 100_000 + "1", "a." * 100_000, "if x:\n" * 200, "\ud800"]
)
def test_hostile_code_is_only_dropped(text: str) -> None:
    assert judge(text, "a.py") == "unparsable"


@pytest.mark.parametrize("kind", ["c", "js", "json", "rs"])
def test_deep_nesting_crashes_no_parser(kind: str) -> None:
    pytest.importorskip("tree_sitter", reason="no tree-sitter: pip install 'lmworks[code]'")
    for text in ("(" * 100_000, "[" * 100_000 + "]" * 100_000, "{" * 100_000, "\x00" * 1000):
        assert 0 <= error_share(text, kind) <= 1


def test_paths_languages_and_domains() -> None:
    assert [suffix(path) for path in ("a/b.PY", "b.py:12", "Makefile", "x.tar.gz", "", "a.b/c")] == ["py", "py", "", "gz", "", ""]
    assert judge("whatever (", "Makefile") == "kept"
    assert judge("whatever (", "Makefile", unknown="drop") == "unknown_code"
    assert judge("not code (", "a.py", domain="docs") == "kept"
    outcome = outcomes_of(step_of(Code()), ["x = ("], domain="code", origin="shard.jsonl:7", facts={"path": "src/a.py"})[0]
    assert isinstance(outcome, Drop) and outcome.detail.startswith("line 1:") and outcome.facts["code_errors"] == 1.0


def test_a_missing_grammar_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmworks.corpus import parsing

    parsing._parser.cache_clear()
    monkeypatch.setitem(sys.modules, "tree_sitter", None)
    with pytest.raises(UserError, match=r"needs a grammar for \.go files: pip install 'lmworks\[code\]'"):
        error_share("package main", "go")
    parsing._parser.cache_clear()


@pytest.fixture(scope="module")
def confined() -> None:
    ran = run_python("pass", Limits(seconds=20))
    if ran.outcome == "refused":
        pytest.skip(f"this kernel has no sandbox: {ran.detail}")
    assert ran.outcome == "passed", ran.detail


@pytest.mark.usefixtures("confined")
@pytest.mark.parametrize(
    ("program", "outcome", "detail"),
    [
        ("print(sum(range(10)))", "passed", ""),
        ("import json, decimal, asyncio, sqlite3\nasyncio.run(asyncio.sleep(0))", "passed", ""),
        ("open('note', 'w').write('a')\nassert open('note').read() == 'a'", "passed", ""),
        ("import tempfile\ntempfile.NamedTemporaryFile().write(b'x')", "passed", ""),
        ("1 / 0", "failed", "ZeroDivisionError"),
        ("raise SystemExit(3)", "failed", "exit code 3"),
        ("import os\nos._exit(125)", "failed", "exit code 125"),
        ("input()", "failed", "EOFError"),
        ("import ctypes\nctypes.string_at(0)", "failed", "exit code"),
        ("x = bytearray(1 << 30)", "failed", "MemoryError"),
        ("import socket\nsocket.create_connection(('1.1.1.1', 80), 2)", "failed", "unreachable"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 22), 2)", "failed", "Error"),
        ("open('/etc/passwd').read()", "failed", "PermissionError"),
        ("import os\nos.listdir('/')", "failed", "PermissionError"),
        ("open('/proc/1/environ').read()", "failed", "Permission"),
        ("import subprocess\nsubprocess.run(['cat', '/etc/passwd'], check=True)", "failed", "CalledProcessError"),
        ("with open('big', 'wb') as out:\n    for _ in range(64): out.write(bytes(1 << 20))", "failed", "File too large"),
        ("import os\nopened = [os.open('/dev/null', 0) for _ in range(1000)]", "failed", "Too many open files"),
        ("import ctypes\nassert ctypes.CDLL(None).mount(b'none', b'/', None, 1 << 5, None) == 0", "failed", "AssertionError"),
    ],
)  # fmt: skip
def test_programs_in_the_sandbox(program: str, outcome: str, detail: str) -> None:
    ran = run_python(program, Limits(seconds=20, memory=512 << 20))
    assert ran.outcome == outcome, ran.detail
    assert detail in ran.detail


@pytest.mark.usefixtures("confined")
def test_nothing_outside_changes_and_no_secret_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "kept"
    kept.write_text("mine")
    tmp_path.chmod(0o777)
    kept.chmod(0o666)
    here, new = str(kept), str(tmp_path / "new")
    for act in (
        f"open({here!r}, 'w')",
        f"open({here!r}).read()",
        f"os.remove({here!r})",
        f"os.mkdir({new!r})",
        f"os.link({here!r}, 'mine')",
    ):
        ran = run_python(f"import os\n{act}", Limits(seconds=20))
        assert ran.outcome == "failed" and "Error" in ran.detail, act
    assert kept.read_text() == "mine" and [path.name for path in tmp_path.iterdir()] == ["kept"]
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    assert (
        run_python("import os\nassert 'OPENAI_API_KEY' not in os.environ\nassert len(os.environ) < 12", Limits(seconds=20)).outcome
        == "passed"
    )


@pytest.mark.usefixtures("confined")
def test_what_does_not_end_is_ended_with_all_that_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    for program in (
        "while True: pass",
        "import time\ntime.sleep(600)",
        "import signal, time\nsignal.pthread_sigmask(0, range(1, 32))\ntime.sleep(600)",
    ):
        assert run_python(program, Limits(seconds=1)).outcome == "timeout"
    stray = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)"
    assert run_python(stray, Limits(seconds=20)).outcome == "passed"
    running = subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(tmp_path) not in running
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("confined")
def test_the_step_runs_python() -> None:
    step = step_of(Code(run=True, seconds=Seconds.parse("20 s")))
    texts = ["assert 2 + 2 == 4", "assert 2 + 2 == 5", "import no_such_module_anywhere"]
    assert [verdict(one) for one in outcomes_of(step, texts, domain="code", origin="a.py")] == ["kept", "run_failed", "run_failed"]
    assert [verdict(one) for one in outcomes_of(step, texts[1:], domain="code", origin="a.pyi")] == ["kept", "kept"]


def test_without_a_sandbox_nothing_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    from lmworks.corpus.steps import code

    code._trial.cache_clear()
    with pytest.raises(UserError, match=r"run: true: the sandbox does not work here .the sandbox needs Linux.; leave run out"):
        step_of(Code(run=True))
    code._trial.cache_clear()
