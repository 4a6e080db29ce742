"""The training pass's attention; what it does on CUDA is compared with the plain form here.

Forward only: FlexAttention has no backward on a CPU.
"""

import pytest
import torch

from workbench.model.config import BeamConfig
from workbench.model.context import SequenceContext
from workbench.training.context import TrainingContext, window_blocks

SLIDING, FULL = 0, 2  # layers of the small configuration


def heads(batch: int, length: int, config: BeamConfig) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    counts = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    return tuple(
        torch.randn(batch * length, count, config.head_dim, generator=generator) for count in counts
    )


@pytest.mark.parametrize("layer", [SLIDING, FULL])
def test_on_a_cpu_it_is_the_sequence_context(small_config: BeamConfig, layer: int) -> None:
    q, k, v = heads(3, 40, small_config)
    training = TrainingContext(small_config, 3, 40, "cpu")
    plain = SequenceContext(small_config, 3, 40, "cpu")
    assert training.window_blocks is None
    assert torch.equal(training.attend(layer, q, k, v), plain.attend(layer, q, k, v))
    for name in ("cos", "sin", "ssmax"):
        assert torch.equal(getattr(training, name), getattr(plain, name))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("window", "length"), [(8, 40), (8, 5), (1, 20), (40, 300), (128, 256)])
def test_the_window_as_flex_attention_sees_it(
    small_config: BeamConfig, window: int, length: int
) -> None:
    """The branch that CUDA takes, on a CPU, against the mask of the plain context."""
    config = small_config.replace(sliding_window=window, max_position_embeddings=300)
    q, k, v = heads(2, length, config)
    training = TrainingContext(config, 2, length, "cpu")
    training.window_blocks = window_blocks(window, length, "cpu")
    plain = SequenceContext(config, 2, length, "cpu")
    torch.testing.assert_close(
        training.attend(SLIDING, q, k, v), plain.attend(SLIDING, q, k, v), rtol=0, atol=1e-5
    )
    # Full layers do not go through the window.
    assert torch.equal(training.attend(FULL, q, k, v), plain.attend(FULL, q, k, v))


def test_blocks_outside_the_window_are_skipped() -> None:
    blocks = window_blocks(128, 1024, "cpu")
    # Of 8 x 8 blocks of 128: the diagonal and the one before it, 15 in all.
    assert blocks.sparsity() == pytest.approx(100 * (1 - 15 / 64), abs=0.01)
