"""What a prefill of several sequences reads and writes beside the weights: ids, caches, logits.

The caches lie end to end and hold, in order of position, what a layer can see and nothing else: in
full layers every earlier token, in sliding layers the window's; the new tokens' rows come behind.
So attention reads them as they are, and a prefill that is repeated gives the same result again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench import hardware
from workbench.errors import KernelError
from workbench.kernels.footprint import free_bytes
from workbench.kernels.rank.state import rope_rows
from workbench.kernels.rank.weights import RankWeights
from workbench.kernels.reach import Spans
from workbench.kernels.shapes import Shapes


class PrefillState:
    """``sequences`` of ``tokens`` new tokens each, behind ``context`` earlier ones each.

    Attributes:
        token: int64 ``[S T]``, ids below the rank's vocabulary, the sequences end to end.
        position: int64 ``[S T]``, ``context`` to ``context + tokens - 1`` in each sequence.
        past: earlier tokens that a layer's cache holds, by whether it is a full one.
        k, v: a layer each, ``[S, past + T, G, D]``; position p lies in row
            ``p - context + past``.
        rows: by kind, int64 ``[S T]``: where each new token's row lies in ``k.flatten(0, 1)``.
        spans: by kind, what the attention kernels are told.
        rope: float32 ``[context + T, D]``.
        logits: float32 ``[S, V]``, softcapped, of each sequence's last token.
        next_token: int64 ``[S]``, their argmax.
    """

    def __init__(
        self,
        weights: RankWeights,
        sequences: int = 8,
        tokens: int = 2048,
        context: int = 0,
        *,
        seed: int = 1,
    ) -> None:
        """Allocate; earlier keys and values are N(0, 1), ids random.

        Raises:
            KernelError: sizes that cannot be, more tokens than the model's context, or caches and
                activations that do not fit the free memory.
        """
        s, device = weights.shapes, weights.device
        refuse_sizes(s, sequences, tokens, context)
        self.sequences, self.tokens, self.context, self.shapes = sequences, tokens, context, s
        self.past = {True: context, False: min(context, s.window - 1)}
        self._refuse_too_large(weights)
        meta = device.type == "meta"
        generator = None if meta else torch.Generator(device=device).manual_seed(seed)

        def cache(full: bool) -> Tensor:
            shape = (2, sequences, self.past[full] + tokens, s.kv_heads, s.head_dim)
            made = torch.empty(shape, dtype=weights.dtype, device=device)
            return made.normal_(generator=generator)

        pairs = [cache(layer.full) for layer in weights.layers]
        self.k, self.v = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        count = sequences * tokens
        self.token = torch.randint(s.vocabulary, (count,), generator=generator, device=device)
        new = torch.arange(tokens, device=device)
        self.position = (context + new).repeat(sequences)
        first = torch.arange(sequences, device=device)[:, None]
        self.rows = {
            full: (first * (past + tokens) + past + new).flatten()
            for full, past in self.past.items()
        }
        self.spans = {
            full: Spans(
                [tokens] * sequences,
                [past + tokens] * sequences,
                None if full else s.window,
                device,
            )
            for full, past in self.past.items()
        }
        self.last = torch.arange(1, sequences + 1, device=device) * tokens - 1
        self.rope = rope_rows(context + tokens, s.head_dim, s.theta, device)
        self.logits = torch.zeros(sequences, s.vocabulary, dtype=torch.float32, device=device)
        self.next_token = torch.zeros(sequences, dtype=torch.int64, device=device)

    def poison(self) -> None:
        """Fill what a prefill writes with what no prefill gives, so that a gap shows."""
        self.logits.fill_(float("nan"))
        self.next_token.fill_(-1)
        for cache in (*self.k, *self.v):
            cache[:, -self.tokens :].fill_(float("nan"))

    def _refuse_too_large(self, weights: RankWeights) -> None:
        if weights.device.type == "meta":
            return
        free, need = free_bytes(str(weights.device)), self.bytes(weights)
        if free is not None and need > free:
            raise KernelError(
                f"caches and activations of {self.sequences} sequences of {self.tokens} tokens "
                f"behind {self.context} need {hardware.gigabytes(need)}, and "
                f"{hardware.gigabytes(free)} of memory are free on {weights.device}; choose fewer "
                "--sequences, fewer --tokens or a shorter --context"
            )

    def bytes(self, weights: RankWeights) -> int:
        """Bytes of caches and of the activations that are alive at the same time."""
        return needed_bytes(weights, self.sequences, self.tokens, self.context)


def refuse_sizes(s: Shapes, sequences: int, tokens: int, context: int) -> None:
    """Refuse sizes that no prefill of this model can have.

    Raises:
        KernelError: no sequence, no token, or more of them than the model's context.
    """
    if sequences < 1 or tokens < 1 or context < 0:
        raise KernelError(
            f"a prefill needs 1 or more sequences and tokens and a context of 0 or more, not "
            f"{sequences}, {tokens} and {context}"
        )
    if context + tokens > s.context:
        raise KernelError(
            f"{tokens} tokens behind {context} exceed the model's context of {s.context}; "
            "choose fewer --tokens or a shorter --context"
        )


def needed_bytes(weights: RankWeights, sequences: int, tokens: int, context: int) -> int:
    """Bytes of a prefill's caches and of the activations that are alive at the same time."""
    s, size = weights.shapes, weights.norm.element_size()
    past = {True: context, False: min(context, s.window - 1)}
    rows = sum(past[layer.full] + tokens for layer in weights.layers)
    caches = 2 * rows * sequences * s.kv_heads * s.head_dim * size
    # Streams and norms before and after, the experts' activations and products.
    row = 6 * s.hidden + 2 * s.packed + s.top_k * (s.hidden + s.expert_width)
    row = max(row, 6 * s.hidden + 2 * s.packed + 3 * s.mlp_width)
    ends = 4 * (context + tokens) * s.head_dim + 4 * sequences * s.vocabulary
    return caches + sequences * tokens * row * size + ends


def counted_flops(weights: RankWeights, state: PrefillState) -> dict[str, float]:
    """Floating-point operations that the prefill needs, by part; a multiply-add is two.

    ``products``: all weights a token meets, K experts of a sparse layer, the router once however
    many parts it is split into, the head for the last token of each sequence. ``attention``: scores
    and weighted sum over the keys that are seen. Norms, softmax and sums count nothing.
    """
    s, t, c = weights.shapes, state.tokens, state.context
    n = state.sequences * t
    products = 2.0 * state.sequences * s.vocabulary * s.hidden
    attention = 0.0
    every = t * c + t * (t + 1) / 2
    windowed = float(sum(min(c + i + 1, s.window) for i in range(t)))
    for layer in weights.layers:
        weight = (s.packed + s.heads * s.head_dim) * s.hidden
        if layer.dense:
            weight += 3 * s.mlp_width * s.hidden
        else:
            weight += (3 * s.top_k * s.expert_width + s.experts) * s.hidden
        products += 2.0 * n * weight
        seen = every if layer.full else windowed
        attention += 4.0 * s.head_dim * s.heads * state.sequences * seen
    return {"products": products, "attention": attention, "all": products + attention}
