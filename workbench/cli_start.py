"""Ctrl-C while the command line is still being imported: a sentence, and no traceback.

:mod:`workbench.cli` imports this before all else. Its ``main`` takes over as soon as it runs. What
Python does before it comes to any code of ours (some 20 ms) is out of reach.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def end(number: int, frame: FrameType | None) -> None:
    """Stop the program at once: nothing has begun, and an import cut short may raise anything."""
    os.write(2, b"workbench: interrupted\n")
    os._exit(130)


def is_program() -> bool:
    """Whether this process is the command line, not one that imports it, such as a test."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:  # python -m
        return str(spec.name) == "workbench.cli"
    name = os.path.basename(sys.argv[0] if sys.argv else "")
    return name.partition(".")[0] in ("workbench", "workbench-script")


if is_program() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end)
