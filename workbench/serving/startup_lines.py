"""The lines of a vLLM start-up log that say something about memory, found and read one by one.

Pure text in, ``Hit`` out; nothing is decided here about what belongs together. The text comes from
a server and is treated as such: bounded in size, stripped of escape sequences, never interpreted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from workbench.errors import WorkbenchError

MAX_TEXT = 16 * 2**20  # characters; a start-up log is some ten thousand
MAX_LINES = 2_000  # lines about memory; the largest clusters log some hundred
MAX_LINE = 8_192  # characters read of one line; the engine's configuration takes 4,000
MAX_READ = 2**19  # characters read of all those lines together

GIB = 2**30


class StartupLogError(WorkbenchError):
    """A text that cannot be read as the start-up log of one vLLM engine."""


class Hit(NamedTuple):
    """One figure in the log: ``source`` ranks its kind of line (lower is more trustworthy)."""

    field: str
    value: str
    source: int
    line: int
    process: tuple[str, str] | None
    text: str


_GIB = r"(-?\d{1,12}(?:\.\d{1,9})?)\s*GiB"
_COUNT = r"(\d[\d,]{0,39})"


# Literal text that every such line contains, what to read in it, and the fields of the groups.
# Order matters: where two kinds of line state one field, the earlier is believed.
_PATTERNS: tuple[tuple[str, re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (literal, re.compile(pattern), tuple(fields.split()))
    for literal, pattern, fields in (
        ("LLM engine (v", r"LLM engine \(v([\w.+-]{1,64})\)", "version"),
        ("API server version", r"vLLM API server version v?([\w.+-]{1,64})", "version"),
        ("KV cache memory:", rf"Available KV cache memory:\s*{_GIB}", "available"),
        ("memory for KV Cache", rf"reserved {_GIB} memory for KV Cache", "configured"),
        ("GiB for KV cache", r"(?:Auto|Explicitly) set \((\d[\d.]{0,12})/", "available"),
        (
            "KV cache size:",
            rf"\b([A-Z][A-Za-z0-9]{{1,15}}(?: \+ host)?) KV cache size:\s*{_COUNT} tokens",
            "device num_tokens",
        ),
        (
            "Maximum concurrency for",
            rf"Maximum concurrency for {_COUNT} tokens per request:\s*(\d{{1,12}}(?:\.\d+)?)x",
            "max_model_len max_concurrency",
        ),
        (
            "num_gpu_blocks_override=",
            r"Overriding num_gpu_blocks=(\d{1,18}) with num_gpu_blocks_override=(\d{1,18})",
            "profiled_blocks num_gpu_blocks",
        ),
        ("GPU blocks:", rf"# GPU blocks: {_COUNT}", "num_gpu_blocks"),
        ("cache group sizes", r"kv cache group sizes \(([\d, ]{1,4096})\)", "group_block_sizes"),
        (
            "padding layers",
            r"Add (\d{1,6} padding layers, may waste at most [\d.]{1,12}%)",
            "padding",
        ),
        ("Model loading took", r"Model loading took (\d{1,9}(?:\.\d+)?) Gi?B", "model_loading"),
        (
            "Chunked prefill is enabled",
            rf"Chunked prefill is enabled with max_num_batched_tokens={_COUNT}",
            "max_num_batched_tokens",
        ),
        (
            "synchronous scheduling",
            r"synchronous scheduling is (enabled|disabled)",
            "async_scheduling",
        ),
        (
            "sync scheduling",
            r"\bAsync scheduling\b.{0,200}?\b(?:is|will be) (disabled)",
            "async_scheduling",
        ),
        (
            "Desired GPU memory utilization",
            rf"on device \(([\d.]{{1,15}})/{_GIB}\) on startup\. Desired GPU memory utilization is "
            rf"\((\d[\d.]{{0,20}}), {_GIB}\)",
            "free_at_start total gpu_memory_utilization requested",
        ),
        (
            "Hybrid KV cache manager is disabled",
            r"(Hybrid KV cache manager is disabled)",
            "hybrid_off",
        ),
        ("data type to store kv cache", r"Using (\w{1,40}) data type to store", "kv_cache_dtype"),
        ("KV cache layout", r"Using ([A-Z]{1,8}) KV cache layout", "kv_cache_layout"),
        ("Using max model len", rf"Using max model len {_COUNT}", "first_max_model_len"),
    )
)
_USAGE = re.compile(
    rf"Actual usage is {_GIB} for (?:weight|consumed memory)[^,]{{0,40}}, {_GIB} for peak "
    rf"activation,(?: {_GIB} for non-torch memory,)? and {_GIB} for CUDAGraph memory"
)
_HINT = re.compile(r"--kv-cache-memory=(-?\d{1,18})`[^`]{0,40}to fit into requested memory")
_IN_USE = re.compile(rf"Current kv cache memory in use is {_GIB}")
_CONFIG = (("LLM engine (v", "config: "), ("non-default args:", "non-default args: "))
_CONFIG_FIELDS = {"max_seq_len": "max_model_len", "speculative_config": "speculative"} | {
    name: name
    for name in (
        *("max_model_len", "max_num_batched_tokens", "max_num_seqs", "block_size"),
        *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
        *("decode_context_parallel_size", "kv_cache_dtype", "kv_cache_memory_bytes"),
        *("gpu_memory_utilization", "enforce_eager", "async_scheduling"),
        "disable_hybrid_kv_cache_manager",
    )
}
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_PROCESS = re.compile(r"\(([A-Za-z][\w-]{0,60}(?: [\w=-]{1,40}){0,4}) pid=(\d{1,12})\)")
_SPECIAL = re.compile(r"""['"()\[\]{},]""")


def scan(text: str) -> Iterator[Hit]:
    """Every figure of the log, in the order of its lines.

    Raises StartupLogError when the text is no string, empty, larger than ``MAX_TEXT`` characters,
    or has more than ``MAX_LINES`` lines (``MAX_READ`` characters) about memory.
    """
    if not isinstance(text, str):
        raise StartupLogError(f"A start-up log is read from text (str), not {type(text).__name__}.")
    if len(text) > MAX_TEXT:
        raise StartupLogError(
            f"The text has {len(text):,} characters and at most {MAX_TEXT:,} are read; give the "
            "part from the engine's start to its first request."
        )
    if not text.strip():
        raise StartupLogError("The start-up log is empty; paste what vLLM printed when it started.")
    for number, line in _lines_of_interest(text):
        yield from _read(number, line)


def _lines_of_interest(text: str) -> Iterator[tuple[int, str]]:
    """``(line number, line)`` of lines with one of the literals, without splitting all the text.

    A progress bar rewrites its line with carriage returns; what stands between two of them is
    read by itself, under the number of the line they share.
    """
    if "\n" not in text:
        text = text.replace("\r", "\n")
    parts = text.replace("\r", "\n")  # as long as the text: positions are the same in both
    starts: set[int] = set()
    for literal in {pattern[0] for pattern in _PATTERNS} | {config[0] for config in _CONFIG}:
        at = parts.find(literal)
        while at >= 0:
            starts.add(parts.rfind("\n", 0, at) + 1)
            if len(starts) > MAX_LINES:
                raise StartupLogError(
                    f"More than {MAX_LINES:,} lines are about KV cache or memory; give the log of "
                    "one engine's start."
                )
            end = parts.find("\n", at)
            at = parts.find(literal, end) if end >= 0 else -1
    number, counted, read = 1, 0, 0
    for start in sorted(starts):
        number += text.count("\n", counted, start)
        counted = start
        end = parts.find("\n", start)
        line = parts[start : end if end >= 0 else len(parts)][:MAX_LINE]
        read += len(line)
        if read > MAX_READ:
            raise StartupLogError(
                f"The lines about KV cache or memory have more than {MAX_READ:,} characters; give "
                "the log of one engine's start."
            )
        yield number, line


def _read(number: int, line: str) -> Iterator[Hit]:
    shown = _CONTROL.sub("", _ANSI.sub("", line)).strip()
    found = _PROCESS.search(shown)
    process = (found.group(1), found.group(2)) if found else None
    for source, (literal, pattern, fields) in enumerate(_PATTERNS):
        match = pattern.search(shown) if literal in shown else None
        if match:
            for field, value in zip(fields, match.groups(), strict=True):
                yield Hit(field, value, source, number, process, shown)
    if "Desired GPU memory utilization" in shown:
        yield from _memory(number, process, shown)
    for source, (literal, before) in enumerate(_CONFIG, start=len(_PATTERNS)):
        if literal in shown and before in shown:
            config = shown[shown.index(before) + len(before) :]
            for key, value in _items(config):
                if key in _CONFIG_FIELDS:
                    yield Hit(_CONFIG_FIELDS[key], value, source, number, process, shown)


def _memory(number: int, process: tuple[str, str] | None, shown: str) -> Iterator[Hit]:
    """What the line about free and desired memory says of its use (INFO since 0.26)."""
    usage, hint, in_use = _USAGE.search(shown), _HINT.search(shown), _IN_USE.search(shown)
    if usage:
        for field, value in zip(
            ("consumed", "peak_activation", "non_torch", "cuda_graphs"), usage.groups(), strict=True
        ):
            if value is not None:
                yield Hit(field, value, 0, number, process, shown)
    if usage and hint and in_use:
        value = f"{hint.group(1)} {usage.group(4)} {in_use.group(1)}"
        yield Hit("exact_hint", value, 0, number, process, shown)


def _items(config: str) -> Iterator[tuple[str, str]]:
    """Top-level ``key=value`` or ``'key': value`` pairs of a printed configuration; what is inside
    brackets (a drafter's own configuration) is left alone."""
    config = config.strip()
    separator = "="
    if config.startswith("{"):
        config, separator = config[1:], ":"
    depth, quote, start = 0, "", 0
    for match in _SPECIAL.finditer(config + ","):
        char = match.group()
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        if (char == "," and not quote and depth == 0) or depth < 0:
            key, _, value = config[start : match.start()].partition(separator)
            yield key.strip().strip("'\""), value.strip().strip("'\"")
            start = match.end()
        if depth < 0:
            return
