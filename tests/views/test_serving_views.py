"""Figures and the page of a serving engine: numbers that were counted elsewhere, gaps, text."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving.metrics_pages import PretendServer, wait_until
from serving.metrics_server import Child, serving
from views import narrow
from workbench import views
from workbench.errors import ServingError
from workbench.serving.monitor.intervals import Intervals, pooled
from workbench.serving.monitor.metrics_page import read_page
from workbench.serving.monitor.monitor import Monitor
from workbench.serving.monitor.monitor_file import SampleWriter, header, read_recording
from workbench.serving.monitor.monitor_replay import Replay, replay
from workbench.serving.monitor.sample import PER_SCHEDULED, Sample
from workbench.serving.monitor.spread import Spread
from workbench.views.background import stop_after_interrupted_cell, stop_all
from workbench.views.serving_board import HERTZ, Serving
from workbench.views.serving_board import serving as board_of
from workbench.views.serving_figures import (
    place_words,
    serving_acceptance,
    serving_latency,
    serving_load,
    serving_throughput,
)
from workbench.views.serving_page import ALL, page_figures, title_of
from workbench.views.view import View

HOSTILE = "<script>alert(1)</script>"
FIGURES = (serving_throughput, serving_acceptance, serving_latency, serving_load)


@pytest.fixture(autouse=True)
def _nothing_left_running() -> Iterator[None]:
    yield
    stop_all()
    wait_until(
        lambda: not [t for t in threading.enumerate() if t.name.startswith("workbench-")], 15
    )


def run(model: str = "beam-tiny", engines: tuple[str, ...] = ("0",)) -> list[Sample]:
    """Eight samples of 0.5 s: two requests in each of the first three, a gap of 5 s, a restart."""
    intervals, now = Intervals(), 1000.0
    samples = []

    def look(server: PretendServer, seconds: float = 0.5, missed: int = 0) -> None:
        nonlocal now
        now += seconds
        sample = intervals.add(read_page(server.page()), at=now, clock=now, missed=missed)
        if sample is not None:
            samples.append(sample)

    server = PretendServer(model=model, engines=engines, process=False, further=False)
    look(server)
    for n in range(3):
        server.request([3, n, 0], ttft=0.03, step=0.012, prompt=20)
        server.request([1], ttft=0.3, step=0.012, prompt=20, engine=engines[-1])
        server.set(running=n + 1, waiting=2 * n, cache=0.1 * (n + 1))
        look(server)
    look(server, 5.0, missed=9)
    server.preempt(2)
    look(server)
    server = PretendServer(model=model, engines=engines, process=False, further=False)
    server.request([2])
    look(server)
    server.request([0, 0])
    look(server)
    look(server)
    return samples


def lines(view: View) -> dict[str, tuple[list[float], list[float]]]:
    """x and y of each named line, NaN as None."""
    found = {}
    for trace in view.figure.data:
        name = (trace.name or "").split(">")[-2].removesuffix("</span") if trace.name else ""
        if name:
            found[name] = tuple(
                [None if math.isnan(v) else round(float(v), 4) for v in axis]
                for axis in (trace.x, trace.y)
            )
    return found


# -- figures --------------------------------------------------------------------------------------


def test_throughput_is_first_and_right() -> None:
    view = serving_throughput(run())
    drawn = lines(view)
    assert next(iter(drawn)) == "given out"
    x, y = drawn["given out"]
    tokens = [1 + 3 + 3 + n + 3 for n in range(3)]  # first, [3, n, 0] and one each; first, 1 + 1
    assert y == [*(2 * t for t in tokens), None, 0.0, 0.0, None, None, 6.0, 0.0]
    assert x == [0.5, 1.0, 1.5, None, 6.5, 7.0, None, 7.5, 8.0, 8.5]
    length = drawn["acceptance length"][1]
    wanted = [1 + (3 + n + 0 + 1) / 4 for n in range(3)]
    assert length[:3] == [round(w, 4) for w in wanted]
    assert length[3:7] == [None, None, None, None]  # a gap, then nothing was drafted, then a gap
    assert length[7:] == [3.0, 1.0, None]
    first, second = view.figure.layout.annotations[:2]
    assert "throughput" in first.text
    assert "acceptance length" in second.text
    title = view.figure.layout.title.subtitle.text
    assert "measured here" in title
    assert "restarted 1 time" in title.replace("<br>", " ")
    # Of the samples whose time is known: three, and the one after the restart.
    timed = sum(tokens) + 3
    speed = timed / (3 * 0.5 + 5 + 0.5 + 1.0)
    assert f"{speed:,.{1 if speed < 100 else 0}f} tokens/s" in str(view)


def test_acceptance_by_slot_is_that_of_the_local_decoder() -> None:
    samples = run()
    view = serving_acceptance(samples)
    # Accepted runs of every event, the restarted server's included.
    runs = [r for n in range(3) for r in (3, n, 0, 1)] + [2, 0, 0]
    drawn = lines(view)
    conditional = [sum(r > i for r in runs) / sum(r >= i for r in runs) for i in range(3)]
    assert drawn["conditional"][1] == [round(c, 4) for c in conditional]
    assert "verified share" not in drawn  # an engine does not say what it verified
    assert PER_SCHEDULED in view.figure.layout.title.subtitle.text.replace("<br>", " ")
    assert f"n = {len(runs)} draft events" in str(view)


def test_views_of_the_local_decoder_take_what_an_engine_counted() -> None:
    whole = pooled(run())
    assert whole is not None
    acceptance = whole.acceptance
    assert acceptance is not None
    runs = [r for n in range(3) for r in (3, n, 0, 1)] + [2, 0, 0]
    histogram = views.acceptance_histogram(acceptance)
    assert list(histogram.figure.data[0].y) == [runs.count(n) for n in range(4)]
    for view in (
        views.acceptance_curves(acceptance),
        views.acceptance_by({"an engine": acceptance}, "Engines"),
        views.compare_runs({"an engine": acceptance, "the same": acceptance}),
    ):
        assert "2.13" in str(view)


def test_blocks_that_were_shorter_make_lower_bounds() -> None:
    """An engine that drafts what it finds: two events of three slots, four drafts in all."""
    sample = Sample(at=1, seconds=1, drafts=2, draft_tokens=4, accepted_tokens=2,
                    accepted_at=(1, 1, 0))  # fmt: skip
    assert "2.0 of 3 slots scheduled, so conditionals are lower bounds" in str(
        serving_acceptance([sample])
    )
    assert "lower bounds" not in str(serving_acceptance(run()))
    nearly = Sample(at=1, seconds=1, drafts=100, draft_tokens=299, accepted_tokens=2,
                    accepted_at=(1, 1, 0))  # fmt: skip
    assert "1 slot not scheduled, so conditionals are lower bounds" in str(
        serving_acceptance([nearly])
    )


def test_times_are_percentiles_of_buckets() -> None:
    view = serving_latency(run())
    found = [(trace.name, list(trace.y)) for trace in view.figure.data]
    median, tail = found[0][1], found[1][1]
    # One of two between 20 and 40 ms: the median is the upper end; p99 is 98 % into 250 to 500 ms.
    assert median[0] == pytest.approx(40)
    assert tail[0] == pytest.approx(250 + 250 * 0.98)
    headings = [note.text for note in view.figure.layout.annotations]
    assert any("TTFT" in text for text in headings)
    assert any("TPOT" in text for text in headings)
    assert any("ITL" in text for text in headings)
    assert view.figure.layout.yaxis.title.text.count("ms") == 1
    assert "interpolated within the engine's buckets" in str(view)
    assert "TTFT: p50" in str(view)


def test_a_percentile_in_the_open_bucket_is_told() -> None:
    server = PretendServer(process=False, further=False)
    intervals = Intervals()
    intervals.add(read_page(server.page()), at=1, clock=1)
    server.request([1], ttft=99999.0)
    sample = intervals.add(read_page(server.page()), at=2, clock=2)
    assert sample is not None
    view = serving_latency([sample])
    assert "> 2,560 s" in str(view)
    assert "it is more" in view.figure.layout.title.subtitle.text.replace("<br>", " ")


def test_nothing_is_made_up_within_the_first_bucket() -> None:
    """TPOT of 1.5 ms: buckets begin with 0 to 10 ms, the mean is exact."""
    quick = Spread(((0.0, 0.01, 40),), 40 * 0.0015)
    sample = Sample(at=2, seconds=1, tpot=quick)
    tile = next(t for t in page_figures([sample], None, 0)["tiles"] if t[0] == "TPOT p50")
    assert tile[1:] == ["< 10 ms", "mean 1.5 ms · p99 < 10 ms · n = 40"]
    view = serving_latency([sample])
    assert "TPOT: p50 < 10 ms, p99 < 10 ms, mean 1.5 ms (n = 40)" in str(view)
    assert list(lines(view)["mean"][1]) == [1.5]
    assert page_figures([sample], None, 0)["lines"]["tpot"][0] == [0.0, None, None, 1.5]
    assert "p50" not in lines(view)  # a line at 5 ms would be no measurement
    subtitle = view.figure.layout.title.subtitle.text.replace("<br>", " ")
    assert "percentiles in the first bucket are not drawn" in subtitle
    mixed = Spread(((0.0, 0.01, 1), (0.05, 0.1, 3)), 0.2)
    assert place_words(mixed, 0.99) == "99.3 ms"  # 0.05 + 0.05 · (3.96 - 1) / 3
    assert place_words(Spread(), 0.5) == ""


def test_times_of_several_orders_have_a_logarithmic_scale() -> None:
    slow, quick = Spread(((2.0, 3.0, 1),), 2.5), Spread(((0.02, 0.04, 1),), 0.03)
    axes = serving_latency([Sample(at=n, seconds=1, ttft=s) for n, s in ((1, slow), (2, quick))])
    assert axes.figure.layout.yaxis.type == "log"
    assert "ms" in axes.figure.layout.yaxis.title.text
    same = serving_latency([Sample(at=n, seconds=1, ttft=quick) for n in (1, 2)])
    assert same.figure.layout.yaxis.type is None


def test_load_has_requests_cache_and_preemptions() -> None:
    drawn = lines(serving_load(run()))
    assert drawn["running"][1][:3] == [1, 2, 3]
    assert drawn["waiting"][1][:3] == [0, 2, 4]
    assert drawn["KV cache"][1][:3] == pytest.approx([0.1, 0.2, 0.3])
    assert [v for v in drawn["preempted"][1] if v is not None] == [0, 0, 0, 0, 2, 2, 2, 2]
    assert "KV cache at most 30.0%" in str(serving_load(run()))


def test_counts_have_no_halves() -> None:
    layout = serving_load(run()).figure.layout  # at most two preemptions, four that wait
    assert (layout.yaxis.dtick, layout.yaxis2.dtick, layout.yaxis3.dtick) == (None, None, 1)


def test_one_engine_can_be_chosen() -> None:
    samples = run(engines=("0", "1"))
    both, first, second = (
        lines(serving_throughput(samples, engine=engine))["given out"][1][:3]
        for engine in (None, "0", "1")
    )
    assert first == [2 * (1 + 3 + 3 + n) for n in range(3)]
    assert second == [6, 6, 6]
    assert both == [a + b for a, b in zip(first, second, strict=True)]
    assert "engine 1" in str(serving_throughput(samples, engine="1"))
    assert "there is no sample yet" in str(serving_throughput(samples, engine="7"))


def test_nothing_is_said_in_words() -> None:
    for figure in FIGURES:
        view = figure([])
        assert view.figure.layout.annotations[-1].text
        assert "no sample" in str(view) or "undefined" in str(view)
    bare = [Sample(at=1.0 + n, seconds=1.0) for n in range(3)]  # an engine that exports nothing
    for figure in FIGURES:
        assert str(figure(bare))
        assert figure(bare).figure.layout.annotations


def test_many_samples_stay_a_small_figure() -> None:
    samples = [
        Sample(at=1000 + 0.5 * n, seconds=0.5, generation_tokens=n % 7, kv_usage=0.5, running=1)
        for n in range(10_000)
    ]
    begin = time.process_time()
    view = serving_throughput(samples)
    assert time.process_time() - begin < 5
    assert len(json.dumps(view.figure.to_plotly_json(), default=lambda a: a.tolist())) < 60_000


def test_names_of_a_server_stay_text() -> None:
    samples = run(model=HOSTILE, engines=(HOSTILE, "1"))
    for figure in FIGURES:
        view = figure(samples, engine=HOSTILE, source=f"measured here {HOSTILE}")
        data = view._repr_mimebundle_()
        assert "<script" not in data["text/html"]
        assert "<script" not in json.dumps(view.figure.to_plotly_json(), default=str)


@pytest.mark.parametrize("figure", FIGURES)
def test_figures_fit_a_narrow_page(figure: Any) -> None:
    view = figure(run(), source="recorded: NVIDIA H200, vLLM 0.33.0, beam-tiny, 2026-11-30")
    narrow.check(view, figure.__name__)
    subtitle = view.figure.layout.title.subtitle.text
    assert not re.search(r"(p50|p99|mean|[<>=]|\bn)<br>", subtitle)
    # What the figure grows by its lines its panels keep: the plot is as high as with few words.
    short = figure(run(), source="recorded")
    inner = [v.figure.layout.height - v.figure.layout.margin.t - v.figure.layout.margin.b
             for v in (view, short)]  # fmt: skip
    assert inner[0] == inner[1] > 150


@pytest.mark.parametrize("name", ["06_serving", "07_full_beam_on_blackwell"])
def test_notebooks_of_serving_lead_on_and_fit(name: str) -> None:
    folder = Path(__file__).resolve().parents[2] / "notebooks"
    cells = json.loads((folder / f"{name}.ipynb").read_text("utf-8"))["cells"]
    words = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert not re.search(r"`0\d_\w+(\.ipynb)?`", words)  # named, but not to be clicked
    for target, _, heading in re.findall(r"\]\((\w+\.ipynb)(#([^)]*))?\)", words):
        assert (folder / target).is_file()
        there = (folder / target).read_text("utf-8")
        assert not heading or f"## {heading.replace('-', ' ')}\\n" in there or (
            f'"## {heading.replace("-", " ")}"' in there
        )  # fmt: skip
    # Columns of text fit beside the file browser in a window of 1000 px.
    tables = [cell for cell in cells if re.search(r":<\d+\}", "".join(cell["source"]))]
    lines = [
        line for cell in tables for output in cell["outputs"]
        for line in "".join(output.get("text", "")).splitlines()
    ]  # fmt: skip
    assert max(map(len, lines), default=0) <= 71
    assert bool(lines) == (name == "06_serving")


# -- the page -------------------------------------------------------------------------------------


class Page:
    """What a page would have been sent."""

    def __init__(self, board: Serving) -> None:
        self.messages: list[dict[str, Any]] = []
        self.times: list[float] = []
        board.widget.send = self.take

    def take(self, message: dict[str, Any]) -> None:
        json.dumps(message, allow_nan=False)  # what a page cannot read is never sent
        self.messages.append(message)
        self.times.append(time.monotonic())

    @property
    def updates(self) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["kind"] == "update"]

    @property
    def last(self) -> dict[str, Any]:
        return self.updates[-1]

    def tile(self, label: str) -> list[str]:
        return next(tile for tile in self.last["tiles"] if tile[0] == label)


def press(board: Serving, kind: str, **more: Any) -> None:
    board._message(None, {"kind": kind, **more}, None)


def recorded(path: Path, samples: list[Sample]) -> Path:
    from workbench.serving.address import Address

    with SampleWriter(path, header(Address.of("http://127.0.0.1:1"), hertz=2.0)) as writer:
        writer.server("0.33.0")
        for sample in samples:
            writer.write(sample)
    return path


def test_a_page_says_what_the_figures_say() -> None:
    samples = run()
    told = page_figures(samples, None, 0)
    tokens = sum(1 + 3 + 3 + n + 3 for n in range(3)) + 3
    tiles = {tile[0]: tile[1:] for tile in told["tiles"]}
    assert tiles["tokens/s"][0] == f"{tokens / 8:,.1f}"
    runs = [r for n in range(3) for r in (3, n, 0, 1)] + [2, 0, 0]
    assert tiles["acceptance length"] == [f"{1 + sum(runs) / len(runs):.2f}", "15 draft events"]
    assert tiles["preemptions"][0] == "2"
    assert told["acceptance"]["events"] == 15
    assert [row[0] for row in told["acceptance"]["survival"]] == pytest.approx(
        [sum(r > i for r in runs) / 15 for i in range(3)]
    )
    assert told["note"] == (
        "lines are broken where the server was restarted 1 time and 9 pages did not come · "
        + PER_SCHEDULED
    )
    assert page_figures(samples, None, 0.9)["note"] == PER_SCHEDULED  # that was before
    speed = told["lines"]["speed"]
    assert [len(row) for row in speed] == [2, 2, 2, 0, 2, 2, 0, 2, 2, 2]
    assert speed[0] == [-8.0, 2 * 10.0]
    assert told["lines"]["prompt"][0] == [-8.0, 2 * 40.0]
    assert speed[7][1:] == [None]  # after the restart
    lately = page_figures(samples, None, 1.2)  # the last three samples: the restarted server
    assert lately["acceptance"]["events"] == 3


def test_the_page_begins_with_what_an_engine_is_judged_by() -> None:
    told = page_figures(run(), None, 0)
    assert [tile[0] for tile in told["tiles"]][:6] == [
        "tokens/s", "TPOT p50", "TTFT p50", "acceptance length", "running", "KV cache in use",
    ]  # fmt: skip
    busy = [Sample(at=n, seconds=1, generation_tokens=2708, prompt_tokens=31) for n in (1, 2)]
    tiles = {tile[0]: tile[1] for tile in page_figures(busy, None, 0)["tiles"]}
    # No more digits than stand still.
    assert (tiles["tokens/s"], tiles["prefill tokens/s"]) == ("2,708", "31.0")
    assert title_of(run(), "http://127.0.0.1:8000") == "beam-tiny at http://127.0.0.1:8000"
    assert title_of([], "http://127.0.0.1:8000") == "http://127.0.0.1:8000"
    assert title_of(run(), None) == "Recording of beam-tiny"
    assert len(title_of(run(model="M" * 1000), "x")) < 100
    assert "\u202e" not in title_of(run(model="\u202ebeam"), "x")


def test_prefill_does_not_flatten_what_is_given_out() -> None:
    axes = {t.name.split(">")[1].split("<")[0]: t.yaxis
            for t in serving_throughput(run()).figure.data}  # fmt: skip
    assert axes["given out"] != axes["prefilled"]


def test_a_recording_in_the_page(tmp_path: Path) -> None:
    samples = run()
    path = recorded(tmp_path / "run.jsonl", samples)
    for what in (str(path), path, read_recording(path), replay(path, speed=200)):
        board = board_of(what, window="all", speed=200)
        if not isinstance(what, Replay):  # a saved notebook says what is in the recording
            assert "no sample yet" not in board.text
            assert f"{len(samples)} samples" in board._static_html()
            assert "is replayed here" in board._static_html()
        page = Page(board)
        assert board.monitor is None
        press(board, "ready")
        wait_until(lambda board=board: board.widget.state == "ended")
        board.stop()
        assert board.samples == samples
        assert "end of the recording" in board.widget.status
        assert "recorded" in board.widget.status
        assert page.last["lines"] == page_figures(samples, None, 0)["lines"]
        assert page.tile("acceptance length")[2] == "15 draft events"
        assert not page.last["live"]
        assert page.last["title"] == "Recording of beam-tiny"
        assert board.widget.choices["start"] == "Replay"
        assert f"acceptance length {1 + 17 / 15:.2f}" in board.text


def test_a_live_page_follows_at_most_four_times_a_second() -> None:
    pretend = PretendServer(engines=("0", "1"), further=False)
    with serving(pretend.page) as server:
        board = board_of(server.url, hertz=20, window="all")
        page = Page(board)
        assert server.times == []  # nobody looks: nothing is asked
        press(board, "ready")
        wait_until(lambda: len(page.updates) >= 3)
        pretend.request([3, 0], engine="1")
        wait_until(lambda: page.last["acceptance"] and page.last["acceptance"]["events"] == 2)
        assert page.tile("acceptance length")[1] == "2.50"
        assert page.last["live"]
        assert page.last["stale"] is None
        wait_until(lambda: len(page.updates) >= 8)
        gaps = [b - a for (a, m), (b, n) in pairwise(zip(page.times, page.messages, strict=True))
                if m["kind"] == n["kind"] == "update"][1:]  # fmt: skip
        assert min(gaps) > 0.9 / HERTZ
        # One engine alone.
        assert board.widget.choices["engines"] == [ALL, "0", "1"]
        press(board, "settings", settings={"window": "30 s", "engine": "0"})
        assert page.last["acceptance"]["events"] == 0
        press(board, "settings", settings={"window": "3 days", "engine": "9"})
        assert board.widget.settings == {"window": "30 s", "engine": "0"}
        press(board, "settings", settings={"window": "all", "engine": "1"})
        assert page.last["acceptance"]["events"] == 2
        # The page holds, the monitor goes on.
        press(board, "pause")
        time.sleep(0.1)
        count, seen = len(page.updates), board.monitor.seen  # type: ignore[union-attr]
        wait_until(lambda: board.monitor.seen > seen + 5)  # type: ignore[union-attr]
        assert len(page.updates) == count
        assert board.widget.state == "paused"
        press(board, "resume")
        wait_until(lambda: len(page.updates) > count)
        press(board, "stop")
        wait_until(lambda: board.widget.state == "ended")
        assert not board.monitor.running  # type: ignore[union-attr]
        asked = len(server.times)
        time.sleep(0.2)
        assert len(server.times) == asked
        assert "stopped" in board.widget.status
        assert "live" not in board.widget.status


def test_a_server_that_dies_is_stale_in_the_page_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Child() as first:
        board = board_of(first.url, hertz=20, window="all")
        page = Page(board)
        press(board, "ready")
        wait_until(lambda: page.updates and page.last["tiles"])
        press(board, "record")
        wait_until(lambda: page.last["recording"])
        assert "recording into serving-" in page.last["status"]
        first.kill()
        wait_until(lambda: page.last["stale"] is not None)
        assert "nothing answers" in page.last["why"] or "closed" in page.last["why"]
        assert "live" not in page.last["status"]  # what is stale is not called live
        assert page.last["status"].startswith("measured here")
        with Child(first.port):
            wait_until(lambda: page.last["stale"] is None, 30)
            assert "measured here, live" in page.last["status"]
            wait_until(lambda: any(s.restarted for s in board.samples))
            press(board, "record")
            wait_until(lambda: not page.last["recording"])
            press(board, "stop")
            wait_until(lambda: board.widget.state == "ended")
    (path,) = tmp_path.iterdir()
    recording = read_recording(path)
    assert any(sample.restarted for sample in recording.samples)
    assert [m["kind"] for m in page.messages].count("heard") == 3


def test_a_monitor_that_was_given_goes_on_without_its_page() -> None:
    pretend = PretendServer(further=False)
    with serving(pretend.page) as server, Monitor(server.url, hertz=20) as monitor:
        board = board_of(monitor)
        page = Page(board)
        press(board, "ready")
        wait_until(lambda: page.updates and page.last["tiles"])
        board.stop()
        assert monitor.running
        seen = monitor.seen
        monitor.wait(seen + 2, 20)
        press(board, "start")  # and the page can follow again
        wait_until(lambda: board.widget.state == "running" and page.last["tiles"])
        stop_after_interrupted_cell(SimpleNamespace(error_in_exec=KeyboardInterrupt()))
        wait_until(lambda: board.widget.state == "ended")
        assert monitor.running


def test_a_server_that_was_never_there_has_no_sample_and_no_figures() -> None:
    board = board_of("http://127.0.0.1:9", hertz=20)
    page = Page(board)
    press(board, "ready")
    wait_until(lambda: page.updates and page.last["stale"] is not None)
    assert page.last["status"].startswith("no sample yet")
    assert page.last["title"] == "http://127.0.0.1:9"
    assert page.last["tiles"] == []
    board.stop()


def test_the_page_of_one_server_ends_the_one_before() -> None:
    pretend = PretendServer(further=False)
    with serving(pretend.page) as server:
        boards = [board_of(server.url, hertz=20) for _ in range(2)]
        pages = [Page(board) for board in boards]
        for board, page in zip(boards, pages, strict=True):
            press(board, "ready")
            wait_until(lambda page=page: bool(page.updates))
        wait_until(lambda: boards[0].widget.state == "ended")
        assert boards[1].widget.state == "running"


def test_a_page_that_is_held_says_that_it_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pretend = PretendServer(further=False)
    with serving(pretend.page) as server:
        board = board_of(server.url, hertz=20)
        page = Page(board)
        press(board, "ready")
        wait_until(lambda: bool(page.updates))
        press(board, "pause")
        press(board, "record")
        assert page.last["recording"]
        assert "recording into" in page.last["status"]
        press(board, "record")
        assert not page.last["recording"]
        assert board.widget.state == "paused"
        board.stop()


def test_a_recording_that_cannot_begin_is_said_and_nothing_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda *_: "taken.jsonl")
    (tmp_path / "taken.jsonl").write_text("mine")
    pretend = PretendServer(further=False)
    with serving(pretend.page) as server:
        board = board_of(server.url, hertz=20)
        page = Page(board)
        press(board, "record")
        press(board, "ready")
        wait_until(lambda: bool(page.updates))
        press(board, "record")
        wait_until(lambda: "exists already" in page.last["status"])
        assert board.widget.state == "running"
        with pytest.raises(ServingError, match="exists already"):
            board.record()
    assert (tmp_path / "taken.jsonl").read_text() == "mine"


@pytest.mark.parametrize(
    ("what", "more", "words"),
    [
        ("http://example.org", {}, "not this machine"),
        ("no such.jsonl", {}, "cannot be read"),
        ("http://127.0.0.1:9", {"window": "an hour"}, "window is one of"),
        ("http://127.0.0.1:9", {"hertz": 0}, "once an hour"),
        ("http://127.0.0.1:9", {"keep": -1}, "number of samples"),
    ],
)
def test_what_cannot_be_shown(what: str, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ServingError, match=words):
        board_of(what, **more)


def test_what_a_page_sends_is_not_trusted() -> None:
    board = board_of("http://127.0.0.1:9", autostart=False)
    page = Page(board)
    for content in (None, "start", {}, {"kind": 3}, {"kind": "settings"},
                    {"kind": "settings", "settings": [1]},
                    {"kind": "settings", "settings": {"window": ["all"], "engine": {}}},
                    {"kind": "stop"}, {"kind": "pause"}, {"kind": "resume"},
                    {"kind": "ready"}):  # fmt: skip
        board._message(None, content, None)
    assert board.widget.state == "ready"
    assert board.monitor is None
    assert page.updates == []


def test_a_saved_notebook_keeps_text_only() -> None:
    board = board_of("http://127.0.0.1:9")
    html = board._static_html()
    assert "no sample yet" in html
    bundle = board._repr_mimebundle_()
    assert bundle["text/html"] == html
    assert "application/vnd.jupyter.widget-view+json" in bundle
    board.monitor = SimpleNamespace(samples=run(model=HOSTILE))  # type: ignore[assignment]
    assert "<script" not in board._static_html()
    assert "&lt;script&gt;" in board._static_html()
