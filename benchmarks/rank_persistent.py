"""The persistent decode step on a GPU: right, and how fast. Writes JSON.

    PYTHONPATH=. python3 benchmarks/rank_persistent.py check --out check.json
    PYTHONPATH=. python3 benchmarks/rank_persistent.py time --out time.json [--prototype FILE]

``check`` runs a few layers at several contexts against float64, layer by layer; ``time`` runs all.
``--prototype`` names a file with a class ``Mega`` like the design's prototype, which is then timed
in the same process on the same weights, in turn with the step.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from workbench.errors import KernelError
from workbench.kernels.rank import RankState, RankWeights
from workbench.kernels.rank.graph import capture, time_replays
from workbench.kernels.rank.persistent import PersistentStep
from workbench.kernels.rank.reference import check_step
from workbench.model.presets import resolve


def bandwidth() -> float:
    """Bytes a second of a large device-to-device copy, read and written."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    times = []
    for _ in range(20):
        s, e = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        s.record()
        b.copy_(a)
        e.record()
        e.synchronize()
        times.append(s.elapsed_time(e))
    return 2 * a.numel() / (sorted(times)[len(times) // 2] / 1e3)


def check_context(weights: RankWeights, context: int) -> dict[str, Any]:
    """One context: against float64, a graph's replays, layers alone."""
    state = RankState(weights, context)
    step = PersistentStep(weights, state)
    found: dict[str, Any] = {"context": context, "blocks": step.blocks}
    result = check_step(step, weights, state)
    step.check()
    found["eager"] = result.to_dict()
    found["layer_errors"] = result.layer_errors
    state.reset()
    replay = capture(step, state)
    found["graph"] = check_step(step, weights, state, replay).to_dict()
    whole = step.h.clone()
    state.reset()
    h, equal = whole[0].clone(), True
    for index in range(len(weights.layers)):
        h = step.layers(index, index + 1, h)
        equal &= torch.equal(h, whole[index + 1])
    found["layers_alone_equal"] = equal
    # A run replaces rows of the sliding layers' rings, which later positions of it would have seen:
    # every run starts from the same caches.
    caches = [t.clone() for t in (*state.k, *state.v)]
    runs = []
    for _ in range(3):
        for cache, kept in zip((*state.k, *state.v), caches, strict=True):
            cache.copy_(kept)
        state.reset()
        tokens = []
        for _ in range(16):
            replay()
            tokens.append(state.next_token.clone())
        runs.append((torch.cat(tokens).tolist(), state.logits.clone(), int(state.position)))
    found["replays_equal"] = all(
        r[0] == runs[0][0] and torch.equal(r[1], runs[0][1]) for r in runs[1:]
    )
    found["tokens"] = runs[0][0]
    found["position_after"] = runs[0][2]
    step.check()
    return found


def check_bail_out(weights: RankWeights) -> dict[str, Any]:
    """A block's flag that says it is far behind: the step gives up, says so, and works again."""
    state = RankState(weights, 600)
    step = PersistentStep(weights, state, patience=0.2)
    step()
    step.check()
    state.reset()
    step._released[5] = -1000
    before = time.perf_counter()
    step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - before
    kept = int(state.position) == state.context
    try:
        step.check()
        said = ""
    except KernelError as error:
        said = str(error)
    state.reset()
    again = check_step(step, weights, state).worst
    step.check()
    return {"said": said, "seconds": seconds, "position_kept": kept, "error_after": again}


def check(arguments: argparse.Namespace) -> dict[str, Any]:
    """All of ``check``."""
    weights = RankWeights.random(resolve("beam-501b").config, 8, layers=arguments.layers)
    found: dict[str, Any] = {"layers": arguments.layers, "contexts": []}
    for context in arguments.contexts:
        one = check_context(weights, context)
        found["contexts"].append(one)
        print(json.dumps({k: v for k, v in one.items() if k != "tokens"}), flush=True)
    found["bail_out"] = check_bail_out(weights)
    print(json.dumps(found["bail_out"]), flush=True)
    found["right"] = bool(found["bail_out"]["said"]) and all(
        max(c["layer_errors"]) <= 1e-2
        and c["graph"]["expert_sets_unexplained"] == 0
        and c["layers_alone_equal"]
        and c["replays_equal"]
        for c in found["contexts"]
    )
    return found


def prototype_step(path: str, weights: RankWeights, position: int) -> Any:
    """The prototype's kernel on the same weights, with caches of its own."""
    spec = importlib.util.spec_from_file_location("prototype", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    layers = []
    for index, w in enumerate(weights.layers):
        cache = [torch.randn(position + 1, 128, device="cuda").bfloat16() for _ in range(2)]
        layers.append(
            {
                "full": int(w.full), "dense": int(w.dense), "wqkvg": w.qkvg, "wo": w.o_proj,
                "qn": w.qk_norm[0], "kn": w.qk_norm[1], "gb": w.gate_bias, "n_in": w.input_norm,
                "n_pa": w.post_attention_norm, "n_pf": w.pre_mlp_norm, "n_pm": w.post_mlp_norm,
                "kc": cache[0], "vc": cache[1], "wr": w.router, "rb": w.correction_bias,
                "w13": w.gate_up, "w2": w.down, "na": 2 * (index + 1), "nm": 2 * (index + 1) + 1,
            }
        )  # fmt: skip
    ends = {"head": weights.lm_head, "n_final": weights.norm, "h0": weights.embed[7].clone()}
    made = module.Mega(module.compile_kernel(), layers, ends, position)
    made()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made()
    return made, graph


def timed(arguments: argparse.Namespace) -> dict[str, Any]:
    """All of ``time``."""
    config = resolve("beam-501b").config
    started = time.perf_counter()
    weights = RankWeights.random(config, 8, layers=arguments.layers)
    torch.cuda.synchronize()
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
        "cuda": torch.version.cuda, "layers": len(weights.layers),
        "weights_seconds": time.perf_counter() - started, "copy_bytes_a_second": bandwidth(),
        "note": "no all-reduce on one GPU", "contexts": [],
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    torch.cuda.empty_cache()
    kept: list[Any] = []  # the prototype and its graph, alive while they are timed
    for context in arguments.contexts:
        state = RankState(weights, context, headroom=512)
        step = PersistentStep(weights, state, trace=False)
        replays = {"persistent": capture(step, state)}
        if context == arguments.contexts[0]:
            replays["traced"] = capture(PersistentStep(weights, state), state)
            replays["depth_free_3"] = capture(
                PersistentStep(weights, state, trace=False, depth_free=3), state
            )
            if arguments.prototype:
                kept.extend(prototype_step(arguments.prototype, weights, context))
                replays["prototype"] = kept[1].replay
        times = time_replays(replays, state, arguments.rounds)
        step.check()
        floor = weights.step_bytes() + weights.cache_bytes(context)
        row: dict[str, Any] = {"context": context, "floor_bytes": floor}
        row["floor_ms"] = floor / found["copy_bytes_a_second"] * 1e3
        for name, t in times.items():
            row[name] = {"median_ms": t.median * 1e3, "p10_ms": t.low * 1e3, "p90_ms": t.high * 1e3}
        row["of_floor"] = row["floor_ms"] / row["persistent"]["median_ms"]
        # Experts that many steps share would flatter the L2: count them.
        state.reset()
        chosen = []
        for _ in range(8):
            replays["persistent"]()
            chosen.append(state.expert_ids[-1, 0].tolist())
        row["last_layer_experts_of_8_steps"] = len({e for c in chosen for e in c})
        found["contexts"].append(row)
        print(json.dumps(row), flush=True)
        if context == arguments.contexts[0]:
            state.reset()
            traced = PersistentStep(weights, state)
            found["all_layers"] = check_step(traced, weights, state).to_dict()
            print(json.dumps(found["all_layers"]), flush=True)
            replays.clear()
            kept.clear()
            traced = None
        del state, step, replays
        torch.cuda.empty_cache()
    return found


def main() -> None:
    """Parse the command line, run, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("check", "time"))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--contexts", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--prototype")
    parser.add_argument("--out", required=True)
    a = parser.parse_args()
    if a.what == "check":
        a.layers = a.layers or 8
        a.contexts = a.contexts or [100, 4095, 40000]
    else:
        a.contexts = a.contexts or [4096, 1024, 32768, 131072, 1048576 - 512]
    try:
        found = check(a) if a.what == "check" else timed(a)
    except Exception:
        found = {"failed": traceback.format_exc()}
        print(found["failed"], flush=True)
    Path(a.out).write_text(json.dumps(found, indent=1, default=str) + "\n")
    if "failed" in found or not found.get("right", True):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
