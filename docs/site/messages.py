"""The page of error messages: every text of a `UserError` in the sources, each with the page that explains its subject.

Values that a message fills in are shown as an ellipsis. The page is made with the site, so that a search for a line of an error finds it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "src" / "lmworks"
# Room of the sources: the subject, and the pages that explain it.
SUBJECTS = {
    "recipe": ("Recipes", "recipe/README.md", "changes.md"),
    "init": ("First recipe", "own-data.md"), "run": ("Runs", "running.md"), "plan": ("Plans", "sizing.md"),
    "preflight": ("Checks before a run", "running.md"), "profile": ("Profiles", "running.md"),
    "corpus": ("Corpus", "own-data.md", "quality.md"),
    "tokenizer": ("Tokenizer and chat templates", "existing-models.md", "tuning.md"),
    "shards": ("Token files and batches", "data-order.md"), "model": ("Model", "recipe/model.md"),
    "optim": ("Optimizer", "recipe/optimizer.md"), "parallel": ("Layouts", "running.md"),
    "train": ("Training stages", "tuning.md", "tune-and-align.md"), "launch": ("Launching", "running.md"),
    "host": ("Machines", "install.md"), "checkpoint": ("Checkpoints", "checkpoints.md"), "watch": ("Stops and faults", "running.md"),
    "metrics": ("Metrics", "running.md"), "weights": ("Models of others", "existing-models.md"),
    "evaluate": ("Evaluation", "evaluation.md"), "verify": ("Answers", "evaluation.md"), "ablate": ("Ablations", "ablations.md"),
    "ladder": ("Ladders of runs", "sizing.md"), "export": ("Export", "serving.md"), "quantize": ("Quantization", "quantizing.md"),
    "serve": ("Server and chat", "serving.md"), "inference": ("Generation", "serving.md"), "deploy": ("Deployments", "deploying.md"),
    "handover": ("Handover", "handover.md"), "pages": ("Pages of a run", "running.md"), "untrusted": ("Untrusted programs", "trust.md"),
    "io": ("Files", "running.md"), "api": ("Python API", "python.md"), "cli": ("Options of commands", "running.md"),
    "ui": ("Terminal", "running.md"), "text": ("Text", "own-data.md"),
}  # fmt: skip
_YIELD_MESSAGES = ("recipe/checks.py",)  # these yield (keys, message), of which `lmworks.recipe.load` makes the error


def _text(node: ast.expr) -> str:
    """The constant parts of an expression that makes a message; the others as an ellipsis."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "…"


def messages(room: str) -> Iterator[str]:
    """The messages of one room, in the order of its files."""
    for path in sorted((SOURCES / room).rglob("*.py")):
        yielded = str(path.relative_to(SOURCES)) in _YIELD_MESSAGES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "UserError" and node.args:
                text = _text(node.args[0])
            elif yielded and isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple):
                text = _text(node.value.elts[-1])
            elif yielded and isinstance(node, ast.Return) and isinstance(node.value, ast.JoinedStr):
                text = _text(node.value)
            else:
                continue
            if text.strip("…:;,. "):
                yield text


def page() -> str:
    """The page as Markdown, with links as in docs/."""
    rooms = sorted({path.parent.relative_to(SOURCES).parts[0] for path in SOURCES.rglob("*.py") if path.parent != SOURCES})
    parts = [
        "# Error messages\n\nEvery error that you can cause or mend is one line that names what to do. This page lists them by subject; … "
        "stands for a value. `--debug` adds the traceback, and [Troubleshooting](troubleshooting.md) treats what has no message.\n"
    ]
    for room in [*(room for room in SUBJECTS if room in rooms), *(room for room in rooms if room not in SUBJECTS)]:
        found = sorted(set(messages(room)), key=lambda text: text.lstrip("…: ").lower())
        if found:
            subject, *pages = SUBJECTS.get(room, (room.capitalize(),))
            explained = ", ".join(f"[{_title(name)}]({name})" for name in pages if (SOURCES.parents[1] / "docs" / name).exists())
            lines = "\n".join(" ".join(text.split()) for text in found)
            parts.append(f"## {subject}\n\nExplained in: {explained or 'the message'}.\n\n```messages\n{lines}\n```\n")
    return "\n".join(parts)


def _title(name: str) -> str:
    return (SOURCES.parents[1] / "docs" / name).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
