"""The drafter against the FP64 reference, and what must hold of it whatever its weights are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reference import dflash2_fp64 as reference
from reference.safetensors_numpy import bfloat16_bits
from workbench.errors import DraftError
from workbench.kernels.reference_dflash2 import dynamic_conv
from workbench.spec.draft_attention import CachedBlocks, SequenceBlocks
from workbench.spec.draft_cache import DraftCache
from workbench.spec.drafter import Drafter
from workbench.spec.selector import gumbel, propose, walk

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("error")]
CLOSE = 1e-5  # states have a standard deviation of 1, logits of up to 6; the bar is 1e-4
Get = Callable[[str], Any]


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.inference_mode():
        yield


def close(found: Tensor, expected: np.ndarray, atol: float = CLOSE) -> None:
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=0, atol=atol)


def sequence_blocks(
    drafting: Any, sequence: Tensor, anchors: Tensor, query_len: int, streams: Tensor
) -> Tensor:
    """States ``[B, Q, H]`` of blocks anywhere in ``streams [S, T, taps * H]``."""
    drafter = drafting.drafter
    length = streams.shape[1]
    positions = torch.arange(length).repeat(len(streams))
    context = [
        (k.unflatten(0, (-1, length)), v.unflatten(0, (-1, length)))
        for k, v in drafter.context_keys(drafter.context(streams.flatten(0, 1)), positions)
    ]
    blocks = SequenceBlocks(
        context, sequence, anchors, query_len, drafter.config.sliding_window,
        drafter.config.max_position_embeddings,
    )  # fmt: skip
    ids = drafter.block_ids(drafting.anchors(*anchors.tolist()), query_len)
    return drafter(ids, blocks, query_len).unflatten(0, (-1, query_len))


# -- against the reference ----------------------------------------------------------------------


@pytest.mark.parametrize("query_len", [2, 4, 8])
@pytest.mark.parametrize("name", ["plain", "grouped", "deep", "narrow"])
def test_states_candidates_edges_and_walk(drafting: Get, name: str, query_len: int) -> None:
    d = drafting(name)
    for start in (0, 3, 12, 45):  # no context, less than a window, about one, rings wrapped
        cache = d.cache(start, query_len=query_len)
        hidden = d.serve(cache, [0], query_len)
        expected = d.block(start, query_len)
        close(hidden[0], expected)
        ids, unary = reference.candidates(d.config, d.head, expected[1:])
        edges = reference.edges(d.weights, expected[1:], ids, unary, d.tokens[start])
        anchors = d.anchors(start)
        found_ids, found_unary = d.drafter.candidates(hidden[:, 1:])
        assert torch.equal(found_ids[0], torch.tensor(ids))
        close(found_unary[0], unary)
        found = d.drafter.edges(hidden[:, 1:], found_ids, found_unary, anchors)
        close(found[0], edges)
        tokens, scores = reference.walk(edges, ids)
        proposal = propose(d.drafter, cache, anchors, [0], query_len - 1)
        assert proposal.token_ids.tolist() == [tokens]
        close(proposal.scores[0], scores)
        close(proposal.unary[0], unary)
        assert torch.equal(proposal.candidates[0], torch.tensor(ids))


def test_the_reference_is_about_something(drafting: Get) -> None:
    """Every part of a random drafter counts: without it the states or the path would differ."""
    d = drafting("deep")
    start, states = 30, d.block(30, 8)
    ids, unary = reference.candidates(d.config, d.head, states[1:])
    edges = reference.edges(d.weights, states[1:], ids, unary, d.tokens[start])
    tokens, _ = reference.walk(edges, ids)
    assert tokens != ids[:, 0].tolist()  # the selector changes the path
    logits = (states @ d.head.T)[1:].max(1)
    assert float(np.abs(unary[:, 0] - logits).min()) > 0.5  # the cap binds
    for name, array in d.weights.items():
        if name.startswith("candidate_selector"):
            continue
        kept = array.copy()
        array[...] = np.roll(array, 1, -1)
        changed = reference.block(
            d.config, d.weights, d.embedding,
            reference.context(d.config, d.weights, d.streams[:start]), d.tokens[start], start, 8,
        )  # fmt: skip
        array[...] = kept
        assert float(np.abs(changed - states).max()) > 1e-2, name


def test_the_taps_are_the_outputs_of_the_layers_named(make: Any, drafting: Get) -> None:
    d = drafting("deep")
    beam, streams = d.drafter.target, dict.fromkeys(d.drafter.taps)
    cache = beam.new_cache()
    ids = torch.tensor(d.tokens)
    parts = []
    for chunk in ids.split([11, 1, 30, 18]):
        beam.extend(cache, chunk, [len(chunk)], streams=streams)
        parts.append(torch.cat([streams[layer] for layer in d.drafter.taps], -1))
    close(torch.cat(parts), d.streams, 5e-5)


def test_a_far_context(make: Any) -> None:
    d = make("grouped")
    start = 490
    streams = np.random.default_rng(3).normal(size=(start, d.streams.shape[1]))
    cache = DraftCache(d.drafter, 1, 8)
    rows = torch.tensor(streams).float()
    for chunk in rows.split(130):
        cache.write(chunk, [len(chunk)], [0], [len(chunk)])
    anchor = d.tokens[0]
    ids = d.drafter.block_ids(torch.tensor([anchor]), 8)
    context = reference.context(d.config, d.weights, streams)
    expected = reference.block(d.config, d.weights, d.embedding, context, anchor, start, 8)
    close(d.serve(cache, [0], 8, ids)[0], expected, 1e-4)  # angles of 490 radians in float32


@pytest.mark.parametrize("start", [24, 25, 28, 30, 31])
def test_rows_before_the_context_limit_do_not_see_what_is_beyond(drafting: Get, start: int) -> None:
    d = drafting("short")
    limit = 32
    cache = d.cache(start)
    assert cache.limit == limit
    hidden = d.serve(cache, [0], 8)
    assert bool(hidden.isfinite().all())
    inside = limit - start
    close(hidden[0, :inside], d.block(start, 8)[:inside])
    streams = d.rows[None, :start]
    rows = sequence_blocks(d, torch.tensor([0]), torch.tensor([start]), 8, streams)
    close(rows[0, :inside], d.block(start, 8)[:inside])


def test_the_sampled_walk_with_given_noise(drafting: Get) -> None:
    d = drafting("grouped")
    start, heat = 20, 0.8
    generators = [torch.Generator().manual_seed(seed) for seed in (4, 5, 6)]
    noise = gumbel(generators, 7, 5)
    cache = d.cache(start, start, start)
    hidden = d.serve(cache, [0, 1, 2], 8)[:, 1:]
    anchors = d.anchors(start, start, start)
    found = walk(d.drafter, hidden, anchors, temperature=heat, noise=noise)
    states = d.block(start, 8)[1:]
    ids, unary = reference.candidates(d.config, d.head, states)
    edges = reference.edges(d.weights, states, ids, unary, d.tokens[start])
    paths = set()
    for request in range(3):
        tokens, scores = reference.walk(edges, ids, heat, noise[request].double().numpy())
        assert found.token_ids[request].tolist() == tokens
        close(found.scores[request], scores)
        paths.add(tuple(tokens))
        powers = np.exp(scores / heat)
        q = powers / powers.sum(-1, keepdims=True)
        close(found.probabilities(heat)[request], q)
        at = [list(ids[step]).index(token) for step, token in enumerate(tokens)]
        close(found.confidences(heat)[request], q[range(7), at])
    assert len(paths) > 1
    # Every request draws from its own generator, whoever else is in the batch.
    alone = gumbel([torch.Generator().manual_seed(5)], 7, 5)
    assert torch.equal(alone[0], noise[1])
    again = [torch.Generator().manual_seed(seed) for seed in (4, 5, 6)]
    sampled = propose(d.drafter, cache, anchors, [0, 1, 2], 7, temperature=heat, generators=again)
    assert torch.equal(sampled.token_ids, found.token_ids)
    cold = propose(d.drafter, cache, anchors, [0, 1, 2], 7, temperature=0.0, generators=again)
    assert cold.token_ids.tolist() == [reference.walk(edges, ids)[0]] * 3


def test_gumbel_noise_has_its_distribution() -> None:
    noise = gumbel([torch.Generator().manual_seed(1)], 200, 500).double()
    assert bool(noise.isfinite().all())
    # Mean Euler's gamma, variance pi^2 / 6; 100,000 draws: standard errors 0.004 and 0.011.
    assert abs(float(noise.mean()) - 0.5772) < 0.02
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.05


# -- convolutions and selector ------------------------------------------------------------------


def identity_convolutions(tensors: dict[str, np.ndarray]) -> None:
    for name, bits in tensors.items():
        if name.endswith("base_kernel"):
            bits[...] = 0
            bits[:, 0] = bfloat16_bits(np.ones(1))
        elif name.endswith("kernel_projection.weight"):
            bits[...] = 0


def test_identity_convolutions_leave_a_plain_transformer(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = make("deep", change=identity_convolutions)
    found = d.serve(d.cache(30), [0], 8)
    monkeypatch.setattr(reference, "convolve", lambda *given: given[-1])
    close(found[0], d.block(30, 8))
    conv = d.drafter.layers[1].mlp_conv
    x = torch.randn(16, 48, generator=torch.Generator().manual_seed(1))
    before, after = conv.coefficients(x)
    for side, coefficients in enumerate((before, after)):
        assert torch.equal(dynamic_conv(x, coefficients, conv.base[side], 8), x)


def test_without_successors_the_walk_is_the_best_of_each_row(make: Any) -> None:
    def no_successors(tensors: dict[str, np.ndarray]) -> None:
        tensors["candidate_selector.successor_codebook"][...] = 0

    d, usual = make("plain", change=no_successors), make("plain")
    cache = d.cache(10, 25, 40)
    found = propose(d.drafter, cache, d.anchors(10, 25, 40), [0, 1, 2], 7)
    best = d.drafter.logits(d.serve(cache, [0, 1, 2], 8)[:, 1:]).argmax(-1)
    assert torch.equal(found.token_ids, best)
    assert torch.equal(found.scores, found.unary)
    other = propose(usual.drafter, usual.cache(10, 25, 40), usual.anchors(10, 25, 40), [0, 1, 2], 7)
    assert not torch.equal(other.token_ids, best)


def test_the_candidates_are_the_best_of_all_logits(drafting: Get) -> None:
    d = drafting("deep")
    hidden = d.serve(d.cache(30), [0], 8)[:, 1:]
    ids, unary = d.drafter.candidates(hidden)
    logits = d.drafter.logits(hidden)
    assert logits.shape == (1, 7, 72)
    assert logits.dtype == unary.dtype == torch.float32
    torch.testing.assert_close(logits.gather(-1, ids), unary, rtol=0, atol=1e-6)
    rest = logits.scatter(-1, ids, -math.inf).amax(-1)
    assert bool((rest <= unary[..., -1] + 1e-6).all())
    assert bool((unary[..., 1:] <= unary[..., :-1]).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edges_behind_one_anchor_are_equal_and_pairs_are_rounded(
    make: Any, dtype: torch.dtype
) -> None:
    d = make("grouped", dtype)
    cache = d.cache(15, 33)
    hidden = d.serve(cache, [0, 1], 8)[:, 1:]
    ids, unary = d.drafter.candidates(hidden)
    edges = d.drafter.edges(hidden, ids, unary, d.anchors(15, 33))
    assert edges.shape == (2, 7, 5, 5)
    assert edges.dtype == unary.dtype == torch.float32
    assert torch.equal(edges[:, 0], edges[:, 0, :1].expand(2, 5, 5))
    assert bool((edges[:, 1:, 1:] != edges[:, 1:, :1]).any())
    pair = edges.double() - unary.double()[:, :, None]
    off = (pair - pair.bfloat16().double()).abs().max()
    if dtype == torch.bfloat16:  # what is left is the float32 sum's rounding
        assert float(off) < 2.0**-23 * float(edges.abs().max())
    else:
        assert float(off) > 1e-4


# -- who sees whom ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "deep"])
def test_a_mask_row_reaches_its_own_block_and_no_other(drafting: Get, name: str) -> None:
    d = drafting(name)
    cache = d.cache(20, 20, 31)
    ids = d.drafter.block_ids(d.anchors(20, 20, 31), 8)
    before = d.serve(cache, [0, 1, 2], 8, ids)
    for row in (1, 5, 7):
        other = ids.clone()
        other[8 + row] = 3
        after = d.serve(cache, [0, 1, 2], 8, other)
        assert torch.equal(after[0], before[0])
        assert torch.equal(after[2], before[2])
        assert bool((after[1] != before[1]).any(-1).all())  # earlier rows too: not causal


def test_the_convolution_alone_reaches_later_rows_only(make: Any) -> None:
    def no_attention(tensors: dict[str, np.ndarray]) -> None:
        for name, bits in tensors.items():
            if name.endswith("o_proj.weight"):
                bits[...] = 0

    d = make("plain", change=no_attention)  # one layer, two taps, of which one conv is now of zeros
    cache = d.cache(20, 20)
    ids = d.drafter.block_ids(d.anchors(20, 20), 8)
    before = d.serve(cache, [0, 1], 8, ids)
    for row in (0, 3, 7):
        other = ids.clone()
        other[8 + row] = 3
        after = d.serve(cache, [0, 1], 8, other)
        assert torch.equal(after[0], before[0])
        changed = (after[1] != before[1]).any(-1).nonzero().flatten().tolist()
        assert changed == list(range(row, min(row + 3, 8)))  # a tap before the MLP, one after


@pytest.mark.parametrize("where", ["cache", "sequence"])
def test_the_window_has_its_own_edge_at_each_row(make: Any, where: str) -> None:
    d = make("plain", change=identity_convolutions)  # one layer: no row hands on what it saw
    window, start = 9, 30
    streams = d.rows[:start].clone()

    def states(streams: Tensor) -> Tensor:
        if where == "sequence":
            at = torch.tensor([0]), torch.tensor([start])
            return sequence_blocks(d, *at, 8, streams[None])[0]
        cache = DraftCache(d.drafter, 1, 8)
        cache.write(streams, [start], [0], [start])
        return d.serve(cache, [0], 8)[0]

    before = states(streams)
    for back in range(1, window + 3):
        other = streams.clone()
        other[start - back] += 1.0
        changed = (states(other) != before).any(-1)
        # Row j is at distance back + j from it.
        assert changed.tolist() == [back + j <= window - 1 for j in range(8)]


# -- the cache ----------------------------------------------------------------------------------


class Played:
    """A cache driven as a decode loop drives it, and what each slot's sequence is by now."""

    def __init__(self, d: Any, slots: int, seed: int) -> None:
        self.d, self.random = d, np.random.default_rng(seed)
        self.cache = DraftCache(d.drafter, slots, 8)
        self.streams: dict[int, Tensor] = {}

    def rows(self, count: int) -> Tensor:
        made = self.random.normal(size=(count, self.d.streams.shape[1]))
        return torch.tensor(made).float()

    def run(self, counts: dict[int, int], keep: dict[int, int]) -> None:
        parts = []
        for slot, count in counts.items():
            rows = self.rows(count)
            old = self.streams.get(slot, rows[:0])
            self.streams[slot] = torch.cat((old, rows[: keep[slot]]))
            rows[keep[slot] :] = math.nan  # of a rejected draft nothing may be read
            parts.append(rows)
        slots = list(counts)
        self.cache.write(torch.cat(parts), list(counts.values()), slots, [keep[s] for s in slots])

    def check(self) -> None:
        """Drafts, and what the next block can see, are those of a cache written at once."""
        drafter, slots = self.d.drafter, sorted(self.streams)
        fresh = DraftCache(drafter, self.cache.slots, 8)
        for slot in slots:
            streams = self.streams[slot]
            end, ring = len(streams), self.cache.ring
            assert self.cache.ends[slot] == end
            fresh.write(streams, [end], [slot], [end])
            whole = drafter.context_keys(drafter.context(streams), torch.arange(end))
            seen = torch.arange(max(0, end - self.cache.window + 1), end)
            for layer, (k, v) in enumerate(whole):
                for store, values in ((self.cache.k, k), (self.cache.v, v)):
                    held = store[layer, slot, seen % ring]
                    torch.testing.assert_close(held, values[seen], rtol=0, atol=CLOSE)
        anchors = torch.tensor([slot + 3 for slot in slots])
        length = int(self.random.integers(1, 8))  # later, shorter blocks may follow longer ones
        found, expected = (
            propose(drafter, cache, anchors, slots, length) for cache in (self.cache, fresh)
        )
        assert torch.equal(found.token_ids, expected.token_ids)
        torch.testing.assert_close(found.scores, expected.scores, rtol=0, atol=CLOSE)


@pytest.mark.parametrize(("name", "seed"), [("plain", 1), ("deep", 2), ("narrow", 3)])
def test_any_pattern_of_chunks_and_rejections_equals_recomputation(
    drafting: Get, name: str, seed: int
) -> None:
    played = Played(drafting(name), 4, seed)
    draw = played.random.integers
    waiting = {0: 70, 2: 33, 3: 1}  # prompts, prefilled in chunks of any size
    while waiting:
        counts = {slot: int(draw(1, left + 1)) for slot, left in waiting.items()}
        played.run(counts, counts)
        waiting = {s: left - counts[s] for s, left in waiting.items() if left > counts[s]}
        played.check()
    for step in range(20):
        slots = [int(s) for s in played.random.permutation(sorted(played.streams))]
        counts = {slot: int(draw(1, 9)) for slot in slots}
        played.run(counts, {slot: int(draw(1, count + 1)) for slot, count in counts.items()})
        played.check()
        if step == 6:  # one leaves, another takes its slot and gets a longer, older sequence's
            played.cache.release(2)
            del played.streams[2]
            played.cache.move(3, 2)
            played.streams[2] = played.streams.pop(3)
            assert played.cache.ends == [len(played.streams[0]), 0, len(played.streams[2]), 0]
            played.check()
        if step == 12:  # a new one in a slot that another has used
            played.run({3: 6}, {3: 6})
            played.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_cache_holds_is_what_context_keys_gives(make: Any, dtype: torch.dtype) -> None:
    """Training and evaluation see the context that serving sees."""
    d = make("deep", dtype)
    cache = d.cache(40)
    seen = torch.arange(40 - cache.window + 1, 40)
    # The same rows in one product: a product of other rows may be rounded in another order.
    kv = d.drafter.context(d.rows[40 - (cache.ring - 8) : 40])
    positions = torch.arange(40 - (cache.ring - 8), 40)
    for layer, (k, v) in enumerate(d.drafter.context_keys(kv, positions)):
        held = cache.k[layer, 0, seen % cache.ring]
        if dtype == torch.float32:
            torch.testing.assert_close(held, k, rtol=0, atol=1e-6)
        else:  # two orders of one float32 rotation, before the same rounding
            assert float((held != k).float().mean()) < 1e-3
            torch.testing.assert_close(held, k, rtol=2.0**-7, atol=1e-6)
        assert torch.equal(cache.v[layer, 0, seen % cache.ring], v)


def test_drafts_behind_a_target_that_verified_and_rejected(drafting: Get) -> None:
    """With the real target: its cache truncated after rejections, against one from scratch."""
    d = drafting("grouped")
    beam, drafter = d.drafter.target, d.drafter
    streams: dict[int, Any] = dict.fromkeys(drafter.taps)
    kv, cache = beam.new_cache(), DraftCache(drafter, 1, 8)
    random, end = np.random.default_rng(2), 0

    def run(tokens: list[int], keep: int) -> None:
        beam.extend(kv, torch.tensor(tokens), [len(tokens)], streams=streams)
        kv.truncate(0, kv.lengths[0] - len(tokens) + keep)
        rows = torch.cat([streams[layer] for layer in drafter.taps], -1)
        cache.write(rows, [len(tokens)], [0], [keep])

    for chunk in (7, 1, 12):
        run(d.tokens[end : end + chunk], chunk)
        end += chunk
    while end < 52:
        accepted = int(random.integers(0, 6))
        wrong = random.integers(0, 70, 5 - accepted).tolist()
        run(d.tokens[end : end + 1 + accepted] + wrong, 1 + accepted)
        end += 1 + accepted
        found = propose(drafter, cache, d.anchors(end), [0], 7)
        scratch: dict[int, Any] = dict.fromkeys(drafter.taps)
        beam.extend(beam.new_cache(), torch.tensor(d.tokens[:end]), [end], streams=scratch)
        fresh = DraftCache(drafter, 1, 8)
        fresh.write(torch.cat([scratch[i] for i in drafter.taps], -1), [end], [0], [end])
        expected = propose(drafter, fresh, d.anchors(end), [0], 7)
        assert torch.equal(found.token_ids, expected.token_ids)
        torch.testing.assert_close(found.scores, expected.scores, rtol=0, atol=1e-4)
        close(d.serve(cache, [0], 8)[0], d.block(end, 8), 1e-4)


def test_writing_nothing_verified_changes_nothing(drafting: Get) -> None:
    d = drafting("plain")
    cache = d.cache(12)
    before = cache.k.clone(), cache.v.clone()
    cache.write(torch.full((5, 48), math.nan), [5], [0], [0])
    assert cache.ends == [12]
    assert torch.equal(cache.k, before[0])
    assert torch.equal(cache.v, before[1])
    assert cache.nbytes == 2 * 4 * cache.k.numel()


# -- batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grouped", "deep"])
@pytest.mark.parametrize("slots", [[0, 1, 2, 3], [3, 1, 0], [2]])
def test_a_batch_of_different_lengths_equals_each_alone(
    drafting: Get, name: str, slots: list[int]
) -> None:
    d = drafting(name)
    lengths = [5, 41, 0, 22]
    cache = d.cache(*lengths)
    hidden = d.serve(cache, slots, 8)
    anchors = d.anchors(*(lengths[s] for s in slots))
    drafts = propose(d.drafter, cache, anchors, slots, 7)
    for i, slot in enumerate(slots):
        close(hidden[i], d.block(lengths[slot], 8))
        alone = d.cache(lengths[slot])
        found = propose(d.drafter, alone, anchors[i : i + 1], [0], 7)
        assert torch.equal(found.token_ids[0], drafts.token_ids[i])
        torch.testing.assert_close(found.scores[0], drafts.scores[i], rtol=0, atol=CLOSE)


@pytest.mark.parametrize(
    ("name", "dtype", "atol"),
    [
        ("plain", torch.float32, CLOSE),
        ("grouped", torch.float32, CLOSE),
        ("deep", torch.float32, CLOSE),
        ("narrow", torch.float32, CLOSE),
        # States of up to 4: a bfloat16 is 2^-6 apart there. Three layers, several roundings each.
        ("deep", torch.bfloat16, 0.07),
    ],
)
def test_blocks_anywhere_in_sequences_are_the_served_ones(
    make: Any, name: str, dtype: torch.dtype, atol: float
) -> None:
    d = make(name, dtype)
    other = torch.randn(60, d.streams.shape[1], generator=torch.Generator().manual_seed(8))
    streams = torch.stack((d.rows, other.to(dtype)))
    sequence = torch.tensor([1, 0, 0, 1, 0, 1])
    anchors = torch.tensor([40, 0, 7, 1, 52, 52])
    found = sequence_blocks(d, sequence, anchors, 8, streams)
    for i, (s, start) in enumerate(zip(sequence.tolist(), anchors.tolist(), strict=True)):
        cache = DraftCache(d.drafter, 1, 8)
        cache.write(streams[s, :start], [start], [0], [start])
        expected = d.serve(cache, [0], 8)[0]
        torch.testing.assert_close(found[i], expected, rtol=0, atol=atol)
        if s == 0 and dtype == torch.float32:
            close(found[i], d.block(start, 8))


def test_blocks_in_sequences_see_nothing_from_their_anchor_on(drafting: Get) -> None:
    d = drafting("deep")
    streams = d.rows[None].clone()
    at = torch.tensor([0, 0]), torch.tensor([30, 33])
    before = sequence_blocks(d, *at, 8, streams)
    streams[:, 30:] = 7.0
    after = sequence_blocks(d, *at, 8, streams)
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])


def test_gradients_reach_every_parameter(make: Any) -> None:
    """What training differentiates is the served computation: a step along -g lowers the loss."""
    with torch.inference_mode(False), torch.enable_grad():
        d = make("grouped")
        drafter = Drafter(d.drafter.config, d.drafter.target)
        drafter.load_state_dict(d.drafter.state_dict())
        drafter.requires_grad_(True)
        d = dataclasses.replace(d, drafter=drafter)

        def loss() -> Tensor:
            streams = d.rows[None]
            at = torch.tensor([0, 0, 0]), torch.tensor([4, 20, 37])
            hidden = sequence_blocks(d, *at, 8, streams)[:, 1:]
            ids, unary = drafter.candidates(hidden)
            edges = drafter.edges(hidden, ids, unary, d.anchors(4, 20, 37))
            return edges.logsumexp(-1).mean()

        before = loss()
        before.backward()
        slopes = {name: p.grad for name, p in drafter.named_parameters()}
        assert not [name for name, grad in slopes.items() if grad is None or not grad.any()]
        square = sum(float(grad.square().sum()) for grad in slopes.values() if grad is not None)
        step = 1e-4 * float(before.detach()) / square
        with torch.no_grad():
            for p in drafter.parameters():
                p -= step * p.grad
        gain = float(before.detach().double() - loss().detach().double())
        assert gain == pytest.approx(step * square, rel=0.1)


def test_a_block_shorter_than_the_cache_was_made_for(drafting: Get) -> None:
    d = drafting("deep")
    cache = d.cache(37)
    for query_len in (8, 2, 8, 5):
        close(d.serve(cache, [0], query_len)[0], d.block(37, query_len))


def test_a_block_longer_than_the_cache_was_made_for_is_refused(drafting: Get) -> None:
    """It would overwrite context within the window, and the drafts would only be worse."""
    d = drafting("deep")
    cache = d.cache(37, query_len=4)
    with pytest.raises(DraftError, match=r"block of 5 rows .* not for 4"):
        propose(d.drafter, cache, d.anchors(37), [0], 4)
    close(d.serve(cache, [0], 4)[0], d.block(37, 4))


def test_cached_blocks_write_their_own_rows_only(drafting: Get) -> None:
    d = drafting("deep")
    cache = d.cache(37, 37, 37)
    before = cache.k.clone()
    blocks = CachedBlocks(cache, torch.tensor([37]), [1], 8, cache.limit)
    d.drafter(d.drafter.block_ids(d.anchors(37), 8), blocks, 8)
    changed = (cache.k != before).flatten(3).any(-1)  # [L, slots, ring]
    assert not bool(changed[:, [0, 2]].any())
    rows = {p % cache.ring for p in range(37, 45)}
    for layer in range(3):
        assert set(changed[layer, 1].nonzero().flatten().tolist()) == rows
