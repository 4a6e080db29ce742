"""The bundled checkpoint: FP32 against the FP64 reference over more tokens than its window."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reference import beam_fp64
from workbench.model.beam import Beam
from workbench.model.checkpoint import load
from workbench.model.context import SequenceContext
from workbench.model.parallel import Shard
from workbench.model.presets import ZOO

pytestmark = pytest.mark.usefixtures("one_thread")

FP32 = 1e-4
FOLDER = ZOO / "beam-tiny"
CODE = '''
def merge(left: list[int], right: list[int]) -> list[int]:
    """Merge two sorted lists into one."""
    out, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            out.append(left[i])
            i += 1
        else:
            out.append(right[j])
            j += 1
    return out + left[i:] + right[j:]


class Counter(dict[str, int]):
    def __missing__(self, key: str) -> int:
        return 0

    def update_from(self, path: pathlib.Path) -> None:
        with path.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, start=1):
                for word in re.findall(r"[A-Za-z_]+", line):
                    self[word] += 1


if __name__ == "__main__":
    assert merge([1, 3, 5], [2, 4]) == [1, 2, 3, 4, 5]
'''


@pytest.fixture(scope="module")
def beam() -> Beam:
    return load("beam-tiny", device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def ids(beam: Beam) -> Tensor:
    """Code the model knows how to read, then ids drawn at random: 320 tokens, window 256."""
    assert beam.tokenizer is not None
    text = torch.tensor(beam.tokenizer.encode(CODE))
    drawn = torch.randint(0, 4096, (320,), generator=torch.Generator().manual_seed(1))
    assert 200 < len(text) < 300
    return torch.cat((text, drawn))[:320]


@pytest.fixture(scope="module")
def reference(ids: Tensor) -> dict[str, Any]:
    config, weights = beam_fp64.load_reference(FOLDER)
    assert len(ids) > config["sliding_window"] + 50
    result = beam_fp64.forward(config, weights, ids.tolist())
    return result | {"config": config, "weights": weights}


def error(found: Tensor, expected: np.ndarray) -> float:
    return float(np.abs(found.double().numpy() - expected).max())


def test_logits_streams_and_moe_outputs(beam: Beam, ids: Tensor, reference: dict[str, Any]) -> None:
    streams, outputs, hooks = [beam.embed(ids)], {}, []
    for number, layer in enumerate(beam.layers):
        hooks.append(layer.register_forward_hook(lambda _, __, out: streams.append(out[0])))
        if beam.config.is_sparse(number):
            hooks.append(
                layer.mlp.register_forward_hook(
                    lambda _, __, out, number=number: outputs.update({number: out})
                )
            )
    logits = beam.sequence_logits(ids)
    for hook in hooks:
        hook.remove()
    assert error(logits, reference["logits"]) < FP32
    assert len(streams) == len(reference["hidden"]) == 10
    # The stream grows to a hundred times the size of a logit, and its roundings with it.
    for found, expected in zip(streams, reference["hidden"], strict=True):
        assert error(found, expected) < FP32 * expected.std()
    assert outputs.keys() == reference["moe_output"].keys() == set(range(1, 9))
    assert max(error(outputs[n], reference["moe_output"][n]) for n in outputs) < FP32


def test_moe_block_alone(beam: Beam, reference: dict[str, Any]) -> None:
    """On one and the same input: few tokens (experts computed densely) and many (grouped)."""
    for layer in (1, 8):
        x = beam_fp64.rms_norm(reference["hidden"][layer], np.ones(256), 1e-6)[:60]
        x = x.astype(np.float32).astype(np.float64)
        expected = beam_fp64.moe_block(reference["config"], reference["weights"], layer, x)
        assert expected.std() > 0.01
        mlp, kernels = beam.layers[layer].mlp, beam.kernels().layers[layer]
        assert error(mlp(torch.tensor(x).float(), kernels), expected) < FP32
        assert error(mlp(torch.tensor(x[:8]).float(), kernels), expected[:8]) < FP32


@pytest.mark.parametrize("chunks", [[320], [100, 100, 120], [290, *[1] * 30], [17] * 15 + [13] * 5])
def test_prefill_and_decode(
    beam: Beam, ids: Tensor, reference: dict[str, Any], chunks: list[int]
) -> None:
    cache = beam.new_cache()
    parts = [beam.logits(beam.extend(cache, p, [len(p)])) for p in ids.split(chunks)]
    assert error(torch.cat(parts), reference["logits"]) < FP32
    assert cache.k[0].shape[1] == 256 + cache.rollback


def test_token_by_token(beam: Beam, ids: Tensor, reference: dict[str, Any]) -> None:
    cache = beam.new_cache()
    parts = [beam.logits(beam.extend(cache, token, [1])) for token in ids.split(1)]
    assert error(torch.cat(parts), reference["logits"]) < FP32


def test_a_ragged_batch(beam: Beam, ids: Tensor, reference: dict[str, Any]) -> None:
    """Three copies of the sequence, each at another place of it, decoded together."""
    cache, logits = beam.new_cache(3), [[], [], []]
    schedule = [(300, 150, 7), (5, 150, 300), (1, 5, 1), (1, 1, 3), (13, 14, 9)]
    for counts in schedule:
        flat = torch.cat(
            [ids[cache.lengths[s] : cache.lengths[s] + n] for s, n in enumerate(counts)]
        )
        out = beam.logits(beam.extend(cache, flat, list(counts)))
        for slot, part in enumerate(out.split(list(counts))):
            logits[slot].append(part)
    assert cache.lengths == [320] * 3
    for parts in logits:
        assert error(torch.cat(parts), reference["logits"]) < FP32


@pytest.mark.parametrize("world", [2, 4])
def test_tensor_parallel_ranks(ids: Tensor, reference: dict[str, Any], world: int) -> None:
    """TP2 splits the two KV heads, TP4 replicates them; sums over ranks are the whole."""
    barrier, board = threading.Barrier(world, timeout=60), [torch.empty(0)] * world

    class Rank:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def _all(self, x: Tensor) -> list[Tensor]:
            board[self.rank] = x
            barrier.wait()
            parts = list(board)
            barrier.wait()
            return parts

        def all_reduce(self, x: Tensor) -> Tensor:
            return torch.stack(self._all(x)).sum(0)

        def all_gather(self, x: Tensor) -> Tensor:
            return torch.cat(self._all(x), -1)

    beams = [load("beam-tiny", shard=Shard(rank=rank, world=world)) for rank in range(world)]
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(0))
    for layer in (0, 2, 8):
        config, weights = reference["config"], reference["weights"]
        attention, _ = beam_fp64.attention_block(config, weights, layer, x.double().numpy())
        parts = []
        for beam in beams:
            context = SequenceContext(beam.config, 1, 40)
            context.kernels = beam.kernels().layers
            parts.append(beam.layers[layer].attention(x, context))
        assert error(sum(parts), attention) < FP32
        if layer:
            moe = beam_fp64.moe_block(config, weights, layer, x.double().numpy())
            parts = [b.layers[layer].mlp(x, b.kernels().layers[layer]) for b in beams]
            assert error(sum(parts), moe) < FP32
    for rank, beam in enumerate(beams):
        beam.connect(Rank(rank))
    with ThreadPoolExecutor(world) as pool:
        for logits in pool.map(lambda beam: beam.sequence_logits(ids), beams):
            assert error(logits, reference["logits"]) < FP32


def test_no_expert_is_dead(ids: Tensor, reference: dict[str, Any]) -> None:
    """Every expert of every layer is chosen for some of 320 tokens, by the reference's router."""
    for chosen, _ in reference["router"].values():
        assert set(chosen.ravel().tolist()) == set(range(16))


def test_it_can_read(beam: Beam, reference: dict[str, Any], ids: Tensor) -> None:
    """Trained: on the code, far better than the 8.3 nats of a guess among 4096."""
    count = 200
    logits = torch.tensor(reference["logits"][: count - 1])
    loss = torch.nn.functional.cross_entropy(logits, ids[1:count])
    assert loss < 3.0
