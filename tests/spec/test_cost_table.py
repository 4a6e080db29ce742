"""Cost tables against a loop that follows the specification's words, and against the engine's."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import DraftError, WorkbenchError
from workbench.spec.cost_table import CostTable

ENGINE = Path(__file__).resolve().parents[1] / "data" / "engine_adaptive.json"
Points = list[tuple[int, float]]


def by_words(points: Points, captured: int, floor: float, size: int) -> float:
    """What a size costs, step by step."""
    raised: Points = []
    for n, ms in points:  # non-decreasing by a running maximum
        raised.append((n, max(ms, raised[-1][1]) if raised else ms))
    last, last_ms = raised[-1]
    if size > last:
        if len(raised) == 1:
            return max(last_ms, floor)
        before, before_ms = raised[-2]
        return max(last_ms + (size - last) * (last_ms - before_ms) / (last - before), floor)
    if size <= captured:  # padded to the next size that was measured
        return max(next(ms for n, ms in raised if n >= size), floor)
    above = [(n, ms) for n, ms in raised if n > captured]
    if size <= above[0][0]:
        return max(above[0][1], floor)
    for (a, a_ms), (b, b_ms) in pairwise(above):
        if a <= size <= b:
            return max(a_ms + (b_ms - a_ms) * (size - a) / (b - a), floor)
    raise AssertionError("no place for it")


@st.composite
def curves(draw: st.DrawFn) -> Points:
    sizes = sorted(draw(st.sets(st.integers(1, 60), min_size=1, max_size=8)))
    return [(n, draw(st.floats(0, 50, allow_subnormal=False))) for n in sizes]


@given(curves(), curves(), st.integers(0, 70))
def test_every_size_by_words(draft: Points, verify: Points, captured: int) -> None:
    table = CostTable(draft=tuple(draft), verify=tuple(verify), captured=captured)
    sizes = np.arange(100)
    for found, points, floor in (
        (table.draft_ms(sizes), draft, 0.0),
        (table.verify_ms(sizes), verify, 1e-6),
    ):
        expected = [by_words(points, captured, floor, n) for n in range(100)]
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
        assert (np.diff(found) >= -1e-9).all()


def test_by_hand() -> None:
    table = CostTable(
        draft=((1, 1.0), (4, 2.0)),
        verify=((8, 5.0), (16, 6.0), (24, 10.0), (40, 14.0), (80, 34.0)),
        captured=16,
        label="made up",
    )
    at = table.verify_ms
    assert (at(0), at(1), at(8)) == (5.0, 5.0, 5.0)  # padded to 8
    assert (at(9), at(16)) == (6.0, 6.0)  # padded to 16
    assert (at(17), at(24)) == (10.0, 10.0)  # flat before the first point above the limit
    assert (at(32), at(40), at(60)) == (12.0, 14.0, 24.0)  # between points above it
    assert at(100) == 44.0  # 0.5 ms a row, as between the last two
    assert [table.draft_ms(n) for n in (0, 1, 2, 4)] == [1.0, 1.0, 2.0, 2.0]
    assert table.draft_ms(7) == pytest.approx(3.0)
    assert isinstance(at(9), float)


def test_shapes_and_large_sizes() -> None:
    table = CostTable(draft=((1, 0.5),), verify=((1, 1.0), (2, 3.0)), captured=2)
    sizes = np.array([[0, 1, 2], [3, 4, 10**15]])  # of the last no list can be kept
    found = table.verify_ms(sizes)
    assert found.tolist() == [[1, 1, 3], [5, 7, 3 + 2 * (10**15 - 2)]]
    assert table.verify_ms(np.array([], int)).shape == (0,)
    assert table.verify_ms(np.int32(2)) == 3.0  # type: ignore[call-overload]
    # What was looked up before does not change what is found later.
    assert table.verify_ms(5000) == 3 + 2 * 4998
    assert table.verify_ms(4) == 7


def test_nothing_is_free() -> None:
    table = CostTable(draft=((1, 0.0),), verify=((1, 0.0), (8, 0.0)))
    assert table.draft_ms(3) == 0.0
    assert table.verify_ms(np.array([0, 5, 50])).tolist() == [1e-6] * 3


def test_medians_of_samples() -> None:
    table = CostTable.from_curves(
        {8: [2.0, 9.0, 2.5], 1: [1.0]}, {4: [3.0, 1.0], 2: [2.5], 16: [2.25, 90, 0]}, 4, "here"
    )
    assert table.draft == ((1, 1.0), (8, 2.5))
    assert table.verify == ((2, 2.5), (4, 2.5), (16, 2.5))  # medians 2.5, 2, 2.25, raised
    assert (table.captured, table.label) == (4, "here")


def test_json_and_back() -> None:
    table = CostTable(draft=((1, 0.1),), verify=((1, 1 / 3), (3, 7.0)), captured=3, label="H200")
    text = json.dumps(table.to_dict())
    back = CostTable.from_dict(json.loads(text))
    assert back == table
    assert back.verify_ms(2) == 7.0


GOOD: dict[str, Any] = {"draft": ((1, 1.0),), "verify": ((1, 1.0),)}


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"draft": ()}, "draft curve is empty"),
        ({"verify": ()}, "verify curve is empty"),
        ({"verify": ((0, 1.0),)}, "from 1 to 16,777,216, not 0"),
        ({"verify": ((2, 1.0), (2, 1.0))}, "must rise"),
        ({"verify": ((3, 1.0), (2, 1.0))}, "must rise"),
        ({"verify": ((1.5, 1.0),)}, "whole numbers from 1 to 16,777,216, not 1.5"),
        ({"verify": ((True, 1.0),)}, "not True"),
        ({"verify": ((1, float("nan")),)}, "not nan at 1"),
        ({"verify": ((1, float("inf")),)}, "not inf at 1"),
        ({"draft": ((4, -0.5),)}, "not -0.5 at 4"),
        ({"draft": ((4, "1"),)}, "not '1' at 4"),
        ({"draft": ((4, None),)}, "not None at 4"),
        ({"draft": 7}, "draft curve is pairs"),
        ({"draft": (7,)}, "draft curve is pairs"),
        ({"captured": -1}, "from 0 to 16,777,216, not -1"),
        ({"captured": 1.0}, "from 0 to 16,777,216, not 1.0"),
        # Too large for float64, for neighbours in it, for sums of it, and to be written out.
        ({"verify": ((10**400, 1.0),)}, "from 1 to 16,777,216, not 1000"),
        ({"verify": ((2**62, 1.0), (2**62 + 1, 2.0))}, "not 4611686018427387904"),
        ({"verify": ((1, 10**400),)}, "milliseconds from 0 to 1,000,000,000, not 1000"),
        ({"verify": ((1, 0.0), (2, 1e308))}, "not 1e+308 at 2"),
        ({"captured": 10**400}, "from 0 to 16,777,216, not 1000"),
        ({"draft": ((1, 10**5000),)}, "not a number of thousands of digits at 1"),
        ({"label": None}, "label is text"),
    ],
)
def test_bad_curves(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DraftError, match=re.escape(sentence)):
        CostTable(**GOOD | values)
    assert issubclass(DraftError, WorkbenchError)


def test_bad_samples() -> None:
    with pytest.raises(DraftError, match="verify curve is empty"):
        CostTable.from_curves({1: [1.0]}, {})
    with pytest.raises(DraftError, match="no time at size 4"):
        CostTable.from_curves({4: []}, {1: [1.0]})
    with pytest.raises(DraftError, match="not nan at 4"):  # though the median is 1
        CostTable.from_curves({4: [1.0, 1.0, float("nan")]}, {1: [1.0]})


@pytest.mark.parametrize("size", [-1, 1.0, np.array([1, -2]), np.array([0.5]), "4", True])
def test_bad_sizes(size: Any) -> None:
    table = CostTable(**GOOD)
    with pytest.raises(DraftError, match="whole numbers"):
        table.verify_ms(size)


@pytest.mark.parametrize("missing", ["draft", "verify", "captured", "label"])
def test_bad_file(missing: str) -> None:
    data = CostTable(**GOOD).to_dict()
    del data[missing]
    with pytest.raises(DraftError, match=f"needs '{missing}'"):
        CostTable.from_dict(data)


def test_no_file_at_all() -> None:
    with pytest.raises(DraftError, match="cannot be read from list"):
        CostTable.from_dict([1, 2])  # type: ignore[arg-type]


def test_the_engines_tables() -> None:
    tables = json.loads(ENGINE.read_text())["tables"]
    assert len(tables) >= 5
    for recorded in tables:
        # The engine without any captured size takes steps everywhere.
        largest = max(n for n, _ in recorded["draft_curve"] + recorded["verify_curve"])
        table = CostTable(
            draft=recorded["draft_curve"],
            verify=recorded["verify_curve"],
            captured=recorded["captured"] or largest,
        )
        for curve, lookup in (("draft_ms", table.draft_ms), ("verify_ms", table.verify_ms)):
            expected = np.array(recorded[curve])
            found = lookup(np.arange(len(expected)))
            np.testing.assert_allclose(
                found, expected, rtol=1e-14, atol=0, err_msg=recorded["name"]
            )
