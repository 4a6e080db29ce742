"""The training pass's attention; what it does on CUDA is compared with the plain form here.

Forward only: FlexAttention has no backward on a CPU.
"""

import pytest
import torch

from workbench.kernels import registry
from workbench.kernels.layers import LayerKinds
from workbench.kernels.requirements import Where
from workbench.model.config import BeamConfig
from workbench.model.context import SequenceContext
from workbench.training.context import TrainingContext, window_blocks

SLIDING, FULL = 0, 2  # layers of the small configuration


def attend(context: SequenceContext, layer: int, heads: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What a layer's attention gives for q, and k and v already where they belong."""
    q, context.k, context.v = heads
    where = Where.of("cpu", torch.float32)
    context.kernels = registry.resolve(LayerKinds.of(context.config), where).layers
    return context.attend(layer, q)


def heads(batch: int, length: int, config: BeamConfig) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    counts = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    return tuple(
        torch.randn(batch * length, count, config.head_dim, generator=generator) for count in counts
    )


@pytest.mark.parametrize("layer", [SLIDING, FULL])
def test_on_a_cpu_it_is_the_sequence_context(small_config: BeamConfig, layer: int) -> None:
    qkv = heads(3, 40, small_config)
    training = TrainingContext(small_config, 3, 40, "cpu")
    plain = SequenceContext(small_config, 3, 40, "cpu")
    assert training.window_blocks is None
    assert torch.equal(attend(training, layer, qkv), attend(plain, layer, qkv))
    for name in ("positions", "rope"):
        assert torch.equal(getattr(training, name), getattr(plain, name))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("window", "length"), [(8, 40), (8, 5), (1, 20), (40, 300), (128, 256)])
def test_the_window_as_flex_attention_sees_it(
    small_config: BeamConfig, window: int, length: int
) -> None:
    """The branch that CUDA takes, on a CPU, against the mask of the plain context."""
    config = small_config.replace(sliding_window=window, max_position_embeddings=300)
    qkv = heads(2, length, config)
    training = TrainingContext(config, 2, length, "cpu")
    training.window_blocks = window_blocks(window, length, "cpu")
    plain = SequenceContext(config, 2, length, "cpu")
    torch.testing.assert_close(
        attend(training, SLIDING, qkv), attend(plain, SLIDING, qkv), rtol=0, atol=1e-5
    )
    # Full layers do not go through the window.
    assert torch.equal(attend(training, FULL, qkv), attend(plain, FULL, qkv))


def test_blocks_outside_the_window_are_skipped() -> None:
    blocks = window_blocks(128, 1024, "cpu")
    # Of 8 x 8 blocks of 128: the diagonal and the one before it, 15 in all.
    assert blocks.sparsity() == pytest.approx(100 * (1 - 15 / 64), abs=0.01)
