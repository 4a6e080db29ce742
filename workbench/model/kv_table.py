"""Sizings and plans as CSV: one row a layer, one row a plan, units in the names of the columns.

Plain tables that ``pandas.read_csv`` reads as they are: one header row, no comments, and what is
the same for all rows repeated in each, so that several files can be put together.
"""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from workbench.files import expand, write_whole
from workbench.model.asked import SizingError
from workbench.model.kv_settings import KVSettings
from workbench.model.plan import Plan
from workbench.model.sizing import ENGINE, KVSizing


def kv_csv(sizing: KVSizing, path: str | Path | None = None) -> str:
    """The KV cache layer by layer, on one GPU of the tensor-parallel group, in bytes.

    Columns: the settings, what the group as a whole needs (``pool_bytes_per_gpu``, of which
    ``padding_bytes_per_gpu`` belongs to no layer), the layer, and its bytes by each account. Empty
    where there is none: the window of a full layer, the hybrid manager off where the engine
    refuses that. Written to ``path`` too, where one is given.

    Raises:
        FileError: the file cannot be written.
    """
    shared = {
        **_settings(sizing.settings),
        "drafter": sizing.drafter is not None,
        "engine": ENGINE,
        "pool_bytes_per_gpu": sizing.pool_bytes,
        "padding_bytes_per_gpu": sizing.per_gpu("admission").padding,
    }
    rows = [
        {
            **shared,
            "layer": layer.index,
            "attention": layer.attention,
            "of_drafter": layer.drafter,
            "window_tokens": layer.window,
            "ideal_bytes_per_gpu": layer.ideal_bytes,
            "admission_bytes_per_gpu": layer.admission_bytes,
            "hybrid_off_bytes_per_gpu": layer.hybrid_off_bytes,
            "naive_bytes_per_gpu": layer.naive_bytes,
        }
        for layer in sizing.per_layer
    ]
    return _csv(rows, path)


def plans_csv(plans: Iterable[Plan], path: str | Path | None = None) -> str:
    """Plans, one a row: what each needs and leaves on a GPU, how far it reaches, its command.

    The command is on one line; ``workspace_bytes_per_gpu`` is modelled. Written to ``path`` too,
    where one is given.

    Raises:
        SizingError: there are no plans.
        FileError: the file cannot be written.
    """
    rows = [
        {
            "model": plan.model,
            "gpu": plan.gpu.name,
            "gpus": plan.layout.gpus,
            "layout": plan.layout.name,
            "data_parallel_groups": plan.layout.dp,
            "expert_parallel": plan.layout.expert_parallel,
            "weights": plan.precision.name,
            "sequences": plan.sequences,
            "sequences_per_group": plan.sequences_per_group,
            **{k: v for k, v in _settings(plan.kv.settings).items() if k != "sequences"},
            "drafter": plan.kv.drafter is not None,
            "engine": ENGINE,
            "memory_bytes_per_gpu": plan.memory_bytes,
            "budget_bytes_per_gpu": plan.budget_bytes,
            "weights_bytes_per_gpu": plan.weights_bytes,
            "workspace_bytes_per_gpu": plan.workspace_bytes,
            "kv_bytes_per_gpu": plan.kv_bytes,
            "free_bytes_per_gpu": plan.free_bytes,
            "fits": plan.fits,
            "runs": plan.runs,
            "max_context_tokens": plan.max_context,
            "max_sequences": plan.max_sequences,
            "refusals": "; ".join(plan.refusals),
            "serve_command": shlex.join(plan.arguments),
        }
        for plan in plans
    ]
    if not rows:
        raise SizingError("there is no plan to write; give at least one")
    return _csv(rows, path)


def _settings(s: KVSettings) -> dict[str, Any]:
    return {
        "context_tokens": s.context,
        "sequences": s.sequences,
        "kv_dtype": s.kv_dtype,
        "tp_ranks": s.tp,
        "block_size_tokens": s.block_size,
        "batched_tokens": s.batched_tokens,
        "async_scheduling": s.async_scheduling,
    }


def _csv(rows: list[dict[str, Any]], path: str | Path | None) -> str:
    text = io.StringIO()
    table = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    if path is not None:
        write_whole(expand(path), text.getvalue().encode("utf-8"))
    return text.getvalue()
