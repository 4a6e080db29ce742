"""What the views read of a decode step's documents, checked before anything is drawn.

A document comes from a file that anyone may have written or damaged: what is in it has the type
and the range that the views count on, or a sentence names the field that has not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from workbench.errors import WorkbenchError

_SCHEMA = "workbench-rank-decode/1"
_COUNTS = ("tp", "layers", "of_layers", "batch", "context")
_TEXTS = ("model", "dtype", "device", "note", "expert_weights", "hardware", "date", "how")
_TIMES = ("milliseconds", "low", "high", "fraction_of_floor")
_MOST = 2**53  # what a float counts exactly; no size or time comes near it


def checked(document: Any) -> Mapping[str, Any]:
    """The document without fields that are None at its top, every field of it as it has to be.

    What no view reads is not looked at.

    Raises:
        WorkbenchError: it is no such document; which field, and what it is.
    """
    if not isinstance(document, Mapping):
        raise WorkbenchError(
            "a document of `workbench bench decode` is a dict, as recorded_decode(file) reads it, "
            f"not {type(document).__name__}"
        )
    schema = document.get("schema")
    if schema not in (None, _SCHEMA):
        raise WorkbenchError(
            f"this document says schema {schema!r:.60}, and {_SCHEMA!r} is drawn here; run "
            "`workbench bench decode` again"
        )
    found = {name: value for name, value in document.items() if value is not None}
    _header(found)
    _rows(found, "")
    for name, row in _mapping(found, "leave_one_out").items():
        _number(_times(row, f"leave_one_out.{name}"), "costs", f"leave_one_out.{name}", signed=True)
    for name, rows in _mapping(found, "kernels").items():
        for place, row in enumerate(_list(rows, f"kernels.{name}")):
            where = f"kernels.{name}[{place}]"
            _texts(row, ("kernel",), where)
            for field in ("microseconds", "launches"):
                _number(row, field, where, needed=True, zero=True)
    for place, row in enumerate(_list(found.get("contexts") or [], "contexts")):
        _count(row, "context", f"contexts[{place}]")
        _rows(row, f"contexts[{place}].")
    return found


def checked_bar(bar: Any) -> tuple[Any, ...]:
    """A bar ``(label, ms, whose)`` or ``(label, ms, whose, floor ms)`` beside a document's.

    Raises:
        WorkbenchError: it is neither.
    """
    if not isinstance(bar, Sequence) or isinstance(bar, str) or len(bar) not in (3, 4):
        raise WorkbenchError(
            "a bar beside the document's is (label, ms, whose) or (label, ms, whose, floor ms), "
            f"or another document, not {bar!r:.60}"
        )
    named = dict(zip(("label", "ms", "whose", "floor"), bar, strict=False))
    for name in ("label", "whose"):
        if not isinstance(named[name], str):
            raise WorkbenchError(f"{name} of a bar is a text, not {named[name]!r:.60}")
    for name in [name for name in ("ms", "floor") if name in named]:
        _number(named, name, "a bar", needed=True)
    return tuple(bar)


def _header(found: Mapping[str, Any]) -> None:
    _texts(found, _TEXTS, "")
    for name in _COUNTS:
        if name in found:
            _count(found, name, "")
    _number(found, "floor_milliseconds", "")
    for name, version in _mapping(found, "versions").items():
        _texts({name: version}, (name,), "versions")
    for name, why in _mapping(found, "left_out").items():
        _texts({name: why}, (name,), "left_out")
    lost = _mapping(_mapping(found, "error_gate"), "quantisation", "error_gate.")
    _number(lost, "mlp_output", "error_gate.quantisation", zero=True)


def _rows(found: Any, at: str) -> None:
    """The variants of a document or of one of its contexts, with their floor."""
    _number(found, "floor_milliseconds", at.rstrip("."))
    for name, row in _mapping(found, "variants", at).items():
        _times(row, f"{at}variants.{name}")


def _times(row: Any, where: str) -> Mapping[str, Any]:
    """A row of times."""
    _texts(row, ("title", "origin"), where)
    for name in _TIMES:
        _number(row, name, where)
    _mapping(row, "forms", f"{where}.")
    _list(row.get("failures") or [], f"{where}.failures")
    return dict(row)


def _said(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _wrong(where: str, wanted: str, value: Any) -> WorkbenchError:
    return WorkbenchError(
        f"this document's {where:.80} should be {wanted}, and is {value!r:.40}: it is damaged, or "
        "of something else; run `workbench bench decode` again"
    )


def _mapping(found: Any, name: str, at: str = "") -> Mapping[str, Any]:
    value = found.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _wrong(at + name, "an object of names and values", value)
    return value


def _list(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise _wrong(where, "a list", value)
    return value


def _texts(row: Any, names: Sequence[str], where: str) -> None:
    if not isinstance(row, Mapping):
        raise _wrong(where, "an object of names and values", row)
    for name in names:
        if not isinstance(row.get(name) or "", str):
            raise _wrong(_said(where, name), "a text", row[name])


def _count(row: Any, name: str, where: str) -> None:
    if not isinstance(row, Mapping):
        raise _wrong(where, "an object of names and values", row)
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST:
        raise _wrong(_said(where, name), "a whole number from 1 on", value)


def _number(
    row: Any,
    name: str,
    where: str,
    *,
    needed: bool = False,
    zero: bool = False,
    signed: bool = False,
) -> None:
    if not isinstance(row, Mapping):
        raise _wrong(where, "an object of names and values", row)
    value = row.get(name)
    if value is None and not needed:
        return
    wanted = "a number" if signed else "a number from 0 on" if zero else "a number above 0"
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wrong(_said(where, name), wanted, value)
    if not (isfinite(value) if isinstance(value, float) else True) or abs(value) > _MOST:
        raise _wrong(_said(where, name), wanted, value)
    if not signed and (value < 0 or (value == 0 and not zero)):
        raise _wrong(_said(where, name), wanted, value)
