"""What the views read of a group's decode document, checked before anything is drawn.

As in ``rank_documents``: a file may be damaged, or of something else; a sentence names the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.errors import WorkbenchError
from workbench.views.numbers import plural
from workbench.views.rank_documents import _count, _list, _mapping, _number, _texts, _times

SCHEMA = "workbench-parallel-decode/1"
PREFILL_SCHEMA = "workbench-parallel-prefill/1"
NOTE = 160  # letters of a document's note that a figure has room for; the text has it whole
CALLS = ("nccl_us", "torch_one_shot_us", "exchange_us")
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
    found = {name: value for name, value in document.items() if value is not None}
    _texts(found, _TEXTS, "")
    for name in _COUNTS:
        if name in ("gpus", "tp") or name in found:
            _count(found, name, "")
    for name, version in _mapping(found, "versions").items():
        _texts({name: version}, (name,), "versions")
    for name, why in _mapping(found, "left_out").items():
        _texts({name: why}, (name,), "left_out")
    for place, row in enumerate(_list(found.get("calls") or [], "calls")):
        _count(row, "rows", f"calls[{place}]")
        for name in CALLS:
            _number(row, name, f"calls[{place}]")
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
    found = {name: value for name, value in document.items() if value is not None}
    _texts(found, _TEXTS, "")
    for name in (*_COUNTS, "sequences", "tokens"):
        if name in ("gpus", "tp", "sequences", "tokens") or name in found:
            _count(found, name, "")
    _number(found, "context", "", zero=True)
    _number(found, "ratio", "")
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
            _count(run, "overlap", at)
            for field in ("milliseconds", "tokens_per_second"):
                _number(run, field, at, needed=True)
            for field in ("low", "high", "fraction_of_peak"):
                _number(run, field, at)
            _number(run, "communication_milliseconds", at, signed=True)
    for place, one in enumerate(_list(found.get("published") or [], "published")):
        at = f"published[{place}]"
        _texts(one, ("name", "where", "note", "unit"), at)
        _number(one, "value", at, needed=True)
    return found


def _run(row: Any, where: str) -> None:
    for name in ("batch", "context"):
        _count(row, name, where)
    _number(row, "floor_milliseconds", where)
    for name, one in _mapping(row, "variants", f"{where}.").items():
        at = f"{where}.variants.{name}"
        _times(one, at)
        _texts(one, ("exchange",), at)
        _number(one, "communication_milliseconds", at, signed=True)
        if one.get("without") is not None:
            _number(one["without"], "milliseconds", f"{at}.without")
    for name, why in _mapping(row, "left_out", f"{where}.").items():
        _texts({name: why}, (name,), f"{where}.left_out")


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
