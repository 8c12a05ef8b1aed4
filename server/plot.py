"""Bars and curves as SVG, without a library: what `octavo bench` and `octavo plan` draw.

Path("p.svg").write_text(document(bars("TTFT p95", [("paged", [120.0]), ("static", [900.0])], unit="ms")))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import takewhile

COLOURS = ("#2f62c9", "#c2601f", "#3f8f5b", "#8a4fb0")
HEAD = 40  # pixels: a panel's title
LEFT, LONGEST, BAR, GAP = 120, 380, 17, 9  # pixels: where bars begin, their longest, one with its space, between groups
CURVE_WIDTH, CURVE_HEIGHT = 400, 220


@dataclass(frozen=True)
class Panel:
    """One picture: SVG elements and the room that they take, in pixels."""

    body: str
    width: float
    height: float


def document(*panels: Panel) -> str:
    """An SVG file with the panels side by side."""
    placed, x = "", 0.0
    for panel in panels:
        placed += f'<g transform="translate({x:.1f} 0)">{panel.body}</g>'
        x += panel.width
    height = max(panel.height for panel in panels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{x:.0f}" height="{height:.0f}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>{placed}</svg>\n'
    )


def bars(
    title: str,
    groups: Sequence[tuple[str, Sequence[float]]],
    *,
    legend: Sequence[str] = (),
    top: float | None = None,
    shown: Callable[[float], str] = "{:.1f}".format,
) -> Panel:
    """Horizontal bars: for each group its name and a bar for each value, in the order of `legend`.

    `top` is the value of the longest bar possible; without it each group is scaled by its own largest value.
    """
    parts, y = [_text(8, 18, title, size=14)], float(HEAD)
    for i, name in enumerate(legend):
        parts += [_rect(LEFT, y - 10, 10, COLOURS[i]), _text(LEFT + 16, y, name)]
        y += BAR
    for name, values in groups:
        longest = (max(values, default=0.0) if top is None else top) or 1.0
        parts.append(_text(8, y + 11, name))
        for i, value in enumerate(values):
            length = LONGEST * value / longest
            parts += [_rect(LEFT, y, length, COLOURS[i], BAR - 3), _text(LEFT + length + 6, y + 11, shown(value))]
            y += BAR
        y += GAP
    return Panel("".join(parts), LEFT + LONGEST + 100, y)


def curves(
    title: str, lines: Sequence[tuple[str, Iterable[tuple[float, float]]]], *, right: float, top: float, x: str, y: str
) -> Panel:
    """Lines of points up to (`right`, `top`), each until it leaves at the top. `x` and `y` say what those two are."""
    left, bottom = 20, HEAD + CURVE_HEIGHT
    parts = [
        _text(left, 18, title, size=14),
        f'<path d="M{left} {HEAD}V{bottom}H{left + CURVE_WIDTH}" fill="none" stroke="black"/>',
        _text(left, bottom + 16, "0"),
        _text(left + CURVE_WIDTH, bottom + 16, x, anchor="end"),
        _text(left + 6, HEAD + 10, y),
    ]
    for i, (name, line) in enumerate(lines):
        points = [(left + CURVE_WIDTH * a / right, bottom - CURVE_HEIGHT * b / top) for a, b in line]
        inside = [*takewhile(lambda point: point[1] >= HEAD, points)]
        inside += [(a, float(HEAD)) for a, _ in points[len(inside) : len(inside) + 1]]
        if inside:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in inside)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[i]}" stroke-width="2"/>')
            parts.append(_text(inside[-1][0], inside[-1][1] + 14, name, fill=COLOURS[i], anchor="end"))
    return Panel("".join(parts), CURVE_WIDTH + 60, bottom + 30)


def _rect(x: float, y: float, width: float, fill: str, height: float = 10) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"/>'


def _text(x: float, y: float, text: str, *, size: int = 11, fill: str = "black", anchor: str = "start") -> str:
    style = f'font-size="{size}" fill="{fill}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
