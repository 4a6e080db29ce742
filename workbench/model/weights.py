"""How many bytes Beam's weights take, by part and precision, on each GPU of a layout.

Precisions, as checkpoints of the engine store them:

* ``bf16``: two bytes a weight.
* ``fp8``: one byte a weight and an FP32 scale for each block of 128 x 128; where a GPU's slice of
  the experts is no multiple of 128 wide, the engine refines the blocks to what divides it.
* ``nvfp4``: half a byte a weight, an FP8 scale for each 16 along a row, and two FP32 scales a
  matrix (of the weights and of the inputs).

Routers are FP32 and embedding, head and norms BF16 whatever the precision of the rest; a drafter is
BF16 throughout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from types import MappingProxyType
from typing import Any, Literal

from workbench.model.asked import SizingError, instance, shown, whole
from workbench.model.config import BeamConfig, is_number
from workbench.model.drafter_config import DFlash2Config, drafter_tensors
from workbench.model.kv_settings import check_heads
from workbench.model.layout import Layout
from workbench.model.presets import config_of, drafter_config_of

WeightDtype = Literal["bf16", "fp8", "nvfp4"]
WeightPart = Literal[
    "embedding", "head", "attention", "norms", "dense_mlp", "router", "experts", "drafter"
]

PARTS: tuple[WeightPart, ...] = (
    "embedding", "attention", "dense_mlp", "router", "experts", "norms", "head", "drafter",
)  # fmt: skip
FP8_BLOCK = 128
NVFP4_GROUP = 16
_DTYPES = ("bf16", "fp8", "nvfp4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Precision of the parts that can be quantised."""

    attention: WeightDtype = "bf16"
    dense_mlp: WeightDtype = "bf16"
    experts: WeightDtype = "bf16"

    def __post_init__(self) -> None:
        for part in ("attention", "dense_mlp", "experts"):
            dtype = getattr(self, part)
            if not isinstance(dtype, str) or dtype not in _DTYPES:
                raise SizingError(
                    f"unknown precision {shown(dtype)} for {part}; use one of {', '.join(_DTYPES)}"
                )

    @property
    def name(self) -> str:
        """The named precision this is, or its parts."""
        for name, precision in PRECISIONS.items():
            if precision == self:
                return name
        return f"attention={self.attention},dense_mlp={self.dense_mlp},experts={self.experts}"


# What --weights names. NVFP4 experts beside BF16 attention is what the engine's own kernels for
# Beam expect (vLLM 0.33: BF16 projection kernels, NVFP4 case in the experts); which parts a real
# checkpoint quantises is not public, so this is an assumption that can be spelled out otherwise.
PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "bf16": Precision(),
        "fp8": Precision(attention="fp8", dense_mlp="fp8", experts="fp8"),
        "nvfp4": Precision(experts="nvfp4"),
    }
)


def precision(text: str | Precision) -> Precision:
    """``bf16``, ``fp8``, ``nvfp4``, or part by part: ``experts=nvfp4,attention=fp8``.

    Raises:
        SizingError: neither.
    """
    if isinstance(text, Precision):
        return text
    if text in PRECISIONS:
        return PRECISIONS[text]
    instance("weights", text, str, "the name of a precision")
    parts: dict[str, Any] = {}
    for item in text.split(","):
        part, equals, dtype = (word.strip() for word in item.partition("="))
        if part in parts:
            raise SizingError(f"weights {shown(text)} names {part} twice; give one precision of it")
        if not equals or part not in ("attention", "dense_mlp", "experts"):
            raise SizingError(
                f"unknown weights {shown(text)}; use one of {', '.join(PRECISIONS)}, or name "
                "the precision of attention, dense_mlp and experts, as in "
                "experts=nvfp4,attention=fp8"
            )
        parts[part] = dtype
    return Precision(**parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """``count`` matrices of ``rows x columns`` of one part on one GPU, in one precision.

    Row vectors are matrices of one row; ``fp32`` marks what is never anything else.
    """

    part: WeightPart
    rows: int
    columns: int
    count: int = 1
    dtype: WeightDtype | Literal["fp32"] = "bf16"
    block: int = FP8_BLOCK

    @property
    def elements(self) -> int:
        """Numbers in all of them, scales not counted."""
        return self.count * self.rows * self.columns

    @property
    def bytes(self) -> int:
        """Bytes of all of them, scales included."""
        return self.count * matrix_bytes(self.rows, self.columns, self.dtype, self.block)


def matrix_bytes(rows: int, columns: int, dtype: str, block: int = FP8_BLOCK) -> int:
    """Bytes of one weight matrix ``[rows, columns]`` with its scales; ``fp32`` also works.

    ``block`` is the side of the square that shares one FP8 scale.
    """
    if dtype == "fp32":
        return 4 * rows * columns
    if dtype == "bf16":
        return 2 * rows * columns
    if dtype == "fp8":
        return rows * columns + 4 * -(-rows // block) * -(-columns // block)
    if dtype == "nvfp4":
        return rows * -(-columns // 2) + rows * -(-columns // NVFP4_GROUP) + 8
    raise SizingError(f"unknown precision {dtype!r:.40}; use one of {', '.join(_DTYPES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSizing:
    """Bytes of a model's weights (and its drafter's) by part; :func:`size_weights` makes it.

    ``whole`` counts every weight once, ``per_gpu`` what the fullest GPU of ``layout`` holds.
    """

    precision: Precision
    layout: Layout
    whole: Mapping[WeightPart, int]
    per_gpu: Mapping[WeightPart, int]

    @property
    def whole_bytes(self) -> int:
        """All weights once."""
        return sum(self.whole.values())

    @property
    def per_gpu_bytes(self) -> int:
        """All weights of one GPU."""
        return sum(self.per_gpu.values())

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return {
            "precision": self.precision.name,
            "layout": self.layout.name,
            "whole_bytes": self.whole_bytes,
            "per_gpu_bytes": self.per_gpu_bytes,
            "whole": dict(self.whole),
            "per_gpu": dict(self.per_gpu),
        }


def size_weights(
    model: BeamConfig | str,
    weights: Precision | str = PRECISIONS["bf16"],
    layout: Layout = Layout(),  # noqa: B008 - frozen
    drafter: DFlash2Config | str | None = None,
) -> WeightSizing:
    """Bytes of the weights by part, whole and on one GPU of ``layout``.

    ``model``, ``weights`` and ``drafter`` are values, or names as on the command line.

    Raises:
        SizingError: the model cannot be split like this.
    """
    instance("layout", layout, Layout, "a Layout, such as Layout(tp=8)")
    return _size_weights(config_of(model), precision(weights), layout, drafter_config_of(drafter))


@lru_cache(maxsize=512)
def _size_weights(
    config: BeamConfig, precision: Precision, layout: Layout, drafter: DFlash2Config | None
) -> WeightSizing:
    layout.check(config)
    if drafter is not None:
        drafter.check_target(config)
    single = Layout()
    return WeightSizing(
        precision=precision,
        layout=layout,
        whole=MappingProxyType(
            _by_part(matrices(config, precision, single, drafter, padded=False))
        ),
        per_gpu=MappingProxyType(_by_part(matrices(config, precision, layout, drafter))),
    )


def _by_part(weights: tuple[Matrix, ...]) -> dict[WeightPart, int]:
    sums: dict[WeightPart, int] = dict.fromkeys(PARTS, 0)
    for matrix in weights:
        sums[matrix.part] += matrix.bytes
    return sums


@lru_cache(maxsize=512)
def matrices(
    config: BeamConfig,
    precision: Precision,
    layout: Layout,
    drafter: DFlash2Config | None = None,
    *,
    padded: bool = True,
) -> tuple[Matrix, ...]:
    """Every weight that the fullest GPU of ``layout`` holds, equal ones counted together.

    ``padded`` counts the rows that the engine adds to the vocabulary before it splits it.
    """
    c, hidden, tp = config, config.hidden_size, layout.tp
    layers, sparse = c.num_hidden_layers, len(c.sparse_layers)
    vocab = (layout.vocabulary(c) if padded else c.vocab_size) // tp  # rows of embedding and head
    q = c.q_size // tp
    kv = max(1, c.num_key_value_heads // tp) * c.head_dim
    wide = c.moe_intermediate_size // layout.expert_slices
    experts = sparse * layout.experts_per_gpu(c)
    block = expert_block(config, layout)
    dense = c.intermediate_size // tp
    a, d, e = precision.attention, precision.dense_mlp, precision.experts
    weights = [
        Matrix(part="embedding", rows=vocab, columns=hidden),
        Matrix(part="attention", rows=q, columns=hidden, count=2 * layers, dtype=a),  # Q, gate
        Matrix(part="attention", rows=kv, columns=hidden, count=2 * layers, dtype=a),  # K, V
        Matrix(part="attention", rows=hidden, columns=q, count=layers, dtype=a),  # output
        Matrix(part="attention", rows=1, columns=c.num_attention_heads // tp, count=layers),
        Matrix(part="norms", rows=1, columns=2 * c.head_dim, count=layers),
        Matrix(part="norms", rows=1, columns=hidden, count=4 * layers + 1),
        Matrix(part="head", rows=vocab, columns=hidden),
    ]
    if sparse < layers:
        count = layers - sparse
        weights += [
            Matrix(part="dense_mlp", rows=dense, columns=hidden, count=2 * count, dtype=d),
            Matrix(part="dense_mlp", rows=hidden, columns=dense, count=count, dtype=d),
        ]
    if sparse:
        weights += [
            Matrix(part="router", rows=c.num_experts, columns=hidden, count=sparse, dtype="fp32"),
            Matrix(part="router", rows=1, columns=c.num_experts, count=sparse, dtype="fp32"),
            Matrix(
                part="experts", rows=wide, columns=hidden, count=2 * experts, dtype=e, block=block
            ),
            Matrix(part="experts", rows=hidden, columns=wide, count=experts, dtype=e, block=block),
        ]
    if drafter is not None:
        weights += _drafter(drafter, tp)
    return tuple(weights)


def expert_block(config: BeamConfig, layout: Layout) -> int:
    """Side of the square of expert weights that shares one FP8 scale, as the engine refines it."""
    width = config.moe_intermediate_size // layout.expert_slices
    if layout.expert_slices == 1 or not width % FP8_BLOCK:
        return FP8_BLOCK
    return gcd(FP8_BLOCK, width, config.hidden_size)


def _drafter(c: DFlash2Config, tp: int) -> list[Matrix]:
    """A drafter on one rank: attention and MLP are split, the rest is whole on every GPU."""
    check_heads(c, tp, whose="the drafter's ")
    if c.intermediate_size % tp:
        raise SizingError(
            f"tensor parallelism over {tp} ranks does not divide the drafter's intermediate_size "
            f"({c.intermediate_size}); choose another layout or drafter"
        )
    found = []
    one = c.replace(num_hidden_layers=1)  # all layers are alike
    for tensor in drafter_tensors(one):
        size, count = tensor.size, 1 if tensor.layer is None else c.num_hidden_layers
        if tensor.part == "mlp":
            size //= tp
        elif tensor.part == "attention":
            ranks = min(tp, c.num_key_value_heads) if tensor.name.endswith(_KV) else tp
            size //= ranks
        found.append(Matrix(part="drafter", rows=1, columns=size, count=count))
    return found


_KV = ("k_proj.weight", "v_proj.weight")


# -- what one step reads ------------------------------------------------------------------------


def expected_experts(experts: int, per_token: int, tokens: int) -> float:
    """Expected number of different experts that ``tokens`` tokens choose, uniform routing.

    Exact: each token takes ``per_token`` different experts, so it leaves a given one untouched
    with probability ``1 - per_token / experts``, independently of the other tokens.
    """
    tokens = whole("tokens", tokens, 1 << 40)
    return experts * (1.0 - (1.0 - per_token / experts) ** tokens)


def active_bytes(
    config: BeamConfig,
    tokens: int,
    precision: Precision = PRECISIONS["bf16"],
    layout: Layout = Layout(),  # noqa: B008 - frozen
    *,
    distinct: float | None = None,
    logits: bool = True,
) -> dict[WeightPart, float]:
    """Bytes of weights that one GPU reads in one step over ``tokens`` tokens, by part.

    ``tokens`` counts over all data-parallel groups. ``distinct`` is the number of different experts
    a layer touches among all of its experts, by default the expectation under uniform routing
    (:func:`expected_experts`); a GPU with some of the experts touches its share. Without
    ``logits`` no row needs the head. Each weight is read once.

    Raises:
        SizingError: a count that cannot be.
    """
    tokens = whole("tokens of a step", tokens, 1 << 40)
    c = config
    if distinct is None:
        distinct = expected_experts(c.num_experts, c.num_experts_per_tok, tokens)
    if not is_number(distinct) or not 0 <= distinct <= c.num_experts:
        raise SizingError(
            f"distinct experts must be from 0 to {c.num_experts}, not {shown(distinct)}"
        )
    layout.check(config)
    sums: dict[WeightPart, float] = dict.fromkeys(PARTS, 0.0)
    for matrix in matrices(config, precision, layout):
        share = 1.0
        if matrix.part == "experts":
            share = distinct / c.num_experts
        elif matrix.part == "embedding":  # a lookup reads one row a token
            share = min(1.0, -(-tokens // layout.dp) / c.vocab_size)
        elif matrix.part == "head" and not logits:
            share = 0.0
        sums[matrix.part] += share * matrix.bytes
    return sums
