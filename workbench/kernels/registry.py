"""Variants of operations, and which of them a model uses.

``@register(op, name)`` adds a variant, ``with use(boundary="triton", layers="sliding")`` selects
it, :func:`resolve` says for every layer what was asked for, what is used and why. A selection is
turned into plain function tables once (a table a layer, kept until the selection changes), so a
call inside a layer costs what calling an attribute costs. Nothing falls back silently: a variant
that cannot run here is an error when it is selected, or, where the caller asked for it with
``missing="torch"``, a line of the table that says so.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeVar

from workbench.errors import KernelError
from workbench.kernels.catalogue import (
    BUILT_IN,
    GROUP_OPS,
    LAYER_OPS,
    MODEL_OPS,
    OPS,
    REFERENCE,
)
from workbench.kernels.layers import LayerKinds, describe, matching
from workbench.kernels.requirements import Requirement, Where
from workbench.kernels.tables import Kernels, Resolution, Resolved

F = TypeVar("F", bound=Callable[..., Any])
Missing = Literal["error", "torch"]
NAME_LENGTH = 60  # characters of a variant's name: it stands in tables and sentences
# Built-in variants that autograd sees through; Triton's and vLLM's kernels it does not.
DIFFERENTIABLE = (REFERENCE, "compile", "dense")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One implementation of an operation; ``origin`` is the module that registered it."""

    op: str
    name: str
    function: Callable[..., Any]
    requires: tuple[Requirement, ...] = ()
    origin: str = ""

    def why_not(self, where: Where) -> str | None:
        """None where it runs; else a clause that says why it does not."""
        return _unmet(self.requires, where)


def _unmet(requires: Iterable[Requirement], where: Where) -> str | None:
    """The clause of the first requirement that does not hold; one that fails does not hold."""
    for requirement in requires:
        name = getattr(requirement, "__name__", "") or "requirement"
        try:
            reason = requirement(where)
        except Exception as error:
            words = " ".join(str(error).split())
            return f"its requirement {name} failed: {type(error).__name__}: {words:.200}"
        if reason is None:
            continue
        if isinstance(reason, str) and reason.strip():
            return " ".join(reason.split())
        return f"its requirement {name} failed: it gave {reason!r:.40}, not None or why not"
    return None


_variants: dict[tuple[str, str], Variant] = {}
_lock = threading.RLock()
_generation = 0  # counts registrations, so that tables made before one are made anew


def register(op: str, name: str, *, requires: Sequence[Requirement] = ()) -> Callable[[F], F]:
    """Decorator: the function is variant ``name`` of operation ``op``.

    Its signature is that of the reference (``workbench.kernels.reference``). Registering a name
    again replaces it, which is what running a notebook cell again should do; the names that come
    with the workbench cannot be replaced.

    Raises:
        KernelError: an unknown operation, a name that is taken, no identifier or too long, a
            requirement that is no function, or not a function.
    """
    _check_op(op)
    check_name(op, name)
    if not isinstance(requires, tuple | list):
        raise KernelError(f"requires of {name} of {op} must be a list, not {requires!r:.40}")
    requires = tuple(requires)
    for one in requires:
        if not callable(one):
            raise KernelError(
                f"requires of {name} of {op} must hold functions that say None or why not, "
                f"not {one!r:.40}"
            )
    # The module that registers, and not the function's own: decorators copy that (functools.wraps).
    origin = str(sys._getframe(1).f_globals.get("__name__", ""))

    def decorate(function: F) -> F:
        global _generation
        if not callable(function):
            raise KernelError(f"variant {name} of {op} must be a function, not {function!r:.60}")
        if name in BUILT_IN[op] and origin != BUILT_IN[op][name].module:
            raise KernelError(
                f"{name} of {op} comes with the workbench and is not replaced; choose another name"
            )
        with _lock:
            _variants[op, name] = Variant(
                op=op, name=name, function=function, requires=requires, origin=origin
            )
            _generation += 1
        return function

    return decorate


def check_name(op: str, name: object) -> None:
    """Refuse what cannot be the name of a variant of ``op``.

    Raises:
        KernelError: not an identifier, or one of more than :data:`NAME_LENGTH` characters.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise KernelError(
            f"a variant of {op} needs a name that is an identifier, not {name!r:.60}; "
            'for example @register("boundary", "mine")'
        )
    if len(name) > NAME_LENGTH:
        raise KernelError(
            f"a variant of {op} needs a name of at most {NAME_LENGTH} characters, and "
            f"{name[:20]}… has {len(name):,}; choose a shorter one"
        )


def unregister(op: str, name: str) -> None:
    """Forget a variant that a notebook registered.

    Raises:
        KernelError: there is none of that name, or it comes with the workbench.
    """
    global _generation
    _check_op(op)
    if name in BUILT_IN[op]:
        raise KernelError(f"{name} of {op} comes with the workbench and stays")
    with _lock:
        if _variants.pop((op, name), None) is None:
            raise KernelError(f"there is no variant {name!r:.60} of {op} to forget")
        _generation += 1


def names(op: str) -> list[str]:
    """Every known variant of ``op``, the reference first, whether it runs here or not."""
    _check_op(op)
    own = [name for o, name in _variants if o == op and name not in BUILT_IN[op]]
    return [*BUILT_IN[op], *own]


def find(op: str, name: str, where: Where | None = None) -> Variant:
    """The variant, with its module imported.

    Raises:
        KernelError: no such variant, or it cannot run at ``where`` (the message says why).
    """
    _check_op(op)
    reason = why_not(op, name, where) if where is not None else None
    if reason is not None:
        raise KernelError(f"{name} of {op} cannot run here: {reason}")
    return _load(op, name)


def why_not(op: str, name: str, where: Where) -> str | None:
    """None when variant ``name`` of ``op`` runs at ``where``; else why not.

    Raises:
        KernelError: no such operation or variant.
    """
    if name not in names(op):
        raise KernelError(
            f"there is no variant {name!r:.60} of {op}; there are {', '.join(names(op))}"
        )
    if (op, name) not in _variants:
        # Asked before the module is imported: importing it may be what cannot be done here.
        reason = _unmet(BUILT_IN[op][name].requires, where)
        if reason is not None:
            return reason
    return _load(op, name).why_not(where)


def function(op: str, name: str) -> Callable[..., Any] | None:
    """The variant's function if its module is imported already, else None."""
    _check_op(op)
    found = _variants.get((op, name))
    return None if found is None else found.function


def interpreted(op: str, name: str, where: Where) -> bool:
    """Whether the variant's kernels would run in Triton's interpreter: right, and no measure.

    Known from the code: on a CPU, a function that names an interpreted kernel, itself or through
    the functions it names, is interpreted.
    """
    return where.device == "cpu" and _names_interpreted(find(op, name).function, 4, set())


def _names_interpreted(function: Any, depth: int, seen: set[int]) -> bool:
    function = getattr(function, "__wrapped__", function)
    code, space = getattr(function, "__code__", None), getattr(function, "__globals__", {})
    if code is None or id(function) in seen or depth == 0:
        return False
    seen.add(id(function))
    for name in code.co_names:
        value = space.get(name)
        if type(value).__name__ == "InterpretedFunction":
            return True
        if callable(value) and _names_interpreted(value, depth - 1, seen):
            return True
    return False


def _load(op: str, name: str) -> Variant:
    if (op, name) not in _variants and name in BUILT_IN[op]:
        importlib.import_module(BUILT_IN[op][name].module)
    try:
        return _variants[op, name]
    except KeyError:
        raise KernelError(
            f"there is no variant {name!r:.60} of {op}; there are {', '.join(names(op))}"
        ) from None


def _check_op(op: str) -> None:
    if op not in OPS and op not in GROUP_OPS:
        raise KernelError(f"there is no operation {op!r:.60}; there are {', '.join(OPS)}")


# -- selection ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """``variant`` for ``op`` in the layers of a pattern (see :mod:`workbench.kernels.layers`)."""

    op: str
    variant: str
    layers: str = "all"
    missing: Missing = "error"


Selection = tuple[Rule, ...]
_default: Selection = ()
_selection: ContextVar[Selection | None] = ContextVar("workbench_kernels", default=None)


def selection() -> Selection:
    """The rules in force here: those of the enclosing ``use``, else those of :func:`select`."""
    here = _selection.get()
    return _default if here is None else here


def state() -> tuple[Selection, int]:
    """What a resolution depends on beside the model: the rules in force, and the registrations."""
    return selection(), _generation


def rules(
    layers: str | int | Iterable[int] = "all", missing: Missing = "error", **variants: str
) -> Selection:
    """Rules from keyword arguments ``op="variant"``; later rules win over earlier ones.

    Raises:
        KernelError: an unknown operation or variant, or a pattern that no model could match.
    """
    if missing not in ("error", "torch"):
        raise KernelError(f'missing must be "error" or "torch", not {missing!r:.40}')
    pattern = describe(layers)
    made = []
    for op, variant in variants.items():
        _check_op(op)
        if variant not in names(op):
            raise KernelError(
                f"there is no variant {variant!r:.60} of {op}; there are {', '.join(names(op))}"
            )
        if op in GROUP_OPS:
            raise KernelError(
                f"{op} is of several ranks together and not of a model in one process: give it to "
                f'a step of theirs, TpRankStep(weights, state, ranks, {{"{op}": {variant!r}}})'
            )
        if pattern != "all" and op not in LAYER_OPS:
            raise KernelError(f"{op} is not inside a layer; leave out layers={pattern!r}")
        made.append(Rule(op=op, variant=variant, layers=pattern, missing=missing))
    return tuple(made)


class use:  # noqa: N801 - reads as a verb: with use(boundary="triton")
    """Select variants inside a ``with`` block, on top of what is selected outside it.

    ``with use(boundary="triton", layers="sliding"): ...`` holds for this thread (and tasks started
    in it) and ends with the block, also by an exception. For a selection that stays, and that
    every thread sees, there is :func:`select`.

    Raises:
        KernelError: see :func:`rules`; what cannot run on a model is refused when it runs.
    """

    def __init__(
        self,
        layers: str | int | Iterable[int] = "all",
        *,
        missing: Missing = "error",
        **variants: str,
    ) -> None:
        self._rules = rules(layers, missing, **variants)
        self._tokens: list[Any] = []

    def __enter__(self) -> Selection:
        chosen = (*selection(), *self._rules)
        self._tokens.append(_selection.set(chosen))
        return chosen

    def __exit__(self, *exc: object) -> None:
        # From the last: one object may be entered in several threads, and each ends its own.
        for at in range(len(self._tokens) - 1, -1, -1):
            try:
                _selection.reset(self._tokens[at])
            except ValueError:  # made in another context
                continue
            del self._tokens[at]
            return
        raise KernelError(
            f"{self!r:.80}: left where it was not entered; a block ends in the thread or task "
            "that began it"
        )

    def __repr__(self) -> str:
        what = ", ".join(f"{r.op}={r.variant!r}" for r in self._rules) or "nothing"
        return f"use({what}): holds inside `with use(...):`; select(...) makes it stay"


def select(
    layers: str | int | Iterable[int] = "all",
    *,
    missing: Missing = "error",
    **variants: str,
) -> Selection:
    """Select variants for the whole process until the next :func:`select` or :func:`reset`.

    Adds to what was selected before; a ``with use(...)`` goes on top of it.

    Raises:
        KernelError: see :func:`rules`.
    """
    global _default
    added = rules(layers, missing, **variants)
    with _lock:
        _default = (*_default, *added)
    return _default


def deselect(op: str, variant: str) -> None:
    """Take a variant out of what :func:`select` chose (it was refused, or is being replaced)."""
    global _default
    with _lock:
        _default = tuple(r for r in _default if (r.op, r.variant) != (op, variant))


def reset(to: Selection = ()) -> None:
    """Forget every :func:`select` (or go back to the rules it gave earlier).

    Raises:
        KernelError: not rules.
    """
    global _default
    chosen = _as_rules(to)
    with _lock:
        _default = chosen


def _as_rules(given: object) -> Selection:
    found = tuple(given) if isinstance(given, tuple | list) else (given,)
    for one in found:
        if not isinstance(one, Rule):
            raise KernelError(
                "a selection is what select(), rules() or selection() gave, not "
                f"{given!r:.60}; reset() alone forgets all"
            )
    return found


@contextmanager
def exactly(chosen: Selection) -> Iterator[Selection]:
    """Only these rules inside the block, whatever is selected outside it.

    Raises:
        KernelError: not rules.
    """
    token = _selection.set(_as_rules(chosen))
    try:
        yield chosen
    finally:
        _selection.reset(token)


# -- resolution ---------------------------------------------------------------------------------


def resolve(kinds: LayerKinds, where: Where, chosen: Selection | None = None) -> Resolution:
    """Function tables of every layer under ``chosen`` (the rules in force when None).

    Raises:
        KernelError: a selected variant cannot run at ``where`` and its rule does not say
            ``missing="torch"``; or a pattern matches no layer, or none that has the operation.
    """
    return _resolve(kinds, where, selection() if chosen is None else chosen, _generation)


@lru_cache(maxsize=64)
def _resolve(kinds: LayerKinds, where: Where, chosen: Selection, _: int) -> Resolution:
    asked: list[dict[str, Rule]] = [{} for _ in kinds]
    whole: dict[str, Rule] = {}
    for rule in chosen:
        if rule.op in LAYER_OPS:
            named = matching(rule.layers, kinds)
            if rule.layers != "all" and not any(kinds.has(rule.op, layer) for layer in named):
                others = [i for i in kinds if kinds.has(rule.op, i)]
                having = f"layers={kinds.name(others, 'boundary')!r}" if others else "none"
                raise KernelError(
                    f"layers={rule.layers!r:.60} names no layer that has {rule.op}; this model "
                    f"has it in {having}"
                )
            for layer in named:
                asked[layer][rule.op] = rule
        else:
            whole[rule.op] = rule
    cache: dict[Rule, tuple[Variant, str]] = {}

    def settle(op: str, rule: Rule | None) -> tuple[Variant, str]:
        rule = rule or Rule(op=op, variant=REFERENCE)
        if rule not in cache:
            reason = why_not(op, rule.variant, where)
            if reason is not None and rule.missing == "error":
                raise KernelError(
                    f"{rule.variant} of {op} cannot run here: {reason}; select another, or allow "
                    'the reference in its place with missing="torch"'
                )
            name = rule.variant if reason is None else REFERENCE
            cache[rule] = (_load(op, name), reason or "")
        return cache[rule]

    tables: dict[tuple[Any, ...], Kernels] = {}

    def table(choice: Mapping[str, Rule]) -> Kernels:
        functions = {op: settle(op, choice.get(op))[0].function for op in OPS}
        key = tuple(functions.values())
        return tables.setdefault(key, Kernels(functions))

    layers = tuple(table(choice) for choice in asked)
    model = table(whole)
    rows = []
    for op in LAYER_OPS:
        groups: dict[tuple[str, str, str], list[int]] = {}
        for layer, choice in enumerate(asked):
            if not kinds.has(op, layer):
                continue
            variant, reason = settle(op, choice.get(op))
            requested = choice[op].variant if op in choice else REFERENCE
            groups.setdefault((requested, variant.name, reason), []).append(layer)
        for (requested, resolved, reason), members in groups.items():
            rows.append(
                Resolved(
                    op=op,
                    layers=kinds.name(members, op),
                    requested=requested,
                    resolved=resolved,
                    reason=reason,
                )
            )
    for op in MODEL_OPS:
        variant, reason = settle(op, whole.get(op))
        requested = whole[op].variant if op in whole else REFERENCE
        rows.append(
            Resolved(op=op, layers="", requested=requested, resolved=variant.name, reason=reason)
        )
    used = dict.fromkeys((row.op, row.resolved) for row in rows)
    return Resolution(
        layers=layers,
        model=model,
        rows=tuple(rows),
        forward_only=tuple(
            (op, name) for op, name in used if name in BUILT_IN[op] and name not in DIFFERENTIABLE
        ),
    )
