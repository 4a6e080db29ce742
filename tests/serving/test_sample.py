"""Samples: what was added between two pages, compared with the requests made in between."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import fields, replace
from math import inf, isfinite
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving import metrics_pages
from serving.metrics_pages import Counted, PretendServer, bucketed, realistic
from workbench.serving.monitor.intervals import Intervals, Total, pooled, rate, runs, together
from workbench.serving.monitor.metrics_page import read_page
from workbench.serving.monitor.sample import COUNTS, SPREADS, Sample
from workbench.serving.monitor.spread import Percentile, Spread, duration, spread_sum
from workbench.spec.metrics import Tally
from workbench.spec.step import RequestStep

BOUNDS = {"ttft": metrics_pages.TTFT, "itl": metrics_pages.PER_TOKEN,
          "tpot": metrics_pages.PER_TOKEN, "e2e": metrics_pages.LATENCY}  # fmt: skip


class Watch:
    """Pages of servers, one a second."""

    def __init__(self) -> None:
        self.intervals, self.now = Intervals(), 1000.0

    def look(self, server: PretendServer, seconds: float = 1.0, missed: int = 0) -> Sample | None:
        self.now += seconds
        page = read_page(server.page())
        return self.intervals.add(page, at=self.now, clock=self.now - 500, missed=missed)

    def see(self, server: PretendServer, seconds: float = 1.0, missed: int = 0) -> Sample:
        sample = self.look(server, seconds, missed)
        assert sample is not None
        nothing_negative(sample)
        return sample


def nothing_negative(sample: Sample) -> None:
    for name in COUNTS:
        assert (getattr(sample, name) or 0) >= 0, name
    assert all(n >= 0 for n in (*sample.accepted_at, *(sample.finished or {}).values()))
    for name in SPREADS:
        spread = getattr(sample, name)
        assert spread is None or all(count > 0 for *_, count in spread.buckets)
        assert spread is None or spread.seconds is None or spread.seconds >= 0
    assert sample.seconds >= 0
    acceptance = sample.acceptance
    if acceptance is not None:
        assert min(acceptance.histogram) >= 0
        assert acceptance.drafted >= acceptance.accepted
        str(acceptance)  # bands of every rate
    json.dumps([sample.to_dict(), sample.figures()], allow_nan=False)
    for inner in sample.engines:
        nothing_negative(inner)


def same_spread(spread: Spread | None, values: Sequence[float], bounds: Sequence[float]) -> None:
    assert spread is not None
    edges = [0.0, *bounds, inf]
    counts = bucketed(values, bounds)
    assert [b for b in zip(edges, edges[1:], counts, strict=False) if b[2]] == [*spread.buckets]
    assert spread.seconds == pytest.approx(sum(values), abs=1e-6)


# -- one interval ---------------------------------------------------------------------------------


def test_a_sample_is_what_was_added() -> None:
    server = realistic(slots=3)  # 40 requests before anybody looked
    watch = Watch()
    assert watch.look(server) is None
    server.request([3, 0, 2], prompt=40, cached=16, ttft=0.03, step=0.012)
    server.request([1], prompt=7, ttft=1.7, step=0.4, finish="length")
    server.preempt()
    server.set(running=5, waiting=2, cache=0.75)
    sample = watch.see(server, 0.5)
    assert (sample.at, sample.seconds, sample.engine) == (1001.5, 0.5, None)
    assert (sample.prompt_tokens, sample.generation_tokens) == (47, (1 + 4 + 1 + 3) + (1 + 2))
    assert (sample.preemptions, sample.prefix_queries, sample.prefix_hits) == (1, 47, 16)
    assert (sample.drafts, sample.draft_tokens, sample.accepted_tokens) == (4, 12, 6)
    assert sample.accepted_at == (3, 2, 1)
    assert {k: n for k, n in (sample.finished or {}).items() if n} == {"stop": 1, "length": 1}
    assert (sample.running, sample.waiting, sample.kv_usage) == (5, 2, 0.75)
    assert sample.tokens_per_second == 12 / 0.5
    assert sample.prompt_tokens_per_second == 47 / 0.5
    assert sample.acceptance_length == 1 + 6 / 4
    assert sample.prefix_hit_rate == 16 / 47
    assert not sample.restarted
    same_spread(sample.ttft, [0.03, 1.7], metrics_pages.TTFT)
    same_spread(sample.itl, [0.012] * 3 + [0.4], metrics_pages.PER_TOKEN)
    same_spread(sample.tpot, [0.012 * 3 / 8, 0.4 / 2], metrics_pages.PER_TOKEN)
    same_spread(sample.e2e, [0.03 + 3 * 0.012, 2.1], metrics_pages.LATENCY)
    quiet = watch.see(server)
    assert all(getattr(quiet, name) == 0 for name in COUNTS)
    assert quiet.acceptance_length is None  # of nothing, not 1
    assert quiet.ttft == Spread((), 0.0)
    assert quiet.ttft.percentile(0.5) is None
    assert quiet.tokens_per_second == 0


def tallied(runs_: Sequence[int], slots: int) -> Any:
    """The same events counted by the local decoder's tally."""
    tally = Tally(slots)
    for index, run in enumerate(runs_):
        kinds = ("accepted",) * run + ("bonus" if run == slots else "corrected",)
        tally.add_request(
            RequestStep(
                request=0, position=index, drafted=(7,) * slots, admitted=slots, accepted=run,
                token_ids=(7,) * (run + 1), kinds=kinds,
            )
        )  # fmt: skip
    return tally.acceptance()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=30))
def test_acceptance_is_what_the_tally_counts(accepted: list[int]) -> None:
    server = PretendServer(slots=4, process=False, further=False)
    watch = Watch()
    watch.look(server)
    server.request(accepted)
    found, wanted = watch.see(server).acceptance, tallied(accepted, 4)
    assert found is not None
    for name in ("events", "drafted", "admitted", "accepted", "trimmed", "rejected", "histogram",
                 "accepted_at", "reached_at", "emitted", "cut", "plain", "first", "length_pooled",
                 "rate_drafted", "survival", "conditional"):  # fmt: skip
        assert getattr(found, name) == getattr(wanted, name), name
    # What an engine does not say is not known: neither how much was verified, nor by whom.
    assert found.verified_share == (None,) * 4
    assert (found.requests, found.length_requests) == (0, None)


def test_without_counters_of_drafting_there_is_no_acceptance() -> None:
    server = PretendServer(slots=0)
    watch = Watch()
    watch.look(server)
    server.request([0, 0])
    sample = watch.see(server)
    assert sample.acceptance is None
    assert sample.drafts is None
    assert sample.acceptance_length is None
    assert sample.generation_tokens == 3


def test_a_page_made_between_two_counters_gives_nothing_negative() -> None:
    server = PretendServer()
    watch = Watch()
    watch.look(server)
    server.request([3, 1])
    series = r"(?m)^(vllm:spec_decode_num_drafts_total\{[^}]*\}) 2\.0$"
    late, changed = re.subn(series, r"\1 1.0", server.page())
    assert changed == 1
    sample = watch.intervals.add(read_page(late), at=1002, clock=502)
    assert sample is not None
    nothing_negative(sample)
    assert sample.drafts == 1
    assert sample.accepted_at == (2, 1, 1)
    acceptance = sample.acceptance
    assert acceptance is not None
    assert acceptance.accepted_at == (1, 1, 1)
    assert acceptance.conditional == (1.0, 1.0, 1.0)


def test_a_count_that_was_unusable_is_unknown_for_two_intervals() -> None:
    server = PretendServer()
    watch = Watch()
    watch.look(server)
    server.request([1])
    good = server.page()
    bad = good.replace(
        'vllm:prompt_tokens_total{engine="0",model_name="beam-tiny"} 10.0',
        'vllm:prompt_tokens_total{engine="0",model_name="beam-tiny"} NaN',
    )
    assert bad != good
    sample = watch.intervals.add(read_page(bad), at=1002, clock=502)
    assert sample is not None
    assert sample.prompt_tokens is None
    assert sample.unusable == ("prompt_tokens",)
    assert sample.generation_tokens == 3
    assert not sample.restarted
    again = watch.see(server, 2)
    assert again.prompt_tokens is None  # nobody knows since when
    assert not again.restarted
    server.request([1], prompt=4)
    assert watch.see(server).prompt_tokens == 4


# -- restarts -------------------------------------------------------------------------------------


def test_a_restart_begins_a_new_series() -> None:
    watch = Watch()
    server = realistic(slots=3)
    watch.look(server)
    server.request([2])
    assert watch.see(server).drafts == 1
    anew = PretendServer()
    anew.request([3, 3], prompt=5, ttft=0.07)
    sample = watch.see(anew, 30, missed=58)
    assert sample.restarted
    assert sample.missed == 58
    # What the new process counted, and no rate: nobody knows how long it took.
    assert (sample.drafts, sample.accepted_tokens, sample.prompt_tokens) == (2, 6, 5)
    assert sample.accepted_at == (2, 2, 2)
    same_spread(sample.ttft, [0.07], metrics_pages.TTFT)
    assert sample.tokens_per_second is None
    anew.request([1])
    after = watch.see(anew)
    assert not after.restarted
    assert after.drafts == 1


def test_a_restart_is_seen_though_every_count_grew() -> None:
    """A new server that did more in the meantime than the old one in all its life."""
    for process, created in ((True, False), (False, True)):
        watch = Watch()
        old, new = (PretendServer(process=process) for _ in range(2))
        old.request([1])
        for _ in range(5):
            new.request([1])

        def page(server: PretendServer, created: bool = created) -> Any:
            lines = server.page().splitlines(keepends=True)
            kept = [line for line in lines if created or "_created" not in line]
            return read_page("".join(kept))

        first, second = page(old), page(new)
        if process:  # both of this very process
            assert first.started is not None
            second = replace(second, started=first.started + 60)
        watch.intervals.add(first, at=1, clock=1)
        sample = watch.intervals.add(second, at=2, clock=2)
        assert sample is not None
        assert sample.restarted
        assert sample.drafts == 5


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["request", "look", "kill", "nothing"]), max_size=14), st.booleans()
)
def test_whatever_happens_counts_add_up(events: list[str], created: bool) -> None:
    """Over looks and restarts: what samples sum to is what was done since the first look, but for
    what a server did between its last look and its end."""
    watch = Watch()
    server, done, lost = PretendServer(process=False, further=False), 0, 0
    restarts = 0

    def look() -> Sample | None:
        watch.now += 1
        text = server.page()
        if not created:
            text = "\n".join(row for row in text.split("\n") if "_created" not in row)
        return watch.intervals.add(read_page(text), at=watch.now, clock=watch.now)

    look()
    samples: list[Sample | None] = []
    since = 0  # requests since the last look
    for event in events:
        if event == "request":
            server.request([2, 0])
            done += 1
            since += 1
        elif event == "kill":
            lost += since
            server, since = PretendServer(process=False, further=False), 0
            restarts += 1
        elif event == "look":
            samples.append(look())
            since = 0
    samples.append(look())
    known = [sample for sample in samples if sample is not None]
    for sample in known:
        nothing_negative(sample)
    total = sum(sample.drafts or 0 for sample in known)
    seen = sum(sample.restarted for sample in known)
    assert seen <= restarts
    if created:
        assert total == 2 * (done - lost)
        assert bool(seen) == bool(restarts)
    else:  # a new server that has at least as much looks like the old one
        assert total <= 2 * (done - lost)


# -- several engines ------------------------------------------------------------------------------


def test_engines_are_there_each_and_together() -> None:
    server = PretendServer(engines=("0", "1"))
    watch = Watch()
    watch.look(server)
    server.request([3, 1], engine="0", ttft=0.03, prompt=5)
    server.request([0], engine="1", ttft=0.5, prompt=7)
    server.set(running=2, waiting=0, cache=0.1, engine="0")
    server.set(running=3, waiting=4, cache=0.5, engine="1")
    both = watch.see(server, 2.0)
    first, second = both.of("0"), both.of("1")
    assert first is not None
    assert second is not None
    assert (first.drafts, second.drafts, both.drafts) == (2, 1, 3)
    assert (first.tokens_per_second, second.tokens_per_second) == (7 / 2, 2 / 2)
    assert both.tokens_per_second == 9 / 2
    assert (both.running, both.waiting) == (5, 4)
    assert both.kv_usage == pytest.approx(0.3)
    assert both.accepted_at == (2, 1, 1)
    same_spread(first.ttft, [0.03], metrics_pages.TTFT)
    same_spread(both.ttft, [0.03, 0.5], metrics_pages.TTFT)
    assert both.of(None) is both
    assert both.of("7") is None
    assert [s.engine for s in both.engines] == ["0", "1"]


def test_one_engine_of_two_started_anew_makes_the_sum_say_so() -> None:
    watch = Watch()
    old = PretendServer(engines=("0", "1"), process=False)
    old.request([1], engine="0")
    old.request([1], engine="1")
    watch.look(old)
    parts = [PretendServer(process=False), PretendServer(engines=("1",), process=False)]
    parts[1].request([3], engine="1")
    old.request([2, 2], engine="0")
    kept = [row for row in old.page().splitlines() if 'engine="1"' not in row]
    fresh = [row for row in parts[1].page().splitlines() if not row.startswith("#")]
    page = read_page("\n".join([*kept, *fresh]) + "\n")
    sample = watch.intervals.add(page, at=1002, clock=502)
    assert sample is not None
    nothing_negative(sample)
    assert [s.restarted for s in sample.engines] == [False, True]
    assert [s.drafts for s in sample.engines] == [2, 1]
    assert sample.restarted
    assert sample.tokens_per_second is None
    assert sample.engines[0].tokens_per_second is not None


def test_an_engine_that_comes_later_begins_with_its_first_page() -> None:
    watch = Watch()
    one = PretendServer(process=False)
    two = PretendServer(engines=("1",), process=False)
    two.request([3, 3], engine="1")
    watch.look(one)
    one.request([1])

    def look(*servers: PretendServer) -> Sample | None:
        watch.now += 1
        page = read_page("".join(server.page() for server in servers))
        return watch.intervals.add(page, at=watch.now, clock=watch.now)

    first = look(one, two)
    assert first is not None
    assert [s.engine for s in first.engines] == ["0"]
    assert first.drafts == 1
    two.request([2], engine="1")
    second = look(one, two)
    assert second is not None
    assert [(s.engine, s.drafts) for s in second.engines] == [("0", 0), ("1", 1)]
    third = look(one)  # it has gone
    assert third is not None
    assert [s.engine for s in third.engines] == ["0"]


def test_what_one_engine_does_not_have_the_sum_does_not_have() -> None:
    sample = Sample(at=1, seconds=1, engine="0", drafts=3, running=1, ttft=Spread())
    other = Sample(at=1, seconds=1, engine="1", drafts=None, running=2, ttft=None)
    both = together([sample, other])
    assert both.drafts is None
    assert both.ttft is None
    assert both.running == 3


# -- percentiles ----------------------------------------------------------------------------------


def spread_of(values: Sequence[float], bounds: Sequence[float]) -> Spread:
    edges = [0.0, *bounds, inf]
    counts = bucketed(values, bounds)
    buckets = zip(edges, edges[1:], counts, strict=False)
    return Spread(tuple(b for b in buckets if b[2]), sum(values))


TIMES = st.lists(st.floats(1e-4, 5000), min_size=1, max_size=80)
SHARE = st.floats(0, 1)


@given(TIMES, SHARE)
def test_a_percentile_lies_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    """The true one: the smallest value that at least that share of all do not exceed."""
    ordered = sorted(values)
    true = next(v for i, v in enumerate(ordered, 1) if i >= share * len(ordered))
    bounds = metrics_pages.TTFT
    at = int(np.searchsorted(bounds, true, side="left"))
    low, high = (0.0, *bounds, inf)[at], (*bounds, inf)[at]
    place = spread_of(values, bounds).percentile(share)
    assert place is not None
    assert place.beyond == (high == inf)
    if place.beyond:
        assert place.seconds == low == 2560
    else:
        assert low <= place.seconds <= high


@given(TIMES, SHARE)
def test_a_percentile_is_where_the_observations_spread_evenly_reach_it(
    values: list[float], share: float
) -> None:
    """Brute force: every observation laid out evenly in its bucket, the line through their ranks
    followed by hand."""
    bounds = metrics_pages.TTFT
    counts = bucketed(values, bounds)
    edges = [0.0, *bounds]
    place = spread_of(values, bounds).percentile(share)
    assert place is not None
    rank, below = share * len(values), 0
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        if count and below + count >= rank:
            points = np.linspace(low, high, count + 1)  # the k-th of them ends at point k
            wanted = float(np.interp(rank - below, np.arange(count + 1), points))
            assert place.seconds == pytest.approx(wanted, rel=1e-9, abs=1e-12)
            return
        below += count
    assert place.beyond


@given(TIMES)
def test_percentiles_rise_and_sums_of_spreads_are_those_of_all(values: list[float]) -> None:
    bounds = metrics_pages.PER_TOKEN
    whole = spread_of(values, bounds)
    places = [whole.percentile(share / 20) for share in range(21)]
    seconds = [place.seconds for place in places if place is not None]
    assert seconds == sorted(seconds)
    half = len(values) // 2
    parts = [spread_of(values[:half], bounds), spread_of(values[half:], bounds)]
    added = spread_sum(parts)
    assert added.buckets == whole.buckets
    assert added.seconds == pytest.approx(whole.seconds)
    assert whole.count == len(values)
    assert whole.mean == pytest.approx(sum(values) / len(values))


def test_a_worked_percentile() -> None:
    """Ten between 20 and 40 ms, thirty between 40 and 60 ms: the median is the tenth of thirty."""
    spread = Spread(((0.02, 0.04, 10), (0.04, 0.06, 30)), 1.9)
    median = spread.percentile(0.5)
    assert median is not None
    assert median.seconds == pytest.approx(0.04 + 0.02 * 10 / 30)
    assert str(median) == "46.7 ms"
    assert spread.percentile(0).seconds == 0.02  # type: ignore[union-attr]
    assert spread.percentile(1).seconds == pytest.approx(0.06)  # type: ignore[union-attr]
    late = Spread(((0.02, 0.04, 1), (80.0, inf, 9)), 900.0)
    assert str(late.percentile(0.99)) == "> 80 s"
    assert Spread().percentile(0.5) is None
    with pytest.raises(ValueError, match="from 0 to 1"):
        spread.percentile(99)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0008, "0.8 ms"), (0.01234, "12.3 ms"), (1.2345, "1.23 s"), (80, "80 s"), (2560, "2,560 s")],
)
def test_times_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


# -- longer ones ----------------------------------------------------------------------------------


def history(seed: int, count: int = 12) -> tuple[list[Sample], Sample, Counted]:
    """Samples of a run, the one interval from its beginning to its end, and what was counted."""
    mixed = random.Random(seed)
    server = PretendServer(process=False)
    each, ends = Watch(), Watch()
    each.look(server)
    ends.look(server)
    samples = []
    for _ in range(count):
        for _ in range(mixed.randrange(4)):
            server.request([mixed.randrange(4) for _ in range(mixed.randrange(6))],
                           ttft=mixed.expovariate(5), step=mixed.expovariate(30))  # fmt: skip
        server.set(running=mixed.randrange(9), cache=mixed.random())
        samples.append(each.see(server, 0.5))
    whole = ends.see(server, 0.5 * count)
    return samples, whole, server.counted["0"]


@pytest.mark.parametrize("seed", range(4))
def test_intervals_put_together_are_the_long_interval(seed: int) -> None:
    samples, whole, counted = history(seed)
    joined = pooled(samples)
    assert joined is not None
    for field in fields(Sample):
        if field.name in SPREADS:
            one, other = getattr(joined, field.name), getattr(whole, field.name)
            assert one.buckets == other.buckets
            assert one.seconds == pytest.approx(other.seconds, abs=1e-9)
        elif field.name not in ("engines", "at"):
            assert getattr(joined, field.name) == getattr(whole, field.name), field.name
    assert joined.accepted_at == counted.accepted_at(3)
    assert rate(samples, "generation_tokens") == counted.generation_tokens / 6.0
    total = Total()
    for sample in samples:
        total.add(sample)
    assert total.samples == 12
    assert total.rate("generation_tokens") == counted.generation_tokens / 6.0
    assert total.whole is not None
    assert total.whole.accepted_at == joined.accepted_at
    assert total.whole.ttft.buckets == joined.ttft.buckets  # type: ignore[union-attr]


def test_rates_leave_out_the_time_that_nobody_knows() -> None:
    samples = [
        Sample(at=1, seconds=1, generation_tokens=10),
        Sample(at=60, seconds=59, generation_tokens=500, restarted=True),
        Sample(at=61, seconds=1, generation_tokens=20),
    ]
    assert rate(samples, "generation_tokens") == 15
    joined = pooled(samples)
    assert joined is not None
    assert joined.generation_tokens == 530
    assert joined.restarted
    total = Total()
    for sample in samples:
        total.add(sample)
    assert total.rate("generation_tokens") == 15
    assert total.restarts == 1
    assert total.whole is not None
    assert total.whole.generation_tokens == 530
    assert rate(samples[1:2], "generation_tokens") is None
    assert pooled([]) is None


def test_lines_end_where_nobody_looked() -> None:
    def at(time: float, **more: Any) -> Sample:
        return Sample(**({"at": time, "seconds": 0.5, "generation_tokens": 1} | more))

    samples = [at(0.5), at(1.0), at(9.0, missed=15, seconds=8.0), at(9.5),
               at(10.0, restarted=True), at(10.5), at(40.0), at(40.5)]  # fmt: skip
    found = runs(samples)
    assert [[point.at for point in run] for run in found] == [
        [0.5, 1.0], [9.0, 9.5], [10.0, 10.5], [40.0, 40.5]
    ]  # fmt: skip
    longer = runs([*samples[:2], at(1.5), at(2.0), at(2.5)], window=1.0)
    assert [[point.at for point in run] for run in longer] == [[1.0, 2.0, 2.5]]
    assert [point.generation_tokens for point in longer[0]] == [2, 2, 1]
    many = [at(0.5 * n) for n in range(1, 5001)]
    points = runs(many, most=100)
    assert len(points) == 1
    assert len(points[0]) <= 101
    assert sum(point.generation_tokens or 0 for point in points[0]) == 5000
    assert runs([]) == []
    # A sample behind a gap is no average with those after it.
    alone = runs([at(0.5, restarted=True), at(1.0), at(1.5)], window=60)
    assert [[point.generation_tokens for point in run] for run in alone] == [[1, 2]]


# -- on disk --------------------------------------------------------------------------------------


def test_a_sample_is_the_same_after_json() -> None:
    server = realistic(("0", "1"))
    watch = Watch()
    watch.look(server)
    server.request([7, 2], ttft=9999.0)
    sample = watch.see(server)
    data = json.loads(json.dumps(sample.to_dict(), allow_nan=False))
    assert Sample.from_dict(data) == sample
    assert Sample.from_dict(data | sample.figures()) == sample
    bare = Sample(at=1.5, seconds=0.5)
    assert Sample.from_dict(json.loads(json.dumps(bare.to_dict()))) == bare


@pytest.mark.parametrize(
    "wrong",
    [
        {"at": "now"}, {"seconds": -1}, {"drafts": -1}, {"drafts": 1.5}, {"drafts": True},
        {"accepted_at": "12"}, {"accepted_at": [1, -2]}, {"ttft": {"buckets": [[0, 1]]}},
        {"ttft": {"buckets": [[1, 0, 2]], "seconds": 0}}, {"ttft": 3}, {"engine": 4},
        {"engines": [{"at": 1}]}, {"finished": [1]}, {"kv_usage": -0.1}, {"model": 4},
        {"missed": "many"}, {"at": 1e300}, {"seconds": 1e300}, {"seconds": 5e-324},
        {"ttft": {"buckets": [[0, 1e308, 5]], "seconds": 1}},
        {"ttft": {"buckets": [[0, 1, 5]], "seconds": 1.7e308}},
    ],
)  # fmt: skip
def test_what_is_no_sample_is_refused(wrong: dict[str, Any]) -> None:
    data = Sample(at=1.0, seconds=0.5).to_dict()
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        Sample.from_dict(data | wrong)


def test_a_bucket_of_exactly_zero_and_one_of_nothing() -> None:
    kept = Spread.from_dict({"buckets": [[0, 0, 4], [0, 1, 0], [1, None, 2]], "seconds": 0})
    assert kept.buckets == ((0.0, 0.0, 4), (1.0, inf, 2))
    assert kept.percentile(0.5) == Percentile(seconds=0.0)
    assert Spread.from_dict(kept.to_dict()) == kept


def test_figures_are_numbers_or_none() -> None:
    samples, *_ = history(3)
    for sample in samples:
        for name, value in sample.figures().items():
            if isinstance(value, float):
                assert isfinite(value), name
    figures = Sample(at=1, seconds=1, ttft=Spread(((80.0, inf, 1),), 99.0)).figures()
    assert (figures["ttft_p50_seconds"], figures["ttft_p50_beyond"]) == (80.0, True)
    assert figures["acceptance_length"] is None
