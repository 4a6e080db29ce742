"""The explorer: one prompt, every layer of the model at the turn of a slider."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets
import plotly.graph_objects as go

from workbench.errors import WorkbenchError
from workbench.model.effects import stream_rms
from workbench.model.inspect import Capture, LogitLens, RouterLoad, capture, logit_lens, router_load
from workbench.views import attention, theme
from workbench.views.dashboard import Dashboard
from workbench.views.numbers import plural
from workbench.views.view import View

if TYPE_CHECKING:
    from workbench.model.beam import Beam

_ATTENTION, _EDGE, _LENS, _ROUTER, _EVEN = range(5)  # the traces, in the order they are added
_TITLES = range(3)  # the annotations: attention, lens, router
_MEAN = -1  # the head selector's value for the mean over heads
_MOST_TOKENS = 512  # attention maps of all layers are kept, and they grow with the square


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one prompt gave: computed once, shown for any layer and head."""

    captured: Capture
    lens: LogitLens
    load: RouterLoad | None
    rms: tuple[float, ...]


def read(beam: Beam, prompt: str) -> Reading:
    """Run the prompt and keep what the explorer shows.

    Raises:
        WorkbenchError: the prompt is empty, cannot be run, or is longer than the explorer takes.
    """
    captured = capture(beam, prompt, attention=True)
    if len(captured.tokens) > _MOST_TOKENS:
        raise WorkbenchError(
            f"the prompt has {len(captured.tokens)} tokens, more than the {_MOST_TOKENS} the "
            "explorer shows; shorten it, or use capture() and attention_maps()"
        )
    assert captured.hidden is not None
    return Reading(
        captured=captured,
        lens=logit_lens(beam, prompt),
        load=router_load(captured) if captured.router_ids else None,
        rms=stream_rms(captured.hidden),
    )


class Explorer(Dashboard):
    """Prompt box, layer slider and head selector over attention, logit lens and router load."""

    def __init__(self, beam: Beam, prompt: str, *, layer: int = 0, head: int | None = None) -> None:
        self.beam = beam
        self.reading = read(beam, prompt)
        heads = beam.config.num_attention_heads // beam.shard.world
        self.prompt = widgets.Textarea(
            value=prompt,
            description="prompt",
            tooltip="Prompt",
            layout={"width": "calc(100% - 4px)", "height": "64px"},
            continuous_update=False,
        )
        self.prompt.add_class("bw-explore-prompt")
        self.run = widgets.Button(
            description="Run",
            tooltip="Run the prompt through the model",
            layout={"flex": "0 0 auto"},
        )
        self.layer = widgets.IntSlider(
            value=layer,
            min=0,
            max=beam.config.num_hidden_layers - 1,
            description="layer",
            layout={"width": "46%"},
        )
        self.head = widgets.Dropdown(
            # The page shows no choice whose value is None.
            options=[("mean over heads", _MEAN), *((f"head {i}", i) for i in range(heads))],
            value=_MEAN if head is None else head,
            description="head",
            layout={"width": "30%"},
        )
        self.status = widgets.HTML()
        self.problem = widgets.HTML()
        self.readout = widgets.HTML()
        # Made whole: traces added to an empty widget reach the page after it has drawn without.
        self.figure = go.FigureWidget(self._frame())
        # Unlike a saved figure, a widget is not resized by JupyterLab. It is drawn before it is on
        # the page, 700 px wide; a change of its layout once a view of it exists draws it anew.
        self.figure._config = {**self.figure._config, **theme.CONFIG, "responsive": True}
        self.figure._view_count = 0
        self.figure.observe(self._viewed, "_view_count")
        self.widget = widgets.VBox(
            [
                self.prompt,
                widgets.HBox([self.run, self.status]),
                self.problem,
                widgets.HBox([self.layer, self.head]),
                self.figure,
                self.readout,
            ]
        )
        self.run.on_click(lambda _: self.read(self.prompt.value))
        self.layer.observe(lambda _: self._show(), names="value")
        self.head.observe(lambda _: self._show(), names="value")
        self._new_reading()

    def _viewed(self, change: Any) -> None:
        # Not where a view goes: the page has no plot by then to give the change to.
        if change.new > change.old:
            self.figure.update_layout(meta={"views": change.new})

    def read(self, prompt: str) -> None:
        """Run another prompt; what is wrong with it is shown, and the old one stays."""
        self.run.disabled = True
        self._say("running …")
        try:
            self.reading = read(self.beam, prompt)
        except WorkbenchError as error:
            self._say(self._measured())
            self.problem.value = (
                '<div style="border-left:3px solid var(--jp-error-color1,#d32f2f);'
                'padding-left:8px;line-height:1.5;overflow-wrap:anywhere">'
                '<span style="color:var(--jp-error-color1,#d32f2f)">⚠</span> '
                f"{escape(str(error))}</div>"
            )
        else:
            self._new_reading()
        finally:
            self.run.disabled = False

    @property
    def text(self) -> str:
        """The figures of the chosen layer and head, as the page shows them under the plot."""
        return "\n".join(readout(self.reading, self.layer.value, self._head()))

    def view(self) -> View:
        """What is shown now, as a view that stays."""
        fig = go.Figure(self.figure.to_dict())
        return View(figure=fig, text=self.text)

    def _static(self) -> dict[str, Any]:
        data: dict[str, Any] = self.view()._repr_mimebundle_()
        return data

    def _static_html(self) -> str:
        return f"<pre>{escape(self.text)}</pre>"

    def _head(self) -> int | None:
        return None if self.head.value == _MEAN else self.head.value

    def _measured(self) -> str:
        return f"{plural(len(self.reading.captured.tokens), 'token')}, measured here"

    def _say(self, text: str) -> None:
        self.status.value = f'<span style="margin-left:8px">{escape(text)}</span>'

    def _new_reading(self) -> None:
        captured = self.reading.captured
        with self.figure.batch_update():
            self.figure.layout.xaxis.update(attention.key_axis(captured.tokens))
            self.figure.layout.yaxis.update(attention.query_axis(captured.tokens))
            self.figure.data[_ATTENTION].hovertemplate = attention.hover(captured)
            self.figure.layout.yaxis3.range = [0, _highest_load(self.reading.load) * 1.08]
            self._update()
        self.problem.value = ""
        self._say(self._measured())

    def _show(self) -> None:
        with self.figure.batch_update():
            self._update()

    def _update(self) -> None:
        """Give the figure the chosen layer and head, inside a batch update."""
        reading, layer, head = self.reading, self.layer.value, self._head()
        captured, lens = reading.captured, reading.lens
        data, titles = self.figure.data, self.figure.layout.annotations
        data[_ATTENTION].z = attention.head_map(captured, layer, head).float().numpy()
        data[_ATTENTION].text = attention.hidden_texts(captured, layer)
        edge = attention.window_edge(captured, layer)
        data[_EDGE].x, data[_EDGE].y = edge["x"], edge["y"]
        titles[0].text = theme.ink(attention.panel_title(captured, layer))

        best = [
            (theme.token_label(lens.texts[int(i)]), float(p))
            for i, p in zip(lens.top_ids[layer + 1, -1], lens.top_probs[layer + 1, -1], strict=True)
        ]
        rows = list(range(len(best)))
        data[_LENS].x, data[_LENS].y = [p for _, p in best], rows
        data[_LENS].text = [theme.ink(f"{p:.2f}") for _, p in best]
        self.figure.layout.yaxis2.tickvals = rows
        self.figure.layout.yaxis2.ticktext = [theme.ink(text) for text, _ in best]

        share = _share(reading.load, layer)
        experts = captured.config.num_experts
        data[_ROUTER].x = list(range(experts)) if share else []
        data[_ROUTER].y = [s * experts for s in share]
        data[_EVEN].x = [-0.5, experts - 0.5] if share else []
        data[_EVEN].y = [1, 1] if share else []
        self.figure.layout.xaxis3.visible = self.figure.layout.yaxis3.visible = bool(share)
        titles[2].text = theme.ink(
            "load of its experts, × an even share" if share else "a dense MLP: no router"
        )
        self.readout.value = (
            f'<pre class="bw-explore-readout" style="font:{theme.TEXT}px/1.5 {theme.MONO};'
            f'white-space:pre-wrap;overflow-wrap:anywhere;margin:0">{escape(self.text)}</pre>'
        )

    def _frame(self) -> go.Figure:
        fig = theme.figure(
            f"Inside {self.beam.name}",
            "measured here on the prompt above",
            height=520,
            margin={"l": 84, "r": 12, "t": 92, "b": 84},
            xaxis={"domain": [0, 0.5]},
            xaxis2={
                "domain": [0.75, 1],
                "anchor": "y2",
                "range": [0, 1.18],
                "tickvals": [0, 0.5, 1],
                "title": {"text": theme.ink("probability")},
            },
            yaxis2={
                "domain": [0.62, 1],
                "anchor": "x2",
                "range": [4.5, -0.5],
                "showgrid": False,
                "tickfont": {"family": theme.MONO},
                "ticklabelstandoff": 6,
            },
            xaxis3={
                "domain": [0.67, 1],
                "anchor": "y3",
                "title": {"text": theme.ink("expert")},
                "showgrid": False,
                "range": [-0.6, self.beam.config.num_experts - 0.4],
            },
            yaxis3={"domain": [0, 0.3], "anchor": "x3"},
        )
        fig.add_traces(
            [
                go.Heatmap(
                    colorscale=theme.scale(),
                    zmin=0,
                    zmax=1,
                    colorbar=theme.colorbar(
                        attention.COLOR_TITLE, x=0.51, len=1.0, tickvals=[0, 0.1, 0.25, 0.5, 1]
                    ),
                ),
                go.Scatter(
                    mode="lines",
                    line={"color": theme.SLIDING, "width": 1.5, "dash": "dot"},
                    hoverinfo="skip",
                    showlegend=False,
                ),
                go.Bar(
                    orientation="h",
                    xaxis="x2",
                    yaxis="y2",
                    width=0.6,
                    marker={"color": theme.HEAT},
                    textposition="outside",
                    cliponaxis=False,
                    hoverinfo="skip",
                    showlegend=False,
                ),
                go.Bar(
                    xaxis="x3",
                    yaxis="y3",
                    width=0.7,
                    marker={"color": theme.HEAT},  # as in views.router_load
                    hovertemplate="expert %{x}: %{y:.2f} × an even share<extra></extra>",
                    showlegend=False,
                ),
                go.Scatter(
                    xaxis="x3",
                    yaxis="y3",
                    mode="lines",
                    line={"color": theme.NEUTRAL, "width": 1.5, "dash": "dot"},
                    hoverinfo="skip",
                    showlegend=False,
                ),
            ]
        )
        theme.panel_title(fig, 1, "")
        theme.panel_title(fig, 2, "next token, if the model stopped here", align=3)
        theme.panel_title(fig, 3, "")
        return fig


def readout(reading: Reading, layer: int, head: int | None) -> list[str]:
    """The figures of one layer and head, one fact a line."""
    captured, lens, c = reading.captured, reading.lens, reading.captured.config
    best = "  ".join(
        f"{theme.short_token(lens.texts[int(i)])} {float(p):.2f}"
        for i, p in zip(lens.top_ids[layer + 1, -1], lens.top_probs[layer + 1, -1], strict=True)
    )
    lines = [
        *attention.reach_facts(captured, layer, head),
        f"stream after layer {layer}: RMS {reading.rms[layer + 1]:.3f}",
        f"next token if it stopped here: {best}",
    ]
    share = _share(reading.load, layer)
    if share:
        order = sorted(range(len(share)), key=lambda e: (-share[e], e))[:3]
        loads = "  ".join(f"{e} ({share[e] * c.num_experts:.2f})" for e in order)
        lines.append(f"busiest experts (load, × an even share): {loads}")
    else:
        lines.append("its MLP is dense: no experts to choose from")
    return lines


def _highest_load(load: RouterLoad | None) -> float:
    """The busiest expert of all layers, × an even share: one scale for one prompt."""
    return 1.0 if load is None else float(load.share.max()) * load.share.shape[-1]


def _share(load: RouterLoad | None, layer: int) -> list[float]:
    """Each expert's share of a layer's choices; empty for a dense layer."""
    if load is None or layer not in load.layers:
        return []
    share: list[float] = load.share[load.layers.index(layer)].tolist()
    return share


def explore(beam: Beam, prompt: str, *, layer: int = 0, head: int | None = None) -> Explorer:
    """Look inside the model while it reads a prompt; see :class:`Explorer`."""
    return Explorer(beam, prompt, layer=layer, head=head)
