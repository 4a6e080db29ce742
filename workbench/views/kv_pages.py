"""Pages about memory: the accounts side by side, and a table of plans with their commands."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from workbench.model.plan import Plan
from workbench.model.sizing import ACCOUNTS, ENGINE, Account, KVBytes, KVSizing
from workbench.views import theme
from workbench.views.kv_figures import PART_COLORS, PART_NAMES, Part
from workbench.views.kv_words import ACCOUNT_NAMES, ACCOUNT_WORDS, settings_words, size
from workbench.views.numbers import plural
from workbench.views.page import box, page
from workbench.views.view import View

_COLUMNS: tuple[Part, ...] = ("full", "sliding", "drafter", "padding")
_CELL = "padding:3px 12px 3px 0"
_NUMBER = (
    _CELL,
    "text-align:right",
    "font-variant-numeric:tabular-nums",
    "white-space:nowrap",
)
_TABLE = (
    "border-collapse:collapse",
    "table-layout:auto",
    "width:100%",
    f"font-size:{theme.TEXT}px",
    "margin:0",
)
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_WORD = (_CELL, "text-align:left", "white-space:nowrap")
_RULE = f"border-top:1px solid {theme.LINE}"

# Runs in the page of a trusted notebook. The text is what stands in the page beside the button, so
# that nothing of it is ever read as code. Where the page may not use the clipboard, it is selected.
_COPY = (
    "const b=this,p=b.parentElement.querySelector('pre');"
    "const s=()=>{const r=document.createRange();r.selectNodeContents(p);"
    "const g=getSelection();g.removeAllRanges();g.addRange(r);"
    "return document.execCommand('copy')};"
    "const d=w=>{b.textContent=w;setTimeout(()=>{b.textContent='Copy'},1500)};"
    "navigator.clipboard?navigator.clipboard.writeText(p.textContent)"
    ".then(()=>d('Copied'),()=>d(s()?'Copied':'Selected')):d(s()?'Copied':'Selected')"
)


# -- accounts -----------------------------------------------------------------------------------


def kv_accounts(sizing: KVSizing, *, model: str = "the model") -> View:
    """Ideal, engine admission bound, hybrid manager off, and naive, with the binding term."""
    s = sizing.settings
    return View(
        html=page(
            f"KV cache of {model}, by four accounts",
            f"one GPU, {settings_words(s)}, block of {s.block_size} · exact arithmetic; engine "
            f"figures by {ENGINE}'s accounting; nothing measured",
            accounts_html(sizing),
        ),
        text=_accounts_text(sizing, model),
    )


def accounts_html(sizing: KVSizing) -> str:
    """The table and the sentences under it, for a page or a dashboard."""
    columns = _columns(sizing)
    head = "".join(
        box(escape(word), *_NUMBER, "font-weight:600", "text-align:right", tag="th")
        for word in (*columns, "a GPU", "× ideal")
    )
    rows = []
    ideal = sizing.per_gpu("ideal").total
    most = max(sizing.per_gpu(account).total for account in ACCOUNTS)
    for account in ACCOUNTS:
        name = box(
            f"<b>{escape(ACCOUNT_NAMES[account])}</b><br>"
            + box(escape(_words(sizing, account)), "color:var(--jp-ui-font-color2,inherit)",
                  tag="span"),
            _CELL, "text-align:left", "line-height:1.3", "min-width:150px", tag="td",
        )  # fmt: skip
        values = sizing.per_gpu(account)
        cells = "".join(box(_number(getattr(values, c)), *_NUMBER, tag="td") for c in columns)
        cells += box(f"<b>{size(values.total)}</b>", *_NUMBER, tag="td")
        cells += box(f"{values.total / ideal:.2f}", *_NUMBER, tag="td")
        cells += box(_bar(values, most), "min-width:110px", "width:20%", tag="td")
        rows.append(box(name + cells, _RULE, "background:transparent", tag="tr"))
    table = _scrolled(
        box("<th></th>" + head + "<th></th>", "background:transparent", tag="tr") + "".join(rows)
    )
    facts = "".join(box(escape(fact), "margin-top:4px") for fact in _facts(sizing))
    return table + box(facts, f"font-size:{theme.TEXT}px", "margin-top:8px", "max-width:900px")


def _scrolled(rows: str) -> str:
    """A table that scrolls by itself where the page is too narrow for it."""
    return box(box(rows, *_TABLE, tag="table"), "overflow-x:auto", "max-width:100%")


def _columns(sizing: KVSizing) -> list[Part]:
    bound = sizing.per_gpu("admission")
    return [c for c in _COLUMNS if getattr(bound, c) or c in ("full", "sliding")]


def _words(sizing: KVSizing, account: Account) -> str:
    if account == "hybrid_off" and sizing.hybrid_off_refusal is not None:
        return f"every layer at full length; {ENGINE} would not start like this"
    return ACCOUNT_WORDS[account]


def _number(count: int) -> str:
    return size(count) if count else "–"


def _bar(values: KVBytes, most: int) -> str:
    pieces = "".join(
        box(
            "",
            "display:inline-block",
            "height:10px",
            f"width:{100 * getattr(values, part) / most:.2f}%",
            f"background:{PART_COLORS[part]}",
            tag="span",
            title=f"{PART_NAMES[part]}: {size(getattr(values, part))}",
        )
        for part in _COLUMNS
        if getattr(values, part)
    )
    return box(pieces, "white-space:nowrap", "font-size:0", "text-align:left")


def _facts(sizing: KVSizing) -> list[str]:
    s, plan = sizing.settings, sizing.plan
    padding = plan.padding_layers
    groups = ", ".join(
        f"{plural(count, 'group')} of {layers} {kind}"
        for (layers, kind), count in _groups(sizing).items()
    )
    copies = (
        f"; TP{s.tp} keeps {sizing.replicas} copies of each KV head" if sizing.replicas > 1 else ""
    )
    refusal = sizing.hybrid_off_refusal
    return [
        f"Binding term: {sizing.binding_sentence}.",
        f"One more token of context adds {size(sizing.bytes_per_token)} a sequence in the full "
        f"layers, each KV head once{copies}.",
        f"{plural(len(plan.groups), 'group')} in the engine: {groups}"
        + (f"; {plural(padding, 'layer')}' worth of each block is padding." if padding else "."),
        *([f"Hybrid manager off: {refusal}."] if refusal else []),
    ]


def _groups(sizing: KVSizing) -> dict[tuple[int, str], int]:
    counts: dict[tuple[int, str], int] = {}
    for group in sizing.plan.groups:
        layers = [sizing.plan.layers[i] for i in group.layers]
        kind = "drafter" if layers[0].drafter else "full" if group.window is None else "sliding"
        counts[len(layers), kind] = counts.get((len(layers), kind), 0) + 1
    return counts


def _accounts_text(sizing: KVSizing, model: str) -> str:
    lines = [f"{model}: KV cache on one GPU, {settings_words(sizing.settings)}"]
    columns = _columns(sizing)
    lines.append(" " * 24 + "".join(f"{c:>13}" for c in columns) + f"{'total':>13}")
    for account in ACCOUNTS:
        values = sizing.per_gpu(account)
        cells = "".join(f"{size(getattr(values, c)):>13}" for c in columns)
        cells += f"{size(values.total):>13}"
        lines.append(f"{ACCOUNT_NAMES[account]:<24}{cells}")
    return "\n".join([*lines, *_facts(sizing)])


# -- plans --------------------------------------------------------------------------------------


def plan_table(plans: Plan | Sequence[Plan]) -> View:
    """Layouts, one a row: whether each fits and runs, how far it reaches, its command to copy.

    The button works in a trusted notebook; elsewhere the command can be selected.
    """
    plans = [plans] if isinstance(plans, Plan) else list(plans)
    asked = dict.fromkeys(
        f"{plural(p.sequences, 'sequence')} of {p.kv.settings.context:,} tokens, KV "
        f"{p.kv.settings.kv_dtype.upper()}"
        for p in plans
    )
    subtitle = (
        f"{' and '.join(asked)} · weights and KV cache exact by {ENGINE}'s accounting, "
        "workspace modelled; nothing measured"
    )
    return View(
        html=page(f"Plans for {plans[0].model}", subtitle, plans_html(plans)),
        text=_plans_text(plans),
    )


def plans_html(plans: Sequence[Plan], *, chosen: Plan | None = None, commands: bool = True) -> str:
    """The table for a page or a dashboard, which shows the command by itself."""
    head = "".join(
        box(escape(word), *(_NUMBER if number else _WORD), "white-space:normal",
            "vertical-align:bottom", tag="th")
        for word, number in (
            ("layout", False),
            ("GPUs", False),
            ("weights", False),
            ("runs", False),
            ("weights a GPU", True),
            ("KV a GPU", True),
            ("free a GPU", True),
            ("longest context", True),
            ("most sequences", True),
        )
    )  # fmt: skip
    rows = []
    common, numbers = _remarks([(*p.refusals, *p.notes) for p in plans])
    for plan in plans:
        marks = [n for remark, n in numbers.items() if remark in (*plan.refusals, *plan.notes)]
        cells = "".join(
            box(cell, *(_NUMBER if number else _WORD), tag="td")
            for cell, number in (
                (f"<b>{escape(plan.layout.name)}</b>", False),
                (escape(f"{plan.layout.gpus} × {plan.gpu.name}"), False),
                (escape(plan.precision.name), False),
                (_mark(plan) + escape(_superscript(*marks)), False),
                (size(plan.weights_bytes), True),
                (size(plan.kv_bytes), True),
                (size(plan.free_bytes), True),
                (escape(_longest(plan)), True),
                (_count(plan.max_sequences), True),
            )
        )
        shade = f"background:{theme.rgba(theme.NEUTRAL, 0.14)}" if plan is chosen else (
            "background:transparent"
        )  # fmt: skip
        rows.append(box(cells, _RULE, shade, tag="tr"))
        if commands:
            style = "text-align:left;padding:0 0 6px 12px"
            rows.append(
                box(f'<td colspan="9" style="{style}">{_command(plan)}</td>', shade, tag="tr")
            )
    foot = [*(f"{_superscript(n)} {remark}" for remark, n in numbers.items()), *common]
    table = _scrolled(box(head, "background:transparent", tag="tr") + "".join(rows))
    return table + box("".join(map(_remark, foot)), f"font-size:{theme.TEXT}px", "margin-top:6px")


def _remarks(of_plans: Sequence[Sequence[str]]) -> tuple[list[str], dict[str, int]]:
    """What is said of every plan, and the number of each further remark: all are said once."""
    found = dict.fromkeys(remark for remarks in of_plans for remark in remarks)
    common = [remark for remark in found if all(remark in remarks for remarks in of_plans)]
    rest = [remark for remark in found if remark not in common]
    return common, {remark: number for number, remark in enumerate(rest, start=1)}


def _superscript(*numbers: int) -> str:
    """Numbers of footnotes, as they stand at a word."""
    return "\u2009".join(str(n).translate(_RAISED) for n in numbers)


def _longest(plan: Plan, unit: str = "") -> str:
    own = plan.max_context == plan.config.max_position_embeddings
    return _count(plan.max_context) + unit + (" (model's limit)" if own else "")


def _count(count: int) -> str:
    return f"{count:,}" if count else "–"


def _mark(plan: Plan) -> str:
    if plan.runs:
        return box("✓ yes", f"color:{theme.SPARSE}", "white-space:nowrap", tag="span")
    word = "✗ refused" if plan.fits else "✗ too large"
    return box(word, f"color:{theme.FULL}", "white-space:nowrap", tag="span")


def _remark(text: str) -> str:
    return box(escape(text), "color:var(--jp-ui-font-color2,inherit)", "max-width:820px")


def _command(plan: Plan) -> str:
    button = (
        f'<button type="button" onclick="{escape(_COPY)}" style="font:inherit;color:inherit;'
        f"background:{theme.rgba(theme.NEUTRAL, 0.14)};border:1px solid "
        f"{theme.rgba(theme.NEUTRAL, 0.45)};border-radius:3px;cursor:pointer;"
        'padding:2px 10px;margin:4px 0">Copy</button>'
    )
    text = box(
        escape(plan.serve_command),
        f"font:{theme.SMALL}px/1.45 {theme.MONO}",
        "white-space:pre-wrap",
        "overflow-wrap:anywhere",
        "margin:0",
        "background:transparent",
        "color:inherit",
        tag="pre",
    )
    summary = f'<summary style="cursor:pointer">command ({escape(ENGINE)})</summary>'
    return f"<details>{summary}{button}{text}</details>"


def _plans_text(plans: Sequence[Plan]) -> str:
    """A line a plan; why the engine refuses one stands below, once."""
    common, numbers = _remarks([p.refusals for p in plans])
    lines = [_plan_text(p, _superscript(*(numbers[r] for r in p.refusals if r in numbers)))
             for p in plans]  # fmt: skip
    foot = [*(f"{_superscript(n)} {remark}" for remark, n in numbers.items()), *common]
    return "\n".join([*lines, *foot])


def _plan_text(plan: Plan, notes: str) -> str:
    mark = ("runs" if plan.runs else "refused" if plan.fits else "too large") + notes
    return (
        f"{plan.layout.gpus} x {plan.gpu.name:<6} {plan.layout.name:<18} {plan.precision.name:<6}"
        f"{mark:<12} free {size(plan.free_bytes):>12} a GPU, up to {_longest(plan, ' tokens'):>16} "
        f"or {_count(plan.max_sequences):>6} sequences"
    )
