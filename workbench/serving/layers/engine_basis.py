"""What an engine was asked for: what its layers are expected by, and compared itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.errors import ServingError
from workbench.model.config import BeamConfig, is_int
from workbench.model.drafter_config import DFlash2Config
from workbench.model.kv_planner import KVPlan
from workbench.model.layout import Layout
from workbench.model.plan import Plan
from workbench.model.sizing import KVSizing
from workbench.model.weights import Precision
from workbench.serving.layers.engine_expected import Basis, Source, Value, kv_groups, kv_name
from workbench.serving.layers.engine_values import LayerField

_KV = {"bf16": "bfloat16", "fp8": "fp8"}


def basis_of(
    document: Mapping[str, Any],
    config: BeamConfig,
    drafter: DFlash2Config | None,
    plan: Plan | KVSizing | None,
    notes: list[str],
) -> Basis:
    """What the expectation stands on: the plan where there is one, else the engine's settings.

    Appends to ``notes`` what could not be settled.

    Raises:
        ServingError: the worker does not say how it is split, and there is no plan.
        SizingError: the model cannot be split so.
    """
    settings, rank = document.get("settings") or {}, document.get("rank") or {}
    planned = plan.kv if isinstance(plan, Plan) else plan
    if planned is not None and planned.config != config:
        notes.append("the plan is of another configuration than the layers are compared with")
    dtype = settings.get("dtype")
    if not isinstance(dtype, str):
        dtype = str(config.extra.get("dtype") or config.extra.get("torch_dtype") or "bfloat16")
        notes.append(f"the engine does not say its dtype; taken as {dtype}")
    layout, split = _layout(rank, plan)
    layout.check(config)
    precision, precision_source = _precision(config, plan, notes)
    kv_dtype = kv_name(settings.get("kv_cache_dtype"), dtype)
    if planned is not None:
        kv_dtype = _KV[planned.settings.kv_dtype]
    kv_plan = _kv_plan(settings, config, drafter, planned, layout, kv_dtype)
    if kv_plan is None:
        notes.append(
            "the KV cache's groups are not compared: its block size or precision is not known, or "
            "the engine would refuse these layers"
        )
    return Basis(
        layout=layout,
        dtype=dtype,
        precision=precision,
        precision_source=precision_source,
        kv_dtype=kv_dtype,
        kv_source="setting" if planned is None else "plan",
        split_source=split,
        kv_plan=kv_plan,
    )


def _layout(rank: Mapping[str, Any], plan: Plan | KVSizing | None) -> tuple[Layout, Source]:
    if isinstance(plan, Plan):
        return plan.layout, "plan"
    tp = rank.get("tp") if plan is None else plan.settings.tp
    dp = rank.get("dp") or 1
    if not is_int(tp) or not is_int(dp) or tp < 1 or dp < 1:
        raise ServingError(
            "the worker does not say over how many ranks the model is split; give plan="
        )
    layout = Layout(tp=tp, dp=dp, expert_parallel=rank.get("expert_parallel") is True)
    return layout, "setting" if plan is None else "plan"


def _kv_plan(
    settings: Mapping[str, Any],
    config: BeamConfig,
    drafter: DFlash2Config | None,
    planned: KVSizing | None,
    layout: Layout,
    kv_dtype: str | None,
) -> KVPlan | None:
    """Groups of the plan, or by the rule for what the engine was asked for."""
    off = settings.get("hybrid_manager_off") is True
    if planned is not None and (planned.config, planned.drafter) == (config, drafter):
        return planned.hybrid_off_plan if off else planned.plan
    block = settings.get("block_size") if planned is None else planned.settings.block_size
    if not is_int(block) or block < 1:
        return None
    return kv_groups(config, drafter, layout, kv_dtype, block, hybrid=not off)


def _precision(
    config: BeamConfig, plan: Plan | KVSizing | None, notes: list[str]
) -> tuple[Precision | None, Source]:
    if isinstance(plan, Plan):
        return plan.precision, "plan"
    if config.extra.get("quantization_config") is None:
        return Precision(), "config"
    notes.append(
        "the checkpoint is quantised: give the plan it was made for, to compare weights as well"
    )
    return None, ""


def settings_fields(
    document: Mapping[str, Any], plan: Plan | KVSizing | None
) -> tuple[LayerField, ...]:
    """The engine's own settings beside the plan's; without a plan they are shown uncompared."""
    settings, rank = document.get("settings") or {}, document.get("rank") or {}
    wanted: dict[str, Value] = {}
    if plan is not None:
        kv = (plan.kv if isinstance(plan, Plan) else plan).settings
        wanted = {
            "tensor parallel": kv.tp, "context": kv.context, "KV cache": _KV[kv.kv_dtype],
            "block size": kv.block_size, "tokens in a batch": kv.batched_tokens,
        }  # fmt: skip
    if isinstance(plan, Plan):
        wanted |= {
            "data parallel": plan.layout.dp, "expert parallel": plan.layout.expert_parallel,
            "sequences at once": plan.sequences_per_group,
        }  # fmt: skip
    found: dict[str, Value] = {
        "tensor parallel": rank.get("tp"),
        "data parallel": rank.get("dp"),
        "expert parallel": rank.get("expert_parallel"),
        "context": settings.get("max_model_len"),
        "KV cache": kv_name(settings.get("kv_cache_dtype"), settings.get("dtype")),
        "block size": settings.get("block_size"),
        "tokens in a batch": settings.get("max_num_batched_tokens"),
        "sequences at once": settings.get("max_num_seqs"),
    }
    return tuple(
        LayerField(
            name=name,
            expected=wanted.get(name),
            found=value,
            source="plan" if name in wanted else "",
        )
        for name, value in found.items()
    )
