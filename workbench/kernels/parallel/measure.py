"""The group's decode step: every stage checked, then timed with and without communication.

:func:`measure_group` gives the JSON of ``workbench bench decode --gpus N`` (``schema`` counts its
versions):

* ``kind``, ``model``, ``gpus`` (ranks that took part), ``tp``, ``layers``, ``of_layers``,
  ``dtype``, ``expert_weights``, ``device``, ``backend``, ``hardware``, ``versions``, ``date``,
  ``how``, ``note``, ``rounds``;
* ``weights``: ``bytes_per_gpu``, ``bytes_all``, ``seconds`` that making them took;
* ``calls``: for each number of rows, microseconds of one all-reduce of ``rows`` x hidden values in
  a CUDA graph of ``CALLS``, the slowest rank's: ``nccl_us``, ``exchange_us`` (our exchange without
  the boundary) and ``torch_one_shot_us`` (torch's, on symmetric memory); None where it cannot be;
* ``left_out``: runs (and the prefill) that cannot be, by name, with the reason;
* ``prefill``, where it was asked for: as ``compare_prefill.measure_tp_prefill`` says;
* ``runs``, one for each ``batch`` and ``context``: ``weight_bytes`` and ``cache_bytes`` that a rank
  must read, ``bandwidth`` (the best rank's, measured in the same run), ``floor_milliseconds``,
  ``distinct_experts`` (a sparse layer), ``error_limit``, ``plain_error``, ``fastest`` and its
  ``milliseconds``, ``left_out`` (stages, with the reason), ``kernels`` (``graph.kernel_times``) and
  ``variants`` by name: ``title``, ``origin``, ``forms``, ``exchange``, ``milliseconds`` (median of
  all ranks' replays), ``low``, ``high`` (10th and 90th percentile), ``repeat`` (the second run's
  median), ``rounds``, ``slowest_rank_milliseconds`` (the slowest rank's median),
  ``fraction_of_floor``, ``passed``, ``failures``, ``interpreted``, ``check``; ``without``, the same
  times of the one-rank step of that stage, all ranks at once; ``same_choices``, times of the step
  with the experts that the step without was given (where the experts of a step are its batch's,
  else None); ``communication_milliseconds``, which is the step less the one without (waiting for
  the slowest rank included).

What fails its check, or is interpreted, is not timed; its times are None.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any, cast

import torch

from workbench import hardware
from workbench.errors import KernelError, WorkbenchError
from workbench.kernels.footprint import free_bytes
from workbench.kernels.parallel.check import GroupCheck, check_group, check_group_load
from workbench.kernels.parallel.mailbox import Mailbox
from workbench.kernels.parallel.ranks import Ranks
from workbench.kernels.parallel.tp_chain import TpRankStep
from workbench.kernels.parallel.weights import TpWeights, group_label, in_step, tp_state
from workbench.kernels.peaks import measured_peaks
from workbench.kernels.rank import fp8
from workbench.kernels.rank.chain import RankStep
from workbench.kernels.rank.graph import ROUNDS, Replay, Times, kernel_times, time_replays
from workbench.kernels.rank.load_check import check_load, told
from workbench.kernels.rank.load_state import LoadState
from workbench.kernels.rank.load_step import LoadStep
from workbench.kernels.rank.reference import Step, check_step
from workbench.kernels.rank.stages import STAGES, Origin, Stage, cumulative, make, refuse_foreign
from workbench.kernels.rank.state import RankState
from workbench.kernels.rank.waterfall import (
    ERROR_FLOOR,
    ERROR_RATIO,
    INTERPRETED,
    _dtype,
    _experts,
    _interpreted,
    _refusal,
    _worst,
)
from workbench.kernels.rank.weights import SPARE_BYTES, RankWeights
from workbench.kernels.roofline import Rates

SCHEMA = "workbench-parallel-decode/1"
HEADROOM = 64  # positions behind the context into which replays may advance
CALLS = 20  # all-reduces of a graph that is timed
NAIVE_MOST = 8  # sequences up to which plain torch's copies of the chosen experts are made
CHECKED = 2  # sequences of a batch that are compared with float64: it is slow
PROFILED = (
    "naive", "products", "fused", "fused_pdl", "fused_boundary", "fused_products", "load",
    "load_boundary",
)  # fmt: skip
TIMES = ("milliseconds", "low", "high", "repeat", "rounds")
PERSISTENT = (
    "the persistent kernel has no all-reduce: one block of it would have to wait for other GPUs "
    "while it holds the grid"
)
CHOICES = (
    "the experts of several sequences depend on their tokens, so communication of the load steps "
    "is the difference of two that were given the same experts"
)

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStage:
    """A stage of several ranks: the one-rank ``stage`` that it comes from, and the exchange."""

    name: str
    title: str
    origin: Origin
    stage: Stage
    exchange: str = "nccl"  # or "boundary", or "products"


_HOW = {
    "boundary": "all-reduce inside the boundary", "products": "products send their own sums"
}  # fmt: skip


def _within(name: str, one: Stage, exchange: str = "boundary") -> GroupStage:
    return GroupStage(
        name=name, title=f"{one.title}, {_HOW[exchange]}", origin="ours", stage=one,
        exchange=exchange,
    )  # fmt: skip


_ONE_RANK = {one.name: one for one in STAGES}
GROUP_STAGES: dict[str, GroupStage] = {
    **{
        one.name: GroupStage(name=one.name, title=one.title, origin=one.origin, stage=one)
        for one in STAGES
    },
    "products_boundary": _within("products_boundary", _ONE_RANK["products"]),
    "fused_boundary": _within("fused_boundary", _ONE_RANK["fused_pdl"]),
    "fused_products": _within("fused_products", _ONE_RANK["fused_pdl"], "products"),
    "load_boundary": _within("load_boundary", _ONE_RANK["load"]),
}
# What is measured where no stages are asked for: of one sequence, and of several.
SINGLE = (
    *(one.name for one in STAGES if not one.whole),
    "products_boundary", "fused", "fused_pdl", "fused_boundary", "fused_products",
)  # fmt: skip
SEVERAL = ("naive", "attention", "load", "load_boundary")


@dataclass(slots=True, kw_only=True)
class _Made:
    """A stage's captured steps: of the group, of this rank alone, and with the experts given."""

    stage: GroupStage
    group: Replay
    check: GroupCheck | None = None
    alone: Replay | None = None
    given: Replay | None = None
    times: dict[str, list[Times]] = field(default_factory=dict)


def measure_group(
    weights: RankWeights,
    ranks: Ranks,
    *,
    batches: Sequence[int] = (1,),
    contexts: Sequence[int] = (4096,),
    stages: Sequence[str] | None = None,
    rounds: int = ROUNDS,
    rates: Rates | None = None,
    model: str = "",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Check and time the stages (None: those that suit the batch) on every batch and context.

    All ranks call it together with the same arguments but for ``rates``, which are each one's own
    (measured now where None) and ``progress``, which rank 0's is told. The document is complete on
    every rank.

    Raises:
        KernelError: on all ranks alike: unknown stages, no sizes, fewer than two rounds, or no run
            that can be.
    """
    _refuse(batches, contexts, stages, rounds)
    own = rates or measured_peaks(weights.device)
    bandwidth = max(ranks.tell(own.bandwidth))
    pairs = [(batch, context) for context in contexts for batch in dict.fromkeys(batches)]
    say = progress if progress is not None and ranks.rank == 0 else (lambda done, of, label: None)
    # What a run says, at most: plain torch, a stage three times, two turns of three, profiling.
    each = 3 * max(len(_names(batch, stages)) for batch in batches) + 8
    work = _Work(weights, ranks, bandwidth, rounds)
    document = _head(weights, ranks, own, rounds, model, max(batches))
    say(0, each * len(pairs) + 1, "all-reduces alone")
    document["runs"], document["left_out"] = [], {}
    document["calls"] = _calls(work, sorted(set(batches)), document["left_out"])
    for index, (batch, context) in enumerate(pairs):
        label = f"batch {batch}, context {context:,}"
        place = iter(range(1 + each * index, 1 + each * (index + 1)))

        def saying(what: str, place: Iterator[int] = place, label: str = label) -> None:
            say(next(place), each * len(pairs) + 1, f"{label}: {what}")

        try:
            document["runs"].append(work.run(batch, context, stages, saying))
        except KernelError as error:  # on all ranks alike
            document["left_out"][label] = str(error)
        gc.collect()
        if weights.device.type == "cuda":
            torch.cuda.empty_cache()
    if not document["runs"]:
        raise KernelError(next(iter(document["left_out"].values())))
    say(each * len(pairs) + 1, each * len(pairs) + 1, "done")
    return document


def _refuse(
    batches: Sequence[int], contexts: Sequence[int], stages: Sequence[str] | None, rounds: int
) -> None:
    if isinstance(stages, str):
        raise TypeError(f"stages are several names: [{stages!r:.60}] in place of it")
    unknown = [name for name in stages or () if name not in GROUP_STAGES]
    if unknown:
        raise KernelError(
            f"there is no variant {unknown[0]!r:.60} of the step of several ranks; there are "
            f"{', '.join(GROUP_STAGES)}"
        )
    if (stages is not None and not stages) or not batches or not contexts:
        raise KernelError("nothing was asked for: give a variant, a batch and a context or more")
    if rounds < 2:
        raise KernelError(f"a median needs 2 rounds or more, not {rounds}")


def _names(batch: int, stages: Sequence[str] | None) -> list[str]:
    """Stages of a batch: those that were asked for, or those that suit it."""
    if stages is not None:
        return list(dict.fromkeys(stages))
    return list(SINGLE if batch == 1 else SEVERAL)


class _Work:
    """What the runs share."""

    def __init__(self, weights: RankWeights, ranks: Ranks, bandwidth: float, rounds: int) -> None:
        self.weights, self.ranks, self.bandwidth, self.rounds = weights, ranks, bandwidth, rounds
        self._mailbox: Mailbox | str | None = None

    def mailbox(self) -> Mailbox:
        """Memory that all ranks see, opened at first use; for all ranks together.

        Raises:
            KernelError: there is none here; on all ranks alike.
        """
        if self._mailbox is None:
            w = self.weights
            try:
                opened: Mailbox | str = Mailbox.open(self.ranks, w.shapes.hidden, w.dtype)
            except KernelError as error:
                opened = str(error)
            said = self.ranks.tell(opened if isinstance(opened, str) else "")
            reason = next((each for each in said if each), None)
            self._mailbox = opened if reason is None else reason
        if isinstance(self._mailbox, str):
            raise KernelError(self._mailbox)
        return self._mailbox

    def refuse_lost(self) -> None:
        """Refuse to go on where an exchange gave up waiting.

        Raises:
            KernelError: one did; on all ranks alike.
        """
        if isinstance(self._mailbox, Mailbox):
            self._ask(self._mailbox)

    def run(
        self, batch: int, context: int, stages: Sequence[str] | None, say: Callable[[str], None]
    ) -> dict[str, Any]:
        """One batch and context.

        Raises:
            KernelError: on all ranks alike: the caches do not fit, no stage can be, or a kernel
                waited in vain for another rank.
        """
        w, ranks = self.weights, self.ranks
        say("plain torch on one rank")
        plain = self._plain_error(batch, context)
        limit = max(ERROR_FLOOR, ERROR_RATIO * plain)
        state = tp_state(w, ranks, context, batch=batch, headroom=HEADROOM)
        made, left_out = self._captured(_names(batch, stages), state, say)
        if not made:
            raise KernelError(next(iter(left_out.values())))
        for name, one in made.items():
            say(f"checking {name}")
            one.check = self._checked(one.group, state)
        right = {
            name: one
            for name, one in made.items()
            if one.check is not None and not one.check.failures(limit)
        }
        last = list((right or made).values())[-1]
        distinct = _experts(last.group, w, state).get("per_step")
        moved, cache = w.step_bytes(distinct, batch), w.cache_bytes(context, batch)
        floor = (moved + cache) / self.bandwidth * 1e3
        timed = {
            name: one
            for name, one in right.items()
            if not _interpreted(one.stage.stage.name, w.device)
        }
        self._time(timed, state, say)
        variants = {name: self._row(one, limit, floor) for name, one in made.items()}
        known = {n: r["milliseconds"] for n, r in variants.items() if r["milliseconds"]}
        best = min(known, key=known.__getitem__, default=None)
        say("profiling")
        kernels = {
            name: rows
            for name, one in timed.items()
            if name in PROFILED and (rows := kernel_times(one.group, state))
        }
        for one in timed.values():
            self._ask(one.group.step)
        return {
            "batch": batch,
            "context": context,
            "weight_bytes": moved,
            "cache_bytes": cache,
            "bandwidth": self.bandwidth,
            "floor_milliseconds": floor,
            "distinct_experts": distinct,
            "error_limit": limit,
            "plain_error": plain,
            "fastest": best,
            "milliseconds": None if best is None else known[best],
            "variants": variants,
            "kernels": kernels,
            "left_out": left_out,
        }

    def _plain_error(self, batch: int, context: int) -> float:
        """The largest error of plain torch on one rank, its partial sums used as whole ones."""
        w, ranks = self.weights, self.ranks
        few = batch if batch <= NAIVE_MOST else 1
        state = tp_state(w, ranks, context, batch=few, headroom=HEADROOM)
        step = RankStep(w, state)
        if few == 1:
            check = check_step(step, w, state)
        else:
            load = cast(LoadStep, _AsLoad(step))
            check = check_load(load, w, LoadState.over(state, w), rows=_sample(few))
        return max(ranks.tell(_worst(check)))

    def _checked(self, replay: Replay, state: RankState) -> GroupCheck:
        w, ranks = self.weights, self.ranks
        state.reset()
        if state.batch == 1:
            found = check_group(replay.step, w, state, ranks, replay)
        else:
            over = LoadState.over(state, w)
            rows = _sample(state.batch)
            found = check_group_load(replay.step, w, over, ranks, run=replay, rows=rows)
        state.reset()
        return found

    def _captured(
        self, names: Sequence[str], state: RankState, say: Callable[[str], None]
    ) -> tuple[dict[str, _Made], dict[str, str]]:
        """The group's steps, and why some cannot be."""
        made: dict[str, _Made] = {}
        left_out: dict[str, str] = {}
        for name in names:
            say(f"capturing {name}")
            one = GROUP_STAGES[name]
            try:
                step = self._step(one, state)
                made[name] = _Made(stage=one, group=self._capture(name, step, state))
            except KernelError as error:
                left_out[name] = str(error)
        return made, left_out

    def _step(self, one: GroupStage, state: RankState, choices: Any = None) -> Step:
        """The group's step of a stage.

        Raises:
            KernelError: it cannot be here; on all ranks alike.
        """
        w, ranks, name = self.weights, self.ranks, one.stage.name
        if name == "persistent":
            raise KernelError(PERSISTENT)
        mailbox = self.mailbox() if one.exchange != "nccl" else None

        def made() -> Step:
            refuse_foreign(w, state)
            if not one.stage.whole:
                self._refuse_copies(name, state)
                forms = cumulative(name)
                if mailbox is not None:  # the registry's own, for one sequence and for several
                    forms["reduced_boundary"] = "exchange"
                return TpRankStep(w, state, ranks, forms, mailbox=mailbox)
            if name == "load":
                from workbench.kernels.parallel.tp_load import TpLoadStep

                return TpLoadStep(
                    w, LoadState.over(state, w), ranks, exchange=one.exchange, mailbox=mailbox,
                    choices=choices,
                )  # fmt: skip
            from workbench.kernels.parallel.tp_fused import TpFusedStep

            # With an exchange of our own: dependent launches where the GPU has them.
            dependent = None if one.exchange != "nccl" else name == "fused_pdl"
            return TpFusedStep(
                w, state, ranks, exchange=one.exchange, mailbox=mailbox, dependent=dependent
            )

        return in_step(ranks, lambda: _or_refused(name, made))

    def _refuse_copies(self, name: str, state: RankState) -> None:
        """Refuse a chain whose copies of the chosen experts do not fit; one sequence's always do.

        Raises:
            KernelError: with what they would need.
        """
        w, s = self.weights, self.weights.shapes
        if state.batch == 1:
            return
        each = 3 * s.expert_width * s.hidden * (4 if w.experts == "fp8" else w.dtype.itemsize)
        # Each of the two graphs, with and without communication, keeps its own, and the first run.
        need, free = 3 * state.batch * s.top_k * each, free_bytes(str(w.device))
        spare = SPARE_BYTES // 2 if w.device.type == "cuda" else 0
        if free is not None and need + spare > free:
            raise KernelError(
                f"{name} copies the experts that {state.batch} sequences chose, three times over "
                f"{hardware.gigabytes(need)}, and {hardware.gigabytes(free)} of memory are free; "
                "take load, which reads them where they lie"
            )

    def _capture(self, name: str, step: Step, state: RankState) -> Replay:
        """Run the step once on all ranks, then capture it; the state is reset after.

        Raises:
            KernelError: it cannot be captured, or Triton refuses its sizes; on all ranks alike.
        """
        ranks = self.ranks
        ranks.barrier()

        def warm() -> bool:
            state.reset()
            step()
            return True

        def captured() -> Replay:
            if self.weights.device.type != "cuda":
                return Replay(step=step)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                # NCCL's own thread asks the GPU questions meanwhile, which is none of the capture.
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    step()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                reason = " ".join(str(error).split())
                raise KernelError(
                    f"the step cannot be captured in a CUDA graph: {reason:.200}"
                ) from error
            return Replay(step=step, graph=graph)

        # Kernels have the same sizes on all ranks, so all refuse at the same place, or none.
        in_step(ranks, lambda: _or_refused(name, warm))
        self._ask(step)
        replay = in_step(ranks, captured)
        state.reset()
        return replay

    def _time(
        self, timed: Mapping[str, _Made], state: RankState, say: Callable[[str], None]
    ) -> None:
        """Two runs of each, with and without communication in turn."""
        for name, one in timed.items():
            say(f"without communication: {name}")
            choices = None
            if one.stage.stage.name == "load" and state.batch > 1:
                choices = self._choices(one, state)
                one.given = self._capture(name, self._step(one.stage, state, choices), state)
            one.alone = self._alone(one, state, choices)
        for turn in range(2):
            for kind in ("group", "given", "alone"):
                replays = {
                    name: replay
                    for name, one in timed.items()
                    if (replay := getattr(one, kind)) is not None
                }
                if not replays:
                    continue
                say(f"timing, run {turn + 1} of 2" + (", one rank" if kind == "alone" else ""))
                self.ranks.barrier()
                found = time_replays(replays, state, self.rounds)
                for one in timed.values():
                    self._ask(one.group.step)
                for name, times in found.items():
                    timed[name].times.setdefault(kind, []).append(times)

    def _choices(self, one: _Made, state: RankState) -> Any:
        """The experts that the group's first step chooses."""
        state.reset()
        one.group()
        choices = cast(LoadStep, one.group.step).recorded()
        state.reset()
        return choices

    def _alone(self, one: _Made, state: RankState, choices: Any) -> Replay | None:
        """This rank's own step of the same stage, its partial sums used as whole ones."""
        w, name = self.weights, one.stage.stage.name
        if choices is not None:
            step: Step = LoadStep(w, LoadState.over(state, w), choices=choices)
        else:
            able = name != "fused_pdl" or getattr(one.group.step, "dependent", True)
            step = make(name if able else "fused", w, state)
        return self._capture(name, step, state)

    def _ask(self, step: Step | Mailbox) -> None:
        """Whether a kernel of the step gave up waiting: it did nothing afterwards, quickly.

        Raises:
            KernelError: one did, on some rank; on all of them alike.
        """
        ask = getattr(step, "check", None)
        if ask is None:
            return

        def answered() -> bool:
            ask()
            return True

        try:
            in_step(self.ranks, answered)
        except KernelError:
            self._mailbox = None  # in this one nobody waits any more
            raise

    def _row(self, one: _Made, limit: float, floor: float) -> dict[str, Any]:
        assert one.check is not None  # for the type checker: every made one was checked
        failures, stage = one.check.failures(limit), one.stage
        row: dict[str, Any] = {
            "title": stage.title,
            "origin": stage.origin,
            "forms": {} if stage.stage.whole else cumulative(stage.stage.name),
            "exchange": stage.exchange,
            **dict.fromkeys((*TIMES, "slowest_rank_milliseconds")),
            "without": None,
            "same_choices": None,
            "communication_milliseconds": None,
            "fraction_of_floor": None,
            "passed": not failures,
            "failures": failures,
            "interpreted": self._only_interpreted(stage),
            "check": told(one.check),
        }
        group = self._pooled(one.times.get("group"))
        if group is None:
            return row
        row |= group
        row["without"] = self._pooled(one.times.get("alone"))
        row["same_choices"] = given = self._pooled(one.times.get("given"))
        row["fraction_of_floor"] = floor / row["milliseconds"]
        if row["without"] is not None:
            both = (given or group)["milliseconds"]
            row["communication_milliseconds"] = both - row["without"]["milliseconds"]
        return row

    def _only_interpreted(self, one: GroupStage) -> bool:
        return _interpreted(one.stage.name, self.weights.device)

    def _pooled(self, runs: Sequence[Times] | None) -> dict[str, Any] | None:
        """Times of all ranks' replays in the first run; for all ranks together."""
        if not runs:
            return None
        first, second = (self.ranks.tell(list(times.seconds)) for times in runs)
        pooled = Times.of([spent for each in first for spent in each])
        again = statistics.median(spent for each in second for spent in each)
        values = (pooled.median, pooled.low, pooled.high, again)
        times = dict(zip(TIMES[:4], (1e3 * value for value in values), strict=True))
        slowest = max(statistics.median(each) for each in first)
        return times | {
            "rounds": len(first[0]),
            "slowest_rank_milliseconds": 1e3 * slowest,
        }


class _AsLoad:
    """A chain's step as ``check_load`` looks at one: it chose its experts itself."""

    choices, advance = None, True

    def __init__(self, step: RankStep) -> None:
        self.step = step

    def __call__(self) -> None:
        self.step()

    @property
    def h(self) -> Any:
        return self.step.h

    def expert_ids(self) -> torch.Tensor:
        return self.step.expert_ids()


def _sample(batch: int) -> list[int]:
    """The sequences that are compared: the first and the last."""
    return sorted({0, batch - 1})[:CHECKED]


def _or_refused(name: str, work: Callable[[], Any]) -> Any:
    """What ``work`` gives; what Triton or an absent module refuses, as a KernelError."""
    try:
        return work()
    except (torch.OutOfMemoryError, WorkbenchError):
        raise
    except Exception as error:
        refused = _refusal(name, error)
        if refused is None:
            raise
        raise refused from error


def _head(
    weights: RankWeights, ranks: Ranks, rates: Rates, rounds: int, model: str, most: int
) -> dict[str, Any]:
    tp, world, device = weights.shapes.tp, ranks.world, weights.device.type
    machine = hardware.machine()
    versions = dict(machine.versions)
    if ranks.backend == "nccl":
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    names = ranks.tell(rates.label)
    alike = len(set(names)) == 1
    note = [group_label(tp, world)]
    if world < tp:
        note.append(
            f"they make up a model with {world}/{tp} of the heads, widths and vocabulary, each "
            f"rank as at TP{tp}"
        )
    if most > 1:
        note.append(CHOICES)
    if device == "cpu":
        note.append(INTERPRETED)
    held = ranks.tell(weights.bytes)
    return {
        "schema": SCHEMA,
        "kind": "parallel-decode",
        "model": model,
        "gpus": world,
        "tp": tp,
        "layers": len(weights.layers),
        "of_layers": weights.config.num_hidden_layers,
        "dtype": _dtype(weights),
        "expert_weights": fp8.DESCRIPTION if weights.experts == "fp8" else _dtype(weights),
        "device": device,
        "backend": ranks.backend,
        "hardware": f"{world} × {names[0]}" if alike else ", ".join(names),
        "versions": versions,
        "date": date.today().isoformat(),
        "how": "measured here",
        "note": "; ".join(note),
        "rounds": rounds,
        "weights": {
            "bytes_per_gpu": max(held),
            "bytes_all": sum(held),
            "seconds": weights.seconds if isinstance(weights, TpWeights) else None,
        },
    }


# ------------------------------------------------------------------ all-reduces alone


def _calls(work: _Work, sizes: Sequence[int], left_out: dict[str, str]) -> list[dict[str, Any]]:
    """Microseconds of one all-reduce of each number of rows; nothing without GPUs.

    Why one cannot be is told in ``left_out``.
    """
    if work.weights.device.type != "cuda" or work.ranks.world == 1:
        return []
    ways = {"nccl_us": _nccl, "exchange_us": _exchange, "torch_one_shot_us": _one_shot}
    found: list[dict[str, Any]] = []
    for rows in sizes:
        found.append({"rows": rows})
        for name, way in ways.items():
            spent = _call_us(work, rows, way)
            if isinstance(spent, str):
                left_out[f"{name} of {rows} rows"] = spent
            found[-1][name] = None if isinstance(spent, str) else spent
    work.refuse_lost()
    return found


def _call_us(work: _Work, rows: int, way: Callable[[_Work, int], Callable[[], Any]]) -> float | str:
    """Microseconds of one of ``CALLS`` all-reduces of a graph; a sentence where that cannot be."""
    ranks, run, reason = work.ranks, None, ""
    try:
        run = way(work, rows)
        run()
    except (KernelError, RuntimeError, AttributeError, ImportError) as error:
        # A full or broken GPU ends the run; another torch may lack its own all-reduce, or refuse.
        if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
            raise
        reason = f"{' '.join(str(error).split()):.300}" or type(error).__name__
    reasons = ranks.tell(reason)
    if any(reasons) or run is None:
        return str(next(each for each in reasons if each))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    for _ in range(3):
        graph.replay()
    ranks.barrier()
    pairs = []
    for _ in range(work.rounds):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # the ranks meet, and the next launch happens meanwhile
        before.record()
        graph.replay()
        after.record()
        pairs.append((before, after))
    torch.cuda.synchronize()
    spent = statistics.median(before.elapsed_time(after) for before, after in pairs)
    return float(max(ranks.tell(spent))) * 1e3 / CALLS


def _values(work: _Work, rows: int) -> torch.Tensor:
    """Small enough that some thousand sums in a row stay finite: NCCL's are in place."""
    w = work.weights
    made = torch.empty(rows, w.shapes.hidden, dtype=w.dtype, device=w.device)
    return made.normal_(std=1e-3)


def _nccl(work: _Work, rows: int) -> Callable[[], Any]:
    x = _values(work, rows)

    def run() -> None:
        for _ in range(CALLS):
            work.ranks.all_reduce(x)

    return run


def _exchange(work: _Work, rows: int) -> Callable[[], Any]:
    from workbench.kernels.parallel.triton_exchange import exchanges

    mailbox, x = work.mailbox(), _values(work, rows)
    mailbox.refuse_rows(rows)
    return lambda: exchanges(mailbox, x, CALLS)


def _one_shot(work: _Work, rows: int) -> Callable[[], Any]:
    """torch's all-reduce on symmetric memory, peer to peer, without multicast."""
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric

    w, group = work.weights, work.ranks.group or dist.group.WORLD
    name = cast(Any, group).group_name
    x = symmetric.empty(rows, w.shapes.hidden, dtype=w.dtype, device=w.device)
    symmetric.rendezvous(x, name)
    x.copy_(_values(work, rows))

    def run() -> None:
        for _ in range(CALLS):
            torch.ops.symm_mem.one_shot_all_reduce(x, "sum", name)

    return run
