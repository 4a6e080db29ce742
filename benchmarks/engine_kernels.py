"""Our kernels beside vLLM's kernels alone: without what its variants here must add to them.

    PYTHONPATH=. python3 benchmarks/engine_kernels.py [--tp 8 4] [--tokens 1 7 8 64 1024]
        [--seconds 0.3] [--budget 120] [--out benchmarks/results/engine-kernels-h200.json]

Needs a CUDA GPU and vLLM 0.33. An adapter in ``workbench/kernels/vllm_*.py`` has an operation's
signature, so it does in every call what the engine does once a step (block tables, lengths) or not
at all (a copy of what is updated in place, softcapped logits as float32). Here that is done before:
attention finds its tables made, ``conv_residual_norm`` and ``softcap`` run in place. Softcap in
place rounds to BF16, which the check refuses; its other launches are ours, to float32 and in place.

Times are those of ``workbench.kernels.timing``: CUDA graphs, cold L2, in turn. Errors are relative
to float64, of the first call on fresh arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import workbench
from workbench import hardware
from workbench.kernels import registry
from workbench.kernels.case import Case, Request
from workbench.kernels.gates import errors
from workbench.kernels.ops import operation
from workbench.kernels.shapes import Shapes
from workbench.kernels.timing import Candidate, l2_bytes, measure, sets_wanted

CALLS = 16
SOFTCAP = [(512, 4), (1024, 2), (1024, 4), (1024, 8), (2048, 2), (2048, 4), (2048, 8), (4096, 8)]
ATTENTION = ("sliding", "full", "sliding verify", "full verify", "sliding fp8", "full fp8")
PREFILL = ("sliding", "full", "sliding ragged", "full ragged", "sliding batch", "full batch")

Call = Callable[[], Any]
Maker = Callable[[Case], Call]


def ours(op: str) -> Maker:
    """Our Triton kernel on a case."""
    function = registry.find(op, "triton").function
    return lambda case: lambda: function(*case.args, **case.kwargs)


def tables_before(op: str) -> Maker:
    """vLLM's attention, block tables and lengths made before."""
    from workbench.kernels import vllm_attention as adapter

    function = registry.find(op, "vllm").function
    if op == "decode_attention":
        made: dict[int, Any] = {}
        tables = adapter._tables

        def once(reach: Any, *rest: Any) -> Any:
            if id(reach) not in made:
                made[id(reach)] = reach, tables(reach, *rest)  # kept: its id stays its own
            return made[id(reach)][1]

        adapter._tables = once
        return lambda case: lambda: function(*case.args, **case.kwargs)
    return prefill_before


def prefill_before(case: Case) -> Call:
    """As the adapter of ``prefill_attention`` in ``vllm_attention``, in two parts."""
    from workbench.kernels.vllm_attention import _TILE, PAGE, _paged, _window, engine

    q, k, v, spans = case.args
    lengths = spans.k_lengths
    whole = sum(lengths) == k.shape[0] and not any(n % PAGE for n in (*lengths, k.shape[0]))
    page = PAGE if whole else 1
    column = torch.arange(-(-(max(lengths) + _TILE) // page), device=q.device)
    given = {
        "cu_seqlens_q": spans.q_starts.to(torch.int32),
        "seqused_k": spans.k_starts.diff().to(torch.int32),
        "block_table": (column + spans.k_starts[:-1, None] // page).to(torch.int32),
    }
    attend = engine("v1.attention.ops.triton_unified_attention").unified_attention

    def call() -> Tensor:
        out = torch.empty_like(q)
        attend(
            q=q, k=_paged(k[None], page), v=_paged(v[None], page), out=out,
            max_seqlen_q=max(spans.q_lengths), max_seqlen_k=max(lengths),
            softmax_scale=q.shape[-1] ** -0.5, causal=True, window_size=_window(spans.window),
            softcap=0.0, q_descale=None, k_descale=None, v_descale=None, **given,
        )  # fmt: skip
        return out

    return call


def conv_in_place(case: Case) -> Call:
    """vLLM's convolution and norm, which update the residual."""
    from workbench.kernels.vllm_beam import engine

    x, coefficients, base, residual, weight, eps, query = case.args
    run = engine("models.beam.nvidia.dflash2_conv_ops").conv_residual_norm
    group = x.shape[1] // coefficients.shape[-1]
    own = residual.clone()

    def call() -> Any:
        normed, updated = run(x, coefficients, base, own, weight, eps, query, group)
        return updated, normed

    return call


def softcaps() -> dict[str, Maker]:
    """vLLM's softcap in place, and launches of ours."""
    from workbench.kernels.triton_elementwise import launch_softcap
    from workbench.kernels.vllm_beam import engine

    cap_logits = engine("models.beam.nvidia.activation").beam_softcap_logits

    def engines(case: Case) -> Call:
        own = case.args[0].clone()
        return lambda: cap_logits(own, case.args[1])

    def launch(block: int, warps: int, in_place: bool) -> Maker:
        def make(case: Case) -> Call:
            logits, cap = case.args
            own = logits.clone() if in_place else None
            source = logits if own is None else own
            return lambda: launch_softcap(source, cap, block, warps, True, own)

        return make

    found = {"vllm, in place": engines}
    for block, warps in SOFTCAP:
        for in_place in (False, True):
            name = f"{block} columns, {warps} warps, {'in place' if in_place else 'to float32'}"
            found[name] = launch(block, warps, in_place)
    return found


def compare(op: str, request: Request, makers: dict[str, Maker], seconds: float) -> list[Any]:
    """Times and errors of the candidates on the same arguments."""
    it = operation(op)
    first = it.case(request)
    sets = sets_wanted(first.work.bytes, CALLS, l2_bytes("cuda"))
    cases = [first]
    for seed in range(1, sets):
        cases.append(it.case(Request(**{**_fields(request), "seed": seed})))
    exact = {} if it.oracle is None else it.oracle(*first.args, **first.kwargs)
    rows, candidates = [], []
    for name, make in makers.items():
        calls = [make(case) for case in cases]
        result = calls[0]()
        outputs = result if isinstance(result, tuple) else (result,)
        error = max(errors(o, e).relative for o, e in zip(outputs, exact.values(), strict=False))
        rows.append({"name": name, "error": float(f"{error:.3g}")})
        candidates.append(Candidate(name, calls, -(-CALLS // sets)))
    measure(candidates, "cuda", seconds=seconds)
    for row, candidate in zip(rows, candidates, strict=True):
        timing = candidate.timing()
        row |= {"tp": request.shapes.tp, "op": op, "flavour": request.flavour,
                "tokens": request.tokens, "note": candidate.error}  # fmt: skip
        if timing is not None:
            us = [float(f"{1e6 * x:.4g}") for x in (timing.median, timing.low, timing.high)]
            row |= {"microseconds": us, "rounds": timing.rounds, "in_graph": timing.in_graph}
    return rows


def _fields(request: Request) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__slots__}


def comparisons(tokens: list[int]) -> Iterator[tuple[str, str, int, dict[str, Maker]]]:
    """(operation, flavour, tokens, candidates)."""
    for n in [*tokens, 256]:
        yield "softcap", "", n, {"triton": ours("softcap"), **softcaps()}
    for n in tokens:
        both = {"triton": ours("conv_residual_norm"), "vllm, in place": conv_in_place}
        yield "conv_residual_norm", "", n, both
    for op, flavours in (("decode_attention", ATTENTION), ("prefill_attention", PREFILL)):
        both = {"triton": ours(op), "vllm, tables made before": tables_before(op)}
        for n in tokens:
            for flavour in flavours:
                yield op, flavour, n, both


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tp", nargs="+", type=int, default=[8, 4])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 7, 8, 64, 1024])
    parser.add_argument("--op", nargs="+", default=[], metavar="OP")
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--budget", type=float, default=float("inf"), help="stop after so many s")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    started, rows = time.monotonic(), []
    machine = hardware.machine()
    config = workbench.resolve("beam-501b").config
    for tp in options.tp:
        for op, flavour, n, makers in comparisons(options.tokens):
            late = time.monotonic() - started > options.budget
            if late or (options.op and op not in options.op):
                continue
            request = Request(
                shapes=Shapes.of(config, tp), tokens=n, dtype=torch.bfloat16, device="cuda",
                flavour=flavour,
            )  # fmt: skip
            try:
                found = compare(op, request, makers, options.seconds)
            except Exception as error:
                print(f"{op} {flavour} {n}: {type(error).__name__}: {error}"[:300], file=sys.stderr)
                continue
            rows += found
            shown = sorted((r.get("microseconds", [0])[0], r["name"], r["error"]) for r in found)
            print(f"TP{tp} {op} {flavour} {n}: {shown}", file=sys.stderr, flush=True)
            document = {
                "what": __doc__.split("\n")[0],
                "hardware": torch.cuda.get_device_name(),
                "versions": machine.versions,
                "date": date.today().isoformat(),
                "microseconds": "median, 10th and 90th percentile of one call",
                "rows": rows,
            }
            text = json.dumps(document, indent=1)
            options.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
