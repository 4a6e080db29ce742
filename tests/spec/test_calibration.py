"""Reliability of confidences, against loops and against exact probabilities."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from workbench.errors import DraftError
from workbench.spec.calibration import evidence, reliability
from workbench.spec.step import RequestStep, Step


def step_of(*parts: tuple[list[float], int, int]) -> Step:
    """Requests with confidences, admitted and accepted."""
    made = [
        RequestStep(
            request=number,
            position=5,
            drafted=tuple(range(len(numbers))),
            expected=tuple(numbers),
            admitted=admitted,
            accepted=accepted,
            token_ids=tuple(range(accepted + 1)),
            kinds=("accepted",) * accepted + ("corrected",),
        )
        for number, (numbers, admitted, accepted) in enumerate(parts)
    ]
    return Step(index=0, rows=1, seconds=0.1, requests=tuple(made))


def test_bins_are_counted_by_hand() -> None:
    found = reliability([0.9, 0.1, 0.5, 0.3, 0.8], [1, 0, 0, 1, 1], bins=2)
    assert [b.count for b in found.bins] == [3, 2]
    low, high = found.bins
    assert (low.low, low.high, low.observed) == (0.1, 0.5, pytest.approx(1 / 3))
    assert low.predicted == pytest.approx(0.3)
    assert (high.low, high.high, high.predicted, high.observed) == (
        0.8,
        0.9,
        pytest.approx(0.85),
        1,
    )
    assert found.error == pytest.approx(3 / 5 * abs(0.3 - 1 / 3) + 2 / 5 * 0.15)


def test_true_probabilities_are_calibrated_and_others_are_not() -> None:
    rng = np.random.default_rng(0)
    p = rng.beta(2, 1, size=60_000)
    y = rng.random(p.size) < p
    assert reliability(p, y).error < 0.01
    wrong = p**2  # off by p - p^2, of which the mean over Beta(2, 1) is 2/3 - 1/2
    assert reliability(wrong, y).error == pytest.approx(1 / 6, abs=0.01)
    found = reliability(p, y)
    assert len(found.bins) == 15
    assert max(b.count for b in found.bins) - min(b.count for b in found.bins) <= 1
    assert found.count == p.size


def test_what_is_known_of_a_step() -> None:
    c = [0.9, 0.8, 0.7, 0.6]
    cases: list[tuple[int, int, list[bool], list[bool]]] = [
        # admitted, accepted; conditional outcomes, outcomes of the running product
        (4, 4, [True] * 4, [True] * 4),
        (4, 2, [True, True, False], [True, True, False, False]),
        (2, 2, [True, True], [True, True]),  # nobody knows about the trimmed ones
        (2, 1, [True, False], [True, False, False, False]),
        (2, 0, [False], [False] * 4),
        (0, 0, [], []),
    ]
    for admitted, accepted, conditional, survival in cases:
        steps = [step_of((c, admitted, accepted))]
        p, y = evidence(steps)
        assert p.tolist() == c[: len(conditional)]
        assert y.tolist() == conditional
        p, y = evidence(steps, kind="survival")
        assert p == pytest.approx([0.9, 0.72, 0.504, 0.3024][: len(survival)])
        assert y.tolist() == survival


def test_against_loops_over_many_steps() -> None:
    dice = random.Random(1)
    steps, told = [], []
    for _ in range(200):
        parts = []
        for _ in range(3):
            numbers = [dice.random() for _ in range(5)]
            admitted = dice.randint(0, 5)
            accepted = dice.randint(0, admitted)
            parts.append((numbers, admitted, accepted))
            for slot in range(5):
                if slot <= accepted and slot < admitted:
                    told.append((numbers[slot], slot < accepted))
        steps.append(step_of(*parts))
    p, y = evidence(steps)
    assert list(zip(p.tolist(), y.tolist(), strict=True)) == told


def test_steps_without_a_policy_have_no_evidence() -> None:
    part = RequestStep(request=0, position=1, token_ids=(3,), kinds=("plain",))
    p, y = evidence([Step(index=0, rows=1, seconds=0.1, requests=(part,))])
    assert p.size == y.size == 0
    found = reliability(p, y)
    assert (found.bins, found.error, found.count) == ((), None, 0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (([0.1, 0.2], [1]), "one outcome for each prediction"),
        (([0.1, np.nan], [1, 0]), "no probability"),
        (([1.1], [1]), "no probability"),
        (([0.1], [1], 0), "at least one bin"),
    ],
)
def test_what_is_no_prediction_is_refused(given: tuple[Any, ...], words: str) -> None:
    with pytest.raises(DraftError, match=words):
        reliability(*given)


def test_another_word_is_refused() -> None:
    with pytest.raises(DraftError, match="none of expected, stale, confidences"):
        evidence([], of="guess")  # type: ignore[arg-type]
    with pytest.raises(DraftError, match="none of conditional, survival"):
        evidence([], kind="joint")  # type: ignore[arg-type]
