"""Draw docs/figures/house.svg, the stages and the rooms: python docs/house.py

The stages are those of the code, and the rooms those of the table in docs/architecture.md, which a test holds to the imports.
"""

from __future__ import annotations

import re
from pathlib import Path

from lmworks.run.stages import STAGES

DOCS = Path(__file__).resolve().parent
FIGURE = DOCS / "figures" / "house.svg"

_WIDTH, _MARGIN, _GAP = 1000, 40, 8  # pixels
_INSIDE = _WIDTH - 2 * _MARGIN
_DARK, _GRAY, _PALE = "#1f2933", "#52606d", "#e4e7eb"
_FONT = "system-ui, -apple-system, Segoe UI, Roboto, sans-serif"


def rooms(page: str) -> dict[str, set[str]]:
    """Room -> rooms that it may import, as the table of the page says. "all above" means every earlier row."""
    allowed: dict[str, set[str]] = {}
    for name, may in re.findall(r"^\| `(\w+)/` \|.*\| ([^|]*) \|$", page, flags=re.M):
        above, _, exceptions = may.partition(" except ")
        named = set(allowed) if above == "all above" else set(re.findall(r"`(\w+)`", above))
        allowed[name] = named - set(re.findall(r"`(\w+)`", exceptions))
        assert allowed[name] <= set(allowed), f"{name} may import something below it in the table"
    return allowed


def shared(page: str) -> list[str]:
    """The file and the rooms that any room may import, as the page lists them."""
    return re.findall(r"`(\w+)(?:\.py|/)`", page.split("The base is")[1].split("Any package")[0])


def floors(allowed: dict[str, set[str]]) -> list[list[str]]:
    """The rooms by floor, the lowest first: each room stands as low as the rooms that it may import let it."""
    height: dict[str, int] = {}
    for name, below in allowed.items():
        height[name] = 1 + max((height[room] for room in below), default=-1)
    return [[name for name, at in height.items() if at == floor] for floor in range(max(height.values()) + 1)]


def _text(x: float, y: float, text: str, size: float = 14, color: str = _DARK, weight: int = 400, anchor: str = "middle") -> str:
    style = f'font-size="{size:g}" font-weight="{weight}" text-anchor="{anchor}" fill="{color}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{text}</text>'


def _row(y: float, height: float, names: list[str], fill: str, size: float = 14, weight: int = 600) -> list[str]:
    width = (_INSIDE - _GAP * (len(names) - 1)) / len(names)
    lines = []
    for place, name in enumerate(names):
        x = _MARGIN + place * (width + _GAP)
        lines.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" rx="4" fill="{fill}"/>')
        lines.append(_text(x + width / 2, y + height / 2 + size / 3, name, size, weight=weight))
    return lines


def draw(page: str) -> str:
    """The figure as SVG."""
    title = "The stages of a run, and the packages of the source tree"
    lines = [_text(_MARGIN, 44, "Stages", 18, weight=700, anchor="start")]
    lines.append(_text(_MARGIN + 76, 44, "from left to right; each writes the folder below its name", 13, _GRAY, anchor="start"))
    lines += _row(62, 40, [stage.name for stage in STAGES], "#d7e6f1")
    width = (_INSIDE + _GAP) / len(STAGES)
    lines += [_text(_MARGIN + (place + 0.5) * width - _GAP / 2, 124, f"{stage.folder}/", 12.5, _GRAY) for place, stage in enumerate(STAGES)]
    lines.append(_text(_MARGIN, 176, "Packages", 18, weight=700, anchor="start"))
    lines.append(_text(_MARGIN + 100, 176, "a package imports only from the rows below its own", 13, _GRAY, anchor="start"))
    y = 194
    floor = shared(page)
    upper = {name: below - set(floor) for name, below in rooms(page).items() if name not in floor}
    for names in reversed(floors(upper)):
        lines += _row(y, 32, names, "#f6e3cf")
        y += 40
    lines += _row(y, 24, floor, _PALE, size=12, weight=400)
    lines.append(_text(_MARGIN, y + 44, "what every package may import", 13, _GRAY, anchor="start"))
    y += 32
    height = y + 36
    view = f'viewBox="0 0 {_WIDTH} {height}" role="img" aria-labelledby="title"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {view} font-family="{_FONT}">'
    background = f'<rect width="{_WIDTH}" height="{height}" rx="10" fill="#ffffff"/>'
    return "\n".join([head, f'<title id="title">{title}</title>', background, *lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    FIGURE.write_text(draw((DOCS / "architecture.md").read_text(encoding="utf-8")), encoding="utf-8")
