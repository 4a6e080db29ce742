"""A prefill by several GPUs in two layouts, checked and timed, with communication and without.

``tp``: every sequence by all ranks together, one sequence after another. ``ep``: attention by each
rank for its own sequences, all at once, and whole experts. :func:`compare_prefill` gives the JSON
of ``workbench bench prefill --gpus N``:

* ``schema``, ``kind``, ``model``, ``gpus``, ``tp`` (the parts that the model is cut into; with
  fewer GPUs both layouts run a model with ``experts`` experts, see ``ep_weights``), ``layers``,
  ``of_layers``, ``experts``, ``of_experts``, ``sequences`` (of the group), ``tokens``, ``context``,
  ``rounds``, ``dtype``, ``device``, ``backend``, ``hardware``, ``versions``, ``date``, ``how``,
  ``note``;
* ``layouts`` by name: ``title``, ``form``, ``weights`` (``bytes_per_gpu``, ``bytes_all``,
  ``seconds``), ``check`` (worst of the ranks; ``layers`` and ``rows`` that were compared),
  ``error_limit``, ``passed``, ``failures``, ``interpreted``, ``runs``, ``fastest`` (an index of
  ``runs``) and its figures once more;
* a run: ``overlap`` (pieces of ``tp``; 2: chunks overlap in ``ep``), ``milliseconds`` for all
  sequences (median of the rounds, the slowest rank's in each), ``low``, ``high`` (least and most),
  ``tokens_per_second`` (the group's), ``flops_per_second`` and ``fraction_of_peak`` (a GPU's),
  ``without`` (the same times without communication), ``communication_milliseconds``,
  ``bytes_sent_per_token`` (between GPUs, all ranks', counted), ``peak_bytes`` (the most of a rank;
  None without a GPU), of ``ep`` ``busiest_over_mean`` ((token, expert) pairs of the busiest rank
  over the mean, the mean of the sparse layers);
* ``ratio``: tokens/s of ``ep`` over those of ``tp``, None where one is not timed;
  ``left_out``: layouts that cannot be, with the reason.

What fails its check, or is interpreted, is not timed.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date
from typing import Any

import torch
from torch import Tensor

from workbench import hardware
from workbench.errors import KernelError
from workbench.kernels.parallel.check import GroupCheck, GroupReference, _merged, fingerprint
from workbench.kernels.parallel.ep_weights import EpWeights, ep_config, ep_weights, gathered
from workbench.kernels.parallel.expert_parallel import CHUNK, EpPrefillState, EpPrefillStep
from workbench.kernels.parallel.ranks import Ranks
from workbench.kernels.parallel.tp_prefill import TpPrefillStep, group_state
from workbench.kernels.parallel.weights import group_label, in_step, tp_weights
from workbench.kernels.rank.load_check import told
from workbench.kernels.rank.prefill_bench import LIMIT, LIMIT_FLOAT32
from workbench.kernels.rank.prefill_check import check_prefill, sample_rows
from workbench.kernels.rank.prefill_state import PrefillState, counted_flops
from workbench.kernels.rank.prefill_step import LAYOUTS as DOWN_LAYOUTS
from workbench.kernels.rank.prefill_step import PrefillStep, captured
from workbench.kernels.rank.reference import Reference
from workbench.kernels.rank.weights import RankWeights
from workbench.kernels.roofline import Rates
from workbench.model.config import BeamConfig

SCHEMA = "workbench-parallel-prefill/1"
TITLES = {
    "tp": "tensor parallel: every sequence by all GPUs",
    "ep": "attention data-parallel, experts whole: sequences by one GPU each",
}
LAYOUTS = tuple(TITLES)
ROWS = 4  # watched rows beside the first, the second and the last of every sequence
OVERLAPS = (1, 2)

Progress = Callable[[int, int, str], None]


def compare_prefill(
    config: BeamConfig,
    ranks: Ranks,
    tp: int | None = None,
    *,
    tokens: int = 32_768,
    sequences: int | None = None,
    context: int = 0,
    layers: int | None = None,
    rounds: int = 5,
    dtype: torch.dtype = torch.bfloat16,
    model: str = "",
    rates: Rates,
    layouts: Sequence[str] = LAYOUTS,
    overlaps: Sequence[int] = OVERLAPS,
    chunk: int = CHUNK,
    form: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Make, check and time each layout in turn, the first one's weights gone before the second's.

    ``tp`` (None: as many as there are ranks): the parts that the whole model is cut into.
    ``sequences`` (None: one a rank) of the whole group. ``form`` (None: ``ours`` on a GPU,
    ``naive`` on a CPU) is that of :class:`~workbench.kernels.rank.prefill_step.PrefillStep`. For
    all ranks to call together; the document is the same on all of them.

    Raises:
        KernelError: on all ranks alike: a layout that does not exist, sequences that the ranks
            cannot share out, sizes that suit no layout, or none of the layouts can be.
    """
    asked = list(dict.fromkeys(layouts))
    parts = ranks.world if tp is None else tp
    count = ranks.world if sequences is None else sequences
    _refuse(asked, overlaps, rounds, count, ranks.world)
    whole = ep_config(config, ranks.world, parts)
    work = _Work(ranks, rates, rounds, tuple(overlaps), chunk, form, len(asked), progress)
    found: dict[str, dict[str, Any]] = {}
    left_out: dict[str, str] = {}
    for name in asked:
        measure = _tp_layout if name == "tp" else _ep_layout
        try:
            found[name] = measure(work, whole, count, tokens, context, layers, dtype)
        except KernelError as error:  # on all ranks alike
            left_out[name] = str(error)
        work.free()
        work.done += 1
    if not found:
        raise KernelError(left_out[asked[0]])
    speeds = {name: row.get("tokens_per_second") for name, row in found.items()}
    of_tp, of_ep = speeds.get("tp"), speeds.get("ep")
    depth = whole.num_hidden_layers if layers is None else layers
    few = checked_layers(whole, depth)
    note = [group_label(parts, ranks.world)]
    if ranks.world < parts:
        note.append(
            f"they make up a model with {whole.num_experts} of {config.num_experts} experts: of "
            f"the expert-parallel layout each rank is as one of {parts}, of the tensor-parallel "
            f"one as at TP{ranks.world}"
        )
    if depth < whole.num_hidden_layers:
        note.append(f"the first {depth} of {whole.num_hidden_layers} layers, embedding and head")
    if "ep" in found:
        note.append(
            "ep is timed with one cache for all sliding layers, which none reads of another"
        )
    if "ep" in found and few < depth:
        note.append(f"ep is checked at {few} layers: its reference reads the experts of all ranks")
    return {
        "schema": SCHEMA,
        "kind": "parallel-prefill",
        "model": model,
        "gpus": ranks.world,
        "tp": parts,
        "layers": depth,
        "of_layers": whole.num_hidden_layers,
        "experts": whole.num_experts,
        "of_experts": config.num_experts,
        "sequences": count,
        "tokens": tokens,
        "context": context,
        "rounds": rounds,
        "dtype": str(dtype).removeprefix("torch."),
        **_surroundings(ranks, rates),
        "note": "; ".join(note),
        "layouts": found,
        "ratio": of_ep / of_tp if of_tp and of_ep else None,
        "left_out": left_out,
    }


def measure_tp_prefill(
    weights: RankWeights,
    ranks: Ranks,
    *,
    sequences: int = 8,
    tokens: int = 2048,
    context: int = 100_000,
    rounds: int = 5,
    rates: Rates,
    overlaps: Sequence[int] = OVERLAPS,
    form: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Check and time one prefill of ``sequences`` at once by weights that are there already.

    The fields of a layout of :func:`compare_prefill`, with ``sequences``, ``tokens`` and
    ``context``. Down projections are turned to what the form reads, and back at the end. For all
    ranks to call together.

    Raises:
        KernelError: on all ranks alike: sizes that cannot be or do not fit.
    """
    _refuse(["tp"], overlaps, rounds, sequences, ranks.world)
    work = _Work(ranks, rates, rounds, tuple(overlaps), CHUNK, form, 1, progress)
    first = weights.down_layout
    weights.relayout(DOWN_LAYOUTS.get(work.form, first))
    try:
        row = _tp_measured(work, weights, sequences, tokens, context, 1)
    finally:
        weights.relayout(first)
        work.free()
    sizes = {"kind": "prefill", "sequences": sequences, "tokens": tokens, "context": context}
    return sizes | row


def _refuse(
    layouts: Sequence[str], overlaps: Sequence[int], rounds: int, sequences: int, world: int
) -> None:
    unknown = [name for name in layouts if name not in LAYOUTS]
    if unknown or not layouts:
        what = f"there is no layout {unknown[0]!r:.40}" if unknown else "no layout is asked for"
        raise KernelError(f"{what}; there are {' and '.join(LAYOUTS)}")
    if not overlaps or any(isinstance(n, bool) or n < 1 for n in overlaps):
        raise KernelError(
            f"a prefill goes through its layers in 1 or more pieces, not {list(overlaps)!r:.40}"
        )
    if rounds < 2:
        raise KernelError(f"a median needs 2 rounds or more, not {rounds}")
    if sequences < 1:
        raise KernelError(f"a prefill needs 1 or more sequences, not {sequences}")
    if "ep" in layouts and sequences % world:
        raise KernelError(
            f"{sequences} sequences cannot be shared out evenly among {world} ranks, each of which "
            f"prefills its own; choose a multiple of {world}, or the layout tp alone"
        )


class _Work:
    """What the layouts share."""

    def __init__(
        self,
        ranks: Ranks,
        rates: Rates,
        rounds: int,
        overlaps: tuple[int, ...],
        chunk: int,
        form: str | None,
        layouts: int,
        progress: Progress | None,
    ) -> None:
        self.ranks, self.rates, self.rounds = ranks, rates, rounds
        self.overlaps, self.chunk = overlaps, chunk
        self.gpu = ranks.device.type == "cuda"
        self.form = form or ("ours" if self.gpu else "naive")
        self.layouts, self.done, self.progress = layouts, 0, progress

    def say(self, part: float, label: str) -> None:
        """``part`` of the layout at hand is done."""
        if self.progress is not None:
            self.progress(int(100 * (self.done + part)), 100 * self.layouts, label)

    def free(self) -> None:
        """Give back what nothing uses any more: two layouts do not fit at the same time."""
        gc.collect()
        if self.gpu:
            torch.cuda.synchronize(self.ranks.device)
            torch.cuda.empty_cache()

    def limit(self, dtype: torch.dtype) -> float:
        """Of a layer's relative error."""
        return LIMIT_FLOAT32 if dtype == torch.float32 else LIMIT

    def times(self, run: Callable[[], Any], repeats: int) -> dict[str, float]:
        """Milliseconds of ``repeats`` runs in a row: in each round those of the slowest rank."""
        device, found = self.ranks.device, []
        run()
        for _ in range(self.rounds):
            self.ranks.barrier()
            if self.gpu:
                before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                before.record()
            else:
                started = time.perf_counter()
            for _ in range(repeats):
                run()
            if self.gpu:
                after.record()
                torch.cuda.synchronize(device)
                found.append(before.elapsed_time(after))
            else:
                found.append((time.perf_counter() - started) * 1e3)
        own = torch.tensor(found, dtype=torch.float64, device=device)
        slowest = torch.stack(self.ranks.gather(own)).amax(0).tolist()
        return {
            "milliseconds": statistics.median(slowest),
            "low": min(slowest),
            "high": max(slowest),
        }

    def row(
        self,
        overlap: int,
        times: dict[str, float],
        without: dict[str, float],
        tokens: int,
        flops: float,
        sent: float,
        dtype: torch.dtype,
    ) -> dict[str, Any]:
        """One run; ``flops`` of one GPU for all sequences, ``sent`` bytes a token."""
        seconds = times["milliseconds"] / 1e3
        peak: int | None = None
        if self.gpu:
            own = torch.cuda.max_memory_allocated(self.ranks.device)
            peak = max(self.ranks.tell(own))
        rate = self.rates.flops["bf16" if dtype == torch.bfloat16 else "fp32"]
        return {
            "overlap": overlap,
            **times,
            "tokens_per_second": tokens / seconds,
            "flops_per_second": flops / seconds,
            "fraction_of_peak": flops / seconds / rate,
            "without": without,
            "communication_milliseconds": times["milliseconds"] - without["milliseconds"],
            "bytes_sent_per_token": sent,
            "peak_bytes": peak,
        }

    def layout(
        self,
        name: str,
        weights: RankWeights,
        seconds: float | None,
        check: dict[str, Any],
        runs: Callable[[], list[dict[str, Any]]],
    ) -> dict[str, Any]:
        """A layout's fields; ``runs`` are timed if the check found nothing."""
        failures = check.pop("failures")
        held = self.ranks.tell(weights.bytes)
        # On a CPU Triton's kernels are interpreted: right, and no speed.
        interpreted = not self.gpu and self.form != "naive"
        timed = runs() if not failures and not interpreted else []
        found: dict[str, Any] = {
            "title": TITLES[name],
            "form": self.form,
            "weights": {
                "bytes_per_gpu": max(held), "bytes_all": sum(held), "seconds": seconds,
            },
            "check": check,
            "error_limit": self.limit(weights.dtype),
            "passed": not failures,
            "failures": failures,
            "interpreted": interpreted,
            "runs": timed,
            "fastest": None,
        }  # fmt: skip
        if timed:
            best = min(range(len(timed)), key=lambda i: timed[i]["milliseconds"])
            found |= {"fastest": best} | timed[best]
        return found


def _surroundings(ranks: Ranks, rates: Rates) -> dict[str, Any]:
    machine = hardware.machine()
    versions = dict(machine.versions)
    if ranks.backend == "nccl":
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    names = ranks.tell(rates.label)
    alike = len(set(names)) == 1
    return {
        "device": ranks.device.type,
        "backend": ranks.backend,
        "hardware": f"{ranks.world} × {names[0]}" if alike else ", ".join(names),
        "versions": versions,
        "date": date.today().isoformat(),
        "how": "measured here",
    }


# ------------------------------------------------------------------ tensor parallel


def _tp_layout(
    work: _Work,
    config: BeamConfig,
    sequences: int,
    tokens: int,
    context: int,
    layers: int | None,
    dtype: torch.dtype,
) -> dict[str, Any]:
    work.say(0.0, "tp: making the weights")
    weights = tp_weights(
        config, work.ranks, work.ranks.world, layers=layers, dtype=dtype,
        down_layout=DOWN_LAYOUTS.get(work.form, "HI"),
    )  # fmt: skip
    return _tp_measured(work, weights, 1, tokens, context, sequences)


def _tp_measured(
    work: _Work, weights: RankWeights, sequences: int, tokens: int, context: int, repeats: int
) -> dict[str, Any]:
    """``sequences`` at once, ``repeats`` times one after the other."""
    ranks = work.ranks
    state = group_state(weights, ranks, sequences, tokens, context)
    work.say(0.15, "tp: checking")
    check = _worst_of({n: check_tp(weights, state, ranks, work.form, n) for n in work.overlaps})
    work.free()

    def runs() -> list[dict[str, Any]]:
        found = []
        s, size = weights.shapes, weights.norm.element_size()
        # A ring sends each value 2 (N - 1) / N times from every rank: two sums a layer, embedding.
        sums = 2 * len(weights.layers) + 1
        sent = 2.0 * (ranks.world - 1) * s.hidden * size * sums
        for number, overlap in enumerate(work.overlaps):
            work.say(0.5 + 0.5 * number / len(work.overlaps), f"tp: timing, pieces: {overlap}")
            timed = {}
            if work.gpu:
                torch.cuda.reset_peak_memory_stats(ranks.device)
            for communicate in (True, False):
                run = captured(
                    TpPrefillStep(
                        weights, state, ranks, work.form, overlap=overlap, communicate=communicate
                    )
                )
                timed[communicate] = work.times(run, repeats)
                del run
                work.free()  # the graph's memory
            flops = repeats * counted_flops(weights, state)["all"]
            count = repeats * sequences * tokens
            row = work.row(overlap, timed[True], timed[False], count, flops, sent, weights.dtype)
            found.append(row)
        return found

    seconds = getattr(weights, "seconds", None)
    return work.layout("tp", weights, seconds, check, runs)


def check_tp(
    weights: RankWeights, state: PrefillState, ranks: Ranks, form: str, overlap: int = 1
) -> dict[str, Any]:
    """A prefill of all ranks against float64: its values for JSON, ``failures`` in words.

    On a GPU a graph's replay. First every rank's watched stream, experts and next tokens must be
    the same bits. For all ranks to call together.
    """
    step = TpPrefillStep(
        weights, state, ranks, form, overlap=overlap, watch=sample_rows(state, ROWS)
    )
    replay = captured(step)

    def run() -> None:
        replay()
        values = [*step.h, step.expert_ids(), state.next_token]
        own = torch.stack([fingerprint(each) for each in values])
        if any(not torch.equal(own, other) for other in ranks.gather(own)):
            raise _ApartError

    rows = {"layers": len(weights.layers), "rows": 0 if step.watch is None else len(step.watch)}
    try:
        found = check_prefill(
            step, weights, state, run, referred=lambda w, caches: GroupReference(w, caches, ranks)
        )
    except _ApartError:
        said = "the ranks' streams, experts or next tokens are not the same on all of them"
        return rows | {"failures": [said]}
    return rows | _judged(_merged(found, ranks), weights.dtype)


class _ApartError(Exception):
    """The ranks do not agree; nothing can be compared in lock step."""


def _worst_of(checks: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Of the checks by overlap the one with the largest error, and what failed in any of them."""

    def error(check: dict[str, Any]) -> float:
        found = check.get("worst_layer_error")
        return math.inf if found is None else found

    failures = [f"overlap {n}: {said}" for n, each in checks.items() for said in each["failures"]]
    worst = max(checks.values(), key=error)
    return worst | {"failures": failures, "overlaps": list(checks)}


def _judged(check: GroupCheck, dtype: torch.dtype) -> dict[str, Any]:
    limit = LIMIT_FLOAT32 if dtype == torch.float32 else LIMIT
    return told(check) | {"failures": check.failures(limit)}


# ------------------------------------------------------------------ experts whole


def checked_layers(config: BeamConfig, layers: int) -> int:
    """How many layers hold one of each kind that the first ``layers`` have."""
    kinds = [(config.is_full(i), config.is_sparse(i)) for i in range(layers)]
    return max(kinds.index(kind) for kind in set(kinds)) + 1


def _ep_layout(
    work: _Work,
    config: BeamConfig,
    sequences: int,
    tokens: int,
    context: int,
    layers: int | None,
    dtype: torch.dtype,
) -> dict[str, Any]:
    ranks = work.ranks
    own = sequences // ranks.world
    layout = DOWN_LAYOUTS.get(work.form, "HI")

    def make(count: int) -> tuple[EpWeights, float]:
        started = time.perf_counter()
        made = ep_weights(config, ranks, layers=count, dtype=dtype, down_layout=layout)
        ranks.barrier()
        return made, max(ranks.tell(time.perf_counter() - started))

    work.say(0.0, "ep: making the weights")
    depth = config.num_hidden_layers if layers is None else layers
    few = checked_layers(config, depth) if 1 <= depth <= config.num_hidden_layers else depth
    # All ranks' experts are gathered for the reference, which fits beside a few layers only.
    weights, seconds = make(few)
    seed = 1 + ranks.rank  # other tokens on every rank
    full = in_step(ranks, lambda: PrefillState(weights, own, tokens, context, seed=seed))
    work.say(0.1, f"ep: checking {few} layers")
    whole = gathered(weights, ranks)
    check = _worst_of(
        {
            n: check_ep(weights, whole, full, ranks, work.form, work.chunk, n > 1)
            for n in work.overlaps
        }
    )
    del whole, full
    work.free()
    if few < depth:
        del weights
        work.free()
        work.say(0.3, f"ep: making the weights of {depth} layers")
        weights, seconds = make(depth)
    state = in_step(
        ranks,
        lambda: EpPrefillState(weights, own, tokens, context, chunk=work.chunk, seed=seed),
    )

    def runs() -> list[dict[str, Any]]:
        found = []
        total = sequences * tokens
        for number, overlap in enumerate(work.overlaps):
            work.say(0.5 + 0.5 * number / len(work.overlaps), f"ep: timing, overlap {overlap}")
            if work.gpu:
                torch.cuda.reset_peak_memory_stats(ranks.device)
            made: dict[str, Any] = {"chunk": work.chunk, "overlap": overlap > 1}
            step = EpPrefillStep(weights, state, ranks, work.form, **made)
            timed = work.times(step, 1)
            alone = EpPrefillStep(weights, state, ranks, work.form, **made, without=step)
            without = work.times(alone, 1)
            sent = sum(ranks.tell(step.bytes_sent())) / total
            flops = counted_flops(weights, state)["all"]
            row = work.row(overlap, timed, without, total, flops, sent, dtype)
            found.append(row | {"busiest_over_mean": _busiest(step, ranks)})
            del step, alone
            work.free()
        return found

    return work.layout("ep", weights, seconds, check, runs)


def _busiest(step: EpPrefillStep, ranks: Ranks) -> float:
    """Pairs of the busiest rank over the mean of all, the mean of the sparse layers."""
    own = torch.tensor(
        [sum(each.pairs) for each in step.traffic], dtype=torch.float64, device=ranks.device
    )
    every: Tensor = torch.stack(ranks.gather(own))
    if not every.numel():
        return 1.0
    return float((every.amax(0) / every.mean(0).clamp_min(1)).mean())


def check_ep(
    weights: EpWeights,
    whole: RankWeights,
    state: PrefillState,
    ranks: Ranks,
    form: str,
    chunk: int = CHUNK,
    overlap: bool = False,
) -> dict[str, Any]:
    """Each rank's prefill against float64 on the ``whole`` model's weights, which
    :func:`~workbench.kernels.parallel.ep_weights.gathered` gives: the worst of them, for JSON."""
    step: PrefillStep = EpPrefillStep(
        weights, state, ranks, form, chunk=chunk, overlap=overlap, watch=sample_rows(state, ROWS)
    )
    found = check_prefill(
        step, weights, state, referred=lambda _, caches: Reference(whole, caches)
    )  # fmt: skip
    rows = {"layers": len(weights.layers), "rows": 0 if step.watch is None else len(step.watch)}
    return rows | _judged(_merged(found, ranks), weights.dtype)
