"""Recorded runs of the rank under load: batched decode and verification, and prefill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.errors import KernelError
from workbench.kernels.rank.recorded_runs import RECORDED, _read

LOAD, PREFILL = "rank-load-h200.json", "rank-prefill-h200.json"


def recorded_load(file: str | Path | None = None) -> dict[str, Any]:
    """A document of ``benchmarks/rank_load.py`` or ``workbench bench verify``, marked recorded.

    ``file``: one of your own; by default the run on one H200 that comes with the package.

    Raises:
        KernelError: it cannot be read, or is no such document. What is in its fields, the views
            check.
    """
    path = RECORDED / LOAD if file is None else Path(file)
    return _document(path, ("batches", "verify", "sizes"), "a batched decode or a verification")


def recorded_prefill(file: str | Path | None = None) -> dict[str, Any]:
    """The same of a prefill: ``benchmarks/rank_prefill.py`` or ``workbench bench prefill``."""
    path = RECORDED / PREFILL if file is None else Path(file)
    return _document(path, ("matrix_rate",), "a prefill")


def _document(path: Path, some: tuple[str, ...], what: str) -> dict[str, Any]:
    document = _read(path)
    if not any(name in document for name in some):
        raise KernelError(
            f"{path} is no document of {what} (it has none of: {', '.join(some)}); give one that "
            "the bench wrote"
        )
    return document | {"how": "recorded"}
