"""Small random checkpoints and what the FP64 reference makes of them, each made once a session."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reference import beam_fp64

DATA = Path(__file__).resolve().parents[1] / "data"
TOKENS = 45  # nine windows of the smallest config


def _recorded(name: str) -> dict[str, Any]:
    return json.loads((DATA / f"engine_beam_{name}.json").read_text())["config"]


FEATURES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 5,
    "max_position_embeddings": 512,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "final_logit_softcapping": 6.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
CONFIGS: dict[str, dict[str, Any]] = {
    # Every feature at once, groups that bind.
    "features": FEATURES,
    # The defaults of absent fields: all sliding, all sparse, head_dim = hidden / heads, no cap.
    "defaults": {
        key: value
        for key, value in FEATURES.items()
        if key
        not in (
            "layer_types", "mlp_layer_types", "head_dim", "n_group", "topk_group",
            "routed_scaling_factor", "final_logit_softcapping", "rope_parameters",
        )
    }
    | {"norm_topk_prob": False, "num_key_value_heads": 1},
    # More experts than are computed densely, full attention only, every head its own KV head.
    "many_experts": FEATURES
    | {
        "num_experts": 40, "n_group": None, "topk_group": None, "num_key_value_heads": 4,
        "layer_types": ["full_attention"] * 4, "mlp_layer_types": ["sparse"] * 4,
    },
    # What the engine's vectors were recorded with.
    "engine_plain": _recorded("plain"),
    "engine_grouped": _recorded("grouped"),
}  # fmt: skip


@dataclass(frozen=True)
class Small:
    """A checkpoint folder, its FP64 weights, a prompt, and the reference's forward pass of it."""

    folder: Path
    config: dict[str, Any]
    weights: dict[str, np.ndarray]
    tokens: list[int]
    reference: dict[str, Any]

    @property
    def ids(self) -> torch.Tensor:
        return torch.tensor(self.tokens)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Small]:
    """Makes the checkpoint of a name in CONFIGS."""
    made: dict[str, Small] = {}

    def make(name: str) -> Small:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            beam_fp64.random_checkpoint(folder, CONFIGS[name], seed=len(name))
            config, weights = beam_fp64.load_reference(folder)
            generator = np.random.default_rng(len(name))
            tokens = generator.integers(0, config["vocab_size"], TOKENS).tolist()
            reference = beam_fp64.forward(config, weights, tokens)
            made[name] = Small(folder, config, weights, tokens, reference)
        return made[name]

    return make


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """These models are so small that a second thread only adds the cost of waking it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=CONFIGS)
def each_small(request: pytest.FixtureRequest, small: Callable[[str], Small]) -> Small:
    """Each of CONFIGS in turn."""
    return small(request.param)


@pytest.fixture
def features(small: Callable[[str], Small]) -> Small:
    """The config with every feature on."""
    return small("features")
