"""The KV cache: however a sequence is cut into passes, the logits are those of the whole."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from workbench.errors import PromptError
from workbench.model.beam import Beam
from workbench.model.cache import KVCache
from workbench.model.checkpoint import load
from workbench.model.config import BeamConfig
from workbench.model.context import SequenceContext
from workbench.model.parallel import Shard

from .conftest import CONFIGS, Small

pytestmark = pytest.mark.usefixtures("one_thread")

FP32 = 1e-4
WINDOW = CONFIGS["features"]["sliding_window"]


def run(beam: Beam, cache: KVCache, ids: Tensor, slot: int = 0) -> Tensor:
    """Logits [n, V] of n more tokens of one sequence, in one pass."""
    return beam.logits(beam.extend(cache, ids, [len(ids)], [slot]))


def apart(found: Tensor, expected: np.ndarray | Tensor) -> float:
    return float((found.double() - torch.as_tensor(expected).double()).abs().max())


# -- one sequence -------------------------------------------------------------------------------


# The spare rows make 17 the last chunk that is stored before it is looked at; 18 the first after.
@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 6, 16, 17, 18, 21, 22, 44, 45])
def test_chunks_agree_with_the_reference(each_small: Small, chunk: int) -> None:
    beam = load(each_small.folder)
    cache = beam.new_cache()
    logits = torch.cat([run(beam, cache, part) for part in each_small.ids.split(chunk)])
    assert apart(logits, each_small.reference["logits"]) < FP32
    assert cache.lengths == [len(each_small.tokens)]


@pytest.mark.parametrize("rollback", [0, 1, 3, 40])
@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_any_number_of_spare_rows_will_do(features: Small, rollback: int, chunk: int) -> None:
    beam = load(features.folder)
    cache = beam.new_cache(rollback=rollback)
    logits = torch.cat([run(beam, cache, part) for part in features.ids.split(chunk)])
    assert apart(logits, features.reference["logits"]) < FP32


def test_prefill_then_decode_over_many_windows(features: Small) -> None:
    """400 tokens are 80 windows: every row of every ring has been overwritten many times."""
    beam = load(features.folder)
    ids = torch.randint(0, 64, (400,), generator=torch.Generator().manual_seed(5))
    whole = beam.sequence_logits(ids)
    cache = beam.new_cache()
    parts = ids.split([150, 31, 19, *[1] * 200])
    assert apart(torch.cat([run(beam, cache, part) for part in parts]), whole) < FP32


def test_sliding_layers_forget_what_left_the_window(features: Small) -> None:
    """With sliding layers alone, token 0 cannot matter beyond layers x (window - 1) positions."""
    beam = load(features.folder)
    sliding = Beam(beam.config.replace(layer_types=("sliding_attention",) * 4))
    sliding.load_state_dict(beam.state_dict())
    ids = features.ids
    changed = torch.cat(((ids[:1] + 1) % 64, ids[1:]))
    logits = []
    for tokens in (ids, changed):
        cache = sliding.new_cache()
        logits.append(torch.cat([run(sliding, cache, part) for part in tokens.split(9)]))
    reach = 4 * (WINDOW - 1)
    assert (logits[0][: reach + 1] != logits[1][: reach + 1]).any(-1).all()
    assert torch.equal(logits[0][reach + 1 :], logits[1][reach + 1 :])


def test_bf16_cache(features: Small) -> None:
    """Decode in BF16 differs from a whole BF16 pass by no more than BF16 differs from FP64."""
    beam = load(features.folder, dtype=torch.bfloat16)
    whole = beam.sequence_logits(features.ids).double()
    cache = beam.new_cache()
    assert {t.dtype for t in (*cache.k, *cache.v)} == {torch.bfloat16}
    parts = torch.cat([run(beam, cache, part) for part in features.ids.split(3)]).double()
    exact = torch.as_tensor(features.reference["logits"])
    noise = (whole - exact).square().mean().sqrt()
    assert (parts - exact).square().mean().sqrt() < 2 * noise


# -- several sequences --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["features", "defaults", "engine_grouped"])
def test_sequences_come_go_and_take_back_tokens(
    small: Callable[[str], Small], name: str, seed: int
) -> None:
    """Three slots; each pass takes any of them, in any order, with any number of tokens.

    Some passes end with a truncation within the spare rows, as rejected draft tokens do; a
    finished sequence makes room for another one in its slot.
    """
    beam = load(small(name).folder)
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    queue = [
        torch.randint(0, beam.config.vocab_size, (n,), generator=generator)
        for n in (70, 5, 33, 48, 1, 26, 90)
    ]
    expected = [beam.sequence_logits(ids) for ids in queue]
    worst, finished, waiting = 0.0, 0, list(range(len(queue)))
    cache = beam.new_cache(3, rollback=6)
    active: dict[int, int] = {}  # slot -> sequence
    rejections = 0
    while finished < len(queue):
        for slot in range(3):
            if slot not in active and waiting:
                active[slot] = waiting.pop(0)
        slots = chance.sample(sorted(active), chance.randint(1, len(active)))
        counts = [
            min(chance.choice([1, 1, 2, 4, 7, 8, 30]), len(queue[active[s]]) - cache.lengths[s])
            for s in slots
        ]
        starts = [cache.lengths[s] for s in slots]
        ends = [a + n for a, n in zip(starts, counts, strict=True)]
        flat = torch.cat(
            [queue[active[s]][a:b] for s, a, b in zip(slots, starts, ends, strict=True)]
        )
        parts = beam.logits(beam.extend(cache, flat, counts, slots)).split(counts)
        for slot, a, b, logits in zip(slots, starts, ends, parts, strict=True):
            worst = max(worst, apart(logits, expected[active[slot]][a:b]))
            if b == len(queue[active[slot]]):
                cache.truncate(slot, 0)
                del active[slot]
                finished += 1
            elif chance.random() < 0.4 and 1 < b - a <= 7:
                cache.truncate(slot, chance.randint(a + 1, b - 1))
                rejections += 1
    assert worst < FP32
    assert rejections > 0


def test_wrong_drafts_leave_no_trace(features: Small) -> None:
    """Verify steps of 17 tokens of which 16 are wrong, taken back each time."""
    beam = load(features.folder)
    ids, cache, logits = features.ids, beam.new_cache(rollback=16), []
    logits.append(run(beam, cache, ids[:10]))
    for position in range(10, len(ids)):
        draft = torch.cat((ids[position : position + 1], torch.randint(0, 64, (16,))))
        logits.append(run(beam, cache, draft)[:1])
        cache.truncate(0, position + 1)
    assert apart(torch.cat(logits), features.reference["logits"]) < FP32


# -- sizes and limits ---------------------------------------------------------------------------


def test_sliding_layers_keep_their_window_and_full_layers_grow(features: Small) -> None:
    beam = load(features.folder)
    cache = beam.new_cache(2, rollback=3)
    seen = []
    for part in torch.cat([features.ids] * 5).split(25):
        run(beam, cache, part, slot=1)
        for layer in range(4):
            rows = cache.k[layer].shape[1]
            assert cache.k[layer].shape == cache.v[layer].shape == (2, rows, 2, 16)
            if layer % 2:  # full
                assert cache.lengths[1] <= rows <= beam.config.max_position_embeddings
            else:
                assert rows == WINDOW + 3
        seen.append(cache.capacity)
        # 2 slots, 2 layers of each kind, K and V, 2 heads of 16, 4 bytes
        assert cache.nbytes == 2 * (2 * 8 + 2 * cache.capacity) * 2 * 2 * 16 * 4
    assert seen == sorted(seen)
    assert seen[0] < 100 < seen[-1] < 2 * 225


def test_contents_are_what_can_still_be_seen(features: Small) -> None:
    """Positions, and the keys and values that a whole pass would have there."""
    beam = load(features.folder)
    keys: dict[int, tuple[Tensor, Tensor]] = {}

    class Spy(SequenceContext):
        def attend(self, layer: int, q: Tensor) -> Tensor:
            keys[layer] = (self.k, self.v)
            return super().attend(layer, q)

    beam(features.ids, Spy(beam.config, 1, len(features.ids)))
    cache = beam.new_cache(2)
    for part in features.ids.split(20):
        run(beam, cache, part, slot=1)
    for layer in range(4):
        positions, k, v = cache.contents(layer, slot=1)
        first = 0 if layer % 2 else 45 - WINDOW
        assert positions.tolist() == list(range(first, 45))
        assert apart(k, keys[layer][0][first:]) < 1e-5
        assert apart(v, keys[layer][1][first:]) < 1e-5
        assert len(cache.contents(layer, slot=0)[0]) == 0


def test_rollback_beyond_the_spare_rows_is_refused(features: Small) -> None:
    beam = load(features.folder)
    cache = beam.new_cache(rollback=4)
    run(beam, cache, features.ids[:30])
    for length in (31, -1):
        with pytest.raises(PromptError, match=f"cannot truncate 30 cached tokens to {length}"):
            cache.truncate(0, length)
    with pytest.raises(PromptError, match="sliding layers keep only 4 tokens to take back"):
        cache.truncate(0, 25)
    cache.truncate(0, 26)
    with pytest.raises(PromptError, match="sliding layers keep only 4"):
        cache.truncate(0, 25)  # the rows that hold what it needs are gone all the same
    assert cache.lengths == [26]
    again = run(beam, cache, features.ids[26:])
    assert apart(again, features.reference["logits"][26:]) < FP32
    cache.truncate(0, 0)
    again = run(beam, cache, features.ids)
    assert apart(again, features.reference["logits"]) < FP32


def test_a_short_sequence_can_be_taken_back_anywhere(features: Small) -> None:
    """As long as no ring has wrapped, nothing was overwritten."""
    beam = load(features.folder)
    cache = beam.new_cache(rollback=4)
    run(beam, cache, features.ids[: WINDOW + 4])
    cache.truncate(0, 2)
    again = run(beam, cache, features.ids[2:])
    assert apart(again, features.reference["logits"][2:]) < FP32


def test_the_context_has_an_end(features: Small) -> None:
    beam = load(features.folder)
    short = Beam(beam.config.replace(max_position_embeddings=30))
    short.load_state_dict(beam.state_dict())
    cache = short.new_cache()
    run(short, cache, features.ids[:20])
    with pytest.raises(PromptError, match="31 tokens exceed the model's context of 30"):
        run(short, cache, features.ids[20:31])
    assert cache.lengths == [20]
    last = run(short, cache, features.ids[20:30])
    assert apart(last, features.reference["logits"][20:30]) < FP32
    assert cache.capacity == 30


@pytest.mark.parametrize("count", [1, 7, 17, 18, 30])
def test_an_interrupted_pass_leaves_the_cache_as_it_was(features: Small, count: int) -> None:
    """Ctrl-C in the middle of a pass, at any layer: the same tokens can be run again."""
    beam = load(features.folder)
    for layer in range(4):
        cache = beam.new_cache()
        run(beam, cache, features.ids[:12])

        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        hook = beam.layers[layer].register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            run(beam, cache, features.ids.flip(0)[:count])
        hook.remove()
        assert cache.lengths == [12]
        again = run(beam, cache, features.ids[12:])
        assert apart(again, features.reference["logits"][12:]) < FP32, layer


def test_an_interrupted_pass_uses_up_what_could_be_taken_back(features: Small) -> None:
    """Its rows are gone from the rings, so going back is refused, never quietly wrong."""
    beam = load(features.folder)
    cache = beam.new_cache(rollback=4)
    run(beam, cache, features.ids[:30])

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    hook = beam.layers[3].register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        run(beam, cache, features.ids[30:35])
    hook.remove()
    with pytest.raises(PromptError, match="sliding layers keep only 4"):
        cache.truncate(0, 26)
    cache.truncate(0, 30)  # nothing to take back
    again = run(beam, cache, features.ids[30:])
    assert apart(again, features.reference["logits"][30:]) < FP32


def test_a_rank_caches_its_own_kv_heads() -> None:
    config = BeamConfig.from_dict(CONFIGS["features"])
    for world, heads, group in ((1, 2, 2), (2, 1, 2), (4, 1, 1)):
        cache = KVCache(config, shard=Shard(rank=world - 1, world=world))
        assert cache.k[0].shape[2] == heads
        assert cache.group == group
