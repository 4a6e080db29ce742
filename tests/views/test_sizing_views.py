"""Views of weights, steps, references and start-up logs against figures worked out here."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

import workbench
from workbench.datasheet import sheet
from workbench.kernels.roofline import Rates, Work, bound, data_sheet_rates
from workbench.model.asked import SizingError
from workbench.model.config import BeamConfig
from workbench.model.layout import Layout
from workbench.model.presets import resolve_drafter
from workbench.model.references import REFERENCES, Comparison, Reference, comparisons
from workbench.model.routing import TouchedExperts
from workbench.model.step_values import Operation, StepSettings, StepTime, with_shares
from workbench.model.steptime import decode_step, speculative_step, verify_step
from workbench.model.weight_curve import weight_curve
from workbench.model.weights import PRECISIONS, precision, size_weights
from workbench.serving import reconcile as reconciling
from workbench.serving.reconcile import Reconciliation, reconcile
from workbench.views import theme
from workbench.views.model_check import step_comparisons
from workbench.views.startup import reconciliation
from workbench.views.steps import step_breakdown
from workbench.views.touched import experts_touched
from workbench.views.view import View
from workbench.views.weights import active_curve, weight_bars

LOGS = Path(__file__).parents[1] / "data" / "startup_logs"
HOSTILE = "<script>alert(1)</script>"
TP8, DP8 = Layout(tp=8), Layout(dp=8, expert_parallel=True)
GIB = 2**30
# px that JupyterLab leaves to a figure, beside its side bar, on a page of 1280 and of 1000 px
PAGES = (845, 565)
LETTER = 6.2  # px of a letter of 11 px, of the widest usual typeface
EXPERT_WEIGHTS = 49 * 256 * 3 * 5120 * 2560  # of beam-501b, all layers


def plain(text: str) -> str:
    return re.sub(r"<[^>]+>", " ", text).strip()


def bars(view: View) -> dict[str, Any]:
    return {plain(t.name): t for t in view.figure.data if isinstance(t, go.Bar)}


def named(view: View) -> dict[str, Any]:
    return {plain(t.name): t for t in view.figure.data if t.name}


@pytest.fixture(scope="module")
def full() -> BeamConfig:
    return workbench.resolve("beam-501b").config


# -- weights ----------------------------------------------------------------------------------


def test_weight_bars_by_precision(full: BeamConfig) -> None:
    view = weight_bars(*(size_weights(full, p) for p in PRECISIONS.values()), model="beam-501b")
    drawn = bars(view)
    matrices = 49 * 256 * 3
    by_hand = [
        2 * EXPERT_WEIGHTS,
        EXPERT_WEIGHTS + 4 * EXPERT_WEIGHTS // 128**2,
        EXPERT_WEIGHTS // 2 + EXPERT_WEIGHTS // 16 + 8 * matrices,
    ]
    assert list(drawn["experts"].x) == pytest.approx([b / GIB for b in by_hand], rel=1e-12)
    router = 49 * 256 * (5120 + 1) * 4
    norms = 2 * (52 * 2 * 128 + (4 * 52 + 1) * 5120)
    assert list(drawn["routers, norms"].x) == pytest.approx([(router + norms) / GIB] * 3)
    assert list(drawn["embedding, head"].x) == pytest.approx([2 * 163_840 * 5120 * 2 / GIB] * 3)
    assert "drafter" not in drawn
    stacked = np.sum([trace.x for trace in drawn.values()], axis=0)
    written = [t for t in view.figure.data if t.text and "GiB" in t.text[0]]
    assert [plain(text) for text in written[0].text] == [f"{total:,.2f} GiB" for total in stacked]
    layout = view.figure.layout
    px = (PAGES[1] - layout.margin.l - layout.margin.r) / layout.xaxis.range[1]
    for total, text in zip(stacked, written[0].text, strict=True):  # bold letters of 12 px
        assert (layout.xaxis.range[1] - total) * px + layout.margin.r >= 8 * len(plain(text))
    assert view.text.splitlines()[0] == "beam-501b: weights in all"
    assert f"{2 * EXPERT_WEIGHTS / GIB:,.2f} GiB" in view.text.splitlines()[2]
    assert "exact" in plain(view.figure.layout.title.subtitle.text)


def test_weight_bars_a_gpu(full: BeamConfig) -> None:
    drafter = resolve_drafter("beam-501b-dflash2").config
    view = weight_bars(
        *(size_weights(full, precision("nvfp4"), layout, drafter) for layout in (TP8, DP8)),
        per_gpu=True,
    )
    tp, dp = bars(view)["embedding, head"].x
    assert dp == pytest.approx(8 * tp) == pytest.approx(2 * 163_840 * 5120 * 2 / GIB)
    assert "drafter" in bars(view)
    assert "DP8 + EP8" in view.text
    with pytest.raises(SizingError, match="one or more sizings"):
        weight_bars()


def test_active_curve_stacks_what_is_read(full: BeamConfig) -> None:
    view = active_curve(weight_curve(full, PRECISIONS["bf16"], TP8), model="beam-501b")
    drawn = named(view)
    experts = drawn["experts"]
    touched = 256 * (1 - (248 / 256) ** np.asarray(experts.x, dtype=float))
    assert np.asarray(experts.y) == pytest.approx(touched / 256 * 2 * EXPERT_WEIGHTS / 8 / GIB)
    assert (experts.x[0], experts.x[-1]) == (1, 1024)
    held = size_weights(full, PRECISIONS["bf16"], TP8).per_gpu_bytes / GIB
    line = drawn["all weights the GPU holds"]
    assert list(line.y) == [held, held]
    assert line.line.dash == "dash"
    areas = [t for t in view.figure.data if t.stackgroup]
    top = np.sum([t.y for t in areas], axis=0)
    assert (top < held).all()
    assert areas[-1] is experts  # what grows lies on what does not
    # 64 tokens: 256 (1 - (31/32)^64) = 222.44 experts
    assert re.search(r"^ +64 +222\.4 ", view.text, re.MULTILINE)
    assert "uniform routing" in plain(view.figure.layout.title.subtitle.text)
    measured = active_curve(weight_curve(full, layout=TP8, batches=(1, 2), distinct=(8, 12)))
    assert "as measured" in plain(measured.figure.layout.title.subtitle.text)


def test_experts_touched_draws_three_lines() -> None:
    touched = TouchedExperts(
        model=f"tiny {HOSTILE}", experts=16, per_token=4, layers=(1, 2), texts=3, tokens=90,
        batches=(1, 4, 16), uniform=(4.0, 10.9375, 15.84), independent=(4.0, 9.5, 13.0),
        consecutive=(4.0, 8.25, None),
    )  # fmt: skip
    view = experts_touched(touched)
    drawn = named(view)
    assert list(drawn["uniform routing (exact expectation)"].y) == [4.0, 10.9375, 15.84]
    assert list(drawn["tokens of many sequences (measured here)"].y) == [4.0, 9.5, 13.0]
    row = drawn["tokens in a row (measured here)"]
    assert (list(row.x), list(row.y)) == ([1, 4], [4.0, 8.25])
    looks = {(t.line.dash, t.marker.symbol, t.mode) for t in view.figure.data}
    assert len(looks) == 3
    assert "measured here on 90 tokens of 3 texts" in plain(view.figure.layout.title.subtitle.text)
    assert "<script" not in json.dumps(view.figure.to_plotly_json(), default=str)
    assert "9.50" in view.text


# -- steps ------------------------------------------------------------------------------------

ROUND = Rates(
    label="round GPU", kind="data sheet", bandwidth=1e12, flops={"bf16": 1e15}, nvlink=1e11,
    nvlink_domain=8,
)  # fmt: skip


def step(*works: Work, what: str = "a step", layout: Layout = TP8) -> StepTime:
    operations = [
        Operation(work=w, bound=bound(w, ROUND), weight_bytes=w.bytes, kv_bytes=0.0,
                  activation_bytes=0.0)
        for w in works
    ]  # fmt: skip
    settings = StepSettings(rates=ROUND, layout=layout)
    return StepTime(
        kind="decode", what=what, tokens=12, settings=settings, operations=with_shares(operations)
    )


def test_step_breakdown_draws_times_and_limits() -> None:
    one = step(
        Work(name="experts", bytes=2e9),  # 2 ms of memory
        Work(name="qkvg_projection", flops=3e12, bytes=1e9),  # 3 ms of arithmetic over 1
        Work(name="all_reduce", wire_bytes=1e8),  # 1 ms of NVLink
        Work(name="kv_write", bytes=1e7),  # 0.01 ms: less than 1 %
    )
    two = step(
        Work(name="experts", bytes=1e9, flops=5e12),
        Work(name="all_to_all", wire_bytes=2e8),
        what="another",
        layout=DP8,
    )
    view = step_breakdown(one, two)
    pieces = {t.name: t for t in view.figure.data if isinstance(t, go.Bar) and t.x[0] is not None}
    assert list(pieces["experts"].x) == pytest.approx([2, 5])
    assert list(pieces["qkvg_projection"].x) == pytest.approx([3, 0])
    assert list(pieces["all_reduce"].x) == pytest.approx([1, 0])
    assert list(pieces["all_to_all"].x) == pytest.approx([0, 2])
    assert list(pieces["others"].x) == pytest.approx([0.01, 0])
    assert "kv_write" not in pieces
    shape = {name: list(t.marker.pattern.shape or [None] * 2) for name, t in pieces.items()}
    memory, compute = shape["experts"]
    wire = shape["all_reduce"][0]
    assert shape["qkvg_projection"][0] == compute
    assert (memory or None) is None
    assert None not in (compute or None, wire or None)
    assert len({memory, compute, wire}) == 3  # told apart without colours
    assert (compute, wire) == ("/", "x")  # as the subtitle says
    subtitle = " ".join(plain(view.figure.layout.title.subtitle.text).split())
    assert "limited by memory (plain), arithmetic (hatched), NVLink (crossed)" in subtitle
    legend = {plain(t.name): t.marker for t in view.figure.data if t.x[0] is None}
    assert set(legend) == {"experts", "projections", "communication", "others"}
    fills = [(marker.color, marker.pattern.shape) for marker in legend.values()]
    assert len(set(fills)) == len(fills)
    floor = named(view)["all overlapped"]
    assert list(floor.x) == pytest.approx(
        [3.01, 5]
    )  # memory of the first, arithmetic of the second
    totals = next(t for t in view.figure.data if t.text and "ms" in t.text[0]).text
    assert [plain(text).strip() for text in totals] == ["6.01 ms", "7.00 ms"]
    assert "modelled: 6.01 ms in all" in view.text
    assert "1 other " in view.text
    assert "TP8" in view.text
    assert "DP8 + EP8" in view.text
    assert "modelled" in plain(view.figure.layout.title.subtitle.text)


def test_step_breakdown_of_real_steps(full: BeamConfig) -> None:
    rates, drafter = data_sheet_rates("GB200"), resolve_drafter("beam-501b-dflash2").config
    common = {"batch": 1, "context": 4096, "rates": rates, "layout": TP8}
    speculative = speculative_step(full, drafter, draft_tokens=7, **common)
    decode = decode_step(full, precision=PRECISIONS["nvfp4"], **common)
    view = step_breakdown(speculative, decode)
    drawn = [t for t in view.figure.data if isinstance(t, go.Bar) and t.x[0] is not None]
    sums = np.sum([t.x for t in drawn], axis=0)
    # Each length is rounded to a nanosecond.
    assert sums == pytest.approx([speculative.milliseconds, decode.milliseconds], abs=2e-5)
    assert "draft_mlp" in {t.name for t in drawn}
    # What differs between the steps stands beside each, what does not in the subtitle.
    labels = view.figure.layout.yaxis.ticktext
    assert "weights bf16" in labels[0]
    assert "weights nvfp4" in labels[1]
    assert "GB200" in view.figure.layout.title.subtitle.text
    assert len(theme.TEMPLATE.data.to_plotly_json()) == 0  # the shared template stays as it is
    with pytest.raises(SizingError, match="one or more step times"):
        step_breakdown()


@pytest.mark.parametrize("page", PAGES)
def test_words_on_bars_and_beside_them_have_room(full: BeamConfig, page: int) -> None:
    rates = data_sheet_rates("GB200")
    common = {"rates": rates, "precision": PRECISIONS["nvfp4"], "kv_dtype": "fp8"}
    shown = []
    for batch, context in ((1, 4096), (64, 32_768), (256, 4096), (1024, 1024), (4, 2**20 - 8)):
        load = {"batch": batch, "context": context} | common
        shown.append((
            decode_step(full, layout=TP8, **load),
            verify_step(full, draft_tokens=7, layout=TP8, **load),
            decode_step(full, layout=DP8, **load),
        ))  # fmt: skip
    # The diamond in the middle of the all-reduce, which goes from ample to too little room.
    shown += [
        (step(
            Work(name="experts", bytes=2.5e9),
            Work(name="all_reduce", wire_bytes=5e8),
            Work(name="norms", flops=arithmetic * 1e12),
        ),) * 3
        for arithmetic in np.linspace(0.5, 4.5, 21)
    ]  # fmt: skip
    said, met = set(), 0
    for view in (step_breakdown(*steps) for steps in shown):
        layout = view.figure.layout
        end = layout.xaxis.range[1]
        px = (page - layout.margin.l - layout.margin.r) / end
        floors = named(view)["all overlapped"]
        reach = floors.marker.size / 2 + floors.marker.line.width / 2
        texts = [t for t in view.figure.data if isinstance(t, go.Scatter) and t.mode == "text"]
        (written,) = (t for t in texts if t.textposition is None)
        (totals,) = (t for t in texts if t.textposition is not None)
        pieces = [t for t in view.figure.data if isinstance(t, go.Bar) and t.x[0] is not None]
        edges = np.cumsum([[0.0] * 3, *(t.x for t in pieces)], axis=0) * px
        for x, row, text in zip(written.x, written.y, written.text, strict=True):
            half = LETTER * len(plain(text)) / 2
            said.add(plain(text))
            assert abs(x * px - floors.x[row] * px) >= half + reach, text
            # Within a piece: no edge of one runs through the words.
            assert not ((edges[:, row] > x * px - half) & (edges[:, row] < x * px + half)).any()
            place = np.searchsorted(edges[:, row], x * px)
            met += edges[place - 1, row] < floors.x[row] * px < edges[place, row]
        for x, text in zip(totals.x, totals.text, strict=True):
            # an em, then bold letters of 12 px, 8 px wide at most
            assert (end - x) * px + layout.margin.r >= 12 + 8 * len(plain(text).strip()), text
        for label in layout.yaxis.ticktext:
            lines = [plain(line) for line in label.split("<br>")]
            assert LETTER * max(map(len, lines)) <= layout.margin.l
    assert {"experts", "all-reduce"} <= said
    assert met  # some word does share its piece with a diamond


def test_names_in_steps_stay_text() -> None:
    view = step_breakdown(step(Work(name="experts", bytes=1e9), what=HOSTILE))
    assert "<script" not in json.dumps(view.figure.to_plotly_json(), default=str)


# -- references -------------------------------------------------------------------------------


def reference(name: str, kind: Any, value: float, unit: Any) -> Reference:
    return Reference(name=name, kind=kind, value=value, unit=unit, where="a GPU", note="a note")


def compare(to: Reference, modelled: float | None, overlapped: float | None = None) -> Comparison:
    return Comparison(
        reference=to,
        assumptions=f"assumed {modelled}",
        modelled=modelled,
        modelled_overlapped=overlapped,
        remark="left out",
    )


def test_step_comparisons_draws_both_ends_and_the_ratio() -> None:
    times = reference("a time", "published", 10.0, "ms")
    rate = reference("a rate", "published", 50_000.0, "tokens/s")
    share = reference("a share", "published", 1.5, "ratio")
    kept = reference(f"kept {HOSTILE}", "recorded", 3.0, "ms")
    without = reference("no model", "published", 9.0, "tokens/s")
    view = step_comparisons(
        [
            compare(times, 5.0, 1.0),
            compare(times, 4.0),
            compare(rate, 100_000.0),
            compare(share, 1.25),
            compare(kept, 2.0),
            compare(without, None),
        ]
    )
    by_axis: dict[str, dict[str, Any]] = {}
    for trace in view.figure.data:
        if trace.name:
            by_axis.setdefault(trace.xaxis, {})[plain(trace.name)] = trace
    first = by_axis["x"]
    assert list(first["modelled, added up"].x) == [4.0, 5.0]
    assert list(first["modelled, overlapped"].x) == [1.0]
    assert list(first["published"].x) == [10.0]
    assert list(by_axis["x2"]["published"].x) == [50_000.0, 9.0]
    assert list(by_axis["x4"]["recorded"].x) == [3.0]
    symbols = {t.marker.symbol for drawn in by_axis.values() for t in drawn.values()}
    assert len(symbols) == 4  # modelled, all overlapped, published, recorded
    layout = view.figure.layout
    assert {layout[f"xaxis{n}"].type for n in ("", 2, 3, 4)} == {"log"}
    beside = [plain(text) for n in (5, 6, 7, 8) for text in layout[f"yaxis{n}"].ticktext]
    # 10 / 4 and 10 / 5; 100,000 / 50,000, for a rate below the model is slow; 1.5 / 1.25; 3 / 2
    assert beside == ["× 2.50, × 2.00", "× 2.00", "not modelled", "× 1.20", "× 1.50"]
    hover = first["modelled, added up"].hovertext[0]
    assert "assumed 4.0" in hover
    assert "left out" in first["published"].hovertext[0]
    rows = view.text.splitlines()
    assert any(re.search(r"a time +5\.00 ms +10\.00 ms +2\.00  A1 R1$", row) for row in rows)
    assert any(row == "A1 assumed 5.0" for row in rows)
    assert any(row == "R1 left out" for row in rows)
    assert "<script" not in json.dumps(view.figure.to_plotly_json(), default=str)
    with pytest.raises(SizingError, match="one or more comparisons"):
        step_comparisons([])


def test_every_reference_is_shown_with_its_ratio() -> None:
    view = step_comparisons(comparisons())
    drawn = [t for t in view.figure.data if t.name and plain(t.name) in ("published", "recorded")]
    assert sorted(x for t in drawn for x in t.x) == sorted(r.value for r in REFERENCES.values())
    circles = [t for t in view.figure.data if t.name and "added up" in t.name]
    modelled = [c.modelled for c in comparisons() if c.modelled is not None]
    assert sorted(x for t in circles for x in t.x) == sorted(modelled)
    for name in REFERENCES:
        assert name in view.text
    subtitle = plain(view.figure.layout.title.subtitle.text)
    for word in ("modelled", "recorded", "published", "H200"):
        assert word in subtitle
    assert subtitle.count("date not recorded") == 2  # of either kind
    assert len(json.dumps(view._repr_mimebundle_())) < 56_000
    assert max(map(len, view.text.splitlines())) <= 130


def test_every_reference_names_its_hardware_where_it_is_drawn() -> None:
    layout = step_comparisons(comparisons()).figure.layout
    panels = {
        note.yref.split()[0].removeprefix("y"): plain(note.text)
        for note in layout.annotations
        if "domain" in note.yref and note.x == 0
    }
    for panel, heading in panels.items():
        for label in layout[f"yaxis{panel}"].ticktext:
            name = plain(label.replace("<br>", " "))
            one = next(r for r in REFERENCES.values() if name.startswith(r.name)
                       and heading.startswith(f"{r.kind}, "))  # fmt: skip
            if name == one.name:
                assert one.where in heading, name
            else:
                assert "unless a row says otherwise" in heading
                own = name.removeprefix(one.name)
                assert own in (f", {one.where}", f", hardware {one.where}")
    assert len(panels) == 4
    for heading in panels.values():  # clear of the words on the right on a page of 1000 px
        assert 7 * len(heading) < PAGES[1] - layout.margin.r
    assert PAGES[1] - layout.margin.l - layout.margin.r > 250  # px left to the panels
    shown = plain(next(n.text for n in layout.annotations if n.yref == "paper"))
    for said in ("○ modelled, added up", "| modelled, overlapped", "◆ published", "■ recorded"):
        assert said in " ".join(shown.split())
    assert LETTER * len(shown) < PAGES[1]


# -- start-up logs ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rank(full: BeamConfig) -> BeamConfig:
    """One of eight tensor-parallel ranks, as a model of its own: what the recorded engine ran."""
    return replace(
        full, num_attention_heads=6, num_key_value_heads=1, intermediate_size=1536,
        moe_intermediate_size=320, vocab_size=20_480, max_position_embeddings=131_072,
    )  # fmt: skip


@pytest.fixture(scope="module")
def log() -> str:
    return (LOGS / "h200_52_layers_128k_sync.txt").read_text()


def test_reconciliation_of_a_recorded_log(log: str, rank: BeamConfig) -> None:
    view = reconciliation(reconcile(log, rank, gpu=sheet("H200")))
    engine = json.loads((LOGS / "h200_52_layers_128k_sync.json").read_text())
    block = 9 * 16 * 2 * 128 * 2  # nine layers of 16 tokens, one KV head, BF16
    a_sequence = 131_072 // 16 + 5 * (-(-(511 + 2048) // 16) + 1)
    tokens = int(engine["available_kv_bytes"] // block / a_sequence * 131_072)
    assert tokens == engine["num_tokens"]
    assert view.html is not None
    assert view.html.count(f"{tokens:,} tokens") == 2  # logged and predicted
    assert view.html.count("✓ agrees") >= 2
    assert "≈ close, +0.0" in view.html
    assert "(modelled)" in view.html
    assert "not slots that exist in memory" in view.html  # what the line means in this release
    assert f"{a_sequence:,} for a sequence" in view.html
    assert "asynchronous scheduling off (log)" in view.html
    assert view.figure is None
    assert set(view._repr_mimebundle_()) == {"text/plain", "text/html"}
    assert "✓ KV cache size" in view.text
    # What a line means lies below its figures: nothing is too wide for the page.
    rows = re.findall(r"<tr.*?</tr>", view.html, re.DOTALL)[1:]
    assert len(rows) == 2 * len(reconcile(log, rank, gpu=sheet("H200")).rows)
    for figures, words in zip(rows[::2], rows[1::2], strict=True):
        assert figures.count("<td") == 4
        assert words.count('<td colspan="4"') == words.count("<td") == 1
    assert "overflow-x" not in view.html


def test_each_verdict_has_its_sign() -> None:
    def row(line: str, logged: float | None) -> reconciling.Comparison:
        return reconciling.Comparison(
            line=line, logged=logged, low=1000.0, high=1010.0, unit="tokens", how="", meaning=""
        )

    rows = (row("in", 1005.0), row("near", 1020.0), row("far", 900.0), row("silent", None))
    view = reconciliation(Reconciliation(version="1.2.3", settings={}, rows=rows, caveats=()))
    assert view.html is not None
    assert "✓ agrees" in view.html
    assert "≈ close, +0.99%" in view.html  # 1020 / 1010
    assert "– not stated" in view.html
    # 900 is a tenth below 1000: red, bold, and with a sign
    assert re.search(r"color:#D13438[^>]*font-weight:700[^>]*>✗ differs, −10%", view.html)
    assert [line[0] for line in view.text.splitlines() if line[0] in "✓≈✗–"] == list("✓≈✗–")


def test_an_old_release_reads_the_same_lines_otherwise(log: str, rank: BeamConfig) -> None:
    lines = "\n".join(line for line in log.splitlines() if "LLM engine (v" not in line)
    view = reconciliation(reconcile(lines, rank, version="0.19.0"))
    engine = json.loads((LOGS / "h200_52_layers_128k_sync.json").read_text())
    block = 9 * 16 * 2 * 128 * 2
    by_hand = engine["available_kv_bytes"] // block // 6 * 16  # blocks of a group of six
    assert view.html is not None
    assert f"{by_hand:,} tokens" in view.html
    assert "vLLM 0.9.1 to 0.20.0" in view.html
    assert "✗ differs" in view.html
    assert "0.19.0" in view.text


def test_a_hostile_log_stays_text(log: str, rank: BeamConfig) -> None:
    hostile = log.replace("(v0.33.0)", f"(v0.33.0.{HOSTILE})").replace("beam-tp8-rank", HOSTILE)
    assert HOSTILE in hostile
    for text in (hostile, f"{HOSTILE}\n{log}\n{HOSTILE}"):
        view = reconciliation(reconcile(text, rank))
        assert view.html is not None
        assert "<script" not in view.html
    row = reconciling.Comparison(
        line=HOSTILE, logged=1.0, low=2.0, high=3.0, unit=HOSTILE, how=HOSTILE, meaning=HOSTILE
    )
    view = reconciliation(
        Reconciliation(
            version=HOSTILE,
            settings={HOSTILE: (HOSTILE, HOSTILE)},
            rows=(row,),
            caveats=(HOSTILE,),
        )
    )
    assert view.html is not None
    assert "<script" not in view.html
    # version, line, logged, both ends of the range, meaning, how, three of a setting, caveat
    assert view.html.count("&lt;script&gt;") == 11


def test_what_a_log_does_not_say_is_no_verdict(rank: BeamConfig) -> None:
    lines = "Available KV cache memory: 15.28 GiB\nUsing max model len 131072\n"
    view = reconciliation(reconcile(lines, rank, version="0.33.0"))
    assert view.html is not None
    assert "– not stated" in view.html
    assert "✗" not in view.html
