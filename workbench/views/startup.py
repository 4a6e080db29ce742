"""An engine's start-up log beside the prediction, line by line, as a page."""

from __future__ import annotations

from html import escape

from workbench.serving.reconcile import CLOSE, Comparison, Reconciliation, Verdict
from workbench.views import theme
from workbench.views.page import box, page
from workbench.views.view import View

_RED = "#D13438"  # what differs; 4.9 : 1 on white, 3.8 on the dark theme's #111
# Every verdict has its own sign, so that it is read without its colour.
_SIGNS: dict[Verdict, tuple[str, str]] = {
    "agrees": ("✓", theme.SPARSE),
    "close": ("≈", theme.NEUTRAL),
    "differs": ("✗", _RED),
    "not stated": ("–", theme.NEUTRAL),
}
_FAINT = "color:var(--jp-ui-font-color2,inherit)"
_CELL = ("padding:5px 14px 5px 0", "text-align:left", "vertical-align:top")
_NUMBER = (
    "padding:5px 14px 5px 0",
    "text-align:right",
    "vertical-align:top",
    "font-variant-numeric:tabular-nums",
)
_COLUMNS = 4
_WORDS = "padding:0 0 8px;text-align:left;vertical-align:top"
_TRANSPARENT = "background:transparent"  # JupyterLab stripes the rows of tables otherwise
_NAMES = {
    "context": "context",
    "tp": "TP",
    "block_size": "block",
    "batched_tokens": "tokens in a batch",
    "async_scheduling": "asynchronous scheduling",
    "kv_dtype": "KV cache",
}


def reconciliation(value: Reconciliation) -> View:
    """Table of predicted and logged figures, with the verdict; below each, what the line means.

    ``value`` is that of ``workbench.serving.reconcile.reconcile(log, config)``. Everything that
    comes from the log is escaped.
    """
    head = "".join(
        box(escape(word), *style, "font-weight:600", tag="th")
        for word, style in (
            ("line of the log", _CELL),
            ("logged", _NUMBER),
            ("predicted", _NUMBER),
            ("verdict", _CELL),
        )
    )
    table = box(
        box(head, _TRANSPARENT, tag="tr") + "".join(map(_row, value.rows)),
        "border-collapse:collapse", "table-layout:auto", "width:100%", "margin:0",
        f"font-size:{theme.TEXT}px",
        tag="table",
    )  # fmt: skip
    notes = box(escape(f"Computed with: {_settings(value)}."), "margin-top:4px")
    notes += "".join(box(escape(f"Note: {caveat}"), "margin-top:4px") for caveat in value.caveats)
    return View(
        html=page(
            f"Start-up log of vLLM {value.version or 'of unknown version'}, beside the prediction",
            "logged: recorded by the engine that wrote the log · predicted: computed here, exact "
            "but for the memory left to the cache, which is modelled · agrees: within the "
            f"predicted range; close: at most {CLOSE:.0%} beside it",
            box(table, "max-width:900px")
            + box(notes, f"font-size:{theme.TEXT}px", "margin-top:8px", "max-width:900px"),
        ),
        text=_text(value),
    )


def _row(row: Comparison) -> str:
    sign, color = _SIGNS[row.verdict]
    beside = f", {_error(row)}" if row.verdict in ("close", "differs") else ""
    weight = "font-weight:700" if row.verdict == "differs" else "font-weight:400"
    verdict = box(
        escape(f"{sign} {row.verdict}{beside}"), f"color:{color}", weight, "white-space:nowrap",
        tag="span",
    )  # fmt: skip
    low, high = escape(row.predicted_text).partition(" … ")[::2]
    # A range breaks after its dots, where the page is too narrow for one line.
    spans = (f"{low} …", high) if high else (low,)
    predicted = " ".join(box(part, "white-space:nowrap", tag="span") for part in spans)
    cells = (
        box(f"<b>{escape(row.line)}</b>", *_CELL, tag="td")
        + box(escape(row.logged_text), *_NUMBER, "white-space:nowrap", tag="td")
        + box(predicted, *_NUMBER, tag="td")
        + box(verdict, *_CELL, tag="td")
    )
    words = escape(row.meaning) + box(escape(row.how), _FAINT)
    # What a line means lies below its figures, as wide as the table: nothing scrolls sideways.
    below = box(words, "max-width:760px", "line-height:1.35")
    return box(cells, f"border-top:1px solid {theme.LINE}", _TRANSPARENT, tag="tr") + box(
        f'<td colspan="{_COLUMNS}" style="{escape(_WORDS)}">{below}</td>', _TRANSPARENT, tag="tr"
    )


def _error(row: Comparison) -> str:
    error = row.error or 0.0
    text = f"{error:+.2%}" if abs(error) < 0.1 else f"{error:+,.0%}"
    return text.replace("-", "−")


def _settings(value: Reconciliation) -> str:
    return "; ".join(
        f"{_NAMES.get(name, name)} {_value(setting)} ({source})"
        for name, (setting, source) in value.settings.items()
    )


def _value(setting: object) -> str:
    if isinstance(setting, bool):
        return "on" if setting else "off"
    return f"{setting:,}" if isinstance(setting, int) else str(setting)


def _text(value: Reconciliation) -> str:
    lines = [f"start-up log of vLLM {value.version or 'of unknown version'}, beside the prediction"]
    for row in value.rows:
        sign, _ = _SIGNS[row.verdict]
        beside = f", {_error(row)}" if row.verdict in ("close", "differs") else ""
        lines.append(
            f"{sign} {row.line:<26} logged {row.logged_text:>17}   predicted "
            f"{row.predicted_text:<33} {row.verdict}{beside}"
        )
        lines.append(f"    {row.meaning}")
    lines.append(f"computed with: {_settings(value)}")
    return "\n".join([*lines, *(f"note: {caveat}" for caveat in value.caveats)])
