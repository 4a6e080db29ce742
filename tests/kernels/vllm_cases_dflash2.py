"""DFlash2 calls for the variants that call vLLM, and what they must give.

``r`` or ``.to(dtype)`` rounds where the operation's contract says so; between two roundings all is
float64. Each function yields cases of one kind, weights drawn anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm_oracle import EPS, FP8, Case, Draw, rms, rope_table, rotate


def drafter_cases(s: dict[str, int], n: int, draw: Draw) -> Iterator[Case]:
    hidden, dtype, device = s["hidden"], draw.dtype, draw.device
    groups, taps, query = hidden // 16, 2, 8
    x, residual = draw.normal(n, hidden), draw.normal(n, hidden)
    coefficients = draw.normal(n, 2, taps, groups, scale=0.3)[:, 1]
    base, weight = draw.normal(taps, hidden), 1 + draw.normal(hidden, scale=0.2)

    def conv() -> Tensor:
        out = torch.zeros(n, hidden, dtype=torch.float64, device=device)
        for i in range(n):
            for tap in range(min(taps, i % query + 1)):
                each = coefficients[i, tap].double().repeat_interleave(16)
                out[i] += (base[tap].double() + each) * x[i - tap].double()
        return out.to(dtype)

    yield Case("dynamic_conv", "", lambda f: (f(x, coefficients, base, query),), lambda: (conv(),))

    def finish() -> tuple[Tensor, ...]:
        new = (conv().double() + residual.double()).to(dtype)
        return new, rms(new, weight).to(dtype)

    yield Case(
        "conv_residual_norm",
        "",
        lambda f: f(x, coefficients, base, residual, weight, EPS, query),
        finish,
    )
    batch, steps, top = max(n // 8, 1), 7, s["candidates"]
    before, after = (draw.normal(s["draft_vocab"], s["rank"], scale=0.3) for _ in range(2))
    ids = draw.below(s["draft_vocab"], batch, steps, top)
    unary = draw.normal(batch, steps, top, dtype=torch.float32)
    hid, anchors = draw.normal(batch, steps, s["rank"]), draw.below(s["draft_vocab"], batch)

    def edges() -> tuple[Tensor, ...]:
        previous = torch.cat((anchors[:, None, None].expand(-1, 1, top), ids[:, :-1]), 1)
        weighted = (before[previous].double() * hid.double()[:, :, None]).to(dtype).double()
        pair = torch.einsum("bnqr,bncr->bnqc", weighted, after[ids].double()).to(dtype).double()
        return (pair + unary.double()[:, :, None],)

    yield Case(
        "candidate_edges", "", lambda f: (f(before, after, ids, unary, hid, anchors),), edges
    )
    scores = draw.normal(batch, steps, top, top, dtype=torch.float32)
    scores[:, 1] = scores[:, 1].round()  # ties: the first of equal scores is chosen
    heat = draw.normal(batch, dtype=torch.float32).abs()

    def walk() -> tuple[Tensor, ...]:
        tokens = torch.zeros(batch, steps, dtype=torch.int64)
        realized = torch.zeros(batch, steps, top, dtype=torch.float64)
        table, names = scores.cpu(), ids.cpu()
        for b in range(batch):
            at = 0
            for step in range(steps):
                line = table[b, step, at].tolist()
                at = line.index(max(line))
                realized[b, step] = torch.tensor(line, dtype=torch.float64)
                tokens[b, step] = names[b, step, at]
        return tokens.to(device), realized.to(device)

    yield Case("selector_walk", "", lambda f: f(scores, ids, heat, None), walk)

    layers, kv, dim = s["draft_layers"], s["kv"], s["dim"]
    states = draw.normal(n, layers, 2, kv, dim)
    norms = 1 + draw.normal(layers, dim, scale=0.2)
    positions = draw.below(s["context"], n)
    table = rope_table(s["context"], dim, device).to(dtype)
    room = -(-(n + 9) // 16) * 16
    rows = draw.permutation(room)[:n]
    if n > 1:
        rows[n // 2] = -1
    for fp8, joint in ((False, True), (True, True), (False, False), (True, False)):
        kind = FP8 if fp8 else dtype
        both = torch.zeros(layers, room, kv, 2 * dim, device=device).to(kind)
        k_rows, v_rows = both.split(dim, -1)
        if not joint:
            k_rows, v_rows = k_rows.contiguous(), v_rows.contiguous()
        # Not round numbers: x / 0.02 = 50 x often lies exactly between two FP8 values, and there
        # the engine's kernel, which divides with an error of an ulp on a GPU, goes either way.
        scales = [
            torch.linspace(low, 2.137 * low, layers, device=device) if fp8 else None
            for low in (0.02173, 0.01091)
        ]

        def store(
            f: Any, k_rows: Tensor = k_rows, v_rows: Tensor = v_rows, scales: Any = scales
        ) -> tuple[Tensor, ...]:
            f(
                states, norms, positions, table, k_rows, v_rows, rows, EPS,
                k_scale=scales[0], v_scale=scales[1],
            )  # fmt: skip
            return k_rows, v_rows

        def stored(kind: torch.dtype = kind, scales: Any = scales) -> tuple[Tensor, ...]:
            found = torch.zeros(2, layers, room, kv, dim, dtype=torch.float64, device=device)
            there = rows >= 0
            for layer in range(layers):
                k = rms(states[:, layer, 0], norms[layer]).to(dtype)
                k = rotate(k, table[positions]).to(dtype)
                for i, x in enumerate((k, states[:, layer, 1])):
                    value = x
                    if kind == FP8:
                        value = (x.float() / scales[i][layer]).clamp(-448, 448).to(FP8)
                    found[i, layer, rows[there]] = value.double()[there]
            return found[0], found[1]

        label = ("fp8" if fp8 else "same dtype") + (" one cache" if joint else " two caches")
        yield Case("context_kv_write", label, store, stored)
