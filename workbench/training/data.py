"""Training tokens: one long stream on disk, and batches of windows drawn from it by step number."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from workbench.errors import TrainingError
from workbench.model.tokenizer import Tokenizer


class TokenStream:
    """A flat array of token ids (uint16), from which steps draw windows.

    The windows of a step depend on the seed and the step number only, so a resumed run sees
    exactly what an uninterrupted one would have seen.
    """

    def __init__(self, tokens: np.ndarray, seed: int) -> None:
        self.tokens, self.seed = tokens, seed

    def batch(self, step: int, batch: int, length: int) -> Tensor:
        """Windows of step ``step``: int64 ``[batch, length + 1]`` (inputs and shifted targets)."""
        rng = np.random.default_rng((self.seed, step))
        starts = rng.integers(0, len(self.tokens) - length, size=batch)
        window = starts[:, None] + np.arange(length + 1)
        return torch.from_numpy(self.tokens[window].astype(np.int64))


def open_stream(corpus: str, tokenizer: Tokenizer, length: int, seed: int) -> TokenStream:
    """The training stream of a corpus folder, or of this interpreter's sources for "stdlib".

    Raises:
        TrainingError: no tokens there, or fewer than one window.
    """
    if corpus == "stdlib":
        tokens = _stdlib_tokens(tokenizer)
    else:
        file = Path(corpus) / "train.tokens.u16"
        if not file.is_file() or file.stat().st_size < 2:
            raise TrainingError(
                f"no training tokens at {file}; make them with "
                f"'python -m workbench.training.corpus --out {corpus}'"
            )
        tokens = np.memmap(file, dtype="<u2", mode="r")
    if len(tokens) <= length:
        raise TrainingError(f"corpus {corpus} has {len(tokens)} tokens, fewer than one window")
    if int(np.max(tokens[: 1 << 22])) >= tokenizer.vocab_size:
        raise TrainingError(f"corpus {corpus} was made with another tokenizer; make it again")
    return TokenStream(tokens, seed)


def _stdlib_tokens(tokenizer: Tokenizer, most_bytes: int = 3_000_000) -> np.ndarray:
    ids: list[int] = []
    size = 0
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        ids += [*tokenizer.encode(text), tokenizer.eos_id]
        size += len(text)
        if size > most_bytes:
            break
    return np.array(ids, dtype=np.uint16)
