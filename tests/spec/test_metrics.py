"""Acceptance figures: against numbers worked by hand, and against loops written out plainly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate
from math import comb, isclose
from operator import mul

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import WorkbenchError
from workbench.spec import metrics
from workbench.spec.metrics import (
    CURVES,
    Acceptance,
    Rate,
    Tally,
    by_context,
    group,
    repeated,
    repeated_share,
    without_repeats,
)
from workbench.spec.step import Kind, RequestStep, Step


def part(
    drafted: int, admitted: int, accepted: int, *, request: int = 0, cut: int = 0, at: int = 10
) -> RequestStep:
    """A request's step as the decode loop gives it."""
    kinds: list[Kind] = ["accepted"] * accepted
    kinds.append("plain" if not drafted else "bonus" if accepted == admitted else "corrected")
    kept = accepted + 1 - cut
    return RequestStep(
        request=request,
        position=at,
        drafted=tuple(range(100, 100 + drafted)),
        admitted=admitted,
        accepted=accepted,
        token_ids=tuple(range(kept)),
        kinds=tuple(kinds[:kept]),
        finished="eos" if cut else None,
    )


def first(request: int = 0) -> RequestStep:
    return RequestStep(request=request, position=9, token_ids=(5,), kinds=("first",))


def step(*requests: RequestStep, index: int = 0) -> Step:
    return Step(index=index, rows=8, seconds=0.5, requests=requests)


def counted(*requests: RequestStep) -> Acceptance:
    tally = Tally()
    for request in requests:
        tally.add_request(request)
    return tally.acceptance()


def test_by_hand() -> None:
    # Two requests, three drafts a block. Events as (drafted, admitted, accepted):
    #   request 0: (3, 3, 2) (3, 3, 0) (3, 2, 2) and one plain step
    #   request 1: (3, 3, 3), whose last token a stop token took, and (2, 1, 0) before it
    a = counted(
        first(0),
        first(1),
        part(3, 3, 2),
        part(2, 1, 0, request=1),
        part(3, 3, 0),
        part(3, 2, 2),
        part(0, 0, 0),
        part(3, 3, 3, request=1, cut=1),
    )
    assert (a.events, a.plain, a.first, a.requests) == (5, 1, 2, 2)
    assert (a.drafted, a.admitted, a.accepted) == (14, 12, 7)
    assert (a.trimmed, a.rejected, a.cut) == (2, 5, 1)
    assert a.emitted == 2 + 3 + 1 + 1 + 3 + 1 + 3
    assert a.length_pooled == 1 + 7 / 5
    # request 0: 1 + 4/3 over 1 + 3 + 1 + 3 + 1 = 9 tokens; request 1: 1 + 3/2 over 1 + 1 + 3 = 5
    assert a.length_requests == pytest.approx((7 / 3 + 5 / 2) / 2)
    assert a.length_tokens == pytest.approx((9 * 7 / 3 + 5 * 5 / 2) / 14)
    assert a.histogram == (2, 0, 2, 1)
    assert a.survival == (3 / 5, 3 / 5, 1 / 5)
    # slot 0: all 5 reached. Slot 1: accepted >= 1 and admitted > 1: three. Slot 2: (3,3,2), (3,3,3)
    assert a.conditional == (3 / 5, 3 / 3, 1 / 2)
    assert [r.n for r in a.rates("conditional")] == [5, 3, 2]
    assert a.verified_share == (5 / 5, 4 / 5, 3 / 4)
    assert [r.n for r in a.rates("verified_share")] == [5, 5, 4]
    assert a.rate_drafted == 7 / 14
    assert a.rate_verified == 7 / 12


def test_what_is_undefined_is_none_and_not_zero() -> None:
    for a in (counted(), counted(first(), part(0, 0, 0), part(0, 0, 0))):
        data = a.to_dict()
        assert a.events == data["events"] == 0
        undefined = ("length_pooled", "length_requests", "length_tokens")
        for name in (*undefined, "rate_drafted", "rate_verified"):
            assert getattr(a, name) is None
            assert data[name] is None
        assert "acceptance length n/a" in str(a)
    shown = Tally(positions=2)
    assert shown.acceptance().survival == (None, None)
    assert shown.acceptance().to_dict()["bands"]["conditional"] == [[None, None, 0]] * 2
    # All of a block trimmed: an event that verified nothing.
    a = counted(part(3, 0, 0))
    assert (a.length_pooled, a.rate_drafted, a.rate_verified) == (1, 0, None)
    assert a.survival == (0, 0, 0)
    assert a.conditional == (None, None, None)
    assert a.verified_share == (0, 0, 0)


def test_wilson_band() -> None:
    # Newcombe, Statistics in Medicine 17 (1998) 857, table I, score method without continuity.
    for count, n, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        rate = Rate(count, n)
        assert (rate.low, rate.high) == pytest.approx((low, high), abs=6e-5)
    none, every = Rate(0, 20), Rate(20, 20)
    assert (none.low, every.high) == (0, 1)
    assert none.high == pytest.approx(3.8414588 / 23.8414588)
    assert every.low == pytest.approx(1 - 3.8414588 / 23.8414588)
    assert (Rate(0, 0).value, Rate(0, 0).low, Rate(0, 0).high) == (None, None, None)


@pytest.mark.parametrize("p", [0.1, 0.37, 0.8])
def test_wilson_band_covers(p: float) -> None:
    # The exact coverage at n = 60, summed over the binomial distribution.
    n = 60
    covered = 0.0
    for k in range(n + 1):
        low, high = Rate(k, n).low, Rate(k, n).high
        assert low is not None
        assert high is not None
        if low <= p <= high:
            covered += comb(n, k) * p**k * (1 - p) ** (n - k)
    assert 0.92 < covered < 0.98


@st.composite
def runs(draw: st.DrawFn, trimmed: bool = True, mixed: bool = True) -> list[Step]:
    """Steps of a few requests with up to five drafts, plain steps and cuts between."""
    n = draw(st.integers(1, 5))
    steps = []
    begun: set[int] = set()
    over: set[int] = set()
    for index in range(draw(st.integers(0, 25))):
        parts = []
        for request in sorted(draw(st.sets(st.integers(0, 3))) - over):
            if request not in begun:
                begun.add(request)
                parts.append(first(request))
                continue
            drafted = draw(st.integers(0, n)) if mixed else draw(st.sampled_from([0, n]))
            admitted = draw(st.integers(0, drafted)) if trimmed else drafted
            accepted = draw(st.integers(0, admitted))
            cut = draw(st.integers(0, accepted)) if draw(st.booleans()) else 0
            if cut:
                over.add(request)
            parts.append(part(drafted, admitted, accepted, request=request, cut=cut, at=index))
        steps.append(step(*parts, index=index))
    return steps


def tallied(steps: list[Step]) -> Acceptance:
    tally = Tally()
    for one in steps:
        tally.add(one)
    return tally.acceptance()


def events_of(steps: list[Step]) -> Iterator[RequestStep]:
    return (r for one in steps for r in one.requests if r.drafted)


def share(hits: list[bool]) -> float | None:
    return sum(hits) / len(hits) if hits else None


@given(runs())
def test_against_plain_loops(steps: list[Step]) -> None:
    a = tallied(steps)
    events = list(events_of(steps))
    width = max((len(e.drafted) for e in events), default=0)
    assert len(a.survival) == len(a.conditional) == len(a.verified_share) == width
    for i in range(width):
        assert a.survival[i] == share([e.accepted > i for e in events])
        tried = [e for e in events if e.admitted > i and e.accepted >= i]
        assert a.conditional[i] == share([e.accepted > i for e in tried])
        offered = [e for e in events if len(e.drafted) > i]
        assert a.verified_share[i] == share([e.admitted > i for e in offered])
    lengths, weights = [], []
    for request in range(4):
        mine = [r for one in steps for r in one.requests if r.request == request]
        accepted = [r.accepted for r in mine if r.drafted]
        if accepted:
            lengths.append(1 + sum(accepted) / len(accepted))
            weights.append(sum(len(r.token_ids) for r in mine))
    if lengths:
        assert a.length_requests == pytest.approx(sum(lengths) / len(lengths))
        weighted = sum(map(mul, weights, lengths))
        assert a.length_tokens == pytest.approx(weighted / sum(weights))
    assert a.requests == len(lengths)


@given(runs())
def test_identities(steps: list[Step]) -> None:
    a = tallied(steps)
    assert a.emitted == sum(one.tokens for one in steps)
    assert a.emitted == a.accepted + a.events + a.plain + a.first - a.cut
    assert sum(a.histogram) == a.events
    assert sum(i * n for i, n in enumerate(a.histogram)) == a.accepted
    assert a.drafted == a.accepted + a.rejected + a.trimmed
    assert sum(a.drafted_at) == a.drafted
    assert sum(a.admitted_at) == a.admitted
    if a.events:
        survival = [s for s in a.survival if s is not None]
        assert survival == sorted(survival, reverse=True)
        assert a.length_pooled is not None
        assert isclose(1 + sum(survival), a.length_pooled)
    for curve in CURVES:
        for rate in a.rates(curve):
            if rate.n:
                assert rate.low is not None
                assert rate.value is not None
                assert rate.high is not None
                assert 0 <= rate.low <= rate.value <= rate.high <= 1


@given(runs(trimmed=False, mixed=False))
def test_conditionals_multiply_to_survival_where_nothing_is_trimmed(steps: list[Step]) -> None:
    a = tallied(steps)
    reached = list(accumulate((c or 0 for c in a.conditional), mul))
    assert reached == pytest.approx(list(a.survival))
    assert all(share in (1, None) for share in a.verified_share)


@given(runs(), runs())
def test_merging_is_counting_both(one: list[Step], two: list[Step]) -> None:
    left, right = Tally(), Tally()
    for s in one:
        left.add(s)
    for s in two:
        right.add(s)
    right_before = right.acceptance()
    left.merge(right)
    # Request 3 of the second run is another one than request 3 of the first.
    shifted = [step(*(moved(r, r.request + 10) for r in s.requests)) for s in two]
    both, expected = left.acceptance().to_dict(), tallied(one + shifted).to_dict()
    for name in ("length_requests", "length_tokens"):  # sums in another order
        assert both.pop(name) == pytest.approx(expected.pop(name))
    assert both == expected
    assert right.acceptance() == right_before


def moved(r: RequestStep, request: int) -> RequestStep:
    return RequestStep.from_dict(r.to_dict() | {"request": request})


@given(runs())
def test_a_snapshot_disturbs_nothing(steps: list[Step]) -> None:
    tally = Tally()
    for one in steps:
        tally.add(one)
        tally.acceptance()
    assert tally.acceptance().to_dict() == tallied(steps).to_dict()


def test_memory_does_not_grow_with_steps_or_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_ALIVE", 16)
    tally = Tally()
    for request in range(500):  # each leaves without saying that it is finished
        for accepted in (0, 1, 3):
            tally.add_request(part(3, 3, accepted, request=request))
    assert len(tally._alive) <= 16
    assert len(tally._blocks) == 3
    a = tally.acceptance()
    assert (a.requests, a.events) == (500, 1500)
    assert a.length_requests == pytest.approx(1 + 4 / 3)


def test_a_request_that_left_is_closed() -> None:
    tally = Tally()
    tally.add_request(part(3, 3, 1))
    tally.leave(0)
    tally.leave(0)
    tally.add_request(part(3, 3, 3))  # the same number in another run
    a = tally.acceptance()
    assert (a.requests, a.length_requests) == (2, 3.0)


def test_groups() -> None:
    classes = {0: "code", 1: "prose", 2: None}
    steps = [
        step(part(3, 3, 3, request=0), part(3, 3, 0, request=1), part(3, 3, 1, request=2)),
        step(part(3, 3, 1, request=0), part(3, 3, 1, request=1)),
    ]
    by_class = group(steps, lambda _, r: classes[r.request])
    assert {name: a.length_pooled for name, a in by_class.items()} == {"code": 3.0, "prose": 1.5}


def test_context_bins() -> None:
    steps = [step(part(2, 2, 2, at=at)) for at in (300, 5, 100, 99, 10_000)]
    bins = by_context(steps, (10, 100, 200, 300))
    assert {name: a.events for name, a in bins.items()} == {
        (10, 100): 1,
        (100, 200): 1,
        (300, None): 2,
    }
    assert list(bins) == sorted(bins, key=lambda name: name[0])
    for edges in ((), (5, 5), (5, 4)):
        with pytest.raises(WorkbenchError, match="must rise"):
            by_context(steps, edges)


def test_repeated_by_hand() -> None:
    ids = [1, 2, 3, 9, 1, 2, 3, 4]
    assert repeated(ids, 3) == [False] * 4 + [True] * 3 + [False]
    assert repeated(ids, 4) == [False] * 8
    assert repeated_share(ids, 3) == 3 / 8
    # A loop of period 1: the 3-gram that begins at 1 is the one that began at 0.
    assert repeated([7] * 5, 3) == [False, True, True, True, True]
    assert repeated_share([1, 2], 8) == 0
    assert repeated_share([], 8) is None
    with pytest.raises(WorkbenchError, match="at least one token"):
        repeated(ids, 0)


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 5))
def test_repeated_against_the_definition(ids: list[int], n: int) -> None:
    starts = range(len(ids) - n + 1)
    again = [s for s in starts if any(ids[t : t + n] == ids[s : s + n] for t in range(s))]
    assert repeated(ids, n) == [any(s <= i < s + n for s in again) for i in range(len(ids))]


def test_looping_steps_are_left_out() -> None:
    def gave(request: int, *ids: int) -> RequestStep:
        n = len(ids) - 1
        kinds: list[Kind] = ["accepted"] * n
        kinds.append("corrected")
        return RequestStep(
            request=request,
            position=4,
            drafted=(1,) * 4,
            admitted=4,
            accepted=n,
            token_ids=ids,
            kinds=tuple(kinds),
        )

    steps = [
        step(gave(0, 1, 2, 3), gave(1, 1, 2, 3)),  # the same 3-gram, but in another request
        step(gave(0, 4), gave(1, 5)),
        step(gave(0, 9, 1), gave(1, 6)),  # request 0: 1 2 3 comes again, from the second token on
        step(gave(0, 2, 3, 8), gave(1, 7)),
        step(gave(0, 6), gave(1, 8)),
    ]
    a = without_repeats(steps, 3)
    assert a.events == 10 - 2
    assert a.accepted == 2 + 2  # the first steps; 9 1 and 2 3 8 are gone
    assert without_repeats(steps, 4).events == 10
    # With a prompt of 4 5 6 before it, 5 6 7 of request 1 is no repetition; with 5 6 7 it is.
    assert without_repeats(steps, 3, {1: (4, 5, 6)}).events == 8
    assert without_repeats(iter(steps), 3, {1: (5, 6, 7)}).events == 5


def test_text_is_deterministic_and_complete() -> None:
    a = counted(first(), part(3, 3, 2), part(3, 2, 2), part(0, 0, 0))
    assert str(a) == repr(a) == str(counted(first(), part(3, 3, 2), part(3, 2, 2), part(0, 0, 0)))
    assert "acceptance length 3.000 (pooled, bonus included; 2 draft events of 1 requests)" in str(
        a
    )
    assert "drafted 6 = accepted 4 + rejected 1 + trimmed 1" in str(a)
    assert "emitted 8 = accepted 4 + one an event 2 + plain 1 + first 1 - cut 0" in str(a)
    assert "events by accepted run: 0: 0, 1: 0, 2: 2, 3: 0" in str(a)
    assert len(str(a).splitlines()) == 4 + 1 + 3 + 1


@settings(max_examples=30)
@given(runs())
def test_dict_is_json(steps: list[Step]) -> None:
    a = tallied(steps)
    data = json.loads(json.dumps(a.to_dict(), allow_nan=False))
    assert data["survival"] == list(a.survival)
    assert data["bands"]["survival"] == [[r.low, r.high, r.n] for r in a.rates("survival")]
