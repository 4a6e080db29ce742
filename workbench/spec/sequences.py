"""One sequence while it decodes: what it was given, what it has, and when it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from workbench.model.beam import Beam
from workbench.model.generate import Finish, Generation
from workbench.model.sampling import Sampling
from workbench.spec.step import Kind

if TYPE_CHECKING:
    from workbench.model.tokenizer import DecodeStream

# Draft noise must not be the target's: the two streams of a seed are kept apart by this.
_DRAFT_STREAM = 0x5DEECE66D


@dataclass(slots=True, kw_only=True, eq=False)
class Running:
    """A request. While it decodes, its place in the batch is its slot in both caches."""

    request: int
    prompt: list[int]
    room: int  # most new tokens
    at_room: Finish  # why it ends there
    generator: torch.Generator
    draft_generator: torch.Generator
    decoder: DecodeStream | None
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    steps: int = 0
    timed_steps: int = 0
    timed_tokens: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    finish: Finish | None = None

    @classmethod
    def of(
        cls, beam: Beam, request: int, prompt: list[int], most: int, sampling: Sampling
    ) -> Running:
        """Ready for its prefill; ``most`` new tokens, fewer if the context is full before."""
        space = beam.config.max_position_embeddings - len(prompt)
        tokenizer = beam.tokenizer
        return cls(
            request=request,
            prompt=prompt,
            room=min(most, space),
            at_room="length" if most <= space else "context",
            generator=sampling.generator(),
            draft_generator=torch.Generator().manual_seed(sampling.seed ^ _DRAFT_STREAM),
            decoder=None if tokenizer is None else tokenizer.decode_stream(),
        )

    @property
    def position(self) -> int:
        """Tokens so far, prompt included."""
        return len(self.prompt) + len(self.ids)

    @property
    def left(self) -> int:
        """Tokens it may still get."""
        return self.room - len(self.ids)

    @property
    def anchor(self) -> int:
        """The last token, which the target has not run yet."""
        return self.ids[-1] if self.ids else self.prompt[-1]

    def take(
        self, beam: Beam, token_ids: list[int], kinds: list[Kind], eos: int | None
    ) -> tuple[tuple[int, ...], tuple[Kind, ...]]:
        """Append what a step gave, up to a stop token or the limit; what was kept."""
        kept = 0
        for token_id in token_ids:
            kept += 1
            self.ids.append(token_id)
            if token_id == eos:
                self.finish = "eos"
            elif len(self.ids) == self.room:
                self.finish = self.at_room
            self.texts.append(self._text(beam, token_id))
            if self.finish is not None:
                break
        return tuple(token_ids[:kept]), tuple(kinds[:kept])

    def _text(self, beam: Beam, token_id: int) -> str:
        if self.decoder is None:
            return ""
        # A model's table may be padded beyond its tokenizer.
        known = beam.tokenizer is not None and token_id < beam.tokenizer.vocab_size
        text = self.decoder.push(token_id) if known else "\ufffd"
        return text + self.decoder.flush() if self.finish is not None else text

    def count(self, tokens: int, seconds: float, timed: bool) -> None:
        """Note a decode step it took part in."""
        self.steps += 1
        if timed:
            self.timed_steps += 1
            self.timed_tokens += tokens
            self.seconds += seconds

    @property
    def generation(self) -> Generation:
        """What it has so far."""
        return Generation(
            text="".join(self.texts),
            token_ids=tuple(self.ids),
            prompt_tokens=len(self.prompt),
            steps=self.steps,
            timed_steps=self.timed_steps,
            timed_tokens=self.timed_tokens,
            seconds=self.seconds,
            prefill_seconds=self.prefill_seconds,
            finish=self.finish,
        )
