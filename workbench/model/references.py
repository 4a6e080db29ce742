"""What the roofline says to each published and recorded figure, and why the two differ.

A :class:`Comparison` puts the modelled figure beside the measured one, with every assumption it
took. Nothing in the model is fitted to these: the ratios are its errors. Where the announcement
does not say a precision, two assumptions stand side by side; where it does not say enough, the
figure is marked not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, get_args

from workbench.kernels.roofline import Rates, data_sheet_rates, recorded_rates
from workbench.model.config import BeamConfig
from workbench.model.kv_settings import KVDtype
from workbench.model.layout import Layout
from workbench.model.presets import beam_501b, beam_501b_dflash2
from workbench.model.reference_figures import REFERENCES, Reference, reference
from workbench.model.step_values import DispatchDtype
from workbench.model.steptime import (
    StepTime,
    decode_step,
    prefill_step,
    prompt_rate,
    speculative_step,
)
from workbench.model.weights import PRECISIONS, Precision

__all__ = ["REFERENCES", "Comparison", "Reference", "comparisons", "reference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A reference beside the modelled figure, both in the reference's unit.

    ``modelled`` is the sum over operations, ``modelled_overlapped`` has memory, arithmetic and
    communication wholly overlapped; both None where the reference says too little. ``ratio`` is
    reference / modelled: above 1 for a time and below 1 for a rate where reality is slower.
    """

    reference: Reference
    assumptions: str
    modelled: float | None
    modelled_overlapped: float | None
    remark: str

    @property
    def ratio(self) -> float | None:
        """Reference / modelled."""
        return None if self.modelled is None else self.reference.value / self.modelled

    @property
    def slower(self) -> float | None:
        """How many times longer reality takes than the model, for times and rates alike."""
        ratio = self.ratio
        if ratio is None or self.reference.unit == "ratio":
            return None
        return 1 / ratio if self.reference.unit == "tokens/s" else ratio

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return {
            "reference": self.reference.to_dict(),
            "source": "modelled" if self.modelled is not None else "not modelled",
            "assumptions": self.assumptions,
            "modelled": self.modelled,
            "modelled_overlapped": self.modelled_overlapped,
            "ratio": self.ratio,
            "slower": self.slower,
            "remark": self.remark,
        }


# -- the comparisons ----------------------------------------------------------------------------

TP8 = Layout(tp=8)
# The engine's default chunk of a prompt, and what a prompt of "32k" is taken to be.
CHUNK = 8192
PROMPT = 32768
# DFlash2's block of 8: the anchor and 7 drafts. Assumed, as in the preset.
DRAFTS = 7

_DEPENDENT = (
    "the roofline leaves out launches, the chain of dependent small kernels and the latency of "
    "105 all-reduces, which move next to nothing"
)


@cache
def comparisons() -> tuple[Comparison, ...]:
    """Every reference beside the model, under all assumptions tried, in the order of REFERENCES."""
    made = [*_decode_gb200(), *_prefill_gb200(), *_throughput(), *_speculative(), *_not_modelled()]
    made += [*_decode_h200(), *_replays_h200(), *_other_h200()]
    order = {name: position for position, name in enumerate(REFERENCES)}
    return tuple(sorted(made, key=lambda one: order[one.reference.name]))


def _beam() -> BeamConfig:
    return beam_501b().config


def _of_step(name: str, step: StepTime, assumptions: str, remark: str) -> Comparison:
    return Comparison(
        reference=REFERENCES[name],
        assumptions=assumptions,
        modelled=step.milliseconds,
        modelled_overlapped=1e3 * step.overlapped_seconds,
        remark=remark,
    )


# (in words, weights, KV cache). Which parts a served checkpoint quantises was not announced; the
# FP8 KV cache is the announced example's.
_PRECISIONS: tuple[tuple[str, Precision, KVDtype], ...] = (
    (
        "NVFP4 experts, all else BF16, FP8 KV cache (precision not stated)",
        PRECISIONS["nvfp4"],
        "fp8",
    ),
    ("BF16 weights and KV cache (precision not stated)", PRECISIONS["bf16"], "bf16"),
)


def _decode_gb200() -> list[Comparison]:
    rates = data_sheet_rates("GB200")
    made = []
    for text, precision, kv_dtype in _PRECISIONS:
        step = decode_step(
            _beam(),
            batch=1,
            context=4096,
            rates=rates,
            layout=TP8,
            precision=precision,
            kv_dtype=kv_dtype,
        )
        assumptions = f"{text}; context 4,096 (not stated); data sheet rates; ring all-reduce"
        for when, remark in (
            ("before", f"{_DEPENDENT}; before the optimisations these are nearly all of the step"),
            ("after", f"{_DEPENDENT}; fusing them is what the optimisations did"),
        ):
            name = f"decode, batch 1, {when} the optimisations"
            made.append(_of_step(name, step, assumptions, remark))
    return made


def _prefill_gb200() -> list[Comparison]:
    rates = data_sheet_rates("GB200")
    made = []
    for text, precision, kv_dtype in _PRECISIONS:
        step = prefill_step(
            _beam(), sequences=8, tokens=2048, earlier_context=100_000, rates=rates, layout=TP8,
            precision=precision, kv_dtype=kv_dtype,
        )  # fmt: skip
        experts = step.operation("experts").work.math.upper()
        assumptions = (
            f"{text}; 100,000 tokens before each of the 8 sequences' 2,048; experts computed in "
            f"{experts}, attention in BF16; data sheet rates; ring all-reduce"
        )
        remark = (
            "the roofline leaves out that matrix products and attention reach a part of the dense "
            "rate, activations between unfused kernels, the sort of tokens by expert and uneven "
            f"experts; it counts {1e3 * step.wire_seconds:.0f} ms of all-reduce as not overlapped"
        )
        for when in ("before", "after"):
            made.append(
                _of_step(
                    f"prefill 8 x 2048 at 100k, {when} the optimisations", step, assumptions, remark
                )
            )
    return made


_TP = "peak throughput 32k in / 1 out, TP"
_DP = "peak throughput 32k in / 1 out, attention DP + MegaMoE"
_RATIO = "throughput of attention DP + MegaMoE over TP"
# The recorded BF16 rate of large matrix products over the data sheet's.
_MATMUL_REACHES = recorded_rates("H200").rate("bf16") / data_sheet_rates("H200").rate("bf16")
_TP4 = Layout(tp=4)
_DP4 = Layout(dp=4, expert_parallel=True)


def _throughput() -> list[Comparison]:
    rates = data_sheet_rates("GB300")
    made = []
    for text, precision, kv_dtype in _PRECISIONS:
        shared = (
            f"{text}; prompts of {PROMPT:,} (not stated to the token), tokens of the prompt "
            "counted, no prefix cache; data sheet rates"
        )
        chunks = f"chunks of {CHUNK:,} tokens a group (not stated)"
        both = {
            layout: prompt_rate(
                _beam(), prompt=PROMPT, chunk=CHUNK, rates=rates, layout=layout,
                precision=precision, kv_dtype=kv_dtype,
            )
            for layout in (_TP4, _DP4)
        }  # fmt: skip
        for name, layout, how, remark in (
            (_TP, _TP4, "ring all-reduce", _LEFT_OUT),
            (
                _DP,
                _DP4,
                "all-to-all in BF16",
                f"{_LEFT_OUT}, and uneven experts, where the fullest GPU sets the time; it counts "
                "the all-to-all as not overlapped, which a MegaMoE kernel hides",
            ),
        ):
            rate, overlapped = both[layout]
            reached = REFERENCES[name].value / overlapped
            if reached > _MATMUL_REACHES:
                remark += (
                    f"; it would be {reached:.0%} of the bound with all overlapped, and bare "
                    f"matrix products reach {_MATMUL_REACHES:.0%} of the data sheet rate (H200, "
                    "recorded), "
                    "so this precision can hardly be what ran"
                )
            made.append(
                Comparison(
                    reference=REFERENCES[name],
                    assumptions=f"{layout.name}, {how}; {chunks}; {shared}",
                    modelled=rate,
                    modelled_overlapped=overlapped,
                    remark=remark,
                )
            )
        made += _ratios(rates, precision, kv_dtype, shared)
    return made


_LEFT_OUT = (
    "the roofline leaves out that matrix products reach a part of the dense rate, and host and "
    "scheduler between steps"
)


def _ratios(rates: Rates, precision: Precision, kv_dtype: KVDtype, shared: str) -> list[Comparison]:
    """DP + EP over TP: each group running a chunk, and as many tokens a step in both layouts."""

    def ratio(tp_chunk: int, sums: Any = "ring", sent: DispatchDtype = "bf16") -> list[float]:
        tp, dp = (
            prompt_rate(
                _beam(), prompt=PROMPT, chunk=chunk, rates=rates, layout=layout,
                precision=precision, kv_dtype=kv_dtype, all_reduce=sums, dispatch_dtype=sent,
            )
            for layout, chunk in ((_TP4, tp_chunk), (_DP4, CHUNK))
        )  # fmt: skip
        return [a / b for a, b in zip(dp, tp, strict=True)]

    same = CHUNK * _DP4.dp
    found = [
        ratio(chunk, sums, sent)[0]
        for chunk, sums, sent in product(
            (CHUNK, same), ("ring", "in_switch"), get_args(DispatchDtype)
        )
    ]
    remark = (
        f"how near the two are says little: with the chunk, sums inside the switch and the type "
        f"tokens are sent in, the model moves from {min(found):.2f} to {max(found):.2f}, because "
        "in it the layouts differ mostly by communication that is not overlapped; it leaves out "
        "that thin slices of experts run less efficiently, and that MegaMoE hides its all-to-all"
    )
    made = []
    for chunk, text in (
        (CHUNK, f"chunks of {CHUNK:,} tokens a group, so a quarter of the tokens a step under TP"),
        (same, f"{same:,} tokens a step in both layouts"),
    ):
        value, overlapped = ratio(chunk)
        made.append(
            Comparison(
                reference=REFERENCES[_RATIO],
                assumptions=f"DP4 + EP4 over TP4; {text} (not stated); ring all-reduce, all-to-all "
                f"in BF16; {shared}",
                modelled=value,
                modelled_overlapped=overlapped,
                remark=remark,
            )
        )
    return made


def _speculative() -> list[Comparison]:
    rates = data_sheet_rates("GB200")
    drafter = beam_501b_dflash2().config
    made = []
    for text, precision, kv_dtype in _PRECISIONS:
        step = speculative_step(
            _beam(), drafter, batch=1, context=4096, draft_tokens=DRAFTS, rates=rates, layout=TP8,
            precision=precision, kv_dtype=kv_dtype,
        )  # fmt: skip
        made.append(
            _of_step(
                "single request with DFlash2, a step",
                step,
                f"{text}; GB200 (not stated); verification of {DRAFTS} drafts and a BF16 drafter's "
                "pass (sizes assumed) one after the other; context 4,096 (not stated); the 8 rows "
                "choose experts independently; data sheet rates; ring all-reduce",
                f"{_DEPENDENT}, sampling and verification kernels; rows of one text share experts, "
                "so a real verification reads fewer than uniform routing says",
            )
        )
    return made


def _not_modelled() -> list[Comparison]:
    return [
        Comparison(
            reference=REFERENCES[f"concurrency 128, {policy} verification"],
            assumptions="not modelled: hardware, layout, context and acceptance length are not "
            "stated, and tokens/s is 128 times the acceptance length over the time of a step",
            modelled=None,
            modelled_overlapped=None,
            remark="the gain of 10.8 % comes from which drafts are verified, which a roofline of "
            "one step does not decide; a cost table and acceptance figures do",
        )
        for policy in ("adaptive", "fixed")
    ]


_RANK = "BF16 weights and KV cache, no communication; recorded bandwidth and BF16 rate"


def _rank(batch: int, context: int) -> StepTime:
    return decode_step(
        _beam(), batch=batch, context=context, rates=recorded_rates("H200"), layout=TP8,
        communication=False,
    )  # fmt: skip


def _decode_h200() -> list[Comparison]:
    made = []
    for text, context in (("1k", 1024), ("4k", 4096), ("32k", 32768), ("120k", 120_000)):
        made.append(
            _of_step(
                f"decode, batch 1, context {text}",
                _rank(1, context),
                f"{_RANK}; context {context:,}",
                "the roofline leaves out 950 launches and 1.9 ms of small kernels (attention 0.85, "
                "norms 0.35, router top-8 0.25, sums 0.25), and takes full bandwidth where the "
                "matrix products reach 2.1 to 2.5 TB/s (recorded by kernel at 4k)",
            )
        )
    for batch in (8, 32, 128):
        made.append(
            _of_step(
                f"decode, batch {batch}, context 1k",
                _rank(batch, 1024),
                f"{_RANK}; context 1,024; uniform routing",
                "the roofline leaves out small kernels and sampling, and that tiles of few rows do "
                "not reach full bandwidth"
                + (
                    "; at this batch the experts run at memory speed, and 231 to 253 of them were "
                    "touched a layer (recorded) where uniform routing expects 251.6"
                    if batch == 128
                    else ""
                ),
            )
        )
    return made


def _replays_h200() -> list[Comparison]:
    return [
        _of_step(
            f"graph replay, {rows} token{'s' * (rows > 1)}",
            _rank(rows, 1024),
            f"{_RANK}; context 1,024 a token (not recorded); uniform routing",
            "the roofline leaves out small kernels and tile efficiency of the experts; what both "
            "show is that each further token brings new experts",
        )
        for rows in (1, 2, 4, 8, 16, 32, 64, 128)
    ]


def _other_h200() -> list[Comparison]:
    prefill = prefill_step(
        _beam(), sequences=8, tokens=2048, rates=recorded_rates("H200"), layout=TP8,
        communication=False,
    )  # fmt: skip
    return [
        _of_step(
            "prefill 8 x 2048, no earlier context",
            prefill,
            f"{_RANK}; router as three BF16 products",
            "the roofline leaves out that vLLM's router runs outside the tensor cores (19 % of the "
            "recorded time), the sum over experts (5 %), the sort of tokens by expert, and that "
            "the whole reaches 280 TFLOP/s (recorded), little more than a third of the rate",
        ),
        _of_step(
            "prototype decode kernel, batch 1, context 4k",
            _rank(1, 4096),
            f"{_RANK}; context 4,096",
            "one kernel has no launches to leave out: what remains is the chain of dependent "
            "exchanges, about 18 µs a layer, that prefetching does not hide (recorded)",
        ),
    ]
