"""Beam Workbench: a notebook-first research workbench for Reflection Beam.

The public entry points are listed here and nowhere else; each is imported when first used, so
``import workbench`` costs nothing and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench import kernels as kernels
    from workbench import views as views
    from workbench.errors import WorkbenchError as WorkbenchError
    from workbench.hardware import machine as machine
    from workbench.loading import load as load
    from workbench.model.checkpoint import save as save
    from workbench.model.config import BeamConfig as BeamConfig
    from workbench.model.generate import generate as generate
    from workbench.model.generate import stream as stream
    from workbench.model.info import info as info
    from workbench.model.inspect import capture as capture
    from workbench.model.inspect import intervene as intervene
    from workbench.model.inspect import logit_lens as logit_lens
    from workbench.model.plan import make_plan as make_plan
    from workbench.model.presets import resolve as resolve
    from workbench.model.sampling import Sampling as Sampling
    from workbench.model.sizing import size_kv as size_kv
    from workbench.model.swap import compare as compare_kernels  # noqa: F401 - renamed on purpose
    from workbench.model.tokenizer import Tokenizer as Tokenizer
    from workbench.model.weights import size_weights as size_weights
    from workbench.serving.client.chat import Chat as Chat
    from workbench.serving.client.client import Client as Client
    from workbench.serving.launch.launch import launch_of as launch_of
    from workbench.serving.layers.engine_layers import engine_layers as engine_layers
    from workbench.serving.monitor.monitor import Monitor as Monitor
    from workbench.serving.probe_read import read_probe as read_probe
    from workbench.serving.reconcile import reconcile as reconcile
    from workbench.serving.server.server import serve as serve
    from workbench.spec.decode import decode as decode
    from workbench.spec.drafter_checkpoint import load_drafter as load_drafter
    from workbench.spec.drafter_checkpoint import save_drafter as save_drafter
    from workbench.spec.metrics import Tally as Tally
    from workbench.spec.trace import Trace as Trace

__version__ = "0.1.0"

# Public name -> the module that defines it (":" and its name there, where that is another). The
# imports above are for type checkers only.
_PUBLIC = {
    "BeamConfig": "workbench.model.config",
    "Chat": "workbench.serving.client.chat",
    "Client": "workbench.serving.client.client",
    "Monitor": "workbench.serving.monitor.monitor",
    "Sampling": "workbench.model.sampling",
    "Tally": "workbench.spec.metrics",
    "Tokenizer": "workbench.model.tokenizer",
    "Trace": "workbench.spec.trace",
    "WorkbenchError": "workbench.errors",
    "capture": "workbench.model.inspect",
    "compare_kernels": "workbench.model.swap:compare",
    "decode": "workbench.spec.decode",
    "engine_layers": "workbench.serving.layers.engine_layers",
    "generate": "workbench.model.generate",
    "info": "workbench.model.info",
    "intervene": "workbench.model.inspect",
    "kernels": "workbench.kernels",
    "launch_of": "workbench.serving.launch.launch",
    "load": "workbench.loading",
    "load_drafter": "workbench.spec.drafter_checkpoint",
    "logit_lens": "workbench.model.inspect",
    "machine": "workbench.hardware",
    "make_plan": "workbench.model.plan",
    "read_probe": "workbench.serving.probe_read",
    "reconcile": "workbench.serving.reconcile",
    "resolve": "workbench.model.presets",
    "save": "workbench.model.checkpoint",
    "save_drafter": "workbench.spec.drafter_checkpoint",
    "serve": "workbench.serving.server.server",
    "size_kv": "workbench.model.sizing",
    "size_weights": "workbench.model.weights",
    "stream": "workbench.model.generate",
    "views": "workbench.views",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    home, _, there = _PUBLIC[name].partition(":")
    module = import_module(home)
    value = module if home == f"workbench.{name}" else getattr(module, there or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_PUBLIC, "__version__"])
