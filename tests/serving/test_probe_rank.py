"""``benchmarks/serving_probe_rank.py``: the shapes that one GPU of eight has, and their weights."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from workbench.model.config import BeamConfig
from workbench.model.drafter_config import DFlash2Config, drafter_tensors
from workbench.model.presets import resolve
from workbench.model.tensors import tensor_specs

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serving_probe_rank.py"


@pytest.fixture(scope="module")
def rank() -> Any:
    spec = importlib.util.spec_from_file_location("serving_probe_rank", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_the_ranks_shapes_are_those_that_were_measured_before(rank: Any) -> None:
    """Of the packed projections and of the experts, as `benchmarks/rank_decode.py` has them."""
    c = rank.target()
    heads = c.num_attention_heads + c.num_key_value_heads
    assert (2 * heads * c.head_dim, c.hidden_size) == (1792, 5120)
    assert (c.num_experts, 2 * c.moe_intermediate_size, c.intermediate_size) == (256, 640, 1536)
    assert (c.num_hidden_layers, c.vocab_size) == (52, 20480)
    assert [i for i, kind in enumerate(c.layer_types) if kind == "full_attention"] == list(
        range(3, 52, 6)
    )
    size = sum(4 * t.size if "gate.weight" in t.name else 2 * t.size for t in tensor_specs(c))
    assert 116.5 < size / 2**30 < 117.5
    drafter = sum(t.size for t in drafter_tensors(rank.drafter(c)))
    assert 0.3e9 < drafter < 0.5e9


@pytest.mark.parametrize("depth", [16, 26, 30, 52])
def test_folders_hold_a_model_and_a_drafter_that_the_planner_can_group(
    rank: Any, tmp_path: Path, depth: int
) -> None:
    model, drafter = rank.folders(tmp_path, depth)
    target = BeamConfig.from_dict(json.loads((model / "config.json").read_text()))
    draft = DFlash2Config.from_json(drafter)
    draft.check_target(target)
    counts = [target.layer_types.count(k) for k in ("full_attention", "sliding_attention")]
    assert target.num_hidden_layers == sum(counts) == depth
    assert 3 <= draft.num_hidden_layers <= min(*counts, 5)
    assert draft.sliding_window != target.sliding_window
    assert len(draft.target_layer_ids) == 5
    if depth == 52:
        assert draft.num_hidden_layers == 5
        whole = resolve("beam-501b").config
        assert draft.num_attention_heads * 8 == 32
        assert whole.head_dim == draft.head_dim


def test_a_depth_that_is_none_is_refused(rank: Any) -> None:
    for depth in (3, 53):
        with pytest.raises(ValueError, match="16 to 52 layers"):
            rank.target(depth)


class Drafter(nn.Module):
    """What the engine's drafter keeps twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.full((8,), 1e-3))
        self.k_proj = nn.Parameter(torch.full((8, 8), 1e-3))

    def build_context_kv_weights(self) -> None:
        self._context_kv_weight = torch.cat([self.k_proj])
        self._context_k_norm_weight = torch.stack([self.norm])


class Model(nn.Module):
    def __init__(self, inner: nn.Module, head: nn.Parameter) -> None:
        super().__init__()
        self.model = inner
        self.lm_head = head


def test_weights_become_a_models_in_the_memory_they_have(rank: Any) -> None:
    head = nn.Parameter(torch.full((4, 8), 1e-3, dtype=torch.bfloat16))
    target = Model(nn.Linear(8, 4, dtype=torch.float32), head)
    drafter = Model(Drafter(), head)
    with torch.inference_mode():
        drafter.model.build_context_kv_weights()
    before = {
        name: getattr(drafter.model, name)
        for name in ("_context_kv_weight", "_context_k_norm_weight")
    }
    places = {name: each.data_ptr() for name, each in before.items()}
    drafter.model.k_proj.data = drafter.model.k_proj.data.bfloat16()
    gib = rank.rescale([target, drafter])
    assert gib * 2**30 == 4 * 8 * 2 + 4 * 8 * 4 + 4 * 4 + 8 * 4 + 8 * 8 * 2
    assert head.float().mean().item() == pytest.approx(0.02, rel=0.01)  # once, though in both
    assert target.model.bias.count_nonzero() == 0
    assert 0.01 < target.model.weight.std().item() < 0.04
    assert drafter.model.norm.eq(1).all()
    for name, each in before.items():
        assert getattr(drafter.model, name) is each
        assert each.data_ptr() == places[name]
    assert before["_context_kv_weight"].float().mean().item() == pytest.approx(0.02, rel=0.01)
    assert before["_context_k_norm_weight"].eq(1).all()
