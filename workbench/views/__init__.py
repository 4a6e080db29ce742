"""Views: values in, figures out. Every view is a picture, a text and, where it helps, a page.

Each function takes a value that ``workbench.info``, ``workbench.capture`` and their like return,
and gives a :class:`View`; :func:`live`, :func:`explore`, :func:`drafting` and :func:`adaptive` give
dashboards bound to a model, :func:`switchboard` one that swaps its kernels, :func:`size_memory` and
:func:`drafting_replay` such that need no weights. The modules are imported when first used: plotly
and ipywidgets cost nothing before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# name -> module that defines it
_PUBLIC = {
    "View": "view",
    "ablation_effect": "experts",
    "acceptance_by": "spec_groups",
    "acceptance_curves": "spec_curves",
    "acceptance_histogram": "spec_curves",
    "acceptance_running": "spec_curves",
    "active_curve": "weights",
    "adaptive": "adaptive_board",
    "attention_maps": "attention",
    "beside_published": "published_serving",
    "block_strip": "spec_blocks",
    "built_layers": "engine_layers",
    "chat": "chat_board",
    "compare_runs": "spec_runs",
    "compiled_kernels": "kernel_pages",
    "concurrency_sweep": "adaptive_sweep",
    "conversation": "chat_page",
    "cost_curves": "adaptive_costs",
    "decisions_over_time": "adaptive_time",
    "drafting": "drafting_board",
    "drafting_replay": "drafting_trace",
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
    "layer_parity": "parity_figure",
    "layer_strip": "layers",
    "live": "live_tokens",
    "logit_lens": "lens",
    "objective_curve": "adaptive_objective",
    "parallel_calls": "parallel_costs",
    "parallel_load": "parallel_costs",
    "parallel_prefill": "parallel_layouts",
    "parallel_waterfall": "parallel_decode",
    "parameter_treemap": "parameters",
    "plan_table": "kv_pages",
    "policy_comparison": "adaptive_policies",
    "position_reach": "positions",
    "rank_contexts": "rank_lengths",
    "rank_kernels": "rank_times",
    "rank_leave_one_out": "rank_decode",
    "rank_load": "rank_batches",
    "rank_prefill": "rank_prompts",
    "rank_verify": "rank_batches",
    "rank_waterfall": "rank_decode",
    "reconciliation": "startup",
    "reliability_diagram": "adaptive_reliability",
    "residual_scale": "residual",
    "router_load": "experts",
    "selector_lengths": "spec_groups",
    "serving": "serving_board",
    "serving_acceptance": "serving_figures",
    "serving_latency": "serving_figures",
    "serving_load": "serving_figures",
    "serving_throughput": "serving_figures",
    "size_memory": "kv_dashboard",
    "speculative_speed": "spec_speed",
    "step_breakdown": "steps",
    "step_comparisons": "model_check",
    "survival_map": "adaptive_survival",
    "swap_comparison": "kernel_swap",
    "sweep_figure": "spec_speed",
    "switchboard": "kernel_switchboard",
    "this_machine": "machine",
    "training_blocks": "drafter_training",
    "training_curve": "drafter_training",
    "training_mask": "drafter_training",
    "watch_training": "drafter_training",
    "weight_bars": "weights",
    "written": "tokens",
    "written_with_drafts": "spec_text",
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
    from workbench.views.adaptive_board import adaptive as adaptive
    from workbench.views.adaptive_costs import cost_curves as cost_curves
    from workbench.views.adaptive_objective import objective_curve as objective_curve
    from workbench.views.adaptive_policies import policy_comparison as policy_comparison
    from workbench.views.adaptive_reliability import reliability_diagram as reliability_diagram
    from workbench.views.adaptive_survival import survival_map as survival_map
    from workbench.views.adaptive_sweep import concurrency_sweep as concurrency_sweep
    from workbench.views.adaptive_time import decisions_over_time as decisions_over_time
    from workbench.views.attention import attention_maps as attention_maps
    from workbench.views.chat_board import chat as chat
    from workbench.views.chat_page import conversation as conversation
    from workbench.views.drafter_training import training_blocks as training_blocks
    from workbench.views.drafter_training import training_curve as training_curve
    from workbench.views.drafter_training import training_mask as training_mask
    from workbench.views.drafter_training import watch_training as watch_training
    from workbench.views.drafting_board import drafting as drafting
    from workbench.views.drafting_trace import drafting_replay as drafting_replay
    from workbench.views.engine_layers import built_layers as built_layers
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
    from workbench.views.parallel_costs import parallel_calls as parallel_calls
    from workbench.views.parallel_costs import parallel_load as parallel_load
    from workbench.views.parallel_decode import parallel_waterfall as parallel_waterfall
    from workbench.views.parallel_layouts import parallel_prefill as parallel_prefill
    from workbench.views.parameters import parameter_treemap as parameter_treemap
    from workbench.views.parity_figure import layer_parity as layer_parity
    from workbench.views.positions import position_reach as position_reach
    from workbench.views.published_serving import beside_published as beside_published
    from workbench.views.rank_batches import rank_load as rank_load
    from workbench.views.rank_batches import rank_verify as rank_verify
    from workbench.views.rank_decode import rank_leave_one_out as rank_leave_one_out
    from workbench.views.rank_decode import rank_waterfall as rank_waterfall
    from workbench.views.rank_lengths import rank_contexts as rank_contexts
    from workbench.views.rank_prompts import rank_prefill as rank_prefill
    from workbench.views.rank_times import rank_kernels as rank_kernels
    from workbench.views.residual import residual_scale as residual_scale
    from workbench.views.serving_board import serving as serving
    from workbench.views.serving_figures import serving_acceptance as serving_acceptance
    from workbench.views.serving_figures import serving_latency as serving_latency
    from workbench.views.serving_figures import serving_load as serving_load
    from workbench.views.serving_figures import serving_throughput as serving_throughput
    from workbench.views.spec_blocks import block_strip as block_strip
    from workbench.views.spec_curves import acceptance_curves as acceptance_curves
    from workbench.views.spec_curves import acceptance_histogram as acceptance_histogram
    from workbench.views.spec_curves import acceptance_running as acceptance_running
    from workbench.views.spec_groups import acceptance_by as acceptance_by
    from workbench.views.spec_groups import selector_lengths as selector_lengths
    from workbench.views.spec_runs import compare_runs as compare_runs
    from workbench.views.spec_speed import speculative_speed as speculative_speed
    from workbench.views.spec_speed import sweep_figure as sweep_figure
    from workbench.views.spec_text import written_with_drafts as written_with_drafts
    from workbench.views.startup import reconciliation as reconciliation
    from workbench.views.steps import step_breakdown as step_breakdown
    from workbench.views.tokens import written as written
    from workbench.views.touched import experts_touched as experts_touched
    from workbench.views.view import View as View
    from workbench.views.weights import active_curve as active_curve
    from workbench.views.weights import weight_bars as weight_bars
