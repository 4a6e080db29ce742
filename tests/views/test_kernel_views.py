"""Views of kernels: they hold the values they are given, and text from code stays text."""

import json
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

import workbench
from workbench.errors import WorkbenchError
from workbench.files import read_json
from workbench.kernels import ledger, reference, registry
from workbench.kernels.check import Verdict
from workbench.kernels.results import PACKAGED, BenchResult, BenchRow, recorded
from workbench.kernels.roofline import Rates, data_sheet_rates
from workbench.kernels.shapes import Shapes
from workbench.kernels.tables import Resolved
from workbench.kernels.trial import Trial
from workbench.kernels.triton_compile import Compiled
from workbench.model.beam import Beam
from workbench.model.swap import Comparison, Side, compare
from workbench.views import kernel_pages, kernel_rates
from workbench.views.kernel_swap import swap_comparison
from workbench.views.kernel_words import html_table
from workbench.views.view import View

HOSTILE = "<script>alert(1)</script>"
RATES = Rates(label="GPU", kind="measured here", bandwidth=2e12, flops={"bf16": 4e14, "fp32": 2e13})


def sound(view: View) -> str:
    """The bundle as JSON; nothing of what was given reads as markup."""
    bundle = view._repr_mimebundle_()
    marked = {kind: data for kind, data in bundle.items() if kind != "text/plain"}
    assert "<script>" not in json.dumps(marked)
    return json.dumps(bundle)


# -- pages ------------------------------------------------------------------------------------


def test_the_table_says_what_differs_and_what_was_checked() -> None:
    def variant(logits: Any, cap: float) -> Any:
        return reference.softcap(logits, cap)

    registry.register("softcap", "seen")(variant)
    try:
        ledger.note(
            Verdict(op="softcap", variant="seen", status="refused", gate="row error",
                    reason=f"{HOSTILE} 3 where 1 is allowed", cases=2)
        )  # fmt: skip
        rows = [
            Resolved(op="softcap", layers="", requested="seen", resolved="seen"),
            Resolved(op="boundary", layers="full", requested="vllm", resolved="torch",
                     reason="no GPU"),
        ]  # fmt: skip
        view = kernel_pages.kernel_table(rows)
    finally:
        registry.unregister("softcap", "seen")
    sound(view)
    lines = view.text.splitlines()
    assert "✗ refused by the gate “row error”" in lines[1]
    assert lines[2].split()[:4] == ["boundary", "full", "vllm", "torch"]
    assert lines[2].endswith("no GPU")
    assert "1 of 2 lines not the reference" in (view.html or "")


def test_a_table_says_little_a_cell_and_breaks_no_short_one() -> None:
    head = ("name", "words", "more")
    rows = [
        ["a_name", "two words", ""],
        ["b", "", "a sentence of more than a line"],
    ]
    html = html_table(head, [*rows, ["c", ("<b>", "red"), "x"]], mono=1)
    cells = re.findall(r"<td([^>]*)>(.*?)</td>", html)
    assert [text for _, text in cells] == [*rows[0], *rows[1], "c", "&lt;b&gt;", "x"]
    style = {text: how for how, text in cells if text}
    assert [how for how, text in cells if not text] == ["", ""]
    for text in ("a_name", "b", "c"):
        assert "font-family:var(--m)" in style[text]
        assert "nowrap" not in style[text]  # one word has nowhere to break
    assert "--m:var(--jp-code-font-family,monospace)" in html.partition("<tr")[0]
    assert "--f:var(--jp-ui-font-color2,inherit)" in html.partition("<tr")[0]
    assert "white-space:nowrap" in style["two words"]
    assert "overflow-wrap:anywhere" in style[rows[1][2]]
    assert "nowrap" not in style[rows[1][2]]
    assert "color:red" in style["&lt;b&gt;"]
    # Beside a cell of several lines the others stay at its top.
    top = {text for text, how in style.items() if "vertical-align:top" in how}
    assert top == {"b", rows[1][2]}


def test_operations_have_the_bytes_and_times_worked_out_here() -> None:
    config = workbench.resolve("beam-501b").config
    shapes = Shapes.of(config, 8, label="rank")
    lines = kernel_pages.kernel_operations(shapes, RATES, tokens=8).text.splitlines()
    line = next(x for x in lines if x.startswith("qkvg"))
    rows = 2 * (config.num_attention_heads // 8 + 1) * config.head_dim  # one KV head a rank
    width = config.hidden_size
    moved = 2 * (rows * width + 8 * (rows + width))
    assert f"{moved / 1e6:.3g} MB" in line
    assert f"{2 * 8 * rows * width / 1e6:.3g} M" in line
    assert line.split()[-3:] == [f"{moved / 2e12 * 1e6:.3g}", "µs", "memory"]
    assert "the rates of GPU (measured here)" in lines[0]


def test_a_trial_shows_its_stages_and_why_it_was_refused() -> None:
    compiled = (
        Compiled(job="mine", kernel="k", target="sm_90", registers=40, shared_bytes=512,
                 spill_bytes=0),
        Compiled(job="mine", kernel="k", target="sm_100", error=f"too large {HOSTILE}"),
    )  # fmt: skip
    passed = Verdict(op="rms_norm", variant="mine", status="passed", cases=5, max_error=2e-3,
                     own_error=1e-3)  # fmt: skip
    good = kernel_pages.kernel_trial(
        Trial(op="rms_norm", variant="mine", status="passed", verdict=passed, compiled=compiled,
              untimed="no GPU here")
    )  # fmt: skip
    sound(good)
    assert "may be swapped in" in good.text
    assert "40 registers, 512 B shared, no spills" in good.text
    assert "error 2.0e-03, the reference's own 1.0e-03" in good.text
    assert "no GPU here" in good.text
    bad = kernel_pages.kernel_trial(
        Trial(op="rms_norm", variant="mine", status="crashed", error=f"signal SIGSEGV {HOSTILE}")
    )
    sound(bad)
    assert "stays out" in bad.text
    assert "SIGSEGV" in bad.text
    assert "may be swapped in" not in bad.text


def test_compiled_kernels_show_the_largest_of_their_versions() -> None:
    some = [
        Compiled(job="a", kernel="_tile_kernel", target=target, registers=registers,
                 shared_bytes=shared, spill_bytes=spilled)
        for target, registers, shared, spilled in (
            ("sm_100", 60, 4096, 0), ("sm_90", 50, 1024, 0), ("sm_90", 40, 2048, 8))
    ]  # fmt: skip
    line = kernel_pages.compiled_kernels(some).text.splitlines()[-1]
    assert line.split("  ") == [x for x in line.split("  ") if x] or "50, 2.0 KiB, 8 B" in line
    assert "50, 2.0 KiB, 8 B" in line
    assert line.index("50, 2.0") < line.index("60, 4.0 KiB, nothing")
    with pytest.raises(WorkbenchError, match="compile some"):
        kernel_pages.compiled_kernels([])


def test_recorded_compilations_are_shown_with_their_source() -> None:
    document = read_json(PACKAGED / "compiled-sm90-sm100.json")
    text = kernel_pages.compiled_kernels(document).text
    assert f"recorded, {document['date']}" in text
    assert "was not run" in text
    rows = [r for r in document["rows"] if (r["op"], r["target"]) == ("softcap", "sm_90")]
    line = next(x for x in text.splitlines() if x.startswith("softcap"))
    assert f"{max(r['registers'] for r in rows)}, " in line


# -- A beside B -------------------------------------------------------------------------------


def comparison(**values: Any) -> Comparison:
    side = Side(name="A", rows=())
    given: dict[str, Any] = {
        "model": "small", "dtype": "float32", "device": "cpu", "prompt_tokens": 3,
        "a": replace(side, step_seconds=(0.010, 0.030, 0.020)),
        "b": replace(side, name="B", step_seconds=(0.004, 0.006, 0.005)),
        "relative_error": 2e-5, "largest_difference": 0.1, "divergence": 3e-4, "limit": 1e-4,
        "limit_from": "fixed", "far": 0, "own_error": None, "against_exact": None,
        "tokens": ((5, 5), (7, 9)),
        "margins": (1.0, 0.01), "slack": (0.5, 0.02), "per_position": (1e-5, 0.0, 2e-5, 3e-4),
    }  # fmt: skip
    return Comparison(**given | values)


def test_a_comparison_draws_errors_limit_tokens_and_times() -> None:
    view = swap_comparison(comparison())
    sound(view)
    line, crosses, limit, *_ = view.figure.data
    assert list(line.x) == [0, 1, 2, 3]
    assert list(line.customdata) == [1e-5, 0.0, 2e-5, 3e-4]
    assert list(line.y) == pytest.approx([1e-5, 1e-6, 2e-5, 3e-4])  # zero: a decade below all
    assert list(crosses.x) == [3]  # the second new token follows position 3
    assert set(limit.y) == {1e-4}
    bars = [t for t in view.figure.data if isinstance(t, go.Bar)]
    assert [bar.y[0] for bar in bars] == pytest.approx([20.0, 5.0])
    assert bars[0].error_y.array[0] == pytest.approx(10.0)
    assert bars[0].error_y.arrayminus[0] == pytest.approx(10.0)
    assert "1 of 2 the same" in view.text
    assert "A 7, B 9, A's margin 0.01" in view.text
    assert "KL about 3e-04 nats" in view.text


def test_what_equals_to_the_last_bit_is_no_error() -> None:
    view = swap_comparison(comparison(per_position=(0.0, 0.0, 0.0, 0.0)))
    assert set(view.figure.data[0].marker.symbol) == {"circle-open"}
    words = [note.text for note in view.figure.layout.annotations]
    assert any("none, equal to the last bit" in word for word in words)
    some = swap_comparison(comparison()).figure
    assert list(some.data[0].marker.symbol).count("circle-open") == 1


def test_many_swapped_operations_are_counted_by_variant() -> None:
    rows = [Resolved(op=op, layers="all", requested="triton", resolved="triton")
            for op in ("qkvg", "router", "expert_mlp")]  # fmt: skip
    rows.append(Resolved(op="boundary", layers="full", requested="vllm", resolved="vllm"))
    text = swap_comparison(comparison(b=Side(name="B", rows=tuple(rows)))).text
    assert "B: triton in 3 operations, boundary vllm (full)" in text


def test_interpreted_kernels_show_no_speed() -> None:
    b = Side(name="B", rows=(), untimed="interpreted: softcap; not a measure of speed")
    view = swap_comparison(comparison(b=b))
    assert not [t for t in view.figure.data if isinstance(t, go.Bar)]
    words = [note.text for note in view.figure.layout.annotations]
    assert any("not a measure of speed" in word for word in words)
    assert "not a measure of speed" in view.text


def test_a_comparison_without_limit_or_numbers_is_drawn() -> None:
    nothing = (math.nan,) * 4
    view = swap_comparison(
        comparison(limit=math.inf, per_position=nothing, relative_error=math.nan)
    )
    sound(view)
    assert "not a number" in view.text
    assert "they differ" in view.text


def test_tokens_stay_text(beam: Beam) -> None:
    class Reader:
        def decode(self, ids: list[int]) -> str:
            return HOSTILE

    view = swap_comparison(comparison(), model_tokens=Reader())
    assert "<script>" not in view.figure.to_json()
    assert "<script>" not in view._repr_mimebundle_()["text/html"]


def test_a_real_comparison_is_drawn(beam: Beam) -> None:
    assert beam.tokenizer is not None
    found = compare(
        beam, (), registry.rules(expert_mlp="dense"), beam.tokenizer.encode("a = 1\n"), new_tokens=2
    )
    assert found is not None
    view = swap_comparison(found, model_tokens=beam.tokenizer)
    assert len(view.figure.data[0].x) == found.positions
    assert "B: expert_mlp dense" in view.text
    assert len(sound(view)) < 12_000


# -- rates ------------------------------------------------------------------------------------


def row(op: str, variant: str, microseconds: float | None, **values: Any) -> BenchRow:
    given: dict[str, Any] = {
        "op": op, "variant": variant, "tokens": 8, "tp": 8, "status": "passed",
        "bytes": 4e6, "flops": 8e6, "math": "bf16", "bound_microseconds": 2.0, "limit": "memory",
    }  # fmt: skip
    if microseconds is not None:
        given |= {"microseconds": microseconds, "roofline_fraction": 2.0 / microseconds}
    return BenchRow(**given | values)


def result(*rows: BenchRow) -> BenchResult:
    return BenchResult(
        rows=rows, device="cuda", hardware="H200 of a test", peaks=RATES.to_dict(),
        versions={"torch": "2.0", "triton": "3.0"}, date="2026-01-02", how="recorded",
    )  # fmt: skip


@pytest.fixture
def bench() -> BenchResult:
    return result(
        row("qkvg", "torch", 10.0, ratio_to_reference=1.0),
        row("qkvg", "triton", 4.0, ratio_to_reference=2.5),
        row("qkvg", "mine", None, status="refused", gate="row error"),
        row("decode_attention", "triton", 5.0, flavour="full"),
        row("decode_attention", "triton", 5.0, flavour="full fp8"),
        row("qkvg", "torch", 20.0, tokens=64, tp=4),
        row("dynamic_conv", "triton", 5.0),
    )


def drawn(view: View, kind: Any) -> list[Any]:
    return [t for t in view.figure.data if isinstance(t, kind) and t.visible is True]


def test_points_lie_where_bytes_flops_and_time_put_them(bench: BenchResult) -> None:
    view = kernel_rates.kernel_roofline(bench)
    assert bench.source in view.text
    assert "recorded on H200 of a test, 2026-01-02 (torch 2.0, triton 3.0)" in view.text
    points = {
        (text, trace.meta): (x, y)
        for trace in drawn(view, go.Scatter)
        for text, x, y in zip(trace.text, trace.x, trace.y, strict=True)
    }
    assert set(points) == {("qkvg", "torch"), ("qkvg", "triton"),
                           ("decode_attention, full", "triton")}  # fmt: skip
    assert points["qkvg", "triton"] == pytest.approx((2.0, 8e6 / 4e-6))
    roof = view.figure.data[0]
    knee = 4e14 / 2e12
    assert roof.x[1] == pytest.approx(knee)
    assert roof.y[1] == roof.y[2] == pytest.approx(4e14)
    assert roof.y[0] / roof.x[0] == pytest.approx(2e12)


def test_the_menu_shows_the_rows_of_its_entry(bench: BenchResult) -> None:
    view = kernel_rates.kernel_roofline(bench)
    menu = view.figure.layout.updatemenus[0]
    assert [b.label for b in menu.buttons] == ["TP8, 8 tokens", "TP4, 64 tokens"]
    other = menu.buttons[1].args[0]["visible"]
    assert len(other) == len(view.figure.data)
    names = [
        (text, trace.meta)
        for trace, on in zip(view.figure.data, other, strict=True)
        if on and trace.text is not None
        for text in trace.text
    ]
    assert names == [("qkvg", "torch")]
    chosen = kernel_rates.kernel_roofline(bench, tokens=64)
    assert "TP4, 64 tokens" in chosen.text
    assert chosen.figure.layout.updatemenus[0].active == 1


def test_one_rank_has_a_menu_of_its_own_and_near_counts_stand_for_each_other() -> None:
    rows = [row("qkvg", "torch", 10.0, tp=tp, tokens=n) for tp in (8, 4) for n in (1, 7, 8, 64)]

    def labels(**chosen: int) -> list[str]:
        view = kernel_rates.kernel_fractions(result(*rows), **chosen)
        return [b.label for b in view.figure.layout.updatemenus[0].buttons]

    assert labels(tp=4) == ["TP4, 1 token", "TP4, 8 tokens", "TP4, 64 tokens"]
    assert "TP4, 7 tokens" in labels(tp=4, tokens=7)
    assert len(labels()) == 6


def test_the_engines_time_over_each_variants_is_said() -> None:
    rows = [row("qkvg", "triton", 4.0), row("qkvg", "vllm", 6.0), row("softcap", "triton", 4.0)]
    lines = kernel_rates.kernel_fractions(result(*rows)).text.splitlines()
    assert lines[1].endswith("× vllm")
    assert lines[2].split()[-1] == "1.50"
    assert lines[3].split()[-1] == "1.00"
    assert lines[4].split()[-1] == "50%"  # nothing of the engine's to compare with


def test_a_full_record_makes_figures_that_a_saved_notebook_can_hold() -> None:
    rows = [
        row(op, variant, 7.0 + n, flavour=flavour, tp=tp, tokens=tokens)
        for op in (*kernel_pages.OPS, "dynamic_conv", "selector_walk")
        for flavour in (("sliding", "full", "full fp8") if "attention" in op else ("",))
        for n, variant in enumerate(("torch", "compile", "triton", "vllm", "vllm_fa3"))
        for tp in (8, 4)
        for tokens in (1, 7, 8, 64, 1024)
    ]
    for draw in (kernel_rates.kernel_roofline, kernel_rates.kernel_fractions):
        bundle = draw(result(*rows), tp=8, tokens=8)._repr_mimebundle_()
        assert len(json.dumps(bundle, indent=1)) < 75_000


def test_all_kinds_of_inputs_and_the_drafter_when_asked_for(bench: BenchResult) -> None:
    text = kernel_rates.kernel_fractions(bench, every=True).text
    assert "dynamic_conv" in text
    assert "full fp8" in text
    assert "dynamic_conv" not in kernel_rates.kernel_fractions(bench).text


def test_bars_are_the_fractions_and_what_was_refused_has_none(bench: BenchResult) -> None:
    view = kernel_rates.kernel_fractions(bench, tp=8, tokens=8)
    bars = {trace.name: trace for trace in drawn(view, go.Bar)}
    by = {name.split(">")[1].split("<")[0]: trace for name, trace in bars.items()}
    assert set(by) == {"torch", "triton"}
    np.testing.assert_allclose(by["torch"].x, [0.2], rtol=1e-6)
    np.testing.assert_allclose(by["triton"].x, [0.5, 0.4], rtol=1e-6)
    axis = view.figure.layout.yaxis
    assert [word.split(">")[1].split("<")[0] for word in axis.ticktext] == [
        "qkvg", "decode_attention, full"]  # fmt: skip
    # Both bars of the first operation lie around its name, no bar on another.
    assert (by["torch"].y[0] + by["triton"].y[0]) / 2 == pytest.approx(axis.tickvals[0])
    assert by["triton"].y[1] == pytest.approx(axis.tickvals[1])
    assert by["triton"].y[1] - by["triton"].y[0] > 1
    assert "mine" not in view.text


def test_nothing_timed_is_said(bench: BenchResult) -> None:
    with pytest.raises(WorkbenchError, match="nothing passed"):
        kernel_rates.kernel_roofline(result(row("qkvg", "mine", None, status="refused")))
    with pytest.raises(WorkbenchError, match="tp=2; there are TP8, 8 tokens; TP4, 64 tokens"):
        kernel_rates.kernel_roofline(bench, tp=2)
    with pytest.raises(WorkbenchError, match="tp=4, tokens=8; there are TP4, 64 tokens"):
        kernel_rates.kernel_roofline(bench, tp=4, tokens=8)


def test_data_sheet_rates_are_named_as_such() -> None:
    shapes = Shapes.of(workbench.resolve("beam-tiny").config)
    text = kernel_pages.kernel_operations(shapes, data_sheet_rates("H200")).text
    assert "the rates of H200 (data sheet)" in text


def test_a_smaller_menu_and_none() -> None:
    bench = recorded("H200")[0]
    whole = kernel_rates.kernel_roofline(bench, tp=8, tokens=8)
    some = kernel_rates.kernel_roofline(bench, tp=8, tokens=8, among=(1024,))
    labels = [b.label for b in some.figure.layout.updatemenus[0].buttons]
    assert len(labels) == 2 < len(whole.figure.layout.updatemenus[0].buttons)
    assert some.text == whole.text
    alone = kernel_rates.kernel_fractions(bench, tp=8, tokens=64, menu=False)
    assert not alone.figure.layout.updatemenus
    assert all(trace.visible for trace in alone.figure.data)
    assert alone.text == kernel_rates.kernel_fractions(bench, tp=8, tokens=64).text
