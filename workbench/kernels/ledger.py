"""What was found about variants in this process: the last verdict of each, while it is current."""

from __future__ import annotations

import threading

from workbench.kernels import registry
from workbench.kernels.check import Verdict

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
