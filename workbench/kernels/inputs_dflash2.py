"""Random inputs of DFlash2's operations; ``tokens`` counts rows of draft blocks, with anchors."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels import work
from workbench.kernels.case import Case, Request, Written, beside
from workbench.kernels.draw import Draw
from workbench.kernels.reference import FP8


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
    """The second side, the residual add and the next norm, one sum being as small as eps."""
    d, s = Draw(r), r.shapes
    rows, query = _blocks(r)
    both = d.rows(rows, 2 * s.taps * s.conv_groups, std=0.3).unflatten(-1, (2, s.taps, -1))
    x, residual = d.rows(rows, s.hidden), d.rows(rows, s.hidden)
    for block in d.small_rows(rows // query) or [0] * (rows > 0):
        x[block * query].zero_()  # a block's first row has no others in its sum
        residual[block * query].mul_(d.small)
    args = (
        x,
        both[:, 1],
        d.normal(s.taps, s.hidden, std=0.5),
        residual,
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
        scales = {"k_scale": layer * d.scale(), "v_scale": layer * d.scale()}  # type: ignore[dict-item]
    k_rows, v_rows = (d.normal(*shape, std=100.0).to(store) for _ in range(2))
    joint = r.flavour == "joint"
    if joint:
        k_rows, v_rows = beside(k_rows, v_rows)
    kv = d.rows(n, 2 * s.draft_layers * s.draft_kv_heads * s.draft_head_dim).unflatten(
        -1, (s.draft_layers, 2, s.draft_kv_heads, s.draft_head_dim)
    )
    for row in d.small_rows(n):
        kv[row if n < 3 or row != n // 2 else 0, :, 0].mul_(d.small)
    args = (
        kv,
        1 + d.normal(s.draft_layers, s.draft_head_dim, std=0.1),
        d.whole(0, context, n),
        d.rope(context, s.draft_head_dim).to(r.dtype),
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
    """Flavours "" (greedy) and "sampled" (every other request at a temperature of 0.4 to 1.4)."""
    d, s, batch = Draw(r), r.shapes, _requests(r)
    n, k = s.draft_tokens, s.candidates
    edges = d.normal(batch, n, k, k, std=2.0, dtype=torch.float32)
    if batch:
        edges[:, :, :, 1] = edges[:, :, :, 0]  # ties: the first maximum counts
    temperature = torch.zeros(batch, device=r.device)
    noise = None
    if r.flavour == "sampled":
        warm = torch.rand(-(-batch // 2), generator=d.generator, device=r.device)
        temperature[::2] = 0.4 + warm
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
