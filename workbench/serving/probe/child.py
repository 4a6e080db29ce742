"""The writer's process: frames from standard input become lines of a file or a socket.

It imports the standard library and the trace's own modules, nothing else. It ends when its input
does, and so with the engine, whatever ended that.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
from contextlib import suppress

from workbench.serving.probe.frames import Frames
from workbench.serving.probe.lines import Line, Lines
from workbench.serving.probe.outlets import Outlet, outlet_of

_CHUNK = 1 << 18
_LAST_SECONDS = 1.0
SILENT = "the engine ended without a word"


def main(destination: str) -> int:
    """Write until the input ends; 1 and one line on standard error if that fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        outlet = outlet_of(destination)
    except OSError as error:
        return _fail(f"{destination} cannot be made ({error.strerror or error})")
    try:
        lines = Lines()
        _copy(sys.stdin.fileno(), lines, outlet)
        _put(outlet, lines.end(SILENT))
    except OSError as error:
        return _fail(f"{destination} cannot be written ({error.strerror or error})")
    except Exception as error:
        return _fail(f"{type(error).__name__}: {error}")
    finally:
        with suppress(OSError):
            outlet.close(_LAST_SECONDS)
    return 0


def _copy(source: int, lines: Lines, outlet: Outlet) -> None:
    frames = Frames()
    while True:
        with selectors.DefaultSelector() as selector:  # made anew: readers come and go
            selector.register(source, selectors.EVENT_READ)
            outlet.watch(selector)
            ready = [key.fd for key, _ in selector.select()]
        outlet.serve()
        if source not in ready:
            continue
        data = os.read(source, _CHUNK)
        if not data:
            return
        for values, arrays in frames.feed(data):
            _put(outlet, lines.of(values, arrays))


def _put(outlet: Outlet, lines: list[Line]) -> None:
    for line in lines:
        outlet.put(line)


def _fail(why: str) -> int:
    print(" ".join(why.split())[:400], file=sys.stderr)
    return 1
