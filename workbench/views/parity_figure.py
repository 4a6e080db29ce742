"""An engine's layers beside the PyTorch model's: errors, the yardstick, the verdict, as a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from workbench.serving.layers.layer_parity import (
    VERDICTS,
    Gap,
    LayerFigures,
    LayerParity,
    Verdict,
)
from workbench.views import theme
from workbench.views.numbers import plural
from workbench.views.page import box, page
from workbench.views.view import View

_RED = "#D13438"  # what differs; 4.9 : 1 on white, 3.8 on the dark theme's #111
_FAINT = "color:var(--jp-ui-font-color2,inherit)"
_PLAIN = "background:transparent"  # JupyterLab stripes the rows of tables otherwise
# Every verdict has its own sign, so that it is read without its colour.
_SIGNS: Mapping[Verdict, tuple[str, str]] = {
    "agrees": ("✓", theme.SPARSE),
    "coarser": ("≈", theme.FULL),
    "not compared": ("–", theme.NEUTRAL),
    "differs": ("✗", _RED),
}
_COLORS = {"full": theme.FULL, "sliding": theme.SLIDING, "": theme.NEUTRAL}
_BAR = 80  # px of the largest error
_MOST_FLIPS = 12


def layer_parity(value: LayerParity | Mapping[str, Any], *, source: str = "measured") -> View:
    """Table of the layers that were compared, errors as bars, verdicts by word, sign and colour.

    Args:
        value: what ``workbench.serving.layers.layer_parity.layer_parity`` gave, or the document
            that its ``to_dict`` kept.
        source: how the figures came about, in words: "measured", "recorded".

    Raises:
        ServingError: a document of something else.
    """
    if not isinstance(value, LayerParity):
        value = LayerParity.from_dict(value)
    verdict = _verdict(value)
    found = {each.verdict for each in value.layers}
    worst: Verdict = next((v for v in VERDICTS if v in found), "agrees")
    sign, color = _SIGNS[worst]
    body = box(escape(f"{sign} {verdict}"), f"color:{color}", "font-weight:700")
    body += _layers(value) + _reasons(value) + _flips(value)
    body += "".join(_line(line) for line in (_how(value), *value.notes))
    return View(
        html=page(
            f"vLLM {value.engine.get('version') or 'of unknown version'} against PyTorch: "
            f"{value.model}",
            _whence(value, source),
            box(body, "max-width:1000px"),
            legend=((_COLORS["sliding"], "sliding"), (_COLORS["full"], "full attention"),
                    (theme.NEUTRAL, f"our own run in {value.reference.get('yardstick')}")),
        ),
        text=_text(value, verdict, source),
    )  # fmt: skip


def _verdict(value: LayerParity) -> str:
    if value.agrees:
        return f"all {len(value.layers)} agree" if len(value.layers) > 1 else "agrees"
    counts = [(v, sum(each.verdict == v for each in value.layers)) for v in VERDICTS]
    return ", ".join(f"{n} {'agree' if v == 'agrees' and n > 1 else v}" for v, n in counts if n)


def _whence(value: LayerParity, source: str) -> str:
    """Where, with what and when."""
    engine, ours = value.engine, value.reference
    device, tp = engine.get("device_name"), engine.get("tp")
    where = str(device or "unknown hardware")
    if device in (None, "", "cpu"):
        where = str(ours.get("device_name") or where)
    elif isinstance(tp, int) and tp > 1:
        where = f"{tp} × {where}"
    return " · ".join(
        (
            f"{source} on {where}, {value.recorded_on}",
            f"engine in {engine.get('dtype')}, attention {engine.get('attention_backend')}, "
            f"{plural(tp if isinstance(tp, int) else 1, 'rank')}",
            f"PyTorch {ours.get('torch')} in float32 on {ours.get('device')}",
            f"one prompt of {value.tokens:,} tokens, window {value.window:,}",
        )
    )


def _how(value: LayerParity) -> str:
    half = value.engine.get("dtype") != "float32"
    limit = (
        f"{value.factor:g} times the error of our own run in {value.reference.get('yardstick')}"
        if half
        else "what float32 explains"
    )
    return (
        "Each layer got the engine's own input. Errors are relative: of what the layer adds to the "
        f"stream, against our float32 run; it agrees up to {limit}. Tokens whose experts were "
        "exchanged "
        "are counted apart."
    )


def _line(text: str) -> str:
    return box(escape(text), _FAINT, "margin-top:4px", f"font-size:{theme.TEXT}px")


def _heading(text: str) -> str:
    return box(escape(text), "font-weight:600", "margin:12px 0 2px", f"font-size:{theme.TEXT}px")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already; words of the head are escaped. A row's cell beyond
    those of the head stands beneath the row, as wide as the table, and needs no column."""
    cell = ("padding:4px 14px 4px 0", "text-align:left", "vertical-align:top")
    top = "".join(box(escape(w), *cell, "font-weight:400", _FAINT, tag="th") for w in head)
    lines = box(top, _PLAIN, tag="tr")
    for row in rows:
        cells = "".join(box(one, *cell, tag="td") for one in row[: len(head)])
        lines += box(cells, _PLAIN, f"border-top:1px solid {theme.LINE}", tag="tr")
        for beneath in filter(None, row[len(head) :]):
            beneath_style = escape(";".join(("padding:0 14px 6px 0", "text-align:left", _FAINT)))
            lines += box(
                f'<td colspan="{len(head)}" style="{beneath_style}">{beneath}</td>',
                _PLAIN,
                tag="tr",
            )
    style = ("border-collapse:collapse", "margin:0", f"font-size:{theme.TEXT}px")
    return box(box(lines, *style, tag="table"), "overflow-x:auto")


def _whole(content: str) -> str:
    """A cell that is not broken into lines; ``content`` is HTML already."""
    return box(content, "white-space:nowrap")


# -- pieces -------------------------------------------------------------------------------------


def _number(error: float | None) -> str:
    return "–" if error is None else f"{error:.1e}"


def _mean(gap: Gap | None) -> float | None:
    return None if gap is None else gap.mean


def _bar(error: float | None, most: float, color: str) -> str:
    share = 0.0 if not error or not most else min(1.0, error / most)
    return box(
        "", f"width:{max(1, round(_BAR * share)) if error else 0}px", "height:6px",
        f"background:{color}", "border-radius:1px", "margin:2px 0",
    )  # fmt: skip


def _layers(value: LayerParity) -> str:
    errors = [e for each in value.layers for e in (_mean(each.engine), _mean(each.yardstick)) if e]
    most = max(errors, default=0.0)
    rows = []
    for each in value.layers:
        sign, color = _SIGNS[each.verdict]
        whose = _COLORS[each.attention]
        kinds = " · ".join(word for word in (each.attention, each.mlp) if word)
        bars = _bar(_mean(each.engine), most, whose)
        bars += _bar(_mean(each.yardstick), most, theme.NEUTRAL)
        name = box("●", f"color:{whose}", tag="span") + f" {escape(each.name)}"
        rows.append((
            _whole(name + box(escape(kinds or "final norm, logits"), _FAINT)),
            _whole(box(escape(f"{sign} {each.verdict}"), f"color:{color}", "font-weight:700")),
            bars,
            _whole(escape(_number(_mean(each.engine)))
                   + box(escape(f"ours {_number(_mean(each.yardstick))}"), _FAINT)),
            _whole(escape(_ratio(each))),
            _whole(escape(_worst(each))),
            escape(_beneath(each, value.tokens)),
        ))  # fmt: skip
    return _table(("layer", "verdict", "mean error", "", "of ours", "worst token"), rows)


def _ratio(each: LayerFigures) -> str:
    if each.ratio is None:
        return "–"
    return f"{each.ratio:.2f} ×" if each.ratio < 10 else f"{each.ratio:,.3g} ×"


def _beneath(each: LayerFigures, tokens: int) -> str:
    """What is told of some layers only: their experts, and whether their ranks agree."""
    told = [] if each.router is None else [f"experts {_experts(each, tokens)}"]
    if each.rank_gap is not None:
        apart = f"{each.rank_gap:.1e} apart" if each.rank_gap else "have the same bits"
        told.append(f"ranks {apart}")
    return " · ".join(told)


def _worst(each: LayerFigures) -> str:
    if each.engine is None or each.layer is None:  # of the head there is one token
        return "–"
    return f"{each.engine.worst:.1e} at {each.engine.worst_token:,}"


def _experts(each: LayerFigures, tokens: int) -> str:
    router = each.router
    if router is None or router.source == "none":
        return "not seen"
    if not router.flipped:
        return "the same for every token"
    return (
        f"exchanged in {router.flipped:,} of {tokens:,} tokens (ours {router.flipped_ours:,}), at "
        f"most {router.widest:.1e} apart"
    )


def _reasons(value: LayerParity) -> str:
    rows = [each for each in value.layers if each.reason]
    if not rows:
        return ""
    lines = "".join(
        box(
            escape(f"{_SIGNS[each.verdict][0]} {each.name}: {each.reason}"),
            f"color:{_SIGNS[each.verdict][1]}", f"font-size:{theme.TEXT}px",
        )
        for each in rows
    )  # fmt: skip
    return _heading("Why") + lines


def _flips(value: LayerParity) -> str:
    found = [(each, one) for each in value.layers if each.router for one in each.router.flips]
    if not found:
        return ""
    found.sort(key=lambda pair: -pair[1].margin)
    rows = [
        (
            escape(each.name),
            escape(f"{one.token:,}"),
            escape(f"{', '.join(map(str, one.ours))} → {', '.join(map(str, one.engine))}"),
            escape(f"{one.margin:.1e}"),
            escape(f"{one.error:.1e}"),
        )
        for each, one in found[:_MOST_FLIPS]
    ]
    head = ("layer", "token", "experts, ours → the engine's", "scores apart", "error of the token")
    count = sum(each.router.flipped for each in value.layers if each.router)
    widest = f"the {len(rows)} widest of {count:,}" if len(rows) < count else plural(count, "token")
    summary = box(
        escape(f"Tokens with exchanged experts: {widest}"), "cursor:pointer", tag="summary"
    )
    return box(
        summary + _table(head, rows), "margin:8px 0 4px", f"font-size:{theme.TEXT}px", tag="details"
    )


def _text(value: LayerParity, verdict: str, source: str) -> str:
    lines = [
        f"vLLM {value.engine.get('version') or 'of unknown version'} against PyTorch, layer by "
        f"layer, {value.model}: {verdict}",
        _whence(value, source),
    ]
    for each in value.layers:
        sign, _ = _SIGNS[each.verdict]
        kinds = ", ".join(word for word in (each.attention, each.mlp) if word)
        beside = f", experts {_experts(each, value.tokens)}" if each.router else ""
        worst = "" if each.layer is None else f", worst token {_worst(each)}"
        lines.append(
            f"{sign} {each.name}{f' ({kinds})' if kinds else ''}: mean error "
            f"{_number(_mean(each.engine))}, ours {_number(_mean(each.yardstick))}"
            f"{worst}{beside}: {each.verdict}" + (f"; {each.reason}" if each.reason else "")
        )
    return "\n".join([*lines, *(f"note: {note}" for note in value.notes)])
