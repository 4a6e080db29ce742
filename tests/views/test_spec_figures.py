"""Views of drafting: values against counts made here, marks, undefined figures, escaping, sizes."""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from math import isnan, nan, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from spec.planted import small_drafter, small_target
from views.spec_steps import block, run
from workbench import views
from workbench.errors import DraftError
from workbench.model.presets import ZOO
from workbench.model.tokenizer import Tokenizer
from workbench.spec.decode import decode
from workbench.spec.metrics import Acceptance, Tally, by_context
from workbench.spec.step import RequestStep, Step
from workbench.views import theme
from workbench.views.view import View

HOSTILE = "<script>alert(1)</script>"
NONE = Tally().acceptance()
BENCH: dict[str, Any] = {
    "speedup": 1.625,
    "target_ms": {"8": 6.0, "1": 4.0},
    "draft_ms": 1.0,
    "acceptance_length": 3.5,
    "tokens_per_second": {"plain": 200.0, "speculative": 325.0},
    "hardware": "2 cores of something",
    "versions": {"torch": "2.9.0"},
    "date": "2026-01-02",
}
SWEEP = [
    {"speculative_tokens": n, "temperature": t, "acceptance_length": 1 + n / 2 - t if n else None,
     "tokens_per_second": 100.0 + n, "events": 40 * n}
    for t in (0.0, 0.8) for n in (7, 0, 3)
]  # fmt: skip


class Hostile:
    """A tokenizer all of whose tokens are markup."""

    def token_text(self, token_id: int) -> str:
        return HOSTILE

    def decode_stream(self) -> Any:
        return self

    def push(self, token_id: int) -> str:
        return HOSTILE

    def flush(self) -> str:
        return ""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(ZOO / "beam-tiny")


@pytest.fixture(scope="module")
def trimmed() -> list[Step]:
    return run(90, trim=True, detail=True, seed=3)


def figures(steps: Sequence[Step]) -> Acceptance:
    tally = Tally()
    for step in steps:
        tally.add(step)
    return tally.acceptance()


def drafted(steps: Sequence[Step]) -> list[RequestStep]:
    return [r for step in steps for r in step.requests if r.drafted]


def one(part: RequestStep, index: int = 0) -> Step:
    return Step(index=index, rows=1, seconds=0.5, requests=(part,))


def plain(text: str) -> str:
    return re.sub(r"<[^>]+>", "", text).strip()


def named(view: View) -> dict[str, Any]:
    return {plain(t.name): t for t in view.figure.data if t.name}


def worded(view: View) -> list[Any]:
    return [t for t in view.figure.data if isinstance(t, go.Scatter) and t.mode == "text"]


def texts(view: View) -> str:
    """Everything that the figure says in words, without markup."""
    notes = [n.text for n in view.figure.layout.annotations]
    title = view.figure.layout.title
    drawn = [w for t in worded(view) for w in t.text]
    return plain(" | ".join([title.text, title.subtitle.text, *notes, *drawn]))


# -- the text -------------------------------------------------------------------------------------


def test_written_marks_every_token_by_its_kind(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("def mean(values, weights): return sum(values) / len", bos=False)
    first, *rest = ids
    steps = [
        one(RequestStep(request=0, position=9, token_ids=(first,), kinds=("first",)), 0),
        one(
            RequestStep(
                request=0, position=10, drafted=(*rest[:2], 7), confidences=(0.5, 0.25, 0.75),
                admitted=3, accepted=2, token_ids=tuple(rest[:3]),
                kinds=("accepted", "accepted", "corrected"),
            ), 1,
        ),
        one(RequestStep(request=0, position=13, token_ids=(rest[3],), kinds=("plain",)), 2),
        one(
            RequestStep(
                request=0, position=14, drafted=tuple(rest[4:6]), confidences=(1.0, 0.5),
                admitted=2, accepted=2, token_ids=tuple(rest[4:7]),
                kinds=("accepted", "accepted", "bonus"),
            ), 3,
        ),
    ]  # fmt: skip
    view = views.written_with_drafts(steps, tokenizer, prompts={0: "# <prompt>\n"}, model="small")
    assert view.html is not None
    hovers = re.findall(r'title="([^"]+)"', view.html)
    kinds = ["first", "accepted", "accepted", "corrected", "plain", "accepted", "accepted", "bonus"]
    assert len(hovers) == 8
    for hover, kind in zip(hovers, kinds, strict=True):
        assert kind in hover
    assert hovers[1] == "step 1, slot 1 of 3, accepted draft, confidence 0.50"
    assert hovers[2] == "step 1, slot 2 of 3, accepted draft, confidence 0.25"
    assert hovers[3] == "step 1, corrected by the target, 2 of 3 verified drafts accepted"
    # No two kinds share their marks once all colours are taken away.
    spans = re.findall(r'<span style="([^"]*)" title=', view.html)
    shapes = {
        kind: re.sub(r"#\w{6}|rgba\([^)]*\)|background:;?", "", style)
        for kind, style in zip(kinds, spans, strict=True)
    }
    assert len(set(shapes.values())) == len(set(kinds)) == 5
    assert "# &lt;prompt&gt;" in view.html
    written = "".join(tokenizer.decode([i]) for i in ids[:8])
    count = "8 tokens: 1 first, 1 plain, 4 accepted, 1 corrected, 1 bonus"
    assert view.text == f"# <prompt>\n{written}\n-- {count}"
    assert f"measured here · {count}" in view.html
    bars = {k: list(b.y) for k, b in named(view).items()}
    assert bars == {"first (1)": [1, 0, 0, 0], "plain (1)": [0, 0, 1, 0],
                    "accepted (4)": [0, 2, 0, 2], "corrected (1)": [0, 1, 0, 0],
                    "bonus (1)": [0, 0, 0, 1]}  # fmt: skip


def test_a_plain_token_says_whether_drafts_were_trimmed_or_none_made(tokenizer: Tokenizer) -> None:
    given: dict[str, Any] = {"request": 0, "token_ids": (400,), "kinds": ("plain",)}
    trimmed = [
        one(RequestStep(position=9, drafted=(401, 402, 403), **given), 0),
        one(RequestStep(position=10, drafted=(401,), **given), 1),
    ]
    bare = [one(RequestStep(position=11, **given), 2)]
    view = views.written_with_drafts([*trimmed, *bare], tokenizer)
    assert re.findall(r'title="([^"]+)"', view.html or "") == [
        "step 0, plain, 3 drafts trimmed",
        "step 1, plain, 1 draft trimmed",
        "step 2, plain, nothing drafted",
    ]
    assert view.text.endswith("3 tokens: 3 plain; 4 drafts trimmed, none verified")
    assert "plain, no draft verified: 3" in plain(view.html or "")
    assert views.written_with_drafts(bare, tokenizer).text.endswith("1 plain; nothing was drafted")
    hovers = named(views.block_strip([*trimmed, *bare], tokenizer))["plain (3)"].hovertext
    assert [hover.partition("</b><br>")[2] for hover in hovers] == [
        "plain, 3 drafts trimmed", "plain, 1 draft trimmed", "plain, nothing drafted",
    ]  # fmt: skip


def test_written_shows_tokens_without_text_of_their_own(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é\n\n    x\n", bos=False)
    ids = [*ids, tokenizer.markers["<|end|>"]]
    parts = [
        RequestStep(request=0, position=i, token_ids=(t,), kinds=("plain",))
        for i, t in enumerate(ids)
    ]
    view = views.written_with_drafts([one(p, i) for i, p in enumerate(parts)], tokenizer)
    assert view.html is not None
    assert view.text.startswith("é\n\n    x\n\n--")
    assert view.html.count(" title=") == len(ids)
    assert "&lt;|end|&gt;" in view.html
    # Every line break is shown, and made where no mark is open.
    page = view.html[: view.html.index("display:flex")]
    assert page.count("⏎") == 3 == page.count("\n")
    assert all(line.endswith("</span>") for line in page.split("\n")[:-1])


def test_written_keeps_requests_apart_and_a_long_run_small(tokenizer: Tokenizer) -> None:
    steps = run(3, requests=3)
    view = views.written_with_drafts(steps, tokenizer)
    for r in range(3):
        ids = [t for s in steps for part in s.requests if part.request == r for t in part.token_ids]
        heading, text = f"-- request {r}\n", tokenizer.decode(ids)
        start = view.text.index(heading) + len(heading)
        assert view.text[start:].startswith(text[:10])
    long = run(900, seed=4)
    view = views.written_with_drafts(long, tokenizer)
    assert size(view) < 110_000
    tokens = sum(step.tokens for step in long)
    assert f"({tokens - 400:,} tokens before this)" in (view.html or "")
    assert f"{tokens:,} tokens" in view.text


# -- blocks ---------------------------------------------------------------------------------------


def test_block_strip_draws_confidence_and_fate(trimmed: list[Step], tokenizer: Tokenizer) -> None:
    view = views.block_strip(trimmed, tokenizer)
    last = [s.requests[0] for s in trimmed[-40:]]
    fates = Counter[str]()
    heights: dict[str, list[float]] = {"accepted": [], "rejected": [], "trimmed": []}
    for part in last:
        for slot, sure in enumerate(part.confidences):
            fate = (
                "accepted" if slot < part.accepted
                else "rejected" if slot < part.admitted else "trimmed"
            )  # fmt: skip
            fates[fate] += 1
            heights[fate].append(sure)
    assert min(fates.values()) > 10
    found = named(view)
    for fate, values in heights.items():
        bar = found[f"{fate} ({fates[fate]})"]
        assert list(bar.y) == pytest.approx(values)
    patterns = [found[f"{fate} ({fates[fate]})"].marker.pattern.shape for fate in heights]
    assert len(set(patterns)) == 3
    # The refused slot itself is drawn in full, those behind it are paler.
    opacity = list(found[f"rejected ({fates['rejected']})"].marker.opacity)
    assert opacity.count(1) == sum(part.rejected > 0 for part in last)
    kinds = Counter(part.kinds[-1] for part in last)
    for kind in ("corrected", "bonus", "plain"):
        assert len(found[f"{kind} ({kinds[kind]})"].x) == kinds[kind] > 0
    symbols = [found[f"{k} ({kinds[k]})"].marker.symbol for k in ("corrected", "bonus", "plain")]
    assert len(set(symbols)) == 3
    words = f"{sum(fates.values())} slots: {fates['accepted']} accepted, "
    words += f"{fates['rejected']} rejected, {fates['trimmed']} trimmed"
    assert view.text.startswith(f"the last 40 of {len(trimmed)}, {words}\n")
    assert size(view) < 130_000


def test_block_strip_hovers_tell_candidates_and_path(tokenizer: Tokenizer) -> None:
    part = RequestStep(
        request=3, position=5, drafted=(400, 401, 402), confidences=(0.9, 0.5, 0.2), admitted=2,
        accepted=1, token_ids=(400, 777), kinds=("accepted", "corrected"),
        candidates=((400, 500), (600, 401), (402, 700)),
        unary=((2.0, 1.0), (3.0, 1.5), (0.5, -1.0)),
        scores=((2.5, -1.25), (1.0, 4.0), (0.0, 3.0)),
    )  # fmt: skip
    view = views.block_strip(part, tokenizer)
    hovers = view.figure.data[0].hovertext
    name = tokenizer.token_text
    assert hovers[0].split("<br>")[:2] == [
        f"slot 1, <b>{name(400)}</b>", "accepted; confidence 0.90",
    ]  # fmt: skip
    # Best realized score first; the walk's own is marked where it is not the best, too.
    lines = [line.strip("\u2007 ") for line in hovers[1].split("<br>")]
    assert lines[1] == "rejected; confidence 0.50"
    assert lines[3:] == [f"▸ 1.5 → 4.0  {name(401)}", f"3.0 → 1.0  {name(600)}"]
    lines = [line.strip("\u2007 ") for line in hovers[2].split("<br>")]
    assert lines[1] == "trimmed, never verified; confidence 0.20"
    assert lines[3:] == [f"−1.0 → 3.0  {name(700)}", f"▸ 0.5 → 0.0  {name(402)}"]
    axis = view.figure.layout.xaxis
    assert [plain(t) for t in axis.ticktext] == [name(i) for i in (400, 401, 402, 777)]
    assert view.text.splitlines()[1] == f"✓✗○  corrected: {name(777)}"


def test_block_strip_says_what_a_stop_token_took(tokenizer: Tokenizer) -> None:
    import random

    part = block(random.Random(1), 0, 5, accepted=5, keep=2)
    view = views.block_strip(one(part), tokenizer)
    hovers = view.figure.data[0].hovertext
    assert [("cut away" in hover) for hover in hovers] == [False, False, True, True, True,
                                                          False, False]  # fmt: skip
    assert "behind a refused slot" not in hovers[5]
    assert "behind a refused slot" in hovers[6]
    assert view.text.splitlines()[1].endswith("✓✓✓✓✓✗✗  cut here")


@pytest.mark.parametrize("slots", [1, 2, 31, 63])
def test_block_strip_of_any_width(slots: int) -> None:
    steps = run(60, drafted=slots, chance=0.9, detail=True)
    view = views.block_strip(steps)
    track = view.figure.data[0]
    shown = len(track.x)
    assert shown % slots == 0
    assert shown <= 400
    low, high = view.figure.layout.xaxis.range
    assert low < min(track.x)
    assert max(track.x) < high
    assert size(view) < 190_000
    # No two slots lie on each other.
    assert len({(round(float(x), 2), float(b)) for x, b in zip(track.x, track.base, strict=True)}) \
        == shown  # fmt: skip


def test_block_strip_of_one_request_among_several() -> None:
    steps = run(4, requests=3)
    view = views.block_strip(steps, request=1)
    mine = [r for s in steps for r in s.requests if r.request == 1]
    assert len(view.text.splitlines()) == len(mine) + 2
    every = views.block_strip(steps)
    assert "request 2" in every.text
    labels = worded(every)[0].text
    assert list(labels[:3]) == ["0 r0", "1 r1", "2 r2"]


# -- curves ---------------------------------------------------------------------------------------


def test_acceptance_running_is_the_mean_over_events(trimmed: list[Step]) -> None:
    view = views.acceptance_running(trimmed, window=16)
    lines = named(view)
    tokens, accepted, pooled, recent = 0, [], [], []
    places = []
    for step in trimmed:
        for r in step.requests:
            tokens += len(r.token_ids)
            if r.drafted:
                accepted.append(r.accepted)
                places.append(tokens)
                pooled.append(1 + sum(accepted) / len(accepted))
                recent.append(1 + sum(accepted[-16:]) / len(accepted[-16:]))
    assert list(lines["all so far (pooled)"].x) == places
    assert list(lines["all so far (pooled)"].y) == pytest.approx(pooled)
    assert list(lines["last 16 events"].y) == pytest.approx(recent)
    dashes = {line.line.dash for line in lines.values()}
    assert len(dashes) == 2
    without = sum(not r.drafted for s in trimmed[1:] for r in s.requests)
    subtitle = plain(view.figure.layout.title.subtitle.text).replace("\u00a0", " ")
    assert f"{without} steps without drafts" in subtitle
    assert f"acceptance length {pooled[-1]:.2f} (n = {len(accepted)} draft events)" in view.text


def test_acceptance_running_of_a_long_run_ends_at_its_last_event() -> None:
    steps = run(2000, seed=9)
    view = views.acceptance_running(steps)
    line = named(view)["all so far (pooled)"]
    assert len(line.x) <= 301
    parts = drafted(steps)
    assert line.y[-1] == pytest.approx(1 + sum(p.accepted for p in parts) / len(parts))
    assert size(view) < 12_000


def test_acceptance_histogram_counts_runs(trimmed: list[Step]) -> None:
    parts = drafted(trimmed)
    counts = Counter(p.accepted for p in parts)
    view = views.acceptance_histogram(figures(trimmed))
    (bar,) = view.figure.data
    assert list(bar.y) == [counts[i] for i in range(8)]
    assert list(bar.customdata) == pytest.approx([counts[i] / len(parts) for i in range(8)])
    assert "accepted run, events: " + ", ".join(f"{i}: {counts[i]}" for i in range(8)) in view.text


def wilson(k: int, n: int) -> tuple[float, float]:
    z = 1.959964
    middle = (k + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * sqrt(k * (n - k) / n + z * z / 4)
    return middle - half, middle + half


def test_acceptance_curves_have_their_bases_and_bands(trimmed: list[Step]) -> None:
    parts = drafted(trimmed)
    view = views.acceptance_curves(figures(trimmed))
    lines = named(view)
    bases: dict[str, tuple[Callable[[RequestStep, int], bool], ...]] = {
        "survival": (lambda p, i: p.accepted > i, lambda p, i: True),
        "conditional": (
            lambda p, i: p.accepted > i,
            lambda p, i: p.admitted > i and p.accepted >= i,
        ),
        "verified share": (lambda p, i: p.admitted > i, lambda p, i: len(p.drafted) > i),
    }
    for name, (hit, base) in bases.items():
        k = [sum(hit(p, i) for p in parts) for i in range(7)]
        n = [sum(base(p, i) for p in parts) for i in range(7)]
        line = lines[name]
        assert list(line.x) == list(range(1, 8))
        assert list(line.y) == pytest.approx([a / b for a, b in zip(k, n, strict=True)])
        low, high = zip(*map(wilson, k, n), strict=True)
        assert line.customdata[:, 0] == pytest.approx(low, abs=1e-6)
        assert line.customdata[:, 1] == pytest.approx(high, abs=1e-6)
        assert line.customdata[:, 2:].tolist() == [list(pair) for pair in zip(k, n, strict=True)]
        band = next(t for t in view.figure.data if t.fill and t.legendgroup == name)
        assert list(band.y) == pytest.approx([*high, *reversed(low)], abs=1e-6)
        if name == "conditional":
            ticks = view.figure.layout.xaxis.ticktext
            assert list(ticks) == [f"{i}<br>n {c}" for i, c in enumerate(n, 1)]
    assert len({(t.line.dash, t.marker.symbol) for t in lines.values()}) == 3


def test_a_conditional_that_nothing_reached_is_undefined() -> None:
    steps = run(20, chance=0.0)
    view = views.acceptance_curves(figures(steps))
    lines = named(view)
    assert list(lines["conditional"].x) == [1]
    assert list(lines["survival"].y) == [0] * 7
    said = plain(view.figure.layout.title.subtitle.text.replace("<br>", " "))
    assert "slots 2 to 7 never reached" in said
    assert "does this drafter belong to this target?" in said
    assert view.text.splitlines()[3].split()[-4:] == ["undefined", "n", "0", "1.00"]


def test_everything_trimmed_is_not_rejected() -> None:
    import random

    part = block(random.Random(2), 0, 4, admitted=0)
    steps = [one(part, i) for i in range(20)]
    strip = views.block_strip(steps)
    assert "140 slots: 0 accepted, 0 rejected, 140 trimmed" in strip.text
    view = views.acceptance_curves(figures(steps))
    assert "conditional" not in named(view)
    assert list(named(view)["verified share"].y) == [0] * 7
    assert "slots 1 to 7 never reached" in plain(
        view.figure.layout.title.subtitle.text.replace("<br>", " ")
    )


# -- groups, runs ---------------------------------------------------------------------------------


def test_acceptance_by_gives_standard_errors(trimmed: list[Step]) -> None:
    bins = by_context(trimmed, (0, 64, 128))
    view = views.acceptance_by(bins, "Acceptance by context length")
    bar = view.figure.data[0]
    lines = view.text.splitlines()[1:]
    names = ["0 to 63 tokens", "64 to 127 tokens", "128 tokens and more"]
    ends = [(0, 64), (64, 128), (128, 10**9)]
    for place, (low, high) in enumerate(ends):
        runs = [p.accepted for p in drafted(trimmed) if low <= p.position < high]
        mean, error = 1 + np.mean(runs), np.std(runs, ddof=1) / sqrt(len(runs))
        assert bar.x[place] == pytest.approx(mean)
        assert bar.error_x.array[place] == pytest.approx(error)
        assert lines[place].startswith(names[place])
        assert lines[place].endswith(f"{mean:.2f} ± {error:.2f}, n = {len(runs)}")
    assert [plain(t) for t in view.figure.layout.yaxis.ticktext] == names


def test_selector_lengths_reads_acceptances_numbers_and_diagnostics() -> None:
    steps = run(40)
    view = views.selector_lengths({"oracle": 5.25, "walk": figures(steps), "unary": nan}, n=120)
    lines = view.text.splitlines()
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "unary argmax of each slot", "the selector's walk", "best path among the candidates",
    ]  # fmt: skip
    assert "undefined" in lines[1]
    assert lines[3].endswith("5.25, n = 120")
    bar = view.figure.data[0]
    assert isnan(bar.x[0])
    assert bar.x[2] == 5.25
    assert len(set(bar.marker.pattern.shape)) == 3
    found = {
        "code": {"acceptance_length": 3.5, "acceptance_length_unary": 3.0,
                 "acceptance_length_oracle": 5.0, "tokens": 4096, "recall": [0.9]},
        "prose": {"acceptance_length": None, "acceptance_length_unary": 2.0,
                  "acceptance_length_oracle": 2.5, "tokens": 1024},
    }  # fmt: skip
    view = views.selector_lengths(found)
    drawn = dict(zip((plain(t) for t in view.figure.layout.yaxis.ticktext),
                     view.figure.data[0].x, strict=True))  # fmt: skip
    assert drawn["code: unary"] == 3.0
    assert drawn["code: walk"] == 3.5
    assert drawn["prose: oracle"] == 2.5
    assert isnan(drawn["prose: walk"])
    assert "n = 4,096 tokens" in view.text


def test_compare_runs_gives_ratios_to_the_first() -> None:
    slow, fast = run(30, chance=0.3), run(30, chance=0.9, seed=1)
    view = views.compare_runs({"old": slow, "new": fast})

    def speed(steps: list[Step]) -> float:
        some = [s for s in steps if s.phase == "decode"]
        return sum(len(r.token_ids) for s in some for r in s.requests) / (0.0085 * len(some))

    rates = [speed(slow), speed(fast)]
    bars = [t for t in view.figure.data if isinstance(t, go.Bar)]
    assert list(bars[1].x) == pytest.approx(rates)
    assert f"{rates[1]:,.0f} tokens/s, {rates[1] / rates[0]:.2f} ×" in view.text
    # What a ratio is of stands under the bars.
    assert plain(view.figure.layout.xaxis3.title.text) == "tokens/s, decode steps; × old"
    for name, steps in (("old", slow), ("new", fast)):
        parts = drafted(steps)
        line = named(view)[name]
        expected = [sum(p.accepted > i for p in parts) / len(parts) for i in range(7)]
        assert list(line.y) == pytest.approx(expected)
    mean = [1 + np.mean([p.accepted for p in drafted(steps)]) for steps in (slow, fast)]
    assert list(bars[0].x) == pytest.approx(mean)
    assert len({named(view)[n].line.dash for n in ("old", "new")}) == 2


def test_compare_runs_without_times_or_drafts_says_so() -> None:
    steps = run(10)
    view = views.compare_runs({"a": figures(steps), "b": NONE})
    assert "no time is known of these runs" in plain(
        view.figure.layout.title.subtitle.text.replace("<br>", " ")
    )
    assert "b: acceptance length undefined: nothing was drafted; no time known" in view.text
    view = views.compare_runs({"a": figures(steps), "b": NONE}, speeds={"a": 100.0, "b": 150.0})
    assert "150 tokens/s, 1.50 ×" in view.text
    view = views.compare_runs({"a": figures(steps), "b": NONE}, speeds={"b": 150.0})
    assert "150 tokens/s, no ratio" in view.text
    with pytest.raises(DraftError, match="at most six"):
        views.compare_runs({str(i): NONE for i in range(7)})


# -- speed, sweep ---------------------------------------------------------------------------------


def test_speculative_speed_draws_passes_and_rates() -> None:
    view = views.speculative_speed(BENCH)
    passes, rates = (t for t in view.figure.data if isinstance(t, go.Bar))
    assert list(passes.y) == [4.0, 6.0, 1.0]
    assert [plain(t) for t in view.figure.layout.xaxis.ticktext] == ["1 row", "8 rows", "draft"]
    assert list(rates.y) == [200.0, 325.0]
    assert len(set(rates.marker.pattern.shape)) == 2
    assert view.text.splitlines() == [
        "1.62 × plain decoding; acceptance length 3.50",
        "target, 1 row: 4 ms",
        "target, 8 rows: 6 ms, 1.50 × one row",
        "draft: 1 ms, 0.25 × one row of the target",
        "plain: 200 tokens/s",
        "speculative: 325 tokens/s",
    ]
    said = plain(view.figure.layout.title.subtitle.text.replace("<br>", " "))
    for word in ("2 cores of something", "torch 2.9.0", "2026-01-02"):
        assert word in said


def test_speculative_speed_of_a_bench_names_its_policies() -> None:
    class Result:
        def to_dict(self) -> dict[str, Any]:
            rest = {k: v for k, v in BENCH.items() if k != "tokens_per_second"}
            return rest | {
                "policies": {
                    "none": {"tokens_per_second": 200.0},
                    "fixed": {"tokens_per_second": 300.0},
                },
                "speedup_low": 1.5, "speedup_high": 1.75, "interrupted": True,
                "versions": {"torch": "2.9.0", "triton": None},
            }  # fmt: skip

    view = views.speculative_speed(Result())
    rates = [t for t in view.figure.data if isinstance(t, go.Bar)][1]
    assert list(rates.y) == [200.0, 300.0]
    names = [plain(t) for t in view.figure.layout.xaxis2.ticktext]
    assert names == ["plain", "speculative"]
    said = plain(view.figure.layout.title.subtitle.text.replace("<br>", " "))
    assert "median, 10th to 90th percentile 1.50 to 1.75" in said
    # One ratio: the title's. That of the two bars is another one.
    above = next(t for t in view.figure.data if isinstance(t, go.Scatter) and t.xaxis == "x2")
    assert not any("×" in text for text in above.text)
    assert "interrupted" in said
    assert "triton" not in said


def test_speculative_speed_without_figures_says_undefined() -> None:
    view = views.speculative_speed({"speedup": None, "draft_ms": nan, "tokens_per_second": {}})
    assert "undefined" in plain(view.figure.layout.title.text)
    assert "draft: undefined" in view.text
    assert isnan(view.figure.data[0].y[0])
    assert "not measured" in texts(view)
    assert "hardware and date not recorded" in plain(view.figure.layout.title.subtitle.text)


def test_sweep_draws_a_line_for_each_temperature() -> None:
    pandas = pytest.importorskip("pandas")
    for rows in (SWEEP, pandas.DataFrame(SWEEP)):
        view = views.sweep_figure(rows)
        lines = [t for t in view.figure.data if plain(t.name) == "temperature 0.8"]
        length, speed = lines
        assert list(length.x) == list(speed.x) == [0, 3, 7]
        assert isnan(length.y[0])
        assert list(length.y[1:]) == pytest.approx([1.7, 3.7])
        assert list(speed.y) == [100, 103, 107]
        assert (
            length.hovertext[1] == "temperature 0.8, 3 drafts: 1.7 tokens per draft event, n = 120"
        )
        assert "undefined" in length.hovertext[0]
        assert len(view.text.splitlines()) == 7
    with pytest.raises(DraftError, match="row 1 of the sweep"):
        views.sweep_figure([SWEEP[0], {"temperature": 1.0}])


# -- all of them ----------------------------------------------------------------------------------


def every(steps: list[Step], tokenizer: Any, name: str = "a") -> dict[str, View]:
    counted = figures(steps)
    return {
        "written": views.written_with_drafts(steps, tokenizer, prompts={0: name}, model=name),
        "strip": views.block_strip(steps, tokenizer),
        "running": views.acceptance_running(steps),
        "histogram": views.acceptance_histogram(counted),
        "curves": views.acceptance_curves(counted),
        "selector": views.selector_lengths({"walk": counted, name: 3.0}),
        "by": views.acceptance_by({name: counted}, f"By {name}"),
        "compare": views.compare_runs({name: steps, "b": counted}),
        "speed": views.speculative_speed(BENCH | {"hardware": name}),
        "sweep": views.sweep_figure(SWEEP),
    }


def size(view: View) -> int:
    return len(json.dumps(view._repr_mimebundle_(), allow_nan=False).encode())


CASES = {
    "usual": run(60, detail=True),
    "trimmed": run(30, trim=True),
    "empty": [],
    "prefill only": run(0),
    "one step": run(1),
    "no drafts": run(12, drafted=0),
    "one slot": run(30, drafted=1),
    "31 slots": run(40, drafted=31, chance=0.95),
    "nothing accepted": run(30, chance=0.0),
    "all accepted": run(30, chance=1.0),
    "several requests": run(10, requests=4),
}


@pytest.mark.parametrize("case", CASES)
def test_every_view_of_every_run(case: str, tokenizer: Tokenizer) -> None:
    once, twice = (every(CASES[case], tokenizer) for _ in range(2))
    for name, view in once.items():
        assert view._repr_mimebundle_() == twice[name]._repr_mimebundle_(), name
        assert size(view) < 115_000, name
        assert "nan" not in view.text.lower().split(), name
        layout = view.figure.layout
        assert layout.title.text.startswith("<span style="), name
        assert re.search("measured", plain(layout.title.subtitle.text)), name
        assert layout.template.layout.paper_bgcolor == "rgba(0,0,0,0)"
        for axis in [*view.figure.select_xaxes(), *view.figure.select_yaxes()]:
            if axis.title.text:
                assert axis.title.text.startswith("<span style="), name
        for trace in view.figure.data:  # every mark has a place
            if trace.name and trace.showlegend is not False:
                assert len(trace.x), (name, trace.name)
    if not drafted(CASES[case]):
        for name in ("running", "histogram", "curves", "compare"):
            assert "undefined: nothing was drafted" in once[name].text, name
            assert "undefined: nothing was drafted" in texts(once[name]), name
        for name in ("selector", "by"):
            assert "undefined: nothing was drafted" in once[name].text, name
    total = sum(size(view) for view in once.values())
    assert total < 220_000


def test_views_of_nothing_say_so() -> None:
    assert views.block_strip([]).text == "no step was given"
    assert "there is no step" in views.written_with_drafts([], Hostile()).text
    assert "there is no group" in views.acceptance_by({}, "x").text
    assert "there is no group" in views.selector_lengths({}).text
    assert views.compare_runs({}).text == "there is no run"
    assert "no settings" in texts(views.sweep_figure([]))


def test_names_and_tokens_never_become_markup() -> None:
    steps = run(12, detail=True)
    for name, view in every(steps, Hostile(), HOSTILE).items():
        data = view._repr_mimebundle_()
        assert "<script" not in data["text/html"], name
        drawn = json.dumps(json.loads(view.figure.to_json()), ensure_ascii=False)
        assert "<script" not in drawn, name
    strip = views.block_strip(steps, Hostile()).figure
    assert "&lt;script&gt;" in strip.data[0].hovertext[0]  # it is drawn, as text
    text = views.written_with_drafts(steps, Hostile())
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in (text.html or "")
    assert HOSTILE in text.text


def test_views_of_a_real_run(tmp_path: Path) -> None:
    target = small_target(tmp_path)
    steps = list(
        decode(target, small_drafter(target), [[1, 2, 3], [4, 5]], max_new_tokens=30,
               stop_at_eos=False, detail=True)
    )  # fmt: skip
    assert len(drafted(steps)) > 10
    strip = views.block_strip(steps)
    hovers = strip.figure.data[0].hovertext
    # Three candidates a slot, one of them the walk's.
    assert all(hover.count("→") == 4 and hover.count("▸") == 1 for hover in hovers)
    counts = Counter(kind for s in steps for r in s.requests for kind in r.kinds)
    shown = views.written_with_drafts(steps, Hostile())
    assert f"60 tokens of 2 requests: {counts['first']} first" in shown.text
    for view in every(steps, Hostile()).values():
        assert size(view) < 200_000


def test_marks_stand_apart_on_both_themes() -> None:
    from workbench.views import spec_marks

    def light(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for mark in [*spec_marks.KINDS.values(), *spec_marks.SLOTS.values()]:
        value = light(mark.color)
        assert 1.05 / (value + 0.05) >= 3, mark.word
        assert (value + 0.05) / (light("#111111") + 0.05) >= 3, mark.word
    signs = [mark.sign for mark in spec_marks.KINDS.values()]
    assert len(set(signs)) == len(signs)
    assert theme.SPARSE == spec_marks.KINDS["accepted"].color == spec_marks.SLOTS["accepted"].color
