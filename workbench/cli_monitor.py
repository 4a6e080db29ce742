"""``workbench monitor``: a serving engine as it goes, or a recording of one."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.errors import ServingError

if TYPE_CHECKING:
    from workbench.serving.monitor.intervals import Total
    from workbench.serving.monitor.monitor import Monitor
    from workbench.serving.monitor.monitor_replay import Replay
    from workbench.serving.monitor.sample import Sample

_POLL = 0.1  # s between two looks at what is new
PATIENCE = 60.0  # s


def monitor(
    url: Annotated[
        str | None,
        typer.Argument(metavar="URL", help="A vLLM server, http://127.0.0.1:8000 for one."),
    ] = None,
    hertz: Annotated[
        float, typer.Option("--hertz", help="Pages a second, up to 20.", metavar="N")
    ] = 2.0,
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, help="End after so many.", metavar="N")
    ] = None,
    patience: Annotated[
        float,
        typer.Option(
            "--patience", min=1.0, help="Seconds without a page that end --samples.", metavar="S"
        ),
    ] = PATIENCE,
    record: Annotated[
        Path | None,
        typer.Option("--record", help="Write every sample to this file, a line each.", metavar="F"),
    ] = None,
    replay: Annotated[
        Path | None, typer.Option("--replay", help="Show such a file instead.", metavar="F")
    ] = None,
    speed: Annotated[
        float, typer.Option("--speed", help="Of a replay; 1 is as recorded.", metavar="X")
    ] = 1.0,
    foreign: Annotated[
        bool, typer.Option("--foreign", help="The server may be another machine.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON lines on stdout.")] = False,
) -> None:
    """Watch a serving engine: throughput, acceptance, times, load. Ctrl-C ends it.

    With --json a line a sample and a last line with the sum. An API key is read from VLLM_API_KEY.
    A server that is gone is waited for, with --samples no longer than --patience.
    """
    if (url is None) == (replay is None):
        raise typer.BadParameter("give either the URL of a server or --replay FILE")
    if replay is not None and record is not None:
        raise typer.BadParameter("--record is for a server, not for --replay")
    from workbench.serving.monitor.intervals import Total
    from workbench.serving.monitor.monitor import Monitor
    from workbench.serving.monitor.monitor_replay import replay as replayed

    total = Total()
    watched: Monitor | Replay
    if replay is not None:
        watched, name = replayed(replay, speed=speed), str(replay)
    else:
        watched = Monitor(str(url), hertz=hertz, record=record, foreign=foreign)
        name = watched.address.url
    gone = None
    try:
        if isinstance(watched, Monitor) and not watched.reached():
            raise ServingError(watched.error or f"{name} gave no page")
        gone = _watch(watched, name, samples, patience, total, json)
    except KeyboardInterrupt:  # the usual end
        pass
    finally:
        watched.stop()
    _sum_up(watched, total, json)
    if gone is not None:
        raise ServingError(gone)


def _watch(
    watched: Monitor | Replay,
    name: str,
    most: int | None,
    patience: float,
    total: Total,
    json: bool,
) -> str | None:
    """Show what comes until it ends; why it ended before ``most`` samples, if it did."""
    from workbench.terminal import emit, note, out
    from workbench.terminal_serving import LATELY, live_page, sample_line, stale_words

    told: set[Any] = set()  # troubles that were said once

    def trouble() -> None:
        since = watched.stale_since
        if since is not None and since not in told:
            told.add(since)
            if json:
                emit({"kind": "stale", "since": since, "error": watched.error})
            else:
                note(stale_words(watched))
        _recording(watched, told)

    if json or not sys.stdout.isatty():
        for new in _new(watched, most):
            for sample in new:
                total.add(sample)
                if json:
                    emit({"kind": "sample", **sample.to_dict(), **sample.figures()})
                else:
                    print(sample_line(sample), flush=True)
            trouble()
            if (gone := _gone(watched, most, patience, total)) is not None:
                return gone
        return None
    from rich.live import Live

    lately: deque[Sample] = deque()
    with Live(console=out(), auto_refresh=False, transient=True) as live:
        shown = 0.0
        for new in _new(watched, most):
            for sample in new:
                total.add(sample)
                lately.append(sample)
                while lately[0].at <= sample.at - LATELY and len(lately) > 1:
                    lately.popleft()
            now = time.monotonic()
            if new or now - shown > 1:
                shown = now
                live.update(live_page(name, watched, list(lately), total), refresh=True)
            _recording(watched, told)
            if (gone := _gone(watched, most, patience, total)) is not None:
                return gone
    return None


def _gone(watched: Monitor | Replay, most: int | None, patience: float, total: Total) -> str | None:
    """That so many samples will not come, in a sentence: somebody waits for them who may not be
    there to end it."""
    since = watched.stale_since
    if most is None or since is None or total.samples >= most:
        return None
    # On a clock that may be set meanwhile; one that was set back is waited for.
    if time.time() - since < patience:
        return None
    return (
        f"{total.samples:,} of {most:,} samples came, and no page for {patience:g} s "
        f"({watched.error or 'the server does not answer'}); start the server, or wait longer: "
        "--patience"
    )


def _new(watched: Monitor | Replay, most: int | None) -> Iterator[list[Sample]]:
    """What came since the last look, also when that is nothing; ends with the last sample."""
    seen = 0
    while True:
        running = watched.running  # first: what comes after it is looked at once more
        new, seen = watched.since(seen)
        if most is not None and seen >= most:
            yield new[: len(new) - (seen - most)]
            return
        yield new
        if not running and not new:
            return
        time.sleep(_POLL)


def _recording(watched: Monitor | Replay, told: set[Any]) -> None:
    """Say once that recording ended by itself."""
    from workbench.terminal import note

    trouble = getattr(watched, "recording_trouble", None)
    if trouble is not None and trouble not in told:
        told.add(trouble)
        note(trouble)


def _sum_up(watched: Monitor | Replay, total: Total, json: bool) -> None:
    from workbench.terminal import emit, out
    from workbench.terminal_serving import slot_bars, summary_lines

    if json:
        whole = total.whole
        counts = {} if whole is None else {**whole.to_dict(), **whole.figures()}
        emit(
            counts
            | {
                "kind": "summary",
                "samples": total.samples,
                "restarts": total.restarts,
                "seconds": total.seconds,
                "tokens_per_second": total.rate("generation_tokens"),
                "prompt_tokens_per_second": total.rate("prompt_tokens"),
                "source": watched.source,
            }
        )
        return
    for line in summary_lines(total, watched.source):
        print(line)
    if sys.stdout.isatty() and total.whole is not None:
        for bar in slot_bars(total.whole):
            out().print(bar)
