"""A serving engine in a terminal: a table that follows it, a line a sample, a last summary."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from rich.console import Group
from rich.table import Table
from rich.text import Text

from workbench.serving.monitor.intervals import Total, pooled, rate
from workbench.serving.monitor.sample import PER_SCHEDULED, SPREADS, Sample
from workbench.serving.monitor.spread import Spread, duration
from workbench.terminal import printable

LATELY = 10.0  # s of the column that follows
_BAR = 24
_GREEN, _ORANGE = "#009E73", "#D55E00"


class Watched(Protocol):
    """A monitor or a replay, as far as it is told here."""

    @property
    def source(self) -> str:
        """Where the figures come from."""
        ...

    @property
    def stale_since(self) -> float | None:
        """Wall time from which on nothing new is known."""
        ...

    @property
    def error(self) -> str | None:
        """Why."""
        ...


def live_page(name: str, watched: Watched, lately: Sequence[Sample], total: Total) -> Group:
    """What is redrawn with every sample: ``lately`` are the last ones, ``total`` all."""
    rows: list[Text | Table] = [Text(printable(name), style="bold")]
    whole = total.whole
    said = watched.source + (f", {whole.model}" if whole is not None and whole.model else "")
    rows.append(Text(printable(said), style="dim"))
    stale = stale_words(watched)
    if stale:
        rows.append(Text(printable(f"⚠ {stale}"), style=f"bold {_ORANGE}"))
    if whole is None:
        rows.append(Text("waiting for the second page: figures are of what is added between two"))
        return Group(*rows)
    rows.append(_table(lately, pooled(lately) or whole, whole, total))
    rows += slot_bars(whole)
    return Group(*rows)


def sample_line(sample: Sample) -> str:
    """One sample in one line, for a file or a pipe."""
    parts = [
        time.strftime("%H:%M:%S", time.localtime(sample.at)),
        f"{_number(sample.tokens_per_second, ',.1f')} tokens/s",
        f"acceptance length {_number(sample.acceptance_length, '.2f')}",
    ]
    for name in SPREADS[:3]:
        spread: Spread | None = getattr(sample, name)
        if spread is not None and spread.count:
            parts.append(f"{name.upper()} {_places(spread)}")
    parts += [
        f"KV {_number(sample.kv_usage, '.1%')}",
        f"running {_number(sample.running, ',.0f')}, waiting {_number(sample.waiting, ',.0f')}",
    ]
    if sample.restarted:
        parts.append("the server was started anew")
    if sample.missed:
        parts.append(f"{_plural(sample.missed, 'page')} did not come")
    return "  ".join(parts)


def summary_lines(total: Total, source: str) -> list[str]:
    """Everything so far, in a few lines."""
    whole = total.whole
    if whole is None:
        return ["no sample: figures need two pages of a server"]
    restarts = f", {_plural(total.restarts, 'restart')}" if total.restarts else ""
    missed = f", {_plural(whole.missed, 'page')} did not come" if whole.missed else ""
    lines = [
        f"{_plural(total.samples, 'sample')} over {duration(total.seconds)}{restarts}{missed} "
        f"({source})",
        f"{_number(total.rate('generation_tokens'), ',.1f')} tokens/s; "
        f"{_number(whole.generation_tokens, ',')} tokens given out, "
        f"{_number(whole.prompt_tokens, ',')} prefilled; "
        f"{_number(whole.preemptions, ',')} preemptions",
    ]
    if whole.acceptance_length is not None:
        accepted, drafted = whole.accepted_tokens or 0, whole.draft_tokens or 0
        share = f" ({accepted / drafted:.1%})" if drafted else ""
        lines.append(
            f"acceptance length {whole.acceptance_length:.2f} over {whole.drafts:,} draft events; "
            f"{accepted:,} of {drafted:,} drafts accepted{share}, {PER_SCHEDULED}"
        )
    times = [
        f"{name.upper()} {_places(spread)} (n = {spread.count:,})"
        for name in SPREADS
        if (spread := getattr(whole, name)) is not None and spread.count
    ]
    if times:
        lines.append("; ".join(times) + "; interpolated within the engine's buckets")
    if whole.unusable:
        lines.append(f"not usable on the page: {', '.join(whole.unusable)}")
    return [printable(line) for line in lines]


def stale_words(watched: Watched) -> str:
    """Since when nothing new is known, and why; empty while all is well."""
    since = watched.stale_since
    if since is None:
        return ""
    at = time.strftime("%H:%M:%S", time.localtime(since))
    why = f": {watched.error}" if watched.error else ""
    return f"stale since {at}, {duration(max(0.0, time.time() - since))}{why}"


def _table(lately: Sequence[Sample], new: Sample, whole: Sample, total: Total) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("")
    table.add_column(f"last {LATELY:g} s", justify="right")
    table.add_column("since the start", justify="right")

    def row(label: str, *cells: str) -> None:
        table.add_row(Text(label), *map(Text, cells))

    for name, label in (("generation_tokens", "tokens/s"), ("prompt_tokens", "prefill tokens/s")):
        row(label, _number(rate(lately, name), ",.1f"), _number(total.rate(name), ",.1f"))
    row("acceptance length", *(_number(s.acceptance_length, ".2f") for s in (new, whole)))
    for name in SPREADS[:3]:
        if getattr(whole, name) is not None:
            row(f"{name.upper()} p50 / p99", *(_places(getattr(s, name)) for s in (new, whole)))
    row("KV cache in use", _number(new.kv_usage, ".1%"), "")
    row("running / waiting", f"{_number(new.running, ',')} / {_number(new.waiting, ',')}", "")
    row("preemptions", *(_number(s.preemptions, ",") for s in (new, whole)))
    row("prefix cache hits", *(_number(s.prefix_hit_rate, ".0%") for s in (new, whole)))
    restarts = f", {_plural(total.restarts, 'restart')}" if total.restarts else ""
    row("samples", f"{len(lately):,}", f"{total.samples:,}{restarts}")
    return table


def slot_bars(whole: Sample) -> list[Text | Table]:
    """Conditional acceptance of every slot as a bar; nothing where nothing was drafted."""
    acceptance = whole.acceptance
    if acceptance is None or not acceptance.events:
        return []
    lines: list[Text | Table] = [
        Text(f"conditional acceptance by slot, {PER_SCHEDULED}", style="dim")
    ]
    for slot, found in enumerate(acceptance.rates("conditional"), 1):
        if found.value is None:
            lines.append(Text(f"{slot:>4}  never reached"))
            continue
        full = round(_BAR * min(1.0, found.value))
        bar = Text.assemble(("█" * full, _GREEN), ("·" * (_BAR - full), "dim"))
        lines.append(Text.assemble(f"{slot:>4}  ", bar, f"  {found.value:6.1%}  n {found.n:,}"))
    return lines


def _places(spread: Spread | None) -> str:
    middle, tail = (None if spread is None else spread.percentile(share) for share in (0.5, 0.99))
    return "–" if middle is None or tail is None else f"{middle} / {tail}"


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}" + ("" if count == 1 else "s")


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
