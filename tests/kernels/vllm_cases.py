"""Calls of Beam's operations for the variants that call vLLM, and what they must give.

``r`` or ``.to(dtype)`` rounds where the operation's contract says so; between two roundings all is
float64. Each function yields cases of one kind, weights drawn anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm_cases_attention import attention_cases
from vllm_cases_dflash2 import drafter_cases
from vllm_oracle import EPS, FP8, SIZES, Case, Draw, rms, rope_table, rotate, swiglu, to_fp8


def cases(size: str, tokens: int, device: str, dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Every operation with ``tokens`` tokens; weights are drawn anew for each."""
    s = SIZES[size]
    draw = Draw(device, dtype, seed)
    for make in (_elementwise, _projections, _write, _experts, attention_cases, drafter_cases):
        yield from make(s, tokens, draw)


def _elementwise(s: dict[str, int], n: int, draw: Draw) -> Iterator[Case]:
    hidden, dtype = s["hidden"], draw.dtype

    def r(x: Tensor) -> Tensor:
        return x.to(dtype)

    x, h = draw.normal(n, hidden + 32)[:, :hidden], draw.normal(n, hidden)
    post, pre = (1 + draw.normal(hidden, scale=0.2) for _ in range(2))
    yield Case("rms_norm", "", lambda f: (f(x, pre, EPS),), lambda: (r(rms(x, pre)),))
    scale = (0.25, (15 / 16) ** 0.5)

    def stream() -> tuple[Tensor, ...]:
        p = r(rms(x, post))
        new = r(r(p.double() * scale[0]).double() + r(h.double() * scale[1]).double())
        return new, r(rms(new, pre))

    yield Case("boundary", "", lambda f: f(h, x, post, scale, pre, EPS), stream)
    heads, dim = s["heads"], s["dim"]
    o, packed = draw.normal(n, heads, dim), draw.normal(n, 2 * heads * dim)
    gate, bias = packed[:, heads * dim :].unflatten(1, (heads, dim)), draw.normal(heads)

    def gated() -> tuple[Tensor, ...]:
        g = r(gate.double() + bias.double()[:, None])
        return (r(o.double() * r(torch.sigmoid(g.double())).double()),)

    yield Case("output_gate", "", lambda f: (f(o, gate, bias),), gated)
    logits = draw.normal(min(n, 64), s["vocab"], scale=20.0)
    # The engine rounds the capped logits back to their own dtype.
    yield Case(
        "softcap",
        "",
        lambda f: (f(logits, 30.0),),
        lambda: (r(30 * torch.tanh(logits.double() / 30)),),
    )


def _projections(s: dict[str, int], n: int, draw: Draw) -> Iterator[Case]:
    x = draw.normal(n, s["hidden"])
    packed = draw.weight(2 * (s["heads"] + s["kv"]) * s["dim"], s["hidden"])
    yield Case(
        "qkvg",
        "",
        lambda f: (f(x, packed),),
        lambda: (x.double() @ packed.double().T,),
        weights={"weight": packed},
    )
    gate_up, down = draw.weight(2 * s["mlp"], s["hidden"]), draw.weight(s["hidden"], s["mlp"])

    def mlp() -> tuple[Tensor, ...]:
        act = swiglu((x.double() @ gate_up.double().T).to(draw.dtype)).to(draw.dtype)
        return (act.double() @ down.double().T,)

    yield Case(
        "dense_mlp",
        "",
        lambda f: (f(x, gate_up, down),),
        mlp,
        weights={"gate_up": gate_up, "down": down},
    )


def _write(s: dict[str, int], n: int, draw: Draw) -> Iterator[Case]:
    heads, kv, dim, dtype = s["heads"], s["kv"], s["dim"], draw.dtype
    packed = draw.normal(n, 2 * (heads + kv) * dim)
    norms = 1 + draw.normal(2, dim, scale=0.2)
    positions = draw.below(s["context"], n)
    table = rope_table(s["context"], dim, draw.device)
    room = -(-(n + 9) // 16) * 16
    rows = draw.permutation(room)[:n]
    if n > 1:
        rows[n // 2] = -1
    for full in (False, True):
        for fp8 in (False, True):
            for joint in (False, True):
                kind = FP8 if fp8 else dtype
                if joint:
                    both = torch.zeros(room, kv, 2 * dim, dtype=torch.float32, device=draw.device)
                    k_rows, v_rows = both.to(kind).split(dim, -1)
                else:
                    k_rows, v_rows = (
                        torch.zeros(room, kv, dim, device=draw.device).to(kind) for _ in range(2)
                    )
                scales = (0.05, 0.03) if fp8 else (1.0, 1.0)

                def call(
                    f: Any,
                    full: bool = full,
                    k_rows: Tensor = k_rows,
                    v_rows: Tensor = v_rows,
                    scales: tuple[float, float] = scales,
                ) -> tuple[Tensor, ...]:
                    q = f(
                        packed, norms, positions, table, k_rows, v_rows, rows,
                        heads=heads, full=full, eps=EPS, k_scale=scales[0], v_scale=scales[1],
                    )  # fmt: skip
                    return q, k_rows, v_rows

                def expected(
                    full: bool = full, kind: torch.dtype = kind, scales: Any = scales
                ) -> tuple[Tensor, ...]:
                    q, k, v, _ = packed.split([heads * dim, kv * dim, kv * dim, heads * dim], -1)
                    q, k = (
                        rms(x.unflatten(1, (-1, dim)), norms[i]).to(dtype)
                        for i, x in enumerate((q, k))
                    )
                    if full:
                        factor = (1 + (positions.double() + 1) / 2048) ** 0.1
                        q = (q.double() * factor[:, None, None]).to(dtype)
                    else:
                        q, k = (rotate(x, table[positions]).to(dtype) for x in (q, k))
                    caches = []
                    for x, scale in ((k, scales[0]), (v.unflatten(1, (kv, dim)), scales[1])):
                        stored = to_fp8(x, scale) if kind == FP8 else x
                        cache = torch.zeros(room, kv, dim, dtype=torch.float64, device=x.device)
                        cache[rows[rows >= 0]] = stored.double()[rows >= 0]
                        caches.append(cache)
                    return q, caches[0], caches[1]

                label = f"{'full' if full else 'rope'} {'fp8' if fp8 else 'same dtype'}"
                yield Case(
                    "qkv_write", label + (" one cache" if joint else " two caches"), call, expected
                )


def _experts(s: dict[str, int], n: int, draw: Draw) -> Iterator[Case]:
    experts, hidden, top_k = s["experts"], s["hidden"], s["top_k"]
    x = draw.normal(n, hidden)
    gate = draw.normal(experts, hidden, scale=hidden**-0.5, dtype=torch.float32)
    bias = draw.normal(experts, scale=0.3, dtype=torch.float32)

    def routed(n_group: int | None, topk_group: int | None) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(x.double() @ gate.double().T)
        choice = scores + bias.double()
        if n_group is not None and topk_group is not None:
            groups = choice.view(n, n_group, -1)
            best = groups.sort(dim=-1, descending=True).values[..., :2].sum(-1)
            keep = best >= best.sort(dim=-1, descending=True).values[:, topk_group - 1 : topk_group]
            choice = groups.masked_fill(~keep[..., None], float("-inf")).flatten(1)
        ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
        weights = scores.gather(1, ids)
        return ids, weights / weights.sum(-1, keepdim=True)

    for groups in ((None, None), (8, 4)):

        def call(f: Any, groups: Any = groups) -> tuple[Tensor, ...]:
            ids, weights = f(
                x, gate, bias, top_k=top_k, n_group=groups[0], topk_group=groups[1],
                renormalise=True,
            )  # fmt: skip
            # Compared as a row of E weights: the order of equal scores is free.
            table = torch.zeros(n, experts, device=x.device)
            return (table.scatter(1, ids, weights),)

        def expected(groups: Any = groups) -> tuple[Tensor, ...]:
            ids, weights = routed(*groups)
            table = torch.zeros(n, experts, dtype=torch.float64, device=x.device)
            return (table.scatter(1, ids, weights),)

        yield Case("router", "groups" if groups[0] else "", call, expected)

    gate_up = draw.weight(experts, 2 * s["expert"], hidden)
    down = draw.weight(experts, s["expert"], hidden)
    ids, weights = routed(None, None)
    weights = weights.float()

    def mlp() -> tuple[Tensor, ...]:
        out = torch.zeros(n, hidden, dtype=torch.float64, device=x.device)
        for expert in ids.unique().tolist():
            token, slot = (ids == expert).nonzero(as_tuple=True)
            both = (x[token].double() @ gate_up[expert].double().T).to(draw.dtype)
            act = swiglu(both).to(draw.dtype).double()
            out.index_add_(
                0, token, act @ down[expert].double() * weights[token, slot].double()[:, None]
            )
        return (out.to(draw.dtype).double() * 2.5,)

    yield Case(
        "expert_mlp",
        "",
        lambda f: (f(x, gate_up, down, ids, weights, 2.5),),
        mlp,
        weights={"gate_up": gate_up, "down": down, "ids": ids},
    )
