"""A plugin for vLLM that records what adaptive verification saw and decided, pass by pass.

vLLM loads it as ``workbench_probe`` of the group ``vllm.general_plugins``. It stays off unless
``BEAM_PROBE`` names where to: ``/path/run.jsonl``, or ``unix:/path/socket`` for readers that come
and go. What it writes, ``workbench.serving.probe_read`` reads. See docs/serving.md, "Probe".

Nothing in here may harm the engine: importing it costs the standard library, whatever fails in it
turns it off with one line in the log, and results of the engine pass through untouched.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.serving.probe.hooks import Probe

VARIABLE = "BEAM_PROBE"
log = logging.getLogger("vllm.workbench_probe")  # below vllm, whose handlers print it
_probe: Probe | None = None


def register() -> None:
    """What vLLM calls in each of its processes, before the engine's modules are there."""
    global _probe
    destination = os.environ.get(VARIABLE, "").strip()
    if not destination or _probe is not None:
        return
    try:
        from workbench.serving.probe.start import start

        _probe = start(destination)
    except Exception as error:
        log.warning("probe off: %s: %s", type(error).__name__, error)


def active() -> Probe | None:
    """This process's probe, on or off; None where none was asked for."""
    return _probe
