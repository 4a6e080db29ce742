"""Start-up logs: recorded ones against what the engine's own objects held, and everything else a
person may paste."""

import json
import re
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.errors import WorkbenchError
from workbench.serving.engine_versions import NEWEST_READ, rules_for
from workbench.serving.startup_log import (
    CONCURRENCY_HALF_WIDTH,
    GIB_HALF_WIDTH,
    StartupLog,
    StartupLogError,
    parse_startup_log,
)

LOGS = Path(__file__).parents[1] / "data" / "startup_logs"
ENGINE_LOGS = sorted(path.stem for path in LOGS.glob("h200_*.txt"))
PLAIN = "h200_52_layers_bf16"
GIB = 2**30


def read_log(name: str) -> str:
    return (LOGS / f"{name}.txt").read_bytes().decode()


def recorded(name: str) -> dict:
    return json.loads((LOGS / f"{name}.json").read_text())


def figures(log: StartupLog) -> StartupLog:
    """The log without where it was read."""
    return replace(log, found=())


# --- recorded logs, against what was read from the engine's objects beside them


@pytest.mark.parametrize("name", ENGINE_LOGS)
def test_a_recorded_log_gives_what_the_engine_held(name: str) -> None:
    log, engine = parse_startup_log(read_log(name)), recorded(name)
    assert log.version == engine["versions"]["vllm"] == "0.33.0"
    assert log.device == "GPU"
    assert log.num_tokens == engine["num_tokens"]
    assert log.max_model_len == engine["max_model_len"]
    assert log.max_concurrency == round(engine["max_concurrency"], 2)
    assert log.kv_cache_dtype == engine["cache_dtype"]
    assert log.kv_cache_layout == "LBNHC"
    assert log.max_num_batched_tokens == engine["max_num_batched_tokens"]
    assert log.max_num_seqs == engine["max_num_seqs"]
    assert log.gpu_memory_utilization == engine["gpu_memory_utilization"]
    assert log.enforce_eager is engine["enforce_eager"]
    assert (log.tensor_parallel_size, log.pipeline_parallel_size) == (1, 1)
    assert (log.data_parallel_size, log.decode_context_parallel_size) == (1, 1)
    assert log.speculative is ("drafter_config" in engine)
    assert log.async_scheduling in (None, engine["async_scheduling"])
    if log.async_scheduling is None:
        assert log.rules.async_by_default is engine["async_scheduling"]
    batches = log.rules.in_flight_batches[engine["async_scheduling"]]
    assert batches * log.max_num_batched_tokens == engine["max_in_flight_tokens"]


@pytest.mark.parametrize("name", ENGINE_LOGS)
def test_memory_of_a_recorded_log_is_within_the_stated_rounding(name: str) -> None:
    log, engine = parse_startup_log(read_log(name)), recorded(name)
    assert log.available_kv_half_width == (0 if engine["enforce_eager"] else GIB_HALF_WIDTH)
    assert abs(log.available_kv_bytes - engine["available_kv_bytes"]) <= log.available_kv_half_width
    assert not log.available_is_configured
    loading = log.model_loading_bytes - engine["model_memory_usage"]
    assert abs(loading) <= log.model_loading_half_width == GIB_HALF_WIDTH
    for ours, theirs in (
        (log.memory.free_at_start, engine["init_free_memory"]),
        (log.memory.total, engine["total_memory"]),
        (log.memory.requested, engine["requested_memory"]),
        (log.memory.consumed, engine["total_consumed"]),
        (log.memory.peak_activation, engine["peak_activation_memory"]),
        (log.memory.cuda_graphs, engine.get("cuda_graph_bytes", 0)),
    ):
        assert abs(ours - theirs) <= GIB_HALF_WIDTH


@pytest.mark.parametrize("name", ENGINE_LOGS)
def test_the_exact_bytes_cut_into_the_engines_blocks(name: str) -> None:
    log, engine = parse_startup_log(read_log(name)), recorded(name)
    group = max(engine["groups"], key=lambda g: g["layers"])
    block = group["layers"] * group["page_size_bytes"]
    if log.num_gpu_blocks is not None:
        assert log.num_gpu_blocks == engine["num_blocks"]
        assert log.profiled_blocks == log.available_kv_bytes // block
    elif log.available_kv_half_width == 0:
        assert log.available_kv_bytes // block == engine["num_blocks"]
    if len(engine["groups"]) > 1:
        assert log.group_block_sizes == tuple(g["block_size"] for g in engine["groups"])
        assert log.block_size == engine["block_size"]
    # The pool's concurrency is blocks over the blocks of one request, as `rules` says.
    request = sum(-(-g["bytes_per_request"] // g["page_size_bytes"]) for g in engine["groups"])
    assert log.rules.concurrency == "blocks_over_request"
    assert abs(log.max_concurrency - engine["num_blocks"] / request) <= CONCURRENCY_HALF_WIDTH


def test_what_only_some_recorded_logs_say() -> None:
    assert parse_startup_log(read_log("h200_52_layers_bf16")).padding == ((2, 4.65),)
    assert parse_startup_log(read_log("h200_12_layers_bf16")).padding == ()
    assert parse_startup_log(read_log("h200_12_layers_hybrid_off")).hybrid_manager_off
    assert not parse_startup_log(read_log("h200_12_layers_bf16")).hybrid_manager_off
    override = parse_startup_log(read_log("h200_12_layers_override"))
    assert (override.num_gpu_blocks, override.profiled_blocks) == (40_000, 3_598_852)
    assert any("num_gpu_blocks_override" in caveat for caveat in override.caveats)
    assert parse_startup_log(read_log("h200_52_layers_128k_sync")).caveats == ()


def test_the_planner_on_a_cpu_names_its_device() -> None:
    log, planner = (
        parse_startup_log(read_log("cpu_planner_52_layers")),
        recorded("cpu_planner_52_layers"),
    )
    assert log.device == "CPU"
    assert (log.num_tokens, log.max_model_len) == (planner["num_tokens"], planner["max_model_len"])
    assert log.max_concurrency == round(planner["max_concurrency"], 2)
    assert log.available_kv_bytes is None
    assert log.version is None
    assert log.rules == rules_for(NEWEST_READ)
    assert any("names no version" in caveat for caveat in log.caveats)


# --- the same log, pasted differently


def with_windows_line_ends(text: str) -> str:
    return text.replace("\n", "\r\n")


def with_timestamps(text: str) -> str:
    return "".join(
        f"vllm-1  | 2026-11-29T19:11:17.{i:09d}Z stdout F {line}\n"
        for i, line in enumerate(text.split("\n"))
    )


def with_colour(text: str) -> str:
    coloured = "\x1b[0;36m\\1\x1b[0;0m \x1b[32m\\2\x1b[0m"
    return re.sub(r"(?m)^(\([^)]*\)|\S+) (\w+)", coloured, text)


def within_other_text(text: str) -> str:
    return f"Hello,\nthis is what it printed (8 GiB more than before!):\n\n{text}\n\nBest\n"


def with_indentation(text: str) -> str:
    return re.sub("(?m)^", "\t> ", text)


@pytest.mark.parametrize("name", ENGINE_LOGS)
@pytest.mark.parametrize(
    "change",
    [with_windows_line_ends, with_timestamps, with_colour, within_other_text, with_indentation],
)
def test_how_a_log_was_pasted_does_not_matter(name: str, change) -> None:
    text = read_log(name)
    assert change(text) != text
    assert figures(parse_startup_log(change(text))) == figures(parse_startup_log(text))


def test_a_coloured_log_reads_like_a_plain_one() -> None:
    text = read_log("h200_52_layers_fp8_coloured")
    assert "\x1b[" in text
    log = parse_startup_log(text)
    assert log.kv_cache_dtype == "fp8"
    assert not any("\x1b" in found.text for found in log.found)
    assert figures(log) == figures(parse_startup_log(re.sub(r"\x1b\[[\d;]*m", "", text)))


def test_a_log_pasted_twice_is_one_log() -> None:
    text = read_log(PLAIN)
    assert figures(parse_startup_log(text + text)) == figures(parse_startup_log(text))


def test_each_field_names_the_line_it_was_read_from() -> None:
    text = read_log(PLAIN)
    log, lines = parse_startup_log(text), text.split("\n")
    names = {field.name for field in fields(StartupLog)}
    assert {found.field for found in log.found} <= names
    for found in log.found:
        assert found.text == lines[found.line - 1].strip()[:2000]
    by_field = {found.field: found.text for found in log.found}
    assert "475,199" in by_field["num_tokens"]
    assert "58.01x" in by_field["max_concurrency"]
    assert "116.97 GiB" in by_field["model_loading_bytes"]
    assert "v0.33.0" in by_field["version"]
    assert any("12.26 GiB" in f.text for f in log.found if f.field == "available_kv_bytes")


# --- what the lines mean, release by release


@pytest.mark.parametrize(
    ("version", "tokens", "utilization", "in_flight", "async_on"),
    [
        ("0.8.5", "blocks_x_block_size", 0.9, (1, 1), False),
        ("0.9.0", "blocks_x_block_size", 0.9, (1, 1), False),
        ("0.9.1", "blocks_per_group", 0.9, (1, 1), False),
        ("0.11.2", "blocks_per_group", 0.9, (1, 1), False),
        ("0.13.0", "blocks_per_group", 0.9, (1, 1), False),
        ("0.14.0", "blocks_per_group", 0.9, (1, 1), True),
        ("0.19.1", "blocks_per_group", 0.9, (1, 1), True),
        ("0.20.0", "blocks_per_group", 0.92, (1, 1), True),
        ("0.20.1", "concurrency_x_length", 0.92, (1, 1), True),
        ("0.25.1", "concurrency_x_length", 0.92, (1, 1), True),
        ("0.26.0", "concurrency_x_length", 0.92, (1, 2), True),
        ("0.33.0", "concurrency_x_length", 0.92, (1, 2), True),
    ],
)
def test_rules_of_a_release(version, tokens, utilization, in_flight, async_on) -> None:
    text = (
        f"INFO 11-20 12:00:00 [core.py:58] Initializing a V1 LLM engine (v{version}) with config: "
        "model='m', max_seq_len=8192\n"
        "INFO 11-20 12:00:00 [kv_cache_utils.py:634] GPU KV cache size: 475,136 tokens\n"
        "INFO 11-20 12:00:00 [kv_cache_utils.py:637] Maximum concurrency for 8,192 tokens per "
        "request: 58.00x\n"
    )
    log = parse_startup_log(text)
    assert log.version == version
    assert log.meaning == log.rules.tokens == tokens
    assert log.rules.gpu_memory_utilization == utilization
    assert log.rules.in_flight_batches == in_flight
    assert log.rules.async_by_default is async_on
    assert log.explanation.endswith(".")
    assert (log.num_tokens, log.max_model_len, log.max_concurrency) == (475_136, 8192, 58.0)
    # Given by the caller instead of the log, the version says the same.
    silent = text.replace(f"(v{version})", "").replace("max_seq_len=8192", "")
    assert parse_startup_log(silent, version=version).rules == log.rules


def test_rules_of_profiling() -> None:
    assert not rules_for((0, 19, 1)).graphs_in_profile
    assert rules_for((0, 20, 0)).graphs_in_profile
    assert not rules_for((0, 28, 0)).null_block_in_check
    assert rules_for((0, 29, 0)).null_block_in_check


def two_line_log(tokens: int, concurrency: float, version: str | None = None) -> str:
    start = f"Initializing a V1 LLM engine (v{version}) with config: model='m'\n" if version else ""
    return (
        f"{start}INFO GPU KV cache size: {tokens:,} tokens\n"
        f"INFO Maximum concurrency for 8,192 tokens per request: {concurrency:.2f}x\n"
    )


def test_tokens_of_the_old_hybrid_rule() -> None:
    # 178,490 blocks in 6 groups of 16 tokens; 3,077 blocks a request.
    tokens, concurrency = 178_490 // 6 * 16, 178_490 / 3_077
    old = parse_startup_log(two_line_log(tokens, concurrency, "0.19.1"))
    assert old.meaning == "blocks_per_group"
    assert not any("not concurrency x max_model_len" in caveat for caveat in old.caveats)
    # The same figures cannot come from a newer release, and say so.
    new = parse_startup_log(two_line_log(tokens, concurrency, "0.33.0"))
    assert any("may be of different starts" in caveat for caveat in new.caveats)
    # Without a version the figures tell.
    unnamed = parse_startup_log(two_line_log(tokens, concurrency))
    assert unnamed.version is None
    assert unnamed.meaning == "blocks_per_group"
    assert parse_startup_log(two_line_log(475_199, 58.0078)).meaning == "concurrency_x_length"


@pytest.mark.parametrize(
    ("version", "words", "read_as"),
    [
        ("0.34.0", "newer than 0.33.0", (0, 33, 0)),
        ("1.2", "newer than 0.33.0", (0, 33, 0)),
        ("0.7.3", "older than 0.8.0", (0, 8, 0)),
        ("0.20.1rc2.dev5+gabcdef0", "between releases", (0, 20, 1)),
    ],
)
def test_an_unknown_release_is_read_by_the_nearest_rules_and_says_so(
    version, words, read_as
) -> None:
    log = parse_startup_log(two_line_log(475_136, 58.0, version))
    assert log.version == version
    assert log.rules == rules_for(read_as)
    assert any(words in caveat for caveat in log.caveats)


@pytest.mark.parametrize("version", ["0.33.0", "0.33.0+cu129", "v0.33.0", "0.19.1.post1"])
def test_a_released_build_needs_no_caveat_about_its_version(version) -> None:
    log = parse_startup_log(two_line_log(475_136, 58.0), version=version)
    assert not any("release" in c and "asynchronous" not in c for c in log.caveats)


# --- several workers, several engines, settings


def test_the_worker_with_the_least_memory_counts() -> None:
    text = two_line_log(475_136, 58.0, "0.33.0") + "".join(
        f"(Worker_TP{rank} pid={100 + rank}) INFO [gpu_worker.py:772] Available KV cache memory: "
        f"{gib} GiB\n(Worker_TP{rank} pid={100 + rank}) INFO Model loading took {load} GiB memory "
        "and 2.5 seconds\n"
        for rank, (gib, load) in enumerate([(12.26, 116.97), (11.9, 116.97), (12.3, 117.02)])
    )
    log = parse_startup_log(text)
    assert log.available_kv_bytes == round(11.9 * GIB)
    assert log.available_kv_half_width == GIB_HALF_WIDTH
    assert log.model_loading_bytes == round(117.02 * GIB)
    assert any("3 workers logged 11.9 to 12.3 GiB" in caveat for caveat in log.caveats)


def test_data_parallel_engines_give_the_smallest_ones_pair() -> None:
    text = "".join(
        f"(EngineCore_DP{rank} pid={200 + rank}) INFO Initializing a V1 LLM engine (v0.33.0) with "
        "config: model='m', data_parallel_size=2\n"
        f"(EngineCore_DP{rank} pid={200 + rank}) INFO GPU KV cache size: {tokens:,} tokens, "
        f"Maximum concurrency for 8,192 tokens per request: {tokens / 8192:.2f}x\n"
        for rank, tokens in enumerate([475_199, 460_000])
    )
    log = parse_startup_log(text)
    assert (log.num_tokens, log.max_concurrency) == (460_000, 56.15)
    assert log.data_parallel_size == 2
    assert any("data-parallel" in caveat for caveat in log.caveats)


def test_an_old_engine_logs_one_pair_a_worker() -> None:
    pairs = two_line_log(400_000, 48.83) + two_line_log(399_360, 48.75)
    log = parse_startup_log(pairs, version="0.10.2")
    assert (log.num_tokens, log.max_concurrency) == (399_360, 48.75)


def test_a_drafters_settings_are_not_the_targets() -> None:
    log = parse_startup_log(
        "INFO non-default args: {'model': \"it's, a {model}\", 'speculative_config': {'model': "
        "'d', 'max_model_len': 512, 'draft': [1, 2]}, 'max_model_len': 4096, 'block_size': 32}\n"
        "INFO Using max model len 4096\nINFO Using max model len 512\n"
        'INFO Initializing a V1 LLM engine (v0.33.0) with config: model="it\'s, a {model}", '
        "speculative_config=SpeculativeConfig(method='dflash', max_seq_len=512), max_seq_len=4096, "
        "tensor_parallel_size=8, kv_cache_dtype=fp8, enforce_eager=False\n"
        "INFO Available KV cache memory: 12.26 GiB\n"
    )
    assert (log.max_model_len, log.block_size, log.tensor_parallel_size) == (4096, 32, 8)
    assert (log.kv_cache_dtype, log.speculative) == ("fp8", True)


def test_memory_given_to_the_engine_is_exact() -> None:
    line = (
        "INFO Initial free memory 139.1 GiB, reserved 12.11 GiB memory for KV Cache as specified "
        "by kv_cache_memory_bytes config and skipped memory profiling.\n"
    )
    rounded = parse_startup_log(line, version="0.33.0")
    assert rounded.available_kv_bytes == round(12.11 * GIB)
    assert (rounded.available_kv_half_width, rounded.available_is_configured) == (
        GIB_HALF_WIDTH,
        True,
    )
    exact = parse_startup_log(
        "INFO non-default args: {'kv_cache_memory_bytes': 13002488832}\n" + line, version="0.33.0"
    )
    assert (exact.available_kv_bytes, exact.available_kv_half_width) == (13_002_488_832, 0)
    assert abs(rounded.available_kv_bytes - exact.available_kv_bytes) <= GIB_HALF_WIDTH


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("INFO Asynchronous scheduling is enabled.", True),
        ("INFO Asynchronous scheduling is disabled.", False),
        (
            "WARNING Async scheduling not supported with x-based decoding and will be disabled.",
            False,
        ),
        ("INFO non-default args: {'async_scheduling': True}", True),
    ],
)
def test_asynchronous_scheduling(line, expected) -> None:
    text = two_line_log(475_136, 58.0, "0.20.2") + line + "\n"
    assert parse_startup_log(text).async_scheduling is expected


def test_a_progress_bar_may_share_the_line() -> None:
    text = "Loading:  50%|###   |\rLoading: 100%|######|\rINFO Available KV cache memory: 3.5 GiB\n"
    assert parse_startup_log(text, version="0.33.0").available_kv_bytes == round(3.5 * GIB)


def test_advice_that_contradicts_the_memory_line_is_not_used() -> None:
    text = read_log(PLAIN).replace("--kv-cache-memory=13002488832", "--kv-cache-memory=9002488832")
    log = parse_startup_log(text)
    assert log.available_kv_half_width == GIB_HALF_WIDTH
    assert abs(log.available_kv_bytes - recorded(PLAIN)["available_kv_bytes"]) <= GIB_HALF_WIDTH


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        # CUDA graphs of a rounded size are part of the advice: no exact figure follows from it.
        (PLAIN, "0.0 GiB for CUDAGraph", "0.01 GiB for CUDAGraph"),
        # A size that rounds to nothing is not nothing, unless no graph was captured.
        (PLAIN, "enforce_eager=True", "enforce_eager=False"),
    ],
)
def test_advice_with_cuda_graphs_is_not_exact(name: str, before: str, after: str) -> None:
    text = read_log(name)
    assert before in text
    assert parse_startup_log(text.replace(before, after)).available_kv_half_width == GIB_HALF_WIDTH


def test_the_exact_bytes_are_those_of_the_worker_with_the_least() -> None:
    text, engine = read_log(PLAIN), recorded(PLAIN)
    more = text.replace("12.26 GiB", "12.72 GiB").replace("13002488832", "13502488832")
    lines = [line for line in more.split("\n") if "Free memory on" in line or "Available" in line]
    log = parse_startup_log("\n".join(lines) + "\n" + text)
    assert (log.available_kv_bytes, log.available_kv_half_width) == (
        engine["available_kv_bytes"],
        0,
    )
    # Where only the other worker gave advice, its bytes are not this worker's.
    alone = "\n".join(line for line in text.split("\n") if "Free memory on" not in line)
    log = parse_startup_log("\n".join(lines) + "\n" + alone)
    assert log.available_kv_bytes == round(12.26 * GIB)
    assert log.available_kv_half_width == GIB_HALF_WIDTH


def test_the_memory_line_of_026_counts_weights_and_the_rest_apart() -> None:
    log = parse_startup_log(
        "INFO Available KV cache memory: 12.26 GiB\n"
        "INFO Free memory on device (139.1/139.8 GiB) on startup. Desired GPU memory utilization "
        "is (0.95, 132.81 GiB). Actual usage is 116.97 GiB for weight, 0.94 GiB for peak "
        "activation, 2.64 GiB for non-torch memory, and 0.1 GiB for CUDAGraph memory. Replace\n",
        version="0.26.0",
    )
    assert log.memory.consumed == round(116.97 * GIB) + round(2.64 * GIB)
    assert log.memory.peak_activation == round(0.94 * GIB)
    assert log.memory.cuda_graphs == round(0.1 * GIB)
    assert log.gpu_memory_utilization == 0.95


def test_loading_had_four_decimals() -> None:
    text = two_line_log(475_136, 58.0, "0.12.0")
    log = parse_startup_log(text + "INFO Model loading took 14.2717 GiB memory and 3.1 seconds\n")
    assert log.model_loading_bytes == round(14.2717 * GIB)
    assert GIB / 20_000 <= log.model_loading_half_width < GIB / 19_999


def test_the_length_that_was_fitted_counts_not_the_one_asked_for() -> None:
    log = parse_startup_log(
        "INFO Using max model len 131072\n"
        "INFO Initializing a V1 LLM engine (v0.33.0) with config: model='m', max_seq_len=131072\n"
        "INFO GPU KV cache size: 475,199 tokens, Maximum concurrency for 8,192 tokens per request: "
        "58.01x\n"
    )
    assert log.max_model_len == 8192


# --- wrong input


WRONG = {
    "empty": ("", "is empty"),
    "blank": (" \r\n\t ", "is empty"),
    "another text": ("INFO engine started\n" * 20, "None of the lines"),
    "only settings": ("Initializing a V1 LLM engine (v0.33.0) with config: model='m'", "None of"),
    "no memory left": ("INFO Available KV cache memory: -3.2 GiB", "could not start"),
    "absurd memory": ("INFO Available KV cache memory: 99999999999 GiB", "more than any has"),
    "absurd tokens": (
        "INFO GPU KV cache size: 9,999,999,999,999,999,999,999 tokens",
        "cannot be",
    ),
    "absurd length": (
        "INFO Maximum concurrency for 9,999,999,999,999,999 tokens per request: 1.00x",
        "no engine can have",
    ),
    "two sizes": (two_line_log(475_136, 58.0) + two_line_log(475_152, 58.0), "disagree"),
    "two settings": (
        two_line_log(475_136, 58.0)
        + "INFO Chunked prefill is enabled with max_num_batched_tokens=2048.\n"
        + "INFO Chunked prefill is enabled with max_num_batched_tokens=8192.\n",
        "disagree about max_num_batched_tokens",
    ),
    "two versions": (
        two_line_log(475_136, 58.0, "0.33.0") + two_line_log(475_136, 58.0, "0.32.0"),
        "disagree about version",
    ),
    "two starts": (
        read_log(PLAIN) + read_log("h200_52_layers_cuda_graphs"),
        "two starts of an engine",
    ),
    "too many lines": ("Available KV cache memory: 1.0 GiB\n" * 3_000, "More than 2,000 lines"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_text_is_refused_with_a_sentence(case: str) -> None:
    text, words = WRONG[case]
    start = time.perf_counter()
    with pytest.raises(StartupLogError) as refused:
        parse_startup_log(text)
    assert time.perf_counter() - start < 1
    message = str(refused.value)
    assert isinstance(refused.value, WorkbenchError)
    assert words in message
    assert message.endswith(".")
    assert "\n" not in message
    assert len(message) < 300


@pytest.mark.parametrize(
    ("version", "words"),
    [("banana", "no vLLM version"), ("", "no vLLM version"), ("0.20.0", "not 0.20.0")],
)
def test_a_wrong_version_is_refused(version, words) -> None:
    with pytest.raises(StartupLogError, match=words):
        parse_startup_log(read_log(PLAIN), version=version)


@pytest.mark.parametrize(
    "hostile",
    [
        ("LLM engine (v0.33.0) with config: " + "a=1," * 4_000 + "\n") * 1_000,
        ("LLM engine (v0.33.0) with config: " + "('" * 8_000 + "\n") * 1_000,
        "Available KV cache memory: " + "\r1" * 8_000_000,
        "KV cache size: " + "(A " * 5_000_000,
        ("Async scheduling " * 1_000 + "\n") * 900,
        ("Desired GPU memory utilization " + "\x1b]" * 8_000 + "\n") * 900,
        "GPU KV cache size: " + "9" * 16_000_000,
        "\x1b[" * 8_000_000 + " num_gpu_blocks_override=",
    ],
    ids=[*("settings", "brackets", "returns", "prefixes", "repeats", "escapes"), "digits", "codes"],
)
def test_text_made_to_be_slow_is_not(hostile: str) -> None:
    start = time.perf_counter()
    read_or_refuse(hostile)
    assert time.perf_counter() - start < 1


def test_fifty_megabytes_are_refused_at_once() -> None:
    text = read_log(PLAIN) + "x" * 50_000_000
    start = time.perf_counter()
    with pytest.raises(StartupLogError, match=r"at most 16,777,216 are read; .*\.$"):
        parse_startup_log(text)
    assert time.perf_counter() - start < 0.1


def test_bytes_are_refused() -> None:
    with pytest.raises(StartupLogError, match="not bytes"):
        parse_startup_log(read_log(PLAIN).encode())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "noise",
    [
        "x" * 79 + "\n",
        "\n",
        "(EngineCore pid=957) INFO Avg prompt throughput: 0.0 tokens/s, GPU KV cache usage: 0.1%\n",
        "\r",
    ],
)
def test_the_largest_text_read_takes_less_than_a_second(noise: str) -> None:
    log = read_log(PLAIN)
    text = noise * ((2**24 - len(log) - 2) // len(noise)) + "\n" + log
    assert 15_000_000 < len(text) <= 2**24
    start = time.perf_counter()
    parsed = parse_startup_log(text)
    assert time.perf_counter() - start < 1
    assert figures(parsed) == figures(parse_startup_log(log))


def test_text_of_the_server_stays_text() -> None:
    nasty = "<script>alert(1)</script>\x00\x1b]0;title\x07\u202e\x9b"
    log = parse_startup_log(f"{nasty} GPU KV cache size: 16 tokens {nasty}\n", version="0.33.0")
    (line,) = {found.text for found in log.found if found.field == "num_tokens"}
    assert line.startswith("<script>alert(1)</script> GPU")
    assert line.isprintable()
    assert not any(name.startswith("_repr_") for name in dir(log))


def read_or_refuse(text: str) -> None:
    """Whatever the text: figures that can be, or one sentence."""
    try:
        log = parse_startup_log(text)
    except StartupLogError as refused:
        message = str(refused)
        if not message.endswith(".") or "\n" in message:
            raise AssertionError(f"no sentence: {message!r}") from refused
        return
    assert log.num_tokens is None or log.num_tokens >= 0
    assert log.available_kv_bytes is None or log.available_kv_bytes > 0
    assert all(caveat.endswith(".") for caveat in log.caveats)


@given(st.text(max_size=400))
def test_any_text_gives_figures_or_a_sentence(text: str) -> None:
    read_or_refuse(text)
    read_or_refuse(read_log(PLAIN)[:2000] + text)
    read_or_refuse(f"GPU KV cache size: {text} tokens")


@given(st.data())
def test_a_damaged_log_gives_figures_or_a_sentence(data: st.DataObject) -> None:
    text = read_log(PLAIN)
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 500)))
    read_or_refuse(text[:start] + data.draw(st.text(max_size=20)) + text[stop:])
