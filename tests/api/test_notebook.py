"""docs/notebook.ipynb, cell by cell in one namespace, as a kernel executes it.

Not with nbclient: it starts a kernel and needs twenty packages, and the notebook has no magic commands, which alone need one.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lmworks

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"


def execute(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """The names after the last cell, and what each code cell shows: the value of its last expression."""
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["nbformat"] == 4
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for number, cell in enumerate(document["cells"]):
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == [] and cell["execution_count"] is None, "outputs are not kept: they would be those of another version"
        body = ast.parse("".join(cell["source"]), f"cell {number}").body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), f"cell {number}", "exec"), names)
        shown.append(eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names) if last is not None else None)  # type: ignore[attr-defined]
    return names, shown


def test_the_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names, shown = execute(NOTEBOOK)
    assert names["run"].stages == ["corpus", "tokenizer", "shards", "pretrain"]
    assert (tmp_path / "runs" / "notebook" / "metrics.jsonl").exists()
    assert names["planned"].refusals == () and names["planned"].seconds > 0
    losses = names["table"]["train/loss"]
    assert losses and losses[-1] < losses[0]
    assert "rows, 3 columns" in names["table"]._repr_html_()
    assert names["batch"].text(0)[:50] in capsys.readouterr().out
    assert "texts.jsonl" in names["batch"].documents[0].documents[0].origin
    assert names["completion"].tokens and isinstance(names["completion"].text, str)
    assert [state.shape for state in names["states"]] == [(names["states"][0].shape[0], 32)] * 3
    assert isinstance(names["model"], lmworks.Model) and torch.isfinite(names["states"][-1]).all()
    assert "".join(shown[-2]) == "The try statement"
    assert names["losses"] == losses[:6] and shown[-1][-1] == "step-00000006" and (names["saved"] / "meta.json").is_file()
    assert shown[-1][2] == names["validated"]["validation/bits_per_byte"] > 0 and names["done"].bad == ""
    assert names["restored"] == names["saved"] and names["session"].step == 6
