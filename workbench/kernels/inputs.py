"""Random inputs of every operation of a layer, for any sizes; rows that must not matter hold junk.

Weights have variance 1 / fan-in, activations unit variance, so outputs are of order one and errors
mean the same everywhere. Positions and caches are such that rings have wrapped; what a query must
not see is large, so that seeing it shows. Numbers that a kernel is told (scales, factors, caps)
differ from seed to seed, so that one which knows them by heart is wrong. An ``extreme`` request
also has what overflows a careless exponential, and sequences that have just begun: whatever changes
the bytes that are moved belongs there, since a bench compares seeds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels import inputs_dflash2, work
from workbench.kernels.case import Case, Request, Written, beside
from workbench.kernels.draw import JUNK, Draw
from workbench.kernels.reach import Reach, Spans
from workbench.kernels.reference import FP8
from workbench.kernels.shapes import Shapes

SPARE_ROWS = 16  # of a ring, beyond its window
STEEP = 100.0  # times a query or a gate: far beyond 88, where exp overflows float32


def rms_norm(r: Request) -> Case:
    """One norm of N rows, one of them as small as eps."""
    d, h = Draw(r), r.shapes.hidden
    x = d.rows(r.tokens, h)
    for row in d.small_rows(r.tokens):
        x[row].mul_(d.small)
    args = (x, d.norm(h), r.shapes.eps)
    return Case(op="rms_norm", request=r, args=args, work=work.rms_norm(r))


def boundary(r: Request) -> Case:
    """Both norms and the add of a residual boundary anywhere in the model.

    A row of the sublayer is as small as eps, and a row of the new stream.
    """
    d, h = Draw(r), r.shapes.hidden
    add = d.dice.randint(2, 105)  # of Beam's 52 layers
    stream, sublayer = d.rows(r.tokens, h), d.rows(r.tokens, h, std=0.3)
    small = d.small_rows(r.tokens, 2)
    d.dice.shuffle(small)
    if len(small) == 2 or d.dice.random() < 0.5:
        for row in small[:1]:
            sublayer[row].mul_(d.small / 0.3)
        small = small[1:]
    for row in small:
        sublayer[row].zero_()
        stream[row].mul_(d.small)
    args = (
        stream,
        sublayer,
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
    """Flavours "sliding", "full", each also with an "fp8" cache, "joint" (the rows of K and V
    beside each other, as vLLM keeps them) and "sequence" (a row a token, in order: ``rows`` is
    None); otherwise some tokens are not written."""
    d, s, n = Draw(r), r.shapes, r.tokens
    full, fp8, sequence = (word in r.flavour for word in ("full", "fp8", "sequence"))
    context = min(s.context, 4096)
    slots = n if sequence else n + 5
    rows = torch.arange(n, device=r.device) if sequence else d.order(slots)[:n]
    wanted = rows
    if n > 2 and not sequence:  # a token whose row is not wanted
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
        kwargs |= {"k_scale": d.scale(), "v_scale": d.scale()}
    packed = d.rows(n, s.packed)
    for row in d.small_rows(n):
        packed[row, : (s.heads + s.kv_heads) * s.head_dim].mul_(d.small)
    args = (
        packed,
        1 + d.normal(2, s.head_dim, std=0.1),
        d.whole(0, s.context if full else context, n),
        d.rope(context, s.head_dim),
        k_rows,
        v_rows,
        None if sequence else rows,
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
    """Flavours "sliding", "full", "… verify" (8 tokens a sequence), "… fp8" (float8 cache).

    Extreme: several sequences of several tokens also where there are few, one that has just begun,
    and a query with large scores.
    """
    d, s = Draw(r), r.shapes
    full, fp8 = "full" in r.flavour, "fp8" in r.flavour
    queries = min(VERIFY_TOKENS, r.tokens) if "verify" in r.flavour else 1
    if r.extreme and r.tokens < 2 * VERIFY_TOKENS and queries > 1:
        queries = max(1, r.tokens // 2)
    batch = -(-r.tokens // queries) if r.tokens else 0
    context = _context(r, queries)
    window = None if full else s.window
    ring = context + queries + SPARE_ROWS if full else s.window + SPARE_ROWS
    shape = (batch + 1, ring, s.kv_heads, s.head_dim)
    slots = d.order(batch + 1)[:batch]
    # Each sequence is a little shorter than the one before, down to a half.
    starts = [context - b * max(1, context // 2) // max(1, batch) for b in range(batch)]
    if r.extreme and batch:
        begun = d.dice.choice((0, 0, 1, 3))
        starts[-1] = min(starts[-1], begun if batch > 1 else d.dice.choice((begun, context)))
    first = torch.tensor(starts, dtype=torch.int64, device=r.device)
    seen = Reach(slots, first, span=context + queries if full else ring, window=window)
    scales = {"k_scale": d.scale(), "v_scale": d.scale()}
    k, v = (_cache(d, shape, seen, queries, fp8, scale) for scale in scales.values())
    kwargs = scales if fp8 else {}
    q = d.rows(batch, queries, s.heads, s.head_dim)
    if not fp8:  # the reference rounds what a float8 cache stands for, too coarse for such scores
        _steepen(d, q[:1, -1:])
    return Case(
        op="decode_attention",
        request=r,
        args=(q, k, v, seen),
        kwargs=kwargs,
        returns=("o",),
        work=work.decode_attention(r, starts, queries),
    )


def _steepen(d: Draw, query: Tensor) -> None:
    """Scores far beyond 88 for this query, where extreme ones are wanted.

    In float32 the order of the sums would decide what the output is, so there it is left alone.
    """
    if d.request.extreme and d.request.dtype != torch.float32:
        query.mul_(STEEP)


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
    """Flavours "sliding", "full" (one whole sequence), "… ragged" (several, some with a past),
    "… batch" (several alike, with a past longer than the window)."""
    d, s = Draw(r), r.shapes
    window = None if "full" in r.flavour else s.window
    n = r.tokens
    if "ragged" in r.flavour and n >= 4:
        queries = [n // 2, 0, n - n // 2 - n // 4, n // 4]
        past = [0, 3, min(_context(r, n), 2 * s.window), 1]
    elif "batch" in r.flavour:
        # Their number must divide the tokens, and each has a past: not too many.
        batch = next((b for b in range(2, min(n, 64) + 1) if n % b == 0), 1)
        before = _context(r, n // batch)
        if r.context is None:
            before = min(before, s.window + 8)
        queries, past = [n // batch] * batch, [before if n else 0] * batch
    else:
        queries, past = [n], [0 if r.context is None else _context(r, n)]
    keys = [q + p for q, p in zip(queries, past, strict=True)]
    spans = Spans(queries, keys, window, r.device)
    shape = (sum(keys), s.kv_heads, s.head_dim)
    q = d.rows(n, s.heads, s.head_dim)
    _steepen(d, q[-1:])
    args = (q, d.rows(*shape), d.rows(*shape), spans)
    return Case(
        op="prefill_attention",
        request=r,
        args=args,
        returns=("o",),
        work=work.prefill_attention(r, queries, keys),
    )


def output_gate(r: Request) -> Case:
    """The gate is a view of the packed projection, as in the model. Extreme: beyond +-88."""
    d, s = Draw(r), r.shapes
    packed = d.rows(r.tokens, s.packed)
    if r.extreme:
        packed[-1:].mul_(STEEP)
    gate = packed[:, (s.heads + 2 * s.kv_heads) * s.head_dim :].unflatten(-1, (-1, s.head_dim))
    args = (d.rows(r.tokens, s.heads, s.head_dim), gate, d.normal(s.heads))
    return Case(op="output_gate", request=r, args=args, work=work.output_gate(r))


def grouping(shapes: Shapes) -> tuple[int, range] | None:
    """Groups for the router's flavour "groups", and how many may take part; None: there are none.

    Eight where that divides the experts, else what is nearest; a group has two experts at least,
    and those that take part hold ``top_k``.
    """
    experts = shapes.experts
    for groups in sorted(range(2, experts // 2 + 1), key=lambda g: abs(g - 8)):
        width = experts // groups
        some = range(-(-shapes.top_k // width), groups)
        if experts % groups == 0 and some:
            return groups, some
    return None


def router(r: Request) -> Case:
    """Flavours "" (the model's own groups) and "groups" (some of 8 groups take part, see
    :func:`grouping`; all of one where the experts cannot be grouped)."""
    d, s = Draw(r), r.shapes
    groups = {"n_group": s.n_group, "topk_group": s.topk_group}
    if r.flavour == "groups":
        n_group, some = grouping(s) or (1, range(1, 2))
        groups = {"n_group": n_group, "topk_group": d.dice.choice(some)}
    args = (
        d.rows(r.tokens, s.hidden),
        d.matrix(s.experts, s.hidden, dtype=torch.float32),
        # Large beside the scores, so that taking biased scores as weights shows.
        d.normal(s.experts, std=0.3, dtype=torch.float32),
    )
    kwargs = {"top_k": s.top_k, "renormalise": s.renormalise == (r.seed % 2 == 0), **groups}
    return Case(
        op="router",
        request=r,
        args=args,
        kwargs=kwargs,
        returns=("ids", "weights"),
        work=work.router(r),
    )


def routing(d: Draw, tokens: int) -> tuple[Tensor, Tensor]:
    """Different experts for each token, and their weights, of a sum between 0.5 and 1.5."""
    s, device = d.request.shapes, d.request.device
    chance = torch.rand(tokens, s.experts, generator=d.generator, device=device)
    weights = torch.rand(tokens, s.top_k, generator=d.generator, device=device) + 0.1
    total = 0.5 + torch.rand(tokens, 1, generator=d.generator, device=device)
    return chance.topk(s.top_k, -1).indices, weights / weights.sum(-1, keepdim=True) * total


def _mlp_input(d: Draw) -> Tensor:
    """``[N, H]``. Extreme: gates far beyond +-88, in all rows, since large outputs hide others."""
    r = d.request
    return d.rows(r.tokens, r.shapes.hidden, std=STEEP if r.extreme else 1.0)


def expert_mlp(r: Request) -> Case:
    """Random routing: as many different experts as independent tokens touch."""
    d, s = Draw(r), r.shapes
    ids, weights = routing(d, r.tokens)
    args = (
        _mlp_input(d),
        d.matrix(s.experts, 2 * s.expert_width, s.hidden),
        d.normal(s.experts, s.expert_width, s.hidden, std=s.expert_width**-0.5),
        ids,
        weights,
        d.around(s.routed_scale),
    )
    meta = r.device == "meta"
    touched = min(s.experts, r.tokens * s.top_k) if meta else int(ids.unique().numel())
    return Case(op="expert_mlp", request=r, args=args, work=work.expert_mlp(r, touched))


def dense_mlp(r: Request) -> Case:
    """The MLP of a dense layer."""
    d, s = Draw(r), r.shapes
    args = (
        _mlp_input(d),
        d.matrix(2 * s.mlp_width, s.hidden),
        d.matrix(s.hidden, s.mlp_width),
    )
    return Case(op="dense_mlp", request=r, args=args, work=work.dense_mlp(r))


def softcap(r: Request) -> Case:
    """Logits on both sides of a cap near the model's. Extreme: a row far beyond it."""
    d, s = Draw(r), r.shapes
    cap = d.around(s.softcap if s.softcap is not None else 30.0)
    logits = d.rows(r.tokens, s.vocabulary, std=cap)
    if r.extreme:
        logits[-1:].mul_(30)  # exp(2 * 45) is more than float32 holds
    args = (logits, cap)
    return Case(op="softcap", request=r, args=args, work=work.softcap(r))


MAKERS: dict[str, Callable[[Request], Case]] = {
    f.__name__: f
    for f in (
        rms_norm, boundary, qkvg, qkv_write, decode_attention, prefill_attention, output_gate,
        router, expert_mlp, dense_mlp, softcap,
        inputs_dflash2.dynamic_conv, inputs_dflash2.conv_residual_norm,
        inputs_dflash2.context_kv_write, inputs_dflash2.candidate_edges,
        inputs_dflash2.selector_walk,
    )
}  # fmt: skip
