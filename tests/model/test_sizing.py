"""KV cache sizing: published figures, counting token by token, and laws that must hold."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import ConfigError, WorkbenchError
from workbench.model.asked import SizingError
from workbench.model.config import BeamConfig
from workbench.model.kv_inverse import fits, max_context, max_sequences
from workbench.model.presets import beam_501b, beam_501b_dflash2
from workbench.model.sizing import ACCOUNTS, Account, KVSizing, size_kv
from workbench.model.weights import size_weights

BEAM = beam_501b().config
DRAFTER = beam_501b_dflash2().config
GIB = 2**30


def small(full: tuple[int, ...] = (1, 4), layers: int = 6, window: int = 32) -> BeamConfig:
    return BEAM.replace(
        num_hidden_layers=layers,
        layer_types=tuple(
            "full_attention" if i in full else "sliding_attention" for i in range(layers)
        ),
        mlp_layer_types=("dense",) * layers,
        sliding_window=window,
        max_position_embeddings=4096,
    )


# -- published figures --------------------------------------------------------------------------


def test_the_growing_part_is_the_published_one() -> None:
    assert size_kv(BEAM, context=1).bytes_per_token == 36_864
    assert size_kv(BEAM, context=1, kv_dtype="fp8").bytes_per_token == 18_432
    million = size_kv(BEAM, context=1_048_576, kv_dtype="fp8")
    assert million.stored.full == 18 * GIB
    assert million.naive_bytes_per_token == 52 * 2 * 8 * 128


def test_tensor_parallelism_splits_then_replicates() -> None:
    def full(tp: int) -> int:
        return size_kv(BEAM, context=1_048_576, kv_dtype="fp8", tp=tp).per_gpu("ideal").full

    assert full(8) * 8 == 18 * GIB
    assert full(16) == full(8) == full(48)
    sizing = size_kv(BEAM, context=1_048_576, kv_dtype="fp8", tp=16)
    assert sizing.replicas == 2
    assert sizing.stored.full == 18 * GIB  # each head once, whatever the copies
    assert sizing.resident_bytes == 2 * sizing.stored.total == sizing.read_bytes_per_step


@pytest.mark.parametrize("context", [1, 511, 512, 513, 5000])
@pytest.mark.parametrize("drafter", [None, DRAFTER])
def test_ideal_bytes_counted_token_by_token(context: int, drafter: Any) -> None:
    """A token's keys and values count in a layer as long as a later token can still see them."""
    sizing = size_kv(BEAM, context=context, sequences=3, drafter=drafter)
    kept = 0
    for layer in range(52):
        for position in range(context):
            if layer % 6 == 3 or context - position <= 512:
                kept += 1
    if drafter is not None:
        kept += 5 * sum(context - position <= 2048 for position in range(context))
    assert sizing.stored.total == 3 * kept * 2 * 8 * 128 * 2
    layers = sizing.per_layer
    assert len(layers) == 52 + (5 if drafter else 0)
    assert sum(layer.ideal_bytes for layer in layers) == sizing.stored.total
    assert sum(x.naive_bytes for x in layers) == 3 * context * 52 * 2 * 8 * 128 * 2


def test_the_drafter_changes_every_group() -> None:
    """Six groups of nine become twelve of five, and nine full layers no longer fill theirs."""
    alone = size_kv(BEAM, context=131_072)
    assert [len(g.layers) for g in alone.plan.groups] == [9, 9, 9, 8, 8, 9]
    both = size_kv(BEAM, context=131_072, drafter=DRAFTER)
    assert [len(g.layers) for g in both.plan.groups] == [5, 5, 5, 5, 5, 5, 5, 4, 4, 5, 4, 5]
    # By hand, in blocks of five layers of 16 tokens: nine groups of sliding layers, two of full
    # ones, one of the drafter's.
    tokens = [511 + 16_384] * 9 + [131_072] * 2 + [2047 + 16_384]
    extra = [1] * 9 + [0] * 2 + [1]
    blocks = sum(-(-t // 16) + e for t, e in zip(tokens, extra, strict=True))
    assert both.blocks_per_sequence == blocks
    assert both.per_gpu("admission").total == blocks * 5 * 16 * 2 * 8 * 128 * 2
    full = both.per_gpu("admission").full
    assert full == 9 * 131_072 * 2 * 8 * 128 * 2
    assert both.per_gpu("admission").padding >= full // 9  # a tenth full layer's worth at least


def test_binding_term_changes_where_the_context_outgrows_window_and_batches() -> None:
    held = 511 + 16_384
    assert size_kv(BEAM, context=held).binding == "max_model_len"
    assert size_kv(BEAM, context=held + 1).binding == "in_flight_tokens"
    assert "16,895 tokens" in size_kv(BEAM, context=held + 1).binding_sentence
    synchronous = size_kv(BEAM, context=511 + 8192 + 1, async_scheduling=False)
    assert synchronous.binding == "in_flight_tokens"
    assert "8,703 tokens" in synchronous.binding_sentence
    full = small(full=tuple(range(6)))
    assert size_kv(full, context=100).binding == "no_sliding_layers"


def test_binding_is_of_the_layers_it_speaks_of() -> None:
    """Between the bounds of two windows, and where only a drafter has windows."""
    between = size_kv(BEAM, context=17_000, drafter=DRAFTER)
    assert between.binding == "in_flight_tokens"
    assert "a sliding layer holds 16,895 tokens" in between.binding_sentence
    assert "the drafter's hold 17,000" in between.binding_sentence
    beyond = size_kv(BEAM, context=100_000, drafter=DRAFTER)
    assert "the drafter's hold 18,431" in beyond.binding_sentence
    full = BEAM.replace(layer_types=("full_attention",) * 52)
    only = size_kv(full, context=100_000, drafter=DRAFTER)
    assert "a layer of the drafter holds 18,431 tokens" in only.binding_sentence


def test_integers_of_numpy_are_integers() -> None:
    import numpy as np

    asked: Any = {"context": np.int64(9000), "sequences": np.int32(2), "tp": np.int8(8)}
    ours = size_kv(BEAM, **asked)
    assert ours == size_kv(BEAM, context=9000, sequences=2, tp=8)
    budget: Any = np.int64(2**32)
    assert max_context(BEAM, budget) == max_context(BEAM, 2**32)
    with pytest.raises(SizingError, match=r"not array\(\[1, 2\]\)"):
        size_kv(BEAM, **(asked | {"context": np.array([1, 2])}))


def test_limits_of_a_search_are_taken_or_refused() -> None:
    assert max_context(BEAM, 1 << 40, limit=1 << 30) == 1_048_576
    assert max_context(BEAM, 1 << 40, limit=100) == 100
    assert max_context(BEAM, 1) == max_context(BEAM, -5) == 0
    wrong: list[Any] = [float("nan"), "8", None, True, 1.5]
    for budget in wrong:
        with pytest.raises(SizingError, match="whole number of bytes"):
            max_context(BEAM, budget)
    with pytest.raises(SizingError, match="limit must be a whole number"):
        max_context(BEAM, 1, limit=0)


def test_absurd_numbers_of_heads_are_answered_at_once() -> None:
    crowd = BEAM.replace(num_attention_heads=1 << 40, num_key_value_heads=1 << 39)
    started = time.perf_counter()
    with pytest.raises(SizingError, match="use one of 1, 2, 4"):
        size_kv(crowd, context=8, tp=3)
    size_kv(crowd, context=8)
    assert time.perf_counter() - started < 0.5


def test_hybrid_off_with_a_drafter_of_another_window_is_refused_in_words() -> None:
    sizing = size_kv(BEAM, context=4096, drafter=DRAFTER)
    assert sizing.hybrid_off_refusal is not None
    assert "512, 2048" in sizing.hybrid_off_refusal
    assert sizing.hybrid_off_plan is None
    # What it would take is said all the same: every layer at full length.
    assert sizing.per_gpu("hybrid_off").total == 57 * 4096 * 2 * 8 * 128 * 2
    assert {x.hybrid_off_bytes for x in sizing.per_layer} == {4096 * 2 * 8 * 128 * 2}
    same = size_kv(BEAM, context=4096, drafter=DRAFTER.replace(sliding_window=512))
    assert same.hybrid_off_refusal is None
    assert same.per_gpu("hybrid_off").total == 57 * 4096 * 2 * 8 * 128 * 2


def test_a_config_without_full_layers_and_a_window_beyond_the_context() -> None:
    none_full = small(full=())
    sizing = size_kv(none_full, context=1000)
    assert sizing.bytes_per_token == 0
    assert sizing.stored.full == 0
    assert sizing.stored.sliding == 6 * 32 * 2 * 8 * 128 * 2
    wide = small(window=2000)
    assert size_kv(wide, context=1000).stored.sliding == 4 * 1000 * 2 * 8 * 128 * 2
    tiny = size_kv(wide, context=7)
    assert tiny.per_gpu("admission").sliding == 4 * 2 * 16 * 2 * 8 * 128 * 2


def test_json_document_adds_up() -> None:
    value = json.loads(json.dumps(size_kv(BEAM, context=9999, tp=4, drafter=DRAFTER).to_dict()))
    assert value["total_bytes"] == (
        value["full_bytes"] + value["sliding_bytes"] + value["drafter_bytes"]
    )
    for account in ("ideal", "admission", "naive"):
        layers = sum(layer[f"{account}_bytes"] for layer in value["per_layer"])
        padding = value["per_gpu"]["admission_padding_bytes"] if account == "admission" else 0
        assert value["per_gpu"][f"{account}_bytes"] == layers + padding
    assert value["per_gpu_bytes"] * 4 == value["resident_bytes"] == value["total_bytes"]
    assert sorted(i for g in value["engine"]["groups"] for i in g["layers"]) == list(range(57))


# -- laws ---------------------------------------------------------------------------------------

ASKED = st.fixed_dictionaries(
    {
        "context": st.integers(1, 1_048_576),
        "sequences": st.integers(1, 4096),
        "kv_dtype": st.sampled_from(["bf16", "fp8"]),
        "tp": st.sampled_from([1, 2, 4, 8, 16, 24, 48]),
        "block_size": st.sampled_from([16, 32, 48, 64, 128, 256]),
        "batched_tokens": st.integers(1, 65_536),
        "async_scheduling": st.booleans(),
        "drafter": st.sampled_from([None, DRAFTER, DRAFTER.replace(sliding_window=512)]),
    }
)


def drafter_fits(asked: dict[str, Any]) -> bool:
    return asked["drafter"] is None or 32 % asked["tp"] == 0


def totals(sizing: KVSizing) -> dict[str, int]:
    return {account: sizing.per_gpu(account).total for account in ACCOUNTS}


@given(ASKED.filter(drafter_fits))
@settings(max_examples=300, deadline=None)
def test_never_below_ideal_and_layers_add_up(asked: dict[str, Any]) -> None:
    sizing = size_kv(BEAM, **asked)
    found = totals(sizing)
    assert all(found["ideal"] <= bytes_ for account, bytes_ in found.items() if account != "naive")
    assert found["naive"] >= sizing.per_gpu("ideal").full + sizing.per_gpu("ideal").sliding
    for layer in sizing.per_layer:
        assert layer.admission_bytes >= layer.ideal_bytes
        assert layer.hybrid_off_bytes >= layer.ideal_bytes
    admission = sizing.per_gpu("admission")
    layers = sum(layer.admission_bytes for layer in sizing.per_layer)
    assert admission.total == layers + admission.padding
    assert admission.padding >= 0
    assert sizing.pool_bytes == admission.total + sizing.plan.block_bytes


@given(ASKED.filter(drafter_fits), st.data())
@settings(max_examples=200, deadline=None)
def test_monotone_in_context_sequences_and_width(asked: dict[str, Any], data: Any) -> None:
    before = totals(size_kv(BEAM, **asked))
    longer = asked | {"context": data.draw(st.integers(asked["context"], 1_048_576))}
    more = asked | {"sequences": data.draw(st.integers(asked["sequences"], 4096))}
    wider = asked | {"kv_dtype": "bf16"}
    batches = asked | {"batched_tokens": data.draw(st.integers(asked["batched_tokens"], 65_536))}
    for grown in (longer, more, wider, batches):
        after = totals(size_kv(BEAM, **grown))
        assert all(before[account] <= after[account] for account in before)


@given(
    ASKED.filter(drafter_fits),
    st.integers(1, 300 * GIB),
    st.sampled_from(["ideal", "admission", "naive"]),
)
@settings(max_examples=150, deadline=None)
def test_inverses_are_exact(asked: dict[str, Any], budget: int, account: Account) -> None:
    """What is found fits, one more does not, unless the limit itself was reached."""
    given_ = {k: v for k, v in asked.items() if k not in ("context", "sequences")}
    longest = max_context(BEAM, budget, account=account, sequences=asked["sequences"], **given_)
    for context, expected in ((longest, True), (longest + 1, False)):
        if 1 <= context <= 1_048_576:
            sizing = size_kv(BEAM, context=context, sequences=asked["sequences"], **given_)
            assert fits(sizing, budget, account=account) is expected
    most = max_sequences(BEAM, budget, account=account, context=asked["context"], **given_)
    for sequences, expected in ((most, True), (most + 1, False)):
        if 1 <= sequences <= 1 << 20:
            sizing = size_kv(BEAM, context=asked["context"], sequences=sequences, **given_)
            assert fits(sizing, budget, account=account) is expected


@given(ASKED.filter(drafter_fits))
@settings(max_examples=60, deadline=None)
def test_inverse_of_its_own_bytes_gives_the_context_back(asked: dict[str, Any]) -> None:
    sizing = size_kv(BEAM, **asked)
    given_ = {k: v for k, v in asked.items() if k not in ("context", "sequences")}
    found = max_context(BEAM, sizing.per_gpu("ideal").total, account="ideal",
                        sequences=asked["sequences"], **given_)  # fmt: skip
    assert found == asked["context"]
    budget = sizing.pool_bytes
    assert max_sequences(BEAM, budget, context=asked["context"], **given_) == asked["sequences"]
    block = max_context(BEAM, budget, sequences=asked["sequences"], **given_)
    assert asked["context"] <= block < asked["context"] + asked["block_size"]


def test_pure_and_fast() -> None:
    """10,000 evaluations in a second; each differs, so that no cache answers."""
    started = time.perf_counter()
    for context in range(1, 10_001):
        sizing = size_kv(BEAM, context=context, kv_dtype="fp8", tp=8, drafter=DRAFTER)
        assert sizing.per_gpu("admission").total > 0
    assert time.perf_counter() - started < 1.0


# -- wrong input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"context": 0}, "context must be a whole number from 1 to 1,048,576 tokens, not 0"),
        ({"context": -5}, "not -5"),
        ({"context": 1_048_577}, "not 1,048,577"),
        ({"context": 10**40}, "not a number far beyond any model"),
        ({"context": 1.5}, "not 1.5"),
        ({"context": True}, "not True"),
        ({"context": float("nan")}, "not nan"),
        ({"context": "8k"}, "not '8k'"),
        ({"context": 8, "sequences": 0}, "sequences must be a whole number from 1"),
        ({"context": 8, "block_size": 0}, "block size must be a whole number from 1"),
        ({"context": 8, "batched_tokens": -1}, "batched tokens must be a whole number from 1"),
        ({"context": 8, "kv_dtype": "int4"}, "unknown KV dtype 'int4'; use one of bf16, fp8"),
        ({"context": 8, "async_scheduling": 2}, "async_scheduling must be true or false"),
        ({"context": 8, "tp": 0}, "(tp) must be a whole number from 1"),
        ({"context": 8, "block_size": 8}, "block size must be a multiple of 16 tokens, not 8"),
        ({"context": 8, "block_size": 24}, "multiple of 16"),
        ({"context": None}, "not None"),
        ({"context": 8, "tp": 5}, "use one of 1, 2, 4, 8, 16, 24, 48"),
        ({"context": 8, "tp": 12}, "does not divide"),
        ({"context": 8, "tp": 24, "drafter": DRAFTER}, "32 query heads"),
    ],
)
def test_wrong_input_is_one_sentence(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(WorkbenchError) as raised:
        size_kv(BEAM, **asked)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_unknown_account_is_one_sentence() -> None:
    with pytest.raises(SizingError, match="unknown account 'all'"):
        size_kv(BEAM, context=8).per_gpu("all")  # type: ignore[arg-type]


# -- the drafter's configuration ----------------------------------------------------------------


def test_drafter_config_goes_to_json_and_back() -> None:
    again = type(DRAFTER).from_dict(json.loads(DRAFTER.to_json()))
    assert again == DRAFTER
    assert again.to_dict() == DRAFTER.to_dict()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dflash_config": None}, "dflash_config is missing"),
        ({"is_causal": True}, "is_causal must be false"),
        ({"layer_types": ["full_attention"] * 5}, "must be sliding_attention"),
        ({"layer_types": ["sliding_attention"] * 3}, "one for each layer"),
        ({"sliding_window": 0}, "sliding_window must be a whole number"),
        ({"num_attention_heads": 31}, "must be a multiple of"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number"),
        ({"block_size": 1}, "block_size must be"),
        ({"head_dim": 63}, "head_dim must be even"),
    ],
)
def test_drafter_config_names_what_is_wrong(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        type(DRAFTER).from_dict(DRAFTER.to_dict() | change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"target_layer_ids": [5, 4]}, "ascending order"),
        ({"target_layer_ids": [5, 5]}, "ascending order"),
        ({"target_layer_ids": []}, "ascending order"),
        ({"mask_token_id": 163_840}, "mask_token_id must be a token id below 163840"),
        ({"conv_group_size": 7}, "must divide hidden_size"),
        ({"selector_top_k": 200_000}, "selector_top_k must be at most 256"),
        ({"final_logit_softcapping": None}, "final_logit_softcapping must be a positive number"),
    ],
)
def test_nested_drafter_fields_too(change: dict[str, Any], says: str) -> None:
    data = DRAFTER.to_dict()
    data["dflash_config"] = data["dflash_config"] | change
    with pytest.raises(ConfigError, match=says):
        type(DRAFTER).from_dict(data)


def test_missing_drafter_fields_are_named() -> None:
    data = DRAFTER.to_dict()
    del data["dflash_config"]["selector_rank"]
    with pytest.raises(ConfigError, match=r"selector_rank \(in dflash_config\) is missing"):
        type(DRAFTER).from_dict(data)
    data = DRAFTER.to_dict()
    del data["sliding_window"]
    with pytest.raises(ConfigError, match="the field sliding_window is missing"):
        type(DRAFTER).from_dict(data)


def test_drafter_must_belong_to_its_target() -> None:
    for ask in (lambda: size_kv("beam-tiny", context=9, drafter=DRAFTER),
                lambda: size_weights("beam-tiny", drafter=DRAFTER)):  # fmt: skip
        with pytest.raises(ConfigError, match="the drafter's hidden_size is 5120"):
            ask()
    with pytest.raises(ConfigError, match="hidden_size is 2560"):
        DRAFTER.replace(hidden_size=2560).check_target(BEAM)
    with pytest.raises(ConfigError, match="target layer 52"):
        DRAFTER.replace(target_layer_ids=(5, 52)).check_target(BEAM)
    DRAFTER.check_target(BEAM)
