"""Turning the probe on: where to, which vLLM, and then waiting for the engine's model runner."""

from __future__ import annotations

import sys
from importlib import metadata
from types import ModuleType

from workbench.serving.probe import fit, log
from workbench.serving.probe.after_import import after_import
from workbench.serving.probe.hooks import Probe
from workbench.serving.probe.outlets import UNIX


def start(destination: str) -> Probe:
    """The probe of this process; its hooks are put when the engine imports its model runner.

    Raises:
        ValueError: the destination is none, or this is another vLLM.
    """
    if not destination.removeprefix(UNIX).startswith("/"):
        raise ValueError(
            f"BEAM_PROBE is {destination!r:.80}; give /path/run.jsonl or unix:/path/socket"
        )
    version = _version()
    if version is None or not version.startswith(fit.SERIES):
        raise ValueError(
            f"this is vLLM {version or 'of an unknown version'}; the probe knows {fit.SERIES}*"
        )
    probe = Probe(destination, version)

    def install(_: ModuleType) -> None:
        try:
            found = fit.differences(version)
            if found:
                probe.off(f"vLLM {version} is not as known: {'; '.join(found)}")
                return
            probe.install(
                *(fit.class_of(of) for of in (fit.GPU_RUNNER, fit.MANAGER, fit.ESTIMATOR))
            )
        except Exception as error:  # it runs in an import of the engine's
            probe.off(f"{type(error).__name__}: {error}")

    after_import(fit.RUNNER, install)
    return probe


def _version() -> str | None:
    said = getattr(sys.modules.get("vllm"), "__version__", None)
    if isinstance(said, str):
        return said
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        log.debug("probe: no distribution vllm")
        return None
