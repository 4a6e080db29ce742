"""What the plugin registers, which checkpoints its model takes, and vLLM's own reader as oracle."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from serving_real.server import ENVIRONMENT, FOLDER
from workbench.serving.vllm_plugin.reply_reader import read_reply, state_after
from workbench.serving.vllm_plugin.response_template import ResponseTemplate

LACKING = "model.layers.3.mlp.experts.7.up_proj.weight"
Tensors = dict[str, torch.Tensor]
CONFIG = json.loads((FOLDER / "tokenizer_config.json").read_text("utf-8"))
PREFIX = "<|bos|><|user|><think>1 + 1?<|end|><|assistant|><think>"
CALL = '<tool_call>add\n{"x": 1}</tool_call>'
TEXTS = [
    "Easy.</think><answer>2</answer>",
    "Easy.</think><answer>2</answer><|end|>",
    f"So.</think>{CALL}",
    f"So.</think><answer>One</answer>{CALL}{CALL}",
    "a < b</th</think><answer>c <tool_call> d</answer>",
    "cut off in the mid",
    "So.</think><answer>cut off",
    "</think><answer>2</answer>",
]


def fused(tensors: Tensors) -> Tensors:
    """The same checkpoint with each layer's experts in two tensors."""
    out: Tensors = {}
    stacks: dict[str, dict[tuple[str, int], torch.Tensor]] = {}
    for name, tensor in tensors.items():
        prefix, found, rest = name.partition(".mlp.experts.")
        if not found:
            out[name] = tensor
            continue
        expert, word, _ = rest.split(".")
        stacks.setdefault(f"{prefix}.mlp.experts.", {})[word, int(expert)] = tensor
    for prefix, parts in stacks.items():
        count = 1 + max(expert for _, expert in parts)
        both = [torch.cat((parts["gate_proj", e], parts["up_proj", e])) for e in range(count)]
        out[f"{prefix}gate_up_proj"] = torch.stack(both)
        out[f"{prefix}down_proj"] = torch.stack([parts["down_proj", e] for e in range(count)])
    return out


def lacking(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != LACKING}


def besides(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.3.mlp.shared.weight": torch.zeros(2)}


def misshapen(tensors: Tensors) -> Tensors:
    return tensors | {"model.norm.weight": torch.zeros(255, dtype=torch.bfloat16)}


@pytest.fixture(scope="module")
def outcome(
    serving_python: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What came of each checkpoint, all in one process."""
    kinds: dict[str, Callable[[Tensors], Tensors]] = {
        "plain": dict,
        "fused": fused,
        "lacking": lacking,
        "besides": besides,
        "misshapen": misshapen,
    }
    base = tmp_path_factory.mktemp("checkpoints")
    tensors = load_file(FOLDER / "model.safetensors")
    for kind, change in kinds.items():
        (base / kind).mkdir()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(FOLDER / name, base / kind)
        save_file(change(tensors), base / kind / "model.safetensors")
    asked = {"template": CONFIG["response_template"], "prefix": PREFIX, "texts": TEXTS}
    (base / "replies.json").write_text(json.dumps(asked), "utf-8")
    script = Path(__file__).with_name("load_check.py")
    done = subprocess.run(
        [
            serving_python,
            str(script),
            str(base / "replies.json"),
            *(str(base / kind) for kind in kinds),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        cwd=base,
        env=os.environ | ENVIRONMENT | {"VLLM_CACHE_ROOT": str(base / "cache")},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line[:1] in "[{"]
    return dict(zip(("registered", "replies", *kinds), lines, strict=True))


def test_what_is_registered(outcome: dict[str, dict[str, Any]]) -> None:
    assert outcome["registered"] == {
        "again": True,
        "model": True,
        "config": "BeamEngineConfig",
        "reasoning": "BeamReasoningParser",
        "tools": "BeamToolParser",
    }


def test_experts_one_by_one_and_fused_are_the_same(outcome: dict[str, dict[str, Any]]) -> None:
    assert len(outcome["plain"]["parameters"]) > 80
    assert outcome["plain"] == outcome["fused"]


def test_a_tensor_missing_or_besides_is_an_error(outcome: dict[str, dict[str, Any]]) -> None:
    for kind, message in (
        ("lacking", f"the checkpoint lacks {LACKING}; fetch all of its files again"),
        ("besides", "holds model.layers.3.mlp.shared.weight, which a Beam of its config.json does"),
        (
            "misshapen",
            "the checkpoint's model.norm.weight is [255]; its config.json asks for [256]",
        ),
    ):
        assert "CheckpointError" in outcome[kind]["error"]
        assert message in outcome[kind]["error"]


def test_vllms_own_reader_agrees(outcome: dict[str, Any]) -> None:
    """It strips texts and parses arguments; apart from that a reply is the same."""
    template = ResponseTemplate.of(CONFIG["response_template"])
    for text, said in zip(TEXTS, outcome["replies"], strict=True):
        inside = state_after(template, PREFIX).inside
        ours = read_reply(template, text, inside=inside, silent=("<|end|>",))
        calls = [
            {"type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
            for c in ours.calls
        ]
        wanted = {"role": "assistant", "thinking": ours.thinking, "content": ours.content}
        wanted = {k: v for k, v in wanted.items() if v} | ({"tool_calls": calls} if calls else {})
        assert said == wanted, text
