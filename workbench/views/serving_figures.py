"""A serving engine's samples as figures: throughput first, then acceptance, times, and load.

Samples come from a :class:`workbench.serving.monitor.monitor.Monitor` or a recording of one. A
figure says where they are from: ``source`` is that of the monitor or of the recording.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import unescape
from itertools import accumulate
from typing import Any

from workbench.serving.monitor.intervals import pooled, rate, runs
from workbench.serving.monitor.sample import PER_SCHEDULED, TIMES, Sample
from workbench.serving.monitor.spread import Percentile, Spread, duration
from workbench.terminal import printable
from workbench.views import spec_marks, theme
from workbench.views.adaptive_figure import LINE, figure
from workbench.views.numbers import plural
from workbench.views.serving_panels import Line, Panel, over_time
from workbench.views.spec_curves import UNDEFINED, acceptance_curves
from workbench.views.view import View

SPEED, PROMPT, LENGTH = theme.SLIDING, theme.NEUTRAL, theme.SPARSE
MEDIAN, TAIL, MEAN = theme.SLIDING, theme.FULL, theme.SPARSE
_ORDERS = 30  # times the least, from which on a scale is logarithmic
RUNNING, WAITING, CACHE, PREEMPTED = theme.SPARSE, theme.FULL, theme.HEAT, theme.DENSE
NO_DRAFTS = "no drafts: the engine has no counters of speculation, or counted none"
_TIMES = ("ttft", "tpot", "itl")  # drawn, where the engine has them


def serving_throughput(
    samples: Sequence[Sample],
    *,
    engine: str | None = None,
    window: float = 0.0,
    source: str = "measured here",
) -> View:
    """Tokens a second, and below them the acceptance length and the prefill, over time.

    Tokens/s decide: adaptive verification shortens the acceptance length and is no loss by that.
    Lines are broken where pages did not come and where the server was started anew.

    Args:
        samples: of a monitor or a recording, oldest first.
        engine: label of one engine; all together when None.
        window: seconds that a point stands for at least.
        source: where they come from.
    """
    some = of_engine(samples, engine)
    whole = pooled(some)
    words = _speed(some)
    length = None if whole is None else whole.acceptance_length
    if whole is not None and length is not None:
        drafts = plural(whole.drafts or 0, "draft event")
        words += f" · acceptance length {length:.2f} (n = {drafts})"
    panels = (
        Panel(title="throughput: what counts", unit="tokens/s", nothing="no rate is known",
              tick=",~g",
              lines=(Line(name="given out", value=lambda s: s.tokens_per_second, color=SPEED),)),
        Panel(title="acceptance length: trimming shortens it", unit="tokens/event", form=".2f",
              nothing=NO_DRAFTS, from_zero=False,
              lines=(Line(name="acceptance length", value=lambda s: s.acceptance_length,
                          color=LENGTH, dash="dash"),)),
        # By itself: a prompt has many tokens at once, and would flatten what is given out.
        Panel(title="prefill", unit="tokens/s", nothing="no rate is known",
              tick=",~g",
              lines=(Line(name="prefilled", value=lambda s: s.prompt_tokens_per_second,
                          color=PROMPT, dash="dot"),)),
    )  # fmt: skip
    title = "Throughput and acceptance length"
    return View(
        figure=over_time(title, _subtitle(source, some, engine, words),
                         runs(some, window=window), panels),
        text=_text(title, some, engine, [words]),
    )  # fmt: skip


def serving_acceptance(
    samples: Sequence[Sample], *, engine: str | None = None, source: str = "measured here"
) -> View:
    """Survival and conditional acceptance of every slot of a block, as of the local decoder.

    Per scheduled draft: an engine counts drafts that adaptive verification left out as drafted, so
    its verified share is not known, and a slot that was often trimmed looks worse than it is.
    """
    some = of_engine(samples, engine)
    whole = pooled(some)
    acceptance = None if whole is None else whole.acceptance
    if acceptance is None or not acceptance.events:
        fig = figure("Acceptance by slot of the block", source, height=220)
        spec_marks.nothing(fig, NO_DRAFTS)
        return View(figure=fig, text=f"acceptance by slot {UNDEFINED}: {NO_DRAFTS}")
    words, slots = PER_SCHEDULED, len(acceptance.accepted_at)
    if acceptance.drafted < acceptance.events * slots:
        mean = acceptance.drafted / acceptance.events
        short = plural(acceptance.events * slots - acceptance.drafted, "slot")
        nearly = f"{mean:.1f}" == f"{slots:.1f}"
        words += f" · {short} not" if nearly else f" · {mean:.1f} of {slots} slots"
        words += " scheduled, so conditionals are lower bounds"
    view = acceptance_curves(acceptance, source=f"{_origin(source, engine)} · {words}")
    _narrow(view.figure)
    return View(figure=view.figure, text=f"{view.text}\n{words}")


def _narrow(fig: Any) -> None:
    """Title and subtitle of one of the local decoder's figures in lines for a narrow page."""
    layout = fig.layout
    title, subtitle = (
        unescape(re.sub(r"<[^>]+>", "", text.replace("<br>", " ")))
        for text in (layout.title.text, layout.title.subtitle.text)
    )
    rows = layout.title.subtitle.text.count("<br>")  # beyond the first: its height has them
    margin = layout.margin.to_plotly_json()
    margin["t"] -= LINE * rows
    head = figure(
        title, subtitle, height=layout.height - LINE * rows, legend_under_title=True, margin=margin
    ).layout
    fig.update_layout(
        title=head.title, height=head.height, margin=head.margin, legend_y=head.legend.y
    )


def serving_latency(
    samples: Sequence[Sample],
    *,
    engine: str | None = None,
    window: float = 0.0,
    source: str = "measured here",
) -> View:
    """Median and 99th percentile of TTFT, TPOT and ITL over time.

    The engine exports histograms, so each is interpolated within a bucket; one that lies in the
    open last bucket is drawn at that bucket's lower end, and the words say so. The mean beside
    them is exact. Where the times of a panel are of several orders its scale is logarithmic.
    ``window`` as for
    :func:`serving_throughput`: with few requests a point of one interval is one request.
    """
    some = of_engine(samples, engine)
    whole = pooled(some)
    known = [name for name in _TIMES if whole is not None and getattr(whole, name) is not None]
    lines = [f"{name.upper()}: {spread_words(getattr(whole, name))}" for name in known]
    parts = runs(some, window=window)
    points = [point for run in parts for point in run]
    panels = [_times(name, points) for name in known or ("ttft",)]
    words = " · ".join(lines) or "the engine exports no times"
    if any(_place(point, name, 0.99, beyond=True) for name in known for point in points):
        words += " · p99 in the open last bucket: drawn at its lower end, it is more"
    if any("< " in line for line in lines):
        words += " · percentiles in the first bucket are not drawn"
    words += " · interpolated within the engine's buckets"
    title = "Time to first token, and per token"
    return View(
        figure=over_time(title, _subtitle(source, some, engine, words), parts, panels),
        text=_text(title, some, engine, [*lines, "interpolated within the engine's buckets"]),
    )


def serving_load(
    samples: Sequence[Sample],
    *,
    engine: str | None = None,
    window: float = 0.0,
    source: str = "measured here",
) -> View:
    """KV cache in use, requests running and waiting, and preemptions so far, over time.

    Of several engines together the share of the KV cache is the mean.
    """
    some = of_engine(samples, engine)
    parts = runs(some, window=window)
    points = [point for run in parts for point in run]
    so_far = dict(zip(map(id, points), accumulate(p.preemptions or 0 for p in points), strict=True))
    counted = any(point.preemptions is not None for point in points)
    panels = (
        Panel(title="KV cache in use", unit="share", form=".1%", tick=".0%",
              nothing="the engine does not say",
              lines=(Line(name="KV cache", value=lambda s: s.kv_usage, color=CACHE),)),
        Panel(title="requests", unit="requests", nothing="the engine does not say", whole=True,
              lines=(Line(name="running", value=lambda s: s.running, color=RUNNING),
                     Line(name="waiting", value=lambda s: s.waiting, color=WAITING, dash="dash"))),
        Panel(title="preemptions so far", unit="requests", nothing="the engine does not say",
              whole=True,
              lines=(Line(name="preempted", color=PREEMPTED, dash="dot",
                          value=lambda s: so_far[id(s)] if counted else None),)),
    )  # fmt: skip
    words = _load(some)
    title = "KV cache, requests and preemptions"
    return View(
        figure=over_time(title, _subtitle(source, some, engine, words), parts, panels),
        text=_text(title, some, engine, [words]),
    )


def of_engine(samples: Sequence[Sample], engine: str | None) -> list[Sample]:
    """The samples of one engine, or of all together; intervals in which it was not are left out."""
    return [found for found in (sample.of(engine) for sample in samples) if found is not None]


def spread_words(spread: Spread | None) -> str:
    """p50, p99 and n of a spread, in words."""
    if spread is None:
        return "not exported by this engine"
    middle, tail = place_words(spread, 0.5), place_words(spread, 0.99)
    if not middle:
        return "nothing came"
    mean = "" if spread.mean is None else f", mean {duration(spread.mean)}"
    return f"p50 {middle}, p99 {tail}{mean} (n = {spread.count:,})"


def speed_number(value: float) -> str:
    """Tokens a second with the digits that stand still; the same in figures and in the page."""
    return format(value, ",.1f" if value < 100 else ",.0f")


def place_words(spread: Spread, share: float) -> str:
    """A percentile in words, empty where nothing came."""
    place = spread.percentile(share)
    return "" if place is None else str(place)


def drawn_place(spread: Spread | None, share: float) -> float | None:
    """A percentile in seconds, None where nothing came or all of it lies in the first bucket."""
    place = None if spread is None else spread.percentile(share)
    return None if place is None or place.below is not None else place.seconds


# -- words and panels -----------------------------------------------------------------------------


def _times(name: str, points: Sequence[Sample]) -> Panel:
    """A panel of one kind of time, in ms where all of it is short."""
    spreads: list[Spread | None] = [getattr(point, name) for point in points]
    drawn = [drawn_place(spread, share) for spread in spreads for share in (0.5, 0.99)]
    drawn += [None if spread is None else spread.mean for spread in spreads]
    known = [seconds for seconds in drawn if seconds]
    short = all(seconds < 1 for seconds in known)
    log = len(known) > 0 and max(known) > _ORDERS * min(known)
    factor, unit = (1e3, "ms") if short or log else (1.0, "s")

    def line(share: float, word: str, color: str, dash: str) -> Line:
        def value(sample: Sample) -> float | None:
            place = drawn_place(getattr(sample, name), share)
            return None if place is None else factor * place

        return Line(name=word, value=value, color=color, dash=dash)

    def mean(sample: Sample) -> float | None:
        spread: Spread | None = getattr(sample, name)
        return None if spread is None or spread.mean is None else factor * spread.mean

    return Panel(
        title=TIMES[name], unit=unit, form=",.3~r", log=log, tick=",~g" if log else "",
        nothing="nothing came: no request got there", lines=(
            line(0.5, "p50", MEDIAN, "solid"), line(0.99, "p99", TAIL, "dash"),
            Line(name="mean", value=mean, color=MEAN, dash="dot")),
    )  # fmt: skip


def _place(sample: Sample, name: str, share: float, *, beyond: bool = False) -> Percentile | None:
    """A percentile of a sample; with ``beyond`` only one in the open last bucket."""
    spread: Spread | None = getattr(sample, name)
    place = None if spread is None else spread.percentile(share)
    return place if place is not None and (place.beyond or not beyond) else None


def _speed(samples: Sequence[Sample]) -> str:
    speed = rate(samples, "generation_tokens")
    return "no rate is known" if speed is None else f"{speed_number(speed)} tokens/s"


def _load(samples: Sequence[Sample]) -> str:
    whole = pooled(samples)
    if whole is None:
        return "no sample"
    usage = [sample.kv_usage for sample in samples if sample.kv_usage is not None]
    cache = f"KV cache at most {max(usage):.1%}" if usage else "KV cache not told"
    return f"{cache} · {plural(whole.preemptions or 0, 'preemption')}"


def _origin(source: str, engine: str | None) -> str:
    return source if engine is None else f"{source}, engine {printable(engine)}"


def _subtitle(source: str, samples: Sequence[Sample], engine: str | None, words: str) -> str:
    anew = sum(sample.restarted for sample in samples)
    missed = sum(sample.missed for sample in samples)
    told = f" · restarted {plural(anew, 'time')}" if anew else ""
    told += f" · {plural(missed, 'page')} did not come" if missed else ""
    # No line ends between a figure's name, the figure and its unit.
    words = re.sub(
        r"n = |(p\d\d|mean) ([<>] )?[\d,.]+ \w+", lambda m: m[0].replace(" ", "\u00a0"), words
    )
    return f"{_origin(source, engine)} · {words}{told}"


def _text(title: str, samples: Sequence[Sample], engine: str | None, lines: Sequence[str]) -> str:
    whole = pooled(samples)
    if whole is None:
        return f"{title}: there is no sample yet"
    seconds = sum(sample.seconds for sample in samples)
    who = "all engines" if engine is None else f"engine {printable(engine)}"
    head = f"{title}: {plural(len(samples), 'sample')} of {who} over {duration(seconds)}"
    given = whole.generation_tokens
    tokens = [] if given is None else [f"{plural(given, 'token')} given out"]
    return "\n".join([head, *lines, *tokens])
