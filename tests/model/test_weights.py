"""Bytes of the weights: against a walk over every tensor, and by hand for scales and slices."""

from __future__ import annotations

from itertools import product
from math import ceil, comb, gcd
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import WorkbenchError
from workbench.model.asked import SizingError
from workbench.model.drafter_config import drafter_tensors
from workbench.model.layout import Layout, layouts
from workbench.model.presets import beam_501b, beam_501b_dflash2, resolve
from workbench.model.tensors import TensorSpec, tensor_specs
from workbench.model.weights import (
    PARTS,
    PRECISIONS,
    Precision,
    active_bytes,
    expected_experts,
    precision,
    size_weights,
)

BEAM = beam_501b().config
TINY = resolve("beam-tiny").config
DRAFTER = beam_501b_dflash2().config
GIB = 2**30


def sliced(tensor: TensorSpec, layout: Layout) -> tuple[int, int]:
    """Rows and columns of one tensor on one GPU, by the rules of the tensor-parallel split."""
    shape = tensor.shape if len(tensor.shape) == 2 else (1, *tensor.shape)
    rows, columns = shape
    name, tp = tensor.name, layout.tp
    if tensor.part in ("norms", "router"):
        return rows, columns
    if tensor.part in ("embedding", "head"):
        return ceil(rows / 64) * 64 // tp, columns
    if tensor.part == "experts":
        tp = 1 if layout.expert_parallel else layout.tp * layout.dp
    if name.endswith("gate_bias"):
        return rows, columns // tp
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return rows, columns // tp
    return rows // tp, columns


def walked(config: Any, chosen: Precision, layout: Layout) -> dict[str, int]:
    """Bytes by part, tensor by tensor of the checkpoint; the first GPU's experts under EP."""
    sums: dict[str, int] = dict.fromkeys(PARTS, 0)
    local = ceil(config.num_experts / (layout.tp * layout.dp))
    for tensor in tensor_specs(config):
        if layout.expert_parallel and tensor.expert is not None and tensor.expert >= local:
            continue
        rows, columns = sliced(tensor, layout)
        if ".k_proj" in tensor.name or ".v_proj" in tensor.name:
            rows = max(1, config.num_key_value_heads // layout.tp) * config.head_dim
        dtype = "bf16"
        if tensor.part in ("attention", "dense_mlp", "experts") and rows > 1:
            dtype = getattr(chosen, tensor.part)
        if tensor.fp32:
            size = 4 * rows * columns
        elif dtype == "bf16":
            size = 2 * rows * columns
        elif dtype == "fp8":
            block = 128
            slices = 1 if layout.expert_parallel else layout.gpus
            if tensor.part == "experts" and slices > 1:
                block = gcd(128, config.moe_intermediate_size // slices)
            size = rows * columns + 4 * ceil(rows / block) * ceil(columns / block)
        else:
            size = rows * ceil(columns / 2) + rows * ceil(columns / 16) + 8
        sums[tensor.part] += size
    return sums


ONE = Layout()
SPLITS = [
    ONE,
    Layout(tp=2),
    Layout(tp=4),
    Layout(tp=2, expert_parallel=True),
    Layout(dp=4, expert_parallel=True),
    Layout(tp=2, dp=2),
    Layout(tp=2, dp=2, expert_parallel=True),
]
MIXED = Precision(attention="fp8", dense_mlp="nvfp4", experts="fp8")


@pytest.mark.parametrize("layout", SPLITS, ids=lambda x: x.name)
@pytest.mark.parametrize("chosen", [*PRECISIONS.values(), MIXED], ids=lambda x: x.name)
def test_tiny_model_tensor_by_tensor(layout: Layout, chosen: Precision) -> None:
    assert dict(size_weights(TINY, chosen, layout).per_gpu) == walked(TINY, chosen, layout)


@pytest.mark.parametrize("layout", [Layout(tp=8), Layout(dp=8, expert_parallel=True)])
@pytest.mark.parametrize("chosen", list(PRECISIONS.values()), ids=lambda x: x.name)
def test_full_model_tensor_by_tensor(layout: Layout, chosen: Precision) -> None:
    assert dict(size_weights(BEAM, chosen, layout).per_gpu) == walked(BEAM, chosen, layout)


def test_known_figures_of_the_full_model() -> None:
    whole = size_weights(BEAM)
    assert whole.whole_bytes == 2 * 501_012_021_952 + 2 * (whole.whole["router"] // 4)
    rank = size_weights(BEAM, layout=Layout(tp=8))
    assert rank.per_gpu_bytes / GIB == pytest.approx(116.9, abs=0.05)
    assert rank.per_gpu_bytes / 1e9 == pytest.approx(125.5, abs=0.05)
    # NVFP4 experts: nine sixteenths of a byte a weight, and eight bytes a matrix.
    experts = 256 * 49 * 3
    nvfp4 = size_weights(BEAM, PRECISIONS["nvfp4"])
    assert nvfp4.whole["experts"] == experts * (5120 * 2560 * 9 // 16 + 8)
    fp8 = size_weights(BEAM, PRECISIONS["fp8"])
    assert fp8.whole["experts"] == experts * (5120 * 2560 + 4 * 40 * 20)
    # The engine's own parameter shapes at TP8: scales [256, 10, 80] and [256, 80, 5] a layer.
    eighth = size_weights(BEAM, PRECISIONS["fp8"], Layout(tp=8))
    scales = 4 * 256 * (10 * 80 + 80 * 5)
    assert eighth.per_gpu["experts"] == 49 * (256 * 3 * 5120 * 320 + scales)


def test_published_drafter_file_size() -> None:
    """The same drafter for a vocabulary of 248,320 is a published file of 3.85 GB."""
    like = DRAFTER.replace(vocab_size=248_320, mask_token_id=248_070)
    assert 2 * sum(t.size for t in drafter_tensors(like)) / 1e9 == pytest.approx(3.849, abs=0.0005)


def test_drafter_is_split_where_the_engine_splits_it() -> None:
    one = size_weights(BEAM, drafter=DRAFTER).per_gpu["drafter"]
    eight = size_weights(BEAM, layout=Layout(tp=8), drafter=DRAFTER).per_gpu["drafter"]
    attention = 5 * 2 * (2 * 32 + 2 * 8) * 128 * 5120
    mlp = 5 * 2 * 3 * 17408 * 5120
    assert one - eight == (attention + mlp) * 7 // 8
    assert size_weights(BEAM, layout=Layout(dp=8), drafter=DRAFTER).per_gpu["drafter"] == one


def test_one_expert_is_a_slice_or_whole() -> None:
    """Tensor and expert parallelism hold the same bytes of experts, data parallelism as well."""
    for gpus in (2, 4, 8):
        sizes = {
            size_weights(BEAM, layout=layout).per_gpu["experts"] for layout in layouts(BEAM, gpus)
        }
        assert sizes == {256 * 49 * 3 * 5120 * 2560 * 2 // gpus}


def test_uneven_experts_count_on_the_fullest_gpu() -> None:
    uneven = Layout(dp=3, expert_parallel=True)
    assert uneven.experts_per_gpu(BEAM) == 86
    assert size_weights(BEAM, layout=uneven).per_gpu["experts"] == 86 * 49 * 3 * 5120 * 2560 * 2


# -- what a step reads --------------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "each", "tokens"), [(4, 2, 2), (5, 2, 3), (6, 3, 2)])
def test_expected_experts_by_enumeration(experts: int, each: int, tokens: int) -> None:
    from itertools import combinations

    choices = list(combinations(range(experts), each))
    assert len(choices) == comb(experts, each)
    total = count = 0
    for chosen in product(choices, repeat=tokens):
        total += len(set().union(*map(set, chosen)))
        count += 1
    assert expected_experts(experts, each, tokens) == pytest.approx(total / count, rel=1e-12)


def test_active_bytes_of_the_rank_are_the_measured_step_s() -> None:
    """5.82 GB of weights at batch 1; 57, 164 and 252 experts at batch 8, 32 and 128."""
    rank = active_bytes(BEAM, 1, layout=Layout(tp=8))
    assert sum(rank.values()) / 1e9 == pytest.approx(5.82, abs=0.01)
    assert rank["experts"] == pytest.approx(8 * 49 * 3 * 5120 * 320 * 2)
    assert rank["router"] == 49 * 4 * (256 * 5120 + 256)
    counts = [round(expected_experts(256, 8, n)) for n in (1, 8, 32, 128)]
    assert counts == [8, 57, 163, 252]


@given(st.integers(1, 4096), st.integers(1, 4096))
@settings(max_examples=100, deadline=None)
def test_more_tokens_read_no_less(a: int, b: int) -> None:
    few, many = sorted((a, b))
    low, high = (sum(active_bytes(BEAM, n, layout=Layout(tp=8)).values()) for n in (few, many))
    whole = size_weights(BEAM, layout=Layout(tp=8)).per_gpu_bytes
    assert low <= high <= whole
    assert expected_experts(256, 8, few) <= min(256, 8 * few)


def test_given_experts_and_no_logits() -> None:
    measured = active_bytes(BEAM, 32, distinct=100.0, logits=False, layout=Layout(tp=8))
    assert measured["experts"] == pytest.approx(100 * 49 * 3 * 5120 * 320 * 2)
    assert measured["head"] == 0
    for distinct in (-1.0, 257.0, float("nan")):
        with pytest.raises(SizingError, match="distinct experts must be from 0 to 256"):
            active_bytes(BEAM, 1, distinct=distinct)
    with pytest.raises(SizingError, match="tokens of a step must be a whole number from 1"):
        active_bytes(BEAM, 0)


# -- layouts and names --------------------------------------------------------------------------


def test_layouts_of_eight() -> None:
    assert [x.name for x in layouts(BEAM, 8)] == [
        "TP8", "TP8 + EP8", "TP4 x DP2", "TP4 x DP2 + EP8",
        "TP2 x DP4", "TP2 x DP4 + EP8", "DP8", "DP8 + EP8",
    ]  # fmt: skip
    assert [x.name for x in layouts(BEAM, 1)] == ["TP1"]
    assert [x.name for x in layouts(BEAM, 7)] == ["DP7 + EP7"]  # whole experts only: 2560 / 7


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (Layout(tp=5), "does not divide 48 query heads"),
        (Layout(tp=24, expert_parallel=True), "vocabulary of 163840 rows"),
        (Layout(dp=3), "moe_intermediate_size (2560) over 3 GPUs"),
        (Layout(dp=512, expert_parallel=True), "more GPUs than the model has experts (256)"),
    ],
)
def test_layouts_that_cannot_be(layout: Layout, says: str) -> None:
    with pytest.raises(SizingError) as raised:
        size_weights(BEAM, layout=layout)
    assert says in str(raised.value)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", 1 << 20])
def test_layout_counts_are_checked(value: Any) -> None:
    with pytest.raises(SizingError, match="must be a whole number"):
        Layout(tp=value)
    with pytest.raises(SizingError, match="must be a whole number"):
        Layout(dp=value)
    with pytest.raises(SizingError, match="must be a whole number"):
        layouts(BEAM, value)


def test_precision_names_and_parts() -> None:
    assert precision("nvfp4") == Precision(experts="nvfp4")
    assert precision("experts=nvfp4, attention=fp8") == Precision(experts="nvfp4", attention="fp8")
    assert precision("experts=fp8").name == "attention=bf16,dense_mlp=bf16,experts=fp8"
    assert precision(precision("experts=fp8").name) == precision("experts=fp8")
    for text, says in (
        ("int4", "unknown weights 'int4'"),
        ("", "unknown weights ''"),
        ("head=fp8", "unknown weights 'head=fp8'"),
        ("experts=int4", "unknown precision 'int4' for experts"),
    ):
        with pytest.raises(WorkbenchError, match=says):
            precision(text)
