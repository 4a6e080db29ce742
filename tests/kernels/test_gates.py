"""Errors, limits and floors on numbers small enough to work out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.kernels.gates import Errors, Gate, compare, errors, floor, limits

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def test_errors_of_two_rows() -> None:
    exact = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    found = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    # RMS of the oracle: sqrt(25 / 4) = 2.5; of the difference: sqrt(0.25 / 4) = 0.25.
    got = errors(found, exact)
    assert got.relative == pytest.approx(0.1, rel=1e-6)
    assert got.row == pytest.approx(0.5 / math.sqrt(2) / 2.5, rel=1e-6)
    assert got.element == pytest.approx(0.4 / 2.5, rel=1e-6)


def test_errors_do_not_depend_on_the_scale() -> None:
    generator = torch.Generator().manual_seed(1)
    exact = torch.randn(6, 10, generator=generator, dtype=torch.float64)
    found = exact + 0.01 * torch.randn(6, 10, generator=generator, dtype=torch.float64)
    one = errors(found, exact)
    for scale in (2.0**-60, 2.0**60):
        many = errors(found * scale, exact * scale)
        assert many == one
    assert 0.005 < one.relative < one.row < one.element


def test_a_single_bad_row_and_element_stand_out() -> None:
    exact = torch.ones(100, 64, dtype=torch.float64)
    found = exact.clone()
    found[7, 5] = 2.0
    got = errors(found, exact)
    assert got.relative == pytest.approx(math.sqrt(1 / 6400))
    assert got.row == pytest.approx(1 / 8)
    assert got.element == pytest.approx(1.0)


def test_zeros_are_an_error_of_one_at_any_scale() -> None:
    exact = torch.full((4, 8), 1e-30, dtype=torch.float64)
    assert errors(torch.zeros(4, 8), exact).relative == pytest.approx(1.0)


def test_what_should_be_zero_is_measured_as_it_is() -> None:
    exact = torch.zeros(2, 2, dtype=torch.float64)
    assert errors(torch.zeros(2, 2), exact) == Errors(relative=0.0, row=0.0, element=0.0)
    assert errors(torch.full((2, 2), 0.5), exact) == Errors(relative=0.5, row=0.5, element=0.5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_not_finite_is_infinitely_wrong(value: float) -> None:
    exact = torch.ones(3, 3, dtype=torch.float64)
    found = torch.ones(3, 3)
    found[1, 1] = value
    assert errors(found, exact) == Errors(relative=math.inf, row=math.inf, element=math.inf)
    worst = compare(found, torch.ones(3, 3), exact, Gate())
    assert all(error > limit for _, error, limit in worst)


def test_nothing_has_no_error() -> None:
    none = torch.empty(0, 4)
    assert errors(none, none.double()) == Errors(relative=0.0, row=0.0, element=0.0)


def test_floors_by_dtype() -> None:
    assert floor(BF16) == 2.0**-13
    assert floor(FP8) == 2.0**-9
    assert floor(FP32) == 2.0**-20
    assert floor(torch.int64) == 0.0
    for dtype, share in ((BF16, 1 / 16), (torch.float16, 1 / 16), (FP8, 1 / 16), (FP32, 32)):
        # Numbers just below 2 are eps apart, so half their distance is eps / 4 of them.
        assert floor(dtype) == share * torch.finfo(dtype).eps / 4


def test_limits_are_multiples_and_a_floor() -> None:
    gate = Gate(relative=1.5, row=2.0, element=3.0)
    own = Errors(relative=0.01, row=0.02, element=0.03)
    got = limits(gate, own, BF16)
    assert got.relative == pytest.approx(0.015 + 2.0**-13)
    assert got.row == pytest.approx(0.04 + 2 * 2.0**-13)
    assert got.element == pytest.approx(0.09 + 8 * 2.0**-13)


def test_compare_names_the_three_and_uses_the_references_dtype() -> None:
    exact = torch.full((2, 4), 1.0, dtype=torch.float64)
    own = torch.full((2, 4), 1.0, dtype=BF16)  # without any error: only the floors are left
    got = compare(torch.full((2, 4), 1.0 + 2.0**-7, dtype=BF16), own, exact, Gate())
    assert [(name, error, limit) for name, error, limit in got] == [
        ("relative error", 2.0**-7, 2.0**-13),
        ("worst row", 2.0**-7, 2.0**-12),
        ("worst element", 2.0**-7, 2.0**-10),
    ]


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_one_rounding_passes_and_two_do_not(dtype: torch.dtype) -> None:
    """The reason for 1.25: errors of two independent roundings add to sqrt(2) of one."""
    generator = torch.Generator().manual_seed(2)
    a = torch.rand(64, 256, generator=generator, dtype=torch.float64) + 0.5
    b = torch.rand(64, 256, generator=generator, dtype=torch.float64) + 0.5
    exact = a * b
    once = exact.to(dtype)
    again = (a.to(dtype).double() * b).to(dtype)
    (_, error, limit), *_ = compare(again, once, exact, Gate())
    assert error > limit
    for _, error, limit in compare(once, once, exact, Gate()):
        assert error <= limit
