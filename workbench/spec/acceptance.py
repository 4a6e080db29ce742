"""How likely the target is to accept each draft, learned from its verdicts: :class:`Estimator`.

A logistic model with one feature, the log-odds of a slot's most likely candidate under the draft
distribution; one slope for all slots and an intercept for each. It looks at the distribution and
never at the token drawn from it, so that what is trimmed depends on the prefix alone and decoding
stays lossless. The arithmetic is vLLM 0.33.0's online acceptance estimator, in float32 as there:
its sums cancel, and float64 would learn visibly other coefficients.

numpy and not torch: the arrays are a few hundred numbers, for which torch's calls cost several
times as much, and a replay needs no torch.

Shape letters: R requests, K slots, C candidates.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.errors import DraftError

Array: TypeAlias = NDArray[np.float32]

START_SLOPE = 0.5
START_INTERCEPT = -0.2
REFIT_STEPS = 100
RIDGE = 1e-3  # on the step, not on the coefficients
DAMPING = 50.0  # so many observations move a coefficient by half a Newton step
MOST_LOG_ODDS = 40.0

MOST_SLOTS = 4096  # of a block; a state that claims more is damaged

_HISTORY = 10_000  # refits kept, a million steps
# Steps whose verdicts wait to be added up together: a sum costs many calls and few numbers.
_WAITING = 20
_F32 = np.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """The model at one time: the probability is sigmoid(slope x feature + intercept of the slot).

    Attributes:
        step: steps observed when it was fitted, 0 for the start.
        slope: shared by all slots, never negative.
        intercepts: K of them.
    """

    step: int
    slope: float
    intercepts: tuple[float, ...]


def log_odds(scores: ArrayLike, temperature: ArrayLike) -> Array:
    """The feature: log-odds of the most likely candidate, float32 ``[R, K]`` from ``[R, K, C]``.

    With ``z = scores / temperature`` and ``m`` their maximum it is ``-log(sum e^(z - m) - 1)``, the
    difference at least 0, the result from -40 to 40. A slot with a NaN score, or with no finite
    one, has the feature NaN: policies refuse the confidence that follows from it.

    Args:
        scores: realized scores of the candidates before temperature.
        temperature: of all requests, or of each ``[R]``; 0 is taken as 1.

    Raises:
        DraftError: these are no numbers, or the shapes do not fit.
    """
    z, heat = _floats(scores, "scores"), _floats(temperature, "temperatures")
    if z.ndim != 3 or not z.shape[2] or heat.shape not in ((), z.shape[:1]):
        raise DraftError(
            "features need scores [requests, slots, candidates] and a temperature each, "
            f"not shapes {list(z.shape)} and {list(heat.shape)}"
        )
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if heat.ndim:
            z = z / np.where(heat > 0, heat, _F32(1)).astype(_F32).reshape(-1, 1, 1)
        elif heat > 0 and heat != 1:
            z = z / heat
        # Subtracting 1 cancels where one candidate has nearly everything; the engine does it so,
        # too. No difference is below 0: the largest candidate alone is 1.
        others = np.exp(z - z.max(-1, keepdims=True)).sum(-1) - _F32(1)
        feature = -np.log(others)
        return np.minimum(np.maximum(feature, _F32(-MOST_LOG_ODDS)), _F32(MOST_LOG_ODDS))


class Estimator:
    """Confidences of drafts, calibrated by what the target accepted.

    Each step: :meth:`features` and :meth:`predict` for what was drafted; and, once the target has
    judged it, :meth:`observe` with the same two arrays. A confidence is *conditional*: the
    probability that a slot is accepted if all before it were.

    Attributes:
        slots: K.
        slope: float32.
        intercepts: float32 ``[K]``.
        steps: calls of :meth:`observe`.
        history: coefficients at the start and after each refit, the last 10,000 of them.
    """

    def __init__(self, slots: int) -> None:
        """Start uncalibrated, with the engine's coefficients.

        Raises:
            DraftError: ``slots`` is not a number from 0 to ``MOST_SLOTS``.
        """
        whole = isinstance(slots, int | np.integer) and not isinstance(slots, bool)
        if not whole or not 0 <= slots <= MOST_SLOTS:
            raise DraftError(
                f"an estimator needs a number of slots from 0 to {MOST_SLOTS}, not {slots!r:.60}"
            )
        self.slots = int(slots)
        self.slope = _F32(START_SLOPE)
        self.intercepts: Array = np.full(self.slots, START_INTERCEPT, _F32)
        self.steps = 0
        self._clear()
        self.history: deque[Coefficients] = deque([self.coefficients()], _HISTORY)

    @property
    def information(self) -> Array:
        """Since the last refit and by slot: sums of w f², w f and w, for w = p(1 - p); float32
        ``[K, 3]``."""
        self._add_up()
        return self._information

    @property
    def gradient(self) -> Array:
        """The sums of e f and e, for e = label - p; float32 ``[K, 2]``."""
        self._add_up()
        return self._gradient

    @property
    def counts(self) -> Array:
        """Observations; float32 ``[K]``."""
        self._add_up()
        return self._counts

    def coefficients(self) -> Coefficients:
        """The coefficients as they are."""
        return Coefficients(
            step=self.steps, slope=float(self.slope), intercepts=tuple(self.intercepts.tolist())
        )

    def features(self, scores: ArrayLike, temperature: ArrayLike) -> Array:
        """:func:`log_odds` of scores ``[R, K, C]`` -> float32 ``[R, K]``.

        Raises:
            DraftError: the shapes do not fit.
        """
        feature = log_odds(scores, temperature)
        self._fits(feature, "features")
        return feature

    def predict(self, features: ArrayLike) -> Array:
        """Confidences of features, both float32 ``[R, K]``; NaN stays NaN.

        Raises:
            DraftError: the shape does not fit.
        """
        f = _floats(features, "features")
        self._fits(f, "features")
        odds = f * -self.slope
        odds -= self.intercepts
        with np.errstate(over="ignore"):  # exp of a large number is inf, and the result 0
            return _F32(1) / (_F32(1) + np.exp(odds, out=odds))

    def observe(
        self, predicted: ArrayLike, features: ArrayLike, accepted: ArrayLike, admitted: ArrayLike
    ) -> bool:
        """Learn from a step's verdicts; True if the coefficients were fitted again (each 100th).

        Slot k was *observed* if it was verified and all before it were accepted: ``k <= accepted``
        and ``k < admitted``. Its label is 1 if it was accepted too, else 0. Other slots teach
        nothing. A step without drafts counts as a step.

        Args:
            predicted, features: of these drafts when they were drafted, float32 ``[R, K]``.
            accepted: drafts the target accepted, int ``[R]``.
            admitted: drafts it verified, int ``[R]``.

        Raises:
            DraftError: the shapes do not fit, or not 0 <= accepted <= admitted <= K.
        """
        p, f = _floats(predicted, "predictions"), _floats(features, "features")
        a, m = _counts(accepted), _counts(admitted)
        self._fits(p, "predictions")
        self._fits(f, "features")
        if p.shape != f.shape or a.shape != p.shape[:1] or m.shape != p.shape[:1]:
            raise DraftError(
                "an observation needs predictions and features of the same requests, and counts of "
                f"each, not shapes {[list(x.shape) for x in (p, f, a, m)]}"
            )
        if a.size and not (a.min() >= 0 and (a <= m).all() and m.max() <= self.slots):
            raise DraftError(
                f"verdicts must be 0 <= accepted <= admitted <= {self.slots} for every request"
            )
        return self.take(p.copy(), f.copy(), a, m)

    def take(
        self, predicted: Array, features: Array, accepted: ArrayLike, admitted: ArrayLike
    ) -> bool:
        """:meth:`observe` without its checks, and the arrays are kept: for the decode loop, whose
        verdicts are right and whose time it is."""
        if len(predicted):
            self._waiting.append((predicted, features, accepted, admitted))
            if len(self._waiting) == _WAITING:
                self._add_up()
        self.steps += 1
        if self.steps % REFIT_STEPS:
            return False
        self._refit()
        self.history.append(self.coefficients())
        return True

    def state(self) -> dict[str, Any]:
        """Everything it knows, as plain values for JSON; exact."""
        return {
            "slots": self.slots,
            "steps": self.steps,
            "slope": float(self.slope),
            "intercepts": self.intercepts.tolist(),
            "information": self.information.tolist(),
            "gradient": self.gradient.tolist(),
            "counts": self.counts.tolist(),
            "history": [[c.step, c.slope, list(c.intercepts)] for c in self.history],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Estimator:
        """Back from :meth:`state`; goes on as the first one would have.

        Raises:
            DraftError: a value is missing or does not fit.
        """
        try:
            made = cls(state["slots"])
            made.steps = int(state["steps"])
            made.slope = _F32(state["slope"])
            for name, own in (
                ("intercepts", "intercepts"),
                ("information", "_information"),
                ("gradient", "_gradient"),
                ("counts", "_counts"),
            ):
                values, shape = np.array(state[name], _F32), getattr(made, own).shape
                if not made.slots and not values.size:
                    continue  # lists without a value do not tell their shape
                if values.shape != shape:
                    raise DraftError(
                        f"an estimator's state for {made.slots} slots has {name} of shape "
                        f"{list(shape)}, not {list(values.shape)}"
                    )
                setattr(made, own, values)
            made.history = deque(
                (
                    Coefficients(step=int(n), slope=float(w), intercepts=tuple(map(float, b)))
                    for n, w, b in state["history"]
                ),
                _HISTORY,
            )
        except KeyError as error:
            raise DraftError(f"an estimator's state lacks {error.args[0]!r}") from error
        except (TypeError, ValueError, OverflowError) as error:
            if isinstance(error, DraftError):
                raise
            raise DraftError(f"an estimator's state cannot be read: {error}") from error
        # The sums may be NaN: of verdicts on what was NaN, and the next refit drops them.
        known = isfinite(made.slope) and bool(np.isfinite(made.intercepts).all())
        if made.steps < 0 or not known or made.slope < 0:
            raise DraftError("an estimator's state has coefficients that are no numbers")
        for c in made.history:
            if len(c.intercepts) != made.slots or not all(map(isfinite, (c.slope, *c.intercepts))):
                raise DraftError(
                    f"an estimator's state has a history whose coefficients of step {c.step} are "
                    f"not a slope and {made.slots} intercepts"
                )
        return made

    def _add_up(self) -> None:
        """Add the verdicts that wait to the sums."""
        if not self._waiting:
            return
        p, f, a, m = (np.concatenate(column) for column in zip(*self._waiting, strict=True))
        self._waiting.clear()
        k = np.arange(self.slots)
        observed = (k <= a[:, None]) & (k < m[:, None])
        w = np.where(observed, p * (_F32(1) - p), _F32(0))
        e = np.where(observed, (k < a[:, None]) - p, _F32(0)).astype(_F32)
        # An unobserved slot's feature may be anything, and 0 x inf is NaN.
        f = np.where(observed, f, _F32(0))
        # Added up in float64 and rounded once: within a rounding of any order of adding.
        self._information += _total(w * f * f, w * f, w)
        self._gradient += _total(e * f, e)
        self._counts += observed.sum(0).astype(_F32)

    def _refit(self) -> None:
        """One Newton step on the round's sums; the system is an arrowhead: a slope, K intercepts.

        A step that is no finite number is not taken, nor one to a negative slope: more certainty
        of the drafter must never mean less confidence.
        """
        ridge, damping = _F32(RIDGE), _F32(DAMPING)
        b, c = self.information[:, 1], self.information[:, 2] + ridge
        a = self.information[:, 0].sum(dtype=_F32) + ridge
        g, g0 = self.gradient[:, 1], self.gradient[:, 0].sum(dtype=_F32)
        n, total = self.counts, self.counts.sum(dtype=_F32)
        with np.errstate(all="ignore"):
            slope = (g0 - (b * g / c).sum(dtype=_F32)) / (a - (b * b / c).sum(dtype=_F32))
            slope *= total / (total + damping)
            if not np.isfinite(slope) or self.slope + slope < 0:
                slope = _F32(0)
            intercepts = (g - b * slope) / c * (n / (n + damping))
        self.slope = _F32(self.slope + slope)
        self.intercepts = self.intercepts + np.where(np.isfinite(intercepts), intercepts, _F32(0))
        self._clear()

    def _clear(self) -> None:
        self._waiting: list[tuple[Array, Array, ArrayLike, ArrayLike]] = []
        self._information: Array = np.zeros((self.slots, 3), _F32)
        self._gradient: Array = np.zeros((self.slots, 2), _F32)
        self._counts: Array = np.zeros(self.slots, _F32)

    def _fits(self, values: Array, name: str) -> None:
        if values.ndim != 2 or values.shape[1] != self.slots:
            raise DraftError(
                f"{name} for {self.slots} slots are [requests, {self.slots}], "
                f"not {list(values.shape)}"
            )


def _counts(values: ArrayLike) -> NDArray[np.int64]:
    try:
        given = np.asarray(values)
    except ValueError:
        raise DraftError("accepted and admitted are a whole number for each request") from None
    if given.size and given.dtype.kind not in "iu":
        raise DraftError(f"accepted and admitted are whole numbers, not {given.dtype}")
    return given.astype(np.int64)


def _floats(values: ArrayLike, name: str) -> Array:
    """As float32; what is too large for it is infinite."""
    if type(values) is np.ndarray and values.dtype == _F32:
        return values
    try:
        with np.errstate(over="ignore"):
            return np.asarray(values, _F32)
    except (TypeError, ValueError, OverflowError):
        raise DraftError(f"{name} are an array of numbers, of one length in each axis") from None


def _total(*columns: Array) -> Array:
    return np.stack([column.sum(0, dtype=np.float64) for column in columns], -1).astype(_F32)
