"""A running engine's layers beside their expectation, as a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from workbench.model.display import gib, ranges
from workbench.serving.layers.engine_expected import SOURCES, Value
from workbench.serving.layers.engine_values import (
    EngineLayer,
    EngineLayers,
    LayerField,
    Verdict,
    keys_text,
    value_text,
)
from workbench.views import theme
from workbench.views.page import box, page
from workbench.views.view import View

_RED = "#D13438"  # what differs; 4.9 : 1 on white, 3.8 on the dark theme's #111
_FAINT = "color:var(--jp-ui-font-color2,inherit)"
_PLAIN = "background:transparent"  # JupyterLab stripes the rows of tables otherwise
# Every verdict has its own sign, so that it is read without its colour.
_SIGNS: Mapping[Verdict, tuple[str, str]] = {
    "same": ("✓", theme.SPARSE),
    "differs": ("✗", _RED),
    "odd one out": ("≠", _RED),
    "not found": ("?", theme.FULL),
    "not compared": ("–", theme.NEUTRAL),
}
_COLORS = {"full": theme.FULL, "sliding": theme.SLIDING, "": theme.NEUTRAL}
_TITLES = {"target": "the model", "drafter": "the drafter"}
# What stands in which column, and before or behind which word; the rest is under "all fields".
_COLUMNS: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
    ("attention", (
        ("backend", "", ""), ("window", "window ", ""), ("query heads", "query heads ", ""),
        ("KV heads", "KV heads ", ""), ("head size", "head size ", ""),
        ("attention weights", "weights in ", ""),
    )),
    ("KV cache", (
        ("KV group", "group ", ""), ("cache keeps", "keeps ", ""), ("KV dtype", "in ", ""),
        ("block size", "blocks of ", " tokens"), ("page bytes", "", " bytes a page"),
    )),
    ("MLP", (
        ("MLP", "", ""), ("MLP weights", "weights in ", ""), ("experts", "", " experts"),
        ("experts here", "", " of them here"), ("experts a token", "", " a token"),
        ("expert width", "width ", ""), ("expert kernel", "", ""), ("router", "", ""),
        ("router dtype", "router in ", ""),
    )),
)  # fmt: skip
_SHOWN = {name for _, fields in _COLUMNS for name, _, _ in fields}


def built_layers(value: EngineLayers, *, source: str = "read off the running engine") -> View:
    """Table of the layers as the engine built them, like ones folded, differences marked.

    ``value`` is that of ``workbench.serving.layers.engine_layers.engine_layers(llm, config)``;
    ``source`` says where it is from, for one that was recorded: its date and hardware. Below the
    table: every difference with what it was expected by, KV cache groups, ranks, and
    what the engine says of itself. Everything that comes from the engine is escaped.
    """
    body = ""
    for model in ("target", "drafter"):
        if value.of(model):
            body += _heading(f"Layers of {_TITLES[model]}") + _layers(value, model)
            body += _every_field(value, model)
    body += _differences(value) + _groups(value) + _ranks(value) + _settings(value)
    body += "".join(
        box(escape(line), _FAINT, "margin-top:4px", f"font-size:{theme.TEXT}px")
        for line in (*_about(value), *(f"Note: {note}" for note in value.notes))
    )
    count = len(value.differences)
    verdict = "all as expected" if value.agrees else f"{_plural(count, 'field')} to look at"
    if not count and not value.agrees:
        verdict = "groups, settings or ranks to look at"
    sign, color = _SIGNS["same" if value.agrees else "differs"]
    body = box(escape(f"{sign} {verdict}"), f"color:{color}", "font-weight:700") + body
    return View(
        html=page(
            f"Layers as vLLM {value.engine.get('version') or 'of unknown version'} built them",
            f"{source} · {_plural(len(value.ranks), 'worker')} · "
            f"{value.compared:,} fields compared with the configuration"
            + (", the plan" if _sources(value, "plan") else "")
            + ", the grouping rule and with each other",
            box(body, "max-width:1000px"),
        ),
        text=_text(value, verdict),
    )


# -- pieces -------------------------------------------------------------------------------------


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _sources(value: EngineLayers, source: str) -> bool:
    return any(one.source == source for layer in value.layers for one in layer.fields)


def _heading(text: str) -> str:
    return box(escape(text), "font-weight:600", "margin:12px 0 2px", f"font-size:{theme.TEXT}px")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, least: str = "0") -> str:
    """A table of cells that are HTML already; words of the head are escaped. ``least`` is the
    least width of a column: a long name elsewhere breaks no short words. A row's cell beyond those
    of the head stands beneath the row, as wide as the table, and needs no column."""
    cell = ("padding:4px 14px 4px 0", "text-align:left", "vertical-align:top", f"min-width:{least}")
    top = "".join(box(escape(w), *cell, "font-weight:400", _FAINT, tag="th") for w in head)
    lines = box(top, _PLAIN, tag="tr")
    for row in rows:
        cells = "".join(box(one, *cell, tag="td") for one in row[: len(head)])
        lines += box(cells, _PLAIN, f"border-top:1px solid {theme.LINE}", tag="tr")
        for beneath in filter(None, row[len(head) :]):
            style = escape(";".join(("padding:0 14px 6px 0", "text-align:left")))
            lines += box(
                f'<td colspan="{len(head)}" style="{style}">{beneath}</td>', _PLAIN, tag="tr"
            )
    table = box(
        lines, "border-collapse:collapse", "margin:0", f"font-size:{theme.TEXT}px",
        "overflow-wrap:anywhere", tag="table",
    )  # fmt: skip
    return box(table, "overflow-x:auto")


def _marked(one: LayerField, text: str) -> str:
    """A field's text; where it is not as expected, with sign, colour and the expectation."""
    if one.agrees:
        return escape(text)
    sign, color = _SIGNS[one.verdict]
    words = f"{sign} {text}, expected {value_text(one.expected)}"
    return box(escape(words), f"color:{color}", "font-weight:700", tag="span")


def _numbers(layers: Sequence[EngineLayer]) -> str:
    return ranges(layer.index for layer in layers)


def _together(layers: Sequence[EngineLayer], name: str) -> Value:
    """What folded layers found: one value, or the group numbers of all of them."""
    if name != "KV group":
        return layers[0].found(name)
    found = [layer.found(name) for layer in layers]
    numbers = {number for number in found if isinstance(number, int)}
    return ranges(numbers) if numbers else found[0]


def _layers(value: EngineLayers, model: str) -> str:
    rows = []
    for layers in value.folded("drafter" if model == "drafter" else "target"):
        first = layers[0]
        dot = box("●", f"color:{_COLORS[first.attention]}", tag="span")
        cells = [
            f"{dot} {escape(_numbers(layers))}"
            + box(escape(f"{first.attention or 'not built'} · {_plural(len(layers), 'layer')}"),
                  _FAINT, "white-space:nowrap")
        ]  # fmt: skip
        fields = {one.name: one for one in first.fields}
        for _, wanted in _COLUMNS:
            lines = []
            for name, before, behind in wanted:
                one = fields.get(name)
                if one is None or (one.found is None and one.agrees):
                    continue
                shown = _together(layers, name)
                none = one.found is None or one.found == "none"
                lines.append(_marked(one, f"{before}{value_text(shown)}{'' if none else behind}"))
            cells.append("<br>".join(lines))
        cells.append(_rest(first))
        rows.append(cells)
    return _table(["layers", *(name for name, _ in _COLUMNS)], rows, least="8.4em")


def _every_field(value: EngineLayers, model: str) -> str:
    """All fields behind a click, in as many columns as there is room for."""
    folds = ""
    for layers in value.folded("drafter" if model == "drafter" else "target"):
        first = layers[0]
        every = "".join(
            box(escape(f"{_SIGNS[one.verdict][0]} {one.name}: {value_text(one.found)}"))
            for one in first.fields
        )
        words = f"{_numbers(layers)}: all {len(first.fields)} fields"
        summary = box(escape(words), "cursor:pointer", tag="summary")
        shape = ("columns:320px", "padding:2px 0 8px 14px", "overflow-wrap:anywhere")
        folds += box(summary + box(every, *shape), _FAINT, tag="details")
    return box(folds, f"font-size:{theme.TEXT}px", "margin-top:4px")


def _rest(layer: EngineLayer) -> str:
    """Bytes of the weights, the kernels that are switched on, and what else differs: HTML of one
    line, or of as many as the page's width makes of it."""
    lines = []
    for one in layer.fields:
        if one.name == "weight bytes" and one.found is not None:
            size = gib(one.found) if isinstance(one.found, int) else value_text(one.found)
            lines.append(_marked(one, f"{size} of weights"))
        elif one.found is True and one.agrees and one.name not in _SHOWN:
            lines.append(box(escape(one.name), f"font-family:{theme.MONO}", _FAINT, tag="span"))
        elif not one.agrees and one.name not in _SHOWN:
            lines.append(_marked(one, f"{one.name}: {value_text(one.found)}"))
    return " · ".join(lines)


def _differences(value: EngineLayers) -> str:
    rows = []
    for model, one, indices in value.gathered:
        sign, color = _SIGNS[one.verdict]
        rows.append((
            escape(f"{'drafter ' * (model == 'drafter')}{ranges(indices)}"),
            escape(one.name),
            escape(value_text(one.found)),
            escape(value_text(one.expected)),
            box(escape(f"{sign} {one.verdict}"), f"color:{color}", "font-weight:700", tag="span"),
            box(escape(SOURCES[one.source]), _FAINT),
        ))  # fmt: skip
    if not rows:
        return ""
    head = ("layers", "field", "the engine has", "expected", "verdict", "by")
    return _heading("Differences") + _table(head, rows)


def _groups(value: EngineLayers) -> str:
    rows = []
    for group in value.groups:
        size = group.page_bytes
        held = (
            escape("–" if group.index is None else str(group.index)),
            escape(group.keeps or "–"),
            escape(f"{value_text(group.block_size)} tokens" if group.block_size else "–"),
            escape(f"{value_text(size)} bytes" if size else "–"),
            escape(keys_text(group.layers)),
        )
        if group.expected is None:
            verdict = box("– not compared", _FAINT)
        else:
            sign, color = _SIGNS["same" if group.agrees else "differs"]
            words = sign if group.agrees else f"{sign} {keys_text(group.expected)}"
            verdict = box(escape(words), f"color:{color}", "font-weight:700")
        rows.append((*held, verdict))
    if not rows:
        return ""
    head = ("group", "keeps", "block", "page of a layer", "layers", "by the grouping rule")
    return _heading("KV cache groups") + _table(head, rows)


def _ranks(value: EngineLayers) -> str:
    if len(value.ranks) < 2:
        return ""
    title = f"Ranks {ranges(value.ranks)}"
    if not value.rank_differences:
        good = box("✓ all alike", f"color:{theme.SPARSE}", f"font-size:{theme.TEXT}px")
        return _heading(title) + good
    rows = [
        (
            escape(one.where),
            escape(one.field),
            "<br>".join(
                box(escape(f"✗ rank {rank}: {value_text(found)}"), f"color:{_RED}", tag="span")
                for rank, found in one.values
            ),
        )
        for one in value.rank_differences
    ]
    return _heading(title) + _table(("where", "field", "differs"), rows)


def _settings(value: EngineLayers) -> str:
    words = [
        f"{escape(one.name)} {_marked(one, value_text(one.found))}"
        for one in value.settings
        if one.found is not None or not one.agrees
    ]
    line = box("Settings: " + "; ".join(words), "margin-top:10px", f"font-size:{theme.TEXT}px")
    return line if words else ""


def _about(value: EngineLayers) -> list[str]:
    """What the engine says of itself: runner, graphs, custom operations."""
    engine = value.engine
    lines = []
    runner = engine.get("runner_generation")
    classes = [
        str(held.get("class")) for held in (engine.get("models") or {}).values()
        if isinstance(held, Mapping)
    ]  # fmt: skip
    where = engine.get("device_name") or engine.get("device")
    if runner or classes:
        lines.append(
            f"{' and '.join(classes) or 'no model'} in model runner {runner}"
            + (f" on {where}" if where else "")
        )
    compiled = engine.get("compilation") or {}
    lines.append(
        f"Compilation {value_text(compiled.get('mode'))}, CUDA graphs "
        f"{value_text(compiled.get('graph_mode'))}"
    )
    for row in engine.get("graphs") or ():
        tokens = [n for n in row.get("tokens") or () if isinstance(n, int)]
        word = "captured" if row.get("held") else "dispatched to"
        lines.append(
            f"Graphs of the {row.get('model')}, {row.get('mode')}: {word} for "
            f"{ranges(tokens) or 'no'} tokens"
        )
    for name in ("enabled", "disabled"):
        ops = compiled.get(name) or {}
        if ops:
            lines.append(f"Custom operations {name}: {', '.join(sorted(map(str, ops)))}")
    return lines


def _text(value: EngineLayers, verdict: str) -> str:
    version = value.engine.get("version") or "of unknown version"
    lines = [f"layers as vLLM {version} built them: {verdict}"]
    for model in ("target", "drafter"):
        for layers in value.folded("drafter" if model == "drafter" else "target"):
            first = layers[0]
            facts = [
                f"{name} {value_text(_together(layers, name))}"
                for name in (
                    "backend", "window", "KV group", "KV dtype", "attention weights", "MLP",
                    "MLP weights", "expert kernel",
                )
                if first.found(name) is not None
            ]  # fmt: skip
            whose = "drafter " if model == "drafter" else ""
            kind = first.attention or "not built"
            lines.append(f"{whose}{_numbers(layers)} ({kind}): {'; '.join(facts)}")
    for whose, one, indices in value.gathered:
        sign, _ = _SIGNS[one.verdict]
        lines.append(
            f"{sign} {'drafter ' * (whose == 'drafter')}{ranges(indices)}: {one.name} "
            f"{value_text(one.found)}, expected {value_text(one.expected)} by "
            f"{SOURCES[one.source]} ({one.verdict})"
        )
    for group in value.groups:
        if not group.agrees:
            lines.append(
                f"✗ group {'–' if group.index is None else group.index}: "
                f"{keys_text(group.layers)}, by the grouping rule {keys_text(group.expected or ())}"
            )
    for setting in value.settings:
        if not setting.agrees:
            lines.append(
                f"✗ {setting.name}: {value_text(setting.found)}, planned "
                f"{value_text(setting.expected)}"
            )
    for apart in value.rank_differences:
        values = ", ".join(f"rank {rank} {value_text(found)}" for rank, found in apart.values)
        lines.append(f"✗ {apart.where}: {apart.field} differs: {values}")
    return "\n".join([*lines, *(f"note: {note}" for note in value.notes)])
