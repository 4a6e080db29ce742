"""Recorded runs of several ranks at once: those that come with the package, or one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.errors import KernelError
from workbench.files import LIMIT, expand
from workbench.kernels.rank.recorded_runs import RECORDED, _read

DECODE, PREFILL = "parallel-decode-h200.json", "parallel-prefill-h200.json"
DECODE_SCHEMA, PREFILL_SCHEMA = "workbench-parallel-decode/1", "workbench-parallel-prefill/1"


def recorded_group(file: str | Path | None = None) -> dict[str, Any]:
    """A document of ``workbench bench decode --gpus N`` (``measure.py`` explains it), marked
    recorded.

    ``file``: one of your own; by default the run on H200s that comes with the package.

    Raises:
        KernelError: it is not there, cannot be read, or is no such document. What is in its
            fields, the views check.
    """
    wanted = ("gpus", "tp", "runs", "calls", "note", "date")
    return _document(file, DECODE, DECODE_SCHEMA, "workbench bench decode --gpus N", wanted)


def recorded_group_prefill(file: str | Path | None = None) -> dict[str, Any]:
    """The same of a prefill in several layouts: ``workbench bench prefill --gpus N``."""
    wanted = ("gpus", "tp", "layouts", "note", "date")
    return _document(file, PREFILL, PREFILL_SCHEMA, "workbench bench prefill --gpus N", wanted)


def _document(
    file: str | Path | None, bundled: str, schema: str, command: str, wanted: tuple[str, ...]
) -> dict[str, Any]:
    path = RECORDED / bundled if file is None else expand(file)
    if file is None and not path.exists():
        raise KernelError(
            f"no run of several ranks comes with this package ({bundled} is not there); record one "
            f"with `{command} --out FILE` and give its file"
        )
    try:
        size = path.stat().st_size
    except (OSError, ValueError):  # it is read below, which says why it cannot be
        size = 0
    if size > LIMIT:
        raise KernelError(
            f"{path} has more than {LIMIT:,} bytes, and no document of `{command}` comes near "
            "that; give another file"
        )
    document = _read(path)
    found = document.get("schema")
    if found != schema:
        raise KernelError(
            f"{path} says schema {found!r:.60}, and {schema!r} is read here: it is no document of "
            f"`{command}`, or one of another release; run the bench again"
        )
    missing = [name for name in wanted if name not in document]
    if missing:
        raise KernelError(f"{path} lacks {', '.join(missing)}; run the bench again")
    return document | {"how": "recorded"}
