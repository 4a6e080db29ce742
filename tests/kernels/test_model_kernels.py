"""Selected variants in a whole model: prefill, decode and verify steps, sequences, training.

The model is small and random, with a window of 5 tokens, so that rings wrap; the numbers it is held
against are those of the FP64 reference in numpy, which knows of no kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reference import beam_fp64
from workbench.kernels import registry
from workbench.kernels.catalogue import LAYER_OPS, MODEL_OPS
from workbench.kernels.ops import OPERATIONS
from workbench.kernels.registry import register, select, use
from workbench.model.beam import Beam
from workbench.model.checkpoint import load
from workbench.training.trainable import build

from .test_check import WRITTEN

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG: dict[str, Any] = {
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
TOKENS = 45
FP32 = 1e-4
MODEL = (*LAYER_OPS, *MODEL_OPS)


@pytest.fixture(scope="module")
def beam(tmp_path_factory: pytest.TempPathFactory) -> Beam:
    folder = tmp_path_factory.mktemp("random")
    beam_fp64.random_checkpoint(folder, CONFIG, seed=4)
    model = load(folder, device="cpu", dtype=torch.float32)
    config, weights = beam_fp64.load_reference(folder)
    ids = [int(i) for i in np.random.default_rng(4).integers(0, 64, TOKENS)]
    model.expected = torch.from_numpy(beam_fp64.forward(config, weights, ids)["logits"])
    model.ids = torch.tensor(ids)
    return model


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max())


def in_chunks(beam: Beam, sizes: list[int]) -> Tensor:
    """Logits of every token, the sequence cut into passes of these sizes."""
    assert sum(sizes) == TOKENS
    cache = beam.new_cache()
    with torch.inference_mode():
        parts = [beam.logits(beam.extend(cache, p, [len(p)])) for p in beam.ids.split(sizes)]
    return torch.cat(parts)


PASSES = {
    "one prefill": [45],
    "prefill in chunks": [20, 19, 6],
    "prefill, then decode": [30, *[1] * 15],
    "decode only": [1] * 45,
    "verify steps": [21, 8, 7, 8, 1],
}


def watched(op: str, log: list[Any], what: Callable[..., Any]) -> None:
    """Variant "watched": the reference, every call noted."""
    right = OPERATIONS[op].reference

    def variant(*args: Any, **kwargs: Any) -> Any:
        log.append(what(*args, **kwargs))
        return right(*args, **kwargs)

    register(op, "watched")(variant)


@pytest.mark.parametrize("sizes", PASSES.values(), ids=PASSES.keys())
def test_kernels_of_ones_own_give_the_models_numbers(beam: Beam, sizes: list[int]) -> None:
    """Every operation swapped at once, for code that shares nothing with the reference."""
    called: set[str] = set()
    for op in MODEL:

        def variant(*args: Any, op: str = op, **kwargs: Any) -> Any:
            called.add(op)
            return WRITTEN[op](*args, **kwargs)

        register(op, "mine")(variant)
    with use(**dict.fromkeys(MODEL, "mine")):
        assert apart(in_chunks(beam, sizes), beam.expected) < FP32
    short, long = min(sizes) <= 17, max(sizes) > 17  # more than the spare rows is a long chunk
    attention = {"decode_attention"} if short else set()
    attention |= {"prefill_attention"} if long else set()
    assert called == {*MODEL} - {"decode_attention", "prefill_attention"} | attention


def test_whole_sequences_go_through_the_selection_too(beam: Beam) -> None:
    log: list[Any] = []
    watched("prefill_attention", log, lambda q, k, v, spans: (len(q), spans.window))
    with torch.inference_mode(), use(prefill_attention="watched"):
        found = beam.sequence_logits(beam.ids)
    assert apart(found, beam.expected) < FP32
    assert log == [(45, 5), (45, None)] * 2
    log.clear()
    both = torch.stack((beam.ids, beam.ids.flip(0)))
    with torch.inference_mode(), use(prefill_attention="watched", layers="full"):
        found = beam.sequence_logits(both)
    assert apart(found[0], beam.expected) < FP32
    assert log == [(90, None)] * 2


def test_decode_and_verify_steps_see_the_selected_attention(beam: Beam) -> None:
    log: list[Any] = []
    watched("decode_attention", log, lambda q, k, v, reach: (*q.shape[:2], reach.window))
    writes: list[Any] = []
    watched("qkv_write", writes, lambda packed, *rest, full, **how: (len(packed), full))
    with use(decode_attention="watched", qkv_write="watched"):
        in_chunks(beam, [20, 8, 1, 16])
    # The first chunk is longer than the spare rows and is prefill.
    assert log == [(1, n, w) for n in (8, 1, 16) for w in (5, None) * 2]
    assert writes == [(n, full) for n in (20, 8, 1, 16) for full in (False, True) * 2]


def test_a_ragged_batch_reaches_the_kernels_padded_and_gives_each_its_own(beam: Beam) -> None:
    """Three sequences with 1, 4 and 2 new tokens: one call a layer, results as alone."""
    log: list[Any] = []
    watched("decode_attention", log, lambda q, k, v, reach: (*q.shape[:2], reach.first.tolist()))
    starts, counts = [30, 3, 11], [1, 4, 2]
    cache = beam.new_cache(slots=3)
    with torch.inference_mode():
        for slot, start in enumerate(starts):
            beam.extend(cache, beam.ids[:start], [start], [slot])
        new = torch.cat([beam.ids[s : s + c] for s, c in zip(starts, counts, strict=True)])
        with use(decode_attention="watched", layers="full"):
            logits = beam.logits(beam.extend(cache, new, counts, [0, 1, 2]))
    assert log == [(3, 4, starts)] * 2
    expected = [beam.expected[s : s + c] for s, c in zip(starts, counts, strict=True)]
    assert apart(logits, torch.cat(expected)) < FP32


def test_slots_in_any_order(beam: Beam) -> None:
    log: list[Any] = []
    watched("decode_attention", log, lambda q, k, v, reach: reach.slots.tolist())
    for name in ("qkv_write", "decode_attention"):
        register(name, "mine")(WRITTEN[name])
    cache = beam.new_cache(slots=4)
    with torch.inference_mode(), use(qkv_write="mine", decode_attention="mine"):
        beam.extend(cache, beam.ids[:9].repeat(2), [9, 9], [3, 1])
        with use(decode_attention="watched", layers="1"):
            logits = beam.logits(beam.extend(cache, beam.ids[9:11].repeat(2), [2, 2], [1, 3]))
    assert log == [[1, 3]]
    assert apart(logits[:2], beam.expected[9:11]) < FP32
    assert torch.equal(logits[:2], logits[2:])


@pytest.mark.parametrize("op", MODEL)
def test_a_wrapper_of_the_reference_changes_no_bit(beam: Beam, op: str) -> None:
    sizes = PASSES["verify steps"]
    plain = in_chunks(beam, sizes)
    log: list[Any] = []
    watched(op, log, lambda *args, **kwargs: None)
    with use(**{op: "watched"}):
        assert torch.equal(in_chunks(beam, sizes), plain)
    assert log
    count = len(log)
    assert torch.equal(in_chunks(beam, sizes), plain)
    assert len(log) == count


@pytest.mark.parametrize("layer", range(4))
def test_a_layer_whose_gate_is_shut_is_a_layer_whose_projection_is_zero(
    beam: Beam, layer: int
) -> None:
    """That a selection for one layer acts in that layer, seen from the weights."""
    register("output_gate", "shut")(lambda o, gate, bias: torch.zeros_like(o))
    with torch.inference_mode(), use(layer, output_gate="shut"):
        shut = beam.sequence_logits(beam.ids)
    weight = beam.layers[layer].attention.o_proj
    packed, weight.packed = getattr(weight, "packed", None), None  # its copy of the weight
    kept = weight.detach().clone()
    with torch.no_grad():
        try:
            weight.zero_()
            zero = beam.sequence_logits(beam.ids)
        finally:
            weight.copy_(kept)
            weight.packed = packed
    assert apart(shut, zero) < 1e-6
    assert apart(shut, beam.expected) > 0.01


def test_selections_change_between_passes_over_one_cache(beam: Beam) -> None:
    for op in ("boundary", "qkv_write", "decode_attention", "expert_mlp"):
        register(op, "mine")(WRITTEN[op])
    cache = beam.new_cache()
    found = []
    with torch.inference_mode():
        for step, part in enumerate(beam.ids.split(5)):
            chosen = ({}, {"boundary": "mine"}, {"decode_attention": "mine", "qkv_write": "mine"})
            with use(layers=("all", "sliding", "full")[step % 2], **chosen[step % 3]):
                found.append(beam.logits(beam.extend(cache, part, [len(part)])))
    assert apart(torch.cat(found), beam.expected) < FP32


def test_a_kernel_that_raises_leaves_model_and_cache_as_they_were(beam: Beam) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("out of order")

    register("boundary", "broken")(broken)
    cache = beam.new_cache()
    with torch.inference_mode():
        beam.extend(cache, beam.ids[:20], [20])
        with pytest.raises(RuntimeError, match="out of order"), use(3, boundary="broken"):
            beam.extend(cache, beam.ids[20:24], [4])
        assert cache.lengths == [20]
        logits = beam.logits(beam.extend(cache, beam.ids[20:24], [4]))
    assert apart(logits, beam.expected[20:24]) < FP32


def test_training_is_pinned(beam: Beam) -> None:
    """A selection for decoding changes nothing about a model that is trained."""
    trained = build(beam.config, 1, torch.device("cpu"))
    before = trained.sequence_logits(beam.ids)
    register("boundary", "wrong")(lambda h, s, p, scale, n, eps: (h, h))
    select(boundary="wrong")
    with use(expert_mlp="torch"):
        assert trained.kernels() is trained.pinned
        assert torch.equal(trained.sequence_logits(beam.ids), before)
        table = trained.kernels().layers[1]
        assert table.expert_mlp is registry.find("expert_mlp", "dense").function
        assert table.boundary is OPERATIONS["boundary"].reference
    with torch.inference_mode():
        assert apart(beam.sequence_logits(beam.ids), beam.expected) > 0.1, "this one follows it"
    loss = before.logsumexp(-1).mean()
    loss.backward()
    assert all(
        p.grad is not None and bool(torch.isfinite(p.grad).all())
        for name, p in trained.named_parameters()
        if not name.endswith("correction_bias")
    )


@pytest.mark.parametrize("op", MODEL)
def test_triton_in_the_whole_model(beam: Beam, op: str) -> None:
    """Through the interpreter here: each kernel in the model, a few tokens of every kind."""
    where = beam.device.type
    sizes = [1, 2] if op == "prefill_attention" else [1, 3]
    select(**{op: "triton"})
    ids = beam.ids[: sum(sizes)]
    cache = beam.new_cache(rollback=0 if op == "prefill_attention" else 16)
    assert where == "cpu"
    with torch.inference_mode():
        found = [beam.logits(beam.extend(cache, p, [len(p)])) for p in ids.split(sizes)]
    assert apart(torch.cat(found), beam.expected[: len(ids)]) < FP32
    (line,) = {(r.requested, r.resolved) for r in beam.kernels().rows if r.op == op}
    assert line == ("triton", "triton")
