"""Views of the KV cache and of plans: figures hold what arithmetic done here says."""

import json
import re
from html import unescape
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go
import pytest

from workbench import views
from workbench.datasheet import sheet
from workbench.model.config import BeamConfig
from workbench.model.kv_curve import kv_curve
from workbench.model.layout import Layout
from workbench.model.plan import Plan, make_plan
from workbench.model.presets import resolve, resolve_drafter
from workbench.model.sizing import ENGINE, KVSizing, size_kv
from workbench.views import theme
from workbench.views.view import View

GIB, MIB = 2**30, 2**20
HOSTILE = "<script>alert(1)</script>"
HEAD = 2 * 128  # numbers of one head: a key and a value


@pytest.fixture(scope="module")
def config() -> BeamConfig:
    return resolve("beam-501b").config


@pytest.fixture(scope="module")
def eight(config: BeamConfig) -> KVSizing:
    """Eight sequences of 131,072 tokens, FP8, on one of eight GPUs."""
    return size_kv(config, context=131_072, sequences=8, kv_dtype="fp8", tp=8)


@pytest.fixture(scope="module")
def drafted(config: BeamConfig) -> KVSizing:
    drafter = resolve_drafter("beam-501b-dflash2").config
    return size_kv(
        config, context=131_072, sequences=8, kv_dtype="fp8", tp=8, drafter=drafter
    )  # fmt: skip


def plan(config: BeamConfig, gpu: str = "H200", layout: Layout = Layout(tp=8), **more: Any) -> Plan:  # noqa: B008
    asked = {"context": 1 << 20, "sequences": 16, "weights": "fp8", "name": "beam-501b"}
    return make_plan(config, sheet(gpu), layout=layout, **(asked | more))


def plain(text: str) -> str:
    return re.sub(r"<[^>]+>", "", text)


def named(view: View) -> dict[str, Any]:
    """The traces of the first panel by their names."""
    found: dict[str, Any] = {}
    for trace in view.figure.data:
        found.setdefault(plain(trace.name or ""), trace)
    return found


def subtitle(view: View) -> str:
    return plain(view.figure.layout.title.subtitle.text.replace("<br>", " "))


# -- growth -------------------------------------------------------------------------------------


def test_growth_draws_the_bytes_of_each_kind(config: BeamConfig) -> None:
    sizing = size_kv(config, context=1 << 20, kv_dtype="fp8")
    view = views.kv_growth(kv_curve(sizing, account="ideal"), model="beam-501b")
    areas = named(view)
    window = list(areas["full layers"].x).index(512)
    assert areas["full layers"].y[window] * MIB == pytest.approx(9 * 512 * 8 * HEAD)
    assert areas["sliding layers"].y[window] * MIB == pytest.approx(43 * 512 * 8 * HEAD)
    assert areas["sliding layers"].y[-1] == areas["sliding layers"].y[window]  # flat
    naive = areas["naive: every layer full"]
    assert naive.y[-1] * MIB == pytest.approx(52 * naive.x[-1] * 8 * HEAD)
    assert naive.line.dash == "dash"
    assert not naive.stackgroup
    # The right panel is everything, in a unit of its own.
    whole = [t for t in view.figure.data if t.xaxis == "x2"]
    full = next(t for t in whole if plain(t.name) == "full layers")
    assert (full.x[-1], full.y[-1]) == (1 << 20, 18.0)
    assert "GiB" in view.figure.layout.yaxis2.title.text
    assert "MiB" in view.figure.layout.yaxis.title.text
    # Areas stand on one another, the flat ones below, and nothing is on a logarithmic axis.
    assert [plain(t.name) for t in whole if t.stackgroup] == [
        "sliding layers", "drafter", "padding", "full layers",
    ]  # fmt: skip
    assert {t.stackgroup for t in whole if t.stackgroup} != {areas["padding"].stackgroup}
    for axis in ("xaxis", "xaxis2", "yaxis", "yaxis2"):
        assert view.figure.layout[axis].type != "log"
    assert "sliding layers grow no more from 512 tokens on" in view.text
    assert "18.00 GiB" in view.text


def test_growth_by_the_engine_names_it_and_shows_what_there_is(drafted: KVSizing) -> None:
    view = views.kv_growth(kv_curve(drafted))
    assert ENGINE in subtitle(view)
    assert "exact" in subtitle(view)
    areas = named(view)
    assert areas["drafter"].showlegend
    assert areas["drafter"].fillpattern.shape
    assert areas["padding"].showlegend
    assert "no more from 16,895 tokens" in view.text
    ideal = views.kv_growth(kv_curve(drafted, account="ideal"))
    assert ENGINE not in subtitle(ideal)
    assert not named(ideal)["padding"].showlegend


# -- layers -------------------------------------------------------------------------------------


def test_strip_has_the_bytes_of_every_layer(eight: KVSizing) -> None:
    view = views.kv_strip(eight, model="beam-501b")
    (strip,) = view.figure.data
    full = [3, 9, 15, 21, 27, 33, 39, 45, 51]
    page = 16 * HEAD
    for layer, mib in enumerate(strip.z[0]):
        blocks = 8192 if layer in full else 1057
        assert mib * MIB == pytest.approx(8 * blocks * page)
    assert [i for i, mib in enumerate(strip.z[1]) if mib is not None] == full
    assert strip.zmin == 0
    assert strip.zmax * MIB == 8 * 8192 * page
    assert list(strip.x) == list(range(52))
    assert "window of 512" in strip.text[0][0]
    assert "layer 3" in strip.text[0][3]
    assert "all tokens" in strip.text[0][3]
    assert ENGINE in subtitle(view)
    assert "a sliding layer 33.0 MiB, a full layer 256.0 MiB" in subtitle(view)
    assert "43 sliding layers: 33.0 MiB each" in view.text  # 8 x 1057 x 4096 bytes
    assert "9 full layers: 256.0 MiB each" in view.text


def test_strip_puts_the_drafter_after_a_gap(drafted: KVSizing) -> None:
    view = views.kv_strip(drafted, account="ideal")
    (strip,) = view.figure.data
    assert len(strip.x) == 52 + 1 + 5
    assert strip.z[0][52] is None
    assert [v * MIB for v in strip.z[0][53:]] == [8 * 2048 * HEAD] * 5
    assert "drafter layer 0" in strip.text[0][53]
    assert "drafter" in view.figure.layout.xaxis.ticktext
    # Refused by the engine, said so, and drawn all the same: every layer at full length.
    refused = views.kv_strip(drafted, account="hybrid_off")
    assert "would not start like this" in subtitle(refused)
    assert len({v for v in refused.figure.data[0].z[0] if v is not None}) == 1


# -- one GPU ------------------------------------------------------------------------------------


def test_a_gpus_memory_adds_up_to_the_budget(config: BeamConfig) -> None:
    tensor, data = plan(config), plan(config, layout=Layout(dp=8, expert_parallel=True))
    view = views.kv_per_gpu([tensor, data])
    bars = {plain(t.name): t for t in view.figure.data if isinstance(t, go.Bar)}
    budget, memory = (named(view)[name] for name in ("engine's budget", "memory"))
    for row, one in enumerate((tensor, data)):
        assert sum(bar.x[row] for bar in bars.values()) * GIB == pytest.approx(
            sheet("H200").usable_bytes * 0.92, abs=1
        )
        assert max(budget.x) == pytest.approx(sheet("H200").usable_bytes * 0.92 / GIB)
        assert max(memory.x) == pytest.approx(sheet("H200").usable_bytes / GIB)
        assert bars["free"].x[row] * GIB == pytest.approx(one.free_bytes)
    # FP8 experts of 49 layers: a byte a weight and an FP32 scale for each 128 x 128.
    whole = 49 * 256 * 3 * 2560 * 5120
    assert bars["expert weights"].x[1] * GIB == pytest.approx(whole / 8 * (1 + 4 / 128**2))
    # Under data parallelism all attention weights are on every GPU, under TP8 an eighth.
    attention = 52 * 5120 * 128 * (3 * 48 + 2 * 8)
    assert bars["attention weights"].x[1] * GIB == pytest.approx(attention, rel=1e-3)
    assert bars["attention weights"].x[0] * GIB == pytest.approx(attention / 8, rel=1e-3)
    # KV: two sequences with eight heads, or sixteen with one.
    for row, heads in ((0, 16), (1, 2 * 8)):
        assert bars["KV, full layers"].x[row] * GIB == heads * 9 * (1 << 20) * HEAD
        assert bars["KV, sliding layers"].x[row] * GIB == heads * 43 * 1057 * 16 * HEAD
    # Padding, and the null block that each pool keeps.
    assert bars["KV, padding"].x[0] * GIB == (16 * 2 * 1057 + 9) * 16 * HEAD
    assert [plain(t) for t in view.figure.layout.yaxis.ticktext] == ["TP8", "DP8 + EP8"]
    for word in ("modelled", "exact", ENGINE):
        assert word in subtitle(view)
    assert "workspace" in view.text


def test_what_does_not_fit_crosses_the_line(config: BeamConfig) -> None:
    view = views.kv_per_gpu(plan(config, "H100"))
    bars = [t for t in view.figure.data if isinstance(t, go.Bar)]
    used = sum(bar.x[0] for bar in bars)
    budget = max(named(view)["engine's budget"].x)
    assert used > budget
    assert {plain(bar.name): bar.x[0] for bar in bars}["free"] == 0
    assert view.figure.layout.xaxis.range[1] > used


def test_each_kind_of_gpu_has_its_own_lines(config: BeamConfig) -> None:
    plans = [plan(config, gpu) for gpu in ("H200", "GB200", "GB300", "H200")]
    view = views.kv_per_gpu(plans)
    memory = named(view)["memory"]
    pairs = list(zip(memory.x, memory.y, strict=True))
    segments = [pairs[i : i + 2] for i in range(0, len(pairs), 3)]
    ends = [(low[0], low[1], high[1]) for low, high in segments]
    expected = [
        (sheet(gpu).usable_bytes / GIB, row - 0.5, row + 0.5)
        for row, gpu in enumerate(("H200", "GB200", "GB300", "H200"))
    ]
    assert ends == expected
    assert "H200" in view.figure.layout.yaxis.ticktext[0]


def test_words_stand_between_the_limits_and_within_their_piece(config: BeamConfig) -> None:
    plans = [plan(config, gpu) for gpu in ("H100", "H200", "GB300")]
    view = views.kv_per_gpu(plans)
    end = view.figure.layout.xaxis.range[1]
    bars = {plain(t.name): t.x for t in view.figure.data if isinstance(t, go.Bar)}
    words = view.figure.data[-1]
    assert len(words.text) >= 6
    for x, row, text in zip(words.x, words.y, map(plain, words.text), strict=True):
        half = 5 * len(text) / 2 / 424 * end  # a letter's px, and those of a narrow page's axis
        edges = [0.0]
        for lengths in bars.values():
            edges.append(edges[-1] + lengths[row])
        low, high = next((a, b) for a, b in pairwise(edges) if a < x < b)
        assert low <= x - half
        assert x + half <= high
        for limit in (plans[row].budget_bytes / GIB, plans[row].memory_bytes / GIB):
            assert not x - half < limit < x + half
        length = float(text.split()[-1].replace(",", ""))
        assert length == pytest.approx(high - low, abs=0.051)


def test_a_bar_that_is_cut_off_says_what_it_comes_to(config: BeamConfig) -> None:
    large = plan(config, layout=Layout(dp=8, expert_parallel=True), batched_tokens=131_072 * 8)
    view = views.kv_per_gpu([large, plan(config)])
    end = view.figure.layout.xaxis.range[1]
    used = sum(t.x[0] for t in view.figure.data if isinstance(t, go.Bar))
    assert used > end
    words = view.figure.data[-1]
    beyond = [(x, y, plain(t)) for x, y, t, position in
              zip(words.x, words.y, words.text, words.textposition, strict=True)
              if position == "middle right"]  # fmt: skip
    assert beyond == [(end, 0, f"→ {used:,.0f} GiB")]
    assert view.figure.layout.margin.r > 80  # room for it
    # What can be seen of the piece has its words, with the whole length.
    assert f"workspace {large.workspace_bytes / GIB:,.1f}" in map(plain, words.text)
    assert views.kv_per_gpu(plan(config)).figure.layout.margin.r < 80


def test_bars_of_different_loads_say_their_own(config: BeamConfig) -> None:
    view = views.kv_per_gpu([plan(config), plan(config, sequences=4, context=4096)])
    assert [t.split("<br>")[-1].removesuffix("</span>")
            for t in view.figure.layout.yaxis.ticktext] == [
        "16 × 1,048,576, FP8", "4 × 4,096, FP8",
    ]  # fmt: skip
    assert "16 sequences" not in subtitle(view)
    assert "16 sequences of 1,048,576 tokens" in subtitle(views.kv_per_gpu(plan(config)))


# -- pages --------------------------------------------------------------------------------------


def test_accounts_stand_side_by_side_with_the_binding_term(eight: KVSizing) -> None:
    view = views.kv_accounts(eight, model="beam-501b")
    ideal = 8 * HEAD * (9 * 131_072 + 43 * 512)
    admission = 8 * (5 * 1057 + 8192) * 9 * 16 * HEAD
    naive = 8 * HEAD * 52 * 131_072
    assert view.html is not None
    cells = unescape(re.sub(r"<[^>]+>", "|", view.html))
    for name, total in (
        ("ideal", ideal),
        ("engine admission bound", admission),
        ("hybrid manager off", naive),  # whole blocks: 131,072 is a multiple of 16
        ("naive", naive),
    ):
        line = next(line for line in view.text.splitlines() if line.startswith(name))
        assert line.endswith(f"{total / GIB:.2f} GiB")
        row = cells.split(f"|{name}|", 1)[1]
        assert f"{total / GIB:.2f} GiB" in row
        assert f"|{total / ideal:.2f}|" in row
    assert "511 + 16,384" in view.text
    assert "511 + 16,384" in view.html
    assert ENGINE in view.html
    assert "nothing measured" in view.html
    assert "18.0 KiB" in view.text
    assert "3 groups of 9 sliding, 2 groups of 8 sliding, 1 group of 9 full" in view.text


def test_accounts_say_what_the_engine_refuses_and_copies(
    config: BeamConfig, drafted: KVSizing
) -> None:
    view = views.kv_accounts(drafted)
    assert view.html is not None
    assert "windows differ (512, 2048)" in view.text
    assert "windows differ (512, 2048)" in view.html
    assert "12 groups in the engine: " in view.text
    groups = re.findall(r"(\d+) groups? of (\d+)", view.text)
    assert sum(int(count) for count, _ in groups) == 12
    assert sum(int(count) * int(layers) for count, layers in groups) == 57
    assert "2 copies of each KV head" in views.kv_accounts(size_kv(config, context=9, tp=16)).text


def test_plans_say_what_runs_and_hold_their_commands(config: BeamConfig) -> None:
    small = plan(config, "H100")
    fitting = plan(config, layout=Layout(dp=8, expert_parallel=True), checkpoint="/models/<b>&c")
    view = views.plan_table([small, fitting])
    assert view.html is not None
    assert "too large" in view.text.splitlines()[0]
    assert "✗ too large" in view.html
    assert "✓ yes" in view.html
    commands = re.findall(r"<pre[^>]*>(.*?)</pre>", view.html, re.S)
    assert [unescape(text) for text in commands] == [small.serve_command, fitting.serve_command]
    assert "/models/&lt;b&gt;&amp;c" in commands[1]
    assert f"{small.max_context:,}" in view.html
    # A refusal of the engine is said under its plan.
    mixed = plan(config, layout=Layout(tp=4, dp=2, expert_parallel=True))
    if mixed.refusals:
        assert mixed.refusals[0] in views.plan_table(mixed).text


def test_a_remark_on_several_plans_is_said_once(config: BeamConfig) -> None:
    plans = [
        plan(config, layout=layout)
        for layout in (
            Layout(tp=8),
            Layout(tp=8, expert_parallel=True),
            Layout(tp=4, dp=2, expert_parallel=True),
            Layout(tp=2, dp=4, expert_parallel=True),
            Layout(tp=4, dp=2),
        )
    ]
    view = views.plan_table(plans)
    assert view.html is not None
    notes = [note for p in plans for note in (*p.refusals, *p.notes)]
    repeated = {note for note in notes if notes.count(note) > 1}
    assert len(repeated) == 2
    for note in repeated:
        assert unescape(view.html).count(note) == 1
    for one in plans:
        row = view.html.split(f"<b>{one.layout.name}</b>")[1].split("</tr>")[0]
        marks = set(re.findall("[¹²³]", row))
        foot = {*one.refusals, *one.notes}
        assert marks == {m for m, note in re.findall("([¹²³]) (.*?)</div>", unescape(view.html))
                         if note in foot}  # fmt: skip
        assert len(marks) == len(foot)
    refusal = plans[2].refusals[0]
    assert view.text.count(refusal) == 1
    assert view.text.endswith(f"¹ {refusal}")
    assert view.text.count("¹") == 3


def test_nothing_and_the_models_limit_are_said_in_the_table(config: BeamConfig) -> None:
    nothing, everything = plan(config, "H100", weights="bf16"), plan(config, "GB300")
    assert (nothing.max_context, nothing.max_sequences) == (0, 0)
    view = views.plan_table([nothing, everything])
    assert view.html is not None
    first, second = (part.split("</tr>")[0] for part in view.html.split("<b>TP8</b>")[1:])
    assert first.count(">–</td>") == 2
    assert ">1,048,576 (model&#x27;s limit)</td>" in second
    assert " 0 " not in view.text.splitlines()[0]
    assert "1,048,576 tokens (model's limit)" in view.text.splitlines()[1]
    shorter = plan(config, context=1024, sequences=64, gpu="H200")
    assert ("limit" in views.plan_table(shorter).text) == (shorter.max_context == 1 << 20)


def test_the_copy_button_reads_the_page_and_nothing_else(config: BeamConfig) -> None:
    view = views.plan_table(plan(config, checkpoint="';alert(1);'"))
    assert view.html is not None
    (script,) = re.findall(r'onclick="([^"]*)"', view.html)
    assert "alert" not in script
    assert "querySelector('pre')" in unescape(script)
    assert "<script" not in view.html


def test_names_are_text_and_bundles_small(config: BeamConfig, eight: KVSizing) -> None:
    hostile = plan(config, name=HOSTILE)
    shown = [
        views.kv_growth(kv_curve(eight), model=HOSTILE),
        views.kv_strip(eight, model=HOSTILE),
        views.kv_accounts(eight, model=HOSTILE),
        views.kv_per_gpu(hostile),
        views.plan_table(hostile),
    ]
    for view in shown:
        bundle = view._repr_mimebundle_()
        assert "<script" not in bundle["text/html"]
        if view.figure is not None:
            assert "<script" not in json.dumps(view.figure.to_plotly_json(), default=str)
        assert len(json.dumps(bundle)) < 40_000


def test_the_drafters_colour_stands_out_on_both_themes() -> None:
    from workbench.views.theme import DRAFTER

    def luminance(color: str) -> float:
        channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    for page in ("#ffffff", "#111111"):
        high, low = sorted((luminance(DRAFTER), luminance(page)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 3
    assert DRAFTER not in {*theme.ATTENTION.values(), *theme.MLP.values(), theme.HEAT}
