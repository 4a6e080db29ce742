"""Random inputs of every operation of a layer, for any sizes; rows that must not matter hold junk.

Weights have variance 1 / fan-in, activations unit variance, so outputs are of order one and errors
mean the same everywhere. Positions and caches are such that rings have wrapped; what a query must
not see is large, so that seeing it shows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels import work
from workbench.kernels.case import Case, Request, Written, beside
from workbench.kernels.reach import Reach, Spans
from workbench.kernels.reference import FP8, rope_table

JUNK = 1e4  # finite, since 0 * NaN would be NaN even in a right kernel
SPARE_ROWS = 16  # of a ring, beyond its window
# FP8 cases store x / scale: with these, values of order one use the format's middle.
K_SCALE, V_SCALE = 0.02, 0.03


class Draw:
    """Random tensors of a request's dtype and device."""

    def __init__(self, request: Request) -> None:
        self.request, self.generator = request, request.generator()

    def normal(self, *shape: int, std: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers, contiguous."""
        r = self.request
        x = torch.randn(shape, generator=self.generator, device=r.device, dtype=torch.float32)
        return (x * std).to(dtype or r.dtype)

    def rows(self, *shape: int, std: float = 1.0) -> Tensor:
        """As ``normal``; where strided rows are wanted, a view of a wider tensor full of junk."""
        x = self.normal(*shape, std=std)
        if not self.request.strided:
            return x
        wide = torch.full(
            (*shape[:-1], shape[-1] + 16), JUNK, dtype=x.dtype, device=x.device
        )  # 16: rows stay aligned, as slices of a packed projection are
        wide[..., : shape[-1]] = x
        return wide[..., : shape[-1]]

    def norm(self, size: int) -> Tensor:
        """A norm's weight: around one."""
        return 1 + self.normal(size, std=0.1)

    def matrix(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Weights of variance 1 / fan-in, the last axis being the fan-in."""
        return self.normal(*shape, std=shape[-1] ** -0.5, dtype=dtype)

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        """Whole numbers from ``low`` to ``high - 1``."""
        return torch.randint(low, high, shape, generator=self.generator, device=self.request.device)

    def order(self, size: int) -> Tensor:
        """A random permutation."""
        return torch.randperm(size, generator=self.generator, device=self.request.device)


def rms_norm(r: Request) -> Case:
    """One norm of N rows."""
    d, h = Draw(r), r.shapes.hidden
    args = (d.rows(r.tokens, h), d.norm(h), r.shapes.eps)
    return Case(op="rms_norm", request=r, args=args, work=work.rms_norm(r))


def boundary(r: Request) -> Case:
    """Both norms and the add of a residual boundary in the middle of the model."""
    d, h = Draw(r), r.shapes.hidden
    add = 51  # any: scale factors of a deep layer
    args = (
        d.rows(r.tokens, h),
        d.rows(r.tokens, h, std=0.3),
        d.norm(h),
        (add**-0.5, ((add - 1) / add) ** 0.5),
        d.norm(h),
        r.shapes.eps,
    )
    return Case(op="boundary", request=r, args=args, returns=("h", "x"), work=work.boundary(r))


def qkvg(r: Request) -> Case:
    """The packed projection."""
    d, s = Draw(r), r.shapes
    args = (d.rows(r.tokens, s.hidden), d.matrix(s.packed, s.hidden))
    return Case(op="qkvg", request=r, args=args, work=work.qkvg(r))


def qkv_write(r: Request) -> Case:
    """Flavours "sliding", "full", each also with an "fp8" cache, and "joint" (the rows of K and V
    beside each other, as vLLM keeps them); some tokens are not written."""
    d, s, n = Draw(r), r.shapes, r.tokens
    full, fp8 = "full" in r.flavour, "fp8" in r.flavour
    context = min(s.context, 4096)
    slots = n + 5
    rows = d.order(slots)[:n]
    wanted = rows
    if n > 2:  # a token whose row is not wanted
        wanted = torch.cat((rows[:1], rows[2:]))
        rows[1] = -1
    store = FP8 if fp8 else r.dtype
    shape = (slots, s.kv_heads, s.head_dim)
    # Marks that no right value equals: a row that must not be written is seen to be untouched.
    k_rows, v_rows = (d.normal(*shape, std=100.0).to(store) for _ in range(2))
    joint = "joint" in r.flavour
    if joint:
        k_rows, v_rows = beside(k_rows, v_rows)
    kwargs = {"heads": s.heads, "full": full, "eps": s.eps}
    if fp8:
        kwargs |= {"k_scale": K_SCALE, "v_scale": V_SCALE}
    args = (
        d.rows(n, s.packed),
        1 + d.normal(2, s.head_dim, std=0.1),
        d.whole(0, context, n),
        rope_table(context, s.head_dim, s.theta, r.device),
        k_rows,
        v_rows,
        rows,
    )
    written = tuple(Written(argument=i, name=name, rows=wanted) for i, name in ((4, "k"), (5, "v")))
    return Case(
        op="qkv_write",
        request=r,
        args=args,
        kwargs=kwargs,
        returns=("q",),
        written=written,
        joint=(4, 5) if joint else None,
        work=work.qkv_write(r),
    )


def _context(r: Request, queries: int) -> int:
    """Tokens before the first query: as asked, else enough to wrap a ring of this window."""
    s = r.shapes
    wanted = s.window + s.window // 2 + 5 if r.context is None else r.context
    found = min(wanted, s.context - queries)
    if found < 0:
        raise KernelError(
            f"{queries} tokens a sequence exceed the context of {s.context}; ask for fewer"
        )
    return found


VERIFY_TOKENS = 8  # query tokens a sequence in the "verify" flavours


def decode_attention(r: Request) -> Case:
    """Flavours "sliding", "full", "… verify" (8 tokens a sequence), "… fp8" (float8 cache)."""
    d, s = Draw(r), r.shapes
    full, fp8 = "full" in r.flavour, "fp8" in r.flavour
    queries = min(VERIFY_TOKENS, r.tokens) if "verify" in r.flavour else 1
    batch = -(-r.tokens // queries) if r.tokens else 0
    context = _context(r, queries)
    window = None if full else s.window
    ring = context + queries + SPARE_ROWS if full else s.window + SPARE_ROWS
    shape = (batch + 1, ring, s.kv_heads, s.head_dim)
    slots = d.order(batch + 1)[:batch]
    # Each sequence is a little shorter than the one before, down to a half.
    starts = [context - b * max(1, context // 2) // max(1, batch) for b in range(batch)]
    first = torch.tensor(starts, dtype=torch.int64, device=r.device)
    seen = Reach(slots, first, span=context + queries if full else ring, window=window)
    k, v = (_cache(d, shape, seen, queries, fp8, scale) for scale in (K_SCALE, V_SCALE))
    kwargs = {"k_scale": K_SCALE, "v_scale": V_SCALE} if fp8 else {}
    q = d.rows(batch, queries, s.heads, s.head_dim)
    return Case(
        op="decode_attention",
        request=r,
        args=(q, k, v, seen),
        kwargs=kwargs,
        returns=("o",),
        work=work.decode_attention(r, starts, queries),
    )


def _cache(
    d: Draw, shape: tuple[int, ...], reach: Reach, queries: int, fp8: bool, scale: float
) -> Tensor:
    """A cache whose rows hold normal numbers where a query sees them, junk where none does."""
    r = d.request
    store = FP8 if fp8 else r.dtype
    sign = 1 - 2 * d.whole(0, 2, shape[0], shape[1], 1, 1)
    seen = reach.visible(queries, shape[1]).any(1)  # [B, span]
    shown = torch.zeros(shape[:2], dtype=torch.bool, device=r.device)
    shown[reach.slots, : seen.shape[1]] = seen
    cache = torch.empty(shape, dtype=store, device=r.device)
    for slot in range(shape[0]):  # a slot at a time: a batch of long contexts is large
        values = d.normal(*shape[1:], dtype=torch.float32)
        values = torch.where(shown[slot][:, None, None], values, sign[slot] * JUNK)
        cache[slot] = (values / scale).clamp(-448, 448).to(store) if fp8 else values.to(store)
    return cache


def prefill_attention(r: Request) -> Case:
    """Flavours "sliding", "full" (one whole sequence), "… ragged" (several, some with a past)."""
    d, s = Draw(r), r.shapes
    window = None if "full" in r.flavour else s.window
    n = r.tokens
    if "ragged" in r.flavour and n >= 4:
        queries = [n // 2, 0, n - n // 2 - n // 4, n // 4]
        past = [0, 3, min(_context(r, n), 2 * s.window), 1]
    else:
        queries, past = [n], [0 if r.context is None else _context(r, n)]
    keys = [q + p for q, p in zip(queries, past, strict=True)]
    spans = Spans(queries, keys, window, r.device)
    shape = (sum(keys), s.kv_heads, s.head_dim)
    args = (d.rows(n, s.heads, s.head_dim), d.rows(*shape), d.rows(*shape), spans)
    return Case(
        op="prefill_attention",
        request=r,
        args=args,
        returns=("o",),
        work=work.prefill_attention(r, queries, keys),
    )


def output_gate(r: Request) -> Case:
    """The gate is a view of the packed projection, as in the model."""
    d, s = Draw(r), r.shapes
    packed = d.rows(r.tokens, s.packed)
    gate = packed[:, (s.heads + 2 * s.kv_heads) * s.head_dim :].unflatten(-1, (-1, s.head_dim))
    args = (d.rows(r.tokens, s.heads, s.head_dim), gate, d.normal(s.heads))
    return Case(op="output_gate", request=r, args=args, work=work.output_gate(r))


def router(r: Request) -> Case:
    """Flavours "" (the model's own groups) and "groups" (8 groups, the best 4 take part)."""
    d, s = Draw(r), r.shapes
    groups = {"n_group": s.n_group, "topk_group": s.topk_group}
    if r.flavour == "groups":
        groups = {"n_group": 8, "topk_group": 4}
    args = (
        d.rows(r.tokens, s.hidden),
        d.matrix(s.experts, s.hidden, dtype=torch.float32),
        # Large beside the scores, so that taking biased scores as weights shows.
        d.normal(s.experts, std=0.3, dtype=torch.float32),
    )
    kwargs = {"top_k": s.top_k, "renormalise": s.renormalise, **groups}
    return Case(
        op="router",
        request=r,
        args=args,
        kwargs=kwargs,
        returns=("ids", "weights"),
        work=work.router(r),
    )


def routing(d: Draw, tokens: int) -> tuple[Tensor, Tensor]:
    """Different experts for each token, and their weights."""
    s, device = d.request.shapes, d.request.device
    chance = torch.rand(tokens, s.experts, generator=d.generator, device=device)
    weights = torch.rand(tokens, s.top_k, generator=d.generator, device=device) + 0.1
    return chance.topk(s.top_k, -1).indices, weights / weights.sum(-1, keepdim=True)


def expert_mlp(r: Request) -> Case:
    """Random routing: as many different experts as independent tokens touch."""
    d, s = Draw(r), r.shapes
    ids, weights = routing(d, r.tokens)
    args = (
        d.rows(r.tokens, s.hidden),
        d.matrix(s.experts, 2 * s.expert_width, s.hidden),
        d.normal(s.experts, s.expert_width, s.hidden, std=s.expert_width**-0.5),
        ids,
        weights,
        s.routed_scale,
    )
    meta = r.device == "meta"
    touched = min(s.experts, r.tokens * s.top_k) if meta else int(ids.unique().numel())
    return Case(op="expert_mlp", request=r, args=args, work=work.expert_mlp(r, touched))


def dense_mlp(r: Request) -> Case:
    """The MLP of a dense layer."""
    d, s = Draw(r), r.shapes
    args = (
        d.rows(r.tokens, s.hidden),
        d.matrix(2 * s.mlp_width, s.hidden),
        d.matrix(s.hidden, s.mlp_width),
    )
    return Case(op="dense_mlp", request=r, args=args, work=work.dense_mlp(r))


def softcap(r: Request) -> Case:
    """Logits on both sides of the cap."""
    d, s = Draw(r), r.shapes
    cap = s.softcap if s.softcap is not None else 30.0
    args = (d.rows(r.tokens, s.vocabulary, std=cap / 2), cap)
    return Case(op="softcap", request=r, args=args, work=work.softcap(r))


# -- DFlash2 ------------------------------------------------------------------------------------


def _blocks(r: Request) -> tuple[int, int]:
    """(rows, rows a request): whole blocks of an anchor and its draft tokens."""
    query = r.shapes.draft_tokens + 1
    return -(-r.tokens // query) * query, query


def dynamic_conv(r: Request) -> Case:
    """One side of the grouped convolution over blocks of rows."""
    d, s = Draw(r), r.shapes
    rows, query = _blocks(r)
    both = d.rows(rows, 2 * s.taps * s.conv_groups, std=0.3).unflatten(-1, (2, s.taps, -1))
    args = (d.rows(rows, s.hidden), both[:, 0], d.normal(s.taps, s.hidden, std=0.5), query)
    return Case(op="dynamic_conv", request=r, args=args, work=work.dynamic_conv(r, rows))


def conv_residual_norm(r: Request) -> Case:
    """The second side, the residual add and the next norm."""
    d, s = Draw(r), r.shapes
    rows, query = _blocks(r)
    both = d.rows(rows, 2 * s.taps * s.conv_groups, std=0.3).unflatten(-1, (2, s.taps, -1))
    args = (
        d.rows(rows, s.hidden),
        both[:, 1],
        d.normal(s.taps, s.hidden, std=0.5),
        d.rows(rows, s.hidden),
        d.norm(s.hidden),
        s.eps,
        query,
    )
    return Case(
        op="conv_residual_norm",
        request=r,
        args=args,
        returns=("h", "x"),
        work=work.conv_residual_norm(r, rows),
    )


def context_kv_write(r: Request) -> Case:
    """Flavours "", "fp8" and "joint" (K and V rows beside each other); some rows are padding."""
    d, s, n = Draw(r), r.shapes, r.tokens
    fp8 = r.flavour == "fp8"
    context, slots = min(s.context, 4096), n + 3
    rows = d.order(slots)[:n]
    wanted = rows
    if n > 2:
        wanted = torch.cat((rows[: n // 2], rows[n // 2 + 1 :]))
        rows[n // 2] = -1
    shape = (s.draft_layers, slots, s.draft_kv_heads, s.draft_head_dim)
    store = FP8 if fp8 else r.dtype
    scales = {"k_scale": None, "v_scale": None}
    if fp8:
        layer = torch.arange(1, s.draft_layers + 1, device=r.device, dtype=torch.float32)
        scales = {"k_scale": layer * K_SCALE, "v_scale": layer * V_SCALE}  # type: ignore[dict-item]
    k_rows, v_rows = (d.normal(*shape, std=100.0).to(store) for _ in range(2))
    joint = r.flavour == "joint"
    if joint:
        k_rows, v_rows = beside(k_rows, v_rows)
    args = (
        d.rows(n, 2 * s.draft_layers * s.draft_kv_heads * s.draft_head_dim).unflatten(
            -1, (s.draft_layers, 2, s.draft_kv_heads, s.draft_head_dim)
        ),
        1 + d.normal(s.draft_layers, s.draft_head_dim, std=0.1),
        d.whole(0, context, n),
        rope_table(context, s.draft_head_dim, s.theta, r.device).to(r.dtype),
        k_rows,
        v_rows,
        rows,
        s.eps,
    )
    written = tuple(
        Written(argument=i, name=name, rows=wanted, dim=1) for i, name in ((4, "k"), (5, "v"))
    )
    return Case(
        op="context_kv_write",
        request=r,
        args=args,
        kwargs=scales,
        returns=(),
        written=written,
        joint=(4, 5) if joint else None,
        work=work.context_kv_write(r),
    )


def _requests(r: Request) -> int:
    """Requests of which this many tokens are the draft blocks."""
    return -(-r.tokens // (r.shapes.draft_tokens + 1))


def _candidates(d: Draw, batch: int) -> Tensor:
    """Different token ids for each draft position, ``[B, N, K]``."""
    s = d.request.shapes
    # One from each of K equal parts of the vocabulary, in random order: different without a sort.
    part = s.full_vocabulary // s.candidates
    inside = d.whole(0, part, batch, s.draft_tokens, s.candidates)
    offset = torch.arange(s.candidates, device=d.request.device) * part
    return (inside + offset)[..., d.order(s.candidates)]


def candidate_edges(r: Request) -> Case:
    """Codebooks of the whole vocabulary; ``tokens`` counts block rows, anchors included."""
    d, s, batch = Draw(r), r.shapes, _requests(r)
    n, k = s.draft_tokens, s.candidates
    args = (
        d.normal(s.full_vocabulary, s.selector_rank, std=s.selector_rank**-0.25),
        d.normal(s.full_vocabulary, s.selector_rank, std=s.selector_rank**-0.25),
        _candidates(d, batch),
        d.normal(batch, n, k, std=3.0, dtype=torch.float32),
        d.rows(batch, n, s.selector_rank),
        d.whole(0, s.full_vocabulary, batch),
    )
    return Case(
        op="candidate_edges",
        request=r,
        args=args,
        returns=("edges",),
        work=work.candidate_edges(r, batch),
    )


def selector_walk(r: Request) -> Case:
    """Flavours "" (greedy) and "sampled" (every other request at a temperature)."""
    d, s, batch = Draw(r), r.shapes, _requests(r)
    n, k = s.draft_tokens, s.candidates
    edges = d.normal(batch, n, k, k, std=2.0, dtype=torch.float32)
    if batch:
        edges[:, :, :, 1] = edges[:, :, :, 0]  # ties: the first maximum counts
    temperature = torch.zeros(batch, device=r.device)
    noise = None
    if r.flavour == "sampled":
        temperature[::2] = 0.7
        flat = torch.rand(batch, n, k, generator=d.generator, device=r.device)
        noise = -torch.log(-torch.log(flat.clamp(1e-6, 1 - 1e-6)))
    args = (edges, _candidates(d, batch), temperature, noise)
    return Case(
        op="selector_walk",
        request=r,
        args=args,
        returns=("tokens", "realized"),
        work=work.selector_walk(r, batch),
    )


MAKERS: dict[str, Callable[[Request], Case]] = {
    f.__name__: f
    for f in (
        rms_norm, boundary, qkvg, qkv_write, decode_attention, prefill_attention, output_gate,
        router, expert_mlp, dense_mlp, softcap, dynamic_conv, conv_residual_norm,
        context_kv_write, candidate_edges, selector_walk,
    )
}  # fmt: skip
