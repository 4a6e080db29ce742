"""A small random model that reads text, and values to draw."""

from collections.abc import Iterator

import pytest
import torch

import workbench
from workbench.model.beam import Beam
from workbench.model.config import BeamConfig
from workbench.model.inspect import Capture
from workbench.model.presets import ZOO
from workbench.model.tokenizer import Tokenizer

WINDOW = 6
PROMPT = "def mean(values):\n    return sum(values) / len(values)\n"


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from threads, and lose much where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def beam() -> Beam:
    """Five layers, two of them full; the window is shorter than the prompts; random weights."""
    kinds = ("sliding_attention", "full_attention")
    config = BeamConfig(
        vocab_size=4096,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        layer_types=tuple(kinds[i in (1, 4)] for i in range(5)),
        mlp_layer_types=("dense", *("sparse",) * 4),
        sliding_window=WINDOW,
        max_position_embeddings=2048,
        final_logit_softcapping=30.0,
    )
    model = Beam(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
            if "norm" in name:
                weight.add_(1)
    model.name, model.tokenizer = "small", Tokenizer.from_folder(ZOO / "beam-tiny")
    return model.eval()


@pytest.fixture(scope="session")
def seen(beam: Beam) -> Capture:
    return workbench.capture(beam, PROMPT, attention=True)
