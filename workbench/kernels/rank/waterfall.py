"""The waterfall: a decode step from plain torch to the fused chain, each stage checked and timed.

:func:`measure` gives a :class:`Waterfall`, whose ``to_dict`` is the JSON of ``workbench bench
decode`` (``schema`` counts its versions):

* ``kind``, ``model``, ``tp``, ``rank``, ``layers``, ``batch``, ``context``, ``dtype``, ``device``,
  ``note``;
* ``weight_bytes`` and ``cache_bytes`` that one step must read, ``bandwidth`` (bytes/s, measured in
  the same run), ``floor_milliseconds`` = both over the bandwidth, ``weights_floor_milliseconds`` of
  the weights alone;
* ``expert_weights``: how the experts' values are kept, their dtype or ``fp8.DESCRIPTION``;
* ``error_gate``: ``arithmetic``, the error that is allowed a variant (``limit``, which is
  ``times_plain_torch`` the error of ``plain_torch``) and the ``worst`` of those that passed,
  ``against`` the float64 of the same weights; ``quantisation``, what rounding the experts to FP8
  costs (``fp8.QuantisationError``), None where they are not;
* ``milliseconds`` and ``fraction_of_floor`` of the fastest variant that passed;
* ``variants`` by name: ``title``, ``origin``, ``milliseconds`` (median of replays), ``low``,
  ``high`` (10th, 90th percentile), ``repeat`` (the second run's median), ``fraction_of_floor``,
  ``passed``, ``failures`` and ``check`` (``reference.StepCheck``); one that did not pass, or is
  ``interpreted``, is not timed, and its times are None;
* ``leave_one_out`` by name: the chain of single operations with that stage's forms left naive:
  the same, and ``costs`` (more than the whole chain); none where the chain did not pass;
* ``left_out``: variants that cannot run here, with the reason;
* ``experts``: ``per_step`` (distinct ones, a sparse layer), ``over_steps`` of ``steps``;
* ``kernels`` by variant: ``graph.kernel_times``;
* ``hardware``, ``peaks``, ``versions``, ``date``, ``repeat_percent`` (largest difference of two
  runs) and ``rounds``, both None where nothing was timed, ``in_graph``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import torch

from workbench import hardware
from workbench.errors import KernelError, WorkbenchError
from workbench.kernels.peaks import measured_peaks
from workbench.kernels.rank import fp8
from workbench.kernels.rank.chain import RankStep
from workbench.kernels.rank.fp8 import QuantisationError, quantisation_error
from workbench.kernels.rank.fused_config import FusedConfig
from workbench.kernels.rank.graph import ROUNDS, Replay, Times, capture, kernel_times, time_replays
from workbench.kernels.rank.reference import StepCheck, check_step
from workbench.kernels.rank.stages import (
    NAMES,
    STAGES,
    cumulative,
    make,
    refuse_foreign,
    stage,
)
from workbench.kernels.rank.state import RankState
from workbench.kernels.rank.weights import RankWeights
from workbench.kernels.roofline import Rates

SCHEMA = "workbench-rank-decode/1"
NOTE = "no all-reduce on one GPU: the rank's partial sums are used as if they were whole"
INTERPRETED = "on a CPU there is no graph and Triton's kernels are interpreted: right, and no speed"
AGAINST = "float64 of the same weights, FP8 ones as value times scale"
# A stage's error may be this many times that of plain torch in the same precision.
ERROR_RATIO = 2.0
# Whatever plain torch reaches: sums in float32 may be taken in another order.
ERROR_FLOOR = 8 * torch.finfo(torch.float32).eps
STEPS = 16  # consecutive steps over which distinct experts are counted
PROFILED = ("naive", "products", "fused", "fused_pdl", "load", "persistent")

TIMED = ("milliseconds", "low", "high", "repeat", "rounds", "fraction_of_floor")
WITHOUT = "without "

Progress = Callable[[int, int, str], None]


@dataclass(slots=True, kw_only=True)
class Waterfall:
    """What was measured; see the module for the JSON."""

    head: dict[str, Any]
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    leave_one_out: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    experts: dict[str, Any] = field(default_factory=dict)
    kernels: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    tail: dict[str, Any] = field(default_factory=dict)
    quantisation: QuantisationError | None = None

    @property
    def failed(self) -> list[str]:
        """Variants that are not right."""
        return [name for name, row in self.variants.items() if not row["passed"]]

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        right = {n: r["milliseconds"] for n, r in self.variants.items() if r["milliseconds"]}
        best = min(right, key=right.__getitem__, default=None)
        row = self.variants[best] if best is not None else {}
        return {
            "schema": SCHEMA,
            **self.head,
            "fastest": best,
            "milliseconds": row.get("milliseconds"),
            "fraction_of_floor": row.get("fraction_of_floor"),
            "variants": self.variants,
            "leave_one_out": self.leave_one_out,
            "left_out": self.left_out,
            "experts": self.experts,
            "kernels": self.kernels,
            **self.tail,
        }


def measure(
    weights: RankWeights,
    state: RankState,
    *,
    variants: Sequence[str] | None = None,
    rounds: int = ROUNDS,
    leave_one_out: bool = True,
    profile: bool = True,
    rates: Rates | None = None,
    config: FusedConfig | None = None,
    model: str = "",
    rank: int = 0,
    progress: Progress | None = None,
) -> Waterfall:
    """Check and time the stages (all that can run here: ``variants`` None) on the same weights.

    ``rates`` are this machine's, measured now where None; on a full card they are better measured
    before the weights are made.

    Raises:
        KernelError: an unknown variant, none at all, one that was asked for and cannot run here,
            fewer than two rounds, or a state that is not of these weights.
    """
    if isinstance(variants, str):
        raise TypeError(f"variants are several names: [{variants!r:.60}] in place of it")
    wanted = list(NAMES if variants is None else dict.fromkeys(variants))
    for name in wanted:
        stage(name)
    if not wanted:
        raise KernelError(f"no variant was asked for; there are {', '.join(NAMES)}")
    if rounds < 2:
        raise KernelError(f"a median needs 2 rounds or more, not {rounds}")
    refuse_foreign(weights, state)
    rates = rates or measured_peaks(weights.device)
    say = progress or (lambda done, of, label: None)
    found = Waterfall(head=_head(weights, state, rates, model, rank))
    replays: dict[str, Replay] = {}
    parts = 2 * len(wanted) + 2
    for index, name in enumerate(wanted):
        say(index, parts, f"capturing {name}")
        try:
            replays[name] = capture(make(name, weights, state, config), state)
        except Exception as error:
            refused = _refusal(name, error)
            if refused is None:
                raise
            if variants is not None:
                raise refused from error
            found.left_out[name] = str(refused)
    own, checks = _checks(
        replays, weights, state, lambda n, name: say(len(wanted) + n, parts, f"checking {name}")
    )
    plain = _worst(own)
    limit = max(ERROR_FLOOR, ERROR_RATIO * plain)
    found.quantisation = quantisation_error(weights)
    right = {name: r for name, r in replays.items() if not checks[name].failures(limit)}
    others: dict[str, Replay] = {}
    if leave_one_out and "products" in right:
        others = _others(weights, state)
        checks |= _checks(
            others, weights, state, lambda _, name: say(parts - 2, parts, f"checking {name}")
        )[1]
    right |= {name: r for name, r in others.items() if not checks[name].failures(limit)}
    if replays:
        found.experts = _experts(list((right or replays).values())[-1], weights, state)
        if state.batch > 1:  # sequences share experts: how many there are is the routing's
            distinct = found.experts.get("per_step")
            moved = weights.step_bytes(distinct, state.batch)
            cache = weights.cache_bytes(state.context, state.batch)
            found.head |= _floor(moved, cache, rates.bandwidth)
    say(parts - 1, parts, "timing")
    # What is not right is not timed, and an interpreter's time is no speed.
    timed = {name: r for name, r in right.items() if not _interpreted(name, weights.device)}
    first, second = (time_replays(timed, state, rounds) if timed else {} for _ in range(2))
    for replay in timed.values():
        ask = getattr(replay.step, "check", None)
        if ask is not None:  # a kernel that gave up waiting did nothing afterwards, quickly
            ask()
    for name, check in checks.items():
        failures = check.failures(limit)
        row = {
            **_row(first.get(name), second.get(name), found.head),
            "passed": not failures,
            "failures": failures,
            "interpreted": _interpreted(name, weights.device),
            "check": check.to_dict(),
        }
        if name in others:
            whole, spent = found.variants["products"]["milliseconds"], row["milliseconds"]
            row["costs"] = None if spent is None or whole is None else spent - whole
            found.leave_one_out[name.removeprefix(WITHOUT)] = row
        else:
            one = stage(name)
            forms = cumulative(name) if not one.whole else {}
            found.variants[name] = {
                "title": one.title, "origin": one.origin, "forms": forms, **row
            }  # fmt: skip
    apart = [abs(second[name].median / first[name].median - 1) * 100 for name in first]
    found.tail = {
        "error_limit": limit,
        "error_gate": {
            "arithmetic": {
                "limit": limit,
                "times_plain_torch": ERROR_RATIO,
                "plain_torch": plain,
                "worst": max((_worst(checks[name]) for name in right), default=None),
                "against": AGAINST,
            },
            "quantisation": found.quantisation and found.quantisation.to_dict(),
        },
        "repeat_percent": max(apart, default=None),
        "rounds": max((times.rounds for times in first.values()), default=None),
        "in_graph": found.head["device"] == "cuda",
    }
    if profile:
        found.kernels = {
            name: rows
            for name, replay in timed.items()
            if name in PROFILED and (rows := kernel_times(replay, state))
        }
    return found


def _refusal(name: str, error: Exception) -> KernelError | None:
    """Why a variant cannot run here; None for what is a defect.

    Triton says only when it compiles or interprets a kernel that a block of it exceeds what this
    GPU or any has. An import that is cut short (Ctrl-C) is no absent module.
    """
    if isinstance(error, KernelError):
        return error
    if isinstance(error, WorkbenchError):  # Triton is not installed, or only compiles here
        return KernelError(str(error))
    if isinstance(error, ModuleNotFoundError):
        return KernelError(f"the variant {name} is not here: {error}")
    reason = " ".join(str(error).split())
    if not type(error).__module__.startswith("triton.") or not (
        type(error).__name__ == "OutOfResources" or "maximum tensor numel" in reason
    ):
        return None
    return KernelError(
        f"Triton cannot run the variant {name} at these sizes here ({reason:.200}); leave it out, "
        "or choose a smaller --model or another GPU"
    )


def _dtype(weights: RankWeights) -> str:
    return str(weights.dtype).removeprefix("torch.")


def _head(
    weights: RankWeights, state: RankState, rates: Rates, model: str, rank: int
) -> dict[str, Any]:
    moved = weights.step_bytes(batch=state.batch)
    cache = weights.cache_bytes(state.context, state.batch)
    head = {
        "kind": "decode",
        "model": model,
        "tp": weights.shapes.tp,
        "rank": rank,
        "layers": len(weights.layers),
        "of_layers": weights.config.num_hidden_layers,
        "batch": state.batch,
        "context": state.context,
        "dtype": _dtype(weights),
        "expert_weights": fp8.DESCRIPTION if weights.experts == "fp8" else _dtype(weights),
        "device": weights.device.type,
        "note": NOTE if weights.device.type == "cuda" else f"{NOTE}; {INTERPRETED}",
        "held_bytes": weights.bytes,
        "bandwidth": rates.bandwidth,
    }
    return head | _floor(moved, cache, rates.bandwidth)


def _worst(check: StepCheck) -> float:
    """The largest of the errors that the limit is for."""
    return max(check.worst, check.cache_error, check.logits_error)


def _floor(moved: float, cache: float, bandwidth: float) -> dict[str, float]:
    return {
        "weight_bytes": moved,
        "cache_bytes": cache,
        "floor_milliseconds": (moved + cache) / bandwidth * 1e3,
        "weights_floor_milliseconds": moved / bandwidth * 1e3,
    }


def _checks(
    replays: Mapping[str, Replay],
    weights: RankWeights,
    state: RankState,
    say: Callable[[int, str], None],
) -> tuple[StepCheck, dict[str, StepCheck]]:
    """The check of plain torch, which the others are allowed a multiple of, and theirs."""
    plain = replays.get("naive") or capture(RankStep(weights, state), state)
    found = []
    for index, (name, replay) in enumerate([("plain torch", plain), *replays.items()]):
        say(index, name)
        state.reset()
        found.append(check_step(replay.step, weights, state, replay))
    state.reset()
    return found[0], dict(zip(replays, found[1:], strict=True))


def _others(weights: RankWeights, state: RankState) -> dict[str, Replay]:
    """The chain of single operations, each switch in turn left as it was before its stage."""
    made = {}
    for one in STAGES:
        if not one.changes:
            continue
        forms = cumulative("products", leave_out=(one.name,))
        if one.name == "merged":  # the matrix-vector kernel needs the merged weight: four linears
            forms["qkvg"] = "split"
        made[WITHOUT + one.name] = capture(RankStep(weights, state, forms), state)
    return made


def _interpreted(name: str, device: torch.device) -> bool:
    """Whether a stage, or the chain without one, has kernels that this device interprets."""
    if device.type != "cpu":
        return False
    one = stage("products" if name.startswith(WITHOUT) else name)
    return one.whole or not {"triton", "rows"}.isdisjoint(cumulative(one.name).values())


def _row(first: Times | None, second: Times | None, head: dict[str, Any]) -> dict[str, Any]:
    """Times of two runs; None each where there is none."""
    if first is None or second is None:
        return dict.fromkeys(TIMED)
    values = (first.median, first.low, first.high, second.median)
    times = dict(zip(TIMED[:4], (1e3 * value for value in values), strict=True))
    return times | {
        "rounds": first.rounds,
        "fraction_of_floor": head["floor_milliseconds"] / times["milliseconds"],
    }


def _experts(replay: Replay, weights: RankWeights, state: RankState) -> dict[str, Any]:
    """Distinct experts that a sparse layer reads in one step, and over consecutive steps."""
    sparse = [index for index, layer in enumerate(weights.layers) if not layer.dense]
    if not sparse:
        return {}
    state.reset()
    steps = min(STEPS, state.capacity - state.context)
    seen: list[set[int]] = [set() for _ in sparse]
    each = 0
    for _ in range(steps):
        replay()
        ids = replay.step.expert_ids()[sparse].flatten(1).tolist()
        for chosen, one in zip(seen, ids, strict=True):
            chosen.update(one)
            each += len(set(one))
    state.reset()
    over = sum(len(chosen) for chosen in seen) / len(sparse)
    per_step = each / (steps * len(sparse))
    return {"per_step": per_step, "over_steps": over, "steps": steps, "of": weights.shapes.experts}


def described(found: Waterfall, rates: Rates) -> dict[str, Any]:
    """The whole document: what was measured, and on what."""
    machine = hardware.machine()
    gpus = [gpu.name for gpu in machine.gpus]
    document = found.to_dict()
    document["peaks"] = rates.to_dict()
    document["hardware"] = rates.label if not gpus else gpus[0]
    document["versions"] = dict(machine.versions)
    document["date"] = date.today().isoformat()
    document["how"] = "measured here"
    return document
