"""The plots: every value has a bar of its length, every curve its points, every word is safe in XML."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from server.plot import CURVE_WIDTH, HEAD, LONGEST, bars, curves, document

SVG = "{http://www.w3.org/2000/svg}"


def widths(drawn: str) -> list[float]:
    return [float(r.get("width", "0")) for r in ET.fromstring(drawn).iter(f"{SVG}rect") if r.get("height") == "14.0"]


def test_bars_are_as_long_as_their_values() -> None:
    groups = [("TTFT", [10.0, 20.0]), ("TPOT", [4.0, 1.0])]
    assert widths(document(bars("t", groups))) == [LONGEST / 2, LONGEST, LONGEST, LONGEST / 4]
    assert widths(document(bars("t", groups, top=40))) == [LONGEST / 4, LONGEST / 2, LONGEST / 10, LONGEST / 40]
    assert widths(document(bars("nothing", [("none", []), ("zero", [0.0])]))) == [0.0]


def test_a_curve_ends_where_it_leaves_the_picture() -> None:
    lines = [("inside", [(0.0, 1.0), (2.0, 2.0)]), ("leaves", [(0.0, 2.0), (1.0, 9.0), (2.0, 9.0)]), ("empty", [])]
    drawn = ET.fromstring(document(curves("t", lines, right=2, top=4, x="rate", y="latency")))
    points = [line.get("points", "").split() for line in drawn.iter(f"{SVG}polyline")]
    assert [len(p) for p in points] == [2, 2]
    assert points[0][-1].startswith(f"{20 + CURVE_WIDTH:.1f},")
    assert points[1][-1].endswith(f",{HEAD:.1f}")


@pytest.mark.parametrize("word", ['<&">', "http://h/?a=1&b=2"])
def test_words_are_escaped_and_panels_stand_side_by_side(word: str) -> None:
    one = bars(word, [(word, [1.0])], legend=[word])
    drawn = ET.fromstring(document(one, one))
    assert float(drawn.get("width", "0")) == 2 * one.width
    assert [t.text for t in drawn.iter(f"{SVG}text")].count(word) == 6
