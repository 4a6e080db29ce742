"""The training stream: which windows a step sees, and streams that cannot be used."""

from pathlib import Path

import numpy as np
import pytest
import torch

from workbench.errors import TrainingError
from workbench.model.tokenizer import Tokenizer
from workbench.training import data
from workbench.training.data import TokenStream, open_stream

COUNTING = np.arange(1000, dtype=np.uint16)  # every token says where it stands


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    stream = TokenStream(COUNTING, seed=3)
    forward = {step: stream.batch(step, 8, 16) for step in range(20)}
    fresh = TokenStream(COUNTING, seed=3)
    torch.manual_seed(123)
    np.random.seed(123)
    for step in (19, 0, 7, 7):
        assert torch.equal(fresh.batch(step, 8, 16), forward[step])
    assert not torch.equal(forward[0], forward[1])
    assert not torch.equal(TokenStream(COUNTING, seed=4).batch(0, 8, 16), forward[0])


def test_windows_are_contiguous_and_reach_the_whole_stream() -> None:
    stream = TokenStream(COUNTING[:20], seed=0)
    starts = set()
    for step in range(100):
        windows = stream.batch(step, 4, 15)
        assert windows.dtype == torch.int64
        assert windows.shape == (4, 16)
        assert torch.equal(windows - windows[:, :1], torch.arange(16).expand(4, 16))
        starts |= set(windows[:, 0].tolist())
    assert starts == {0, 1, 2, 3, 4}, "the last window ends with the last token"


def test_a_corpus_folder_is_read_as_it_was_written(
    corpus_folder: Path, small_tokenizer: Tokenizer
) -> None:
    stream = open_stream(str(corpus_folder), small_tokenizer, 32, 0)
    assert np.array_equal(
        stream.tokens, np.fromfile(corpus_folder / "train.tokens.u16", dtype="<u2")
    )


def test_the_standard_library_is_a_corpus(small_tokenizer: Tokenizer) -> None:
    tokens = data._stdlib_tokens(small_tokenizer, most_bytes=20_000)
    assert tokens.dtype == np.uint16
    assert tokens[0] == small_tokenizer.bos_id
    assert tokens[-1] == small_tokenizer.eos_id
    text = small_tokenizer.decode(tokens[1 : tokens.tolist().index(small_tokenizer.eos_id)])
    import __future__ as first  # the first file of the standard library by name

    assert text == Path(first.__file__).read_text()


def other_tokenizer(tmp_path: Path) -> Tokenizer:
    """As large a vocabulary as the corpus's, learnt from other text."""
    from workbench.training import bpe

    text = "".join(chr(0x4E00 + i % 97) * 3 + str(i % 1013) for i in range(20_000))
    definition = bpe.train_tokenizer([text], vocab_size=400)
    return bpe.write_tokenizer(tmp_path / "other", definition)


def test_unusable_corpora_are_named(
    tmp_path: Path, corpus_folder: Path, small_tokenizer: Tokenizer
) -> None:
    tokens = np.fromfile(corpus_folder / "train.tokens.u16", dtype="<u2")

    def refuse(content: bytes | None, tokenizer: Tokenizer, message: str, length: int = 8) -> None:
        file = tmp_path / "train.tokens.u16"
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(TrainingError, match=message) as caught:
            open_stream(str(tmp_path), tokenizer, length, 0)
        assert "\n" not in str(caught.value)

    def written(ids: np.ndarray) -> bytes:
        return ids.astype("<u2").tobytes()

    missing = "no training tokens at .*workbench.training.corpus --out .*workbench.training.bpe"
    refuse(None, small_tokenizer, missing)
    refuse(b"", small_tokenizer, missing)
    refuse(written(tokens)[:-1], small_tokenizer, "cut off in the middle of a token")
    refuse(written(tokens[:9]), small_tokenizer, "has 9 tokens, fewer than one window of 9", 9)
    late = tokens.copy()
    late[-2] = 400  # beyond the vocabulary, at the very end
    another = "made with another tokenizer; name the one"
    refuse(written(late), small_tokenizer, another)
    # As many ids, other meanings; and no document at all.
    refuse(written(tokens), other_tokenizer(tmp_path), another)
    refuse(written(tokens[5:]), small_tokenizer, another)
    assert len(open_stream(str(corpus_folder), small_tokenizer, len(tokens) - 1, 0).tokens)
