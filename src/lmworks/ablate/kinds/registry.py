"""The kinds of ablations: every file of this folder that defines one."""

from __future__ import annotations

import inspect
from functools import cache
from importlib import import_module
from pathlib import Path

from lmworks.ablate.kinds.base import Ablation


@cache
def kinds() -> dict[str, type[Ablation]]:
    """The types of ablation files, by the value of `kind`; the one without a kind first."""
    found: dict[str, type[Ablation]] = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        module = import_module(f"{__package__}.{path.stem}")
        for value in vars(module).values():
            if inspect.isclass(value) and issubclass(value, Ablation) and value is not Ablation and value.__module__ == module.__name__:
                found[value.model_fields["kind"].default] = value
    return dict(sorted(found.items(), key=lambda item: item[0] != "arms"))


def table() -> str:
    """The keys of all kinds as Markdown, for docs/ablations.md."""
    common = Ablation.model_fields
    lines = [_head(), *(_row(name, field) for name, field in common.items() if name != "kind")]
    for name, kind in kinds().items():
        own = {key: field for key, field in kind.model_fields.items() if key not in common}
        text = " ".join((kind.__doc__ or "").split())
        lines += ["", f"#### `kind: {name}`", "", text, "", _head(), *(_row(key, field) for key, field in own.items())]
    return "\n".join(lines)


def _head() -> str:
    return "| key | default | meaning |\n|---|---|---|"


def _row(name: str, field: object) -> str:
    default, needed = getattr(field, "default", None), getattr(field, "is_required", lambda: False)()
    factory = getattr(field, "default_factory", None)
    value = factory() if factory else default
    shown = "required" if needed else "" if value is None or value in ([], {}) else f"`{value}`"
    return f"| `{name}` | {shown} | {getattr(field, 'description', '')} |"


if __name__ == "__main__":
    print(table())
