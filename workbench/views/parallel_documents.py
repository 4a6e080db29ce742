"""What the views read of a group's decode document, checked before anything is drawn.

As in ``rank_documents``: a file may be damaged, or of something else; a sentence names the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.errors import WorkbenchError
from workbench.views.numbers import plural
from workbench.views.rank_documents import (
    _TIMES,
    _count,
    _list,
    _mapping,
    _number,
    _said,
    _texts,
    _times,
    _wrong,
)

SCHEMA = "workbench-parallel-decode/1"
PREFILL_SCHEMA = "workbench-parallel-prefill/1"
NOTE = 160  # letters of a document's note that a figure has room for; the text has it whole
CALLS = ("nccl_us", "torch_one_shot_us", "exchange_us")
LETTERS = 10_000  # of a text; no sentence of the bench comes near it
_FIELDS = 1_000_000  # of a document
_MOST = 2**31 - 1  # of a count that is drawn
# Of a number that is drawn on a logarithmic axis, or divides another: no time or share is beyond.
_LEAST, _LARGEST = 1e-9, 1e12
# What would move the cursor, turn the line round, or cannot be written as UTF-8.
_UNSEEN = {
    code: " " if chr(code).isspace() else "\N{REPLACEMENT CHARACTER}"
    for code in (
        *range(0x20), *range(0x7F, 0xA0), *range(0x200E, 0x2010), *range(0x2028, 0x202F),
        *range(0x2066, 0x206A), *range(0xD800, 0xE000),
    )
}  # fmt: skip
_COUNTS = ("gpus", "tp", "layers", "of_layers")
_TEXTS = ("model", "dtype", "device", "backend", "hardware", "date", "how", "note")


def checked(document: Any) -> dict[str, Any]:
    """The document without fields that are None at its top, every field of it as it has to be.

    Raises:
        WorkbenchError: it is no such document; which field, and what it is.
    """
    if not isinstance(document, Mapping):
        raise WorkbenchError(
            "a document of `workbench bench decode --gpus N` is a dict, as recorded_group(file) "
            f"reads it, not {type(document).__name__}"
        )
    if document.get("schema") != SCHEMA:
        raise WorkbenchError(
            f"this document says schema {document.get('schema')!r:.60}, and {SCHEMA!r} is drawn "
            "here; run `workbench bench decode --gpus N`, or read one with recorded_group(file)"
        )
    document = _visible(document, "document")
    found = {name: value for name, value in document.items() if value is not None}
    _texts(found, _TEXTS, "")
    for name in _COUNTS:
        if name in ("gpus", "tp") or name in found:
            _size(found, name, "")
    for name, version in _mapping(found, "versions").items():
        _texts({name: version}, (name,), "versions")
    for name, why in _mapping(found, "left_out").items():
        _texts({name: why}, (name,), "left_out")
    for place, row in enumerate(_list(found.get("calls") or [], "calls")):
        _size(row, "rows", f"calls[{place}]")
        for name in CALLS:
            _time(row, name, f"calls[{place}]")
    for place, row in enumerate(_list(found.get("runs") or [], "runs")):
        _run(row, f"runs[{place}]")
    return found


def checked_prefill(document: Any) -> dict[str, Any]:
    """The same of a document of ``workbench bench prefill --gpus N``.

    Raises:
        WorkbenchError: it is no such document; which field, and what it is.
    """
    command = "workbench bench prefill --gpus N"
    if not isinstance(document, Mapping):
        raise WorkbenchError(
            f"a document of `{command}` is a dict, as recorded_group_prefill(file) reads it, not "
            f"{type(document).__name__}"
        )
    if document.get("schema") != PREFILL_SCHEMA:
        raise WorkbenchError(
            f"this document says schema {document.get('schema')!r:.60}, and {PREFILL_SCHEMA!r} is "
            f"drawn here; run `{command}`, or read one with recorded_group_prefill(file)"
        )
    document = _visible(document, "document")
    found = {name: value for name, value in document.items() if value is not None}
    _texts(found, _TEXTS, "")
    for name in (*_COUNTS, "sequences", "tokens"):
        if name in ("gpus", "tp", "sequences", "tokens") or name in found:
            _size(found, name, "")
    _number(found, "context", "", zero=True)
    _time(found, "ratio", "")
    for name, version in _mapping(found, "versions").items():
        _texts({name: version}, (name,), "versions")
    for name, why in _mapping(found, "left_out").items():
        _texts({name: why}, (name,), "left_out")
    for name, row in _mapping(found, "layouts").items():
        where = f"layouts.{name}"
        _texts(row, ("title",), where)
        _list(row.get("failures") or [], f"{where}.failures")
        for place, run in enumerate(_list(row.get("runs") or [], f"{where}.runs")):
            at = f"{where}.runs[{place}]"
            _size(run, "overlap", at)
            for field in ("milliseconds", "tokens_per_second"):
                _time(run, field, at, needed=True)
            for field in ("low", "high", "fraction_of_peak"):
                _time(run, field, at)
            _number(run, "communication_milliseconds", at, signed=True)
    for place, one in enumerate(_list(found.get("published") or [], "published")):
        at = f"published[{place}]"
        _texts(one, ("name", "where", "note", "unit"), at)
        _number(one, "value", at, needed=True)
    return found


def _run(row: Any, where: str) -> None:
    for name in ("batch", "context"):
        _size(row, name, where)
    _time(row, "floor_milliseconds", where)
    for name, one in _mapping(row, "variants", f"{where}.").items():
        at = f"{where}.variants.{name}"
        _times(one, at)
        for field in _TIMES:
            _time(one, field, at)
        _texts(one, ("exchange",), at)
        _number(one, "communication_milliseconds", at, signed=True)
        if one.get("without") is not None:
            _time(one["without"], "milliseconds", f"{at}.without")
    for name, why in _mapping(row, "left_out", f"{where}.").items():
        _texts({name: why}, (name,), f"{where}.left_out")


def _size(row: Any, name: str, where: str) -> None:
    """A count that is drawn."""
    _count(row, name, where)
    if row[name] > _MOST:
        raise _wrong(_said(where, name), f"a whole number from 1 to {_MOST:,}", row[name])


def _time(row: Any, name: str, where: str, *, needed: bool = False) -> None:
    """A number that is drawn, above 0."""
    _number(row, name, where, needed=needed)
    value = row.get(name)
    if value is not None and not _LEAST <= value <= _LARGEST:
        raise _wrong(_said(where, name), f"a number from {_LEAST:g} to {_LARGEST:g}", value)


def _visible(value: Any, where: str) -> Any:
    """A copy whose texts have no letters that nobody sees; what is not JSON's stays as it is.

    Raises:
        WorkbenchError: a text, or the whole, is larger than a document of the bench.
    """
    left = _FIELDS

    def copied(value: Any, where: str) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise WorkbenchError(
                f"this document has more than {_FIELDS:,} values: it is damaged, or of something "
                "else; run `workbench bench decode` again"
            )
        if isinstance(value, str):
            if len(value) > LETTERS:
                raise _wrong(where, f"a text of at most {LETTERS:,} letters", value)
            return value.translate(_UNSEEN)
        try:
            if isinstance(value, Mapping):
                return {
                    copied(name, f"{where:.40}") if isinstance(name, str) else name: copied(
                        each, f"{name}"
                    )
                    for name, each in value.items()
                }
            if isinstance(value, list | tuple):
                return [copied(each, where) for each in value]
        except RecursionError:
            raise _wrong(where, "nested less deeply", "…") from None
        return value

    return copied(value, where)


def runs(document: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The runs that have a variant, by batch and context.

    Raises:
        WorkbenchError: there is none.
    """
    found = [run for run in document.get("runs") or [] if run.get("variants")]
    if not found:
        raise WorkbenchError(
            "this document has no run with a variant of the step; run `workbench bench decode "
            "--gpus N`"
        )
    return found


def run_of(document: Mapping[str, Any], batch: int, context: int) -> Mapping[str, Any]:
    """The run of a batch and a context.

    Raises:
        WorkbenchError: there is none; which there are.
    """
    found = runs(document)
    for run in found:
        if (run["batch"], run["context"]) == (batch, context):
            return run
    there = "; ".join(f"batch {r['batch']}, context {r['context']:,}" for r in found)
    raise WorkbenchError(
        f"this document has no run of batch {batch!r:.20} and context {context!r:.20}; it has: "
        f"{there}"
    )


def hardware(document: Mapping[str, Any]) -> str:
    """What the ranks ran on; of GPUs how many."""
    on, ranks = str(document.get("hardware", "unknown hardware")), document["gpus"]
    several = document.get("device", "cuda") == "cuda" and ranks > 1 and "×" not in on
    return f"{ranks} × {on}" if several else on


def group(document: Mapping[str, Any]) -> str:
    """Which of the ranks took part, and on what."""
    ranks, tp = document["gpus"], document["tp"]
    part = f"all {plural(tp, 'rank')}" if ranks == tp else f"{ranks} of {tp} ranks"
    return f"{part} on {hardware(document)}"


def taken(document: Mapping[str, Any], note: int | None = None) -> str:
    """How, on what, with which versions and when; then what the document says of the ranks.

    ``note`` is how many letters of that there is room for: what does not fit ends with a clause
    and an ellipsis, 0 leaves all of it out. By default it is whole.
    """
    versions = document.get("versions") or {}
    used = [f"{k} {versions[k]}" for k in ("torch", "triton", "nccl") if versions.get(k)]
    on = f"{document.get('how', 'measured here')} on {hardware(document)}"
    found = ", ".join([on, *used, str(document.get("date", "date unknown"))])
    return "; ".join(filter(None, (found, _shortened(str(document.get("note", "")), note))))


def _shortened(note: str, room: int | None) -> str:
    if room is None or len(note) <= room:
        return note
    kept = ""
    for clause in note.split("; "):
        longer = f"{kept}; {clause}" if kept else clause
        if kept and len(longer) > room:
            break
        kept = longer
    return f"{kept} …" if room else ""


def described(document: Mapping[str, Any], *remarks: str, note: int | None = None) -> str:
    """A subtitle: which model, where the times are from, what else has to be known.

    ``note`` is that of :func:`taken`.
    """
    layers, of_layers = document.get("layers"), document.get("of_layers")
    depth = plural(layers, "layer") if layers else ""
    if layers and of_layers and layers < of_layers:
        depth = f"{layers} of {plural(of_layers, 'layer')}"
    what = ", ".join(
        filter(
            None,
            [
                str(document.get("model") or "a model"),
                f"TP{document['tp']}",
                depth,
                str(document.get("dtype", "")),
            ],
        )
    )
    return " · ".join(filter(None, (what, taken(document, note), *remarks)))
