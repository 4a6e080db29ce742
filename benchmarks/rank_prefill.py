"""The recorded prefill of one rank: checked, timed whole and by kernel, with a sweep of launches.

    PYTHONPATH=. python3 benchmarks/rank_prefill.py --out result.json [--contexts 0,100000]
        [--sequences 8] [--tokens 2048] [--layers N] [--seconds 110] [--sweep 20] [--no-naive]
        [--chain]

Needs a GPU; ``workbench bench prefill`` is the same measurement without the sweep. Order: peaks,
weights, checks at odd sizes; at the longest context the sweep of single kernels, the whole step
with other launches one after the other, then every context with the best ones: ours with kernel
times, its check, naive; with --chain the registry's kernels last (they want the other layout). The
result is written after every part, and parts that --seconds leaves no time for are named in it.

Expected, 8 x 2048 tokens on an H200 (BF16, 780 TFLOP/s measured, 4.3 TB/s), of the first run's 233
and 322 ms (50 and 54 % of the matrix rate):

* The 17.8 ms of the output gate behind 100,000 tokens were a wait: a dependent launch begins with
  attention's last wave (nine layers of 1.8 ms) and ends 30 us after it. Top-k, the sort and the
  boundary wait for the kernel before them alike: all times together were 353 ms of 322. So kernels
  have their own time as well now, from the end of what ended before.
* The gate inside attention's epilogue: 1.5 ms less, 0.4 GB.
* Attention at 562 TFLOP/s alone: the products of a tile take 2,048 cycles and nothing else ran
  meanwhile, nor they during the softmax, since barriers keep both groups of warps in step. Values
  one tile late run under the softmax: 2,500 cycles a tile instead of 3,500 are the limit, 9.05 ms
  a layer then 7 to 8: 10 to 18 ms less.
* Down stores whole blocks in the experts' order through bulk copies, under the next tile's
  products, and the boundary gathers the rows: 0.94 to about 0.87 ms a layer, 3 ms less.
* Places by comparison instead of a sorting network: 100 us a layer become 15: 4 ms less.
* Launches of the first sweep as the usual ones: down 1.31 to 0.94 ms a layer, router 0.26 to 0.20.

So 224 ms without earlier context (52 %), 295 to 303 behind 100,000 (58 to 59 %).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from workbench.files import write_whole
from workbench.kernels.peaks import measured_peaks
from workbench.kernels.rank import prefill_bench
from workbench.kernels.rank.prefill_bench import timed
from workbench.kernels.rank.prefill_state import PrefillState
from workbench.kernels.rank.prefill_step import PrefillConfig
from workbench.kernels.rank.triton_prefill_attention import GatedPlan, gated_prefill
from workbench.kernels.rank.triton_prefill_experts import (
    DownLaunch,
    ExpertsLaunch,
    launch_down,
    launch_gate_up,
)
from workbench.kernels.rank.triton_prefill_sort import sorted_places
from workbench.kernels.rank.triton_prefill_vectors import split_logits, split_parts
from workbench.kernels.rank.weights import RankWeights
from workbench.kernels.triton_router import launch_top_k
from workbench.model.presets import resolve

ODD = ((3, 77, 0), (1, 130, 5000), (1, 1, 600))

DOWN = [
    DownLaunch(),
    DownLaunch(each=5),
    # Two programs a multiprocessor, as without the store's own shared memory.
    DownLaunch(ordered=True, stages=2),
    DownLaunch(ordered=True, stages=2, each=20),
    DownLaunch(ordered=True, depth=32, stages=4),
    DownLaunch(ordered=True, columns=64, stages=3, each=20),
    # One program of twice the columns.
    DownLaunch(ordered=True, columns=256, warps=8),
    DownLaunch(ordered=True, columns=256, warps=8, each=5),
    DownLaunch(ordered=True, columns=128, warps=8, stages=4),
]
FULL = [
    GatedPlan(late=False),
    GatedPlan(late=True),
    GatedPlan(block_n=64, stages=4, late=True),
    GatedPlan(block_m=64, block_n=64, warps=4, stages=3, late=True),
    GatedPlan(block_m=64, block_n=64, warps=4, stages=3, late=False),
]
WINDOW = [
    GatedPlan(block_m=64, block_n=32, warps=4, stages=3),
    GatedPlan(block_m=64, block_n=64, warps=4, stages=3),
    GatedPlan(block_m=64, block_n=64, warps=4, stages=3, late=True),
]


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


class Run:
    """The document, written after every part, and the time that is left."""

    def __init__(self, out: Path, seconds: float) -> None:
        self.out, self.seconds, self.started = out, seconds, time.monotonic()
        self.document: dict[str, Any] = {"left_out": []}
        self.failed = False

    def __call__(self, text: str) -> None:
        say(f"{self.spent:6.1f} s: {text}")

    @property
    def spent(self) -> float:
        return time.monotonic() - self.started

    def part(self, name: str, need: float, work: Callable[[], Any]) -> Any:
        """What ``work`` gives, also in the document; nothing where ``need`` seconds are not left.

        An error is written down, and the run goes on (unless the device itself is lost).
        """
        if self.spent + need > self.seconds:
            self.document["left_out"].append(name)
            self(f"no time for {name}")
            return None
        try:
            found = work()
        except Exception as error:  # written down; the parts before it are not lost
            self.failed = True
            found = {"error": " ".join(str(error).split())[:500]}
            self(f"{name} FAILED: {found['error']}")
        self.document[name] = found
        self.save()
        return found

    def save(self) -> None:
        write_whole(self.out, (json.dumps(self.document, indent=1) + "\n").encode())


def checked(
    run: Run, weights: RankWeights, state: PrefillState, form: str, config: PrefillConfig, rows: int
) -> dict[str, Any]:
    """A prefill against the float64 reference, and what is to be said of it."""
    found = prefill_bench.checked(weights, state, form, config, rows)
    run.failed |= bool(found["failures"])
    shape = f"{state.sequences} x {state.tokens} behind {state.context}"
    worst = f"worst layer {found['worst_layer_error']:.2e}, cache {found['cache_error']:.1e}"
    sets = f"sets {found['expert_sets_different']}"
    run(f"{form} {shape}: {worst}, {sets}, {found['failures'] or 'right'}")
    return found


def whole(
    run: Run,
    weights: RankWeights,
    state: PrefillState,
    form: str,
    config: PrefillConfig,
    peak: float,
    rounds: int,
) -> dict[str, Any]:
    """Time of a prefill and of its kernels, and what is to be said of them."""
    found = prefill_bench.whole(weights, state, form, config, peak, rounds, profile=form != "naive")
    rate = found["flops_per_second"] / 1e12
    run(f"{form} behind {state.context}: {found['milliseconds']:.2f} ms, {rate:.0f} TFLOP/s = "
        f"{found['fraction_of_peak']:.1%} of the matrix rate; {found['padding']}")  # fmt: skip
    for row in found["kernels"][:16]:
        run(f"    {row['own_microseconds']:10.0f} us ({row['microseconds']:.0f} with waits) "
            f"{row['launches']:5d} {row['kernel'][:60]}")  # fmt: skip
    return found


def _tried(
    run: Run,
    name: str,
    choices: list[Any],
    work: Callable[[Any], Any],
    flops: float,
    given: Callable[[Any, Any], torch.Tensor] = lambda _, result: result,
) -> tuple[Any, list[dict[str, Any]]]:
    """Times of every choice; the fastest that gives what the first does, and all rows.

    ``given``: the tensor to compare, of a choice and its result.
    """
    rows, best, least, first = [], None, float("inf"), None
    for choice in choices:
        row: dict[str, Any] = {"launch": asdict(choice)}
        try:
            result = given(choice, work(choice)).float()
            first = result if first is None else first
            away = float((result - first).norm() / first.norm())
            del result
            row["away_from_the_first"] = away
            if not away < 8e-3:  # also where it is no number; BF16 roundings are 3e-3
                raise ValueError(f"gives something else than the first launch: {away:.2e}")
            row |= timed(lambda choice=choice: work(choice), 7)
        except Exception as error:  # a launch that does not fit is an answer
            row["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            run(f"{name} {choice}: {row['error']}")
            rows.append(row)
            continue
        ms = row["milliseconds"]
        run(f"{name} {ms:.3f} ms {flops / ms / 1e9:.0f} TFLOP/s {choice}")
        rows.append(row)
        if ms < least:
            best, least = choice, ms
    return best, rows


def sweep(
    run: Run, weights: RankWeights, state: PrefillState, seconds: float
) -> tuple[PrefillConfig, dict[str, Any]]:
    """Launches of single kernels on one sparse layer's weights and this state's tokens."""
    s, n = weights.shapes, state.sequences * state.tokens
    found: dict[str, Any] = {}
    run.document["sweep"] = found  # also where it ends early
    started = time.monotonic()
    plans = attention(run, weights, state, found)
    if time.monotonic() - started > seconds:
        return PrefillConfig(**plans), found
    layer = next(each for each in weights.layers if not each.dense)
    device = weights.device
    x = torch.randn(n, s.hidden, device=device).to(weights.dtype)
    parts = split_parts(layer.router)
    logits = split_logits(x, parts)
    assert layer.correction_bias is not None

    def top_k() -> tuple[torch.Tensor, torch.Tensor]:
        return launch_top_k(
            logits, layer.correction_bias, s.top_k, s.n_group, s.topk_group, s.renormalise, False
        )

    ids = top_k()[0]
    for name, work in {
        "router": lambda: split_logits(x, parts),
        "top_k": top_k,
        "sort": lambda: sorted_places(ids, s.experts, 128),
    }.items():
        found[name] = timed(graphed(work), 7)
        run(f"{name}: {found[name]['milliseconds']:.3f} ms")
    flops = 4.0 * n * s.top_k * s.expert_width * s.hidden
    base = ExpertsLaunch()
    order, blocks, place = sorted_places(ids, s.experts, base.tokens)

    def by_pair(how: DownLaunch, product: torch.Tensor) -> torch.Tensor:
        few = place[::64].flatten().long()  # of some tokens: all of them are gigabytes
        pairs = torch.arange(place.numel(), device=device).view_as(place)[::64].flatten()
        return product[few if how.ordered else pairs]

    act = launch_gate_up(x, layer.gate_up, order, blocks, s.top_k, base)
    found["up"] = timed(lambda: launch_gate_up(x, layer.gate_up, order, blocks, s.top_k, base), 7)
    run(f"up: {found['up']['milliseconds']:.3f} ms")
    down, found["down"] = _tried(
        run, "down", DOWN,
        lambda how: launch_down(act, layer.down, order, blocks, replace(base, down=how)),
        flops / 2, by_pair,
    )  # fmt: skip
    return PrefillConfig(experts=replace(base, down=down) if down else None, **plans), found


def graphed(work: Callable[[], Any]) -> Callable[[], None]:
    """``work`` as a CUDA graph's replay: launches of a few microseconds are not the host's time."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def compile_part(part: int, parts: int) -> None:
    """Compile every ``parts``-th launch of the sweep for this kind of GPU; nothing is launched.

    The binaries lie in Triton's cache on disk afterwards. Called in a process of its own each, with
    TRITON_INTERPRET=0, while the weights are filled; a launch that does not compile says so later.
    """
    from workbench.kernels.reach import Spans
    from workbench.kernels.triton_compile import intercepted

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    n, k, h, i, e, s, t = 16384, 8, 5120, 320, 256, 8, 2048
    blocks, order = meta(e, 3, dtype=torch.int32), meta(n * k, dtype=torch.int32)
    act, down, packed = meta(n * k, i), meta(e, h, i), meta(n, 1792)
    gate = packed[:, 1024:].unflatten(-1, (-1, 128))
    work: list[Callable[[], Any]] = [
        lambda how=how: launch_down(act, down, order, blocks, ExpertsLaunch(down=how))  # type: ignore[misc]
        for how in DOWN
    ]
    for context, window, plans in ((100000, None, FULL), (511, 512, WINDOW)):
        spans = Spans([t] * s, [context + t] * s, window, "meta")
        q, kv = meta(n, 6, 128), meta(s * (context + t), 1, 128)
        work += [
            lambda plan=plan, q=q, kv=kv, spans=spans: gated_prefill(  # type: ignore[misc]
                q, kv, kv, gate, meta(6), spans, plan
            )
            for plan in plans
        ]
    with torch.inference_mode(), intercepted((90,)):
        for one in work[part::parts]:
            one()


def compilers(count: int) -> list[subprocess.Popen[bytes]]:
    """Processes that compile the sweep's launches in the background."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, __file__, "--out", os.devnull, "--compile", f"{part},{count}"],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for part in range(count)
    ]


def attention(
    run: Run, weights: RankWeights, state: PrefillState, found: dict[str, Any]
) -> dict[str, Any]:
    """Launches of full and of windowed attention on the state's caches."""
    s, plans = weights.shapes, {}
    n = state.sequences * state.tokens
    q, gate = (
        torch.randn(n, s.heads, s.head_dim, device=weights.device).to(weights.dtype)
        for _ in range(2)
    )
    bias = torch.zeros(s.heads, device=weights.device, dtype=weights.dtype)
    c, t = state.context, state.tokens
    seen = {True: t * c + t * (t + 1) / 2, False: t * min(c + t / 2, s.window)}
    for full, name, choices in ((True, "full", FULL), (False, "sliding", WINDOW)):
        index = next((i for i, x in enumerate(weights.layers) if x.full == full), None)
        if index is None:
            continue
        k, v = state.k[index].flatten(0, 1), state.v[index].flatten(0, 1)
        flops = 4.0 * s.head_dim * s.heads * state.sequences * seen[full]
        best, found[f"attention_{name}_{c}"] = _tried(
            run, f"{name} attention behind {c}", choices,
            lambda plan, k=k, v=v, full=full: gated_prefill(
                q, k, v, gate, bias, state.spans[full], plan
            ),
            flops,
        )  # fmt: skip
        plans[name] = best
    return plans


def release() -> None:
    """Give back what the last part's graphs held."""
    gc.collect()
    torch.cuda.empty_cache()


def main() -> int:
    """Check, time, write, and exit with 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="beam-501b")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--contexts", default="0,100000")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--sweep", type=float, default=20.0)
    parser.add_argument("--no-naive", action="store_true")
    parser.add_argument("--chain", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.compile:
        compile_part(*(int(part) for part in given.compile.split(",")))
        return 0
    children = compilers(min(8, (os.cpu_count() or 2) // 2)) if given.sweep else []
    run = Run(given.out, given.seconds)
    rates = measured_peaks("cuda")
    release()
    peak = rates.flops["bf16"]
    run(f"{rates.bandwidth / 1e12:.3f} TB/s, {peak / 1e12:.0f} TFLOP/s")
    run.document |= {
        "kind": "prefill",
        "model": given.model,
        "tp": given.tp,
        "sequences": given.sequences,
        "tokens": given.tokens,
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "hardware": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__},
        "bandwidth": rates.bandwidth,
        "matrix_rate": peak,
        "note": prefill_bench.NOTE,
    }
    with torch.inference_mode():
        measure(given, run, peak, children)
    run.save()
    run("done")
    return 1 if run.failed else 0


def measure(
    given: argparse.Namespace, run: Run, peak: float, children: list[subprocess.Popen[bytes]]
) -> None:
    """All parts on one set of weights."""
    config = PrefillConfig()
    weights = RankWeights.random(resolve(given.model).config, given.tp, layers=given.layers)
    torch.cuda.synchronize()
    run(f"{weights.bytes / 2**30:.2f} GiB of weights")
    contexts = [int(part) for part in given.contexts.split(",")]

    def state(context: int) -> PrefillState:
        return PrefillState(weights, given.sequences, given.tokens, context)

    def odd() -> list[dict[str, Any]]:
        rows = []
        for sequences, tokens, context in ODD:
            one = PrefillState(weights, sequences, tokens, context)
            sizes = {"sequences": sequences, "tokens": tokens, "context": context}
            rows.append(sizes | checked(run, weights, one, "ours", config, 3))
        return rows

    run.part("odd_sizes", 15, odd)
    release()
    longest = max(contexts)
    st = state(longest)
    best = [config]
    if given.sweep:
        for child in children:
            try:
                child.wait(60)
            except subprocess.TimeoutExpired:
                child.kill()
        run("the sweep's launches are compiled")

        def swept() -> dict[str, Any]:
            best[0], found = sweep(run, weights, st, given.sweep)
            return found | {"config": repr(best[0])}

        run.part("sweep", 10, swept)
        release()
        run.part("in_place", 15, lambda: in_place(run, weights, st, best, peak))
    run(f"launches: {best[0]}")
    release()
    for context in sorted(contexts, reverse=True):
        if context != longest:
            del st
            release()
            st = state(context)
        # Attention's sizes of the sweep are for its context.
        own = best[0] if context == longest else replace(best[0], full=None)
        run.part(
            f"ours_{context}", 6,
            lambda own=own, st=st: whole(run, weights, st, "ours", own, peak, given.rounds),
        )  # fmt: skip
        release()
        run.part(
            f"check_{context}", 8,
            lambda own=own, st=st: checked(run, weights, st, "ours", own, 4),
        )  # fmt: skip
        release()
        if not given.no_naive:
            run.part(
                f"naive_{context}", 8,
                lambda st=st: whole(run, weights, st, "naive", config, peak, 2),
            )  # fmt: skip
        release()
    if given.chain:
        if run.spent + 25 < run.seconds:
            weights.relayout("IH")
        for context in contexts:
            del st
            release()
            st = state(context)
            run.part(
                f"chain_{context}", 15,
                lambda st=st: whole(run, weights, st, "chain", config, peak, 3),
            )  # fmt: skip
            release()


def in_place(
    run: Run, weights: RankWeights, state: PrefillState, best: list[PrefillConfig], peak: float
) -> dict[str, Any]:
    """The whole step with other launches of single kernels, the fastest of which is then taken.

    Alone a kernel runs at a higher clock, and the wait of the one behind it is not seen.
    """
    first, found = best[0], {}
    experts = first.experts or ExpertsLaunch()
    tried = {"of the sweep": first, "usual": PrefillConfig()}
    for down in (DownLaunch(), DownLaunch(each=5), replace(experts.down, each=5)):
        if down != experts.down:
            name = f"down, {down.each} tiles a program, {'by place' if down.ordered else 'by pair'}"
            tried[name] = replace(first, experts=replace(experts, down=down))
    if first.full is not None:
        other = replace(first.full, late=not first.full.late)
        tried["values late" if other.late else "values not late"] = replace(first, full=other)
    for name, config in tried.items():
        row = prefill_bench.whole(weights, state, "ours", config, peak, 4, profile=False)
        found[name] = {k: row[k] for k in ("milliseconds", "low", "high")}
        run(f"{name}: {row['milliseconds']:.2f} ms ({row['low']:.2f} to {row['high']:.2f})")
        release()
    fastest = min(found, key=lambda name: float(found[name]["milliseconds"]))
    best[0] = tried[fastest]
    return found


if __name__ == "__main__":
    sys.exit(main())
