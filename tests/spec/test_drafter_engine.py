"""The BF16 drafter against what vLLM's own DFlash2 speculator drafted (tests/engine/README.md).

Every recorded stage is compared bit for bit, each from the engine's own input of that stage, up to
a share of values that a sum in another order may round the other way. Whole passes are compared
twice. With the two roundings that a CPU run of the engine has and the workbench has not (attention
kept in float32, SiLU rounded before it is multiplied) they agree to the bit too, where the CPU sums
as the recording one did. As they are served, they differ by these roundings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from reference import beam_fp64, dflash2_fp64
from reference.safetensors_numpy import from_bfloat16_bits
from workbench.kernels import reference as kernels
from workbench.kernels.catalogue import OPS
from workbench.kernels.tables import Kernels
from workbench.model.checkpoint import load
from workbench.model.drafter_config import DFlash2Config
from workbench.spec import draft_attention
from workbench.spec.draft_attention import CachedBlocks, SequenceBlocks
from workbench.spec.draft_cache import DraftCache
from workbench.spec.drafter import Drafter, early_rounded_norm
from workbench.spec.drafter_checkpoint import load_drafter
from workbench.spec.selector import walk

pytestmark = pytest.mark.usefixtures("one_thread")
DATA = Path(__file__).resolve().parents[1] / "data"
QUERY = 8
# A product of 64 to 192 terms, summed in another order in float32, lands on the other side of a
# BF16 rounding for about one value in a thousand; sums of 32 or 64 squares for fewer.
PRODUCT, SUM = 1e-2, 1e-3


@dataclass(frozen=True)
class Recorded:
    document: dict[str, Any]
    vectors: dict[str, Tensor]
    drafter: Drafter

    def step(self, number: int) -> dict[str, Tensor]:
        prefix = f"step{number}."
        return {
            name.removeprefix(prefix): value
            for name, value in self.vectors.items()
            if name.startswith(prefix)
        }

    def anchors(self, number: int) -> Tensor:
        lengths = self.document["context_lengths"][number]
        tokens = self.document["token_ids"]
        return torch.tensor([ids[n] for ids, n in zip(tokens, lengths, strict=True)])

    def inside(self, number: int) -> Tensor:
        """Whether a query row ``[R, Q]`` is before the context limit; others are never used."""
        starts = torch.tensor(self.document["context_lengths"][number])
        return starts[:, None] + torch.arange(QUERY) < self.drafter.config.max_position_embeddings

    def passes(self) -> Iterator[tuple[int, Tensor, CachedBlocks]]:
        """Drive a cache through the recorded steps: (step, states ``[R, Q, H]``, attention)."""
        cache, lengths, slots = DraftCache(self.drafter, 3, QUERY), [0] * 3, [0, 1, 2]
        for number, step in enumerate(self.document["steps"]):
            keep = [n - lost for n, lost in zip(step["rows"], step["rejected"], strict=True)]
            parts = []
            for r in slots:
                streams = self.vectors[f"streams.{r}"]
                # Rows of rejected drafts hold the states of other tokens.
                parts.append(streams[lengths[r] : lengths[r] + keep[r]])
                parts.append(streams[: step["rejected"][r]])
            cache.write(torch.cat(parts), step["rows"], slots, keep)
            lengths = list(cache.ends)
            assert lengths == self.document["context_lengths"][number]
            blocks = CachedBlocks(cache, torch.tensor(lengths), slots, QUERY, cache.limit)
            ids = self.drafter.block_ids(self.anchors(number), QUERY)
            hidden = self.drafter(ids, blocks, QUERY)
            yield number, hidden.unflatten(0, (3, QUERY)), blocks


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    document = json.loads((DATA / "engine_dflash2.json").read_text())
    folder = tmp_path_factory.mktemp("engine")
    seeds, hashes = document["seeds"], document["weights_sha256"]
    digest = beam_fp64.random_checkpoint(folder / "target", document["target"], seeds["target"])
    assert digest == hashes["target"], "random_checkpoint no longer gives these weights"
    fields = document["drafter"]
    fields["target_layer_ids"] = tuple(fields["target_layer_ids"])
    config = DFlash2Config(**fields).to_dict()
    tensors = dflash2_fp64.random_tensors(config, seeds["drafter"])
    digest = dflash2_fp64.write_drafter(folder / "drafter", config, tensors)
    assert digest == hashes["drafter"], "random_tensors no longer gives these weights"
    target = load(folder / "target", dtype=torch.bfloat16)
    vectors = load_file(DATA / "engine_dflash2.safetensors")
    return Recorded(document, vectors, load_drafter(target, folder / "drafter"))


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def equal(found: Tensor, expected: Tensor, share: float = SUM) -> None:
    """The same bits but for a share of the values, which are neighbouring BF16 numbers."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert float((found != expected).float().mean()) <= share
    torch.testing.assert_close(found.float(), expected.float(), rtol=2.0**-7, atol=1e-3)


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def test_the_engine_captures_the_layers_named(recorded: Recorded) -> None:
    """Its states entering layer id + 1 are ours leaving layer id."""
    drafter = recorded.drafter
    assert recorded.document["captured_layers"] == [i + 1 for i in drafter.taps]
    for r in range(3):
        expected = recorded.vectors[f"streams.{r}"]
        ids = torch.tensor(recorded.document["token_ids"][r][: len(expected)])
        streams: dict[int, Any] = dict.fromkeys(drafter.taps)
        drafter.target.extend(drafter.target.new_cache(), ids, [len(ids)], streams=streams)
        found = torch.cat([streams[i] for i in drafter.taps], -1)
        # BF16 through four layers on either side; another layer's stream would be off by about 1.
        assert rms(found.float() - expected.float()) < 0.02


def test_context_keys_and_values(recorded: Recorded) -> None:
    drafter = recorded.drafter
    for r in range(3):
        streams = recorded.vectors[f"streams.{r}"]
        kv = drafter.context(streams)
        layers = drafter.context_keys(kv, torch.arange(len(streams)))
        for layer, (k, v) in enumerate(layers):
            equal(k, recorded.vectors[f"context_k.{layer}.{r}"], PRODUCT)
            equal(v, recorded.vectors[f"context_v.{layer}.{r}"], PRODUCT)


def test_the_cache_after_rejections_holds_what_the_engines_holds(recorded: Recorded) -> None:
    for number, _, blocks in recorded.passes():
        last, cache = number, blocks.cache
    for r, end in enumerate(recorded.document["context_lengths"][last]):
        seen = torch.arange(end - cache.window + 1, end)
        for layer in range(len(cache.k)):
            for store, name in ((cache.k, "k"), (cache.v, "v")):
                held = store[layer, r, seen % cache.ring]
                equal(held, recorded.vectors[f"context_{name}.{layer}.{r}"][seen], PRODUCT)


def test_query_rows_are_prepared_as_the_engine_does(recorded: Recorded) -> None:
    """Anchors, masks and positions, clamped at the context limit."""
    for number, _, blocks in recorded.passes():
        step = recorded.step(number)
        ids = recorded.drafter.block_ids(recorded.anchors(number), QUERY)
        assert torch.equal(ids, step["input_ids"].long())
        assert torch.equal(blocks.positions, step["positions"].long())
    assert not bool(recorded.inside(number).all())  # the last step does reach the limit


def test_the_first_sublayer_stage_by_stage(recorded: Recorded) -> None:
    drafter, v = recorded.drafter, recorded.vectors
    layer, eps = drafter.layers[0], drafter.config.rms_norm_eps
    conv, ops = layer.attention_conv, drafter.kernels
    ids = recorded.step(recorded.document["staged_step"])["input_ids"].long()
    embedded = drafter.target.embed(ids)
    equal(embedded, v["stage.residual"], 0.0)
    equal(early_rounded_norm(embedded, layer.input_norm, eps), v["stage.normed"])
    before, after = conv.coefficients(v["stage.normed"])
    equal(before, v["stage.before"], PRODUCT)
    equal(after, v["stage.after"], PRODUCT)
    found = ops.dynamic_conv(v["stage.normed"], v["stage.before"], conv.base[0], QUERY)
    equal(found, v["stage.conv"])
    stream, normed = ops.conv_residual_norm(
        v["stage.sublayer"], v["stage.after"], conv.base[1], v["stage.residual"],
        layer.post_attention_norm, eps, QUERY,
    )  # fmt: skip
    equal(stream, v["stage.stream"])
    equal(normed, v["stage.next"])


@pytest.mark.parametrize("number", range(4))
def test_candidates_edges_and_walk_from_the_engines_states(recorded: Recorded, number: int) -> None:
    drafter, step = recorded.drafter, recorded.step(number)
    hidden, anchors = step["hidden"].unflatten(0, (3, QUERY))[:, 1:], recorded.anchors(number)
    ids, unary = drafter.candidates(hidden)
    engine_ids = step["candidates"].long()
    # Which of several equal logits is named first, or at all, is nobody's promise.
    assert float((ids == engine_ids).float().mean()) > 0.97
    equal(unary.bfloat16(), step["unary"].bfloat16(), PRODUCT)
    edges = drafter.edges(hidden, engine_ids, step["unary"], anchors)
    assert float((edges != step["edges"]).float().mean()) <= PRODUCT
    torch.testing.assert_close(edges, step["edges"], rtol=0, atol=2.0**-5)  # pairs of up to 8
    tokens, scores = drafter.kernels.selector_walk(step["edges"], engine_ids, torch.zeros(3), None)
    assert torch.equal(tokens, step["token_ids"].long())
    assert torch.equal(scores, step["scores"])


def same_drafts(recorded: Recorded, number: int, hidden: Tensor, gap: float) -> int:
    """Check drafts against the engine's, up to what was open between them; how many were checked.

    Open is a choice closer than ``gap``, and one among candidates of which the last differs.
    """
    step, checked = recorded.step(number), 0
    found = walk(recorded.drafter, hidden[:, 1:], recorded.anchors(number))
    best = step["scores"].topk(2, -1).values
    clear = (best[..., 0] - best[..., 1] >= gap) & recorded.inside(number)[:, 1:]
    clear &= (found.candidates.sort(-1)[0] == step["candidates"].sort(-1)[0]).all(-1)
    for r in range(3):
        count = int(clear[r].cumprod(0).sum())
        assert found.token_ids[r, :count].tolist() == step["token_ids"][r, :count].tolist()
        checked += count
    return checked


def test_whole_passes_with_the_engines_roundings(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, served = recorded.drafter, draft_attention._attention

    def wide(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        return served(q.float(), keys.float(), values.float(), mask.float()).to(q.dtype)

    def rounded_silu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = kernels.linear(x, gate_up).chunk(2, -1)
        return kernels.linear(functional.silu(gate) * up, down)

    table = {op: getattr(drafter.kernels, op) for op in OPS} | {"dense_mlp": rounded_silu}
    monkeypatch.setattr(draft_attention, "_attention", wide)
    monkeypatch.setattr(drafter, "pinned", Kernels(table))
    checked = 0
    for number, hidden, _ in recorded.passes():
        inside = recorded.inside(number)
        expected = recorded.step(number)["hidden"].unflatten(0, (3, QUERY))
        # 0 where the CPU sums as the recording one did; BF16 rounding as a whole is of 0.010.
        assert rms(hidden[inside].float() - expected[inside].float()) < 0.004
        checked += same_drafts(recorded, number, hidden, gap=0.05)
    assert checked > 50


def test_whole_passes_as_served(recorded: Recorded) -> None:
    checked = 0
    for number, hidden, _ in recorded.passes():
        inside = recorded.inside(number)
        expected = recorded.step(number)["hidden"].unflatten(0, (3, QUERY))
        assert rms(hidden[inside].float() - expected[inside].float()) < 0.012
        checked += same_drafts(recorded, number, hidden, gap=0.2)
    assert checked > 25


def test_blocks_in_sequences_are_the_engines_too(recorded: Recorded) -> None:
    """What training sees: the same rows from whole sequences, without a cache."""
    drafter, config = recorded.drafter, recorded.drafter.config
    for number, lengths in enumerate(recorded.document["context_lengths"]):
        expected = recorded.step(number)["hidden"].unflatten(0, (3, QUERY))
        for r, start in enumerate(lengths):
            streams = recorded.vectors[f"streams.{r}"][:start]
            keys = drafter.context_keys(drafter.context(streams), torch.arange(start))
            blocks = SequenceBlocks(
                [(k[None], v[None]) for k, v in keys], torch.tensor([0]), torch.tensor([start]),
                QUERY, config.sliding_window, config.max_position_embeddings,
            )  # fmt: skip
            ids = drafter.block_ids(recorded.anchors(number)[r : r + 1], QUERY)
            hidden = drafter(ids, blocks, QUERY)
            inside = recorded.inside(number)[r]
            off = hidden[inside].float() - expected[r, inside].float()
        assert rms(off) < 0.015


def test_bfloat16_itself_is_what_separates_both_from_the_specification(recorded: Recorded) -> None:
    """The FP64 reference, fed the same streams: ours and the engine's are equally far from it."""
    drafter = recorded.drafter
    config = drafter.config.to_dict()
    weights = {
        name: from_bfloat16_bits(bits)
        for name, bits in dflash2_fp64.random_tensors(
            config, recorded.document["seeds"]["drafter"]
        ).items()
    }
    embedding = drafter.target.embed_tokens.double().numpy()
    for number, hidden, _ in recorded.passes():
        if number != 2:
            continue
        for r, start in enumerate(recorded.document["context_lengths"][number]):
            streams = recorded.vectors[f"streams.{r}"][:start].double().numpy()
            context = dflash2_fp64.context(config, weights, streams)
            exact = dflash2_fp64.block(
                config, weights, embedding, context, int(recorded.anchors(number)[r]), start, QUERY
            )
            engine = recorded.step(number)["hidden"].unflatten(0, (3, QUERY))[r]
            ours, theirs = (rms(x.double() - torch.tensor(exact)) for x in (hidden[r], engine))
            assert theirs < 0.03
            assert ours < 1.3 * theirs
