"""Views: values in, figures out. Every view is a picture, a text and, where it helps, a page.

Each function takes a value that ``workbench.info``, ``workbench.capture`` and their like return,
and gives a :class:`View`; :func:`live` and :func:`explore` give dashboards bound to a model. The
modules are imported when first used: plotly and ipywidgets cost nothing before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# name -> module that defines it
_PUBLIC = {
    "View": "view",
    "ablation_effect": "experts",
    "attention_maps": "attention",
    "explore": "explorer",
    "layer_strip": "layers",
    "live": "live_tokens",
    "logit_lens": "lens",
    "parameter_treemap": "parameters",
    "position_reach": "positions",
    "residual_scale": "residual",
    "router_load": "experts",
    "this_machine": "machine",
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
    from workbench.views.layers import layer_strip as layer_strip
    from workbench.views.lens import logit_lens as logit_lens
    from workbench.views.live_tokens import live as live
    from workbench.views.machine import this_machine as this_machine
    from workbench.views.parameters import parameter_treemap as parameter_treemap
    from workbench.views.positions import position_reach as position_reach
    from workbench.views.residual import residual_scale as residual_scale
    from workbench.views.tokens import written as written
    from workbench.views.view import View as View
