"""Sizing against vLLM 0.33.0's own accounting, as recorded from the engine's functions.

``tests/engine/README.md`` says how the figures were made and what each field is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from workbench.datasheet import sheet
from workbench.model.asked import SizingError
from workbench.model.kv_inverse import max_context
from workbench.model.kv_planner import KVLayer, KVPlan, admission_blocks, plan_groups
from workbench.model.layout import Layout
from workbench.model.plan import Plan, make_plan
from workbench.model.presets import beam_501b, beam_501b_dflash2
from workbench.model.serve_command import Speculation
from workbench.model.sizing import size_kv

HERE = Path(__file__).parent
RECORD = HERE / "data" / "engine_kv_figures.json"
OPTIONS = HERE / "data" / "engine_serve_options.json"
# A Python that has vLLM 0.33.0: this one, or the one named (make engine does).
ENGINE = os.environ.get("ENGINE_PYTHON") or (sys.executable if find_spec("vllm") else None)
needs_engine = pytest.mark.skipif(
    ENGINE is None, reason="vLLM is not installed; name a Python that has it in ENGINE_PYTHON"
)
WIDTH = {"auto": 2, "fp8": 1}


@cache
def record() -> dict[str, Any]:
    return json.loads(RECORD.read_text("utf-8"))


def rows(table: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def test_record_is_of_the_engine_we_speak_of() -> None:
    assert record()["versions"]["vllm"] == "0.33.0"
    assert len(record()["specs"]["rows"]) >= 400
    assert len(record()["planner"]["plans"]) >= 100


def test_layers_cost_what_the_engine_says() -> None:
    """One full and one sliding layer over lengths, batches, windows, blocks, dtypes and ranks."""
    token = 2 * record()["specs"]["head_dim"]
    heads = record()["specs"]["kv_heads"]
    for row in rows(record()["specs"]):
        ranks, block = row["tensor_parallel_size"], row["block_size"]
        page = max(1, heads // ranks) * token * WIDTH[row["kv_cache_dtype"]] * block
        assert page == row["full_page_size_bytes"] == row["sliding_page_size_bytes"]
        batches = 2 if row["async_scheduling"] else 1
        in_flight = row["max_num_batched_tokens"] * batches
        assert in_flight == row["max_in_flight_tokens"]
        length = row["max_model_len"]
        full = admission_blocks(None, block, length, in_flight) * page
        assert full == row["full_max_memory_usage_bytes"], row
        sliding = admission_blocks(row["window"], block, length, in_flight)
        assert sliding == row["sliding_max_admission_blocks_per_request"], row
        assert sliding * page == row["sliding_max_memory_usage_bytes"], row


def test_sizing_gives_the_engine_s_bytes_for_the_full_model() -> None:
    """The public function on the same grid, where the window is Beam's."""
    seen = 0
    for row in rows(record()["specs"]):
        if row["window"] != 512:
            continue
        seen += 1
        sizing = size_kv(
            beam_501b().config,
            context=row["max_model_len"],
            batched_tokens=row["max_num_batched_tokens"],
            async_scheduling=bool(row["async_scheduling"]),
            block_size=row["block_size"],
            kv_dtype="bf16" if row["kv_cache_dtype"] == "auto" else "fp8",
            tp=row["tensor_parallel_size"],
        )
        by_kind = {layer.attention: layer.admission_bytes for layer in sizing.per_layer}
        assert by_kind["full_attention"] == row["full_max_memory_usage_bytes"]
        assert by_kind["sliding_attention"] == row["sliding_max_memory_usage_bytes"]
        assert sizing.per_gpu("admission").full == 9 * row["full_max_memory_usage_bytes"]
        assert sizing.per_gpu("admission").sliding == 43 * row["sliding_max_memory_usage_bytes"]
    assert seen >= 50


def layers_of(plan: dict[str, Any]) -> tuple[KVLayer, ...]:
    found: list[KVLayer] = []
    for part in (plan["target"], plan["draft"]):
        if part is None:
            continue
        heads = max(1, part["kv_heads"] // part["tp"])
        token = 2 * heads * part["head_dim"] * WIDTH[plan["kv_cache_dtype"]]
        found += [
            KVLayer(
                index=len(found),
                window=None if layer in part["full"] else part["window"],
                token_bytes=token,
                drafter=part is plan["draft"],
            )
            for layer in range(part["layers"])
        ]
    return tuple(found)


def default_layouts() -> list[dict[str, Any]]:
    return [p for p in record()["planner"]["plans"] if not p["layout"].startswith("B")]


def title(plan: dict[str, Any]) -> str:
    target, draft = plan["target"], plan["draft"]
    words = [plan["name"], f"{target['layers']}x{target['window']} tp{target['tp']}"]
    words += [f"draft {draft['layers']}x{draft['window']} tp{draft['tp']}"] if draft else []
    words += [plan["kv_cache_dtype"], str(plan["block_size"]), plan["layout"]]
    return " ".join([*words, "off"] if plan["manager_off"] else words)


@pytest.mark.parametrize("recorded", default_layouts(), ids=title)
def test_planner_groups_and_counts_as_the_engine(recorded: dict[str, Any]) -> None:
    layers = layers_of(recorded)

    def make() -> KVPlan:
        return plan_groups(layers, recorded["block_size"], hybrid=not recorded["manager_off"])

    if "error" in recorded:
        with pytest.raises(SizingError):
            make()
        return
    plan = make()
    grouping = record()["planner"]["groupings"][recorded["grouping"]]
    assert [list(g.layers) for g in plan.groups] == [layers for _, _, _, layers in grouping]
    kinds = ["full_attention" if g.window is None else "sliding_window" for g in plan.groups]
    assert kinds == [kind for _, kind, _, _ in grouping]
    sizes = recorded["group_block_size"]
    sizes = sizes if isinstance(sizes, list) else [sizes] * len(plan.groups)
    assert [g.block_size for g in plan.groups] == sizes
    assert plan.block_bytes == recorded["bytes_per_block"]
    for number, values in enumerate(recorded["runs"]):
        run = dict(zip(record()["planner"]["run_columns"], values, strict=True))
        length, in_flight = run["max_model_len"], run["max_in_flight_tokens"]
        assert plan.bytes_per_sequence(length, in_flight) == run["max_memory_usage_bytes"]
        needed = plan.bytes_per_sequence(length, in_flight) + plan.block_bytes
        refused = str(number) in recorded["run_errors"]
        assert refused == (needed > run["available_memory"])
        longest = run["max_model_len_that_fits"]
        most = run["available_memory"] - plan.block_bytes
        if longest:
            assert plan.bytes_per_sequence(longest, in_flight) <= most
        if longest < 1048576:
            assert plan.bytes_per_sequence(longest + 1, in_flight) > most
        if refused:
            continue
        blocks = run["available_memory"] // plan.block_bytes
        assert blocks == run["num_blocks"]
        concurrency = blocks / plan.blocks_per_sequence(length, in_flight)
        assert concurrency == run["max_concurrency"]
        assert int(concurrency * length) == run["logged_tokens"]


def test_longest_context_is_the_engine_s_for_the_full_model() -> None:
    checked = 0
    for recorded in default_layouts():
        if recorded["name"] != "beam" or recorded["manager_off"]:
            continue
        drafter = beam_501b_dflash2().config if recorded["draft"] else None
        if recorded["draft"] and recorded["draft"]["tp"] != recorded["target"]["tp"]:
            continue
        for values in recorded["runs"]:
            run = dict(zip(record()["planner"]["run_columns"], values, strict=True))
            checked += 1
            assert run["max_model_len_that_fits"] == max_context(
                beam_501b().config,
                run["available_memory"],
                kv_dtype="bf16" if recorded["kv_cache_dtype"] == "auto" else "fp8",
                tp=recorded["target"]["tp"],
                block_size=recorded["block_size"],
                batched_tokens=run["max_num_batched_tokens"],
                async_scheduling=bool(run["async_scheduling"]),
                drafter=drafter,
            )
    assert checked >= 20


# -- the engine itself, where it is ---------------------------------------------------------------


@needs_engine
def test_engine_still_gives_what_was_recorded(tmp_path: Path) -> None:
    """Everything above compares with the record; this compares the record with the engine."""
    again = tmp_path / "again.json"
    recorder = HERE / "engine" / "record_kv_figures.py"
    subprocess.run([str(ENGINE), str(recorder), "--output", str(again)], check=True, timeout=600)
    found = json.loads(again.read_text("utf-8"))
    assert found["versions"]["vllm"] == record()["versions"]["vllm"]
    for part in ("layouts", "specs", "planner"):
        assert found[part] == record()[part]


def plans() -> list[Plan]:
    """Plans whose commands use every option we ever write."""
    asked: list[dict[str, Any]] = [
        {"layout": Layout(tp=4)},
        {"layout": Layout(dp=4, expert_parallel=True), "kv_dtype": "bf16", "drafter": None},
        {"layout": Layout(tp=8), "async_scheduling": False, "checkpoint": "some/beam"},
        {"layout": Layout(tp=8), "speculation": Speculation(drafter="a/b", adaptive=False)},
        {"layout": Layout(tp=8), "speculation": None, "drafter": None, "block_size": 64},
    ]
    common: dict[str, Any] = {
        "weights": "nvfp4",
        "context": 8192,
        "drafter": beam_501b_dflash2().config,
        "speculation": Speculation(),
    }
    gpu = sheet("GB200")
    return [make_plan(beam_501b().config, gpu, **(common | more)) for more in asked]


@needs_engine
def test_engine_s_parser_takes_our_commands() -> None:
    commands = "\n".join(json.dumps(plan.arguments) for plan in plans())
    checker = HERE / "engine" / "check_serve_command.py"
    result = subprocess.run(
        [str(ENGINE), str(checker)],
        input=commands, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    reports = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(reports) == len(plans()), result.stderr
    assert all(report["accepted"] for report in reports), reports
    assert reports[0]["parsed"]["tensor_parallel_size"] == 4
    assert reports[1]["parsed"]["enable_expert_parallel"] is True
    assert reports[2]["parsed"]["async_scheduling"] is False
    assert reports[0]["speculative"]["enable_adaptive_verification"] is True


def test_every_option_we_write_is_one_of_the_engine_s() -> None:
    known = set(json.loads(OPTIONS.read_text("utf-8")))
    written = {word for plan in plans() for word in plan.arguments if word.startswith("--")}
    assert len(written) >= 14
    assert written <= known
