"""How far off an engine's layer may be, and the verdict on it in a word and a sentence."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.serving.layers.parity_values import VERDICTS, Gap, RouterFigures, Verdict

# What float32 may be off by in the mean, relative to what a layer adds: sums of thousands of
# products in another order, and the engine's angles of RoPE, which are float32. A single token may
# be ten times as far. Seen on CPUs: 1e-6, single tokens 4e-6; products in TF32 are about 4e-4 off.
FLOAT32_ALLOWED = 1e-5
FLOAT32_WORST = 10 * FLOAT32_ALLOWED
# An error that is not a number, or larger than this, counts as this: comparisons would lose NaN,
# and JSON has neither NaN nor infinity.
NO_NUMBER = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What still agrees.

    Attributes:
        factor: how many times the error of our own run in the engine's precision.
        precise: whether the engine computes in float32. It is then held to what float32 explains,
            and called "coarser" up to the factor times a bfloat16 run's error.
    """

    factor: float
    precise: bool

    def mean(self, yardstick: Gap | None) -> float | None:
        """The mean error up to which a layer agrees; None where there is no yardstick."""
        if yardstick is None:
            return None
        return FLOAT32_ALLOWED if self.precise else self.factor * yardstick.mean

    def margin(self, score_error: float) -> float:
        """How far apart in our scores two experts may be that were exchanged as a near tie.

        Both scores may be off by ``score_error``, the largest of our run in the engine's precision.
        """
        return self._margin(FLOAT32_ALLOWED if self.precise else score_error)

    def verdict(
        self,
        engine: Gap | None,
        yardstick: Gap | None,
        router: RouterFigures | None = None,
        rank_gap: float | None = None,
    ) -> tuple[Verdict, str]:
        """The worst that any figure says, and that figure in words; no words where all agree."""
        found: list[tuple[Verdict, str]] = []

        def hold(what: str, value: float, beside: float, float32: float = FLOAT32_WORST) -> None:
            if value <= (float32 if self.precise else self.factor * beside):
                return
            against = f"{value:.1e}, our own run {beside:.1e}"
            if value <= self.factor * beside:
                found.append(("coarser", f"{what} is {against}: more than float32 explains"))
            else:
                found.append(("differs", f"{what} is {against}"))

        if router is not None and router.widest > router.allowed:
            words = (
                f"experts were exchanged that are {router.widest:.1e} apart by our scores; near "
                f"ties are within {router.allowed:.1e}"
            )
            coarse = router.widest <= self._margin(router.score_error)
            found.append(("coarser" if coarse else "differs", words))
        if engine is None or yardstick is None:
            found.append(("not compared", "the experts of every token were exchanged"))
        elif yardstick.worst >= NO_NUMBER:  # any error would be within a multiple of it
            found.append(
                (
                    "not compared",
                    f"our own run has no finite numbers at token {yardstick.worst_token}, as where "
                    "the engine's stream before the layer has none",
                )
            )
        else:
            hold("the mean error", engine.mean, yardstick.mean, FLOAT32_ALLOWED)
            hold(f"the error of token {engine.worst_token}", engine.worst, yardstick.worst)
            if rank_gap:
                hold("the difference between ranks", rank_gap, yardstick.worst)
        if not found:
            return "agrees", ""
        return min(found, key=lambda one: VERDICTS.index(one[0]))

    def _margin(self, error: float) -> float:
        return self.factor * 2 * error
