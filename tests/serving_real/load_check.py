"""Run by the Python that has vLLM; prints JSON lines.

First what the plugin registered and that doing so again changes nothing, then what vLLM's own
reader of a ``response_template`` makes of replies (first argument: a file with template, prefix and
texts), then for each folder how vLLM's own loader fared: ``{"parameters": {name: sha256}}`` or
``{"error": …}``.
"""

from __future__ import annotations

import hashlib
import json
import socket
import sys
from pathlib import Path
from typing import Any

import torch


def registered() -> dict[str, Any]:
    """What vLLM says of Beam after its plugins were loaded, twice."""
    from vllm import ModelRegistry
    from vllm.plugins import load_general_plugins
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    from workbench.serving.vllm_plugin import register

    load_general_plugins()
    first = ModelRegistry.models["BeamForCausalLM"]
    register()
    return {
        "again": ModelRegistry.models["BeamForCausalLM"] is first,
        "model": "BeamForCausalLM" in ModelRegistry.get_supported_archs(),
        "config": _CONFIG_REGISTRY["beam"].__name__,
        "reasoning": ReasoningParserManager.get_reasoning_parser("beam").__name__,
        "tools": ToolParserManager.get_tool_parser("beam").__name__,
    }


def replies(file: str) -> list[Any]:
    """Each text as vLLM reads it, or the error that it makes of it."""
    from vllm.parser.chat_parsing import parse_response

    asked = json.loads(Path(file).read_text("utf-8"))
    messages: list[Any] = []
    for text in asked["texts"]:
        try:
            messages.append(parse_response(text, asked["template"], prefix=asked["prefix"]))
        except ValueError as error:
            messages.append({"error": str(error)})
    return messages


def loaded(folder: str) -> dict[str, Any]:
    """One checkpoint through vLLM's loader."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import model_parallel_is_initialized
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader

    config = EngineArgs(
        model=folder, dtype="float32", enforce_eager=True, max_model_len=64
    ).create_engine_config()
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
            initialize_model_parallel(1, 1)
        try:
            model = get_model_loader(config.load_config).load_model(
                vllm_config=config, model_config=config.model_config
            )
        except ValueError as error:
            return {"error": f"{type(error).__name__}: {error}"}
    return {
        "parameters": {
            name: hashlib.sha256(p.detach().contiguous().view(torch.uint8).numpy()).hexdigest()
            for name, p in model.named_parameters()
        }
    }


if __name__ == "__main__":
    torch.accelerator.empty_cache = lambda: None  # the loader calls it; vLLM's CPU runner does this
    print(json.dumps(registered()), flush=True)
    print(json.dumps(replies(sys.argv[1])), flush=True)
    for argument in sys.argv[2:]:
        print(json.dumps(loaded(argument)), flush=True)
