"""The unit tests of a row, in the forms in which they are published, as one program that judges another.

| form                        | published by                  | becomes                                                     |
|-----------------------------|-------------------------------|-------------------------------------------------------------|
| a list of texts             | MBPP (`test_list`)            | one text, behind `test_imports` and `test_setup_code`       |
| `def check(candidate)`      | HumanEval, LeetCode           | a call with the row's `entry_point` at its end              |
| `def test_...()`            | pytest                        | a call of each; of classes without a base, of their methods |
| classes of `unittest`       |                               | run; `unittest.main()`, which would end the tests, is taken |
|                             |                               | out, and `pytest.main()` with it                            |

The program is also the module `solution` (KodCode). Tests that import what is not installed are passed by no program, and tests that call
and assert nothing by every one, so a row with such tests is refused. Whether calls judge is known only when
tests are run (`lmworks.train.rewards`): those that pass without a program judge none.
"""

from __future__ import annotations

import ast
import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from lmworks.train.data.row_columns import NoRow
from lmworks.untrusted.judged import PROGRAM

_BEFORE = ("test_imports", "test_setup_code")
_RUN_CASES = """
import unittest
_outcome = unittest.TestResult()
for _case in ({cases},):
    unittest.defaultTestLoader.loadTestsFromTestCase(_case).run(_outcome)
assert _outcome.testsRun and _outcome.wasSuccessful()
"""
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def runnable_tests(row: Mapping[str, Any]) -> str:
    """The column `tests` of a row as a program that raises where it finds a mistake. Raises `NoRow` if that tests nothing."""
    parts = [text for name in (*_BEFORE, "tests") for text in _texts(name, row.get(name))]
    try:
        with warnings.catch_warnings(action="ignore"):  # of Python about the row's own code
            body = _as_script(ast.parse("\n".join(parts)).body)
            if missing := _missing_packages(body):
                raise NoRow(f"no tests: they import {', '.join(missing)}, which is not installed here")
            calls = "\n".join(_missing_calls(body, row.get("entry_point")))
            if not calls and not any(isinstance(one, ast.Assert | ast.Call) for one in _executed(body)):
                raise NoRow("no tests: they execute no assert and no call")
            return f"{ast.unparse(ast.Module(body, []))}\n{calls}\n"
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, NoRow):
            raise
        raise NoRow(f"no tests: they are no Python ({error})") from None


def _texts(name: str, value: Any) -> list[str]:
    """The texts of a column. Lists and objects may be written as JSON."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, Mapping):
        raise NoRow(f"no tests: {name} is an object with {', '.join(map(str, value))}, and no Python")
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
        raise NoRow(f"no tests: {name} is neither text nor a list of texts")
    return list(found)


def _as_script(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements that a file of tests executes as a script, without those that leave the search for tests to a library: there is no
    file to search, and they end the process."""
    found = [inner for one in body for inner in (one.body if isinstance(one, ast.If) and _is_guard(one.test) else [one])]
    own = {one.name for one in found if isinstance(one, _Function)}
    return [one for one in found if not (isinstance(one, ast.Expr) and any(_is_runner(inner, own) for inner in ast.walk(one)))]


def _is_guard(test: ast.expr) -> bool:
    return ast.unparse(test) in ("__name__ == '__main__'", "'__main__' == __name__")


def _is_runner(node: ast.AST, own: set[str]) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    return name in ("unittest.main", "pytest.main") or (name == "main" and name not in own)


def _executed(nodes: list[ast.stmt]) -> Iterator[ast.AST]:
    """All that is executed when statements are, except what definitions execute: their decorators, defaults and bases."""
    stack: list[ast.AST] = [*nodes]
    while stack:
        node = stack.pop()
        if not isinstance(node, _Function | ast.ClassDef | ast.Lambda):
            yield node
            stack.extend(ast.iter_child_nodes(node))


def _missing_packages(body: list[ast.stmt]) -> list[str]:
    """What the tests import and this interpreter has not; an import in a `try` is left to it."""
    stack: list[ast.AST] = [*body]
    wanted = set()
    while stack:
        node = stack.pop()
        if isinstance(node, ast.ImportFrom):
            wanted.add("." * node.level + (node.module or ""))
        elif isinstance(node, ast.Import):
            wanted |= {alias.name for alias in node.names}
        elif not isinstance(node, ast.Try):
            stack.extend(ast.iter_child_nodes(node))
    roots = {name if name.startswith(".") else name.partition(".")[0] for name in wanted} - {PROGRAM}
    return sorted(name for name in roots if name.startswith(".") or (name not in sys.modules and find_spec(name) is None))


def _missing_calls(body: list[ast.stmt], entry_point: Any) -> Iterator[str]:
    """Calls of what the statements only define: `check`, functions that begin with test, and cases."""
    executed = _names(_executed(body))
    cases: list[str] = []
    for one in body:
        if isinstance(one, ast.ClassDef):
            bases = [ast.unparse(base) for base in one.bases]
            if any(base.endswith("TestCase") or base in cases for base in bases):
                cases.append(one.name)
            elif one.name.startswith("Test") and not bases:
                yield from _methods(one)
        elif isinstance(one, _Function) and (one.name == "check" or one.name.startswith("test")):
            takes = _required(one)
            if one.name in executed or (takes and any(one.name in _names(ast.walk(other)) for other in body if other is not one)):
                continue  # it is called, or is part of what is
            if takes == ["candidate"] or (one.name == "check" and len(takes) == 1):
                yield f"{one.name}({_expression(entry_point)})"
            else:
                yield _call(one, one.name, takes)
    if cases:
        yield _RUN_CASES.format(cases=", ".join(cases))


def _methods(case: ast.ClassDef) -> Iterator[str]:
    """Calls of pytest's methods of tests, each of an object of its own."""
    methods = [one for one in case.body if isinstance(one, _Function)]
    setup = [one for one in methods if one.name == "setup_method"]
    for one in methods:
        if one.name.startswith("test"):
            yield f"_case = {case.name}()"
            yield from (_call(before, f"_case.{before.name}", _required(before)[1:]) for before in setup)
            yield _call(one, f"_case.{one.name}", _required(one)[1:])


def _call(function: _Function, name: str, takes: list[str]) -> str:
    if isinstance(function, ast.AsyncFunctionDef):
        raise NoRow(f"no tests: {function.name} is asynchronous")
    if takes:
        raise NoRow(f"no tests: {function.name} is only defined, and takes {', '.join(takes)}")
    return f"{name}()"


def _required(function: _Function) -> list[str]:
    """The parameters that a call must give."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    named = [one for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default is None]
    return [one.arg for one in (*positional[: len(positional) - len(given.defaults)], *named)]


def _names(nodes: Iterator[ast.AST]) -> set[str]:
    return {one.id for one in nodes if isinstance(one, ast.Name)}


def _expression(entry_point: Any) -> str:
    """The function that is tested: a name, or LeetCode's `Solution().name`."""
    if not isinstance(entry_point, str) or not entry_point.strip():
        raise NoRow("no tests: they only define a check of a candidate, and the row has no entry_point that names it")
    return ast.unparse(ast.parse(entry_point.strip(), mode="eval"))
