"""Responses of the target: the same tokens as decoding one by one, cut where they loop."""

import random

import numpy as np
import pytest
import torch

from workbench.errors import TrainingError
from workbench.model.beam import Beam
from workbench.training import regenerate
from workbench.training.regenerate import (
    PromptSource,
    Responses,
    continue_rows,
    repeated_ngrams,
    valid_lengths,
)


def prompts(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(20, 400, (rows, length), generator=torch.Generator().manual_seed(seed))


def one_by_one(beam: Beam, prompt: torch.Tensor, count: int) -> list[int]:
    """Greedy tokens from whole forward passes: no cache, no batch."""
    ids = prompt.tolist()
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(beam.sequence_logits(torch.tensor(ids))[-1].argmax()))
    return ids


def test_rows_are_what_greedy_decoding_gives(target: Beam, monkeypatch: pytest.MonkeyPatch) -> None:
    # Prompts longer than the window of 8, prefilled in three passes of two rows.
    monkeypatch.setattr(regenerate, "PREFILL_TOKENS", 41)
    given = prompts(5, 20)
    tokens = continue_rows(target, given, 24)
    assert tokens.shape == (5, 44)
    assert tokens.tolist() == [one_by_one(target, row, 24) for row in given]


def test_sampled_rows_are_drawn_from_the_softmax_and_leave_greedy_rows_alone(
    target: Beam,
) -> None:
    rows, heat = 4000, 0.7
    given = prompts(1, 12).expand(rows, -1)
    temperature = torch.full((rows,), heat)
    temperature[:2] = 0.0
    generator = torch.Generator().manual_seed(3)
    tokens = continue_rows(target, given, 2, temperature=temperature, generator=generator)
    assert tokens[:2].tolist() == [one_by_one(target, given[0], 2)] * 2
    with torch.no_grad():
        logits = target.sequence_logits(given[0])[-1]
    expected = (logits / heat).softmax(-1)
    drawn = torch.bincount(tokens[2:, 12], minlength=400) / (rows - 2)
    # Of 3998 draws over a spread distribution; a wrong temperature is off by more than 0.1.
    noise = float((expected * (1 - expected) / rows).sqrt().sum()) / 2
    assert float((drawn - expected).abs().sum()) / 2 < 1.5 * noise
    assert len(set(map(tuple, tokens[2:, 12:].tolist()))) > 100


def test_a_response_that_does_not_fit_the_context_is_refused(target: Beam) -> None:
    with pytest.raises(TrainingError, match=r"prompts of 40 and responses of 25 .* context of 64"):
        continue_rows(target, prompts(2, 40), 25)


def brute_repeated(row: list[int]) -> list[bool]:
    seen: set[tuple[int, ...]] = set()
    found = []
    for i in range(len(row) - 7):
        gram = tuple(row[i : i + 8])
        found.append(gram in seen)
        seen.add(gram)
    return found


def test_repeated_ngrams_are_those_seen_before() -> None:
    rng = random.Random(0)
    rows = [[rng.randrange(2) for _ in range(200)] for _ in range(6)]
    rows.append([rng.randrange(10**6) for _ in range(200)])
    assert repeated_ngrams(torch.tensor(rows)).tolist() == [brute_repeated(row) for row in rows]


def test_a_response_counts_up_to_its_end_or_its_loop() -> None:
    rng = random.Random(1)
    prompt, length, eos = 10, 80, 1
    fresh = [rng.randrange(100, 10**6) for _ in range(length)]
    ended = list(fresh)
    ended[4] = eos  # of the prompt: no end
    ended[30] = ended[50] = eos
    loop = fresh[:20] + [fresh[i % 5 + 10] for i in range(60)]
    # The prompt itself repeats; the response does not.
    echoing = [7] * prompt + fresh[prompt:]
    rows = torch.tensor([fresh, ended, loop, echoing])
    valid = valid_lengths(rows, prompt, eos, run=6)
    again = brute_repeated(loop)
    begin = next(i for i in range(len(again)) if i >= prompt - 7 and all(again[i : i + 6]))
    assert valid.tolist() == [80, 31, begin + 8 + 5, 80]
    assert begin + 13 < 45, "the loop of five tokens begins at 20"
    assert valid_lengths(rows, prompt, eos, run=6, grace=9).tolist()[2] == begin + 13 + 9
    assert valid_lengths(rows, prompt, eos, run=6, grace=99).tolist()[2] == 80
    assert valid_lengths(rows, prompt, None, run=0).tolist() == [80] * 4


def test_rows_with_little_left_are_dropped() -> None:
    found = Responses(tokens=torch.zeros(3, 9).long(), prompt=4, valid=torch.tensor([9, 5, 7]))
    assert found.counted == 5 + 1 + 3
    kept = found.kept(3)
    assert kept.valid.tolist() == [9, 7]
    assert kept.counted == 8


def test_prompts_lie_within_one_document() -> None:
    rng = np.random.default_rng(0)
    documents = [[0, *range(1000 * i, 1000 * i + int(n))] for i, n in
                 enumerate(rng.integers(5, 60, size=40), start=1)]  # fmt: skip
    stream = np.array([t for d in documents for t in (*d, 1)], dtype=np.uint16)
    source = PromptSource(stream, 1, seed=5)
    texts = [tuple(d) for d in documents]
    drawn = source.draw(0, 500, 12, 0.0)
    assert drawn.shape == (500, 12)
    assert drawn.dtype == torch.int64
    starts = set()
    for row in map(tuple, drawn.tolist()):
        inside = [t for t in texts if any(t[i : i + 12] == row for i in range(len(t)))]
        assert len(inside) == 1
        starts.add(row[0] == 0)
    assert starts == {True, False}
    assert set(source.draw(1, 50, 12, 1.0)[:, 0].tolist()) == {0}
    # The same seed and round give the same prompts; another round gives others.
    assert torch.equal(drawn, PromptSource(stream, 1, seed=5).draw(0, 500, 12, 0.0))
    assert not torch.equal(drawn, source.draw(1, 500, 12, 0.0))
    with pytest.raises(TrainingError, match="no document of the corpus has 500 tokens"):
        source.draw(0, 4, 500, 0.0)
