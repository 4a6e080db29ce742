"""Experts in FP8: what a value means, how random ones are made in place, what rounding costs.

A weight is its E4M3 value times the float32 scale of its output row. A row has one scale because a
matrix-vector product can then multiply once, behind the row's sum: in the loop that memory feeds
there is nothing but the conversion, and a scale a row of 5120 costs a thousandth of the bytes. (A
scale a block of 128 inputs would have to be applied within the sum.) The row's largest weight
becomes 448, E4M3's largest value, so that nothing saturates.

Every expert is drawn from a seed of its own, one after the other through a few megabytes of
float32: at full depth the same experts in BF16 would not fit beside them, and what an expert was
before it was rounded can be had again (:meth:`.weights.RankWeights.unrounded`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels.reference import router

if TYPE_CHECKING:
    from workbench.kernels.rank.weights import RankWeights

FORMAT = torch.float8_e4m3fn
DESCRIPTION = "fp8 (e4m3, one float32 scale a row)"
LARGEST = 448.0
# The most by which one weight can be off: half a step of 2^-3 of its power of two. Errors of
# independent weights average out, so a whole layer's output must stay below it too.
ERROR_LIMIT = 2.0**-4
TOKENS = 4  # over which the error of a layer is taken
_SPREAD = 0x9E3779B97F4A7C15  # odd, bits everywhere: 2^64 over the golden ratio
# Triton converts E4M3 on these GPUs and newer ones.
CAPABILITY = (8, 9)


def why_not(device: torch.device) -> str | None:
    """Why Triton kernels cannot read FP8 weights on a device; None where they can."""
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability >= CAPABILITY:
        return None
    return (
        "Triton reads FP8 weights on GPUs of compute capability 8.9 or newer, and this one has "
        f"{capability[0]}.{capability[1]}; leave out --experts fp8"
    )


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """float32 ``[..., R, K]`` -> E4M3 values ``[..., R, K]`` and float32 scales ``[..., R]``.

    The nearest values, ties to even; a row of zeros has the least scale.
    """
    scale = rows.abs().amax(-1) / LARGEST
    scale.clamp_(min=torch.finfo(torch.float32).tiny)
    return (rows / scale[..., None]).to(FORMAT), scale


def dequantise(values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Weights ``[..., R, K]`` of E4M3 values and their rows' scales; exact in float64."""
    return values.float().to(dtype) * scale.to(dtype)[..., None]


def chosen(values: Tensor, scale: Tensor, ids: Tensor, rows: bool = True) -> Tensor:
    """float32 weights ``[N, R, K]`` of the experts ``ids [N]``, without asking the host for them.

    ``rows``: the values lie as ``[E, R, K]``, else as ``[E, K, R]``.
    """
    # As bytes: not every torch indexes float8 tensors.
    own = values.view(torch.uint8)[ids].view(FORMAT)
    return dequantise(own if rows else own.mT, scale[ids], torch.float32)


class Drawer:
    """Draws single experts of a rank before rounding, float32 N(0, ``std``)."""

    def __init__(self, device: torch.device, seed: int, std: float) -> None:
        self.device, self.seed, self.std = device, seed, std
        self._generator = torch.Generator(device=device)

    def expert(self, layer: int, expert: int, width: int, hidden: int) -> tuple[Tensor, Tensor]:
        """gate_up ``[2 width, hidden]`` and down ``[hidden, width]`` of one expert."""
        # A seed of its own for each expert of a rank (2^12 layers of 2^20), far from those of other
        # ranks and from the rank's own, also in the 32 bits that a generator on a CPU takes of it.
        own = ((layer + 1) << 20) + expert + self.seed * _SPREAD
        self._generator.manual_seed(own % (1 << 63))
        shapes = ((2 * width, hidden), (hidden, width))
        gate_up, down = (
            torch.empty(shape, device=self.device).normal_(0.0, self.std, generator=self._generator)
            for shape in shapes
        )
        return gate_up, down


def filled(
    drawer: Drawer | None, layer: int, gate_up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor]:
    """Fill a layer's experts, ``[E, 2 I, H]`` and ``[E, H, I]`` (a view); their rows' scales.

    Without a drawer (tensors that have no memory) nothing is filled.
    """
    experts, hidden, width = down.shape
    scales = tuple(
        torch.empty(experts, rows, dtype=torch.float32, device=gate_up.device)
        for rows in (2 * width, hidden)
    )
    if drawer is not None:
        for expert in range(experts):
            drawn = drawer.expert(layer, expert, width, hidden)
            for rows, values, scale in zip(drawn, (gate_up, down), scales, strict=True):
                rounded, scale[expert] = quantise(rows)
                values[expert].copy_(rounded)
    return scales[0], scales[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisationError:
    """What the rounding of weights costs, apart from any arithmetic: relative errors (L2).

    Attributes:
        weights: of the experts' weights.
        mlp_output: of a sparse layer's MLP output, exact products on both sides.
        limit: what ``mlp_output`` has to stay below.
        layer: which layer.
        tokens: over how many random inputs.
    """

    weights: float
    mlp_output: float
    limit: float
    layer: int
    tokens: int

    @property
    def passed(self) -> bool:
        """Whether the output's error is below its limit."""
        return self.mlp_output < self.limit

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return asdict(self) | {"passed": self.passed}


def quantisation_error(
    weights: RankWeights, layer: int | None = None, tokens: int = TOKENS
) -> QuantisationError | None:
    """How far rounding moved a sparse layer's experts and its MLP output; None without FP8 experts.

    ``layer``: the first sparse one by default. Inputs are N(0, 1), as behind a norm; the layer's
    router chooses; everything else is float64, from the rank's own weights and from what they were
    before they were rounded.

    Raises:
        KernelError: the layer has no FP8 experts, or there are no tokens.
    """
    sparse = [n for n, one in enumerate(weights.layers) if one.gate_up_scale is not None]
    if not sparse:
        return None
    index = sparse[0] if layer is None else layer
    if index not in sparse or tokens < 1:
        raise KernelError(
            f"there is nothing to compare over {tokens} tokens in layer {index}; give 1 or more, "
            f"and a layer with FP8 experts ({sparse[0]} to {sparse[-1]})"
        )
    one, s = weights.layers[index], weights.shapes
    if one.router is None or one.correction_bias is None:
        raise KernelError(f"layer {index} has FP8 experts and no router: it was not made by random")
    # Drawn on the host, so that the same inputs are used everywhere.
    x = torch.randn(tokens, s.hidden, generator=torch.Generator().manual_seed(0))
    x = x.to(weights.device)
    ids, shares = router(
        x, one.router, one.correction_bias, top_k=s.top_k, n_group=s.n_group,
        topk_group=s.topk_group, renormalise=s.renormalise,
    )  # fmt: skip
    moved, size = 0.0, 0.0
    found, wanted = (
        torch.zeros(tokens, s.hidden, dtype=torch.float64, device=x.device) for _ in range(2)
    )
    for expert in ids.unique().tolist():
        token, place = (ids == expert).nonzero(as_tuple=True)
        share = shares[token, place].double()[:, None]
        was = [each.double() for each in weights.unrounded(index, expert)]
        now = weights.expert(one, expert)
        for old, new in zip(was, now, strict=True):
            moved += float((new - old).square().sum())
            size += float(old.square().sum())
        for total, (gate_up, down) in ((wanted, was), (found, now)):
            gate, up = (x[token].double() @ gate_up.T).chunk(2, -1)
            total.index_add_(0, token, share * ((gate * torch.sigmoid(gate) * up) @ down.T))
    return QuantisationError(
        weights=(moved / size) ** 0.5,
        mlp_output=float((found - wanted).norm() / wanted.norm()),
        limit=ERROR_LIMIT,
        layer=index,
        tokens=tokens,
    )
