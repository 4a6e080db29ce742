"""Published figures of Beam's serving, beside what a plan's roofline says and a node has measured.

:func:`beside_published` makes a :class:`Row` for each thing that was published. A row has figures
of four kinds, which are never of one and the same set-up: each says where it is from and under
which conditions. Figures that stand elsewhere in the workbench are taken from there
(:mod:`workbench.model.reference_figures`, :mod:`workbench.spec.published`, recorded documents);
here are only those that stand nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from workbench.kernels.rank.recorded_loads import recorded_prefill
from workbench.kernels.rank.recorded_runs import recorded_decode
from workbench.kernels.roofline import data_sheet_rates
from workbench.model.asked import SizingError, instance
from workbench.model.plan import Plan
from workbench.model.reference_figures import ANNOUNCED, reference
from workbench.model.references import CHUNK, DRAFTS, PROMPT
from workbench.model.steptime import decode_step, prefill_step, prompt_rate, speculative_step
from workbench.serving.monitor.intervals import pooled, rate
from workbench.serving.monitor.sample import Sample
from workbench.serving.probe_read import read_probe
from workbench.serving.published_measured import (
    between_outputs,
    change,
    lone_request,
    measured_figure,
    p99_tpot,
    samples_of,
)
from workbench.serving.published_row import Figure, Kind, Row, references, row
from workbench.spec.adaptive import Adaptive, Fixed
from workbench.spec.measured_adaptive import measured_adaptive
from workbench.spec.published import published
from workbench.spec.rates import Acceptance
from workbench.spec.simulate import card_source, cost_table, default_requests, simulate
from workbench.spec.simulation_result import SimulationResult

CONTEXT = 4096  # tokens of a sequence in modelled steps; the announcement does not say
LENGTH = 3.71  # tokens a step of the single request with DFlash2, as announced
_EARLIER, _SEQUENCES, _TOKENS = 100_000, 8, 2048  # of the published prefill
_TABLE = "gb200-tp8"  # of modelled costs, for the simulation
_NEVER = "not measured here: a server's metrics do not show single passes"

_BLOG = "DFlash2 blog, 2026-08-18; temperature 1, top-p 0.95, top-k 20, thinking; mean of 5 tasks"
# (what was drafted for, acceptance length), DFlash2's own models. Block counts the anchor.
_BLOG_LENGTHS = (("Qwen3.5-4B", 5.97), ("Qwen3.8-27B, block 8", 4.80),
                 ("Muse Glimmer, block 16", 5.70))  # fmt: skip
_PULL = (
    "vLLM pull request 52228; Muse Glimmer with DFlash2, one GB200, concurrency 64, "
    "temperature 1, top-p 0.95"
)
# (texts, fixed and adaptive tokens/s, acceptance length of each)
_PULL_RUNS = (("low entropy", 5410, 6236, 3.88, 3.61), ("high entropy", 3990, 4861, 2.65, 2.56))


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedBeside:
    """Everything published of Beam's serving with what stands beside it.

    Attributes:
        plan: what the modelled figures are of, in words.
        seconds: of metrics that what was measured here is from; 0 where nothing was.
        rows: one a published thing.
    """

    plan: str
    seconds: float
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return {
            "plan": self.plan,
            "seconds": self.seconds,
            "rows": [one.to_dict() for one in self.rows],
        }


def beside_published(
    plan: Plan, samples: Iterable[Sample] = (), *, fixed: Iterable[Sample] = ()
) -> PublishedBeside:
    """Everything published of Beam's serving, beside this plan and what this node has measured.

    Args:
        plan: of this node; its layout, precision and GPU are what is modelled.
        samples: of a monitor of the server here, or of a recording of one, oldest first.
        fixed: the same of a server that verifies all drafts, under the same load; with both,
            adaptive over fixed verification is measured.

    Raises:
        SizingError: ``plan`` is no plan, or what is given as samples is none.
    """
    instance("plan", plan, Plan, "a Plan, such as make_plan(...)")
    seen, verified = samples_of("samples", samples), samples_of("fixed", fixed)
    alone = lone_request(seen)
    drafting = [s for s in alone if s.drafts]
    rows = (
        _decode(plan, [s for s in alone if not s.drafts]),
        _drafted_step(plan, drafting),
        _single(plan, drafting),
        _lengths(seen),
        _many(plan, seen),
        *_adaptive(seen, verified),
        _prefill(plan),
        _prompts(plan, seen),
    )
    words = (
        f"{plan.layout.gpus} x {plan.gpu.name}, {plan.layout.name}, {plan.precision.name} weights, "
        f"KV cache {plan.kv.settings.kv_dtype}"
    )
    return PublishedBeside(plan=words, seconds=sum(s.seconds for s in seen), rows=rows)


# -- the rows -------------------------------------------------------------------------------------


def _decode(plan: Plan, samples: Sequence[Sample]) -> Row:
    own = recorded_decode()
    return row(
        "decode step of one request, no drafter",
        "ms",
        [
            *references("decode, batch 1, before the optimisations",
                         "decode, batch 1, after the optimisations"),
            *references("decode, batch 1, context 4k", label="vLLM 0.33"),
            Figure(
                value=float(own["milliseconds"]),
                kind="recorded",
                label="the workbench's own kernel",
                source=f"{own['hardware']}, {own['date']}, one rank of TP{own['tp']}, BF16, "
                f"context {own['context']:,}; no all-reduce on one GPU",
            ),
        ],
        modelled=lambda: decode_step(
            plan.config, batch=1, context=CONTEXT, **_options(plan)
        ).milliseconds,
        how=_roofline(f"context {CONTEXT:,}"),
        measured=between_outputs(samples),
        remark="before the optimisations and after them, on eight GPUs with their all-reduces",
    )  # fmt: skip


def _drafted_step(plan: Plan, samples: Sequence[Sample]) -> Row:
    return row(
        "step of one request with DFlash2",
        "ms",
        [
            *references("single request with DFlash2, a step", label="one request"),
            *references("graph replay, 8 tokens", label="8 rows, without drafting"),
        ],
        modelled=lambda: _speculative(plan, 1),
        how=_roofline(f"{DRAFTS} drafts, context {CONTEXT:,}"),
        measured=between_outputs(samples),
        remark=f"verification of a block and drafting the next; gave {LENGTH} tokens as published",
    )


def _single(plan: Plan, samples: Sequence[Sample]) -> Row:
    step = reference("single request with DFlash2, a step")
    whole = pooled(samples)
    tpot = None if whole is None or whole.tpot is None else whole.tpot.mean
    count = 0 if whole is None or whole.tpot is None else whole.tpot.count
    how = f"1 / mean TPOT of finished requests, n = {count:,}"
    return row(
        "tokens/s of one request with DFlash2",
        "tokens/s",
        [Figure(value=1e3 * LENGTH / step.value, kind="published", label=f"length {LENGTH}",
                source=f"{step.where}; {ANNOUNCED}; the hardware is not stated")],
        modelled=lambda: 1e3 * LENGTH / _speculative(plan, 1),
        how=_roofline(f"{DRAFTS} drafts, context {CONTEXT:,}; at the published length"),
        measured=measured_figure(None if not tpot else 1 / tpot, how, samples),
    )  # fmt: skip


def _lengths(samples: Sequence[Sample]) -> Row:
    whole = pooled(samples)
    found = [Figure(value=LENGTH, kind="published", label="Beam, one request",
                    source=f"TP8; {ANNOUNCED}; texts and sampling are not stated")]  # fmt: skip
    found += [
        Figure(value=value, kind="published", label=model, source=_BLOG)
        for model, value in _BLOG_LENGTHS
    ]
    header, counted = _recorded()
    gpu = str(header["hardware"]["gpus"][0]["name"])
    found.append(
        Figure(
            value=float(counted.length_pooled or 0.0),
            kind="recorded",
            label="beam-tiny, adaptive",
            source=f"{gpu}, vLLM {header['engine']['version']}, {header['date'][:10]}; a small "
            f"model with its own drafter, n = {counted.events:,}",
        )
    )
    return row(
        "acceptance length, bonus included",
        "tokens a step",
        found,
        missing={"modelled": "not modelled: it depends on weights and texts"},
        measured=measured_figure(
            None if whole is None else whole.acceptance_length,
            f"{0 if whole is None else whole.drafts or 0:,} draft events",
            samples,
        ),
        remark="only Beam's own is comparable; trimming makes it shorter and is no loss by that",
    )


def _many(plan: Plan, samples: Sequence[Sample]) -> Row:
    busy = [s for s in samples if (s.running or 0) > 1]
    running = sum(s.running or 0 for s in busy) / len(busy) if busy else 0.0
    together, how = published().concurrency, f"{running:.0f} running on average"
    how += f", {sum(s.seconds for s in busy):.0f} s"
    return row(
        f"tokens/s of {together} requests with DFlash2",
        "tokens/s",
        references("concurrency 128, fixed verification",
                    "concurrency 128, adaptive verification"),
        modelled=lambda: 1e3 * together * LENGTH / _speculative(plan, together),
        how=_roofline(f"all {DRAFTS} drafts verified, context {CONTEXT:,}; at the length "
                      f"{LENGTH} of the single request"),
        measured=measured_figure(rate(busy, "generation_tokens"), how, busy),
        remark="hardware, layout, context and acceptance length of the published runs are not "
        "stated",
    )  # fmt: skip


def _adaptive(samples: Sequence[Sample], fixed: Sequence[Sample]) -> tuple[Row, Row]:
    told, on_cpu = published(), measured_adaptive()
    together = told.concurrency
    claim = f"concurrency {together}; {ANNOUNCED}; the hardware is not stated"
    speed = [Figure(value=told.tokens_per_second_change, kind="published", label="Beam",
                    source=claim)]  # fmt: skip
    speed += [
        Figure(value=after / before - 1, kind="published", label=f"Muse Glimmer, {texts}",
               source=f"{_PULL}; {before:,} to {after:,} tokens/s, length {long} to {short}")
        for texts, before, after, long, short in _PULL_RUNS
    ]  # fmt: skip
    tail = [Figure(value=told.tpot_p99_change, kind="published", label="Beam", source=claim)]
    for run in on_cpu.runs:
        if run.concurrency != together:
            continue
        note = f"beam-tiny, {run.concurrency} sequences; {on_cpu.how.removeprefix('measured: ')}"
        speed.append(Figure(value=run.ratio - 1, kind="recorded", label=run.label, source=note))
        if run.p99_ratio is not None:
            value = run.p99_ratio - 1
            tail.append(Figure(value=value, kind="recorded", label=run.label, source=note))
    adaptive, every = _simulated(together)
    how = (
        f"simulation of {together} sequences, not of this plan: costs of GB200, TP8, BF16 by the "
        "roofline and one published step, acceptance of beam-tiny's drafter"
    )
    mine, theirs = pooled(samples), pooled(fixed)
    rates = [rate(some, "generation_tokens") for some in (samples, fixed)]
    tails = [p99_tpot(one) for one in (mine, theirs)]
    missing: dict[Kind, str] = {}
    if not (samples and fixed):
        missing["measured here"] = (
            "not measured here: it takes a run with adaptive and one with fixed verification"
        )
    return (
        row(
            "adaptive over fixed verification, tokens/s", "change", speed,
            modelled=lambda: adaptive.tokens_per_second / every.tokens_per_second - 1, how=how,
            measured=measured_figure(change(*rates), "two runs", samples), missing=missing,
            remark="what it is worth depends on the load, the drafter and the GPU",
        ),
        row(
            "adaptive over fixed verification, p99 TPOT", "change", tail,
            modelled=lambda: adaptive.tpot_p99_ms / every.tpot_p99_ms - 1, how=how,
            measured=measured_figure(change(*tails), "two runs", samples), missing=missing,
        ),
    )  # fmt: skip


def _prefill(plan: Plan) -> Row:
    own = recorded_prefill()
    at = f"prefill {_SEQUENCES} x {_TOKENS} at 100k, "
    return row(
        f"prefill of {_SEQUENCES} x {_TOKENS:,} tokens, each after {_EARLIER:,}",
        "ms",
        [
            *references(f"{at}before the optimisations", f"{at}after the optimisations"),
            Figure(
                value=float(own[f"ours_{_EARLIER}"]["milliseconds"]),
                kind="recorded",
                label="the workbench's own kernels",
                source=f"{own['hardware']}, {own['date'][:10]}, one rank of TP{own['tp']}, BF16; "
                "no all-reduce on one GPU",
            ),
            *references("prefill 8 x 2048, no earlier context",
                         label="vLLM 0.33, no earlier context"),
        ],
        modelled=lambda: prefill_step(
            plan.config, sequences=_SEQUENCES, tokens=_TOKENS, earlier_context=_EARLIER,
            **_options(plan),
        ).milliseconds,
        how=_roofline("nothing overlapped"),
        missing={"measured here": _NEVER},
    )  # fmt: skip


def _prompts(plan: Plan, samples: Sequence[Sample]) -> Row:
    reading = [s for s in samples if s.prompt_tokens]
    at = "peak throughput 32k in / 1 out, "
    return row(
        "prompt tokens/s, 32k in and 1 out",
        "tokens/s",
        references(f"{at}TP", f"{at}attention DP + MegaMoE"),
        modelled=lambda: prompt_rate(
            plan.config, prompt=PROMPT, chunk=CHUNK, **_options(plan)
        )[0],
        how=_roofline(f"prompts of {PROMPT:,}, chunks of {CHUNK:,}, nothing overlapped"),
        missing={"recorded": "not recorded at full size"},
        measured=measured_figure(
            rate(reading, "prompt_tokens"),
            f"{sum(s.seconds for s in reading):.1f} s in which prompts were read",
            reading,
        ),
        remark="published of four GB300; per GPU it compares",
    )  # fmt: skip


# -- what is modelled ----------------------------------------------------------------------------


@cache
def _recorded() -> tuple[dict[str, Any], Acceptance]:
    """Header and acceptance of the recorded run of an engine."""
    run = read_probe(str(files("workbench.serving") / "recorded" / "probe-h200.jsonl"))
    return run.trace.header, run.trace.acceptance()


@cache
def _simulated(together: int) -> tuple[SimulationResult, SimulationResult]:
    """Adaptive and fixed verification of so many sequences; the same every time, of no plan."""
    table, source = cost_table(_TABLE), card_source()
    adaptive, every = (
        simulate(source, policy, table.table, concurrency=together,
                 requests=default_requests(together))
        for policy in (Adaptive(table.table), Fixed())
    )  # fmt: skip
    return adaptive, every


def _options(plan: Plan) -> dict[str, Any]:
    return {
        "rates": data_sheet_rates(plan.gpu),
        "layout": plan.layout,
        "precision": plan.precision,
        "kv_dtype": plan.kv.settings.kv_dtype,
    }


def _roofline(under: str) -> str:
    return f"roofline of this plan, {under}"


def _speculative(plan: Plan, batch: int) -> float:
    """Milliseconds of a step with all drafts verified.

    Raises:
        SizingError: the plan has no drafter.
    """
    if plan.kv.drafter is None:
        raise SizingError("the plan has no drafter; plan with one")
    return speculative_step(
        plan.config, plan.kv.drafter, batch=batch, context=CONTEXT, draft_tokens=DRAFTS,
        **_options(plan),
    ).milliseconds  # fmt: skip
