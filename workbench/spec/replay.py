"""Replay: what a policy of verification would have given on a recorded run.

A greedy continuation does not depend on what is drafted, so a record of the blocks at every
position (:mod:`workbench.spec.every_position`) determines every policy's run: which requests a step
decodes, what it would have known, how many drafts it would have verified, and what the target
would have said. Only time is not in it; a cost table gives that. :func:`replay` steps through a
:class:`~workbench.spec.recording.Recording` as the decode loop steps through a model.

A record of a run's steps determines less; what a replay needs beyond it is estimated, counted, and
said in words with the result.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import numpy as np

from workbench.errors import DraftError, TraceError
from workbench.spec.acceptance import Estimator
from workbench.spec.adaptive import (
    Fixed,
    Floats,
    Ints,
    NoDrafts,
    Oracle,
    Policy,
    Situation,
    check_policy,
    checked,
    name_of,
)
from workbench.spec.cost_table import CostTable, check_table
from workbench.spec.positions import Position
from workbench.spec.recording import BEYOND, STAND_IN, Recording
from workbench.spec.simulation_result import PlayedSteps, SimulationResult
from workbench.spec.trace import Trace

Calibration: TypeAlias = Estimator | Literal["fresh"] | None

_TOLD = 3  # reasons of a policy's failures that a result keeps
# Policies that look at no confidences: for these no estimator runs.
_BLIND = (Fixed, NoDrafts, Oracle)


def replay(
    trace: Trace | Recording | Iterable[Position],
    policy: Policy,
    table: CostTable,
    *,
    concurrency: int | None = None,
    estimator: Calibration = "fresh",
    drafting: bool = True,
    most_rows: int | None = None,
    seed: int = 0,
) -> SimulationResult:
    """What ``policy`` would have given on the recorded run, step by step.

    Requests join in order of arrival, each as soon as a place is free. A step knows what the engine
    would: confidences of the drafts at hand, and for the budget those of the step before, which for
    a request that just joined are 1 everywhere. Without an every-position trace see
    :attr:`SimulationResult.estimated_how`.

    Args:
        trace: a trace, its :class:`Recording`, or positions.
        policy: what decides.
        table: what a step costs.
        concurrency: sequences decoded together; all at once when None.
        estimator: what turns scores into confidences, learning as it goes (it is changed): a fresh
            one as the engine starts with, one of the caller's, or None for the drafter's own
            confidences.
        drafting: False is plain decoding: nothing is drafted, no policy asked, no draft paid for.
            (:class:`NoDrafts` alone decodes plainly at the cost of drafting.)
        most_rows: most rows of one verification, as in :class:`Situation`.
        seed: of what a trace of steps lacks.

    Raises:
        TraceError: the trace has no positions or draft steps, or lacks the scores or confidences
            that the policy needs.
        DraftError: a concurrency below 1, no policy, an estimator of another number of slots, no
            cost table.
    """
    recording = trace if isinstance(trace, Recording) else Recording.of(trace, seed=seed)
    if concurrency is None:
        concurrency = recording.requests
    order = np.arange(recording.requests)
    return play(
        recording,
        order,
        policy,
        table,
        concurrency,
        estimator=estimator,
        drafting=drafting,
        most_rows=most_rows,
    )


def play(
    recording: Recording,
    order: Ints,
    policy: Policy,
    table: CostTable,
    concurrency: int,
    *,
    estimator: Calibration = "fresh",
    drafting: bool = True,
    most_rows: int | None = None,
) -> SimulationResult:
    """Decode the recording's requests in this order of arrival; :func:`replay` explains the rest.

    Args:
        order: int ``[n]``, n at least 1: requests of the recording, any of them any number of
            times.

    Raises:
        TraceError, DraftError: as :func:`replay`.
    """
    check_number("concurrency", concurrency)
    check_policy(policy)
    check_table(table, "a replay")
    slots = recording.slots
    calibrated = _estimator(estimator, policy, recording) if drafting else None
    width, known_at, left_at = recording.width, recording.known, recording.left
    exact = recording.exact
    places = min(concurrency, len(order))
    verify = table.verify_ms(np.arange(places * (slots + 1) + 1)).tolist()
    draft = table.draft_ms(np.arange(places + 1)).tolist()
    ones, yes = np.ones(places, np.int64), np.ones(places, np.bool_)

    request = np.asarray(order[:places], np.int64)
    number = np.arange(places)  # in the order of arrival
    waiting = places
    at, end = recording.first[request], recording.end[request]
    stale: Floats = np.ones((places, slots))
    came = np.zeros(places)
    tpot = np.empty(len(order))
    rows_of: list[tuple[int, int, int, int, int, int, int, float]] = []
    clock, events, guessed, unsure_missed = 0.0, 0, 0, False
    failures: dict[str, None] = {}
    failed = 0

    while (alive := len(at)) > 0:
        ms, one = 0.0, ones[:alive]
        room = np.minimum(width.take(at), left_at.take(at) - 1) if drafting else one - 1
        if room.any():
            known = np.minimum(known_at.take(at), room)
            live, feature, predicted = _confidences(recording, at, calibrated, stale)
            situation = Situation(
                drafted=room,
                plain=one,
                samples=yes[:alive],
                stale=stale,
                live=live,
                most_rows=most_rows,
                known=known,
            )
            decision = checked(policy, situation)
            admitted, budget = decision.admitted, decision.budget
            if decision.failed:
                failed += 1
                if len(failures) < _TOLD:
                    failures[decision.reason] = None
            accepted = np.minimum(known, admitted)
            if calibrated is not None:
                calibrated.observe(predicted, feature, accepted, admitted)
            stale = live
            ms = draft[alive]
            has = room > 0
            events += int(np.count_nonzero(has))
            if not exact:
                own, sure = recording.own[at], recording.sure[at]
                guessed += int(np.count_nonzero(has & (~own | (admitted > sure))))
                unsure_missed |= bool((has & (~own | ((sure < room) & (admitted < room)))).any())
            could, got = int(known.sum()), int(accepted.sum())
            drafted = int(width.take(at).dot(has))
            given = np.minimum(accepted + 1, end - at)
        else:
            could = budget = got = drafted = 0
            given = one
        ms += verify[alive + budget]
        clock += ms
        tokens = int(given.sum())
        rows_of.append((alive, drafted, budget, got, could - got, got + alive - tokens, tokens, ms))
        at = at + given
        gone = np.flatnonzero(at >= end)
        if not gone.size:
            continue
        first = recording.first[request[gone]]
        tpot[number[gone]] = (clock - came[gone]) / (end[gone] - first)
        joining = min(len(gone), len(order) - waiting)
        if joining:  # those that come take the places of those that went
            place = gone[:joining]
            number[place] = np.arange(waiting, waiting + joining)
            request[place] = order[waiting : waiting + joining]
            waiting += joining
            at[place], end[place] = recording.first[request[place]], recording.end[request[place]]
            came[place] = clock
            stale = stale.copy()
            stale[place] = 1.0
        if joining < len(gone):
            keep = np.ones(alive, np.bool_)
            keep[gone[joining:]] = False
            request, number, at, end = request[keep], number[keep], at[keep], end[keep]
            came, stale = came[keep], stale[keep]

    return SimulationResult.of(
        PlayedSteps.of(rows_of),
        tpot,
        policy=name_of(policy) if drafting else "none",
        concurrency=places,
        events=events,
        label=f"acceptance {recording.label}; times {table.label or 'of a table without a label'}",
        estimated_how=_how(guessed, events, unsure_missed),
        estimated_events=guessed,
        failures=tuple(failures),
        failed_steps=failed,
    )


def check_number(name: str, value: object, least: int = 1, most: int | None = None) -> None:
    """Raise DraftError unless ``value`` is a whole number from ``least`` to ``most``."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):  # type: ignore[operator]
        upto = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise DraftError(f"{name} must be a whole number {upto}, not {value!r:.60}")


def _confidences(
    recording: Recording, at: Ints, estimator: Estimator | None, blind: Floats
) -> tuple[Floats, Any, Any]:
    """Confidences of the drafts at hand, their features, and the estimator's own numbers."""
    if estimator is not None and recording.features is not None:
        feature = recording.features.take(at, 0)
        predicted = estimator.predict(feature)
        return predicted.astype(np.float64), feature, predicted
    if recording.confidences is not None:
        return recording.confidences.take(at, 0), None, None
    return blind, None, None  # of a policy that looks at none


def _estimator(asked: Calibration, policy: Policy, recording: Recording) -> Estimator | None:
    """The estimator of a run, None where confidences are the drafter's own or not looked at."""
    blind = type(policy) in _BLIND
    if asked is None:
        if recording.confidences is None and not blind:
            raise TraceError(
                f"{recording.label} has no confidences, which policy {name_of(policy)} decides by; "
                "record it again with detail"
            )
        return None
    made = Estimator(recording.slots) if asked == "fresh" else asked
    if not isinstance(made, Estimator):
        raise DraftError(f"estimator is an Estimator, 'fresh' or None, not {asked!r:.60}")
    if made.slots != recording.slots:
        raise DraftError(
            f"the estimator has {made.slots} slots, the recorded blocks {recording.slots} drafts; "
            f"give Estimator({recording.slots})"
        )
    if recording.features is None:
        if blind:
            return None
        raise TraceError(
            f"{recording.label} has no scores, which an estimator learns from; record it again "
            "with detail, or give estimator=None for the drafter's own confidences"
        )
    # One of the caller's learns under any policy; a fresh one only where it is looked at.
    return None if blind and asked == "fresh" else made


def _how(guessed: int, events: int, unsure_missed: bool) -> str:
    """What of a run rests on more than the record determines, and on what; empty if nothing."""
    if guessed:
        what = f"{guessed:,} of {events:,} verdicts, and with them which requests a step decodes"
    elif unsure_missed:
        what = "missed tokens alone"
    else:
        return ""
    return f"{what}: {STAND_IN}; {BEYOND}"
