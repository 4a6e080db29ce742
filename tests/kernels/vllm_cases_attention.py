"""Attention calls for the variants that call vLLM, and what they must give.

``r`` or ``.to(dtype)`` rounds where the operation's contract says so; between two roundings all is
float64. Each function yields cases of one kind, weights drawn anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm_oracle import Case, Draw, attention, to_fp8

from workbench.kernels.reach import Reach, Spans


def attention_cases(s: dict[str, int], n: int, draw: Draw) -> Iterator[Case]:
    heads, kv, dim, device = s["heads"], s["kv"], s["dim"], draw.device
    shapes = [(n, 1)] if n <= 64 else []
    shapes += [(n // 8, 8)] if n % 8 == 0 else []
    for batch, length in shapes:
        for kind in ("full", "ring", "full fp8", "ring odd"):
            full, fp8 = kind.startswith("full"), kind.endswith("fp8")
            window = None if full else s["window"]
            span = s["context"]
            rows = -(-s["context"] // 16) * 16 if full else -(-(s["window"] + length) // 16) * 16
            if kind == "ring odd":
                rows += 1
            k_cache, v_cache = (draw.normal(batch + 1, rows, kv, dim, scale=0.5) for _ in range(2))
            scales = (0.02, 0.01) if fp8 else (1.0, 1.0)
            if fp8:
                k_cache, v_cache = (
                    to_fp8(x, scale) for x, scale in zip((k_cache, v_cache), scales, strict=True)
                )
            slots = draw.permutation(batch + 1)[:batch]
            first = draw.below(s["context"] - length, batch)
            first[0] = s["context"] - length
            if batch > 1:
                first[1] = 0
            q = draw.normal(batch, length, heads, dim)
            reach = Reach(slots, first, span=span if full else rows, window=window)

            def call(
                f: Any,
                q: Tensor = q,
                k: Tensor = k_cache,
                v: Tensor = v_cache,
                reach: Any = reach,
                scales: Any = scales,
            ) -> tuple[Tensor, ...]:
                return (f(q, k, v, reach, k_scale=scales[0], v_scale=scales[1]),)

            def expected(
                q: Tensor = q,
                k: Tensor = k_cache,
                v: Tensor = v_cache,
                slots: Tensor = slots,
                first: Tensor = first,
                window: int | None = window,
                rows: int = rows,
                scales: Any = scales,
                length: int = length,
            ) -> tuple[Tensor, ...]:
                out = []
                for b, (slot, start) in enumerate(zip(slots.tolist(), first.tolist(), strict=True)):
                    line = torch.arange(start + length, device=q.device) % rows
                    at = torch.arange(start, start + length, device=q.device)
                    keys = k[slot, line].double() * scales[0]
                    values = v[slot, line].double() * scales[1]
                    out.append(attention(q[b], keys, values, at, window))
                return (torch.stack(out),)

            yield Case(
                "decode_attention",
                f"{kind}, {batch} x {length}",
                call,
                expected,
                skip=("vllm_fa3",) if kind in ("full fp8", "ring odd") else (),
            )
    for q_lengths, k_lengths in (
        ([n], [n]),
        ([n], [-(-(n + 48) // 16) * 16]),
        ([max(n // 3, 1), n], [n + 5, n + 9]),
    ):
        for window in (None, s["window"]):
            spans = Spans(q_lengths, k_lengths, window, device)
            q = draw.normal(sum(q_lengths), heads, dim)
            k, v = (draw.normal(sum(k_lengths), kv, dim) for _ in range(2))

            def prefill(
                f: Any, q: Tensor = q, k: Tensor = k, v: Tensor = v, spans: Any = spans
            ) -> tuple[Tensor, ...]:
                return (f(q, k, v, spans),)

            def plain(
                q: Tensor = q,
                k: Tensor = k,
                v: Tensor = v,
                q_lengths: list[int] = q_lengths,
                k_lengths: list[int] = k_lengths,
                window: int | None = window,
            ) -> tuple[Tensor, ...]:
                parts = zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True)
                return (
                    torch.cat(
                        [
                            attention(
                                a, b, c,
                                torch.arange(len(b) - len(a), len(b), device=a.device), window,
                            )
                            for a, b, c in parts
                        ]
                    ),
                )  # fmt: skip

            where = "full" if window is None else "window"
            yield Case("prefill_attention", f"{where}, {q_lengths} of {k_lengths}", prefill, plain)
