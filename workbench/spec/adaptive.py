"""Adaptive verification: how many of a step's draft tokens are worth the target's time.

A draft token brings its *survival*, the probability that it and all before it are accepted, and
costs a row of the target's pass. The *budget*, draft tokens of a step over all requests, is the one
with the most expected tokens a millisecond; who gets it is decided by survival. As in vLLM 0.33.0
the budget comes from *stale* confidences, a draft step older than the drafts, and the allocation
from the *live* ones. Only the drafts' prefix ever decides, so decoding stays lossless.

Fixed length, none, and the oracle are policies of the same interface, :class:`Policy`; one of your
own needs a ``name`` and ``decide``. :func:`checked` is how a policy is called where nothing may
stop.

Shape letters: R requests, K slots, B the largest budget possible. What is admitted of a request is
always a prefix of its drafts, so it is a number.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from workbench.errors import DraftError
from workbench.spec.cost_table import CostTable, check_table
from workbench.spec.thrift import Thrift

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Situation:
    """What is known of a step when its drafts are to be trimmed. The arrays can be read only.

    Attributes:
        drafted: draft tokens of each request, 0 to K; int64 ``[R]``.
        plain: rows of each request that are no drafts, 1 while it decodes and the size of a chunk
            while its prompt is read; int64 ``[R]``.
        samples: which requests get a token of their own this step; bool ``[R]``.
        stale: calibrated conditional confidences, as old as they are when the budget is made;
            float64 ``[R, K]``. Behind the drafted slots anything may stand.
        live: the same, of these drafts.
        most_rows: rows that a verification of trimmed drafts may have, None for any number; a row
            of each request is among them.
        known: how many drafts of each request the target would accept if it verified all; int64
            ``[R]``, None where nobody knows, as in live decoding.

    Raises:
        DraftError: shapes do not fit, or a number is out of its range.
    """

    drafted: Ints
    plain: Ints
    samples: NDArray[np.bool_]
    stale: Floats
    live: Floats
    most_rows: int | None = None
    known: Ints | None = None

    def __post_init__(self) -> None:
        """Check shapes and ranges; what the confidences are worth, the policy that uses them."""
        drafted = _read_only(self, "drafted", np.int64)
        plain = _read_only(self, "plain", np.int64)
        samples = _read_only(self, "samples", np.bool_)
        stale = _read_only(self, "stale", np.float64)
        live = _read_only(self, "live", np.float64)
        known = None if self.known is None else _read_only(self, "known", np.int64)
        requests = (len(drafted),) if drafted.ndim == 1 else ()
        for name, values in (("plain", plain), ("samples", samples), ("known", known)):
            if values is not None and values.shape != requests:
                raise DraftError(
                    f"drafted and {name} have a number for each request, "
                    f"not shapes {list(drafted.shape)} and {list(values.shape)}"
                )
        if stale.ndim != 2 or stale.shape[:1] != requests or stale.shape != live.shape:
            raise DraftError(
                f"stale and live confidences of {len(drafted)} requests are [requests, slots], "
                f"not {list(stale.shape)} and {list(live.shape)}"
            )
        if self.most_rows is not None and not _count(self.most_rows):
            raise DraftError(
                f"the most rows of a verification are 0 or more, not {self.most_rows!r:.60}"
            )
        if not len(drafted):
            return
        if not (drafted.min() >= 0 and drafted.max() <= stale.shape[1]):
            raise DraftError(f"a request has 0 to {stale.shape[1]} drafts, not {drafted.tolist()}")
        if plain.min() < 0:
            raise DraftError(f"rows that are no drafts are 0 or more, not {plain.tolist()}")
        if known is not None and not ((known >= 0) & (known <= drafted)).all():
            raise DraftError("of each request 0 to all of its drafts are known to be accepted")

    @classmethod
    def of_step(
        cls, drafted: Ints, plain: Ints, samples: NDArray[np.bool_], stale: Floats, live: Floats
    ) -> Situation:
        """Of arrays that are right as they are, and given up to it: the decode loop's, whose time
        checking them again would take. None of them is copied."""
        made = object.__new__(cls)
        put = object.__setattr__
        for name, values in (
            ("drafted", drafted), ("plain", plain), ("samples", samples), ("stale", stale),
            ("live", live),
        ):  # fmt: skip
            values.flags.writeable = False
            put(made, name, values)
        put(made, "most_rows", None)
        put(made, "known", None)
        return made


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """What a policy made of a situation.

    Attributes:
        admitted: drafts to verify of each request; int64 ``[R]``.
        budget: their sum.
        objective: expected tokens a millisecond for budgets 0 to B; float64 ``[B + 1]``, empty
            where the policy weighs nothing.
        survival: by which drafts were admitted, -inf behind the drafted slots; float64 ``[R, K]``,
            None where the policy has none.
        reason: why, in a few words for the view.
        failed: the policy failed and this is fixed verification in its place. :func:`checked` alone
            says so, whatever a policy sets.
    """

    admitted: Ints
    budget: int
    objective: Floats = field(default_factory=lambda: np.empty(0))
    survival: Floats | None = None
    reason: str = ""
    failed: bool = False


class Policy(Protocol):
    """How drafts are chosen for verification."""

    @property
    def name(self) -> str:
        """For legends and messages."""

    def decide(self, situation: Situation) -> Decision:
        """Of each request, how many drafts are verified."""


# --- the arithmetic -------------------------------------------------------------------------------


def survival(confidences: Floats, drafted: Ints) -> Floats:
    """Probability that a slot and all before it are accepted; -inf behind the drafted slots.

    Args:
        confidences: conditional, ``[R, K]``; read for drafted slots only.
        drafted: ``[R]``.

    Raises:
        DraftError: shapes do not fit, or a drafted slot's confidence is not from 0 to 1.
    """
    c, d = np.asarray(confidences, np.float64), np.asarray(drafted)
    if c.ndim != 2 or d.shape != c.shape[:1]:
        raise DraftError(
            "survival needs confidences [requests, slots] and a number of drafts for each request, "
            f"not shapes {list(c.shape)} and {list(d.shape)}"
        )
    if not c.size:
        return c.copy()
    whole = d.min() >= c.shape[1]  # as most steps are: nothing to leave out
    if not whole:
        there = np.arange(c.shape[1]) < d[:, None]
        c = np.where(there, c, 0.0)
    # Written so that NaN, too, is outside.
    if not (c.min() >= 0.0 and c.max() <= 1.0):
        row, slot = np.argwhere(~((c >= 0.0) & (c <= 1.0)))[0].tolist()
        raise DraftError(
            f"the confidence of slot {slot} of the step's request {row} is {c[row, slot]:g}, "
            "not a probability"
        )
    product = c.cumprod(1)
    return product if whole else np.where(there, product, -np.inf)


def budget_of(
    survival: Floats,
    drafted: Ints,
    samples: NDArray[np.bool_],
    plain: Ints,
    table: CostTable,
    most_rows: int | None = None,
) -> tuple[int, Floats]:
    """The budget with the most expected tokens a millisecond, the smallest of equal ones.

    With s the survivals of all slots in falling order, budget b gives
    ``(requests that sample + s_1 + ... + s_b) / (draft_ms(R) + verify_ms(plain rows + b))``. The
    largest is all drafts, or what ``most_rows`` leaves beside a row of each request.

    Args:
        survival: of :func:`survival`, float64 ``[R, K]``.
        drafted, samples, plain, most_rows: as in :class:`Situation`.
        table: what the step costs.

    Returns:
        The budget, and this objective for every budget; float64 ``[B + 1]``.

    Raises:
        DraftError: shapes do not fit, or a subclass of the table gives times that are no numbers.
    """
    requests = len(survival)
    if not len(drafted) == len(samples) == len(plain) == requests:
        raise DraftError("a budget needs survival, drafts, rows and samples of the same requests")
    largest = int(np.sum(drafted))
    if most_rows is not None:
        largest = min(largest, max(0, most_rows - requests))
    # Slots that were not drafted are -inf and come last; one request's are in falling order.
    order = survival[0] if requests == 1 else np.sort(survival, axis=None)[::-1]
    expected = np.empty(largest + 1)
    expected[0] = sampling = np.count_nonzero(samples)
    if largest:
        after = expected[1:]
        np.cumsum(order[:largest], out=after)
        after += sampling
    first = int(np.sum(plain))
    objective = expected / (table.verify_span(first, largest + 1) + table.draft_ms(requests))
    budget = int(objective.argmax())  # of the first NaN, where there is one
    if not isfinite(objective[budget]):
        raise DraftError("the cost table gives times by which no budget can be weighed")
    return budget, objective


def allocate(live_survival: Floats, drafted: Ints, budget: int) -> Ints:
    """Drafts admitted of each request: the ``budget`` slots of highest survival; int64 ``[R]``.

    Survival never rises along a request, so they are prefixes. Of equal survivals the earlier slot
    comes first, and within a slot the request of the lower row. (The engine says nothing of ties.)

    Raises:
        DraftError: shapes do not fit, or the budget is not from 0 to all drafts.
    """
    d, total = np.asarray(drafted, np.int64), int(np.sum(drafted))
    if live_survival.ndim != 2 or d.shape != live_survival.shape[:1]:
        raise DraftError("an allocation needs survival and drafts of the same requests")
    if not 0 <= budget <= total:
        raise DraftError(f"a budget for {total} drafts is from 0 to {total}, not {budget}")
    if budget == total:
        return d.copy()
    if budget == 0:
        return np.zeros_like(d)
    if len(d) == 1:
        return np.array([budget], np.int64)
    flat = live_survival.T.ravel()  # slot by slot, so that an earlier slot is found first
    least = np.partition(flat, flat.size - budget)[flat.size - budget]
    admitted: Ints = np.count_nonzero(live_survival > least, axis=1)
    # As many of the slots at the border as are left; all those above it are in.
    equal = np.flatnonzero(flat == least)[: budget - int(admitted.sum())]
    return admitted + np.bincount(equal % len(d), minlength=len(d))


# --- policies -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fixed:
    """Verify all drafts, or at most so many of each request.

    Attributes:
        drafts: the most of a request, None for all.
    """

    drafts: int | None = None

    def __post_init__(self) -> None:
        """Check the number."""
        if self.drafts is not None and not _count(self.drafts):
            raise DraftError(f"a fixed number of drafts is 0 or more, not {self.drafts!r:.60}")

    @property
    def name(self) -> str:
        """Fixed, with its number."""
        return "fixed" if self.drafts is None else f"fixed {self.drafts}"

    def decide(self, situation: Situation) -> Decision:
        """Whatever the confidences."""
        if self.drafts is None:
            admitted, reason = situation.drafted.copy(), "all drafts"
        else:
            admitted = np.minimum(situation.drafted, min(self.drafts, situation.live.shape[1]))
            reason = f"at most {self.drafts} drafts a request"
        return Decision(admitted=admitted, budget=int(admitted.sum()), reason=reason)


@dataclass(frozen=True, slots=True)
class NoDrafts:
    """Verify none: plain decoding, at the cost of drafting all the same."""

    name = "none"

    def decide(self, situation: Situation) -> Decision:
        """Nothing."""
        return Decision(admitted=np.zeros_like(situation.drafted), budget=0, reason="no drafts")


@dataclass(frozen=True, slots=True)
class Adaptive:
    """The engine's policy: the budget from stale confidences, its allocation from live ones.

    Attributes:
        table: what a step costs.
        frugal: whether the decode loop may rest, verifying all drafts for a while, where deciding
            costs more than it promises: at one sequence a step is short and its rows are cheap. The
            engine, whose decisions cost next to nothing of a step, always decides.
        thrift: of a frugal one, which its runs share; a policy of your own that has one may rest,
            too.
    """

    table: CostTable
    frugal: bool = False
    thrift: Thrift | None = field(init=False, default=None, repr=False, compare=False)
    name = "adaptive"

    def __post_init__(self) -> None:
        """Check the table."""
        check_table(self.table, f"policy {self.name}")
        if self.frugal:
            object.__setattr__(self, "thrift", Thrift())  # it is frozen for everybody else

    def decide(self, situation: Situation) -> Decision:
        """Most expected tokens a millisecond.

        Raises:
            DraftError: a confidence of a drafted slot is no probability.
        """
        if len(situation.drafted) == 1:
            return _alone(situation, self.table)
        stale = survival(situation.stale, situation.drafted)
        live = survival(situation.live, situation.drafted)
        return _best(situation, stale, live, self.table)


@dataclass(frozen=True, slots=True)
class Oracle:
    """What the engine's policy would do if it knew what will be accepted: no policy does better
    in a step, whatever it knows.

    Attributes:
        table: what a step costs.
    """

    table: CostTable
    name = "oracle"

    def __post_init__(self) -> None:
        """Check the table."""
        check_table(self.table, f"policy {self.name}")

    def decide(self, situation: Situation) -> Decision:
        """Most tokens a millisecond.

        Raises:
            DraftError: the situation does not say what would be accepted.
        """
        if situation.known is None:
            raise DraftError(
                "the oracle needs a run in which every draft was verified; "
                "nobody knows what will be accepted while decoding"
            )
        slots = np.arange(situation.live.shape[1])
        known = np.where(slots < situation.known[:, None], 1.0, 0.0)
        known[slots >= situation.drafted[:, None]] = -np.inf
        return _best(situation, known, known, self.table)


def check_policy(policy: object) -> None:
    """Raise DraftError unless this is a policy: it can be asked, and has a name.

    A name that fails is one: :func:`name_of` has another for it.
    """
    if isinstance(policy, type):
        raise DraftError(
            f"a policy is asked as an object, and {policy.__name__} is its class; give "
            f"{policy.__name__}(...)"
        )
    try:
        asked = callable(policy.decide)  # type: ignore[attr-defined]
        named = "name" in dir(policy) or hasattr(policy, "name")
    except Exception:  # a user's code may raise anything
        asked = named = False
    if not (asked and named):
        raise DraftError(
            f"a policy has a name and decide(situation), and {type(policy).__name__} lacks "
            "one; take Fixed(), Adaptive(table) or write one"
        )


def name_of(policy: object) -> str:
    """A policy's name, on one line of at most 80 characters; its type's where it has none."""
    try:
        return _line(policy.name, 80)  # type: ignore[attr-defined]
    except Exception:  # a user's code may raise anything
        return type(policy).__name__


_OURS = (Fixed, NoDrafts, Adaptive, Oracle)


def checked(policy: Policy, situation: Situation) -> Decision:
    """A policy's decision; where it fails that of :class:`Fixed`, ``failed`` and its reason set.

    It fails if it raises, or if what it returns is no :class:`Decision` whose admitted drafts are
    from 0 to the drafted ones of each request, sum up to its budget, and whose objective and
    survival, where it has them, have their shapes and no NaN. A policy that does not return at all
    cannot be helped.
    """
    # What is ours is sound as it is made; checking it is a tenth of what deciding costs.
    ours = type(policy) in _OURS
    # A policy that insists can write to the situation; what it returns is held to this.
    drafted = situation.drafted if ours else situation.drafted.copy()
    shape = situation.live.shape
    try:
        decision = policy.decide(situation)
        return decision if ours else _sound(decision, drafted, shape)
    except Exception as error:  # a user's code may raise anything
        reason = (
            f"policy {name_of(policy)} failed: {_words(error)}; fixed verification in its place"
        )
        admitted = drafted.copy()
        return Decision(admitted=admitted, budget=int(admitted.sum()), reason=reason, failed=True)


def _best(situation: Situation, expected: Floats, ranked: Floats, table: CostTable) -> Decision:
    s = situation
    budget, objective = budget_of(expected, s.drafted, s.samples, s.plain, table, s.most_rows)
    admitted = allocate(ranked, s.drafted, budget)
    return Decision(
        admitted=admitted,
        budget=budget,
        objective=objective,
        survival=ranked,
        reason=_reason(budget, int(s.drafted.sum())),
    )


def _alone(situation: Situation, table: CostTable) -> Decision:
    """:func:`_best` of a single request, number by number, with the same results to the last bit.

    For so few numbers a call of numpy costs more than the arithmetic, and a step of one sequence is
    so short that it counts.
    """
    s = situation
    drafted, slots = int(s.drafted[0]), s.live.shape[1]
    largest = drafted if s.most_rows is None else min(drafted, max(0, s.most_rows - 1))
    stale, live = _products(s.stale[0], drafted), _products(s.live[0], drafted)
    if stale is None or live is None:  # one is no probability: say which
        stale = survival(s.stale, s.drafted)[0].tolist()
        live = survival(s.live, s.drafted)[0].tolist()
    samples = int(s.samples[0])
    draft_ms = table.draft_ms(1)
    costs = table.verify_span(int(s.plain[0]), largest + 1).tolist()
    objective = [samples / (costs[0] + draft_ms)]
    total, budget = 0.0, 0
    for b in range(1, largest + 1):
        total += stale[b - 1]
        objective.append((total + samples) / (costs[b] + draft_ms))
        if objective[b] > objective[budget]:
            budget = b
    return Decision(
        admitted=np.array([budget]),
        budget=budget,
        objective=np.array(objective),
        survival=np.array([live + [-np.inf] * (slots - drafted)]),
        reason=_reason(budget, drafted),
    )


def _products(confidences: Floats, drafted: int) -> list[float] | None:
    """Running product of the drafted slots' confidences; None if one is no probability."""
    product, products = 1.0, []
    for c in confidences[:drafted].tolist():
        if not 0.0 <= c <= 1.0:
            return None
        product *= c
        products.append(product)
    return products


def _reason(budget: int, drafted: int) -> str:
    return f"{budget} of {drafted} drafts give the most tokens a millisecond"


def _sound(decision: object, drafted: Ints, shape: tuple[int, ...]) -> Decision:
    if not isinstance(decision, Decision):
        raise DraftError(f"it returned {type(decision).__name__}, not a Decision")
    admitted = np.asarray(decision.admitted)
    if admitted.shape != drafted.shape:
        raise DraftError(
            f"it admitted drafts of shape {list(admitted.shape)} for {len(drafted)} requests"
        )
    if admitted.size and admitted.dtype.kind not in "iu":
        raise DraftError(f"admitted drafts are whole numbers, not {admitted.dtype}")
    admitted = admitted.astype(np.int64)
    if not ((admitted >= 0) & (admitted <= drafted)).all():
        row = int(np.flatnonzero((admitted < 0) | (admitted > drafted))[0])
        raise DraftError(
            f"it admitted {admitted[row]} of {drafted[row]} drafts of the step's request {row}"
        )
    if decision.budget != admitted.sum():
        raise DraftError(f"it admitted {admitted.sum()} drafts with a budget of {decision.budget}")
    objective = np.asarray(decision.objective, np.float64)
    if objective.ndim != 1 or 0 < objective.size <= decision.budget:
        raise DraftError(
            f"its objective of shape {list(objective.shape)} lacks its budget {decision.budget}"
        )
    ranked = decision.survival
    if ranked is not None:
        ranked = np.asarray(ranked, np.float64)
        if ranked.shape != shape:
            raise DraftError(f"its survival has shape {list(ranked.shape)}, not {list(shape)}")
    if not np.isfinite(objective).all() or (ranked is not None and np.isnan(ranked).any()):
        raise DraftError("its objective is not finite, or its survival is NaN")
    return Decision(
        admitted=admitted,
        budget=int(decision.budget),
        objective=objective,
        survival=ranked,
        reason=_line(decision.reason, 200),
    )


def _words(error: Exception) -> str:
    """What an error says, on one line and of bounded length: the view has no more room."""
    kind, text = type(error).__name__, ""
    with contextlib.suppress(Exception):  # a user's error may not even say what it is
        text = _line(error, 200)
    if isinstance(error, DraftError) and text:
        return text
    return f"{kind}: {text}"[:200] if text else kind


def _line(value: object, most: int) -> str:
    """Its text on one line, cut where it is longer: views and traces have no more room."""
    text = " ".join(str(value).split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _count(value: object) -> bool:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and value >= 0  # type: ignore[operator]


def _read_only(situation: Situation, name: str, dtype: Any) -> NDArray[Any]:
    """Put a view in place that a policy cannot write to: the loop goes on with the same arrays."""
    given = getattr(situation, name)
    if type(given) is not np.ndarray or given.dtype != dtype:
        try:
            given = np.asarray(given)
        except ValueError:
            raise DraftError(f"{name} are an array of one length in each axis") from None
        if dtype is np.int64 and given.size and given.dtype.kind not in "iu":
            raise DraftError(f"{name} are whole numbers, not {given.dtype}")
        given = given.astype(dtype, copy=False)
    values = given.view()
    values.flags.writeable = False
    object.__setattr__(situation, name, values)
    return values
