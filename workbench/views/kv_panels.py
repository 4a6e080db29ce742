"""The memory dashboard's figure: growth, one GPU's memory and the layers, on one widget."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from workbench.model.kv_curve import KVCurve
from workbench.model.plan import Plan
from workbench.model.sizing import ENGINE
from workbench.views import kv_figures, kv_memory, theme
from workbench.views.kv_words import ACCOUNT_NAMES, size

_GROWTH, _BAR, _STRIP = 220, 46, 74  # px of each panel
# px between them: axis, legend (of up to five rows on a narrow page), heading
_BELOW_GROWTH, _BELOW_BAR = 88, 180
_TOP, _BOTTOM = 162, 48


class Panels:
    """Three panels of one plan; ``show`` brings them up to date, ``figure`` is the widget.

    ``curve`` is the growth by the plan's settings, up to the model's longest context, by the
    account in which growth and layers are drawn.
    """

    _drawn: list[dict[str, Any]]  # what each trace shows, and the axes
    _drawn_axes: dict[str, Any]

    def __init__(self, plan: Plan, curve: KVCurve) -> None:
        self.plan, self.curve = plan, curve
        # As in the explorer: made whole, and drawn anew once a view of it is on the page.
        self.figure = go.FigureWidget(self._frame())
        self.figure._config = {**self.figure._config, **theme.CONFIG, "responsive": True}
        self.figure._view_count = 0
        self.figure.observe(self._viewed, "_view_count")

    def _viewed(self, change: Any) -> None:
        # Not where a view goes: the page has no plot by then to give the change to.
        if change.new > change.old:
            self.figure.update_layout(meta={"views": change.new})

    def show(self, plan: Plan, curve: KVCurve) -> None:
        """Give the page what has changed."""
        self.plan, self.curve = plan, curve
        with self.figure.batch_update():
            self._update()

    def _update(self) -> None:
        old, self._drawn = self._drawn, self._values()
        for trace, before, now in zip(self.figure.data, old, self._drawn, strict=True):
            changed = {k: v for k, v in now.items() if not _same(v, before[k])}
            if changed:  # plotly checks and sends all that it is given, which costs more than this
                trace.update(changed)
        axes = self._axes()
        if axes != self._drawn_axes:
            self.figure.update_layout(axes)
            self._drawn_axes = axes
        for note, words in zip(self.figure.layout.annotations, self._headings(), strict=True):
            note.text = theme.ink(words)

    def _values(self) -> list[dict[str, Any]]:
        """What each trace shows, in their order."""
        end = self._end()
        growth = kv_figures.growth_values(self.curve, end)
        high = kv_figures.growth_axes(self.curve, end, steps=True)["y"]["range"][1]
        return [
            *growth.values(),
            _mark(self.plan.kv.settings.context, high),
            *kv_memory.memory_values([self.plan], show_kv=False).values(),
            kv_figures.strip_values(self.plan.kv, self.curve.account),
        ]

    def _headings(self) -> list[str]:
        kv, account = self.plan.kv, ACCOUNT_NAMES[self.curve.account]
        total, naive = kv.per_gpu(self.curve.account).total, kv.per_gpu("naive").total
        return [
            # Two lines: one would be cut off on a narrow page.
            f"KV cache over the context, {account}:<br><b>{size(total)}</b> a GPU at "
            f"{kv.settings.context:,} tokens (naive: {size(naive)})",
            f"one GPU's memory, {theme.plain(self.plan.layout.name)}: "
            + (
                f"<b>{size(self.plan.free_bytes)}</b> free"
                if self.plan.fits
                else f"<b>{size(-self.plan.free_bytes)} too little</b>"
            ),
            f"layers by bytes, {account}; taller: sees everything",
        ]

    def _axes(self) -> dict[str, Any]:
        growth = kv_figures.growth_axes(self.curve, self._end(), steps=True)
        memory = kv_memory.memory_axes([self.plan], "xaxis2", "yaxis2")
        memory["yaxis2"]["showticklabels"] = False  # its heading names the layout
        return {
            "xaxis": growth["x"],
            "yaxis": growth["y"],
            **memory,
            **kv_figures.strip_axes(self.plan.kv, "xaxis3", "yaxis3"),
        }

    def _end(self) -> int:
        """Where the context axis ends: a power of four, so that it moves seldom."""
        most, context = self.curve.contexts[-1], self.plan.kv.settings.context
        end = most
        while end % 4 == 0 and end // 4 >= max(context, 1024):
            end //= 4
        return end

    def _frame(self) -> go.Figure:
        panels = _GROWTH + _BELOW_GROWTH + _BAR + _BELOW_BAR + _STRIP
        bar_top = (_STRIP + _BELOW_BAR + _BAR) / panels
        bar_foot = (_STRIP + _BELOW_BAR) / panels
        end = self._end()
        fig = theme.figure(
            f"Memory of {self.plan.model}",
            f"exact arithmetic, engine figures by {ENGINE}'s accounting, workspace modelled, "
            "memory as torch or the driver reports it; nothing measured",
            height=panels + _TOP + _BOTTOM,
            margin={"l": 76, "r": 88, "t": _TOP, "b": _BOTTOM},
            barmode="stack",
            legend={"y": 1 + 44 / panels, "yanchor": "bottom", "traceorder": "normal"},
            legend2={
                **theme.LEGEND,
                "y": bar_foot - 46 / panels,
                "yanchor": "top",
                "x": 0,
                "traceorder": "normal",
                "entrywidth": kv_memory.ENTRY,
            },
        )
        fig.add_traces(kv_figures.growth_traces(self.curve, end))
        high = kv_figures.growth_axes(self.curve, end, steps=True)["y"]["range"][1]
        fig.add_trace(
            go.Scatter(
                **_mark(self.plan.kv.settings.context, high),
                mode="lines",
                line={"color": theme.NEUTRAL, "width": 1.5, "dash": "dot"},
                name=theme.ink("the chosen context"),
                hovertemplate="%{x:,} tokens<extra></extra>",
            )
        )
        on = {"xaxis": "x2", "yaxis": "y2", "legend": "legend2"}
        fig.add_traces(kv_memory.memory_traces([self.plan], show_kv=False, **on))
        strip = kv_figures.strip_trace(
            self.plan.kv,
            self.curve.account,
            y=0,
            yanchor="bottom",
            lenmode="pixels",
            len=_STRIP + 24,
            x=1.01,
        )
        strip.update(xaxis="x3", yaxis="y3")
        fig.add_trace(strip)
        domains = {
            "yaxis": [(_STRIP + _BELOW_BAR + _BAR + _BELOW_GROWTH) / panels, 1],
            "yaxis2": [bar_foot, bar_top],
            "yaxis3": [0, _STRIP / panels],
        }
        self._drawn, self._drawn_axes = self._values(), self._axes()
        fig.update_layout(self._drawn_axes)
        fig.update_layout(
            {name: {"domain": domain} for name, domain in domains.items()}
            | {"xaxis2": {"anchor": "y2"}, "xaxis3": {"anchor": "y3"}}
        )
        fig.update_layout(yaxis2={"anchor": "x2"}, yaxis3={"anchor": "x3"})
        # Margins are given: to measure them at each move would cost a fifth of the drawing.
        fig.update_xaxes(automargin=False)
        fig.update_yaxes(automargin=False)
        for panel, words in enumerate(self._headings(), start=1):
            theme.panel_title(fig, panel, words)
        fig.update_annotations(align="left")
        return fig


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return all(_same(a[key], b[key]) for key in a)
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)


def _mark(context: int, high: float) -> dict[str, Any]:
    return {"x": [context, context], "y": [0, high]}
