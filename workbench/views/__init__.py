"""Views: values in, figures out. Every view is a picture, a text and, where it helps, a page.

Each function takes a value that ``workbench.info``, ``workbench.capture`` and their like return,
and gives a :class:`View`; :func:`live` and :func:`explore` give dashboards bound to a model,
:func:`switchboard` one that swaps its kernels, :func:`size_memory` one that needs a model's shape
only. The modules are imported when first used: plotly and ipywidgets cost nothing before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# name -> module that defines it
_PUBLIC = {
    "View": "view",
    "ablation_effect": "experts",
    "active_curve": "weights",
    "attention_maps": "attention",
    "compiled_kernels": "kernel_pages",
    "experts_touched": "touched",
    "explore": "explorer",
    "kernel_fractions": "kernel_rates",
    "kernel_operations": "kernel_pages",
    "kernel_roofline": "kernel_rates",
    "kernel_table": "kernel_pages",
    "kernel_trial": "kernel_pages",
    "kernel_variants": "kernel_pages",
    "kv_accounts": "kv_pages",
    "kv_growth": "kv_figures",
    "kv_per_gpu": "kv_memory",
    "kv_strip": "kv_figures",
    "layer_strip": "layers",
    "live": "live_tokens",
    "logit_lens": "lens",
    "parameter_treemap": "parameters",
    "plan_table": "kv_pages",
    "position_reach": "positions",
    "reconciliation": "startup",
    "residual_scale": "residual",
    "router_load": "experts",
    "size_memory": "kv_dashboard",
    "step_breakdown": "steps",
    "step_comparisons": "model_check",
    "swap_comparison": "kernel_swap",
    "switchboard": "kernel_switchboard",
    "this_machine": "machine",
    "weight_bars": "weights",
    "written": "tokens",
}

__all__ = [*_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'workbench.views' has no attribute {name!r}")
    value = getattr(import_module(f"workbench.views.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


# "as" marks them as public for type checkers.
if TYPE_CHECKING:
    from workbench.views.attention import attention_maps as attention_maps
    from workbench.views.experts import ablation_effect as ablation_effect
    from workbench.views.experts import router_load as router_load
    from workbench.views.explorer import explore as explore
    from workbench.views.kernel_pages import compiled_kernels as compiled_kernels
    from workbench.views.kernel_pages import kernel_operations as kernel_operations
    from workbench.views.kernel_pages import kernel_table as kernel_table
    from workbench.views.kernel_pages import kernel_trial as kernel_trial
    from workbench.views.kernel_pages import kernel_variants as kernel_variants
    from workbench.views.kernel_rates import kernel_fractions as kernel_fractions
    from workbench.views.kernel_rates import kernel_roofline as kernel_roofline
    from workbench.views.kernel_swap import swap_comparison as swap_comparison
    from workbench.views.kernel_switchboard import switchboard as switchboard
    from workbench.views.kv_dashboard import size_memory as size_memory
    from workbench.views.kv_figures import kv_growth as kv_growth
    from workbench.views.kv_figures import kv_strip as kv_strip
    from workbench.views.kv_memory import kv_per_gpu as kv_per_gpu
    from workbench.views.kv_pages import kv_accounts as kv_accounts
    from workbench.views.kv_pages import plan_table as plan_table
    from workbench.views.layers import layer_strip as layer_strip
    from workbench.views.lens import logit_lens as logit_lens
    from workbench.views.live_tokens import live as live
    from workbench.views.machine import this_machine as this_machine
    from workbench.views.model_check import step_comparisons as step_comparisons
    from workbench.views.parameters import parameter_treemap as parameter_treemap
    from workbench.views.positions import position_reach as position_reach
    from workbench.views.residual import residual_scale as residual_scale
    from workbench.views.startup import reconciliation as reconciliation
    from workbench.views.steps import step_breakdown as step_breakdown
    from workbench.views.tokens import written as written
    from workbench.views.touched import experts_touched as experts_touched
    from workbench.views.view import View as View
    from workbench.views.weights import active_curve as active_curve
    from workbench.views.weights import weight_bars as weight_bars
