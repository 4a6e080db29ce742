"""What was found about variants: the last verdict of each in this process, while it is current,
and a verdict read back from what another process wrote."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from workbench.kernels import registry
from workbench.kernels.check import STATUSES, Finding, Verdict
from workbench.kernels.child import is_number, whole_characters

_lock = threading.Lock()
_found: dict[tuple[str, str], tuple[object, Verdict]] = {}


def note(verdict: Verdict, function: object | None = None) -> None:
    """Keep a verdict; it holds until the variant is registered anew."""
    function = function or registry.function(verdict.op, verdict.variant)
    with _lock:
        _found[verdict.op, verdict.variant] = (function, verdict)


def verdict(op: str, variant: str) -> Verdict | None:
    """The last verdict on the variant as it is registered now, None where there is none."""
    with _lock:
        kept = _found.get((op, variant))
    if kept is None or kept[0] is not registry.function(op, variant):
        return None
    return kept[1]


# Of the fields of ``Verdict.to_dict`` and ``Finding.to_dict``, what each may be.
def _text(value: Any) -> bool:
    return isinstance(value, str)


def _figure(value: Any) -> bool:
    return value is None or is_number(value)


_VERDICT: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("op", "variant", "gate", "reason", "device"), _text),
    "status": lambda value: value in STATUSES,
    "cases": lambda value: is_number(value) and isinstance(value, int) and value >= 0,
    **dict.fromkeys(("max_error", "own_error"), _figure),
    "seconds": is_number,
    "passed": lambda value: isinstance(value, bool),
    "failed": lambda value: isinstance(value, list),
}
_FINDING: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("case", "output", "gate", "note"), _text),
    **dict.fromkeys(("found", "limit"), is_number),
    "passed": lambda value: value is False,
}


def read(fields: Any, op: str, variant: str) -> Verdict | None:
    """The verdict on this variant that ``Verdict.to_dict`` gave; None for anything else.

    Raises nothing, whatever it is given: it comes from a process that ran foreign code.
    """
    values = _read(fields, _VERDICT)
    if values is None or (values["op"], values["variant"]) != (op, variant):
        return None
    failed = [_read(one, _FINDING) for one in values.pop("failed")]
    if values.pop("passed") != (values["status"] == "passed"):
        return None
    findings = tuple(Finding(**one) for one in failed if one is not None)
    return Verdict(**values, findings=findings) if len(findings) == len(failed) else None


def _read(fields: Any, wanted: dict[str, Callable[[Any], bool]]) -> dict[str, Any] | None:
    if not isinstance(fields, dict) or set(fields) != set(wanted):
        return None
    if not all(fine(fields[name]) for name, fine in wanted.items()):
        return None
    return {k: whole_characters(v) if isinstance(v, str) else v for k, v in fields.items()}
