"""Plans: the sum of their parts, exact inverses, and a command that the engine would take."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_starts import FOLDER, served_rank
from workbench.datasheet import SHEETS, sheet
from workbench.errors import WorkbenchError
from workbench.model.asked import SizingError
from workbench.model.display import gib
from workbench.model.drafter_config import DFlash2Config
from workbench.model.engine_limits import refusals
from workbench.model.layout import Layout, layouts
from workbench.model.plan import Plan, all_plans, budget_bytes, make_plan
from workbench.model.presets import beam_501b, beam_501b_dflash2
from workbench.model.serve_command import NO_CHECKPOINT, NO_DRAFTER, Speculation
from workbench.model.sizing import size_kv
from workbench.model.weights import PRECISIONS, Precision, size_weights
from workbench.model.workspace import PROCESS_BYTES, buffer_bytes, workspace_bytes

BEAM = beam_501b().config
DRAFTER = beam_501b_dflash2().config
H200 = sheet("H200")


def plan(**changes: Any) -> Plan:
    asked: dict[str, Any] = {
        "gpu": sheet("GB200"),
        "gpus": 8,
        "weights": "nvfp4",
        "kv_dtype": "fp8",
        "context": 131_072,
        "drafter": DRAFTER,
        "speculation": Speculation(),
        "name": "beam-501b",
    } | changes
    return make_plan(BEAM, asked.pop("gpu"), **asked)


def test_a_gpu_s_memory_is_the_sum_of_its_parts() -> None:
    p = plan(sequences=4)
    assert p.layout == Layout(tp=8)
    memory = 189_471 * 2**20  # GB200 by the driver
    assert p.memory_bytes == memory
    weights = size_weights(BEAM, PRECISIONS["nvfp4"], Layout(tp=8), DRAFTER).per_gpu_bytes
    kv = size_kv(BEAM, context=131_072, sequences=4, kv_dtype="fp8", tp=8, drafter=DRAFTER)
    left = -int(-(memory * 0.92) // 1) - weights - p.workspace_bytes - kv.pool_bytes
    assert p.free_bytes == left > 0
    assert p.fits
    assert p.runs
    value = json.loads(json.dumps(p.to_dict()))
    per_gpu = value["per_gpu"]
    assert per_gpu["budget_bytes"] == sum(
        per_gpu[part] for part in ("weights_bytes", "workspace_bytes", "kv_bytes", "free_bytes")
    )
    assert sum(per_gpu["weights"].values()) == per_gpu["weights_bytes"]
    assert gib(left) in p.verdict


@pytest.mark.parametrize("gpu", sorted(SHEETS))
@pytest.mark.parametrize("weights", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("context", [1, 4096, 131_072, 1_048_576])
def test_limits_are_exact(gpu: str, weights: str, context: int) -> None:
    """One token or one group's sequence more than the limit does not fit any more."""
    for p in all_plans(BEAM, sheet(gpu), gpus=8, weights=weights, context=context, sequences=16):
        groups = p.layout.dp
        for sequences, expected in ((p.max_sequences, True), (p.max_sequences + groups, False)):
            if sequences:
                again = make_plan(
                    BEAM, sheet(gpu), layout=p.layout, weights=weights, context=context,
                    sequences=sequences,
                )  # fmt: skip
                crowded = any("batched tokens" in refusal for refusal in again.refusals)
                assert (again.fits and not crowded) is expected
        for longest, expected in ((p.max_context, True), (p.max_context + 1, False)):
            if 1 <= longest <= 1_048_576:
                again = make_plan(
                    BEAM, sheet(gpu), layout=p.layout, weights=weights, context=longest,
                    sequences=16,
                )  # fmt: skip
                assert again.fits is expected


def test_the_published_serving_example_fits_where_it_was_published() -> None:
    """TP4 with an FP8 cache is the default example; 4 x GB200 hold NVFP4 weights, not BF16."""
    p = plan(gpus=4)
    assert p.layout == Layout(tp=4)
    assert p.runs
    narrow = plan(gpus=4, weights="bf16")
    assert not narrow.fits
    assert "exceed the" in narrow.verdict
    assert narrow.max_context == narrow.max_sequences == 0
    # The whole BF16 model on eight H200: 935 GiB over eight cards.
    eight = plan(gpu=H200, gpus=8, weights="bf16", drafter=None, speculation=None)
    assert eight.runs
    assert eight.weights_bytes * 8 / 2**30 == pytest.approx(935, abs=0.5)


def test_first_layout_that_runs_is_taken() -> None:
    assert plan(gpus=5).layout == Layout(dp=5)  # five slices of 512 in each expert
    seven = plan(gpus=7)
    # 2560 has no seventh: whole experts only
    assert seven.layout == Layout(dp=7, expert_parallel=True)
    with pytest.raises(SizingError, match="cannot be spread over 600 GPUs"):
        plan(gpus=600)


def test_what_the_engine_refuses() -> None:
    both = Layout(tp=4, dp=2, expert_parallel=True)
    assert refusals(BEAM, PRECISIONS["bf16"], Layout(tp=8)) == ()
    assert refusals(BEAM, PRECISIONS["fp8"], Layout(tp=8)) == ()
    assert "not with both at once" in refusals(BEAM, PRECISIONS["bf16"], both)[0]
    p = plan(gpus=None, layout=both)
    assert p.fits
    assert not p.runs
    assert "the engine refuses it" in p.verdict
    odd = BEAM.replace(intermediate_size=8 * 520, moe_intermediate_size=8 * 24)
    every = Precision(attention="nvfp4", dense_mlp="fp8", experts="nvfp4")
    found = refusals(odd, every, Layout(tp=8))
    assert len(found) == 2
    # FP8 blocks of the experts shrink to 64 and 32, and then no further.
    for layout, accepted in (
        (Layout(tp=8), True),
        (Layout(tp=16), True),
        (Layout(tp=8, dp=4), False),
        (Layout(tp=16, dp=2), False),
        (Layout(tp=8, dp=8), False),
        (Layout(dp=32, expert_parallel=True), True),
    ):
        assert (refusals(BEAM, Precision(experts="fp8"), layout) == ()) is accepted, layout
    # Each part of a merged projection must be whole blocks, on one GPU as well.
    narrow = BEAM.replace(num_key_value_heads=1, head_dim=64)
    assert "attention is 64 wide" in refusals(narrow, Precision(attention="fp8"), Layout())[0]
    assert refusals(narrow, PRECISIONS["bf16"], Layout()) == ()
    assert "dense mlp is 520 wide, no multiple of the 128" in found[0]
    assert "experts is 24 wide, no multiple of the 16" in found[1]


def test_batches_the_engine_would_not_start_with() -> None:
    """It wants a token for each sequence, and one more than an anchor and its drafts."""
    crowd = plan(gpus=None, layout=Layout(tp=8), sequences=300, batched_tokens=100, context=99)
    assert any("300 sequences a group are more than the 100" in r for r in crowd.refusals)
    assert not crowd.runs
    assert crowd.max_sequences == 100 // 8
    for tokens, runs in ((8, False), (9, True)):
        assert plan(batched_tokens=tokens).runs is runs
        assert plan(batched_tokens=tokens, drafter=None, speculation=None).runs
    assert "leave no room for an anchor and 7 draft tokens" in plan(batched_tokens=7).refusals[0]


def test_notes_about_the_drafter() -> None:
    assert any("beyond 7 are guesses" in n for n in plan(speculation=Speculation(tokens=8)).notes)
    short = DRAFTER.replace(max_position_embeddings=4096)
    assert any("knows 4,096 positions" in n for n in plan(drafter=short).notes)
    unknown = plan(drafter=None, speculation=Speculation(drafter="org/drafter"))
    assert any("are not counted" in n for n in unknown.notes)


def test_notes_say_what_the_memory_does_not() -> None:
    crowd = plan(sequences=2000)
    assert any("at most 1,024 sequences a group" in note for note in crowd.notes)
    calm = plan(sequences=1024)
    assert not any("at once" in note for note in calm.notes)
    assert any("8 GPUs are 2 hosts of 4" in note for note in calm.notes)  # trays of an NVL72
    assert not plan(gpu=sheet("B200"), sequences=8).notes
    refined = plan(gpu=H200, weights="fp8")
    assert any("64 x 64" in note for note in refined.notes)
    assert any("multiplied in BF16" in note for note in plan(gpu=H200).notes)
    assert not any("BF16" in note for note in plan().notes)
    padded = plan(gpu=sheet("B200"), gpus=None, layout=Layout(tp=16))
    assert any("pad the experts to 192" in note for note in padded.notes)
    assert any("more than the 8 that NVLink joins" in note for note in padded.notes)


def test_verdicts_name_what_is_short() -> None:
    """Weights, weights with the workspace, one sequence, or the number of them."""
    weights = plan(gpu=H200, gpus=1, weights="bf16").verdict
    assert "exceed the 128.62 GiB" in weights
    rank = {"gpu": H200, "gpus": None, "layout": Layout(tp=8), "weights": "bf16"}
    scratch = plan(**rank, batched_tokens=131_072).verdict
    assert "and workspace of" in scratch
    assert "leave nothing of the" in scratch
    one = plan(**rank, context=1_048_576, kv_dtype="bf16", sequences=8, batched_tokens=32_768)
    assert one.max_sequences == 0
    assert "for a single sequence a group of 1,048,576 tokens" in one.verdict
    assert "at most 0" not in one.verdict
    many = plan(**rank, sequences=500).verdict
    assert f"at most {plan(**rank, sequences=500).max_sequences:,} sequences" in many


def test_data_parallel_groups_share_the_sequences() -> None:
    p = plan(gpus=None, layout=Layout(dp=8, expert_parallel=True), sequences=30)
    assert p.sequences_per_group == 4
    assert p.kv.settings.tp == 1
    assert "--max-num-seqs 4" in p.serve_command
    assert p.max_sequences % 8 == 0


def test_a_drafter_is_used_by_the_command_as_well() -> None:
    """Counting one and not asking for it would be a plan for nobody."""
    counted = plan(speculation=None)
    assert counted.speculation == Speculation()
    assert "dflash" in counted.serve_command
    assert "drafter: counted" in repr(counted)
    assert "drafter: none" in repr(plan(drafter=None, speculation=None))


def test_a_drafter_known_by_name_is_assumed_and_said() -> None:
    for more in ({"gpus": 8}, {"gpus": None, "layout": Layout(tp=8)}):
        named = plan(drafter="beam-501b-dflash2", **more)
        assert named.kv.drafter == DRAFTER
        assert any("the drafter's shape is assumed" in note for note in named.notes)
    assert not any("assumed" in note for note in plan().notes)


def test_limits_end_where_the_engine_runs_no_more_at_once() -> None:
    many = plan(context=4096)
    assert many.max_sequences == 8192 // 8
    assert "the model's own 1,048,576 tokens" in many.reach
    free = plan(context=4096, drafter=None, speculation=None)
    assert free.max_sequences > 8192 // 8


def test_decode_step_is_the_roofline_s() -> None:
    """Most of a step at 16 sequences are the experts they choose; by hand their bytes."""
    step = plan(sequences=16).decode_step()
    assert step is not None
    distinct = 256 * (1 - (248 / 256) ** 16)
    slices = 49 * 3 * distinct * (5120 * 320 * 9 / 16 + 8)
    assert slices / 8e12 < step.seconds < 3 * slices / 8e12
    assert plan(gpu=sheet("B200"), gpus=None, layout=Layout(tp=16)).decode_step() is None


def test_command_says_all_that_was_planned() -> None:
    p = plan(
        gpus=4,
        sequences=7,
        checkpoint="/models/it's beam",
        speculation=Speculation(drafter="org/drafter", tokens=5),
        async_scheduling=False,
        utilization=0.9,
    )
    words = shlex.split(p.serve_command.replace("\\\n", " "))
    assert words == p.arguments
    assert words[:3] == ["vllm", "serve", "/models/it's beam"]
    for option, value in {
        "--host": "127.0.0.1",
        "--tensor-parallel-size": "4",
        "--kv-cache-dtype": "fp8",
        "--block-size": "16",
        "--max-model-len": "131072",
        "--max-num-seqs": "7",
        "--max-num-batched-tokens": "8192",
        "--gpu-memory-utilization": "0.9",
        "--reasoning-parser": "beam",
        "--tool-call-parser": "beam",
    }.items():
        assert words[words.index(option) + 1] == value
    assert {"--enable-auto-tool-choice", "--no-async-scheduling"} <= set(words)
    assert "--data-parallel-size" not in words
    assert json.loads(words[words.index("--speculative-config") + 1]) == {
        "method": "dflash",
        "model": "org/drafter",
        "num_speculative_tokens": 5,
        "enable_adaptive_verification": True,
    }
    spread = plan(gpus=None, layout=Layout(dp=4, expert_parallel=True), kv_dtype="bf16")
    words = spread.arguments
    assert words[words.index("--data-parallel-size") + 1] == "4"
    assert "--enable-expert-parallel" in words
    assert words[words.index("--kv-cache-dtype") + 1] == "bfloat16"


def test_what_was_not_given_is_a_visible_placeholder() -> None:
    command = plan().serve_command
    assert shlex.quote(NO_CHECKPOINT) in command
    assert NO_DRAFTER in command
    plain = plan(drafter=None, speculation=None)
    assert "--speculative-config" not in plain.serve_command
    fixed = plan(speculation=Speculation(adaptive=False))
    assert "adaptive" not in fixed.serve_command


@given(
    st.integers(1, 65_536),
    st.integers(1, 512),
    st.sampled_from(layouts(BEAM, 8)),
)
@settings(max_examples=60, deadline=None)
def test_workspace_grows_and_has_a_floor(tokens: int, sequences: int, layout: Layout) -> None:
    here = workspace_bytes(BEAM, layout, tokens, sequences)
    assert here > PROCESS_BYTES
    assert here <= workspace_bytes(BEAM, layout, tokens + 1, sequences + 1)
    assert here <= workspace_bytes(BEAM, layout, tokens, sequences, Speculation())


LOGS = sorted(FOLDER.glob("h200_*.json"))


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_recorded_starts_of_the_engine(path: Path) -> None:
    """One of eight ranks' shapes on a real H200: weights to the byte, the pool to the block."""
    found = json.loads(path.read_text("utf-8"))
    rank = served_rank(found["layers"])
    drafter = None
    if "drafter_config" in found:
        drafter = DFlash2Config.from_dict(found["drafter_config"])
    weights = size_weights(rank, drafter=drafter).per_gpu
    theirs = found.get("drafter_parameter_bytes", 0)
    assert weights["drafter"] == theirs
    assert sum(weights.values()) == found["parameter_bytes"] + theirs
    if "buffer_bytes" in found:
        made = found["buffer_bytes"] + found.get("drafter_buffer_bytes", 0)
        made += found.get("drafter_context_copy_bytes", 0)
        # The rest are a few scales a layer.
        assert 0 <= made - buffer_bytes(rank, drafter) < 1024
    kv = size_kv(
        rank,
        context=found["max_model_len"],
        kv_dtype="bf16" if found["cache_dtype"] == "auto" else "fp8",
        batched_tokens=found["max_num_batched_tokens"],
        async_scheduling=found["async_scheduling"],
        block_size=found["block_size"],
        drafter=drafter,
    )
    groups = kv.plan if len(found["groups"]) > 1 else kv.hybrid_off_plan
    assert groups is not None
    assert [len(g.layers) for g in groups.groups] == [g["layers"] for g in found["groups"]]
    # One run had its number of blocks set by hand.
    if "override" not in path.stem:
        assert found["available_kv_bytes"] // groups.block_bytes == found["num_blocks"]
    blocks = groups.blocks_per_sequence(kv.settings.context, kv.settings.in_flight_tokens)
    assert found["num_blocks"] / blocks == found["max_concurrency"]
    assert int(found["max_concurrency"] * found["max_model_len"]) == found["num_tokens"]
    total, share = found["total_memory"], found["gpu_memory_utilization"]
    assert budget_bytes(total, share) == found["requested_memory"]
    # The workspace is modelled. On this one GPU, without NCCL and mostly without graphs, between
    # nothing and nine tenths of the allowance of 1 GiB for them was left.
    tokens = found.get("num_speculative_tokens", 0)
    speculation = Speculation(tokens=tokens) if tokens else None
    modelled = workspace_bytes(
        rank, Layout(), found["max_num_batched_tokens"], found["max_num_seqs"], speculation, drafter
    )
    took = found["requested_memory"] - found["available_kv_bytes"] - sum(weights.values())
    assert -0.1 <= (modelled - took) / 2**30 <= 0.9


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gpus": 0}, "gpus must be a whole number"),
        ({"gpus": None}, "on how many GPUs"),
        ({"gpus": 4, "layout": Layout(tp=8)}, "TP8 takes 8 GPUs, but 4 are given"),
        ({"sequences": 0}, "sequences must be a whole number from 1"),
        ({"gpu": 8}, "gpu must be the name of a GPU"),
        ({"layout": "8", "gpus": None}, "layout must be a Layout"),
        ({"speculation": True}, "speculation must be a Speculation"),
        ({"checkpoint": "-x"}, "begins with -"),
        ({"checkpoint": " "}, "checkpoint is empty"),
        ({"checkpoint": "a\tb"}, "cannot be printed"),
        ({"checkpoint": 8}, "checkpoint must be text"),
        ({"weights": 8}, "weights must be the name of a precision"),
        ({"weights": "experts=fp8,experts=bf16"}, "names experts twice"),
        ({"context": 10**5000}, "far beyond any model"),
        ({"drafter": DRAFTER.replace(hidden_size=2560)}, "the drafter's hidden_size is 2560"),
        ({"context": 2_000_000}, "context must be a whole number from 1 to 1,048,576"),
        ({"utilization": 0}, "must be above 0 and at most 1"),
        ({"utilization": 1.01}, "must be above 0 and at most 1"),
        ({"utilization": float("nan")}, "must be above 0 and at most 1"),
        ({"weights": "int4"}, "unknown weights"),
        ({"kv_dtype": "int8"}, "unknown KV dtype"),
    ],
)
def test_wrong_input_is_one_sentence(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(WorkbenchError) as raised:
        plan(**changes)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("tokens", [0, -1, 1024, 8.0, True, "8", None])
def test_speculative_tokens_are_checked(tokens: Any) -> None:
    with pytest.raises(SizingError, match="speculative tokens must be a whole number from 1"):
        Speculation(tokens=tokens)


def test_the_engine_gets_the_utilization_that_was_planned_with() -> None:
    exact = plan(utilization=0.92345678)
    words = exact.arguments
    assert float(words[words.index("--gpu-memory-utilization") + 1]) == 0.92345678
