"""Arguments and options that several commands share, and how a command answers."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Preset, bundled name or folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


def answer(document: dict[str, Any]) -> None:
    """Print one JSON document on stdout."""
    from workbench.terminal import emit

    emit(document)
