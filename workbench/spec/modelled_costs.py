"""A cost table that nobody measured: GB200, TP8, by the roofline of ``workbench.model.steptime``.

Run ``python -m workbench.spec.modelled_costs`` to write ``recorded/cost-gb200-tp8.json`` again.

The roofline leaves out launches, chains of small dependent kernels and the latency of all-reduces.
The published decode step at batch 1 has them; what it takes beyond its roofline is added to every
size, a draft's share by its layers. That is the one constant here that comes from a measurement.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from workbench.files import write_whole
from workbench.kernels.roofline import Rates, data_sheet_rates
from workbench.model.config import BeamConfig
from workbench.model.layout import Layout
from workbench.model.presets import beam_501b, beam_501b_dflash2
from workbench.model.reference_figures import reference
from workbench.model.steptime import decode_step, draft_step, verify_step
from workbench.model.weights import precision as precision_of
from workbench.spec.cost_table import CostTable
from workbench.spec.recorded import RECORDED

FILE = RECORDED / "cost-gb200-tp8.json"
CONTEXT = 8192
REQUESTS = 128  # sequences of the largest step: one row of as many, then more rows of each
DRAFTS = 7
# Close enough that straight lines between them stay within 1 % of the model.
FEW = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 48, 64, 96, REQUESTS)
_LAYOUT = Layout(tp=8)
_ANCHOR = reference("decode, batch 1, after the optimisations")
_ANCHOR_CONTEXT = 4096  # not stated; of the sizes a step at batch 1 hardly depends on
_SINGLE = reference("single request with DFlash2, a step")


def modelled_costs(*, precision: str = "bf16", context: int = CONTEXT) -> CostTable:
    """Milliseconds on eight GB200, all-reduces included: verify 1 to 1,024 rows, draft 1 to 128.

    n rows are one row of n sequences up to 128, and beyond that n / 128 rows of each of 128; every
    row has logits. A draft is 7 tokens of each request.

    Args:
        precision: of the target's weights; the drafter and the KV cache are BF16.
        context: tokens of each sequence, the anchor included.

    Raises:
        SizingError: a precision that is not known, or a context that the model does not take.
    """
    config, drafter = beam_501b().config, beam_501b_dflash2().config
    options = _options(precision)
    latency = _latency(config, options)
    verify = {
        n: decode_step(config, batch=n, context=context, **options).milliseconds for n in FEW
    } | {
        REQUESTS * (k + 1): verify_step(
            config, batch=REQUESTS, context=context, draft_tokens=k, **options
        ).milliseconds
        for k in range(1, DRAFTS + 1)
    }
    draft = {
        n: draft_step(
            config, drafter, batch=n, context=context, draft_tokens=DRAFTS, **options
        ).milliseconds
        for n in FEW
    }
    layers = drafter.num_hidden_layers / config.num_hidden_layers
    return CostTable(
        draft=_raised(draft, latency * layers),
        verify=_raised(verify, latency),
        label=f"GB200, TP8, Beam-501B, {precision.upper()} weights, context {context:,}, "
        "all-reduces included: modelled, nothing of it measured but one published step",
    )


def document() -> dict[str, Any]:
    """What ``cost-gb200-tp8.json`` holds."""
    table = modelled_costs()
    config, options = beam_501b().config, _options("bf16")
    rates: Rates = options["rates"]
    single = {name: _single(name) for name in ("bf16", "fp8", "nvfp4")}
    return {
        **table.to_dict(),
        "origins": {"draft": "modelled", "verify": "modelled"},
        "source": "workbench/spec/modelled_costs.py",
        "notes": [
            "Verification is a roofline, operation by operation: bytes, FLOPs and wire of one of "
            "eight ranks, BF16 weights and KV cache, rates of the data sheet "
            f"({rates.bandwidth / 1e12:.0f} TB/s, {rates.rate('bf16') / 1e15:.1f} PFLOP/s BF16, "
            f"{(rates.nvlink or 0) / 1e9:.0f} GB/s of NVLink), ring all-reduce, experts chosen "
            f"uniformly; context {CONTEXT:,} a sequence. Precision and context of the published "
            "runs are not stated.",
            f"To every verification are added {_latency(config, options):.2f} ms, the same for all "
            "sizes: what the published decode step at batch 1 "
            f"({_ANCHOR.value:.2f} ms, GB200, TP8, after the optimisations) takes beyond its "
            "roofline: launches, dependent small kernels, latency of the all-reduces.",
            "What large steps lose beside that is not known and not in it: matrix products below "
            "the data sheet's rate, uneven experts. Real steps of many rows take longer.",
            f"Up to {REQUESTS} rows are one row of as many sequences, above that {REQUESTS} "
            "sequences with more rows each; rows of one text share experts, so a few sequences "
            "with many rows each cost less than it says.",
            f"Drafting is {DRAFTS} tokens of the assumed drafter (five layers, BF16), by the same "
            f"roofline and 5/{config.num_hidden_layers} of that constant.",
            "No size is padded: which graphs were captured there is not known.",
            f"As a check, a step of one request with {DRAFTS} drafts would take "
            f"{single['bf16']:.1f} ms (FP8 weights {single['fp8']:.1f}, NVFP4 experts "
            f"{single['nvfp4']:.1f}); published are 3.71 tokens at 708 tokens/s, "
            f"{_SINGLE.value:.2f} ms (TP8, the hardware is not stated).",
        ],
    }


def write() -> None:
    """Write the file that comes with the workbench.

    Raises:
        FileError: it cannot be written.
    """
    write_whole(FILE, _text(document()).encode())


def _options(precision: str) -> dict[str, Any]:
    return {
        "rates": data_sheet_rates("GB200"),
        "layout": _LAYOUT,
        "precision": precision_of(precision),
    }


def _latency(config: BeamConfig, options: Mapping[str, Any]) -> float:
    """Milliseconds of the published step beyond its roofline."""
    step = decode_step(config, batch=1, context=_ANCHOR_CONTEXT, **options)
    return _ANCHOR.value - step.milliseconds


def _single(precision: str) -> float:
    """Milliseconds of verifying and drafting for one request."""
    config, drafter, options = beam_501b().config, beam_501b_dflash2().config, _options(precision)
    asked: dict[str, Any] = {"batch": 1, "context": _ANCHOR_CONTEXT, "draft_tokens": DRAFTS}
    layers = drafter.num_hidden_layers / config.num_hidden_layers
    return (
        verify_step(config, **asked, **options).milliseconds
        + draft_step(config, drafter, **asked, **options).milliseconds
        + _latency(config, options) * (1 + layers)
    )


def _raised(curve: Mapping[int, float], constant: float) -> tuple[tuple[int, float], ...]:
    return tuple((size, round(ms + constant, 4)) for size, ms in sorted(curve.items()))


def _text(data: Mapping[str, Any]) -> str:
    """JSON with a curve, or a sentence, a line."""
    lines = {name: json.dumps(value) for name, value in data.items()}
    notes = ",\n".join(f"    {json.dumps(note)}" for note in data["notes"])
    lines["notes"] = f"[\n{notes}\n  ]"
    body = ",\n".join(f'  "{name}": {line}' for name, line in lines.items())
    return f"{{\n{body}\n}}\n"


if __name__ == "__main__":
    write()
