"""What a vLLM engine said about its KV cache when it started, read from its log.

``parse_startup_log`` turns pasted text into figures with their precision and their meaning in that
release, and keeps the line that each came from. It predicts nothing. Every string in the result is
text of a server: escape it before it becomes HTML.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from workbench.serving.engine_versions import (
    NEWEST_READ,
    OLDEST_READ,
    TOKEN_MEANINGS,
    TokenMeaning,
    VersionRules,
    parse_release,
    rules_for,
)
from workbench.serving.startup_fields import (
    MAX_COUNT,
    FieldReader,
    Found,
    flag,
    fraction,
    number,
    padding,
    sizes,
    word,
)
from workbench.serving.startup_lines import GIB, Hit, StartupLogError, scan

__all__ = ["Found", "MemoryAtStart", "StartupLog", "StartupLogError", "parse_startup_log"]

GIB_HALF_WIDTH = -(-GIB // 200)  # the log rounds GiB to two decimals: +- 0.005 GiB, rounded up
CONCURRENCY_HALF_WIDTH = 0.005  # and the concurrency too
_HINT_BUFFER = 150 * 2**20  # what the engine leaves free in its own --kv-cache-memory advice


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAtStart:
    """One GPU's memory as its worker summed it up; bytes, each +- ``GIB_HALF_WIDTH``.

    ``consumed`` is weights with everything held outside the KV cache, ``peak_activation`` what
    profiling needed on top (with the CUDA graph estimate where the release takes it off), and
    ``cuda_graphs`` what capturing took in fact. None where the log is silent.
    """

    free_at_start: int
    total: int
    requested: int
    consumed: int | None
    peak_activation: int | None
    cuda_graphs: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupLog:
    """A start-up log's figures; None is "the log does not say".

    Attributes:
        version: vLLM's version, from the log or the caller.
        rules: how that release counts.
        meaning: what ``num_tokens`` counts, ``explanation`` in a sentence.
        device: the name before "KV cache size" ("GPU", "CPU", "GPU + host").
        available_kv_bytes: memory for the KV cache on one GPU, of the worker with the least.
        available_kv_half_width: bytes it may be off by rounding; 0 where the exact figure could be
            worked out from the engine's own --kv-cache-memory advice or was given to the engine.
        available_is_configured: it was given to the engine rather than profiled.
        num_tokens: the N of "KV cache size: N tokens".
        max_concurrency: rounded to two decimals by the log.
        num_gpu_blocks: blocks of the pool, where they were overridden or stated.
        profiled_blocks: blocks that would have fitted, where they were overridden.
        group_block_sizes: the block size of each KV group (0.30 and later); their number is the
            number of groups.
        padding: (padding layers, at most wasted percent of a layer kind), one entry a kind.
        model_loading_bytes: GPU memory that loading took, of the worker with the most, +-
            ``model_loading_half_width``.
        async_scheduling: as stated; releases from 0.27 on state it only when it is set by hand.
        speculative: a drafter or another speculative method is configured.
        hybrid_manager_off: every layer is kept at full length.
        caveats: sentences to show beside the figures.
        found: the line behind each field.
    """

    version: str | None
    rules: VersionRules
    meaning: TokenMeaning
    explanation: str
    device: str | None
    available_kv_bytes: int | None
    available_kv_half_width: int
    available_is_configured: bool
    num_tokens: int | None
    max_model_len: int | None
    max_concurrency: float | None
    tensor_parallel_size: int | None
    pipeline_parallel_size: int | None
    data_parallel_size: int | None
    decode_context_parallel_size: int | None
    kv_cache_dtype: str | None
    kv_cache_layout: str | None
    block_size: int | None
    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    async_scheduling: bool | None
    gpu_memory_utilization: float | None
    enforce_eager: bool | None
    speculative: bool | None
    hybrid_manager_off: bool
    num_gpu_blocks: int | None
    profiled_blocks: int | None
    group_block_sizes: tuple[int, ...] | None
    padding: tuple[tuple[int, float], ...]
    model_loading_bytes: int | None
    model_loading_half_width: int
    memory: MemoryAtStart | None
    caveats: tuple[str, ...]
    found: tuple[Found, ...]


def parse_startup_log(text: str, *, version: str | None = None) -> StartupLog:
    """The figures of one vLLM engine's start, from the text it logged.

    ``version`` names the release where the log's part at hand does not ("Initializing a V1 LLM
    engine (v...)"). The text may have timestamps, process prefixes, colours, Windows line ends,
    several workers and other lines in between.

    Raises StartupLogError, one sentence: text that is empty, too large or without any of the
    lines; figures that contradict each other or cannot be; a version that is none, or not the one
    the log states.
    """
    reader = FieldReader(list(scan(text)))
    if not any(
        reader.hits(f) for f in ("available", "configured", "num_tokens", "max_concurrency")
    ):
        raise StartupLogError(
            'None of the lines "Available KV cache memory", "KV cache size" and "Maximum '
            'concurrency" is in the text; paste the log of a vLLM engine from its start.'
        )
    reader.reject_second_start()
    name, release = _version(reader, version)
    engine = _engine(reader, release)
    rules = _rules(reader, engine, name, release)
    available, half_width, configured = _available(reader)
    loading, loading_half_width = _model_loading(reader)
    blocks = reader.count("num_gpu_blocks", differing=min)
    groups = reader.one("group_block_sizes", sizes)
    if (blocks is not None) and reader.hits("profiled_blocks"):
        reader.caveats.append(
            f"num_gpu_blocks_override sets the pool to {blocks:,} blocks, so it was not cut from "
            "the available memory."
        )
    hybrid_off = reader.one("disable_hybrid_kv_cache_manager", flag) is True
    for hit in reader.hits("hybrid_off"):
        hybrid_off = True
        reader.note("hybrid_manager_off", hit)
    for hit in reader.hits("padding"):
        reader.note("padding", hit)
    asynchronous = reader.one("async_scheduling", flag)
    if asynchronous is None and release is not None:
        state = "on" if rules.async_by_default else "off"
        reader.caveats.append(
            "The log does not say whether asynchronous scheduling is on; in this release it is "
            f"{state} unless something sets it otherwise."
        )
    return StartupLog(
        version=name,
        rules=rules,
        meaning=rules.tokens,
        explanation=TOKEN_MEANINGS[rules.tokens],
        device=engine.device,
        available_kv_bytes=available,
        available_kv_half_width=half_width,
        available_is_configured=configured,
        num_tokens=engine.num_tokens,
        max_model_len=reader.count("max_model_len")
        # Of several (a drafter has its own), the target's comes first.
        or reader.count("first_max_model_len", differing=lambda lengths: next(iter(lengths))),
        max_concurrency=engine.max_concurrency,
        tensor_parallel_size=reader.count("tensor_parallel_size"),
        pipeline_parallel_size=reader.count("pipeline_parallel_size"),
        data_parallel_size=reader.count("data_parallel_size"),
        decode_context_parallel_size=reader.count("decode_context_parallel_size"),
        kv_cache_dtype=reader.one("kv_cache_dtype", word),
        kv_cache_layout=reader.one("kv_cache_layout", word),
        block_size=min(groups) if groups else reader.count("block_size"),
        max_num_batched_tokens=reader.count("max_num_batched_tokens"),
        max_num_seqs=reader.count("max_num_seqs"),
        async_scheduling=asynchronous,
        gpu_memory_utilization=reader.one("gpu_memory_utilization", fraction),
        enforce_eager=reader.one("enforce_eager", flag),
        speculative=reader.one("speculative", lambda value: value != "None"),
        hybrid_manager_off=hybrid_off,
        num_gpu_blocks=blocks,
        profiled_blocks=reader.count("profiled_blocks", differing=min),
        group_block_sizes=groups,
        padding=tuple(dict.fromkeys(padding(hit.value) for hit in reader.hits("padding"))),
        model_loading_bytes=loading,
        model_loading_half_width=loading_half_width,
        memory=_memory(reader),
        caveats=tuple(reader.caveats),
        found=tuple(sorted(set(reader.found), key=lambda found: (found.line, found.field))),
    )


class _Engine(NamedTuple):
    device: str | None
    num_tokens: int | None
    max_concurrency: float | None


def _version(
    reader: FieldReader, given: str | None
) -> tuple[str | None, tuple[int, int, int] | None]:
    logged = reader.one("version", word)
    if given is not None and parse_release(given) is None:
        raise StartupLogError(f'"{given[:40]}" is no vLLM version; write it like "0.33.0".')
    stated = parse_release(logged) if logged else None
    if stated and given is not None and (parse_release(given) or stated)[0] != stated[0]:
        raise StartupLogError(
            f"The log is of vLLM {logged}, not {given}; leave the version out to use the log's."
        )
    name = logged if stated else given
    if name is None:
        return None, None
    release, final = parse_release(name) or (NEWEST_READ, False)
    if not final:
        reader.caveats.append(
            f"vLLM {name} is a build between releases; it is read by the rules of "
            f"{'.'.join(map(str, release))}, which it may not follow yet."
        )
    for beyond, bound, side in (
        (release > NEWEST_READ, NEWEST_READ, "newer"),
        (release < OLDEST_READ, OLDEST_READ, "older"),
    ):
        if beyond:
            nearest = ".".join(map(str, bound))
            reader.caveats.append(
                f"vLLM {name} is {side} than {nearest}, the last release whose rules are known "
                "here; those are used."
            )
    return name, release


def _engine(reader: FieldReader, release: tuple[int, int, int] | None) -> _Engine:
    """Tokens and concurrency of the engine with the fewest, each engine's own pair together."""
    pairs: dict[tuple[str, str] | None, dict[str, list[Hit]]] = {}
    for field in ("num_tokens", "max_concurrency", "device"):
        for hit in reader.hits(field):
            pairs.setdefault(hit.process, {}).setdefault(field, []).append(hit)
    # Up to 0.20.0 an engine logged the pair once for each of its workers.
    per_worker = release is not None and release < (0, 20, 1)
    best: dict[str, Hit] = {}
    values: dict[str, set[float]] = {"num_tokens": set(), "max_concurrency": set()}
    for fields in pairs.values():
        chosen: dict[str, Hit] = {}
        for field, seen in values.items():
            hits = sorted(fields.get(field, []), key=lambda hit: number(hit.value))
            if hits and not per_worker and number(hits[0].value) != number(hits[-1].value):
                raise StartupLogError(
                    f"Line {hits[0].line} and line {hits[-1].line} of one engine disagree about "
                    f"{field} ({hits[0].value} and {hits[-1].value}); give the log of one start."
                )
            seen.update(number(hit.value) for hit in hits)
            if hits:
                chosen[field] = hits[0]
        if fields.get("device"):
            chosen["device"] = fields["device"][0]
        if not best or _rank(chosen) < _rank(best):
            best = chosen
    if any(len(seen) > 1 for seen in values.values()):
        reader.caveats.append(
            "Several workers or data-parallel engines logged different KV cache sizes; the "
            "smallest is given."
        )
    for field, hit in best.items():
        reader.note(field, hit)
        if field != "device" and number(hit.value) > MAX_COUNT:
            raise StartupLogError(f"Line {hit.line} says {field} = {hit.value}, which cannot be.")
    tokens, concurrency = best.get("num_tokens"), best.get("max_concurrency")
    return _Engine(
        device=best["device"].value if "device" in best else None,
        num_tokens=int(number(tokens.value)) if tokens else None,
        max_concurrency=number(concurrency.value) if concurrency else None,
    )


def _rank(chosen: dict[str, Hit]) -> tuple[float, float]:
    """Orders engines by what they can hold; one that did not say comes last."""
    tokens, concurrency = chosen.get("num_tokens"), chosen.get("max_concurrency")
    return (
        number(tokens.value) if tokens else float("inf"),
        number(concurrency.value) if concurrency else float("inf"),
    )


def _rules(
    reader: FieldReader,
    engine: _Engine,
    name: str | None,
    release: tuple[int, int, int] | None,
) -> VersionRules:
    """The release's rules, held against the figures themselves."""
    length = reader.count("max_model_len")
    product_fits = None
    if engine.num_tokens is not None and engine.max_concurrency is not None and length:
        product = engine.max_concurrency * length
        product_fits = abs(engine.num_tokens - product) <= CONCURRENCY_HALF_WIDTH * length + 2
    if release is not None:
        rules = rules_for(release)
        if rules.tokens == "concurrency_x_length" and product_fits is False:
            reader.caveats.append(
                "The tokens are not concurrency x max_model_len as this release computes them: "
                "the lines may be of different starts."
            )
        return rules
    if product_fits is False:
        reader.caveats.append(
            "The log names no version; tokens that are not concurrency x max_model_len are what "
            "0.9.1 to 0.20.0 logged for a model with sliding layers."
        )
        return rules_for((0, 20, 0))
    reader.caveats.append(
        "The log names no version; the newest rules are used, under which tokens are concurrency x "
        "max_model_len."
    )
    return rules_for(NEWEST_READ)


def _available(reader: FieldReader) -> tuple[int | None, int, bool]:
    """Bytes for the KV cache, their half-width, and whether they were configured."""
    exact = reader.count("kv_cache_memory_bytes")
    if exact is not None:
        return exact, 0, True
    configured = reader.gibs("configured")
    values = configured or reader.gibs("available")
    if not values:
        return None, 0, False
    field = "configured" if configured else "available"
    least = min(values)
    hit = reader.hits(field)[values.index(least)]
    if least <= 0:
        raise StartupLogError(
            f"Line {hit.line} says that {hit.value} GiB were left for the KV cache, so the engine "
            "could not start; there is nothing to compare."
        )
    reader.note("available_kv_bytes", hit)
    if len(set(values)) > 1:
        reader.caveats.append(
            f"{len(values)} workers logged {least:g} to {max(values):g} GiB for the KV cache; the "
            "smallest is given, since the engine gives every worker the same number of blocks."
        )
    for bytes_, hint in _exact_hints(reader):
        if not configured and abs(bytes_ - least * GIB) <= GIB_HALF_WIDTH:
            reader.note("available_kv_bytes", hint)
            return bytes_, 0, False
    return _bytes(least), GIB_HALF_WIDTH, bool(configured)


def _exact_hints(reader: FieldReader) -> list[tuple[int, Hit]]:
    """Exact bytes from the engine's advice, which is what it has, less the CUDA graphs, less a
    fixed buffer. Only without CUDA graphs: their size is logged rounded."""
    if reader.one("enforce_eager", flag) is not True:
        return []
    exact = []
    for hit in reader.hits("exact_hint"):
        advice, graphs, in_use = hit.value.split()
        bytes_ = int(advice) + _HINT_BUFFER
        if float(graphs) == 0 and abs(bytes_ - float(in_use) * GIB) <= GIB_HALF_WIDTH:
            exact.append((bytes_, hit))
    return sorted(exact, key=lambda pair: pair[0])


def _model_loading(reader: FieldReader) -> tuple[int | None, int]:
    """What loading took on the worker with the most, and the half-width of the figure."""
    values = reader.gibs("model_loading")
    if not values:
        return None, 0
    hit = reader.hits("model_loading")[values.index(max(values))]
    reader.note("model_loading", hit)
    # Four decimals up to 0.13, two since.
    finer = len(hit.value.partition(".")[2]) > 2
    return _bytes(max(values)), -(-GIB // 20_000) if finer else GIB_HALF_WIDTH


def _bytes(gib: float) -> int:
    return round(gib * GIB)


def _memory(reader: FieldReader) -> MemoryAtStart | None:
    """Of the worker that asked for the least memory; its line holds all of the figures."""
    requested = reader.hits("requested")
    if not requested:
        return None
    line = min(requested, key=lambda hit: float(hit.value)).line
    figures: dict[str, int] = {}
    for field in (
        *("free_at_start", "total", "requested"),
        *("consumed", "peak_activation", "non_torch", "cuda_graphs"),
    ):
        for value, hit in zip(reader.gibs(field), reader.hits(field), strict=True):
            if hit.line == line:
                figures[field] = _bytes(value)
                reader.note("memory", hit)
    consumed = figures.get("consumed")
    return MemoryAtStart(
        free_at_start=figures["free_at_start"],
        total=figures["total"],
        requested=figures["requested"],
        consumed=None if consumed is None else consumed + figures.get("non_torch", 0),
        peak_activation=figures.get("peak_activation"),
        cuda_graphs=figures.get("cuda_graphs"),
    )
