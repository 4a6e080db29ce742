"""Plain autoregressive decoding: chunked prefill, then one token a step for a batch of sequences.

:func:`stream` yields every token as it is decoded, :func:`generate` collects them. Sequences of
different lengths decode together, and one that is finished leaves: later steps compute the others
alone. Between steps nothing is held (no inference mode, no lock), so a consumer may stop at any
token, and an interrupted step leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from math import isfinite, nan
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

import torch
from torch import Tensor

from workbench.errors import PromptError, WorkbenchError
from workbench.model.prompts import One, Prompts, Several, is_single, prompt_ids
from workbench.model.sampling import Sampling

if TYPE_CHECKING:
    from workbench.model.beam import Beam
    from workbench.model.tokenizer import DecodeStream

Finish = Literal["eos", "length", "context"]
_GREEDY = Sampling()


class Cancel(Protocol):
    """Anything with ``is_set()``, such as :class:`threading.Event`; looked at between steps."""

    def is_set(self) -> bool:
        """Whether decoding should stop."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One decoded token.

    ``text`` is what became complete with this token (often one piece, empty within a character and
    for a marker); joined over a sequence it is the decoded text. ``logprob`` is the model's own
    log-probability of it, natural logarithm, before temperature and top-p. ``finished`` says why
    the sequence ends here: an end-of-sequence token, ``max_new_tokens`` reached, or context full.
    """

    sequence: int
    index: int
    id: int
    text: str
    logprob: float
    finished: Finish | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What one sequence decoded.

    Speed is of decode steps alone. The prompt's prefill, which gives the first new token, is not in
    ``seconds``, and neither is the first decode step, where kernels and buffers are used for the
    first time. ``seconds`` is the time of the ``timed_steps`` others this sequence took part in,
    which gave ``timed_tokens``; ``tokens_per_second`` is their quotient, NaN when there were none.
    ``finish`` is None if decoding was cancelled.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    steps: int
    timed_steps: int
    timed_tokens: int
    seconds: float
    prefill_seconds: float
    finish: Finish | None

    @property
    def new_tokens(self) -> int:
        """Number of decoded tokens, an end-of-sequence token included."""
        return len(self.token_ids)

    @property
    def tokens_per_second(self) -> float:
        """Decode speed of this sequence; NaN when no step was timed."""
        return self.timed_tokens / self.seconds if self.seconds > 0 else nan

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON: an undefined speed is None."""
        speed = self.tokens_per_second
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "steps": self.steps,
            "seconds": self.seconds,
            "prefill_seconds": self.prefill_seconds,
            "tokens_per_second": speed if isfinite(speed) else None,
            "finish": self.finish,
        }

    def __str__(self) -> str:
        return self.text


@dataclass(slots=True, kw_only=True, eq=False)
class _Sequence:
    """State of one sequence while it decodes; its number is its cache slot."""

    number: int
    prompt: list[int]
    room: int  # most new tokens
    at_room: Finish  # why it ends there
    generator: torch.Generator
    decoder: DecodeStream | None
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    steps: int = 0
    timed_steps: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    finish: Finish | None = None


class TokenStream(Iterator[Token]):
    """Tokens of all sequences in the order they are decoded; made by :func:`stream`.

    It is an iterator with figures: they are up to date after every token, also when it is left
    half-way. Cache and sequences are its own; the model is only read.
    """

    def __init__(
        self,
        beam: Beam,
        sequences: list[_Sequence],
        sampling: Sampling,
        eos: int | None,
        chunk: int,
        cancel: Cancel | None,
    ) -> None:
        self.beam, self.sampling = beam, sampling
        self.steps = 0  # decode steps, each for all sequences then alive
        self.timed_steps = 0  # without the first, see Generation
        self.timed_tokens = 0
        self.seconds = 0.0  # of the timed steps
        self._sequences, self._eos, self._chunk = sequences, eos, chunk
        self._cancel = cancel
        self._tokens = self._run()

    def __next__(self) -> Token:
        return next(self._tokens)

    def close(self) -> None:
        """Stop here and let go of the cache; further tokens are not decoded."""
        self._tokens.close()

    @property
    def tokens_per_second(self) -> float:
        """Decode speed so far, all sequences together; NaN before the second decode step."""
        return self.timed_tokens / self.seconds if self.seconds > 0 else nan

    @property
    def prefill_seconds(self) -> float:
        """Wall time of all prefills so far."""
        return sum(s.prefill_seconds for s in self._sequences)

    @property
    def context_used(self) -> tuple[int, ...]:
        """Tokens of each sequence so far, prompt included."""
        return tuple(len(s.prompt) + len(s.ids) for s in self._sequences)

    @property
    def generations(self) -> list[Generation]:
        """What each sequence has decoded so far."""
        return [
            Generation(
                text="".join(s.texts),
                token_ids=tuple(s.ids),
                prompt_tokens=len(s.prompt),
                steps=s.steps,
                timed_steps=s.timed_steps,
                timed_tokens=s.timed_steps,
                seconds=s.seconds,
                prefill_seconds=s.prefill_seconds,
                finish=s.finish,
            )
            for s in self._sequences
        ]

    def _cancelled(self) -> bool:
        return self._cancel is not None and self._cancel.is_set()

    def _run(self) -> Generator[Token, None, None]:
        cache = self.beam.new_cache(len(self._sequences))
        firsts: list[Tensor] = []
        for sequence in self._sequences:
            start = perf_counter()
            hidden: Tensor | None = None
            for first in range(0, len(sequence.prompt), self._chunk):
                if self._cancelled():
                    return
                part = sequence.prompt[first : first + self._chunk]
                with torch.inference_mode():
                    ids = torch.tensor(part, device=self.beam.device)
                    hidden = self.beam.extend(cache, ids, [len(part)], [sequence.number])[-1:]
            assert hidden is not None  # for the type checker: prompts are never empty
            picked, values = self._pick(hidden, [sequence])
            firsts.append(picked)
            sequence.prefill_seconds = perf_counter() - start
            yield self._token(sequence, *values[0])
        alive = [s for s in self._sequences if s.finish is None]
        feed = torch.cat([firsts[s.number] for s in alive]) if alive else None
        while alive and feed is not None and not self._cancelled():
            start = perf_counter()
            with torch.inference_mode():
                hidden = self.beam.extend(cache, feed, [1] * len(alive), [s.number for s in alive])
            feed, values = self._pick(hidden, alive)
            self._count(alive, perf_counter() - start)
            # Every token of the step is recorded before one is handed out: a consumer that stops
            # within the step still finds figures that belong together.
            tokens = [self._token(s, *v) for s, v in zip(alive, values, strict=True)]
            yield from tokens
            stay = [row for row, s in enumerate(alive) if s.finish is None]
            if len(stay) < len(alive):
                alive = [alive[row] for row in stay]
                with torch.inference_mode():
                    feed = feed[torch.tensor(stay, dtype=torch.int64, device=feed.device)]

    @torch.inference_mode()
    def _pick(self, hidden: Tensor, sequences: list[_Sequence]) -> tuple[Tensor, list[list[float]]]:
        """Next ids ``[n]`` on the device, and [id, log-probability] of each, read back at once."""
        logits = self.beam.logits(hidden)
        ids = self.sampling.pick(logits, [s.generator for s in sequences])
        chosen = logits.gather(-1, ids[:, None])[:, 0] - logits.logsumexp(-1)
        return ids, torch.stack((ids.double(), chosen.double()), 1).tolist()

    def _count(self, alive: list[_Sequence], seconds: float) -> None:
        self.steps += 1
        timed = self.steps > 1
        if timed:
            self.timed_steps += 1
            self.timed_tokens += len(alive)
            self.seconds += seconds
        for sequence in alive:
            sequence.steps += 1
            if timed:
                sequence.timed_steps += 1
                sequence.seconds += seconds

    def _token(self, sequence: _Sequence, picked: float, logprob: float) -> Token:
        token_id, index = int(picked), len(sequence.ids)
        if not isfinite(logprob):
            raise WorkbenchError(
                f"the logits of sequence {sequence.number} are not finite at position "
                f"{len(sequence.prompt) + index - 1}; check the weights and any intervention"
            )
        if token_id == self._eos:
            sequence.finish = "eos"
        elif index + 1 == sequence.room:
            sequence.finish = sequence.at_room
        text = ""
        if sequence.decoder is not None:
            tokenizer = self.beam.tokenizer
            # A model's table may be padded beyond its tokenizer.
            known = tokenizer is not None and token_id < tokenizer.vocab_size
            text = sequence.decoder.push(token_id) if known else "\ufffd"
            if sequence.finish is not None:
                text += sequence.decoder.flush()
        sequence.ids.append(token_id)
        sequence.texts.append(text)
        return Token(
            sequence=sequence.number,
            index=index,
            id=token_id,
            text=text,
            logprob=logprob,
            finished=sequence.finish,
        )


def stream(
    beam: Beam,
    prompts: Prompts,
    *,
    max_new_tokens: int = 128,
    sampling: Sampling = _GREEDY,
    stop_at_eos: bool = True,
    prefill_chunk: int = 512,
    cancel: Cancel | None = None,
) -> TokenStream:
    """Decode one prompt or several, token by token.

    Args:
        beam: the model, whole or a rank with its communicator.
        prompts: a text, a list of texts, the ids of one prompt, or a list of such lists. Texts are
            tokenized with a beginning-of-sequence token in front; ids are taken as they are.
        max_new_tokens: most tokens to decode for each prompt; fewer if the context is full.
        sampling: the same for every prompt. Each sequence has a generator of its own, seeded alike,
            so its tokens do not depend on the others.
        stop_at_eos: whether an end-of-sequence token ends its sequence (it is yielded as well).
        prefill_chunk: most prompt tokens a forward pass.
        cancel: looked at between steps; when set, the iterator ends.

    Raises:
        PromptError: an empty prompt, a prompt that leaves no room in the context, an id outside the
            vocabulary, or a setting out of range. Raised here, before anything is computed.
    """
    limit = beam.config.max_position_embeddings
    for name, value in (("max_new_tokens", max_new_tokens), ("prefill_chunk", prefill_chunk)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PromptError(f"{name} must be a whole number of at least 1, not {value!r}")
    tokenizer = beam.tokenizer
    sequences = []
    for number, prompt in enumerate(prompt_ids(beam, prompts)):
        space = limit - len(prompt)
        sequences.append(
            _Sequence(
                number=number,
                prompt=prompt,
                room=min(max_new_tokens, space),
                at_room="length" if max_new_tokens <= space else "context",
                generator=sampling.generator(),
                decoder=None if tokenizer is None else tokenizer.decode_stream(),
            )
        )
    eos = beam.config.eos_token_id
    if eos is None and tokenizer is not None:
        eos = tokenizer.eos_id
    return TokenStream(
        beam, sequences, sampling, eos if stop_at_eos else None, prefill_chunk, cancel
    )


@overload
def generate(
    beam: Beam,
    prompts: One,
    *,
    max_new_tokens: int = ...,
    sampling: Sampling = ...,
    stop_at_eos: bool = ...,
    prefill_chunk: int = ...,
    cancel: Cancel | None = ...,
) -> Generation: ...


@overload
def generate(
    beam: Beam,
    prompts: Several,
    *,
    max_new_tokens: int = ...,
    sampling: Sampling = ...,
    stop_at_eos: bool = ...,
    prefill_chunk: int = ...,
    cancel: Cancel | None = ...,
) -> list[Generation]: ...


def generate(
    beam: Beam,
    prompts: Prompts,
    *,
    max_new_tokens: int = 128,
    sampling: Sampling = _GREEDY,
    stop_at_eos: bool = True,
    prefill_chunk: int = 512,
    cancel: Cancel | None = None,
) -> Generation | list[Generation]:
    """Decode to the end: a :class:`Generation` for one prompt, a list of them for a list.

    Arguments and errors are those of :func:`stream`. When cancelled, what was decoded by then is
    returned, with ``finish`` None for the sequences that were not done.
    """
    tokens = stream(
        beam,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        stop_at_eos=stop_at_eos,
        prefill_chunk=prefill_chunk,
        cancel=cancel,
    )
    for _ in tokens:
        pass
    return tokens.generations[0] if is_single(prompts) else tokens.generations
