"""The memory dashboard: move a slider and see what the KV cache costs and what fits where."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go

from workbench.datasheet import sheet
from workbench.errors import WorkbenchError
from workbench.model.drafter_config import DFlash2Config
from workbench.model.kv_curve import KVCurve, kv_curve
from workbench.model.kv_settings import KVDtype
from workbench.model.kv_table import kv_csv, plans_csv
from workbench.model.layout import Layout, layouts
from workbench.model.plan import UTILIZATION, Plan, all_plans, make_plan
from workbench.model.presets import drafter_of, resolve, resolve_drafter
from workbench.model.serve_command import Speculation
from workbench.model.sizing import ENGINE, Account, size_kv
from workbench.model.weights import precision
from workbench.views import kv_pages, theme
from workbench.views.dashboard import Dashboard
from workbench.views.kv_command import CommandWidget
from workbench.views.kv_controls import Controls
from workbench.views.kv_panels import Panels
from workbench.views.kv_words import ACCOUNT_NAMES
from workbench.views.numbers import plural
from workbench.views.view import View

_USUAL_CONTEXT = 1 << 17


class MemoryDashboard(Dashboard):
    """Sliders over the growth of the KV cache, one GPU's memory, the layers, and the plans.

    ``plan`` is what is shown, ``plans`` every layout of as many GPUs, ``curve`` the growth;
    ``problem`` says why the controls' present values cannot be planned, and is empty otherwise: the
    page then keeps what it showed before.
    """

    plan: Plan
    plans: tuple[Plan, ...]
    curve: KVCurve

    def __init__(
        self,
        model: str | Path,
        *,
        drafter_model: str | Path | None,
        checkpoint: str | None,
        utilization: float,
        block_size: int,
        speculative_tokens: int,
        **values: Any,
    ) -> None:
        resolved = resolve(model)
        self.name, self.config = resolved.name, resolved.config
        known = drafter_model or drafter_of(self.name)
        self._drafter: DFlash2Config | None = resolve_drafter(known).config if known else None
        if values["drafter"] and self._drafter is None:
            raise WorkbenchError(
                f"no drafter is known for {self.name}; give one as drafter_model, or leave it out"
            )
        self._speculation = Speculation(
            drafter=str(drafter_model) if drafter_model else None, tokens=speculative_tokens
        )
        self._fixed: dict[str, Any] = {
            "name": self.name,
            "checkpoint": checkpoint,
            "utilization": utilization,
            "block_size": block_size,
        }
        self.problem = ""
        self._curve_of: tuple[Any, ...] | None = None  # what the curve was made for
        self._plan(self._complete(values))  # raises before anything is drawn
        self.controls = Controls(
            self.config, values, drafter=self._drafter is not None, changed=self.update
        )
        self._verdict = (
            widgets.HTML()
        )  # or what is wrong, in its place: the plots stay where they are
        self._words = widgets.HTML(layout={"min_width": "0"})
        self._words.add_class("bw-kv-words")
        self.command = CommandWidget(
            look={"sans": theme.SANS, "mono": theme.MONO, "text": theme.TEXT}
        )
        self.command.on_msg(lambda _, message, buffers: self._asked(message))
        self.panels = Panels(self.plan, self.curve)
        self.figure = self.panels.figure
        plots = widgets.VBox([self.figure])
        plots.add_class("bw-kv-plots")
        self.widget = widgets.VBox(
            [
                self.controls.widget,
                self._verdict,
                plots,
                self._words,
                self.command,
            ]
        )
        self._show_words()

    def update(self) -> None:
        """Plan what the controls say and show it; what cannot be planned is said in a sentence."""
        try:
            self._plan(self.controls.values() | {"layout": self.controls.layout})
        except WorkbenchError as error:
            self.problem = str(error)
            plan, s = self.plan, self.plan.kv.settings
            self._verdict.value = _warning(
                f"{error}. Shown is still {plan.layout.gpus} × {plan.gpu.name}, "
                f"{plan.layout.name}, {plural(plan.sequences, 'sequence')} of {s.context:,} "
                f"tokens, {s.kv_dtype.upper()}."
            )
            return
        self.problem = ""
        self.panels.show(self.plan, self.curve)
        self._show_words()

    @property
    def text(self) -> str:
        """What is shown now: the verdict, the accounts and the layouts."""
        accounts = kv_pages.kv_accounts(self.plan.kv, model=self.name).text
        return "\n".join([f"{self.plan.verdict}.", accounts, kv_pages.plan_table(self.plans).text])

    def view(self) -> View:
        """What is shown now, as a view that stays."""
        return View(figure=go.Figure(self.figure.to_dict()), text=self.text)

    def csv(self, which: str) -> tuple[str, str]:
        """A name for the file and the CSV of ``layers`` or ``plans``."""
        s = self.plan.kv.settings
        model = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(self.name).name) or "model"
        name = f"{model}-{which}-{self.plan.sequences}x{s.context}-{s.kv_dtype}.csv"
        return name, kv_csv(self.plan.kv) if which == "layers" else plans_csv(self.plans)

    def _static(self) -> dict[str, Any]:
        data: dict[str, Any] = self.view()._repr_mimebundle_()
        return data

    def _static_html(self) -> str:
        return f"<pre>{escape(self.text)}</pre>"

    # -- values -------------------------------------------------------------------------------

    def _complete(self, values: dict[str, Any]) -> dict[str, Any]:
        """Fill in what was not given, and the layout; check what no plan looks at."""
        most = self.config.max_position_embeddings
        values["gpu"] = sheet(values["gpu"]).name
        values["weights"] = precision(values["weights"]).name
        if values["context"] is None:
            values["context"] = min(_USUAL_CONTEXT, most)
        if values["account"] not in ACCOUNT_NAMES:
            raise WorkbenchError(
                f"unknown account {str(values['account'])[:40]!r}; use one of "
                f"{', '.join(ACCOUNT_NAMES)}"
            )
        found = layouts(self.config, values["gpus"])
        if values["tp"] is None:
            values["tp"] = max((layout.tp for layout in found), default=1)
        ranks = Layout(tp=values["tp"]).tp  # says what is wrong with a number that cannot be
        layout = Layout(tp=ranks, dp=max(1, values["gpus"] // ranks))
        if layout.gpus != values["gpus"]:
            raise WorkbenchError(
                f"{values['tp']} tensor-parallel ranks do not divide {values['gpus']} GPUs; "
                "choose a divisor"
            )
        whole = bool(values["expert_parallel"]) and layout.gpus > 1
        return values | {"layout": Layout(tp=layout.tp, dp=layout.dp, expert_parallel=whole)}

    def _plan(self, values: dict[str, Any]) -> None:
        """Plan all layouts and keep the chosen one; nothing is kept where that fails."""
        with_drafter = values["drafter"] and self._drafter is not None
        asked = self._fixed | {
            "weights": values["weights"],
            "kv_dtype": values["kv_dtype"],
            "context": values["context"],
            "sequences": values["sequences"],
            "batched_tokens": values["batched_tokens"],
            "async_scheduling": values["async_scheduling"],
            "drafter": self._drafter if with_drafter else None,
            "speculation": self._speculation if with_drafter else None,
        }
        gpu, layout = sheet(values["gpu"]), values["layout"]
        plans = all_plans(self.config, gpu, gpus=layout.gpus, **asked)
        plan = next((p for p in plans if p.layout == layout), None)
        if plan is None:
            plan = make_plan(self.config, gpu, layout=layout, **asked)  # says what is wrong
        curve = self._curve(plan, values["account"])
        self.plan, self.plans, self.curve = plan, plans, curve

    def _curve(self, plan: Plan, account: Account) -> KVCurve:
        """The growth up to the model's longest context: another only where it must be."""
        longest = replace(plan.kv.settings, context=self.config.max_position_embeddings)
        key = (longest, account, plan.kv.drafter)
        if key != self._curve_of:
            sizing = size_kv(self.config, drafter=plan.kv.drafter, **asdict(longest))
            self.curve, self._curve_of = kv_curve(sizing, account=account), key
        return self.curve

    @property
    def account(self) -> Account:
        """The account that growth and layers are drawn by."""
        return self.curve.account

    # -- the page -----------------------------------------------------------------------------

    def _asked(self, message: Any) -> None:
        """Write the file that was asked for into the working folder, and hand its text over."""
        if not isinstance(message, dict) or message.get("which") not in ("layers", "plans"):
            return
        name, text = self.csv(message["which"])
        try:
            (kv_csv(self.plan.kv, name) if message["which"] == "layers" else plans_csv(
                self.plans, name))  # fmt: skip
            note = f"also written to {Path.cwd() / name}"
        except WorkbenchError as error:
            note = str(error)
        self.command.send({"kind": "file", "name": name, "text": text, "note": note})

    def _show_words(self) -> None:
        color = theme.SPARSE if self.plan.runs else theme.FULL
        self._verdict.value = (
            f'<div class="bw-kv-verdict" style="border-left:3px solid {color};{_SENTENCE}">'
            f"{escape(self.plan.verdict)}.</div>"
        )
        self._words.value = _block(  # both in one message
            "bw-kv-accounts", kv_pages.accounts_html(self.plan.kv)
        ) + _block("bw-kv-plans", kv_pages.plans_html(self.plans, chosen=self.plan, commands=False))
        with self.command.hold_sync():
            self.command.title = f"{self.plan.layout.name}: command for {ENGINE}{self._caveat()}"
            self.command.command = self.plan.serve_command

    def _caveat(self) -> str:
        """What the command is followed by where it would not start."""
        if self.plan.runs:
            return ""
        return " (refused by the engine)" if self.plan.fits else " (does not fit)"


# Two lines high at least: most sentences are one or two, and the plots are to stay where they are.
_SENTENCE = "padding-left:8px;line-height:1.5;min-height:3em;overflow-wrap:anywhere"


def _warning(sentence: str) -> str:
    return (
        '<div class="bw-kv-problem" style="border-left:3px solid var(--jp-error-color1,#d32f2f);'
        f'{_SENTENCE}">'
        '<span style="color:var(--jp-error-color1,#d32f2f)">⚠</span> '
        f"{escape(sentence)}</div>"
    )


def _block(name: str, content: str) -> str:
    return f'<div class="{name}" style="line-height:1.4;padding:6px 4px">{content}</div>'


def size_memory(
    model: str | Path = "beam-501b",
    *,
    context: int | None = None,
    sequences: int = 8,
    kv_dtype: KVDtype = "fp8",
    gpu: str = "H200",
    gpus: int = 8,
    tp: int | None = None,
    expert_parallel: bool = True,
    weights: str = "fp8",
    batched_tokens: int = 8192,
    drafter: bool = False,
    async_scheduling: bool = True,
    account: Account = "admission",
    drafter_model: str | Path | None = None,
    speculative_tokens: int = 7,
    checkpoint: str | None = None,
    block_size: int = 16,
    utilization: float = UTILIZATION,
) -> MemoryDashboard:
    """A dashboard over the memory of a model, by its name or folder; weights are not needed.

    The arguments are where the controls stand at first; the last five have no control. Without
    ``tp``, as many ranks as ``gpus`` allow; without ``context``, 131,072 tokens or what the model
    has. ``drafter_model`` is a drafter's folder, by default the one known for the model.

    Raises:
        WorkbenchError: a value that cannot be, in one sentence. Later, on the page, such a sentence
            is shown and the dashboard keeps what it showed.
    """
    return MemoryDashboard(
        model,
        drafter_model=drafter_model,
        checkpoint=checkpoint,
        utilization=utilization,
        block_size=block_size,
        speculative_tokens=speculative_tokens,
        context=context,
        sequences=sequences,
        kv_dtype=kv_dtype,
        gpu=gpu,
        gpus=gpus,
        tp=tp,
        expert_parallel=expert_parallel,
        weights=weights,
        batched_tokens=batched_tokens,
        drafter=drafter,
        async_scheduling=async_scheduling,
        account=account,
    )
