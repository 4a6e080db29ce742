"""Start-up logs beside their prediction: recorded ones of the real engine, and what each says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine_starts import FOLDER, served_rank
from workbench.errors import WorkbenchError
from workbench.model.drafter_config import DFlash2Config
from workbench.model.presets import beam_501b, beam_501b_dflash2
from workbench.serving.reconcile import Comparison, Reconciliation, reconcile
from workbench.serving.startup_log import StartupLogError

BEAM = beam_501b().config
DRAFTER = beam_501b_dflash2().config


def row(found: Reconciliation, line: str) -> Comparison:
    return next(row for row in found.rows if row.line == line)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("h200_*.txt")), ids=lambda p: p.stem)
def test_recorded_logs_agree(path: Path) -> None:
    record = json.loads(path.with_suffix(".json").read_text("utf-8"))
    drafter = None
    if "drafter_config" in record:
        drafter = DFlash2Config.from_dict(record["drafter_config"])
    model = served_rank(record["layers"])
    found = reconcile(path.read_text("utf-8"), model, drafter=drafter, gpu="H200")
    assert found.agrees
    assert found.version == "0.33.0"
    for line in ("Maximum concurrency", "KV cache size"):
        assert row(found, line).verdict == "agrees"
    assert row(found, "KV cache size").logged == record["num_tokens"]
    assert row(found, "Model loading took").error == pytest.approx(0, abs=0.002)
    if len(record["groups"]) > 1:
        assert row(found, "KV cache groups").low == len(record["groups"])
    # Modelled, with and without its allowance (tests/model/test_plan.py says by how much).
    assert row(found, "Available KV cache memory").verdict in ("agrees", "close")
    assert found.settings["context"] == (record["max_model_len"], "log")
    assert json.loads(json.dumps(found.to_dict()))["rows"][0]["line"] == "Model loading took"
    assert "predicted" in repr(found)


def line(text: str) -> str:
    return f"INFO 11-29 12:00:00 [kv_cache_utils.py:1] {text}\n"


def lines(version: str, tokens: int, concurrency: float, *, memory: float = 10.0) -> str:
    return "".join(
        [
            line(f"Initializing a V1 LLM engine (v{version}) with config: model='m'"),
            line(f"Available KV cache memory: {memory:.2f} GiB"),
            line(f"GPU KV cache size: {tokens:,} tokens"),
            line(f"Maximum concurrency for 131,072 tokens per request: {concurrency:.2f}x"),
        ]
    )


GIVEN: dict[str, Any] = {"tp": 8, "kv_dtype": "fp8", "batched_tokens": 8192}
PAGE = 16 * 2 * 128  # one layer's part of a block of one KV head in FP8


def test_new_engines_count_concurrency_times_length() -> None:
    """By hand: six groups of nine layers; a window and two batches in five of them."""
    blocks = 10 * 2**30 // (9 * PAGE)
    a_sequence = 131_072 // 16 + 5 * (-(-(511 + 16_384) // 16) + 1)
    concurrency = blocks / a_sequence
    text = lines("0.33.0", int(concurrency * 131_072), concurrency)
    found = reconcile(text, "beam-501b", **GIVEN)
    assert found.agrees
    assert row(found, "KV cache size").verdict == "agrees"
    assert "blocks that one request" in row(found, "Maximum concurrency").meaning


def test_old_engines_divided_blocks_by_groups() -> None:
    """0.9.1 to 0.20.0: tokens are blocks // groups x block; one batch in flight, not two."""
    blocks = 10 * 2**30 // (9 * PAGE)
    a_sequence = 131_072 // 16 + 5 * (-(-(511 + 8192) // 16) + 1)
    text = lines("0.12.0", blocks // 6 * 16, blocks / a_sequence)
    found = reconcile(text, BEAM, **GIVEN)
    assert found.agrees
    tokens = row(found, "KV cache size")
    assert tokens.verdict == "agrees"
    assert tokens.logged is not None
    assert tokens.logged < 131_072 * blocks / a_sequence  # not concurrency x length
    # Read by the wrong release's rules the same lines do not agree.
    wrong = reconcile(text.replace("0.12.0", "0.33.0"), BEAM, **GIVEN)
    assert not wrong.agrees


def test_first_engines_kept_every_layer_whole() -> None:
    blocks = 10 * 2**30 // (52 * PAGE)
    text = lines("0.8.5", blocks * 16, blocks * 16 / 131_072)
    assert reconcile(text, BEAM, **GIVEN).agrees


def test_a_drafter_changes_the_pool_and_its_absence_is_noticed() -> None:
    blocks = 10 * 2**30 // (5 * PAGE)
    a_sequence = (
        2 * (131_072 // 16) + 9 * (-(-(511 + 16_384) // 16) + 1) + (-(-(2047 + 16_384) // 16) + 1)
    )
    concurrency = blocks / a_sequence
    text = lines("0.33.0", int(concurrency * 131_072), concurrency)
    assert reconcile(text, BEAM, drafter="beam-501b-dflash2", **GIVEN).agrees
    without = reconcile(text, BEAM, **GIVEN)
    assert row(without, "Maximum concurrency").verdict == "differs"
    spoken = text.replace("model='m'", "model='m', speculative_config=SpeculativeConfig(...)")
    assert any("none was given" in note for note in reconcile(spoken, BEAM, **GIVEN).caveats)


def test_nothing_compared_is_no_agreement() -> None:
    only = line("Available KV cache memory: 10.00 GiB")
    found = reconcile(only, BEAM, context=4096)
    assert found.compared == 0
    assert not found.agrees


def test_without_the_memory_the_two_figures_are_held_against_each_other() -> None:
    pair = "GPU KV cache size: {} tokens, Maximum concurrency for 8,192 tokens per request: 58.01x"
    start = line("Initializing a V1 LLM engine (v0.33.0) with config: model='m'")
    good = reconcile(start + line(pair.format("475,199")), BEAM)
    assert row(good, "KV cache size").verdict == "agrees"
    bad = reconcile(start + line(pair.format("999,999,999")), BEAM)
    assert not bad.agrees


def test_other_groups_than_predicted_differ() -> None:
    text = lines("0.33.0", 1, 1.0) + line("kv cache group sizes (16, 16)")
    groups = row(reconcile(text, BEAM, **GIVEN), "KV cache groups")
    assert (groups.logged, groups.low, groups.verdict) == (2, 6, "differs")


def test_other_releases_are_read_with_a_word_about_grouping() -> None:
    def notes(version: str) -> str:
        return " ".join(reconcile(lines(version, 1, 1.0), BEAM, **GIVEN).caveats)

    assert "How layers are grouped is known of vLLM 0.33" in notes("0.12.0")
    assert "How layers are grouped" not in notes("0.33.0")


def test_what_was_assumed_or_not_used_is_said() -> None:
    text = lines("0.33.0", 1, 1.0)
    said = " ".join(reconcile(text, BEAM, tp=8, context=4096).caveats)
    assert "does not say batched tokens: taken as 8192 (assumed)" in said
    assert "The log says context 131072; the 4096 that was given is not used" in said
    assert "does not say tp" not in said
    assert "async scheduling: taken as True (the release's default)" in said
    given = " ".join(reconcile(text, BEAM, **GIVEN, async_scheduling=False).caveats)
    assert "async" not in given


def test_a_path_is_not_a_log() -> None:
    with pytest.raises(WorkbenchError, match=r"looks like a path.*read_text"):
        reconcile("runs/vllm.log", BEAM)


def test_two_percent_is_the_line() -> None:
    def told(logged: float | None) -> Comparison:
        return Comparison(
            line="x", logged=logged, low=100, high=102, unit="tokens", how="", meaning=""
        )

    assert [told(x).verdict for x in (101, 102, 103, 104.03, 104.1, 98, 97.9, None)] == [
        "agrees", "agrees", "close", "close", "differs", "close", "differs", "not stated",
    ]  # fmt: skip
    assert told(51).error == pytest.approx(-0.49)
    assert told(101).predicted_text == "100 tokens … 102 tokens"


def test_settings_say_where_they_come_from() -> None:
    text = lines("0.33.0", 1, 1.0)
    found = reconcile(text, BEAM, tp=8)
    assert found.settings["tp"] == (8, "given")
    assert found.settings["kv_dtype"] == ("bf16", "assumed")
    assert found.settings["block_size"] == (16, "the engine's default")
    assert found.settings["async_scheduling"] == (True, "the release's default")


@pytest.mark.parametrize(
    ("text", "given", "says"),
    [
        ("", {}, "mpty"),
        ("nothing of the kind", {}, "None of the lines"),
        (lines("0.33.0", 1, 1.0), {"tp": 7}, "does not divide"),
        (line("Available KV cache memory: 10.00 GiB"), {}, "does not say context"),
        (lines("0.33.0", 1, 1.0).replace("131,072", "9,999,999"), {}, "context must be a whole"),
        (None, {}, "log must be the text of a start-up log"),
        (lines("0.33.0", 1, 1.0), {"gpu": 8}, "gpu must be the name of a GPU"),
        (lines("0.33.0", 1, 1.0), {"version": 8}, "version must be a version"),
        (lines("0.33.0", 1, 1.0), {"gpu": "A100"}, "unknown GPU"),
        (lines("0.33.0", 1, 1.0), {"version": "new"}, "no vLLM version"),
    ],
)
def test_wrong_input_is_one_sentence(text: Any, given: dict[str, Any], says: str) -> None:
    with pytest.raises(WorkbenchError) as raised:
        reconcile(text, BEAM, **given)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)
    if says in ("mpty", "None of the lines"):
        assert isinstance(raised.value, StartupLogError)


def test_an_unsized_cache_type_is_refused_by_name() -> None:
    text = lines("0.33.0", 1, 1.0).replace("model='m'", "model='m', kv_cache_dtype=nvfp4")
    with pytest.raises(WorkbenchError, match="'nvfp4' is not sized here"):
        reconcile(text, BEAM)
