"""A ``/metrics`` page of vLLM as plain values, engine by engine.

Lines outside ``vllm:`` are dropped before anything is parsed (the start time of the process
excepted), and so is what no figure needs. What is left is series and number: ``prometheus_client``
parses the name and the labels of a series, once, since they stay the same from page to page.

Names are those of vLLM's ``v1/metrics/loggers.py`` and ``v1/spec_decode/metrics.py``; where one was
renamed the older name counts as well, unless a page has both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import inf, isfinite
from typing import Literal

from workbench.errors import ServingError
from workbench.serving.monitor.page_kind import what_came

PREFIX = "vllm:"
MOST_SERIES = 50_000  # of one page; 64 engines have some 10,000 that are looked at
MOST_ENGINES = 1024
MOST_POSITIONS = 1024  # drafts of a block
LONGEST_LINE = 8192  # letters: names and labels that were read are kept
LARGEST = 2**53  # of a count, a gauge, a time in seconds: no float above it is exact
# What a page is about, with its names, the newest first.
COUNTERS: Mapping[str, tuple[str, ...]] = {
    "prompt_tokens": ("vllm:prompt_tokens",),
    "generation_tokens": ("vllm:generation_tokens",),
    "preemptions": ("vllm:num_preemptions",),
    "prefix_queries": ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),
    "prefix_hits": ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"),
    "drafts": ("vllm:spec_decode_num_drafts",),
    "draft_tokens": ("vllm:spec_decode_num_draft_tokens",),
    "accepted_tokens": ("vllm:spec_decode_num_accepted_tokens",),
}
FINISHED, ACCEPTED_AT = "vllm:request_success", "vllm:spec_decode_num_accepted_tokens_per_pos"
GAUGES: Mapping[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
}
HISTOGRAMS: Mapping[str, tuple[str, ...]] = {
    "ttft": ("vllm:time_to_first_token_seconds",),
    "itl": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "tpot": ("vllm:request_time_per_output_token_seconds",),
    "e2e": ("vllm:e2e_request_latency_seconds",),
}
STARTED = "process_start_time_seconds"

_Part = Literal["value", "bucket", "count", "sum", "created"]
# A name and its labels, in whose texts anything may stand.
_KEY = re.compile(r'[A-Za-z_:][A-Za-z0-9_:]*(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?')


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Observations since the start of the server.

    Attributes:
        bounds: upper ends of the buckets in seconds, rising; the last is infinite.
        cumulative: observations up to each bound.
        seconds: of all observations together; None where that is no number.
    """

    bounds: tuple[float, ...]
    cumulative: tuple[int, ...]
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePage:
    """What a page says of one engine, all counts since the start of the server.

    What the engine does not export is not in a mapping. ``accepted_at[i]`` is the number of drafts
    with more than i tokens accepted; empty where nothing is said of it. ``created`` has the moments
    at which series began, by series: they change with a restart.
    """

    engine: str
    model: str
    counters: Mapping[str, int]
    finished: Mapping[str, int]
    accepted_at: tuple[int, ...]
    gauges: Mapping[str, float]
    histograms: Mapping[str, Histogram]
    created: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsPage:
    """A page.

    Attributes:
        engines: by the label ``engine``, which also names the model where a page has several;
            ``0`` where there is no such label.
        started: when the process began, seconds since 1970, where the page says so.
        unusable: names of series whose values are no such thing: a count that is not a number, or
            of more than 15 digits.
    """

    engines: Mapping[str, EnginePage]
    started: float | None
    unusable: tuple[str, ...]


def read_page(page: bytes | str, *, where: str = "the page") -> MetricsPage:
    """The values of a page; ``where`` names it in errors.

    Raises:
        ServingError: it is no page of vLLM's metrics, was cut, or has a line that cannot be read.
    """
    text = _text(page, where)
    if not (text.startswith(PREFIX) or f"\n{PREFIX}" in text):
        raise ServingError(f"{where} is {what_came(text)}")
    if not text.endswith("\n"):
        raise ServingError(f"{where} was cut: its last line has no end; ask again")
    found: dict[tuple[str, str], _Found] = {}
    started: float | None = None
    count = 0
    for line in text.split("\n"):
        if not line.startswith((PREFIX, STARTED)):
            continue
        name = line.partition("{")[0].partition(" ")[0]
        if name == STARTED:
            started = _number(line, where)[1]
        elif name in _NAMES:
            count += 1
            if count > MOST_SERIES:
                raise ServingError(
                    f"{where} has more than {MOST_SERIES:,} series of vllm:, more than engines have"
                )
            key, value = _number(line, where)
            series = _known(key, where)
            parts = found.setdefault((series.model, series.engine), {})
            _put(parts.setdefault((series.field, series.age), {}), series, value)
    if len(found) > MOST_ENGINES:
        raise ServingError(
            f"{where} has {len(found):,} engines, and {MOST_ENGINES:,} is the most; give the "
            "address of one server"
        )
    if not found:
        raise ServingError(
            f"{where} has lines of vllm:, but none that the monitor knows; is it older than 0.6?"
        )
    return _page(found, started, where)


# -- lines ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Series:
    """A series that counts: ``age`` 0 is the newest name, ``extra`` the label that tells series of
    one name apart."""

    model: str
    engine: str
    field: str
    part: _Part
    age: int
    extra: str


# (part, extra) -> value, of each (field, age).
_Found = dict[tuple[str, int], dict[tuple[_Part, str], float]]


def _names() -> Iterator[tuple[str, tuple[str, _Part, int, str]]]:
    """Sample names -> field, part, age, label that tells apart."""
    plain = {**COUNTERS, "finished": (FINISHED,), "accepted_at": (ACCEPTED_AT,)}
    labels = {"finished": "finished_reason", "accepted_at": "position"}
    for field, names in plain.items():
        for age, name in enumerate(names):
            label = labels.get(field, "")
            yield name, (field, "value", age, label)
            yield f"{name}_total", (field, "value", age, label)
            yield f"{name}_created", (field, "created", age, label)
    for field, names in GAUGES.items():
        for age, name in enumerate(names):
            yield name, (field, "value", age, "")
    for field, names in HISTOGRAMS.items():
        for age, name in enumerate(names):
            yield f"{name}_bucket", (field, "bucket", age, "le")
            yield f"{name}_count", (field, "count", age, "")
            yield f"{name}_sum", (field, "sum", age, "")
            yield f"{name}_created", (field, "created", age, "")


_NAMES = dict(_names())


def _text(page: bytes | str, where: str) -> str:
    if isinstance(page, str):
        return page.replace("\r\n", "\n")
    try:
        return page.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise ServingError(
            f"{where} is {len(page):,} bytes that are no text; give the address of a vLLM server"
        ) from None


def _number(line: str, where: str) -> tuple[str, float]:
    """Series and value of a line; a time behind the value, and an exemplar, are left out."""
    if len(line) > LONGEST_LINE:
        raise _unreadable(line, where)
    if " # {" in line:  # an exemplar behind it, or a name with that in it
        found = _KEY.match(line)
        end = found.end() if found else 0
        line = line[:end] + line[end:].partition(" # ")[0]
    else:
        end = line.rfind("}") + 1 or line.find(" ")
    key, fields = line[:end], line[end:].split()
    try:
        if end < 1 or not 1 <= len(fields) <= 2 or "_" in fields[0]:
            raise ValueError
        return key, float(fields[0])
    except ValueError:
        raise ServingError(f"{where} has a line that cannot be read: {line!r:.80}") from None


def _known(key: str, where: str) -> _Series:
    try:
        return _series(key)
    except (ValueError, IndexError):
        raise _unreadable(key, where) from None


def _unreadable(series: str, where: str) -> ServingError:
    return ServingError(f"{where} has labels that cannot be read: {series!r:.80}")


@lru_cache(maxsize=16_384)
def _series(key: str) -> _Series:
    from prometheus_client.parser import text_string_to_metric_families

    sample = next(iter(text_string_to_metric_families(f"{key} 0\n"))).samples[0]
    field, part, age, label = _NAMES[sample.name]
    return _Series(
        model=sample.labels.get("model_name", ""),
        engine=sample.labels.get("engine", ""),
        field=field,
        part=part,
        age=age,
        extra=sample.labels.get(label, ""),
    )


def _put(parts: dict[tuple[_Part, str], float], series: _Series, value: float) -> None:
    """Note a value. Where labels that nobody asked for tell two apart, they add up; the fullest of
    several KV caches stands for them."""
    key = series.part, series.extra
    before = parts.get(key)
    if before is None:
        parts[key] = value
    elif series.field == "kv_usage":
        parts[key] = max(before, value)
    else:
        parts[key] = before + value


# -- values ---------------------------------------------------------------------------------------


def _page(
    found: Mapping[tuple[str, str], _Found], started: float | None, where: str
) -> MetricsPage:
    unusable: list[str] = []
    several = len({model for model, _ in found}) > 1
    engines = {}
    for (model, label), parts in sorted(found.items(), key=lambda item: _order(item[0])):
        engine = f"{model} {label or '0'}" if several else label or "0"
        engines[engine] = _engine(engine, model, parts, unusable, where)
    known = started is not None and isfinite(started)
    return MetricsPage(
        engines=engines,
        started=started if known else None,
        unusable=tuple(dict.fromkeys(unusable)),
    )


def _order(name: tuple[str, str]) -> tuple[str, int, str]:
    model, label = name
    return model, int(label) if label.isdecimal() and len(label) < 10 else -1, label


def _engine(engine: str, model: str, found: _Found, unusable: list[str], where: str) -> EnginePage:
    newest = {}
    for field, age in sorted(found, reverse=True):
        newest[field] = found[field, age]
    created = {
        f"{field} {extra}": value
        for field, parts in newest.items()
        for (part, extra), value in parts.items()
        if part == "created"
    }
    accepted_at = _slots(_wholes("accepted_at", newest, unusable))
    if accepted_at is None:
        unusable.append("accepted_at")
    counters = {name: _wholes(name, newest, unusable).get("") for name in COUNTERS}
    gauges = {name: _gauge(name, newest, unusable) for name in GAUGES}
    histograms = {name: _histogram(name, newest, unusable, where) for name in HISTOGRAMS}
    return EnginePage(
        engine=engine,
        model=model,
        counters={name: count for name, count in counters.items() if count is not None},
        finished=_wholes("finished", newest, unusable),
        accepted_at=accepted_at or (),
        gauges={name: value for name, value in gauges.items() if value is not None},
        histograms={name: found for name, found in histograms.items() if found is not None},
        created=created,
    )


_Newest = Mapping[str, Mapping[tuple[_Part, str], float]]  # field -> (part, extra) -> value


def _wholes(field: str, newest: _Newest, unusable: list[str]) -> dict[str, int]:
    """Counts by the label that tells them apart; one that is no count is noted and left out."""
    found = {}
    for (part, extra), value in newest.get(field, {}).items():
        if part == "value":
            whole = _count(value)
            if whole is None:
                unusable.append(field)
            else:
                found[extra] = whole
    return found


def _gauge(field: str, newest: _Newest, unusable: list[str]) -> float | None:
    value = newest.get(field, {}).get(("value", ""))
    if value is None or 0 <= value < LARGEST:
        return value
    unusable.append(field)
    return None


def _count(value: float) -> int | None:
    """A whole number from 0 on, else None."""
    return int(value) if 0 <= value < LARGEST and value.is_integer() else None


def _slots(found: Mapping[str, int]) -> tuple[int, ...] | None:
    """Counts by position, 0 to the last; None where positions are no such thing."""
    if len(found) > MOST_POSITIONS:
        return None
    try:
        return tuple(found[str(slot)] for slot in range(len(found)))
    except KeyError:
        return None


def _histogram(field: str, newest: _Newest, unusable: list[str], where: str) -> Histogram | None:
    parts = newest.get(field, {})
    buckets = {extra: value for (part, extra), value in parts.items() if part == "bucket"}
    rest = [part for part, _ in parts if part in ("count", "sum")]
    if not buckets and not rest:
        return None
    if "+Inf" not in buckets or len(rest) < 2:
        raise ServingError(f"{where} was cut: {HISTOGRAMS[field][0]} is not whole; ask again")
    rows = _rows(buckets)
    if rows is None:
        unusable.append(field)
        return None
    seconds = parts["sum", ""]
    return Histogram(
        bounds=tuple(bound for bound, _ in rows),
        cumulative=tuple(count for _, count in rows),
        seconds=seconds if 0 <= seconds < LARGEST else None,
    )


def _rows(buckets: Mapping[str, float]) -> list[tuple[float, int]] | None:
    """Bounds and counts up to them, both rising; None where they are no such thing."""
    rows = []
    for name, value in buckets.items():
        try:
            bound = float(name)
        except ValueError:
            return None
        count = _count(value)
        if count is None or not (0 <= bound < LARGEST or bound == inf):
            return None
        rows.append((bound, count))
    rows.sort()
    rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(rows))
    return rows if rising and rows[-1][0] == inf else None
