"""Random weights of one tensor-parallel rank, allocated once and in place.

At TP8 the rank of the 501B model takes 116.9 GiB of a 141 GB card, so nothing here exists twice:
each tensor is allocated with its final size and dtype and filled where it lies. The experts' down
projection can lie in two ways, ``"IH"`` (``[E, I, H]``, what the operation ``expert_mlp`` takes)
and ``"HI"`` (``[E, H, I]``, rows of outputs, what a matrix-vector product streams best); there is
room for one of them only, and :meth:`RankWeights.relayout` turns one into the other layer by layer.

The experts have the activations' dtype, or are FP8 with a scale for each output row
(:mod:`workbench.kernels.rank.fp8`), which halves the rank: 59.7 GiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from workbench import hardware
from workbench.errors import KernelError
from workbench.kernels.footprint import free_bytes
from workbench.kernels.rank import fp8
from workbench.kernels.reference import depth_scale
from workbench.kernels.shapes import Shapes
from workbench.model.config import BeamConfig

DownLayout = Literal["IH", "HI"]
ExpertFormat = Literal["same", "fp8"]  # same: the activations' dtype
EXPERT_FORMATS: tuple[ExpertFormat, ...] = ("same", "fp8")

MATRIX_STD = 0.02
NORM_STD = 0.1
GATE_BIAS_STD = 0.5
CORRECTION_STD = 0.01
# CUDA's allocator hands out large blocks in pages of 2 MiB.
_PAGE = 2 << 20
# Left free beside weights and state: graphs, kernels, the temporaries of the reference.
SPARE_BYTES = 2 << 30


@dataclass(slots=True, kw_only=True, eq=False)
class LayerWeights:
    """One layer of one rank; the activation dtype (BF16 in the full model) unless said.

    ``A`` query heads, ``G`` KV heads, ``D`` head_dim, ``H`` hidden, ``E`` experts, ``I`` the rank's
    expert width, ``W`` the rank's dense width.
    """

    full: bool  # full attention (no RoPE, SSMax), else sliding
    dense: bool
    qkvg: Tensor  # [2 (A + G) D, H], rows q, k, v, gate
    o_proj: Tensor  # [H, A D]
    qk_norm: Tensor  # [2, D], rows q, k
    gate_bias: Tensor  # [A]
    input_norm: Tensor  # [H]
    post_attention_norm: Tensor  # [H]
    pre_mlp_norm: Tensor  # [H]
    post_mlp_norm: Tensor  # [H]
    router: Tensor | None  # float32 [E, H]
    correction_bias: Tensor | None  # float32 [E]
    gate_up: Tensor  # dense [2 W, H]; sparse [E, 2 I, H]; gate rows first
    down: Tensor  # dense [H, W]; sparse [E, I, H] ("IH") or [E, H, I] ("HI")
    # With FP8 experts, gate_up and down of sparse layers are E4M3, and their rows have scales.
    gate_up_scale: Tensor | None = None  # float32 [E, 2 I]
    down_scale: Tensor | None = None  # float32 [E, H]
    scales: tuple[tuple[float, float], tuple[float, float]]  # attention's and the MLP's boundary

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the layer."""
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                yield value

    def of_experts(self) -> tuple[Tensor, ...]:
        """Those of the tensors whose first axis is experts and of which a step reads the chosen."""
        if self.dense:
            return ()
        kept = (self.gate_up, self.down, self.gate_up_scale, self.down_scale)
        return tuple(each for each in kept if each is not None)


class RankWeights:
    """All weights of one rank.

    Attributes:
        config, shapes: the whole model's configuration, and the rank's sizes.
        layers: one :class:`LayerWeights` each.
        embed: ``[vocabulary / tp, H]``, the rank's rows of the embedding.
        norm: ``[H]``, the last norm.
        lm_head: ``[vocabulary / tp, H]``.
        down_layout: how the experts' down projections lie.
        experts: how the experts' values are kept.
        seed: what they were made from.
    """

    def __init__(
        self,
        *,
        config: BeamConfig,
        shapes: Shapes,
        layers: list[LayerWeights],
        embed: Tensor,
        norm: Tensor,
        lm_head: Tensor,
        down_layout: DownLayout,
        experts: ExpertFormat = "same",
        seed: int = 0,
    ) -> None:
        self.config, self.shapes, self.layers = config, shapes, layers
        self.embed, self.norm, self.lm_head = embed, norm, lm_head
        self.down_layout: DownLayout = down_layout
        self.experts: ExpertFormat = experts
        self.seed = seed

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.norm.device

    @property
    def dtype(self) -> torch.dtype:
        """Activation dtype."""
        return self.norm.dtype

    @classmethod
    def random(
        cls,
        config: BeamConfig,
        tp: int = 8,
        *,
        layers: int | None = None,
        device: torch.device | str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
        down_layout: DownLayout = "HI",
        experts: ExpertFormat = "same",
    ) -> RankWeights:
        """Weights of the first ``layers`` layers (all of them: None) of one of ``tp`` ranks.

        Matrices are N(0, 0.02), norms 1 + N(0, 0.1), gate biases N(0, 0.5), correction biases
        N(0, 0.01), embedding rows N(0, 1). The same seed gives the same weights on one device; FP8
        experts are rounded from values of that distribution, and not from those of ``same``.

        Raises:
            KernelError: ``tp`` or ``layers`` does not suit the model, or it does not fit the free
                memory (the sentence says how many layers would). Whatever was allocated is freed.
        """
        shapes = Shapes.of(config, tp)
        count = config.num_hidden_layers if layers is None else layers
        if not 1 <= count <= config.num_hidden_layers:
            raise KernelError(
                f"the model has layers 1 to {config.num_hidden_layers}, so {layers} of them "
                "cannot be run; choose a number in between"
            )
        _refuse_layout(down_layout)
        if experts not in EXPERT_FORMATS:
            raise KernelError(
                f"experts are kept as {' or '.join(EXPERT_FORMATS)}, not as {experts!r:.20}"
            )
        place = torch.device(device)
        if not dtype.is_floating_point or dtype.itemsize == 1:
            raise KernelError(
                f"activations cannot be {str(dtype).removeprefix('torch.')}; use bfloat16 or "
                'float32 (experts="fp8" makes the experts FP8)'
            )
        if place.type == "cuda" and not torch.cuda.is_available():
            raise KernelError("this machine has no CUDA GPU that torch can use; use --device cpu")
        refuse_too_large(config, shapes, count, place, dtype, experts)
        make = _Maker(place, dtype, seed)
        made: list[LayerWeights] = []
        try:
            for index in range(count):
                made.append(_layer(config, shapes, index, make, down_layout, experts))
            return cls(
                config=config,
                shapes=shapes,
                layers=made,
                embed=make.normal(shapes.vocabulary, shapes.hidden, std=1.0),
                norm=make.norm(shapes.hidden),
                lm_head=make.normal(shapes.vocabulary, shapes.hidden),
                down_layout=down_layout,
                experts=experts,
                seed=seed,
            )
        except torch.OutOfMemoryError as error:
            held = len(made)
            made.clear()
            torch.cuda.empty_cache()
            raise KernelError(
                f"the GPU's memory was full after {held} of {count} layers although "
                f"{hardware.gigabytes(rank_bytes(config, shapes, count, dtype, experts))} seemed "
                "to fit; "
                "another process may have taken it: free it, or give fewer --layers"
            ) from error

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the rank."""
        for layer in self.layers:
            yield from layer.tensors()
        yield from (self.embed, self.norm, self.lm_head)

    @property
    def bytes(self) -> int:
        """Bytes of all weights."""
        return sum(t.numel() * t.element_size() for t in self.tensors())

    def step_bytes(self, distinct_experts: float | None = None, batch: int = 1) -> float:
        """Bytes of weights that one decode step must read at least once.

        Everything but the experts and the embedding once; in each sparse layer
        ``distinct_experts`` (None: ``top_k``) experts; one embedding row a sequence.

        Raises:
            KernelError: more experts than there are or fewer than none, or no sequence.
        """
        wanted = self.shapes.top_k if distinct_experts is None else distinct_experts
        if not 0 <= wanted <= self.shapes.experts or batch < 1:
            raise KernelError(
                f"a step of {batch} sequences with {wanted} distinct experts a layer cannot be; "
                f"give 1 or more sequences and 0 to {self.shapes.experts} experts"
            )
        total = 0.0
        for layer in self.layers:
            experts = sum(t.numel() * t.element_size() for t in layer.of_experts())
            all_bytes = sum(t.numel() * t.element_size() for t in layer.tensors())
            total += all_bytes - experts + wanted / self.shapes.experts * experts
        rows = batch * self.shapes.hidden * self.embed.element_size()
        for tensor in (self.norm, self.lm_head):
            total += tensor.numel() * tensor.element_size()
        return total + rows

    def cache_bytes(self, position: int, batch: int = 1) -> int:
        """Bytes of keys and values that one decode step at ``position`` reads (all layers).

        Raises:
            KernelError: a position below 0, or no sequence.
        """
        if position < 0 or batch < 1:
            raise KernelError(
                f"{batch} sequences at position {position} cannot be; give 1 or more and 0 or more"
            )
        s = self.shapes
        keys = sum(
            position + 1 if layer.full else min(position + 1, s.window) for layer in self.layers
        )
        return 2 * keys * batch * s.kv_heads * s.head_dim * self.norm.element_size()

    def relayout(self, layout: DownLayout) -> None:
        """Turn all experts' down projections to ``layout``, in the memory they have.

        One layer's is copied at a time (0.8 GB at full size), so that pointers stay valid and no
        second set of experts is ever held.

        Raises:
            KernelError: it is neither "IH" nor "HI".
        """
        _refuse_layout(layout)
        if layout == self.down_layout:
            return
        for layer in self.layers:
            if not layer.dense:
                turned = layer.down.mT.contiguous()
                layer.down = layer.down.view(turned.shape)
                layer.down.copy_(turned)
        self.down_layout = layout

    def down_ih(self, layer: LayerWeights) -> Tensor:
        """The experts' down projections as ``[E, I, H]`` whichever way they lie (a view)."""
        return layer.down if self.down_layout == "IH" else layer.down.mT

    def expert(self, layer: LayerWeights, expert: int) -> tuple[Tensor, Tensor]:
        """What one expert of a sparse layer means, in float64 (exact): gate_up ``[2 I, H]`` and
        down ``[H, I]``.

        Raises:
            KernelError: the layer is dense, or it has no such expert.
        """
        if layer.dense:
            raise KernelError("a dense layer has no experts; choose a sparse one")
        self._refuse_expert(expert)
        gate_up, down = layer.gate_up[expert], layer.down[expert]
        if self.down_layout == "IH":
            down = down.mT
        if layer.gate_up_scale is None or layer.down_scale is None:
            return gate_up.double(), down.double()
        scales = layer.gate_up_scale[expert], layer.down_scale[expert]
        return fp8.dequantise(gate_up, scales[0]), fp8.dequantise(down, scales[1])

    def unrounded(self, index: int, expert: int) -> tuple[Tensor, Tensor]:
        """An FP8 expert of layer ``index`` before it was rounded, drawn again: float32 gate_up
        ``[2 I, H]`` and down ``[H, I]``.

        Raises:
            KernelError: there is no such layer or expert, or the layer has no FP8 experts.
        """
        if not 0 <= index < len(self.layers):
            raise KernelError(
                f"there is no layer {index} here; choose one of 0 to {len(self.layers) - 1}"
            )
        self._refuse_expert(expert)
        if self.layers[index].gate_up_scale is None:
            raise KernelError(f"layer {index} has no FP8 experts: nothing was rounded")
        drawer = fp8.Drawer(self.device, self.seed, MATRIX_STD)
        return drawer.expert(index, expert, self.shapes.expert_width, self.shapes.hidden)

    def _refuse_expert(self, expert: int) -> None:
        """Refuse an expert that does not exist: one would be drawn for any number."""
        if not 0 <= expert < self.shapes.experts:
            raise KernelError(
                f"there is no expert {expert}; choose one of 0 to {self.shapes.experts - 1}"
            )


def _refuse_layout(layout: str) -> None:
    if layout not in ("IH", "HI"):
        raise KernelError(f"down_layout must be IH or HI, not {layout!r:.20}")


class _Maker:
    """Allocates a tensor and fills it where it lies."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        # Tensors without memory (meta) have sizes only: kernels are compiled from them.
        meta = device.type == "meta"
        self.generator = None if meta else torch.Generator(device=device).manual_seed(seed)
        self.drawer = None if meta else fp8.Drawer(device, seed, MATRIX_STD)

    def normal(
        self,
        *shape: int,
        std: float = MATRIX_STD,
        mean: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        made = torch.empty(*shape, dtype=dtype or self.dtype, device=self.device)
        return made.normal_(mean, std, generator=self.generator)

    def norm(self, *shape: int) -> Tensor:
        return self.normal(*shape, std=NORM_STD, mean=1.0)


def _layer(
    config: BeamConfig,
    s: Shapes,
    index: int,
    make: _Maker,
    layout: DownLayout,
    experts: ExpertFormat,
) -> LayerWeights:
    dense = not config.is_sparse(index)
    router = bias = None
    if not dense:
        router = make.normal(s.experts, s.hidden, dtype=torch.float32)
        bias = make.normal(s.experts, std=CORRECTION_STD, dtype=torch.float32)
    h = s.hidden
    made = LayerWeights(
        full=config.is_full(index),
        dense=dense,
        qkvg=make.normal(s.packed, h),
        o_proj=make.normal(h, s.heads * s.head_dim),
        qk_norm=make.norm(2, s.head_dim),
        gate_bias=make.normal(s.heads, std=GATE_BIAS_STD),
        input_norm=make.norm(h),
        post_attention_norm=make.norm(h),
        pre_mlp_norm=make.norm(h),
        post_mlp_norm=make.norm(h),
        router=router,
        correction_bias=bias,
        scales=(depth_scale(2 * index + 2), depth_scale(2 * index + 3)),
        **_mlp(s, index, dense, make, layout, experts),
    )
    return made


def _mlp(
    s: Shapes, index: int, dense: bool, make: _Maker, layout: DownLayout, experts: ExpertFormat
) -> dict[str, Tensor]:
    """A layer's gate_up and down, and their scales where they have some."""
    i, h = s.expert_width, s.hidden
    if dense:
        return {"gate_up": make.normal(2 * s.mlp_width, h), "down": make.normal(h, s.mlp_width)}
    up, down = (s.experts, 2 * i, h), (s.experts, *((i, h) if layout == "IH" else (h, i)))
    if experts == "same":
        return {"gate_up": make.normal(*up), "down": make.normal(*down)}
    made = {
        "gate_up": torch.empty(up, dtype=fp8.FORMAT, device=make.device),
        "down": torch.empty(down, dtype=fp8.FORMAT, device=make.device),
    }
    rows = made["down"].mT if layout == "IH" else made["down"]
    made["gate_up_scale"], made["down_scale"] = fp8.filled(
        make.drawer, index, made["gate_up"], rows
    )
    return made


def layer_bytes(
    config: BeamConfig,
    s: Shapes,
    index: int,
    dtype: torch.dtype,
    experts: ExpertFormat = "same",
) -> int:
    """Bytes of one layer's weights on the rank."""
    size = torch.empty((), dtype=dtype).element_size()
    values = s.packed * s.hidden + s.hidden * s.heads * s.head_dim
    values += 2 * s.head_dim + s.heads + 4 * s.hidden
    if not config.is_sparse(index):
        return (values + 3 * s.mlp_width * s.hidden) * size
    router = 4 * s.experts * (s.hidden + 1)
    each = 3 * s.expert_width * s.hidden
    if experts == "fp8":
        of_experts = s.experts * (each + 4 * (2 * s.expert_width + s.hidden))
    else:
        of_experts = s.experts * each * size
    return values * size + router + of_experts


def rank_bytes(
    config: BeamConfig,
    s: Shapes,
    layers: int,
    dtype: torch.dtype,
    experts: ExpertFormat = "same",
) -> int:
    """Bytes of the weights of the first ``layers`` layers, embedding, last norm and head."""
    size = torch.empty((), dtype=dtype).element_size()
    ends = (2 * s.vocabulary + 1) * s.hidden * size
    return ends + sum(layer_bytes(config, s, index, dtype, experts) for index in range(layers))


def refuse_too_large(
    config: BeamConfig,
    s: Shapes,
    layers: int,
    device: torch.device,
    dtype: torch.dtype,
    experts: ExpertFormat = "same",
) -> None:
    """Refuse what does not fit the device's free memory.

    Raises:
        KernelError: with how many layers would fit.
    """
    free = None if device.type == "meta" else free_bytes(str(device))
    if free is None:
        return
    spare = SPARE_BYTES if device.type == "cuda" else free // 8
    # About fourteen blocks a layer, each rounded up to a page.
    slack = 14 * _PAGE if device.type == "cuda" else 0
    needed = rank_bytes(config, s, layers, dtype, experts)
    if needed + slack * layers + spare <= free:
        return
    fits = 0
    while rank_bytes(config, s, fits + 1, dtype, experts) + slack * (fits + 1) + spare <= free:
        fits += 1
    advice = (
        f"{fits} layers would fit (--layers {fits})" if fits else "not even one layer would fit"
    )
    raise KernelError(
        f"the weights of {layers} layers of one of {s.tp} ranks need "
        f"{hardware.gigabytes(needed)}, and {hardware.gigabytes(free)} of memory are free on "
        f"{device} (of which {hardware.gigabytes(spare)} are kept for the step itself): {advice}"
    )
