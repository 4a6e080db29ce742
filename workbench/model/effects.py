"""Effects as numbers: what the architecture's closed forms imply, and what an ablation changes.

The first half needs the config only and no torch: SSMax and RoPE over position, the residual scale
over depth, parameters by part and group of layers. The second half runs a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import pi, sqrt
from typing import TYPE_CHECKING

from workbench.errors import InspectionError
from workbench.model.config import SSMAX_LENGTH, SSMAX_POWER, AttentionType, BeamConfig
from workbench.model.tensors import Part, tensor_specs

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.model.beam import Beam

# -- closed forms -----------------------------------------------------------------------------


def ssmax_scale(position: int) -> float:
    """Factor on a full layer's query at ``position`` (from 0): (1 + (p + 1) / 2048) ** 0.1."""
    return (1.0 + (position + 1.0) / SSMAX_LENGTH) ** SSMAX_POWER


def rope_wavelengths(config: BeamConfig) -> tuple[float, ...]:
    """Tokens for one full turn of each of the ``head_dim / 2`` rotated pairs: 2 pi theta^(2i/D)."""
    dim = config.head_dim
    return tuple(2 * pi * config.rope_theta ** (i / dim) for i in range(0, dim, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualAdd:
    """One depth-scaled add of the residual stream, counted as in ``reference.depth_scale``.

    ``new`` and ``stream`` are the factors on the sublayer's normed output and on the old stream.
    ``survives`` is the factor with which that output is still in the stream after the last layer,
    namely ``new`` times every later ``stream``: 1/sqrt(last n), the same for every sublayer.
    """

    number: int
    layer: int
    sublayer: str  # "attention" or "mlp"
    new: float
    stream: float
    survives: float


def residual_adds(config: BeamConfig) -> tuple[ResidualAdd, ...]:
    """The ``2 L`` adds from the first layer's attention to the last layer's MLP."""
    last = 2 * config.num_hidden_layers + 1
    adds: list[ResidualAdd] = []
    later = 1.0  # product of the stream factors of all later adds
    for number in range(last, 1, -1):
        new, stream = 1 / sqrt(number), sqrt((number - 1) / number)
        adds.append(
            ResidualAdd(
                number=number,
                layer=number // 2 - 1,
                sublayer="mlp" if number % 2 else "attention",
                new=new,
                stream=stream,
                survives=new * later,
            )
        )
        later *= stream
    return tuple(reversed(adds))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters of one part in one run of layers; ``active`` of them work on each token."""

    part: Part
    layers: tuple[int, ...]  # empty for embedding, head and the last norm
    attention: AttentionType | None  # layer type, for part "attention"
    total: int
    active: int


def parameter_groups(config: BeamConfig, *, runs: int = 7) -> tuple[ParameterGroup, ...]:
    """Every parameter in one group: experts in ``runs`` runs of layers, attention by layer type.

    The sums over the groups are ``tensors.total_parameters`` and ``tensors.active_parameters``.
    """
    sparse = config.sparse_layers
    size = -(-len(sparse) // runs) if sparse else 1
    run_of = {layer: index // size for index, layer in enumerate(sparse)}
    # (part, kind of attention, run of layers) -> (layers, parameters)
    found: dict[tuple[Part, AttentionType | None, int | None], tuple[set[int], int]] = {}
    for spec in tensor_specs(config):
        attention, run = None, None
        if spec.layer is not None and spec.part == "experts":
            run = run_of[spec.layer]
        elif spec.layer is not None and spec.part == "attention":
            attention = config.layer_types[spec.layer]
        layers, count = found.get((spec.part, attention, run), (set(), 0))
        if spec.layer is not None:
            layers.add(spec.layer)
        found[spec.part, attention, run] = (layers, count + spec.size)
    return tuple(
        ParameterGroup(
            part=part,
            layers=tuple(sorted(layers)),
            attention=attention,
            total=count,
            active=count
            if part != "experts"
            else count // config.num_experts * config.num_experts_per_tok,
        )
        for (part, attention, _), (layers, count) in found.items()
    )


# -- measured on a model ----------------------------------------------------------------------


def stream_rms(hidden: Tensor) -> tuple[float, ...]:
    """Root mean square of the residual stream at each of its places.

    ``hidden [L + 1, T, H]`` is that of ``inspect.capture``: the embedding, then after each layer.
    The mean is over tokens and channels, the first token left out: it is the beginning-of-sequence
    marker, whose stream says little about the others.
    """
    rows = hidden[:, 1:] if hidden.shape[1] > 1 else hidden
    return tuple(rows.double().square().mean((1, 2)).sqrt().tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionReach:
    """How far one map of attention looks, as means over its queries, the first left out.

    The first query sees one key, which is token 0 and its own at once: it has no choice to make.
    ``distance`` is in tokens, ``entropy`` in nats. ``first`` is the share on token 0 (the usual
    resting place of attention that has nothing to do), ``itself`` that on the query's own token,
    ``beyond`` that on keys a window of the given size would not show.
    """

    distance: float
    entropy: float
    first: float
    itself: float
    beyond: float


def attention_reach(probabilities: Tensor, window: int) -> AttentionReach:
    """Figures of one map of a capture: ``probabilities [T, T]`` (query, key), rows add up to 1.

    A map of one token has its first query only, and the figures are that query's.
    """
    import torch

    p = probabilities.double()
    skip = 1 if p.shape[0] > 1 else 0
    position = torch.arange(p.shape[0])
    distance = (position[:, None] - position)[skip:]
    itself = p.diagonal()[skip:]
    p = p[skip:]
    return AttentionReach(
        distance=float((p * distance).sum(-1).mean()),
        entropy=float(torch.special.entr(p).sum(-1).mean()),
        first=float(p[:, 0].mean()),
        itself=float(itself.mean()),
        beyond=float((p * (distance >= window)).sum(-1).mean()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """Mean next-token loss of a prompt, whole and with a part switched off, in nats a token.

    ``layers[l]`` is the loss with layer ``l`` passed over; ``experts[l][e]`` (sparse layers only)
    that with expert ``e`` of layer ``l`` never chosen, so that the router takes its next best.
    """

    tokens: int  # predicted tokens the mean is over
    loss: float
    layers: tuple[float, ...]
    experts: dict[int, tuple[float, ...]]

    def layer_effects(self) -> tuple[float, ...]:
        """Rise of the loss for each layer, nats a token; negative where the loss fell."""
        return tuple(value - self.loss for value in self.layers)

    def expert_effects(self) -> dict[int, tuple[float, ...]]:
        """Rise of the loss for each expert, by layer."""
        return {
            layer: tuple(value - self.loss for value in values)
            for layer, values in self.experts.items()
        }


def next_token_loss(beam: Beam, token_ids: Sequence[int]) -> float:
    """Mean negative log-likelihood of tokens 1 … T-1 given those before, nats a token."""
    import torch

    with torch.inference_mode():
        ids = torch.tensor(token_ids, device=beam.device)
        logits = beam.sequence_logits(ids)[:-1]
        return float(torch.nn.functional.cross_entropy(logits.double(), ids[1:]))


def ablation(
    beam: Beam, prompt: str | Sequence[int], *, experts: bool | Iterable[int] = True
) -> Ablation:
    """Switch off each layer in turn, then each expert in turn, and measure the loss of ``prompt``.

    Args:
        experts: True for every sparse layer, False for none, or the layers whose experts to try.

    One forward pass for each layer and each expert. Raises InspectionError for a prompt of fewer
    than two tokens or experts of a dense layer, PromptError for a prompt that cannot be run.
    """
    from workbench.model.intervene import intervene
    from workbench.model.prompts import prompt_ids

    (ids,) = prompt_ids(beam, prompt if isinstance(prompt, str) else list(prompt))
    if len(ids) < 2:
        raise InspectionError("an ablation needs at least two tokens to have a loss; write more")
    config = beam.config
    chosen = config.sparse_layers if experts is True else tuple(experts or ())
    whole = next_token_loss(beam, ids)
    layers = []
    for layer in range(config.num_hidden_layers):
        with intervene(beam, ablate_layers=[layer]):
            layers.append(next_token_loss(beam, ids))
    by_expert: dict[int, tuple[float, ...]] = {}
    for layer in chosen:
        losses = []
        for expert in range(config.num_experts):
            with intervene(beam, ablate_experts=[(layer, expert)]):
                losses.append(next_token_loss(beam, ids))
        by_expert[layer] = tuple(losses)
    return Ablation(tokens=len(ids) - 1, loss=whole, layers=tuple(layers), experts=by_expert)
