"""The explorer without a browser: set a slider, press a button, look at the figure's values."""

import json

import numpy as np
import pytest

import workbench
from workbench import views
from workbench.model.beam import Beam
from workbench.model.inspect import Capture, logit_lens
from workbench.views.explorer import Explorer
from workbench.views.view import PLOTLY

PROMPT = "def mean(values):\n    return sum(values) / len(values)\n"


@pytest.fixture
def explorer(beam: Beam) -> Explorer:
    return views.explore(beam, PROMPT, layer=2)


def drawn(explorer: Explorer) -> np.ndarray:
    return np.asarray(explorer.figure.data[0].z)


def test_it_opens_on_the_layer_asked_for(explorer: Explorer, seen: Capture) -> None:
    assert explorer.layer.value == 2
    assert explorer.layer.max == 4
    assert np.array_equal(drawn(explorer), seen.attention[2].mean(0).numpy())
    assert "15 tokens, measured here" in explorer.status.value


def test_the_slider_and_the_head_redraw_everything(
    explorer: Explorer, seen: Capture, beam: Beam
) -> None:
    lens = logit_lens(beam, PROMPT)
    for layer in (4, 0, 3):
        explorer.layer.value = layer
        for head in (None, 0, 3):
            explorer.head.value = -1 if head is None else head
            maps = seen.attention[layer].numpy()
            assert np.array_equal(drawn(explorer), maps.mean(0) if head is None else maps[head])
        bars = explorer.figure.data[2]
        assert list(bars.x) == pytest.approx(lens.top_probs[layer + 1, -1].tolist())
        assert f"layer {layer}" in explorer.figure.layout.annotations[0].text
        assert f"layer {layer} (" in explorer.text
        edge = explorer.figure.data[1]
        assert bool(edge.x) is (layer not in (1, 4))  # only sliding layers have a window


def test_router_load_of_the_layer(explorer: Explorer, seen: Capture) -> None:
    explorer.layer.value = 3
    load, even = explorer.figure.data[3], explorer.figure.data[4]
    counts = np.bincount(seen.router_ids[3].flatten().numpy(), minlength=8)
    assert list(load.y) == pytest.approx(list(counts / counts.sum() * 8))
    assert list(even.y) == [1, 1]
    busiest = int(counts.argmax())
    assert f"{busiest} ({counts[busiest] / counts.sum() * 8:.2f})" in explorer.text
    explorer.layer.value = 0
    assert list(load.y) == []
    assert "dense" in explorer.text


def test_the_readout_is_the_text(explorer: Explorer, seen: Capture) -> None:
    assert seen.hidden is not None
    rms = float(seen.hidden[3, 1:].double().square().mean().sqrt())
    assert f"stream after layer 2: RMS {rms:.3f}" in explorer.text
    first = seen.attention[2].mean(0)[1:, 0].double().mean()
    assert f"attention {float(first):.2f} on the first token" in explorer.text
    for line in explorer.text.splitlines():
        assert line.replace("&", "&amp;").replace("<", "&lt;")[:20] in explorer.readout.value


def test_another_prompt_is_run_once(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.views import explorer as module

    runs = []
    original = module.read
    monkeypatch.setattr(module, "read", lambda *a: runs.append(a) or original(*a))
    explorer.prompt.value = "x = 1\n"
    assert runs == []  # typing runs nothing
    explorer.run.click()
    assert len(runs) == 1
    explorer.layer.value = 4
    explorer.head.value = 1
    assert len(runs) == 1  # the captured values are enough
    again = workbench.capture(explorer.beam, "x = 1\n", attention=[4])
    assert np.array_equal(drawn(explorer), again.attention[4][1].numpy())
    assert list(explorer.figure.layout.yaxis.range) == [len(again.tokens) - 0.5, -0.5]
    assert not explorer.run.disabled


def test_a_bad_prompt_is_told_and_the_old_one_stays(explorer: Explorer) -> None:
    before, text = drawn(explorer).copy(), explorer.text
    for prompt, said in (("", "the prompt is empty"), ("x " * 600, "more than the 512")):
        explorer.prompt.value = prompt
        explorer.run.click()
        assert said in explorer.problem.value
        assert "15 tokens" in explorer.status.value
        assert np.array_equal(drawn(explorer), before)
        assert explorer.text == text
        assert not explorer.run.disabled
    explorer.prompt.value = "x = 1\n"
    explorer.run.click()
    assert explorer.problem.value == ""


def test_labels_are_those_of_the_prompt_shown(explorer: Explorer) -> None:
    axes = explorer.figure.layout.xaxis, explorer.figure.layout.yaxis
    heat = explorer.figure.data[0]
    short = [list(axis.ticktext) for axis in axes]
    assert heat.text is not None
    explorer.read("total = total + 1\n" * 12)
    assert len(explorer.reading.captured.tokens) > 40
    for axis in axes:
        assert (axis.tickmode, axis.tickvals, axis.ticktext) == ("auto", None, None)
    assert axes[0].tickangle is None
    assert heat.text is None
    explorer.read(PROMPT)
    assert [list(axis.ticktext) for axis in axes] == short
    assert [axis.tickmode for axis in axes] == ["array", "array"]
    assert axes[0].tickangle == -90


def test_the_hover_says_which_keys_are_hidden(explorer: Explorer, seen: Capture) -> None:
    for layer in (2, 4):  # sliding, full
        explorer.layer.value = layer
        seen_by = seen.attention[layer].max(0).values.numpy() > 0
        said = [[text == "" for text in row] for row in explorer.figure.data[0].text]
        assert np.array_equal(np.array(said), seen_by)


def test_the_mean_over_heads_can_be_read(explorer: Explorer) -> None:
    assert explorer.head.label == "mean over heads"
    assert None not in [value for _, value in explorer.head.options]


def test_one_load_scale_for_a_prompt_and_none_without_a_router(explorer: Explorer) -> None:
    load = explorer.reading.load
    assert load is not None
    tops = set()
    for layer in range(5):
        explorer.layer.value = layer
        axes = explorer.figure.layout.xaxis3, explorer.figure.layout.yaxis3
        assert [axis.visible for axis in axes] == [layer > 0] * 2
        tops.add(axes[1].range[1])
        assert max(explorer.figure.data[3].y, default=0) <= axes[1].range[1]
    assert len(tops) == 1
    highest = float(load.counts.max()) / float(load.counts[0].sum()) * 8
    assert highest < tops.pop() < highest * 1.2


def test_texts_of_tokens_are_escaped(beam: Beam) -> None:
    explorer = views.explore(beam, "<script>alert(1)</script>")
    assert "<script" not in explorer.readout.value
    assert "<script" not in explorer.status.value
    explorer.read("<script>" * 600)
    assert "<script" not in explorer.problem.value
    assert "<script" not in json.dumps(explorer.figure.to_dict(), default=str)


def test_what_stays_in_a_saved_notebook(explorer: Explorer) -> None:
    bundle = explorer._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["text/plain"] == explorer.text == repr(explorer)
    static = json.dumps(bundle[PLOTLY], allow_nan=False)  # NaN is not JSON
    assert len(static) < 20_000
    assert not bundle[PLOTLY]["config"].get("responsive")
    view = explorer.view()
    assert view.text == explorer.text
    explorer.layer.value = 0
    assert view.text != explorer.text  # what was shown stays


def test_one_figure_widget_with_all_its_traces(explorer: Explorer) -> None:
    """Traces added after the widget is made would be missing when the page first draws it."""
    import plotly.graph_objects as go

    def figures(widget: object) -> int:
        children = getattr(widget, "children", ())
        return isinstance(widget, go.FigureWidget) + sum(map(figures, children))

    assert figures(explorer.widget) == 1
    assert len(explorer.figure._widget_data) == 5
