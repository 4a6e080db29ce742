"""Cost tables of a measured verification."""

from __future__ import annotations

import pytest

from workbench.errors import KernelError
from workbench.spec.cost_table import CostTable
from workbench.spec.verify_costs import verify_table

DRAFT = {"draft": [[1, 0.5], [8, 0.75]], "origins": {"draft": "modelled"}, "label": "another"}


def test_few_rows_are_padded_and_many_lie_on_straight_lines() -> None:
    samples = {1: [2.0], 8: [5.0, 4.0, 6.0], 64: [10.0], 512: [30.0], 1024: [50.0]}
    made = verify_table(samples, DRAFT, label="here", date="2026-11-30")
    table = CostTable.from_dict({k: made[k] for k in ("draft", "verify", "captured", "label")})
    found = [table.verify_ms(n) for n in (1, 2, 8, 9, 64, 512, 768, 1024)]
    assert found == [2.0, 5.0, 5.0, 10.0, 10.0, 30.0, 40.0, 50.0]
    assert table.draft_ms(4) == 0.75
    assert made["origins"] == {"draft": "modelled", "verify": "measured"}
    assert "another" in made["notes"][-1]


def test_few_sizes_are_no_steps_of_the_large_ones() -> None:
    made = verify_table({1: [2.0], 100: [12.0], 200: [22.0]}, DRAFT, label="", date="")
    table = CostTable.from_dict({k: made[k] for k in ("draft", "verify", "captured", "label")})
    assert made["captured"] == 1
    assert table.verify_ms(150) == pytest.approx(17.0)


def test_a_size_without_a_time_gives_no_table() -> None:
    with pytest.raises(KernelError, match=r"\[8\] tokens were not timed"):
        verify_table({1: [2.0], 8: None}, DRAFT, label="", date="")
