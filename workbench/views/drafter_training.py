"""Training a drafter: what an example looks like, who sees whom in it, and how the loss falls."""

from __future__ import annotations

import time
from collections.abc import Mapping
from html import escape
from math import isfinite, log
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from workbench.errors import WorkbenchError
from workbench.terminal import printable
from workbench.views import spec_marks, theme
from workbench.views.page import box, page
from workbench.views.spec_marks import TokenTexts
from workbench.views.view import View

if TYPE_CHECKING:
    from workbench.training.example import TrainingExample

_TINT = 0.5  # opacity behind the label that weighs most
_CELL = 11  # letters of a token in a cell
_NUMBER = ("font-size:10px", "vertical-align:super", "line-height:0", f"color:{theme.HEAT}",
           "margin:0 2px")  # fmt: skip
_ANCHOR = (f"border:2px solid {theme.HEAT}", "font-weight:700", "border-radius:2px")
_EVERY = 0.4  # seconds between two drawings of a running training
_HIGH = 120  # px of its columns


# -- an example -----------------------------------------------------------------------------------


def training_blocks(
    example: TrainingExample, tokenizer: TokenTexts, *, source: str = "measured here"
) -> View:
    """The text of a training example with its anchors, and each block with what its slots learn.

    The darker a label, the more it weighs in the loss; one that does not count is dashed.
    """
    e = example
    response = len(e.token_ids) - e.prompt
    counted = e.valid - e.prompt
    subtitle = (
        f"{source} · prompt of {e.prompt} tokens, {response} more written by the target, "
        f"{counted} of them count"
    )
    stream = tokenizer.decode_stream()
    texts = [printable(stream.push(token)) for token in e.token_ids]
    number = {place: i for i, place in enumerate(e.places, 1)}
    learned = {p + k for p, on in zip(e.places, e.live, strict=True) for k, x in enumerate(on, 1)
               if x}  # fmt: skip
    pieces = [box(escape("".join(texts[: e.prompt])), "opacity:.62", tag="span")]
    for place in range(e.prompt, len(texts)):
        token = escape(texts[place])
        if place in number:
            sign = box(str(number[place]), *_NUMBER, tag="span")
            shown = token.replace("\n", "⏎")
            pieces.append(box(sign + shown, *_ANCHOR, "white-space:pre", tag="span"))
            pieces.append("\n" * token.count("\n"))
        elif place in learned:
            pieces.append(box(token, f"border-bottom:2px solid {theme.SPARSE}", tag="span"))
        elif place < e.valid:
            pieces.append(box(token, tag="span"))
        else:
            pieces.append(box(token, "opacity:.5", "text-decoration:line-through", tag="span"))
    text = box("".join(pieces), f"font:{theme.TEXT}px/1.75 {theme.MONO}", "white-space:pre-wrap",
               "overflow-wrap:anywhere")  # fmt: skip
    words = box(
        box(box("1", *_NUMBER, tag="span") + "token", *_ANCHOR, f"font-family:{theme.MONO}",
            tag="span") + " anchor of a block, "
        + box("token", f"border-bottom:2px solid {theme.SPARSE}", f"font-family:{theme.MONO}",
              tag="span") + " learned by a slot",
        f"font-size:{theme.TEXT}px", "margin:10px 0 14px",
    )  # fmt: skip
    title = "A training example"
    html = page(title, subtitle, text + words + _table(e, tokenizer))
    return View(text=_words(e, tokenizer), html=html)


def _table(e: TrainingExample, tokenizer: TokenTexts) -> str:
    """A row for each block: the anchor, then what its slots are to name."""
    cell = ("padding:2px 7px", "text-align:left", "white-space:pre", f"font-size:{theme.TEXT}px")
    faint = ("color:var(--jp-ui-font-color2,inherit)", f"font-size:{theme.SMALL}px")
    heads = ["", "anchor", *(f"slot {k}" for k in range(1, len(e.weights) + 1))]
    rows = box("".join(box(h, *cell, *faint, "font-weight:400", tag="th") for h in heads), tag="tr")
    weights = ["weight", "", *(f"{w:.2f}" for w in e.weights)]
    rows += box("".join(box(w, *cell, *faint, tag="td") for w in weights), tag="tr")
    most = max(e.weights)
    for i, (place, labels, live) in enumerate(zip(e.places, e.labels, e.live, strict=True), 1):
        anchor = spec_marks.label(tokenizer, e.token_ids[place], _CELL)
        cells = [
            box(f"block {i}", *cell, *faint, tag="td"),
            box(box(escape(anchor), *_ANCHOR, "padding:0 3px", tag="span"), *cell,
                f"font-family:{theme.MONO}", tag="td"),
        ]  # fmt: skip
        for token, counts, weight in zip(labels, live, e.weights, strict=True):
            name = escape(spec_marks.label(tokenizer, token, _CELL)) if counts else "–"
            look = (
                (f"background:{theme.rgba(theme.SPARSE, round(_TINT * weight / most, 2))}",)
                if counts
                else ("opacity:.5", f"outline:1px dashed {theme.NEUTRAL}", "outline-offset:-3px")
            )
            hover = f"weight {weight:.2f}" if counts else "does not count"
            style = (*cell, f"font-family:{theme.MONO}", *look, f"border:1px solid {theme.LINE}")
            cells.append(box(name, *style, tag="td", title=hover))
        rows += box("".join(cells), "background:none", tag="tr")
    table = box(rows, "border-collapse:collapse", "margin:0", tag="table")
    return box(table, "overflow-x:auto")


def _words(e: TrainingExample, tokenizer: TokenTexts) -> str:
    counted, response = e.valid - e.prompt, len(e.token_ids) - e.prompt
    lines = [f"prompt of {e.prompt} tokens, {response} written by the target, {counted} count"]
    for i, (place, labels, live) in enumerate(zip(e.places, e.labels, e.live, strict=True), 1):
        names = [
            spec_marks.label(tokenizer, t) if x else "–" for t, x in zip(labels, live, strict=True)
        ]
        anchor = spec_marks.label(tokenizer, e.token_ids[place])
        lines.append(f"block {i} at {place}: {anchor} -> {' '.join(names)}")
    return "\n".join([*lines, "weights " + " ".join(f"{w:.2f}" for w in e.weights)])


def training_mask(example: TrainingExample, *, source: str = "measured here") -> View:
    """Who sees whom: the rows of all blocks over the context's positions and over themselves."""
    e = example
    length, rows = len(e.token_ids), len(e.seen)
    query = rows // len(e.places)
    context, own = e.seen[:, :length], e.seen[:, length:]
    fig = theme.figure(
        "Who sees whom",
        f"{source} · {len(e.places)} blocks of one sequence in one pass; a row sees the context "
        f"before its anchor, {e.window} positions with its own at most, and all of its block",
        height=100 + 52 + max(7 * rows, 180), margin={"l": 112, "r": 16, "t": 100, "b": 52},
        xaxis={"domain": [0, 0.7], "showgrid": False, "range": [-0.5, length - 0.5],
               "title": {"text": theme.ink("context: position in the sequence")}},
        xaxis2={"domain": [0.73, 1], "showgrid": False, "range": [-0.5, rows - 0.5], "anchor": "y",
                "title": {"text": theme.ink("rows of the blocks")},
                "tickvals": [query * i + (query - 1) / 2 for i in range(len(e.places))],
                "ticktext": [str(i) for i in range(1, len(e.places) + 1)]},
        yaxis={"range": [rows - 0.5, -0.5], "showgrid": False,
               "tickvals": [query * i + (query - 1) / 2 for i in range(len(e.places))],
               "ticktext": [f"block {i}<br>anchor at {p}" for i, p in enumerate(e.places, 1)]},
    )  # fmt: skip
    for z, axis, color, what in (
        (context, "x", theme.HEAT, "row %{y} sees position %{x}"),
        (own, "x2", theme.DRAFTER, "row %{y} sees row %{x}"),
    ):
        fig.add_trace(
            go.Heatmap(
                z=z.astype(np.uint8), xaxis=axis, yaxis="y", zmin=0, zmax=1, showscale=False,
                xgap=1, ygap=1, hovertemplate=what + ": %{z}<extra></extra>",
                colorscale=[(0, theme.rgba(theme.NEUTRAL, 0.08)), (1, theme.rgba(color, 0.85))],
            )
        )  # fmt: skip
    fig.add_trace(
        go.Scatter(
            x=np.array(e.places, np.int32), xaxis="x", yaxis="y", mode="markers",
            y=np.arange(len(e.places), dtype=np.int32) * query, showlegend=False,
            marker={"symbol": "diamond", "size": 9, "color": theme.FULL},
            hovertemplate="anchor at position %{x}<extra></extra>",
        )
    )  # fmt: skip
    for at, words in ((e.prompt, "response"), (e.valid, "counts no more")):
        if at < length:
            fig.add_shape(
                type="line", x0=at - 0.5, x1=at - 0.5, y0=0, y1=1, xref="x", yref="y domain",
                line={"color": theme.NEUTRAL, "dash": "dot", "width": 1},
            )  # fmt: skip
            fig.add_annotation(text=theme.ink(f"{words} →", faint=True), x=at - 0.5, xref="x",
                               xanchor="left", y=1, yref="y domain", yanchor="bottom")  # fmt: skip
    fig.add_annotation(text=theme.ink("◆ the anchor's own place", faint=True), x=1, xanchor="right",
                       xref="x domain", y=1, yref="y domain", yanchor="bottom")  # fmt: skip
    lines = [f"{len(e.places)} blocks of {query} rows, {length} positions, window {e.window}"]
    for i, place in enumerate(e.places):
        block = context[query * i : query * (i + 1)]
        spans = [_span(row) for row in (block[0], block[-1])]
        lines.append(
            f"block {i + 1}: anchor at {place}, its row sees {spans[0]}, its last row {spans[1]}"
        )
    return View(figure=fig, text="\n".join(lines))


def _span(row: np.ndarray) -> str:
    """The context positions that a row sees, which lie side by side."""
    seen = np.flatnonzero(row)
    return f"positions {seen[0]} to {seen[-1]}" if len(seen) else "no position"


# -- the loss -------------------------------------------------------------------------------------


def training_curve(record: Mapping[str, Any], *, source: str = "measured here") -> View:
    """The losses of a drafter's training, and how often the label is among the candidates.

    ``record`` is what ``workbench.training.distil.train`` returns, and ``training.json`` holds.

    Raises:
        WorkbenchError: it is no record of a drafter's training.
    """
    try:
        rows = [(int(s), float(b), float(p), float(r)) for s, _, b, p, r in record["losses"]]
        vocabulary, kept = _sizes(record["drafter"])
    except (KeyError, TypeError, ValueError) as error:
        raise WorkbenchError(
            f"this is no record of a drafter's training ({error!r}); give what train() returned or "
            "the content of its training.json"
        ) from error
    fig = theme.figure(
        "Training loss", f"{source} · each point is the mean since the one before", height=340,
        legend_under_title=True, margin={"l": 60, "r": 16, "t": 112, "b": 52},
        legend={"traceorder": "normal"},
        xaxis={"domain": [0, 0.56], "title": {"text": theme.ink("step")}, "showgrid": False},
        xaxis2={"domain": [0.66, 1], "anchor": "y2", "title": {"text": theme.ink("step")},
                "showgrid": False},
        yaxis={"title": {"text": theme.ink("nats a slot")}, "rangemode": "tozero"},
        yaxis2={"anchor": "x2", "range": [0, 1.02], "tickformat": ".0%",
                "title": {"text": theme.ink(f"label among the {kept} candidates")}},
    )  # fmt: skip
    if not rows:
        spec_marks.nothing(fig, "no step was logged")
        return View(figure=fig, text="no step was logged")
    step = np.array([row[0] for row in rows], np.int32)
    for at, name, color, dash, axis in (
        (1, "backbone", theme.SLIDING, "solid", ""),
        (2, "selector", theme.FULL, "dash", ""),
        (3, "recall of the candidates", theme.SPARSE, "dot", "2"),
    ):
        unit = "%{y:.1%}" if axis else "%{y:.2f} nats"
        fig.add_trace(
            go.Scatter(
                x=step, y=_column(rows, at), name=theme.ink(name),
                mode="lines" if len(rows) > 1 else "markers", xaxis=f"x{axis}", yaxis=f"y{axis}",
                line={"color": color, "dash": dash, "width": 2},
                hovertemplate=f"step %{{x}}: {name} {unit}<extra></extra>",
            )
        )  # fmt: skip
    nothing = log(vocabulary)
    fig.add_shape(type="line", x0=0, x1=1, xref="x domain", y0=nothing, y1=nothing, yref="y",
                  line={"color": theme.NEUTRAL, "dash": "dot", "width": 1})  # fmt: skip
    fig.add_annotation(
        text=theme.ink(f"any of {vocabulary:,} tokens alike: {nothing:.1f}", faint=True), x=1,
        xref="x domain", xanchor="right", y=nothing, yref="y", yanchor="bottom",
    )  # fmt: skip
    first, last = rows[0], rows[-1]
    judged = [row[2] for row in rows if row[3] > 0]
    selector = f"{judged[0]:.2f} to {judged[-1]:.2f}" if judged else "never judged"
    return View(
        figure=fig,
        text=f"steps {first[0]:,} to {last[0]:,}: backbone {first[1]:.2f} to {last[1]:.2f} nats a "
        f"slot, selector {selector}\nlabel among the {kept} candidates: "
        f"{first[3]:.0%} to {last[3]:.0%}",
    )


def _column(rows: list[tuple[int, float, float, float]], at: int) -> np.ndarray:
    """One of the columns; the selector's loss is none where no label was among its candidates."""
    nan = float("nan")
    return np.array([nan if at == 2 and not r[3] else r[at] for r in rows], np.float32)


def _sizes(drafter: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens of the vocabulary, and candidates of a slot."""
    vocabulary = int(drafter["vocab_size"])
    return vocabulary, min(vocabulary, int(drafter["dflash_config"]["selector_top_k"]))


class TrainingWatch:
    """The loss of a running training, drawn into the page at most every 0.4 seconds.

    A ``progress`` for ``train``: call it ``(step, steps, loss, blocks_per_second)``. It draws
    between two steps and then only, so an interrupt finds it as it finds the training.
    """

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []
        self._planned, self._speed = 0, 0.0
        self._drawn = 0.0
        self._handle: Any = None

    def show(self) -> None:
        """Put the figure into the page, to be replaced as the training goes on."""
        from IPython.display import display

        self._handle = display(self.view, display_id=True)

    def __call__(self, step: int, steps: int, loss: float, speed: float) -> None:
        self._points.append((step, loss))
        self._planned, self._speed = steps, speed
        now = time.monotonic()
        if self._handle is not None and (now - self._drawn > _EVERY or step >= steps):
            self._drawn = now
            self._handle.update(self.view)

    @property
    def view(self) -> View:
        """What the page shows now. No plotly figure: JupyterLab draws those once, not again."""
        words = self._words()
        html = page("Training", f"measured here · {words}", self._bars())
        return View(text=words, html=html)

    def _bars(self) -> str:
        """A column a logged step, up to the last one planned; its height is the loss."""
        height = f"height:{_HIGH}px"
        faint = ("color:var(--jp-ui-font-color2,inherit)", f"font-size:{theme.SMALL}px")
        if not self._points:
            return box("the target is writing what is trained on", height, *faint)
        known = [loss for _, loss in self._points if isfinite(loss)]
        top = max([1e-9, *known])
        look = f"border-top:2px solid {theme.SLIDING};background:{theme.rgba(theme.SLIDING, 0.25)}"
        columns = "".join(
            box("", "flex:1 1 0", f"height:{100 * loss / top if isfinite(loss) else 0:.0f}%", look,
                title=f"step {step:,}: {loss:.2f} nats")
            for step, loss in self._points
        )  # fmt: skip
        first, (last, _) = self._points[0][0], self._points[-1]
        done = (last - first + 1) / max(1, self._planned - first + 1)
        drawn = box(columns, "display:flex", "align-items:flex-end", "height:100%",
                    f"width:{100 * min(1.0, done):.1f}%")  # fmt: skip
        frame = box(drawn, height, f"border-bottom:1px solid {theme.NEUTRAL}")
        ends = box(f"step {first:,}", tag="span") + box(f"{self._planned:,}", tag="span")
        return (
            box(f"{top:.1f} nats a slot", *faint)
            + frame
            + box(ends, "display:flex", "justify-content:space-between", *faint)
        )

    def _words(self) -> str:
        if not self._points:
            return "no step yet"
        step, loss = self._points[-1]
        shown = f"{loss:.2f}" if isfinite(loss) else "no number"
        return f"step {step:,} of {self._planned:,}, loss {shown}, {self._speed:,.0f} blocks/s"


def watch_training() -> TrainingWatch:
    """A ``progress`` for ``train`` that shows the loss below the running cell."""
    watch = TrainingWatch()
    watch.show()
    return watch
