"""Weights a step reads over its tokens: by hand, by enumeration, and against the limits."""

from dataclasses import replace
from itertools import combinations, product

import pytest

import workbench
from workbench.model.asked import SizingError
from workbench.model.config import BeamConfig
from workbench.model.layout import Layout
from workbench.model.weight_curve import BATCHES, weight_curve
from workbench.model.weights import PRECISIONS, size_weights

TP8 = Layout(tp=8)
# beam-501b's shape, as published.
LAYERS, SPARSE, HIDDEN, WIDE, EXPERTS, EACH, VOCAB = 52, 49, 5120, 2560, 256, 8, 163_840


@pytest.fixture(scope="module")
def beam() -> BeamConfig:
    return workbench.resolve("beam-501b").config


def test_one_token_reads_eight_experts_of_each_layer(beam: BeamConfig) -> None:
    curve = weight_curve(beam, layout=TP8, batches=(1,))
    part = {name: values[0] for name, values in curve.parts.items()}
    assert curve.distinct == (EACH,)
    assert part["experts"] == pytest.approx(SPARSE * EACH * 3 * HIDDEN * (WIDE // 8) * 2, rel=1e-12)
    assert part["router"] == SPARSE * 4 * EXPERTS * (HIDDEN + 1)  # whole on every GPU, FP32
    # One GPU's rows of query and gate, of one KV head's key and value, its columns of the output,
    # and six numbers that scale the queries with position.
    assert part["attention"] == LAYERS * 2 * (HIDDEN * 128 * (2 * 6 + 2 + 6) + 6)
    assert part["dense_mlp"] == 3 * 2 * 3 * HIDDEN * 12_288 // 8
    assert part["head"] == 2 * HIDDEN * VOCAB // 8
    assert part["embedding"] == 2 * HIDDEN / 8  # its share of one row
    assert curve.total[0] == pytest.approx(sum(part.values()))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_grows_with_the_batch_towards_all_that_is_held(beam: BeamConfig, precision: str) -> None:
    curve = weight_curve(beam, PRECISIONS[precision], TP8)
    assert (curve.batches[0], curve.batches[-1]) == (1, 1024)
    assert set(BATCHES) >= {1 << i for i in range(11)}
    assert all(a < b for a, b in zip(curve.total, curve.total[1:], strict=False))
    assert curve.total[-1] < curve.held
    held = size_weights(beam, PRECISIONS[precision], TP8)
    assert curve.held == held.per_gpu_bytes
    # A thousand tokens miss no expert worth a byte in a thousand; of the embedding they read rows.
    missing = held.per_gpu["embedding"] * (1 - 1024 / VOCAB)
    assert curve.held - curve.total[-1] == pytest.approx(missing, rel=1e-3)


def test_the_expectation_by_enumeration(beam: BeamConfig) -> None:
    small = replace(beam, num_experts=5, num_experts_per_tok=2, n_group=None, topk_group=None)
    choices = list(combinations(range(5), 2))
    for tokens in (1, 2, 3):
        drawn = [len(set().union(*made)) for made in product(choices, repeat=tokens)]
        (distinct,) = weight_curve(small, batches=(tokens,)).distinct
        assert distinct == pytest.approx(sum(drawn) / len(drawn), rel=1e-12)


def test_measured_experts_take_the_place_of_the_expectation(beam: BeamConfig) -> None:
    curve = weight_curve(beam, batches=(1, 64), distinct=(8, 128))
    assert curve.measured
    assert curve.distinct == (8.0, 128.0)
    one, half = curve.parts["experts"]
    assert half == pytest.approx(SPARSE * 128 * 3 * HIDDEN * WIDE * 2, rel=1e-12)
    assert half == pytest.approx(16 * one)
    assert not weight_curve(beam, batches=(1,)).measured
    assert curve.to_dict()["parts"]["experts"] == [one, half]


@pytest.mark.parametrize(
    ("batches", "distinct", "message"),
    [
        ((), None, "whole numbers from 1"),
        ((0, 1), None, "whole numbers from 1"),
        ((4, 2), None, "ascending"),
        ((2, 2), None, "ascending"),
        ((1, 2.5), None, "whole numbers"),
        ((True, 2), None, "whole numbers"),
        ((1, 10**400), None, "at most"),
        ((1, 2), (8,), "each of the 2 batches"),
        ((1,), (float("nan"),), "each of the 1 batches"),
        ((1,), (257,), "from 0 to 256"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(
    beam: BeamConfig, batches: tuple, distinct: tuple | None, message: str
) -> None:
    with pytest.raises(SizingError, match=message):
        weight_curve(beam, batches=batches, distinct=distinct)


def test_a_layout_the_model_cannot_have(beam: BeamConfig) -> None:
    with pytest.raises(SizingError, match="over 7 ranks"):
        weight_curve(beam, layout=Layout(tp=7))
