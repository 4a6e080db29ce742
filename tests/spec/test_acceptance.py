"""The estimator against dense solves and loops in float64, and against the engine's own."""

from __future__ import annotations

import json
import math
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.errors import DraftError
from workbench.spec.acceptance import Estimator, log_odds

ENGINE = Path(__file__).resolve().parents[1] / "data" / "engine_adaptive.json"
NAN = float("nan")


def step(
    rng: np.random.Generator, requests: int, slots: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, accepted and admitted of a step; any that can be."""
    admitted = rng.integers(0, slots + 1, requests)
    accepted = (rng.random(requests) * (admitted + 1)).astype(int)
    return rng.normal(1, 1.5, (requests, slots)).astype(np.float32), accepted, admitted


# --- the feature ----------------------------------------------------------------------------------


def test_feature_is_the_log_odds_of_the_best() -> None:
    rng = np.random.default_rng(1)
    scores = rng.normal(0, 2, (5, 3, 6)).astype(np.float32)
    temperature = np.array([1.0, 0.5, 2.0, 0.0, 1.5])
    found = log_odds(scores, temperature)
    assert (found.shape, found.dtype) == ((5, 3), np.float32)
    for r, k in np.ndindex(5, 3):
        z = [float(x) / (temperature[r] or 1.0) for x in scores[r, k]]
        q = math.exp(max(z)) / sum(map(math.exp, z))
        # Subtracting 1 in float32 leaves an error of a rounding beside what is left.
        tolerance = 1e-6 + 4e-7 * q / (1 - q)
        assert found[r, k] == pytest.approx(math.log(q / (1 - q)), abs=tolerance)
    one = log_odds(scores[:1], 0.7)
    assert one[0, 0] == pytest.approx(log_odds(scores[:1], [0.7])[0, 0])


def test_feature_by_hand_and_at_its_limits() -> None:
    def of(*scores: float) -> float:
        return float(log_odds([[scores]], 1.0)[0, 0])

    assert of(0.0, 0.0) == 0.0  # one half
    assert of(2.0, 2.0, 2.0, 2.0, 2.0) == pytest.approx(-math.log(4))
    assert of(math.log(3), 0.0, -math.inf) == pytest.approx(math.log(3))
    assert of(0.0, -30.0) == 40.0  # float32 has no room for the other one beside 1
    assert of(5.0) == 40.0
    assert of(0.0, *[0.0] * 99) == pytest.approx(-math.log(99))


def test_what_is_no_number_stays_none() -> None:
    """The policy refuses it where it can be shown, not the estimator in the middle of a step."""
    estimator = Estimator(2)
    features = estimator.features([[[1.0, NAN], [1.0, 0.0]], [[-math.inf] * 2, [0.0, 1.0]]], 1.0)
    assert np.isnan(features).tolist() == [[True, False], [True, False]]
    assert np.isnan(estimator.predict(features)).tolist() == [[True, False], [True, False]]


# --- predictions and labels -----------------------------------------------------------------------


def test_start() -> None:
    estimator = Estimator(3)
    features = np.array([[-40.0, 0.0, 1.0], [2.0, 3.5, 40.0]])
    found = estimator.predict(features)
    assert found.dtype == np.float32
    expected = [[1 / (1 + math.exp(0.2 - 0.5 * f)) for f in row] for row in features.tolist()]
    np.testing.assert_allclose(found, expected, rtol=2e-6)
    assert [(c.step, c.slope) for c in estimator.history] == [(0, 0.5)]


def test_extreme_coefficients_give_no_warning() -> None:
    estimator = Estimator(1)
    estimator.slope = np.float32(50)
    assert estimator.predict([[-40.0], [40.0]]).ravel().tolist() == [0.0, 1.0]


@pytest.mark.parametrize("seed", range(5))
def test_labels_by_loops(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = 4
    estimator = Estimator(slots)
    sums = np.zeros((slots, 3)), np.zeros((slots, 2)), np.zeros(slots)
    for _ in range(7):
        features, accepted, admitted = step(rng, 9, slots)
        predicted = estimator.predict(features)
        assert not estimator.observe(predicted, features, accepted, admitted)
        for r in range(9):
            for k in range(slots):
                if k > accepted[r] or k >= admitted[r]:
                    continue  # behind the first refused one, or not verified
                label = 1.0 if k < accepted[r] else 0.0
                p, f = float(predicted[r, k]), float(features[r, k])
                w, e = p * (1 - p), label - p
                sums[0][k] += (w * f * f, w * f, w)
                sums[1][k] += (e * f, e)
                sums[2][k] += 1
    np.testing.assert_allclose(estimator.information, sums[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(estimator.gradient, sums[1], rtol=1e-5, atol=1e-5)
    assert estimator.counts.tolist() == sums[2].tolist()


def test_slots_that_were_not_observed_teach_nothing() -> None:
    estimator = Estimator(3)
    features = np.array([[1.0, NAN, math.inf], [NAN, NAN, NAN]])
    predicted = np.array([[0.6, NAN, 1.0], [NAN, NAN, NAN]])
    estimator.observe(predicted, features, [0, 0], [2, 0])
    assert estimator.counts.tolist() == [1, 0, 0]
    assert np.isfinite(estimator.information).all()
    assert np.isfinite(estimator.gradient).all()


def test_intercepts_of_slots_never_observed_stay() -> None:
    rng = np.random.default_rng(3)
    estimator = Estimator(4)
    for _ in range(200):
        features, accepted, _ = step(rng, 8, 4)
        accepted = np.minimum(accepted, 1)
        estimator.observe(
            estimator.predict(features), features, accepted, np.maximum(accepted, [2, 1] * 4)
        )
    moved = estimator.intercepts != np.float32(-0.2)
    assert moved.tolist() == [True, True, False, False]


# --- the refit ------------------------------------------------------------------------------------


def dense_step(
    information: np.ndarray, gradient: np.ndarray, counts: np.ndarray
) -> tuple[float, np.ndarray]:
    """One Newton step of the whole ridge system, float64, and the dampings.

    The slope's step is solved for with all intercepts. It is then damped, and the intercepts'
    equations are solved again for the damped one.
    """
    slots = len(counts)
    system = np.diag([information[:, 0].sum(), *information[:, 2]]).astype(np.float64)
    system[0, 1:] = system[1:, 0] = information[:, 1]
    system += 1e-3 * np.eye(slots + 1)
    right = np.array([gradient[:, 0].sum(), *gradient[:, 1]], np.float64)
    slope = np.linalg.solve(system, right)[0] * counts.sum() / (counts.sum() + 50)
    rest = right[1:] - system[1:, 0] * slope
    return slope, np.linalg.solve(system[1:, 1:], rest) * counts / (counts + 50)


@pytest.mark.parametrize(("seed", "slots", "requests"), [(0, 1, 4), (1, 7, 16), (2, 3, 1)])
def test_refit_is_a_newton_step(seed: int, slots: int, requests: int) -> None:
    rng = np.random.default_rng(seed)
    estimator = Estimator(slots)
    truth = rng.normal(0, 0.5, slots)
    for number in range(1, 301):
        features, _, admitted = step(rng, requests, slots)
        accept = rng.random(features.shape) < 1 / (1 + np.exp(-(0.9 * features + truth)))
        accepted = np.minimum(np.cumprod(accept, 1).sum(1), admitted)
        before = estimator.information, estimator.gradient, estimator.counts
        if number % 100 == 0:  # all but this step's are in; take them with it, from a copy
            copy = Estimator.from_state(estimator.state() | {"steps": 1})
            copy.observe(copy.predict(features), features, accepted, admitted)
            before = copy.information, copy.gradient, copy.counts
        slope, intercepts = estimator.slope, estimator.intercepts
        predicted = estimator.predict(features)
        assert estimator.observe(predicted, features, accepted, admitted) == (number % 100 == 0)
        if number % 100:
            assert estimator.slope == slope
            continue
        by, at = dense_step(*(np.array(x, np.float64) for x in before))
        assert slope + by > 0
        assert abs(by) > 1e-4
        np.testing.assert_allclose(estimator.slope, slope + by, rtol=2e-5)
        np.testing.assert_allclose(estimator.intercepts, intercepts + at, rtol=2e-5, atol=2e-5)
        assert not estimator.counts.any()
        assert not estimator.information.any()
        assert not estimator.gradient.any()
    assert [c.step for c in estimator.history] == [0, 100, 200, 300]
    assert estimator.history[-1] == estimator.coefficients()


def hundredth(estimator: Estimator, **sums: Any) -> Estimator:
    """The estimator with these sums, refitted."""
    estimator = Estimator.from_state({**estimator.state(), **sums, "steps": 99})
    none = np.zeros((0, estimator.slots))
    assert estimator.observe(none, none, [], [])
    return estimator


def test_a_slope_never_gets_negative() -> None:
    estimator = Estimator(1)
    # Newton's slope is about -1, which would end below 0: it stays, and the intercept goes on as
    # if the slope's step were 0.
    estimator = hundredth(estimator, information=[[90, 0, 50]], gradient=[[-100, 25]], counts=[50])
    assert estimator.slope == np.float32(0.5)
    assert estimator.intercepts[0] == pytest.approx(-0.2 + 0.5 * 25 / 50.001)
    # A step down that ends above 0 is taken.
    estimator = hundredth(estimator, information=[[90, 0, 50]], gradient=[[-9, 0]], counts=[50])
    assert estimator.slope == pytest.approx(0.5 - 0.05, abs=1e-5)


def test_nan_moves_nothing_but_what_can_be_known() -> None:
    estimator = Estimator(3)
    estimator = hundredth(
        estimator,
        information=[[9, 2, 5], [NAN, NAN, NAN], [0, 0, 0]],
        gradient=[[4, 5], [NAN, NAN], [0, 0]],
        counts=[50, 50, 0],
    )
    assert estimator.slope == np.float32(0.5)
    assert estimator.intercepts[0] == pytest.approx(-0.2 + 0.5 * 5 / 5.001)
    assert estimator.intercepts[1:].tolist() == [np.float32(-0.2)] * 2
    # The round is forgotten, NaN and all.
    assert np.isfinite(estimator.information).all()


def test_sums_are_the_same_however_often_they_are_looked_at() -> None:
    """Verdicts wait and are added up together; looking adds them up, and changes nothing else."""
    rng, looked, left = np.random.default_rng(3), Estimator(4), Estimator(4)
    for number in range(250):
        features, accepted, admitted = step(rng, int(rng.integers(0, 5)), 4)
        for one in (looked, left):
            given = features.copy()
            one.observe(one.predict(given), given, accepted, admitted)
            given[:] = NAN  # the caller's again
        assert looked.counts.sum() >= 0
        if number % 37 == 0:
            looked = Estimator.from_state(json.loads(json.dumps(looked.state())))
    np.testing.assert_allclose(looked.information, left.information, rtol=1e-5)
    np.testing.assert_allclose(looked.gradient, left.gradient, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(looked.counts, left.counts)
    assert looked.slope == pytest.approx(left.slope, rel=1e-5)


def test_infinity_is_no_step() -> None:
    """A system that float32 sees as singular; the engine would take the infinite slope."""
    estimator = Estimator(1)
    estimator = hundredth(
        estimator, information=[[2.0**30, 2.0**30, 2.0**30]], gradient=[[8, 4]], counts=[1000]
    )
    assert estimator.slope == np.float32(0.5)
    assert np.isfinite(estimator.intercepts).all()


@pytest.mark.parametrize("wrong", [[[[1, 2], [1]]], [[["a"]]], [[[None, object()]]], [[[10**400]]]])
def test_what_is_no_array_of_numbers(wrong: Any) -> None:
    with pytest.raises(DraftError, match="an array of numbers"):
        log_odds(wrong, 1.0)
    with pytest.raises(DraftError, match="an array of numbers"):
        Estimator(1).predict(wrong)
    for given in ((wrong, [[1.0]]), ([[1.0]], wrong)):
        with pytest.raises(DraftError, match="an array of numbers"):
            Estimator(1).observe(*given, [0], [0])
    with pytest.raises(DraftError, match="a whole number for each request"):
        Estimator(1).observe([[1.0]], [[1.0]], [[0], [0, 1]], [0])


def test_a_temperature_beyond_float32_makes_all_equal() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert log_odds([[[9.0, -3.0]]], 1e300).tolist() == [[0.0]]


def test_a_round_without_observations() -> None:
    estimator = Estimator(2)
    for _ in range(100):
        estimator.observe(np.ones((3, 2)), np.ones((3, 2)), [0] * 3, [0] * 3)
    assert estimator.coefficients().intercepts == Estimator(2).coefficients().intercepts
    assert estimator.coefficients().slope == 0.5
    assert len(estimator.history) == 2


# --- calibration ----------------------------------------------------------------------------------


def calibration_error(confidences: np.ndarray, labels: np.ndarray) -> float:
    """Expected calibration error of 15 bins of equal mass."""
    order = np.argsort(confidences, kind="stable")
    error = 0.0
    for part in np.array_split(order, 15):
        share = len(part) / len(order)
        error += share * abs(float(confidences[part].mean()) - float(labels[part].mean()))
    return error


def test_convergence_to_a_known_model() -> None:
    rng = np.random.default_rng(11)
    slope, intercepts = 1.1, np.array([0.9, 0.3, -0.4, -1.0, -1.3])
    estimator, start = Estimator(5), Estimator(5)

    def drawn(requests: int) -> tuple[np.ndarray, np.ndarray]:
        features = rng.normal(0.5, 2, (requests, 5)).astype(np.float32)
        return features, rng.random((requests, 5)) < 1 / (
            1 + np.exp(-slope * features - intercepts)
        )

    for _ in range(500):
        features, accept = drawn(8)
        accepted = np.cumprod(accept, 1).sum(1)
        estimator.observe(estimator.predict(features), features, accepted, np.full(8, 5))
    # Held out: each slot judged by itself, as its confidence is conditional.
    features, accept = drawn(20_000)
    found = calibration_error(estimator.predict(features).ravel(), accept.ravel())
    before = calibration_error(start.predict(features).ravel(), accept.ravel())
    assert found < 0.05 < before
    assert estimator.slope == pytest.approx(slope, abs=0.15)
    np.testing.assert_allclose(estimator.intercepts, intercepts, atol=0.3)


# --- keeping it -----------------------------------------------------------------------------------


def test_state_goes_on_as_the_first_would_have() -> None:
    rng = np.random.default_rng(4)
    first = Estimator(3)

    def feed(*estimators: Estimator, steps: int) -> None:
        for _ in range(steps):
            features, accepted, admitted = step(rng, 5, 3)
            for e in estimators:
                e.observe(e.predict(features), features, accepted, admitted)

    feed(first, steps=150)
    second = Estimator.from_state(json.loads(json.dumps(first.state())))
    feed(first, second, steps=80)
    assert second.state() == first.state()
    assert second.coefficients().step == 230
    assert [c.step for c in second.history] == [0, 100, 200]


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": -1},
        {"slots": 10**13, "intercepts": []},  # a terabyte of them
        {"intercepts": [[0.1], [0.1]]},
        {"information": [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]},
        {"gradient": [0.0, 0.0, 0.0, 0.0]},
        {"counts": [[0.0, 0.0]]},
        {"history": [[0, 0.5, [0.1]]]},
        {"history": [[0, 0.5, [0.1, NAN]]]},
        {"history": [[0, float("inf"), [0.1, 0.1]]]},
        {"slots": "4"},
        {"intercepts": [0.1]},
        {"intercepts": [0.1, NAN]},
        {"slope": -0.1},
        {"slope": NAN},
        {"slope": "steep"},
        {"steps": -1},
        {"history": [[1, 2]]},
        {"counts": None},
    ],
)
def test_a_state_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(DraftError, match="estimator"):
        Estimator.from_state(Estimator(2).state() | wrong)


def test_a_state_that_lacks_something() -> None:
    for name in Estimator(2).state():
        state = Estimator(2).state()
        del state[name]
        with pytest.raises(DraftError, match=f"lacks '{name}'"):
            Estimator.from_state(state)


# --- bad input ------------------------------------------------------------------------------------


def test_shapes_that_do_not_fit() -> None:
    estimator = Estimator(3)
    good = np.zeros((2, 3))
    for scores, temperature in (
        (np.zeros((2, 3)), 1.0),
        (np.zeros((2, 3, 0)), 1.0),
        (np.zeros((2, 3, 4)), [1.0, 1.0, 1.0]),
        (np.zeros((2, 4, 4)), 1.0),
    ):
        with pytest.raises(DraftError, match="not"):
            estimator.features(scores, temperature)
    with pytest.raises(DraftError, match=r"features for 3 slots are \[requests, 3\], not \[2, 4\]"):
        estimator.predict(np.zeros((2, 4)))
    with pytest.raises(DraftError, match="predictions for 3 slots"):
        estimator.observe(np.zeros(3), good, [0, 0], [0, 0])
    with pytest.raises(DraftError, match="same requests"):
        estimator.observe(good, np.zeros((1, 3)), [0, 0], [0, 0])
    with pytest.raises(DraftError, match="same requests"):
        estimator.observe(good, good, [0], [0, 0])
    assert estimator.steps == 0


@pytest.mark.parametrize(
    ("accepted", "admitted"),
    [
        ([2, 0], [1, 0]),
        ([-1, 0], [1, 0]),
        ([0, 0], [0, 4]),
        ([0.0, 0.0], [1, 1]),
        ([0, 0], [NAN, 1]),
    ],
)
def test_verdicts_that_cannot_be(accepted: list[float], admitted: list[float]) -> None:
    estimator = Estimator(3)
    with pytest.raises(DraftError, match="accepted"):
        estimator.observe(np.full((2, 3), 0.5), np.zeros((2, 3)), accepted, admitted)
    assert not estimator.counts.any()


@pytest.mark.parametrize("slots", [-1, 2.0, True, None])
def test_slots_that_cannot_be(slots: Any) -> None:
    with pytest.raises(DraftError, match="slots"):
        Estimator(slots)


def test_no_slots_and_no_requests() -> None:
    none = Estimator(0)
    features = none.features(np.zeros((3, 0, 4)), 1.0)
    assert none.predict(features).shape == (3, 0)
    for _ in range(100):
        none.observe(features, features, [0] * 3, [0] * 3)
    assert none.coefficients().slope == 0.5
    assert Estimator(4).predict(np.zeros((0, 4))).shape == (0, 4)


# --- the engine -----------------------------------------------------------------------------------


def test_the_engines_features() -> None:
    recorded = json.loads(ENGINE.read_text())["estimator"]
    estimator = Estimator(recorded["slots"])
    seen = []
    for scores, expected in zip(recorded["scores"], recorded["features"], strict=True):
        found = estimator.features(scores, recorded["temperature"])
        exact = np.array(expected)
        # f = -log(x) for x the sum less 1: a rounding of the sum is 1.2e-7 / x of the feature.
        np.testing.assert_array_less(np.abs(found - exact), 1e-6 + 5e-7 * np.exp(exact.clip(-9, 9)))
        seen += exact.ravel().tolist()
    assert min(seen) < -1 < 8 < max(seen) == 40


@pytest.mark.parametrize("own", [False, True])
def test_the_engines_coefficients(own: bool) -> None:
    """Five refits; ``own``: from our features and predictions instead of the recorded ones."""
    recorded = json.loads(ENGINE.read_text())["estimator"]
    scores, temperature = recorded["scores"], recorded["temperature"]
    estimator = Estimator(recorded["slots"])
    slopes = []
    for part in recorded["rounds"]:
        batches = []
        for batch, predicted in enumerate(part["predictions"]):
            features = np.array(recorded["features"][batch], np.float32)
            found = estimator.predict(features)
            np.testing.assert_allclose(found, predicted, rtol=2e-6)
            if own:
                features = estimator.features(scores[batch], temperature)
                predicted = estimator.predict(features)
            batches.append((np.array(predicted, np.float32), features))
        for number, (accepted, admitted) in enumerate(part["verdicts"]):
            estimator.observe(
                *batches[number % len(batches)],
                [int(n) for n in accepted],
                [int(n) for n in admitted],
            )
        tolerance = {"rtol": 5e-6, "atol": 1e-6} if own else {"rtol": 1e-6, "atol": 1e-7}
        np.testing.assert_allclose(estimator.slope, part["slope"], **tolerance)
        np.testing.assert_allclose(estimator.intercepts, part["intercepts"], **tolerance)
        slopes.append(part["slope"])
    # The known model's rounds raise the slope; those of its opposite would make it negative.
    assert 0.5 < slopes[0] < slopes[1] < slopes[2] == slopes[3] == slopes[4]


def test_random_verdicts_do_not_shake_it() -> None:
    """A stream of nonsense, long: coefficients stay numbers and the slope at least 0."""
    rng, coin = np.random.default_rng(8), random.Random(8)
    estimator = Estimator(3)
    for _ in range(2000):
        features = rng.choice([-40.0, -1.0, 0.0, 3.0, 40.0], (4, 3))
        admitted = rng.integers(0, 4, 4)
        accepted = [coin.randint(0, n) for n in admitted.tolist()]
        estimator.observe(estimator.predict(features), features, accepted, admitted)
        assert estimator.slope >= 0
    assert np.isfinite(estimator.intercepts).all()
    assert np.isfinite(estimator.predict(features)).all()
