"""What the engine says of itself: the trace's header, and the cost tables it decides by."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Any

import numpy as np

from workbench import hardware
from workbench.serving.probe.feed import Words
from workbench.serving.probe.frames import pack
from workbench.serving.probe.lines import POLICY, RECORDED_BY
from workbench.spec.trace_lines import FORMAT, VERSION


def costs(manager: Any, draft: Any, verify: Any) -> Words:
    """The curves of the first rank, which are everyone's, and the tables made of them.

    Args:
        manager: its tables are as they will stay.
        draft, verify: what they were made of: ``(requests, ms)`` and ``(tokens, ms)``.
    """
    by_requests, by_tokens = manager.cost_tables
    values = {
        "what": "costs",
        "draft": [[int(n), float(ms)] for n, ms in draft],
        "verify": [[int(n), float(ms)] for n, ms in verify],
        "captured": int(manager._cudagraph_limit),
        "most_rows": int(manager._max_total_logits),
        "context": _environment("VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN"),
    }
    arrays = {
        "draft_ms": ("d", np.ascontiguousarray(by_requests, np.float64).tobytes()),
        "verify_ms": ("d", np.ascontiguousarray(by_tokens, np.float64).tobytes()),
    }
    return lambda: pack(values, arrays)


def header(runner: Any, version: str) -> dict[str, Any]:
    """What was run, where and with which settings, as far as the engine says; None is unknown.

    ``sampling`` is empty: in an engine each request has its own.
    """
    config = runner.vllm_config
    asked, model, parallel, scheduler = (
        getattr(config, f"{name}_config", None)
        for name in ("speculative", "model", "parallel", "scheduler")
    )
    return {
        "format": FORMAT,
        "version": VERSION,
        "mode": "steps",
        "model": _name(getattr(model, "model", None)),
        "drafter": _name(getattr(asked, "model", None)),
        "sampling": {},
        "speculative_tokens": _whole(getattr(asked, "num_speculative_tokens", None)),
        "method": _text(getattr(asked, "rejection_sample_method", None)),
        "proposals": _text(getattr(asked, "draft_sample_method", None)),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": _machine(),
        "versions": hardware.versions() | {"vllm": version, "torch": _torch_version()},
        "recorded_by": RECORDED_BY,
        "policy": POLICY if runner.adaptive_verification is not None else "",
        "engine": {
            "name": "vLLM",
            "version": version,
            "speculation": _text(getattr(asked, "method", None)),
            "dtype": _text(getattr(model, "dtype", None)),
            "max_num_seqs": _whole(runner.req_states.max_num_reqs),
            "max_model_len": _whole(getattr(model, "max_model_len", None)),
            "tensor_parallel": _whole(getattr(parallel, "tensor_parallel_size", None)),
            "data_parallel": _whole(getattr(parallel, "data_parallel_size", None)),
            "asynchronous": _flag(getattr(scheduler, "async_scheduling", None)),
            "eos_token_id": _whole(
                getattr(getattr(model, "hf_config", None), "eos_token_id", None)
            ),
        },
    }


def _machine() -> dict[str, Any]:
    return {
        "cpu": hardware.cpu_name(),
        "cores": hardware.usable_cores(),
        "memory_bytes": hardware.usable_memory(),
        "gpus": [
            {
                "name": gpu.name,
                "memory_bytes": gpu.memory_bytes,
                "compute_capability": "{}.{}".format(*gpu.compute_capability),
            }
            for gpu in hardware.torch_gpus()
        ],
    }


def _torch_version() -> str:
    import torch

    return str(torch.__version__)


def _environment(name: str) -> int | None:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else None


def curves_of(manager: Any) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Curves that give the manager's tables, where what they were made of was not seen."""
    by_requests, by_tokens = manager.cost_tables
    captured = int(manager._cudagraph_limit)
    return _curve(by_requests, captured), _curve(by_tokens, captured)


def _curve(table: Any, captured: int) -> list[tuple[int, float]]:
    """The last size of each step, and, above the captured sizes, where the slope changes."""
    ms = [float(x) for x in table]
    last = len(ms) - 1
    found = []
    for n in range(1, len(ms)):
        if n < last and (
            ms[n + 1] == ms[n]
            if n <= captured or n < 2
            else n > captured + 1 and abs(ms[n + 1] - 2 * ms[n] + ms[n - 1]) <= 1e-9 * ms[n]
        ):
            continue
        found.append((n, ms[n]))
    return found


def _name(value: object) -> str | None:
    """Of a model: that of a hub as it is, of a folder the last part alone, since a recording may
    leave the machine."""
    if (text := _text(value)) is None:
        return None
    local = text.startswith((".", "~")) or text.count("/") != 1 or os.path.isdir(text)
    return PurePath(text).name if local else text


def _text(value: object) -> str | None:
    return None if value is None else str(value)[:400]


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None
