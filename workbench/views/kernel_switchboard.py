"""The switchboard: a menu for each operation of a model, what that means, and A beside B."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import ipywidgets as widgets

from workbench.errors import WorkbenchError
from workbench.kernels import registry
from workbench.kernels.catalogue import LAYER_OPS, REFERENCE
from workbench.kernels.ops import operation
from workbench.kernels.registry import Selection
from workbench.kernels.tables import Resolved
from workbench.views import theme
from workbench.views.dashboard import Dashboard
from workbench.views.kernel_pages import kernel_table, table_cells
from workbench.views.kernel_swap import swap_comparison
from workbench.views.kernel_switch import OPS, Job, Switch
from workbench.views.kernel_words import BAD, FAINT, choices, html_table
from workbench.views.numbers import plural
from workbench.views.page import box
from workbench.views.view import preformatted

if TYPE_CHECKING:
    from workbench.model.beam import Beam
    from workbench.model.swap import Comparison

HERTZ = 10
_PROMPT = "def add(a, b):\n"
_LABEL, _MENU = "124px", "272px"  # two columns beside the side bar of a 1000 px page
_STALE = "The selection was changed after this comparison:"
_HEAD = ("operation", "layers", "requested", "runs", "checked here", "reason")
_AWAY = "✕ "  # begins the name of a variant that does not run here


class Switchboard(Dashboard):
    """Menus, buttons, the table of what runs, and the last comparison.

    ``switch`` does the work and can be used without the page.
    """

    def __init__(self, beam: Beam, prompt: Sequence[int], *, new_tokens: int) -> None:
        self.switch = Switch(beam, prompt, new_tokens=new_tokens)
        self.shown_state: object = None
        self._said = ""  # what the last button came to
        self._compared: object = None  # the selection that the comparison shown is of
        self._quiet = False
        self._lock = threading.RLock()
        self.layers = widgets.Dropdown(
            options=[("all layers", "all"), ("sliding layers", "sliding"), ("full layers", "full")],
            value="all",
            description="change in",
            style={"description_width": _LABEL},
            layout={"width": _MENU, "min_width": "0"},
        )
        self.menus = {
            op: widgets.Dropdown(
                description=op,
                tooltip=operation(op).title,
                style={"description_width": _LABEL},
                layout={"width": _MENU, "min_width": "0"},
            )
            for op in OPS
        }
        self.apply = _button("Apply", "Select what the menus say", "primary")
        self.reference = _button("All reference", "The torch reference in every layer")
        self.check = _button("Check selected", "Hold each selected variant against the oracle")
        self.compare = _button("Compare A/B", "Decode with the reference and with the selection")
        self.stop = _button("Stop", "End what runs")
        self.bar = widgets.FloatProgress(
            min=0, max=1, value=0, layout={"width": "180px", "display": "none"}
        )
        self.status = widgets.HTML()
        self.problem = widgets.HTML(layout={"min_width": "0", "flex": "0 1 auto"})
        self.away = widgets.HTML()
        self.table = widgets.HTML()
        self.stale = widgets.HTML()
        self.result = widgets.Output()
        for widget, name in ((self.table, "bw-kernels-table"), (self.status, "bw-kernels-status"),
                             (self.problem, "bw-kernels-problem")):  # fmt: skip
            widget.add_class(name)
        row = {"width": "100%", "flex_flow": "row wrap"}
        self.widget = widgets.VBox(
            [
                self.layers,
                widgets.HBox(list(self.menus.values()), layout=row),
                self.away,
                widgets.HBox(
                    [self.apply, self.reference, self.check, self.compare, self.stop], layout=row
                ),
                # As high as a line of it always, so that what is below stays where it is.
                widgets.HBox(
                    [self.bar, self.status, self.problem],
                    layout={**row, "align_items": "center", "min_height": "36px"},
                ),
                self.table,
                self.stale,
                self.result,
            ]
        )
        self.widget.add_class("bw-kernels")
        self.layers.observe(lambda _: self._layers_chosen(), names="value")
        for op, menu in self.menus.items():
            menu.observe(lambda change, op=op: self._chosen(op, change), names="value")
        self.apply.on_click(lambda _: self.do_apply())
        self.reference.on_click(lambda _: self.do_reset())
        self.check.on_click(lambda _: self.do_check())
        self.compare.on_click(lambda _: self.do_compare())
        self.stop.on_click(lambda _: self.do_stop())
        self.update()
        _watch_cells(self)

    # -- what the buttons do ----------------------------------------------------------------------

    def do_apply(self) -> None:
        """Select what the menus say, in the layers chosen above them."""
        wanted = {
            op: menu.value
            for op, menu in self.menus.items()
            if self.layers.value == "all" or op in LAYER_OPS
        }
        layers = self.layers.value
        now = self.switch.current(layers)
        changed = [(op, name) for op, name in wanted.items() if name != now[op]]
        self._begin(
            lambda: self.switch.apply(wanted, layers), lambda: self._applied(changed, layers)
        )

    def do_reset(self) -> None:
        """The reference everywhere."""
        self._begin(self.switch.reset, lambda: "All operations run the reference.")

    def do_check(self) -> None:
        """Check what is selected."""
        rows = self.switch.rows()
        held = list(dict.fromkeys((r.op, r.resolved) for r in rows if r.resolved != REFERENCE))
        self._begin(self.switch.check, lambda: self._checked(held))

    def do_compare(self) -> None:
        """Decode with the reference and with the selection."""
        before, selection = self.switch.comparison, self.switch.selection
        self._begin(self.switch.compare, lambda: self._compared_words(before, selection))

    def do_stop(self) -> None:
        """End what runs."""
        if self.switch.running:
            self.stop.disabled = True
            self.status.value = _faint("Stopping …")
        self.switch.stop()

    def _begin(self, action: Any, came_to: Callable[[], str]) -> None:
        """Do it, and say what it came to; where it became a job, follow it in a thread."""
        self._said = ""
        try:
            job = action()
        except WorkbenchError as error:
            self.problem.value = _warning(str(error))
            return
        if isinstance(job, Job):
            self.update()
            self.status.value = _faint("Starting …")
            threading.Thread(
                target=self._follow,
                args=(job, came_to),
                daemon=True,
                name="workbench-kernels-show",
            ).start()
        else:
            self._said = came_to()
            self.update()

    def _follow(self, job: Job, came_to: Callable[[], str]) -> None:
        """Show the progress, at most ten times a second, and what came of it."""
        before, shown = self.switch.comparison, None
        while not job.wait(1 / HERTZ):
            self.switch.watch()
            if job.progress is not shown and not job.stopping:
                shown = job.progress
                self.bar.value = shown.done / max(1, shown.of)
                self.status.value = _faint(shown.what or "at work")
        found = self.switch.comparison
        if found is not None and found is not before:
            view = swap_comparison(found, model_tokens=self.switch.beam.tokenizer)
            data = view._repr_mimebundle_()
            output = {"output_type": "display_data", "data": data, "metadata": {}}
            self.result.outputs = (output,)
        if job.error is None:
            stopped = job.stopping and not job.given_up and self.switch.comparison is before
            self._said = "Stopped. What was selected before stays." if stopped else came_to()
        self.update()
        if job.error is not None:
            self.problem.value = _warning(f"{type(job.error).__name__}: {job.error}")

    # -- what they came to ------------------------------------------------------------------------

    def _applied(self, changed: Sequence[tuple[str, str]], layers: str) -> str:
        if not changed:
            return "Nothing to apply: the menus say what runs."
        out = [key for key in changed if key in self.switch.problems]
        done = [(op, name) for op, name in changed if (op, name) not in self.switch.problems]
        some = [f"{op} {name}" for op, name in done]
        words = ", ".join(some) if len(some) <= 3 else plural(len(some), "change")
        where = {"all": "", "sliding": " in sliding layers", "full": " in full layers"}[layers]
        parts = [f"applied{where}: {words}"] if done else []
        parts += [f"{len(out)} not applied, see the table"] if out else []
        return _capital("; ".join(parts)) + "."

    def _checked(self, held: Sequence[tuple[str, str]]) -> str:
        if not held:
            self.switch.note = ""  # no warning: it is said here
            return "Nothing to check: all operations run the reference."
        out = [key for key in held if key in self.switch.problems]
        if out:
            return f"Checked {plural(len(held), 'variant')}: {len(out)} taken out, see the table."
        return f"Checked {plural(len(held), 'variant')}: passed."

    def _compared_words(self, before: Comparison | None, selection: Selection) -> str:
        found = self.switch.comparison
        if found is None or found is before:
            return "Not compared; what failed is in the table."
        self._compared = selection
        same = "the same within the limit" if found.passed else "they differ"
        return f"Compared: {same}. The figure is below the table."

    def _layers_chosen(self) -> None:
        self._said = ""
        self.update()

    # -- the page ---------------------------------------------------------------------------------

    def update(self) -> None:
        """Show what is selected now; for a selection made in a cell, too."""
        with self._lock:
            rows = self.switch.rows()
            self.shown_state = registry.state()
            now = self.switch.current(self.layers.value)
            self._fill(now)
            self.table.value = box(self._table(rows), "padding:6px 4px", "line-height:1.4")
            running = self.switch.running
            for button in (self.apply, self.reference, self.check, self.compare):
                button.disabled = running
            self.stop.disabled = not running
            self.bar.layout.display = "" if running else "none"
            if not running:
                self.bar.value = 0
                self.status.value = _faint(self._said) if self._said else ""
            note = self.switch.note
            self.problem.value = _warning(note) if note else ""
            other = self.result.outputs and self._compared != self.switch.selection
            self.stale.value = _faint(_STALE) if other else ""

    def _fill(self, now: dict[str, str]) -> None:
        self._quiet = True
        away: dict[str, dict[str, list[str]]] = {}
        try:
            for op, menu in self.menus.items():
                known = choices(op, self.switch.where)
                options = [(f"{_AWAY}{name}" if why else name, name) for name, why in known]
                if list(menu.options) != options:
                    menu.options = options
                menu.value = now[op]
                menu.disabled = self.layers.value != "all" and op not in LAYER_OPS
                for name, why in known:
                    if why:
                        away.setdefault(why, {}).setdefault(name, []).append(op)
        finally:
            self._quiet = False
        lines = []
        for why, which in away.items():
            some = [
                f"{name} of {', '.join(ops) if len(ops) <= 3 else f'{len(ops)} operations'}"
                for name, ops in which.items()
            ]
            lines.append(f"{'; '.join(some)}: {why}")
        self.away.value = (
            _faint(f"{_AWAY}not on this machine: {' · '.join(lines)}") if lines else ""
        )

    def _chosen(self, op: str, change: Any) -> None:
        """A choice that cannot run here is said and taken back."""
        if self._quiet or change.new is None:
            return
        why = dict(choices(op, self.switch.where)).get(change.new, "")
        if why:
            self.problem.value = _warning(f"{change.new} of {op} does not run here: {why}.")
            self._quiet = True
            try:
                self.menus[op].value = change.old or REFERENCE
            finally:
                self._quiet = False
        else:
            now = self.switch.current(self.layers.value)
            count = sum(menu.value != now[o] for o, menu in self.menus.items())
            self._said = ""
            self.status.value = (
                _faint(f"{plural(count, 'change')} not applied yet") if count else ""
            )
            self.problem.value = ""

    def _table(self, rows: Sequence[Resolved]) -> str:
        cells = table_cells(rows)
        for (op, name), why in self.switch.problems.items():
            place = max(i for i, row in enumerate(rows) if row.op == op)
            cells[place] = [*cells[place][:5], (self._failed(name, why), BAD)]
        return html_table(_HEAD, cells, mono=4, steady=True)

    def _failed(self, name: str, why: str) -> str:
        return f"⚠ {name} stays out: {why}"

    @property
    def text(self) -> str:
        """The table as text, with what was refused, and the last comparison."""
        rows = self.switch.rows()
        lines = [kernel_table(rows).text]
        for (op, name), why in self.switch.problems.items():
            lines.append(f"{op}: {self._failed(name, why)}")
        if self.switch.comparison is not None:
            lines.append(swap_comparison(self.switch.comparison).text)
        return "\n".join(lines)

    def _static_html(self) -> str:
        return preformatted(self.text)  # the table as a page is what kernel_table shows


# A cell may register a variant or select one: boards show it once the cell has run.
_BOARDS: WeakSet[Switchboard] = WeakSet()


def _watch_cells(board: Switchboard) -> None:
    """In a notebook, look at the registry after each cell; elsewhere do nothing."""
    try:
        from IPython import get_ipython
    except ImportError:
        return
    shell = get_ipython()
    if shell is None:
        return
    _BOARDS.add(board)
    if _after_cell not in shell.events.callbacks.get("post_run_cell", []):
        shell.events.register("post_run_cell", _after_cell)


def _after_cell(result: Any) -> None:
    for board in list(_BOARDS):
        if isinstance(getattr(result, "error_in_exec", None), KeyboardInterrupt):
            board.switch.stop()
        if board.shown_state != registry.state() and not board.switch.running:
            board.update()


def _button(word: str, tooltip: str, style: str = "") -> widgets.Button:
    return widgets.Button(
        description=word, tooltip=tooltip, button_style=style, layout={"width": "auto"}
    )


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _faint(text: str) -> str:
    return box(escape(text), f"color:{FAINT}", f"font-size:{theme.TEXT}px", "line-height:1.5")


def _warning(sentence: str) -> str:
    return (
        f'<div style="border-left:3px solid {BAD};padding-left:8px;line-height:1.5;'
        f'overflow-wrap:anywhere"><span style="color:{BAD}">⚠</span> {escape(sentence)}</div>'
    )


def switchboard(beam: Beam, prompt: str = _PROMPT, *, new_tokens: int = 4) -> Switchboard:
    """A switchboard for the kernels of a loaded model.

    ``prompt`` and ``new_tokens`` are what A and B decode: few tokens, if kernels are interpreted.
    It selects for the whole process (``kernels.select``); ``kernels.reset()`` ends that.

    Raises:
        WorkbenchError: a prompt without tokens.
    """
    if beam.tokenizer is None:
        raise WorkbenchError(
            f"{beam.name} has no tokenizer to read a prompt with; load one with it"
        )
    if not prompt:
        raise WorkbenchError("a switchboard needs a prompt of at least one token")
    return Switchboard(beam, beam.tokenizer.encode(prompt), new_tokens=new_tokens)
