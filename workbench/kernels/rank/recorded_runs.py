"""Recorded runs of the decode step, which come with the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workbench.errors import KernelError
from workbench.kernels.rank.waterfall import SCHEMA

RECORDED = Path(__file__).resolve().parent / "recorded"
DECODE, FP8 = "rank-decode-h200.json", "rank-decode-fp8-h200.json"


def recorded_decode(file: str | Path | None = None) -> dict[str, Any]:
    """A document of ``workbench bench decode`` (``waterfall.py`` explains it), marked recorded.

    ``file``: one of your own; by default the run on one H200 that comes with the package.

    Raises:
        KernelError: it cannot be read, or is no such document. What is in its fields, the views
            check.
    """
    path = RECORDED / DECODE if file is None else Path(file)
    document = _read(path)
    schema = document.get("schema")
    if schema != SCHEMA:
        raise KernelError(
            f"{path} says schema {schema!r:.60}, and {SCHEMA!r} is read here: it is no document of "
            "`workbench bench decode`, or one of another release; run the bench again"
        )
    missing = [k for k in ("variants", "floor_milliseconds", "note", "date") if k not in document]
    if missing:
        raise KernelError(f"{path} lacks {', '.join(missing)}; run the bench again")
    return document | {"how": "recorded"}


def recorded_fp8() -> dict[str, Any]:
    """The same of the run with FP8 experts that comes with the package, read and checked alike."""
    return recorded_decode(RECORDED / FP8)


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON, and none that is measured")


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file():
            raise KernelError(f"{path} cannot be read: it is no file; give one of the bench")
        document = json.loads(path.read_text("utf-8"), parse_constant=_no_number)
    except OSError as error:
        raise KernelError(f"{path} cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise KernelError(f"{path} is nested too deeply for a document of the bench") from error
    except ValueError as error:
        raise KernelError(f"{path} is no JSON, or a part of it: {error}") from error
    if not isinstance(document, dict):
        raise KernelError(f"{path} holds no document of `workbench bench decode`")
    return document
