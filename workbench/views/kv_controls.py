"""The memory dashboard's controls: what can be chosen, and what was."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import ipywidgets as widgets

from workbench.datasheet import SHEETS
from workbench.model.config import BeamConfig
from workbench.model.kv_settings import KV_WIDTH, MOST_BATCHED_TOKENS, MOST_SEQUENCES
from workbench.model.layout import Layout, layouts
from workbench.model.sizing import ACCOUNTS
from workbench.model.weights import PRECISIONS
from workbench.views.kv_words import ACCOUNT_NAMES

# 72 is a rack of GB200 or GB300; what the model cannot be split into is left out.
_GPUS = (1, 2, 4, 8, 16, 32, 64, 72)
_SHORTEST = 1 << 10  # tokens at the left end of the context slider
_LABEL = "108px"  # of what begins a row
# Width, and px below which the words in the menu would be cut off.
_WIDTHS = {
    "GPU": ("31%", "240px"),
    "GPUs": ("20%", "140px"),
    "TP": ("20%", "140px"),
    "experts": ("23%", "184px"),
    "weights": ("31%", "200px"),
    "KV dtype": ("20%", "150px"),
    "account": ("40%", "260px"),
}
_MOST_SEQUENCES, _MOST_BATCHED = 1 << 13, 1 << 17


class Controls:
    """Sliders and menus; ``values()`` is what they say. ``changed`` is called after each change.

    The TP menu holds the divisors that are possible on the chosen number of GPUs.
    """

    def __init__(
        self,
        config: BeamConfig,
        values: dict[str, Any],
        *,
        drafter: bool,
        changed: Callable[[], None],
    ) -> None:
        self._config, self._changed, self._quiet = config, changed, False
        self._rank: int = values["tp"]  # as chosen last; fewer GPUs may offer less
        most = config.max_position_embeddings
        self.context = _slider("context (tokens)", _contexts(most), values["context"], most)
        self.sequences = _slider(
            "sequences", _halves(1, _MOST_SEQUENCES), values["sequences"], MOST_SEQUENCES
        )
        self.batched_tokens = _slider(
            "batch tokens", _doubles(256, _MOST_BATCHED), values["batched_tokens"],
            MOST_BATCHED_TOKENS,
        )  # fmt: skip
        self.gpu = _menu("GPU", [(f"{s.name} ({s.form})", n) for n, s in SHEETS.items()],
                         values["gpu"])  # fmt: skip
        possible = {n for n in _GPUS if layouts(config, n)} | {values["gpus"]}
        self.gpus = _menu("GPUs", [(str(n), n) for n in sorted(possible)], values["gpus"])
        self.tp = _menu("TP", [(str(n), n) for n in self._ranks(values["gpus"], values["tp"])],
                        values["tp"])  # fmt: skip
        self.expert_parallel = _menu(
            "experts", [("whole (EP)", True), ("sliced", False)], values["expert_parallel"]
        )
        names = [*PRECISIONS]
        self.weights = _menu("weights", [(n, n) for n in {**dict.fromkeys(names),
                             values["weights"]: None}], values["weights"])  # fmt: skip
        self.kv_dtype = _menu("KV dtype", [(n, n) for n in KV_WIDTH], values["kv_dtype"])
        self.account = _menu("account", [(ACCOUNT_NAMES[a], a) for a in ACCOUNTS],
                             values["account"])  # fmt: skip
        self.drafter = _box("DFlash2 drafter", values["drafter"] and drafter)
        self.drafter.disabled = not drafter
        self.async_scheduling = _box("async scheduling", values["async_scheduling"])
        self._all: dict[str, widgets.Widget] = {
            name: getattr(self, name) for name in values if hasattr(self, name)
        }
        for name, control in self._all.items():
            control.observe(self._gpus_changed if name == "gpus" else self._any_changed, "value")
        row = {"width": "100%", "flex_flow": "row wrap"}
        self.widget = widgets.VBox(
            [
                self.context,
                widgets.HBox([self.sequences, self.batched_tokens], layout=row),
                widgets.HBox(
                    [
                        self.gpu,
                        self.gpus,
                        self.tp,
                        self.expert_parallel,
                        self.weights,
                        self.kv_dtype,
                        self.account,
                    ],
                    layout=row,
                ),
                widgets.HBox([self.drafter, self.async_scheduling], layout=row),
            ]
        )

    def values(self) -> dict[str, Any]:
        """The value of every control by name."""
        return {name: control.value for name, control in self._all.items()}

    @property
    def layout(self) -> Layout:
        """The layout that GPUs, TP and EP make; one GPU has no expert parallelism."""
        gpus, tp = self.gpus.value, self.tp.value
        return Layout(tp=tp, dp=gpus // tp, expert_parallel=self.expert_parallel.value and gpus > 1)

    def _ranks(self, gpus: int, given: int) -> list[int]:
        """Possible numbers of tensor-parallel ranks, ascending."""
        found = {layout.tp for layout in layouts(self._config, gpus)}
        return sorted(found | {given} if given and not gpus % given else found) or [1]

    def _gpus_changed(self, change: Any) -> None:
        """Offer the divisors of the new number; the rank last chosen if it is one, or the most."""
        ranks = self._ranks(change.new, 0)
        kept = self._rank if self._rank in ranks else ranks[-1]
        self._quiet = True  # the menu's own changes are part of this one
        try:
            self.tp.options = [(str(n), n) for n in ranks]
            self.tp.value = kept
        finally:
            self._quiet = False
        self._changed()

    def _any_changed(self, change: Any) -> None:
        if not self._quiet:
            if change.owner is self.tp:
                self._rank = change.new
            self._changed()


def _contexts(most: int) -> list[int]:
    """Four to the octave, in whole blocks, up to the model's most."""
    low = min(_SHORTEST, max(1, most // 64))
    octaves = (most // low).bit_length()
    grid = {round(low * 2 ** (i / 4) / 16) * 16 for i in range(4 * octaves)}
    return sorted({n for n in grid if 1 <= n < most} | {most})


def _halves(low: int, high: int) -> list[int]:
    """Powers of two and what lies half-way."""
    powers = _doubles(low, high)
    return sorted({*powers, *(n * 3 // 2 for n in powers[1:-1])})


def _doubles(low: int, high: int) -> list[int]:
    return [low << i for i in range((high // low).bit_length())]


def _slider(name: str, numbers: Iterable[int], value: int, most: int) -> widgets.SelectionSlider:
    """A slider over numbers that grow by a factor; the page waits for the kernel between moves."""
    numbers = sorted({n for n in numbers if n <= most} | {value})
    return widgets.SelectionSlider(
        options=[(f"{n:,}", n) for n in numbers],
        value=value,
        description=name,
        style={"description_width": _LABEL if name != "batch tokens" else "84px"},
        layout={"width": "98%" if name.startswith("context") else "48%", "min_width": "280px"},
    )


def _menu(name: str, options: list[tuple[str, Any]], value: Any) -> widgets.Dropdown:
    width, least = _WIDTHS[name]
    return widgets.Dropdown(
        options=options,
        value=value,
        description=name,
        style={"description_width": _LABEL if name in ("GPU", "weights") else "64px"},
        layout={"width": width, "min_width": least},
    )


def _box(name: str, value: bool) -> widgets.Checkbox:
    return widgets.Checkbox(
        value=value, description=name, indent=False, layout={"width": "auto", "margin": "2px 24px"}
    )
