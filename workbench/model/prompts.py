"""Prompts: text or token ids, one or several, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from workbench.errors import PromptError

if TYPE_CHECKING:
    from workbench.model.beam import Beam

One: TypeAlias = str | Sequence[int]
Several: TypeAlias = list[str] | list[list[int]]
Prompts: TypeAlias = One | Several


def is_single(prompts: Prompts) -> bool:
    """Whether this is one prompt (a text, or ids) rather than a list of prompts."""
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


def prompt_ids(beam: Beam, prompts: Prompts, *, room: int = 1) -> list[list[int]]:
    """The ids of each prompt, checked against the vocabulary and the context.

    ``room`` tokens of the context have to be left: 1 for decoding, 0 where the prompt is all.

    Raises:
        PromptError: naming the prompt and what is wrong with it.
    """
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray | memoryview):
        raise PromptError(
            "prompts must be a text, a list of texts, or lists of token ids, "
            f"not {type(prompts).__name__}"
        )
    several = [prompts] if is_single(prompts) else list(prompts)
    if not several:
        raise PromptError("the list of prompts is empty; give at least one prompt")
    return [
        _checked_ids(beam, prompt, room, "the prompt" if len(several) == 1 else f"prompt {number}")
        for number, prompt in enumerate(several)
    ]


def _checked_ids(beam: Beam, prompt: Any, room: int, name: str) -> list[int]:
    if isinstance(prompt, str):
        if not prompt:
            raise PromptError(f"{name} is empty; give it at least one character")
        if beam.tokenizer is None:
            raise PromptError(
                f"{name} is text, but {beam.name} has no tokenizer.json; give token ids instead"
            )
        ids = beam.tokenizer.encode(prompt)
    elif isinstance(prompt, Sequence):
        ids = list(prompt)
    else:
        raise PromptError(f"{name} must be text or a list of token ids, not {prompt!r}")
    if not ids:
        raise PromptError(f"{name} is empty; give it at least one token id")
    vocabulary = beam.config.vocab_size
    for position, token_id in enumerate(ids):
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise PromptError(f"{name} holds {token_id!r} at position {position}, not a token id")
        if not 0 <= token_id < vocabulary:
            raise PromptError(
                f"{name} holds token id {token_id} at position {position}; "
                f"the vocabulary of {beam.name} has ids 0 to {vocabulary - 1}"
            )
    limit = beam.config.max_position_embeddings
    if len(ids) + room > limit:
        why = "leaves no room for a new one in" if len(ids) <= limit else "exceeds"
        raise PromptError(
            f"{name} has {len(ids)} tokens, which {why} the context of {limit}; "
            f"shorten it to {limit - room}"
        )
    return ids
