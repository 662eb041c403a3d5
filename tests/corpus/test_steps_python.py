"""Steps of the user's own: what works, and the one line for each thing that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from step_documents import outcomes_of, step_of

from lmworks.corpus.document import Document, Drop
from lmworks.corpus.transform import steps
from lmworks.errors import UserError
from lmworks.recipe.schema.steps import Python

EXAMPLE = "\n".join(line[4:] for line in (steps.__doc__ or "").split("\n") if line.startswith("    ") or not line)


def step_in(folder: Path, code: str, function: str = "mine", **options: Any) -> Any:
    (folder / "own.py").write_text(code)
    return step_of(Python(file="own.py", function=function, options=options), folder)


def refusal(folder: Path, code: str, function: str = "mine", **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        outcomes_of(step_in(folder, code, function, **options), ["a text"])
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    assert EXAMPLE.count("\n") < 15
    step = step_in(tmp_path, EXAMPLE, "few_digits", most=0.5)
    assert (step.name, step.makes, step.statistics) == ("few_digits", ("digits",), ("digits",))
    kept, dropped = outcomes_of(step, ["abc 1", "12345 a"])
    assert isinstance(kept, Document) and kept.facts["digits"] == 0.2
    assert isinstance(dropped, Drop) and (dropped.reason, dropped.detail) == ("digits", "71%")


def test_a_name_for_the_report_and_a_function_without_declaration(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def mine(document):\n    return document.with_text(document.text.upper())\n")
    step = step_of(Python(file="own.py", function="mine", name="loud"), tmp_path)
    assert (step.name, step.makes) == ("loud", ())
    assert outcomes_of(step, ["a"])[0].text == "A"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("code", "options", "message"),
    [
        ("def other(document): return document", {}, "has no function 'mine'"),
        ("mine = 3", {}, "has no function 'mine'"),
        ("def mine(document: return", {}, "cannot be imported: SyntaxError"),
        ("import no_such_module", {}, "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("1 / 0", {}, "cannot be imported: ZeroDivisionError"),
        ("def mine(document): return document", {"most": 1}, "unexpected keyword argument 'most'"),
        ("def mine(document, most): return document", {}, "missing a required argument: 'most'"),
        ("def mine(document): return None", {}, "returned NoneType for web/0/0; it must return a Document, Drop"),
        (
            "def mine(document): return document.text[1000]",
            {},
            "failed on document web/0/0 (file.txt): IndexError: string index out of range",
        ),
        ("def mine(document): raise ValueError('a\\nb')", {}, "failed on document web/0/0 (file.txt): ValueError: a b"),
    ],
)
def test_each_mistake_has_its_line(tmp_path: Path, code: str, options: dict[str, Any], message: str) -> None:
    line = refusal(tmp_path, code, **options)
    assert message in line and "own.py" in line and "mine" in line


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere.py is not a Python file; corpus.steps names it as the file of the step 'mine'"):
        step_of(Python(file="nowhere.py", function="mine"), tmp_path)


def test_the_cause_is_kept_for_debugging(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        outcomes_of(step_in(tmp_path, "def mine(document): return 1 / 0"), ["a"])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
