"""Figures hold the values they are given; texts are fixed; tokens stay text; sizes stay small."""

import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
import torch

import workbench
from workbench import doctor, views
from workbench.errors import InspectionError
from workbench.model import effects
from workbench.model.beam import Beam
from workbench.model.generate import Token
from workbench.model.info import ModelInfo
from workbench.model.inspect import Capture, LogitLens, logit_lens, router_load
from workbench.model.tensors import active_parameters, total_parameters
from workbench.views import theme
from workbench.views.view import PLOTLY, View

PROMPT = "def mean(values):\n    return sum(values) / len(values)\n"
HOSTILE = "<script>alert(1)</script>"


def plain(text: str) -> str:
    """Plotly text without its markup."""
    return re.sub(r"<[^>]+>", " ", text).strip()


def bundle_bytes(view: View) -> int:
    return len(json.dumps(view._repr_mimebundle_()).encode())


def traces(view: View, kind: type) -> list[Any]:
    return [trace for trace in view.figure.data if isinstance(trace, kind)]


@pytest.fixture(scope="module")
def full() -> ModelInfo:
    return workbench.info("beam-501b")


@pytest.fixture(scope="module")
def lens(beam: Beam) -> LogitLens:
    return logit_lens(beam, PROMPT)


@pytest.fixture(scope="module")
def effect(beam: Beam) -> effects.Ablation:
    return effects.ablation(beam, PROMPT)


# -- config only ------------------------------------------------------------------------------


def test_layer_strip_has_one_cell_a_layer(full: ModelInfo) -> None:
    view = views.layer_strip(full)
    bars = {plain(bar.name): bar for bar in traces(view, go.Bar)}
    assert list(bars["full attention (9)"].x) == [3, 9, 15, 21, 27, 33, 39, 45, 51]
    assert list(bars["dense MLP (3)"].x) == [0, 1, 2]
    attention = [*bars["full attention (9)"].x, *bars["sliding attention (43)"].x]
    assert sorted(attention) == list(range(52))
    assert sorted([*bars["dense MLP (3)"].x, *bars["sparse MLP (49)"].x]) == list(range(52))
    assert bars["full attention (9)"].marker.color == theme.FULL
    hover = bars["sliding attention (43)"].hovertemplate
    for said in ("window of 512", "8 KV heads", "head_dim 128", "RoPE"):
        assert said in hover
    assert "SSMax" in bars["full attention (9)"].hovertemplate
    assert "256 experts" in bars["sparse MLP (49)"].hovertemplate
    sizes = bars["sparse MLP (49)"].customdata
    assert sizes[0] == "10.17 B"  # 256 x 3 x 5120 x 2560 + attention + router + norms
    assert view.text.splitlines()[:3] == [
        "beam-501b: 52 layers, 501.01 B parameters",
        "attention  ▄▄▄█▄▄▄▄▄█▄▄▄▄▄█▄▄▄▄▄█▄▄▄▄▄█▄▄▄▄▄█▄▄▄▄▄█▄▄▄▄▄█▄▄▄▄▄█",
        "MLP        ●●●" + "○" * 49,
    ]
    assert "assumed" in view.figure.layout.title.subtitle.text


def test_treemap_adds_up(full: ModelInfo) -> None:
    view = views.parameter_treemap(full)
    (tree,) = traces(view, go.Treemap)
    size = dict(zip(tree.ids, tree.values, strict=True))
    parent = dict(zip(tree.ids, tree.parents, strict=True))
    leaves = set(tree.ids) - set(tree.parents)
    assert sum(size[i] for i in leaves) == total_parameters(full.config)
    for node in set(tree.parents) - {""}:
        assert size[node] == sum(size[i] for i in tree.ids if parent[i] == node)
    working = sum(size[i] for i in leaves if not i.endswith("/waiting"))
    assert working == active_parameters(full.config)
    (bars,) = traces(view, go.Bar)
    assert sum(bars.customdata) == active_parameters(full.config)
    assert bars.x[0] / bars.x[1] == pytest.approx(bars.customdata[0] / bars.customdata[1])
    assert view.text.startswith("beam-501b: 501.01 B parameters, 23.18 B active on each token\n")
    headings = [plain(note.text) for note in view.figure.layout.annotations]
    assert any("501.01 B" in heading for heading in headings)
    assert any("23.18 B" in heading for heading in headings)


def test_position_reach_draws_the_closed_forms(full: ModelInfo) -> None:
    tiny = workbench.info("beam-tiny")
    view = views.position_reach([full, tiny])
    curve = view.figure.data[0]
    for position, factor in zip(curve.x, curve.y, strict=True):
        assert factor == pytest.approx((1 + position / 2048) ** 0.1)
    assert (curve.x[0], curve.x[-1]) == (1, 1_048_576)
    waves = next(t for t in view.figure.data if plain(t.name or "") == "beam-501b")
    assert list(waves.y) == pytest.approx([2 * np.pi * 10000 ** (i / 64) for i in range(64)])
    windows = [t.y[0] for t in view.figure.data if "window" in plain(t.name or "")]
    assert windows == [512, 256]
    assert "31 turn within the window of 512" in view.text
    assert sum(w <= 512 for w in waves.y) == 31


def test_residual_scale_draws_factors_and_stream(beam: Beam) -> None:
    info = _info(beam)
    rms = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    view = views.residual_scale(info, rms)
    stream, sublayer, left, measured = view.figure.data[:4]
    n = np.arange(2, 12)
    assert list(sublayer.y) == pytest.approx(list(1 / np.sqrt(n)))
    assert list(stream.y) == pytest.approx(list(np.sqrt((n - 1) / n)))
    assert list(left.y) == pytest.approx([1 / np.sqrt(11)] * 10)
    assert list(measured.y) == rms
    kinds = [theme.ATTENTION[kind] for kind in beam.config.layer_types]
    assert list(measured.marker.color) == [theme.NEUTRAL, *kinds]
    assert "1.00 2.00 3.00 4.00 5.00 6.00" in view.text
    assert "measured" not in views.residual_scale(info).text
    with pytest.raises(InspectionError, match="6 places"):
        views.residual_scale(info, [1.0])


def _info(beam: Beam) -> Any:
    """The info of a model that is no preset."""
    return replace(workbench.info("beam-tiny"), name=beam.name, config=beam.config)


# -- measured ---------------------------------------------------------------------------------


def test_attention_maps_hold_the_captured_probabilities(seen: Capture) -> None:
    count = len(seen.tokens)
    for head in (None, 2):
        view = views.attention_maps(seen, sliding=2, full=4, head=head, queries=5)
        sliding, full = traces(view, go.Heatmap)
        for trace, layer in ((sliding, 2), (full, 4)):
            maps = seen.attention[layer]
            expected = (maps.mean(0) if head is None else maps[head])[-5:]
            assert np.array_equal(np.asarray(trace.z), expected.numpy())
            assert trace.y0 == count - 5
        scale = view.figure.layout.coloraxis
        assert (scale.cmin, scale.cmax) == (0, 1)
    # The edge of the window: between the last key that is hidden and the first that is seen.
    edge = next(t for t in traces(view, go.Scatter) if t.x)
    assert edge.xaxis == "x"
    p = np.asarray(sliding.z)
    for row, (x, y) in enumerate(zip(edge.x[::2], edge.y[::2], strict=True)):
        assert y == count - 5 + row - 0.5
        assert (p[row, : int(x + 0.5)] == 0).all()
        assert p[row, int(x + 0.5)] > 0


def test_attention_maps_say_what_is_missing(beam: Beam, seen: Capture) -> None:
    assert views.attention_maps(seen).text.startswith("layer 0 (sliding), mean over heads")
    with pytest.raises(InspectionError, match="layer 1 is not a sliding layer"):
        views.attention_maps(seen, sliding=1)
    with pytest.raises(InspectionError, match="no head 4"):
        views.attention_maps(seen, head=4)
    without = workbench.capture(beam, PROMPT, attention=[0])
    with pytest.raises(InspectionError, match="no full layer"):
        views.attention_maps(without)


def test_router_load_draws_shares(seen: Capture) -> None:
    load = router_load(seen)
    view = views.router_load(load, model="small")
    (heat,) = traces(view, go.Heatmap)
    chosen = [seen.router_ids[i].flatten().numpy() for i in (1, 2, 3, 4)]
    counts = np.stack([np.bincount(ids, minlength=8) for ids in chosen])
    expected = counts / (len(seen.tokens) * 2) * 8
    assert np.asarray(heat.z) == pytest.approx(expected)
    assert (np.asarray(heat.customdata) == counts).all()
    (bars,) = traces(view, go.Bar)
    assert list(bars.x) == pytest.approx(list(expected.max(1)))
    assert f"layer 1: busiest expert {counts[0].argmax()} at {expected[0].max():.1f}" in view.text


def test_ablation_effect_draws_rises(effect: effects.Ablation, beam: Beam) -> None:
    view = views.ablation_effect(effect, beam.config, model="small")
    bars = traces(view, go.Bar)
    drawn = {y: x for bar in bars for x, y in zip(bar.x, bar.y, strict=True)}
    assert [drawn[i] for i in range(5)] == pytest.approx([v - effect.loss for v in effect.layers])
    colors = {y: bar.marker.color for bar in bars for y in bar.y}
    assert colors[1] == colors[4] == theme.FULL
    (heat,) = traces(view, go.Heatmap)
    rises = np.array([effect.experts[i] for i in (1, 2, 3, 4)]) - effect.loss
    assert np.asarray(heat.z) == pytest.approx(rises)
    assert (heat.zmin, heat.zmax) == pytest.approx((-abs(rises).max(), abs(rises).max()))
    layer, expert = np.unravel_index(rises.argmax(), rises.shape)
    assert f"expert {expert} of layer {layer + 1}" in view.text


def test_logit_lens_shows_the_likeliest(lens: LogitLens, beam: Beam) -> None:
    view = views.logit_lens(lens, beam.config, last=4)
    (heat,) = traces(view, go.Heatmap)
    assert np.array_equal(np.asarray(heat.z), lens.top_probs[:, -4:, 0].numpy())
    assert view.html is not None
    assert view.html.count("position ") == 4
    last = view.text.splitlines()[-1]
    best = lens.texts[int(lens.top_ids[-1, -1, 0])]
    assert last.startswith("layer 4")
    assert best in last
    assert f"{float(lens.top_probs[-1, -1, 0]):.2f}" in last
    assert last.endswith("KL to the end 0.0 nats")


def test_written_tints_by_surprise() -> None:
    tokens = [
        Token(sequence=0, index=i, id=i, text=text, logprob=logprob)
        for i, (text, logprob) in enumerate([("sure", 0.0), ("half", -0.6931), ("odd", -40.0)])
    ]
    view = views.written("start ", tokens, model="small")
    assert [-y for y in view.figure.data[0].y] == [0.0, -0.6931, -40.0]
    assert view.html is not None
    # Every token is a span with a hover; the swatches of the legend have none.
    tints = [float(a) for a in re.findall(r"rgba\(230,159,0,([\d.]+)\)[^>]+title=", view.html)]
    assert len(tints) == 3
    assert tints[0] == 0 < tints[1] < tints[2] <= 0.7
    assert "p = 0.50" in view.html
    assert view.text == "start surehalfodd\n-- 3 new tokens, 13.56 nats a token"


# -- all of them ------------------------------------------------------------------------------


def all_views(
    beam: Beam, seen: Capture, lens: LogitLens, effect: effects.Ablation
) -> dict[str, View]:
    full = workbench.info("beam-501b")
    return {
        "strip": views.layer_strip(full),
        "treemap": views.parameter_treemap(full),
        "reach": views.position_reach([full, workbench.info("beam-tiny")]),
        "residual": views.residual_scale(_info(beam), effects.stream_rms(seen.hidden)),
        "attention": views.attention_maps(seen),
        "load": views.router_load(router_load(seen)),
        "ablation": views.ablation_effect(effect, beam.config),
        "lens": views.logit_lens(lens, beam.config),
        "written": views.written(PROMPT, list(workbench.stream(beam, PROMPT, max_new_tokens=90))),
    }


def test_views_are_small_and_repeatable(
    beam: Beam, seen: Capture, lens: LogitLens, effect: effects.Ablation
) -> None:
    once, twice = (all_views(beam, seen, lens, effect) for _ in range(2))
    for name, view in once.items():
        assert bundle_bytes(view) < 45_000, name
        assert view._repr_mimebundle_() == twice[name]._repr_mimebundle_(), name
        assert repr(view) == str(view) == view.text
        assert view._repr_mimebundle_()["text/plain"] == view.text
        if name != "written":  # that is what the model wrote
            assert max(map(len, view.text.splitlines())) <= 180, name
        json.dumps(view._repr_mimebundle_(), allow_nan=False)


def test_every_figure_says_where_its_numbers_come_from(
    beam: Beam, seen: Capture, lens: LogitLens, effect: effects.Ablation
) -> None:
    for name, view in all_views(beam, seen, lens, effect).items():
        subtitle = plain(view.figure.layout.title.subtitle.text)
        assert re.search("measured here|modelled|counted|assumed|chosen", subtitle), name
        # Backgrounds are the page's, and nothing that must be read has a colour of its own.
        assert view.figure.layout.template.layout.paper_bgcolor == "rgba(0,0,0,0)"
        assert view.figure.layout.title.text.startswith("<span style="), name
        # Titles of a page start at one place: where the template says, and no figure else.
        assert view.figure.layout.template.layout.title.xref == "container", name
        assert (view.figure.layout.title.x, view.figure.layout.title.xref) == (None, None), name
        for axis in [*view.figure.select_xaxes(), *view.figure.select_yaxes()]:
            if axis.title.text:
                assert axis.title.text.startswith("<span style="), name


def test_a_long_prompt_stays_below_the_notebooks_limit(beam: Beam) -> None:
    long = workbench.capture(beam, list(range(5, 361)), attention=[0, 1])
    assert bundle_bytes(views.attention_maps(long)) < 120_000


def test_views_show_their_figure_or_their_page(lens: LogitLens, beam: Beam) -> None:
    figure = views.layer_strip(workbench.info("beam-tiny"))._repr_mimebundle_()
    assert set(figure) == {"text/plain", "text/html", PLOTLY}
    # "responsive" makes JupyterLab's renderer flatten a figure.
    assert not figure[PLOTLY]["config"].get("responsive")
    assert figure[PLOTLY]["layout"]["height"] > 100
    page = views.logit_lens(lens, beam.config)._repr_mimebundle_()
    assert set(page) == {"text/plain", "text/html"}


def test_a_bundle_keeps_of_the_template_what_its_figure_uses() -> None:
    plain = theme.figure("a", "b", height=100, showlegend=False)
    full = theme.figure("a", "b", height=100, margin={"l": 1, "r": 1, "t": 1, "b": 1})
    full.add_annotation(text="c")
    part = theme.figure("a", "b", height=100, margin={"l": 1})
    one, other, third = (
        View(figure=figure, text="")._repr_mimebundle_()[PLOTLY]["layout"]["template"]["layout"]
        for figure in (plain, full, part)
    )
    # What nobody sees: buttons that are hidden, a legend and notes that are not there.
    assert {*theme.TEMPLATE.layout.to_plotly_json()} - {*one} == {
        "modebar", "annotationdefaults", "legend"
    }  # fmt: skip
    assert {*one} - {*other} == {"margin"}  # it has its own
    assert {"annotationdefaults", "legend"} <= {*other}
    assert "margin" in third
    assert plain.layout.template.layout.modebar.color  # the figure itself is as it was


def test_token_text_never_becomes_markup(beam: Beam, seen: Capture, lens: LogitLens) -> None:
    hostile = (*seen.tokens[:-1], HOSTILE)
    captured = replace(seen, tokens=hostile)
    read = replace(lens, tokens=hostile, texts=dict.fromkeys(lens.texts, HOSTILE))
    token = Token(sequence=0, index=0, id=1, text=HOSTILE, logprob=-1.0)
    shown = [
        views.attention_maps(captured, queries=40),
        views.logit_lens(read, beam.config),
        views.written(HOSTILE, [token], model=HOSTILE),
    ]
    for view in shown:
        data = view._repr_mimebundle_()
        assert "<script" not in data["text/html"]
        assert "<script" not in json.dumps(view.figure.to_plotly_json(), default=str)
    assert HOSTILE in shown[2].text  # the text form is text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in shown[2]._repr_mimebundle_()["text/html"]


def test_the_machines_report() -> None:
    report = doctor.Diagnosis(
        machine=workbench.machine(),
        runs=(doctor.Capability(name="tiny", possible=True, reason="measured <here>"),),
        checks=(
            doctor.Check(name="fine", purpose="model", ok=True, found="yes"),
            doctor.Check(
                name="gone", purpose="serving", ok=False, found="not there", remedy="install it"
            ),
        ),
    )
    view = views.this_machine(report)
    assert "✓ tiny: measured <here>" in view.text
    assert "– gone (serving): not there; install it" in view.text
    assert "fine" not in view.text
    assert view.html is not None
    assert "measured &lt;here&gt;" in view.html
    assert set(view._repr_mimebundle_()) == {"text/plain", "text/html"}
    assert torch.__version__ in view.text
