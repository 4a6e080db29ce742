"""What of the plugin runs without vLLM: ledger of tensors, stepping aside, configuration."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from safetensors import safe_open

import workbench
from workbench.errors import CheckpointError, ConfigError
from workbench.model.config import BeamConfig
from workbench.serving import vllm_plugin
from workbench.serving.vllm_plugin.ledger import Ledger

TINY = BeamConfig.from_json(
    str(workbench.__path__[0]) + "/model/zoo/beam-tiny"
)  # nine layers, sixteen experts


def shapes_in_the_file() -> dict[str, list[int]]:
    path = f"{workbench.__path__[0]}/model/zoo/beam-tiny/model.safetensors"
    with safe_open(path, "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def fused(shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    plain = {name: shape for name, shape in shapes.items() if ".experts." not in name}
    for layer in range(1, 9):
        plain[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = [16, 128, 256]
        plain[f"model.layers.{layer}.mlp.experts.down_proj"] = [16, 256, 64]
    return plain


def test_the_shipped_checkpoint_balances_in_any_order() -> None:
    shapes = shapes_in_the_file()
    for form in (shapes, dict(reversed(shapes.items())), fused(shapes)):
        ledger = Ledger(TINY)
        for name, shape in form.items():
            ledger.book(name, shape)
        ledger.close()


def test_any_one_tensor_that_is_missing_is_named() -> None:
    shapes = shapes_in_the_file()
    for form in (shapes, fused(shapes)):
        for absent in list(form)[::7]:
            ledger = Ledger(TINY)
            for name, shape in form.items():
                if name != absent:
                    ledger.book(name, shape)
            first = absent.replace("gate_up_proj", "0.gate_proj.weight")
            if "experts.down_proj" in first:
                first = first.replace("down_proj", "0.down_proj.weight")
            with pytest.raises(CheckpointError, match=f"lacks {first}"):
                ledger.close()


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "model.layers.9.input_layernorm.weight",
            [256],
            "which a Beam of its config.json does not",
        ),
        ("model.layers.0.mlp.gate.weight", [16, 256], "does not have"),  # layer 0 is dense
        ("model.layers.0.mlp.experts.down_proj", [16, 256, 64], "does not have"),
        ("model.norm.weight", [255], r"is \[255\]; its config.json asks for \[256\]"),
        ("model.layers.1.mlp.experts.down_proj", [16, 64, 256], "asks for"),
        ("lm_head.weight", [4096, 256], "holds lm_head.weight twice"),
        ("model.layers.1.mlp.experts.gate_up_proj", [16, 128, 256], "0.gate_proj.weight twice"),
    ],
)
def test_a_tensor_that_does_not_belong(name: str, shape: list[int], message: str) -> None:
    ledger = Ledger(TINY)
    ledger.book("lm_head.weight", [4096, 256])
    ledger.book("model.layers.1.mlp.experts.0.gate_proj.weight", [64, 256])
    with pytest.raises(CheckpointError, match=message):
        ledger.book(name, shape)


class Registry:
    """Stands for each of vLLM's registries here: names, and who was put under them."""

    def __init__(self, *names: str) -> None:
        self.known: dict[str, Any] = dict.fromkeys(names, "its own")

    def get_supported_archs(self) -> list[str]:
        return list(self.known)

    list_registered = get_supported_archs

    def register_model(self, name: str, path: str) -> None:
        self.known[name] = path

    def register_lazy_module(self, name: str, module: str, kind: str) -> None:
        self.known[name] = f"{module}:{kind}"

    def register(self, name: str, kind: Any, exist_ok: bool) -> None:
        assert exist_ok
        self.known[name] = kind


def compose(**settings: Any) -> Any:
    return settings


class Manager:
    """Stands for the part of vLLM that composes parsers by their names."""

    _compose_parser = staticmethod(compose)


def registering(
    monkeypatch: pytest.MonkeyPatch, *present: str, without: str = ""
) -> dict[str, Registry]:
    """Runs ``register`` twice against registries that have ``present`` already."""
    parts = {
        "models": Registry(
            "LlamaForCausalLM", *(["BeamForCausalLM"] if "models" in present else [])
        ),
        "reasoning": Registry(*(["beam"] if "reasoning" in present else ["qwen3"])),
        "tools": Registry(*(["beam"] if "tools" in present else ["qwen3"])),
        "auto": Registry(),
        "configs": Registry(*(["beam"] if "configs" in present else [])),
    }

    def module(name: str, **names: Any) -> None:
        made = ModuleType(name)
        for key, value in names.items():
            setattr(made, key, value)
        monkeypatch.setitem(sys.modules, name, made)

    module("transformers", AutoConfig=parts["auto"], PretrainedConfig=object)
    if hasattr(Manager, "_compose_parser"):
        monkeypatch.setattr(Manager, "_compose_parser", staticmethod(compose))
    module("vllm", ModelRegistry=parts["models"])
    module("vllm.parser", ParserManager=Manager)
    module("vllm.reasoning", ReasoningParserManager=parts["reasoning"])
    module("vllm.tool_parsers", ToolParserManager=parts["tools"])
    module("vllm.transformers_utils")
    module("vllm.transformers_utils.config", _CONFIG_REGISTRY=parts["configs"].known)
    if without in sys.modules:
        monkeypatch.setitem(sys.modules, without, None)
    monkeypatch.delitem(sys.modules, "workbench.serving.vllm_plugin.config", raising=False)
    vllm_plugin.register()
    first = {name: dict(part.known) for name, part in parts.items()}
    vllm_plugin.register()
    sys.modules.pop("workbench.serving.vllm_plugin.config", None)  # made of the stand-ins
    assert first == {name: part.known for name, part in parts.items()}
    return parts


def test_a_build_without_beam_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = registering(monkeypatch)
    here = "workbench.serving.vllm_plugin"
    assert parts["models"].known["BeamForCausalLM"] == f"{here}.model:BeamForCausalLM"
    assert parts["reasoning"].known["beam"] == f"{here}.parser:BeamReasoningParser"
    assert parts["tools"].known["beam"] == f"{here}.parser:BeamToolParser"
    assert parts["configs"].known["beam"].__name__ == "BeamEngineConfig"
    assert parts["auto"].known["beam"] is parts["configs"].known["beam"]


def test_a_build_with_beam_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for present in (("models",), ("models", "reasoning", "tools", "configs")):
        parts = registering(monkeypatch, *present)
        for name, part in parts.items():
            assert part.known.get("BeamForCausalLM", "its own") == "its own"
            assert part.known.get("beam") == ("its own" if name in present[1:] else None)
        assert not parts["auto"].known
    # What a build has of it is kept, the rest is added.
    parts = registering(monkeypatch, "reasoning")
    assert parts["reasoning"].known["beam"] == "its own"
    assert parts["tools"].known["beam"].endswith("BeamToolParser")


def test_a_vllm_that_it_does_not_fit_goes_on_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for lacks in ("vllm.parser", "vllm.reasoning", "_compose_parser"):
        if lacks == "_compose_parser":
            monkeypatch.delattr(Manager, lacks)
        parts = registering(monkeypatch, without=lacks)
        assert "BeamForCausalLM" not in parts["models"].known
        assert "does not fit this one" in caplog.text
        caplog.clear()


def test_names_of_parsers_that_do_not_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    registering(monkeypatch)
    settings = {"enable_auto_tools": True, "tool_strict_level": "auto"}
    names = {"reasoning_parser_name": "qwen3", "tool_parser_name": None}
    assert Manager._compose_parser(**settings, **names) == settings | names
    with pytest.raises(TypeError, match="cannot be combined with qwen3; name beam for both"):
        Manager._compose_parser(**settings, **names | {"tool_parser_name": "beam"})


def test_the_configuration_is_ours() -> None:
    pytest.importorskip("transformers")
    from workbench.serving.vllm_plugin.config import BeamEngineConfig

    config = BeamEngineConfig(**TINY.to_dict())
    assert config.beam() == TINY
    assert config.model_type == "beam"
    assert config.layer_types == list(TINY.layer_types)
    assert BeamEngineConfig(**config.to_dict()).beam() == TINY
    config.sliding_window = 64
    assert config.beam().sliding_window == 64
    with pytest.raises(ConfigError, match="hidden_size"):
        BeamEngineConfig(**TINY.to_dict() | {"hidden_size": 0})
