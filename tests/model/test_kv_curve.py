"""The growth of the KV cache over the context, against arithmetic done here."""

import pytest

import workbench
from workbench.model.asked import SizingError
from workbench.model.config import BeamConfig
from workbench.model.kv_curve import KVCurve, kv_curve
from workbench.model.presets import resolve_drafter
from workbench.model.sizing import size_kv

TOKEN = 2 * 8 * 128  # numbers a token and layer in beam-501b: keys and values of 8 heads


@pytest.fixture(scope="module")
def config() -> BeamConfig:
    return workbench.resolve("beam-501b").config


def at(curve: KVCurve, context: int) -> dict[str, int]:
    place = curve.contexts.index(context)
    names = ("full", "sliding", "drafter", "padding", "naive", "total")
    return {name: getattr(curve, name)[place] for name in names}


def test_full_layers_grow_and_sliding_ones_stop_at_the_window(config: BeamConfig) -> None:
    curve = kv_curve(size_kv(config, context=100_000, kv_dtype="bf16"), account="ideal")
    for context in (1, 256, 512, 1024, 65536, 100_000, 1_048_576):
        assert at(curve, context) == {
            "full": 9 * context * TOKEN * 2,
            "sliding": 43 * min(context, 512) * TOKEN * 2,
            "drafter": 0,
            "padding": 0,
            "naive": 52 * context * TOKEN * 2,
            "total": (9 * context + 43 * min(context, 512)) * TOKEN * 2,
        }
    assert curve.flat_from == 512
    assert curve.contexts[curve.at] == 100_000


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_engines_bound_bends_where_the_tokens_in_flight_end(
    config: BeamConfig, asynchronous: bool
) -> None:
    sizing = size_kv(
        config, context=4096, sequences=3, kv_dtype="fp8", tp=8, batched_tokens=2048,
        async_scheduling=asynchronous,
    )  # fmt: skip
    curve = kv_curve(sizing)
    held = 511 + 2048 * (2 if asynchronous else 1)
    assert curve.flat_from == held
    for context in (512, held, 16384, 1_048_576):
        blocks = -(-min(held, context) // 16) + 1
        got = at(curve, context)
        page = 16 * 2 * 128  # one layer's part of a block: one head, one byte a number
        assert got["full"] == 3 * 9 * -(-context // 16) * page
        assert got["sliding"] == 3 * 43 * blocks * page
        assert got["padding"] == 3 * 2 * blocks * page  # two groups of eight beside those of nine
        assert got["naive"] == 3 * 52 * context * 2 * 128


def test_straight_lines_between_the_points_are_right_to_a_block(config: BeamConfig) -> None:
    sizing = size_kv(config, context=131_072, kv_dtype="fp8")
    few, many = kv_curve(sizing, points=2), kv_curve(sizing, points=400)
    block = 16 * TOKEN * 54  # of every group at once
    for context, total in zip(many.contexts, many.total, strict=True):
        left = max(i for i, n in enumerate(few.contexts) if n <= context)
        right = min(left + 1, len(few.contexts) - 1)
        width = few.contexts[right] - few.contexts[left] or 1
        share = (context - few.contexts[left]) / width
        line = few.total[left] + share * (few.total[right] - few.total[left])
        assert abs(line - total) <= 2 * block


def test_a_drafter_has_a_part_of_its_own(config: BeamConfig) -> None:
    drafter = resolve_drafter("beam-501b-dflash2").config
    sizing = size_kv(config, context=8192, kv_dtype="fp8", drafter=drafter)
    curve = kv_curve(sizing, account="ideal")
    assert at(curve, 1024)["drafter"] == 5 * 1024 * 2 * 8 * 128
    assert at(curve, 1_048_576)["drafter"] == 5 * 2048 * 2 * 8 * 128
    assert 2048 in curve.contexts
    assert curve.refusal is None
    whole = kv_curve(sizing, account="hybrid_off")
    assert whole.refusal is not None
    assert "windows differ" in whole.refusal
    assert at(whole, 1_048_576)["drafter"] == 5 * 1_048_576 * 2 * 8 * 128


def test_a_model_of_full_layers_only_has_no_flat_part(config: BeamConfig) -> None:
    full = config.replace(layer_types=("full_attention",) * config.num_hidden_layers)
    curve = kv_curve(size_kv(full, context=1000), account="ideal")
    assert curve.flat_from is None
    assert set(curve.sliding) == {0}
    assert curve.full == curve.naive


def test_a_window_beyond_the_context_never_flattens(config: BeamConfig) -> None:
    short = config.replace(max_position_embeddings=256)
    curve = kv_curve(size_kv(short, context=256), account="ideal")
    assert curve.contexts[-1] == 256
    assert curve.flat_from is None
    assert curve.total == curve.naive


@pytest.mark.parametrize("points", [1, 0, 5000, 3.5, True])
def test_a_number_of_points_that_cannot_be(config: BeamConfig, points: int) -> None:
    with pytest.raises(SizingError, match="from 2 to 4,096 points"):
        kv_curve(size_kv(config, context=1), points=points)
