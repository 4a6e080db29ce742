"""How much memory the inputs of an operation take, before they are made.

Beam-501B's experts are gigabytes on one rank alone: what does not fit is refused in a sentence
instead of by the operating system.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from workbench import hardware
from workbench.kernels.case import Request
from workbench.kernels.inputs import SPARE_ROWS, VERIFY_TOKENS

SHARE = 0.85  # of the free memory may be used


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes, estimated: ``held`` by one set of arguments and outputs, ``peak`` while it is made."""

    held: int
    peak: int


def footprint(op: str, request: Request) -> Footprint:
    """An estimate of what one call of ``op`` on ``request`` needs.

    While random numbers are made, the largest tensor is there twice in float32; float64 copies of
    the weights, which the oracle makes, take as much.
    """
    s, n = request.shapes, request.tokens
    size = torch.empty((), dtype=request.dtype).element_size()
    weights = {
        "qkvg": s.packed * s.hidden,
        "router": 2 * s.experts * s.hidden,  # float32
        "expert_mlp": 3 * s.experts * s.expert_width * s.hidden,
        "dense_mlp": 3 * s.mlp_width * s.hidden,
        "candidate_edges": 2 * s.full_vocabulary * s.selector_rank,
    }.get(op, 0)
    row = s.packed + 4 * s.hidden + s.experts
    if op == "softcap":
        row = 5 * s.vocabulary
    elif op == "expert_mlp":
        row += 3 * s.top_k * s.expert_width
    elif op == "dense_mlp":
        row += 3 * s.mlp_width
    elif op == "candidate_edges":
        row += s.candidates * (s.candidates + 2 * s.selector_rank)
    values = n * row
    if op == "decode_attention":
        queries = min(VERIFY_TOKENS, n) if "verify" in request.flavour else 1
        batch = -(-n // max(1, queries))
        before = s.window + s.window // 2 if request.context is None else request.context
        ring = (min(before, s.context) if "full" in request.flavour else s.window) + SPARE_ROWS
        values += 2 * (batch + 1) * ring * s.kv_heads * s.head_dim
    elif op in ("qkv_write", "context_kv_write"):  # the RoPE table, and rows of the cache
        dim, layers = s.head_dim, 1
        if op == "context_kv_write":
            dim, layers = s.draft_head_dim, s.draft_layers
            values += 4 * (n + 3) * layers * s.draft_kv_heads * dim
        values += 4 // size * min(s.context, 4096) * dim + 4 * (n + 5) * s.kv_heads * dim
    elif op == "prefill_attention":
        past = n + 64 * (s.window + 8) if "batch" in request.flavour else n + 2 * s.window
        values += 2 * past * s.kv_heads * s.head_dim
        values += s.heads * n * (n + s.window)  # scores of the plain torch form
    held = (weights + values) * size
    largest = max(weights * 2 // 3 if weights else 0, values // 2)
    return Footprint(held=held, peak=held + largest * (8 + size))


def free_bytes(device: str) -> int | None:
    """Bytes that can still be allocated on ``device``; None where the system does not say."""
    if torch.device(device).type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    free: int | None = None
    with suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    limit = hardware.usable_memory()
    known = [x for x in (free, limit) if x is not None]
    return min(known, default=None)


def too_large(op: str, request: Request) -> str | None:
    """None where the inputs fit the free memory; else a clause with both numbers."""
    need, free = footprint(op, request).peak, free_bytes(request.device)
    if free is None or need <= SHARE * free:
        return None
    return (
        f"its inputs at {request.label} of {request.shapes.label} need about "
        f"{hardware.gigabytes(need)}, and {hardware.gigabytes(free)} of memory are free"
    )
