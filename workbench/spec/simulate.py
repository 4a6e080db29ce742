"""Simulation: continuous batching of many requests, by recorded acceptance and a cost table.

:func:`simulate` draws requests from a :class:`~workbench.spec.recording.Recording` and decodes them
as :func:`~workbench.spec.replay.replay` does, at any concurrency: there is always a request waiting
to take a place that becomes free, until the last have come. Prefills cost nothing here.

Where no recording is at hand, :func:`parametric` makes one up from the conditional acceptance of
each slot. Its blocks judge a text, as real ones do: how hard a token is, and whether it can be
guessed at all, is the token's own and the same for all blocks that reach it, so a policy that trims
before an easy stretch finds the stretch again in the next block.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from workbench.errors import DraftError
from workbench.files import expand, read_text
from workbench.spec.adaptive import Adaptive, Fixed, NoDrafts, Oracle, Policy
from workbench.spec.cost_table import CostTable
from workbench.spec.recorded import RECORDED
from workbench.spec.recording import Recording
from workbench.spec.replay import Calibration, check_number, play
from workbench.spec.simulation_result import SimulationResult

Origin = Literal["measured", "recorded", "modelled"]
MOST_CONCURRENCY = 512
MOST_REQUESTS = 1_000_000  # of one simulation, which keeps every step
_MOST_SPREAD = 1_000_000  # of log-odds, far beyond what a probability tells apart
_MOST_ODDS = 1 << 26  # numbers of a recording made up: half a gigabyte in float64
DEFAULT_TABLE = "h200-rank"

# Of blocks that beam-tiny's drafter made on the eight prompts of ``bench_prompts``, greedily, 128
# tokens each: standard deviation of the log-odds of acceptance between requests (means) and of
# tokens within them, and the slope and intercept of the log-odds over the estimator's feature.
BETWEEN, WITHIN, SLOPE, INTERCEPT = 0.4, 2.4, 0.86, -0.2

_CURVES = ("draft", "verify")
_CARD = Path(__file__).parents[1] / "model" / "zoo" / "beam-tiny" / "dflash2" / "training.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTable:
    """A cost table from a file, and what each of its curves is.

    Attributes:
        name: as it was asked for.
        table: the curves.
        draft, verify: ``measured``, ``recorded`` or ``modelled``, and what more is to be said, as
            in "recorded up to 128 rows, modelled above"; ``recorded`` where a file does not say.
        notes: what its figures rest on, a sentence each.
    """

    name: str
    table: CostTable
    draft: str
    verify: str
    notes: tuple[str, ...]


def cost_tables() -> tuple[str, ...]:
    """Names of the tables that come with the workbench."""
    return tuple(sorted(path.stem.removeprefix("cost-") for path in RECORDED.glob("cost-*.json")))


def cost_table(name: str) -> NamedTable:
    """A recorded cost table by its name, or the user's own from a JSON file.

    A file has what :meth:`CostTable.to_dict` gives; ``origins`` (``draft`` and ``verify``) and
    ``notes`` are optional.

    Raises:
        DraftError: there is no such table or file, or it is no cost table.
        FileError: the file cannot be read.
    """
    known = cost_tables()
    where = RECORDED / f"cost-{name}.json" if name in known else expand(name)
    if not os.path.exists(where):
        raise DraftError(
            f"there is no cost table {name!r:.80}; give {' or '.join(known)}, or a JSON file that "
            "is there"
        )
    try:
        data = json.loads(read_text(str(where)))
    except (ValueError, RecursionError) as error:  # ValueError: a number of thousands of digits
        raise DraftError(f"{where} is no cost table: it is not JSON ({error})") from error
    if not isinstance(data, Mapping):
        raise DraftError(f"{where} is no cost table: give an object with draft and verify curves")
    try:
        table = CostTable.from_dict({"captured": 0, "label": str(where)} | dict(data))
    except DraftError as error:
        raise DraftError(f"{where} is no cost table: {error}") from error
    origins = data.get("origins", {})
    kinds: list[Any] = [None, None]
    if isinstance(origins, Mapping):
        kinds = [origins.get(curve, "recorded") for curve in _CURVES]
    notes = data.get("notes", [])
    if not all(isinstance(k, str) and k.partition(" ")[0] in get_args(Origin) for k in kinds):
        raise DraftError(
            f"{where}: origins must say of draft and verify each {' or '.join(get_args(Origin))}"
        )
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise DraftError(f"{where}: notes must be a list of sentences")
    return NamedTable(name=name, table=table, draft=kinds[0], verify=kinds[1], notes=tuple(notes))


def parametric(
    acceptance: Sequence[float],
    *,
    requests: int = 512,
    tokens: int = 128,
    between: float = BETWEEN,
    within: float = WITHIN,
    slope: float = SLOPE,
    intercept: float = INTERCEPT,
    seed: int = 0,
    label: str = "modelled: slots' conditional acceptance as given",
) -> Recording:
    """A recording made up from the conditional acceptance of each slot.

    The log-odds that the draft in slot k of a block at position p is accepted, if all before it
    were, is ``b_k + between z_request + within e_(p + k)``, z and e standard normal; ``b_k`` is
    such that over all positions the share accepted is ``acceptance[k]``. One uniform number a token
    decides it in every block that has the token. The feature is what an estimator of this slope and
    intercept turns into exactly these odds.

    Args:
        acceptance: of each slot, between 0 and 1 (exclusive).
        requests, tokens: how many requests, and new tokens of each behind its first.
        between, within: spread of the log-odds between requests, and of tokens in them.
        slope, intercept: of the log-odds over the feature.
        seed: of all draws.
        label: where these parameters are from.

    Raises:
        DraftError: a parameter is out of its range.
    """
    check_number("requests", requests)
    check_number("tokens", tokens)
    check_number("seed", seed, 0)
    try:
        rates = np.asarray(acceptance, np.float64)
        spreads = np.array([between, within, slope, intercept], np.float64)
    except (TypeError, ValueError, OverflowError):
        raise DraftError("acceptance, spreads, slope and intercept are numbers") from None
    if rates.ndim != 1 or not rates.size or not ((rates > 0) & (rates < 1)).all():
        raise DraftError(
            f"acceptance is a probability between 0 and 1 for each slot, not {acceptance!r:.80}"
        )
    if (numbers := requests * (tokens + rates.size) * rates.size) > _MOST_ODDS:
        raise DraftError(
            f"{requests:,} requests of {tokens:,} tokens and {rates.size} slots are {numbers:,} "
            f"numbers, more than are made up at once ({_MOST_ODDS:,}); ask for fewer"
        )
    # Written so that NaN, too, is outside.
    if not (np.abs(spreads) <= _MOST_SPREAD).all() or min(between, within) < 0 or slope < 1e-6:
        raise DraftError(
            "spreads are at least 0 and the slope at least 1e-06, all of them and the intercept at "
            f"most {_MOST_SPREAD:,}"
        )
    slots = len(rates)
    rng = np.random.default_rng(seed)
    hard = between * rng.standard_normal((requests, 1))
    hard = hard + within * rng.standard_normal((requests, tokens + slots))
    # The log-odds of the uniform number that decides: accepted where the slot's are above.
    bar = rng.logistic(size=(requests, tokens + slots))
    odds = np.empty((requests, tokens, slots))
    reached = np.ones((requests, tokens), np.bool_)
    known = np.zeros((requests, tokens), np.int64)
    for k, rate in enumerate(rates):
        part = hard[:, k : k + tokens]
        margin = (part - bar[:, k : k + tokens])[reached]
        # Accepted where margin > -b: b is a quantile, so that the share is the rate.
        b = -float(np.quantile(margin, 1 - rate)) if margin.size else 0.0
        odds[:, :, k] = part + b
        reached &= part - bar[:, k : k + tokens] > -b
        known += reached
    with np.errstate(over="ignore"):  # exp of a large number is inf, and the confidence 0
        confidences = 1 / (1 + np.exp(-odds.reshape(-1, slots)))
    first = np.arange(requests) * tokens
    flat = odds.reshape(-1, slots)
    positions = requests * tokens
    return Recording(
        first=first,
        end=first + tokens,
        left=np.tile(np.arange(tokens, 0, -1), requests),
        width=np.full(positions, slots),
        known=known.ravel(),
        sure=np.full(positions, slots),
        own=np.ones(positions, np.bool_),
        features=((flat - intercept) / slope).astype(np.float32),
        confidences=confidences,
        label=label,
    )


def card_source(*, requests: int = 512, tokens: int = 128, seed: int = 0) -> Recording:
    """:func:`parametric` with what beam-tiny's drafter reached on held-out code, by its model card.

    The card's accuracy of a slot (right choices behind a right predecessor, over all positions) is
    taken as its conditional acceptance, which is only near: it counts blocks that a run would have
    lost before.

    Raises:
        DraftError: the card is missing or lacks it.
    """
    try:
        rates = json.loads(read_text(str(_CARD)))["held_out"]["code"]["accuracy"]
    except (ValueError, KeyError, TypeError) as error:
        raise DraftError(
            f"{_CARD} lacks the accuracy on held-out code; give a trace instead"
        ) from error
    return parametric(
        rates,
        requests=requests,
        tokens=tokens,
        seed=seed,
        label="modelled: slots' acceptance from the model card of beam-tiny's drafter "
        "(held-out code), spread from eight prompts",
    )


def simulate(
    source: Recording,
    policy: Policy,
    table: CostTable,
    *,
    concurrency: int,
    requests: int,
    estimator: Calibration = "fresh",
    drafting: bool = True,
    most_rows: int | None = None,
    seed: int = 0,
) -> SimulationResult:
    """Decode requests drawn from a recording, ``concurrency`` at a time.

    Args:
        source: of a trace (:meth:`Recording.of`), or :func:`parametric`.
        policy, table, estimator, drafting, most_rows: as for :func:`replay`.
        concurrency: sequences decoded together, 1 to 512.
        requests: how many, 1 to 1,000,000, drawn with replacement; the first ``concurrency`` join
            at once. The last ones leave places empty, so many times the concurrency shows steady
            load.
        seed: of the draw. The same seed is the same requests under every policy.

    Raises:
        TraceError, DraftError: as :func:`replay`, or a number out of its range.
    """
    check_number("concurrency", concurrency, 1, MOST_CONCURRENCY)
    check_number("requests", requests, 1, MOST_REQUESTS)
    check_number("seed", seed, 0)
    if not isinstance(source, Recording):
        raise DraftError(
            f"a simulation draws from a Recording, Recording.of(trace) for one, not {source!r:.60}"
        )
    order = np.random.default_rng(seed).integers(source.requests, size=requests)
    return play(
        source,
        order,
        policy,
        table,
        concurrency,
        estimator=estimator,
        drafting=drafting,
        most_rows=most_rows,
    )


def compare(
    source: Recording,
    table: CostTable,
    *,
    concurrency: int,
    requests: int,
    estimator: Calibration = "fresh",
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, SimulationResult]:
    """``none`` (plain decoding), ``fixed``, ``adaptive`` and ``oracle`` on the same requests.

    Args:
        estimator: of the adaptive policy, as for :func:`replay`.
        progress: told after each policy how many are done, of how many.

    Raises:
        TraceError, DraftError: as :func:`simulate`.
    """
    policies: dict[str, Policy] = {
        "none": NoDrafts(),
        "fixed": Fixed(),
        "adaptive": Adaptive(table),
        "oracle": Oracle(table),
    }
    results: dict[str, SimulationResult] = {}
    for name, policy in policies.items():
        results[name] = simulate(
            source,
            policy,
            table,
            concurrency=concurrency,
            requests=requests,
            estimator=estimator if name == "adaptive" else "fresh",
            drafting=name != "none",
            seed=seed,
        )
        if progress is not None:
            progress(len(results), len(policies))
    return results


def default_requests(concurrency: int) -> int:
    """Requests that show steady load: sixteen for each place, at least 256."""
    check_number("concurrency", concurrency, 1, MOST_CONCURRENCY)
    return max(256, 16 * concurrency)
