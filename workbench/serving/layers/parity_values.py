"""What a comparison of an engine's layers with the PyTorch model found, as values and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from workbench.errors import ServingError
from workbench.model.display import Shown
from workbench.serving.layers.parity_reading import UnreadableError, read_value

SCHEMA = "workbench-layer-parity/1"

# Worst first. "coarser": an engine in float32 that is off by more than float32 explains, and no
# more than bfloat16 would be; products in TF32, for one. "not compared": no token had the same
# experts, or our own run has no finite numbers to measure by.
Verdict = Literal["differs", "coarser", "not compared", "agrees"]
VERDICTS: tuple[Verdict, ...] = ("differs", "coarser", "not compared", "agrees")

# Whence the engine's choices of experts are known; see :class:`RouterFigures`.
ChoiceSource = Literal["ids", "logits", "none"]

# Of a layer; empty for the head.
Attention = Literal["sliding", "full", ""]
Mlp = Literal["dense", "sparse", ""]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far one run of a layer is from the float32 one, over tokens.

    Attributes:
        mean, worst: of the tokens' relative errors: the norm of a token's difference over that of
            what the layer adds to its stream.
        worst_token: the position that has the largest.
        cosine: the smallest between what the two runs add to a token's stream.
        largest: absolute difference of an element.
    """

    mean: float
    worst: float
    worst_token: int
    cosine: float
    largest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A token for which the engine's router chose otherwise than our float32 one.

    ``margin``: how far apart the exchanged experts are in our biased scores (the best that only we
    chose less the worst that only the engine chose). ``error`` is the token's relative error.
    """

    token: int
    margin: float
    ours: tuple[int, ...]
    engine: tuple[int, ...]
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterFigures:
    """The choices of experts in a sparse layer.

    Attributes:
        source: "ids": what the engine's router chose; "logits": our rule on the engine's router
            logits, where its kernel chooses for itself; "none": neither could be seen, and
            exchanged experts are among the errors of the layer.
        flipped: tokens whose set of experts is not that of our float32 run.
        flipped_ours: the same of our own run in the engine's precision.
        widest: the largest margin among the engine's.
        allowed: what near ties explain: the factor times twice the largest error of a score in our
            own run in the engine's precision.
        score_error: that error.
        flips: the widest of the engine's, up to 16.
    """

    source: ChoiceSource
    flipped: int
    flipped_ours: int
    widest: float
    allowed: float
    score_error: float
    flips: tuple[Flip, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFigures:
    """One layer, or final norm and head (``layer`` None), of the engine and of our own runs.

    Errors of the head are relative to the logits themselves.

    Attributes:
        layer: its number; None for the head, whose errors are those of the last token's logits.
        attention, mlp: "sliding" or "full", "dense" or "sparse"; empty for the head.
        tokens: that were compared; tokens with exchanged experts are apart.
        engine: the engine against our float32 run; None where no token was left.
        yardstick: our run in the engine's precision (bfloat16 if that is float32) against it.
        engine_mlp, yardstick_mlp: the same for what goes into the MLP: the attention half alone.
            Relative to that itself.
        router: of sparse layers.
        rank_gap: the largest relative difference between ranks; 0.0 for the same bits, None for
            one rank.
        allowed: the mean error up to which it agrees; None where no token was left. The worst token
            may be the same multiple of the yardstick's worst, or ten times this in float32.
        verdict: with its ``reason`` in words, empty where it agrees.
    """

    layer: int | None
    attention: Attention
    mlp: Mlp
    tokens: int
    engine: Gap | None
    yardstick: Gap | None
    engine_mlp: Gap | None
    yardstick_mlp: Gap | None
    router: RouterFigures | None
    rank_gap: float | None
    allowed: float | None
    verdict: Verdict
    reason: str

    @property
    def name(self) -> str:
        """``layer 3`` or ``head``."""
        return "head" if self.layer is None else f"layer {self.layer}"

    @property
    def ratio(self) -> float | None:
        """The engine's mean error in multiples of the yardstick's; None where there is none."""
        if self.engine is None or self.yardstick is None or not self.yardstick.mean:
            return None
        return self.engine.mean / self.yardstick.mean


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LayerParity(Shown):
    """An engine's layers beside the PyTorch model's; ``layer_parity`` makes it.

    Attributes:
        model: name of the checkpoint.
        engine: what the first worker says of itself: version, dtype, quantization, tensor-parallel
            size, device and others; plain values.
        reference: where our runs were: device, its name, torch, and the precision of the yardstick.
        tokens, window: of the prompt, and the sliding window.
        factor: how many times the yardstick an error may be.
        recorded_on: date.
        layers: in the order of the model, the head last.
        notes: what else to know.
    """

    model: str
    engine: Mapping[str, Any]
    reference: Mapping[str, Any]
    tokens: int
    window: int
    factor: float
    recorded_on: str
    layers: tuple[LayerFigures, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def agrees(self) -> bool:
        """Whether every layer does."""
        return all(each.verdict == "agrees" for each in self.layers)

    def __getitem__(self, layer: int | str) -> LayerFigures:
        """The layer of that number, or ``"head"``."""
        for each in self.layers:
            if each.layer == layer or (layer == "head" and each.layer is None):
                return each
        raise KeyError(layer)

    def __repr__(self) -> str:
        lines = [
            f"{self.model} on vLLM {self.engine.get('version')}, {self.engine.get('dtype')}: "
            + ("every layer agrees" if self.agrees else "not every layer agrees")
        ]
        for each in self.layers:
            mean = "–" if each.engine is None else f"{each.engine.mean:.1e}"
            beside = "–" if each.yardstick is None else f"{each.yardstick.mean:.1e}"
            lines.append(
                f"{each.name}: {mean} of what it adds, ours {beside}: {each.verdict}"
                + (f" ({each.reason})" if each.reason else "")
            )
        return "\n".join([*lines, *self.notes])

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON holds it; :meth:`from_dict` reads it again."""
        return {"schema": SCHEMA} | asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> LayerParity:
        """The value of a document that :meth:`to_dict` made, also after JSON.

        Raises:
            ServingError: it is of something else, or incomplete.
        """
        if not isinstance(document, Mapping) or document.get("schema") != SCHEMA:
            raise ServingError(
                f"this is no comparison of layers ({SCHEMA}); give what LayerParity.to_dict kept"
            )
        values = {key: value for key, value in document.items() if key != "schema"}
        try:
            return read_value(cls, values)
        except UnreadableError as error:
            raise ServingError(
                f"the comparison of layers is incomplete or of another version ({error}); "
                "make it again"
            ) from None
