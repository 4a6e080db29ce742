"""The page of a running engine: its widget, and what of the samples goes to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import anywidget
import traitlets

from workbench.serving.monitor.intervals import pooled, rate, runs
from workbench.serving.monitor.sample import PER_SCHEDULED, SPREADS, Sample
from workbench.serving.monitor.spread import Spread, duration
from workbench.spec.metrics import Acceptance, Curve
from workbench.terminal import printable
from workbench.views import serving_figures, spec_marks, theme
from workbench.views.numbers import plural
from workbench.views.serving_figures import drawn_place, of_engine, place_words, speed_number

_HERE = Path(__file__).parent
_EXPORT = "export default { render };"
_POINTS = 150  # of a line, at most
_NAME = 80  # letters of a model's name
WINDOWS: dict[str, float] = {"30 s": 30, "2 min": 120, "10 min": 600, "all": 0}
ALL = "all together"


class Source(Protocol):
    """What a page shows: a :class:`~workbench.serving.monitor.monitor.Monitor`, or a
    :class:`~workbench.serving.monitor.monitor_replay.Replay`."""

    @property
    def samples(self) -> list[Sample]: ...
    @property
    def seen(self) -> int: ...
    @property
    def running(self) -> bool: ...
    @property
    def error(self) -> str | None: ...
    @property
    def stale_since(self) -> float | None: ...
    @property
    def source(self) -> str: ...
    def stop(self) -> None: ...


def _script() -> str:
    """Drafting's pieces (charts, menus, buttons) and this page's own, as one module."""
    pieces = (_HERE / "drafting.js").read_text("utf-8")
    return pieces.replace(_EXPORT, "") + (_HERE / "serving.js").read_text("utf-8")


class ServingWidget(anywidget.AnyWidget):
    """The page's side. Text of a server travels as text, never as HTML.

    To the page: ``update`` (tiles, lines, acceptance, at most four a second) and ``heard``, which
    answers each button. From the page: ``start``, ``stop``, ``pause``, ``resume``, ``record``,
    ``settings`` (window and engine), and ``ready`` when a view of it has been drawn.
    """

    _esm = _script()
    _css = "".join((_HERE / name).read_text("utf-8") for name in ("drafting.css", "serving.css"))
    state = traitlets.Unicode("ready").tag(sync=True)  # ready, running, paused, ended
    status = traitlets.Unicode("").tag(sync=True)
    trouble = traitlets.Bool(False).tag(sync=True)  # the status says what went wrong
    settings = traitlets.Dict().tag(sync=True)  # window, engine: names of the menus
    choices = traitlets.Dict().tag(sync=True)
    look = traitlets.Dict().tag(sync=True)


def look() -> dict[str, Any]:
    """Fonts and colours, from where the figures have them."""
    return {
        "mono": theme.MONO,
        "sans": theme.SANS,
        "text": theme.TEXT,
        "small": theme.SMALL,
        "slots": {fate: {"color": mark.color} for fate, mark in spec_marks.SLOTS.items()},
        "survival": theme.SPARSE,
        "conditional": theme.HEAT,
        "speed": serving_figures.SPEED,
        "prompt": serving_figures.PROMPT,
        "length": serving_figures.LENGTH,
        "median": serving_figures.MEDIAN,
        "tail": serving_figures.TAIL,
        "mean": serving_figures.MEAN,
        "cache": serving_figures.CACHE,
        "running": serving_figures.RUNNING,
        "waiting": serving_figures.WAITING,
    }


def window_of(samples: Sequence[Sample], seconds: float) -> list[Sample]:
    """The samples of the last so many seconds; 0 is all."""
    if not samples or not seconds:
        return list(samples)
    end = samples[-1].at
    return [sample for sample in samples if sample.at > end - seconds]


def page_figures(samples: Sequence[Sample], engine: str | None, seconds: float) -> dict[str, Any]:
    """What an update says, but for the state of the source: JSON values.

    Args:
        samples: all that are kept.
        engine: a label; all together when None.
        seconds: of the window; 0 is all.
    """
    some = window_of(of_engine(samples, engine), seconds)
    whole = pooled(some)
    if whole is None:
        return {"tiles": [], "lines": {}, "acceptance": None, "note": ""}
    acceptance = whole.acceptance
    anew = sum(sample.restarted for sample in some)
    missed = sum(sample.missed for sample in some)
    gaps = [f"the server was restarted {plural(anew, 'time')}"] if anew else []
    gaps += [f"{plural(missed, 'page')} did not come"] if missed else []
    broken = [f"lines are broken where {' and '.join(gaps)}"] if gaps else []
    unusable = [f"not usable on the page: {', '.join(whole.unusable)}"] if whole.unusable else []
    drafted = [PER_SCHEDULED] if acceptance is not None and acceptance.events else []
    return {
        "tiles": _tiles(some, whole),
        "lines": _lines(some),
        "acceptance": None if acceptance is None else _slots(acceptance),
        "note": " · ".join([*broken, *drafted, *unusable]),
    }


def title_of(samples: Sequence[Sample], where: str | None) -> str:
    """What is watched: the model as the newest sample has it, and where it is served.

    ``where`` is None for a recording, whose source stands beside it.
    """
    model = theme.short_token(printable(samples[-1].model), _NAME) if samples else ""
    if where is None:
        return f"Recording of {model}" if model else "Recording"
    return f"{model} at {printable(where)}" if model else printable(where)


def engines_of(samples: Sequence[Sample]) -> list[str]:
    """Labels of the engines of the newest sample."""
    return [str(sample.engine) for sample in samples[-1].engines] if samples else []


def _tiles(some: Sequence[Sample], whole: Sample) -> list[list[str]]:
    """Label, value, note: what an engine is judged by first."""
    speed, prompt = (rate(some, name) for name in ("generation_tokens", "prompt_tokens"))
    length, hits = whole.acceptance_length, whole.prefix_hit_rate
    last = some[-1]
    times: dict[str, list[list[str]]] = {}
    for name in SPREADS[:3]:
        spread: Spread | None = getattr(whole, name)
        told = (
            []
            if spread is None
            else [[f"{name.upper()} p50", place_words(spread, 0.5) or "–", _tail(spread)]]
        )
        times[name] = told
    return [
        ["tokens/s", _speed(speed), "given out, in the window"],
        *times["tpot"],
        *times["ttft"],
        ["acceptance length", _number(length, ".2f"), plural(whole.drafts or 0, "draft event")],
        ["running", _number(last.running, ",.0f"),
         f"waiting {_number(last.waiting, ',.0f')} · latest"],
        ["KV cache in use", _number(last.kv_usage, ".1%"), "latest"],
        ["preemptions", _number(whole.preemptions, ",.0f"), "in the window"],
        ["prefill tokens/s", _speed(prompt), "in the window"],
        ["prefix cache hits", _number(hits, ".0%"),
         f"of {plural(whole.prefix_queries or 0, 'prompt token')}"],
        *times["itl"],
    ]  # fmt: skip


def _speed(value: float | None) -> str:
    """Tokens a second, with the digits that stand still."""
    return "–" if value is None else speed_number(value)


def _tail(spread: Spread) -> str:
    tail = place_words(spread, 0.99)
    mean = "" if spread.mean is None else f"mean {duration(spread.mean)} · "
    return f"{mean}p99 {tail} · n = {spread.count:,}" if tail else "nothing came"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _lines(some: Sequence[Sample]) -> dict[str, list[list[float | None]]]:
    """Points of every chart: seconds before the end of the last sample, then values; a point of
    nothing but None is a gap."""
    end = some[-1].at
    names = ("speed", "prompt", "length", "ttft", "tpot", "itl", "load", "cache")
    made: dict[str, list[list[float | None]]] = {name: [] for name in names}
    for number, run in enumerate(runs(some, most=_POINTS)):
        for rows in made.values():
            if number:
                rows.append([])
        for point in run:
            t = round(point.at - end, 2)
            made["speed"].append([t, point.tokens_per_second])
            made["prompt"].append([t, point.prompt_tokens_per_second])
            made["length"].append([t, point.acceptance_length])
            made["load"].append([t, point.running, point.waiting])
            made["cache"].append([t, point.kv_usage])
            for name in ("ttft", "tpot", "itl"):
                made[name].append([t, *_places(getattr(point, name))])
    return made


def _places(spread: Spread | None) -> list[float | None]:
    """p50, p99 and the mean in ms."""
    places = [drawn_place(spread, share) for share in (0.5, 0.99)]
    places.append(None if spread is None else spread.mean)
    return [None if place is None else 1e3 * place for place in places]


def _slots(acceptance: Acceptance) -> dict[str, Any]:
    """Curves by slot, each point with its band and n."""
    curves: tuple[Curve, ...] = ("survival", "conditional")
    return {"events": acceptance.events} | {
        curve: [[r.value, r.low, r.high, r.n] for r in acceptance.rates(curve)] for curve in curves
    }


def counts_words(samples: Sequence[Sample]) -> str:
    """Counts of all samples and no times, so that equal runs say equal words."""
    whole = pooled(samples)
    if whole is None:
        return "no sample yet"
    parts = [plural(len(samples), "sample")]
    if whole.model:
        parts.append(printable(whole.model))
    for count, word in ((whole.prompt_tokens, "prompt token"),
                        (whole.generation_tokens, "token")):  # fmt: skip
        if count is not None:
            parts.append(plural(count, word) + (" given out" if word == "token" else ""))
    if whole.finished is not None:
        parts.append(plural(sum(whole.finished.values()), "finished request"))
    if whole.acceptance_length is not None:
        parts.append(f"acceptance length {whole.acceptance_length:.2f}")
    return " · ".join(parts)
