"""Decode speed on a CPU: beam-tiny against Hugging Face's Qwen3-MoE of the same sizes.

Both decode greedily, one sequence, float32, the same number of threads, one token a step over a KV
cache, in one process and in alternating rounds; the medians over the rounds are compared. The peer
is called step by step (without ``generate``'s own overhead). Also printed: what a forward of 8 rows
costs against a forward of one row, which decides whether speculation can pay.

    python benchmarks/cpu_decode.py [--threads 2] [--tokens 96] [--rounds 7] [--json FILE]

Needs ``transformers`` (``pip install -e '.[bench]'``). Its last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

import workbench
from workbench.model.beam import Beam

PROMPT = 128


def beam_round(beam: Beam, prompt: torch.Tensor, tokens: int) -> float:
    """Seconds a token over ``tokens`` greedy decode steps after a prefill."""
    cache = beam.new_cache()
    logits = beam.logits(beam.extend(cache, prompt, [len(prompt)])[-1:])
    begun = time.perf_counter()
    for _ in range(tokens):
        logits = beam.logits(beam.extend(cache, logits.argmax(-1), [1]))
    return (time.perf_counter() - begun) / tokens


def rows_round(beam: Beam, prompt: torch.Tensor, rows: int, repeats: int) -> float:
    """Seconds a forward of ``rows`` tokens after a prefill, rolled back each time."""
    cache = beam.new_cache()
    beam.extend(cache, prompt, [len(prompt)])
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        beam.logits(beam.extend(cache, prompt[:rows], [rows]))
        times.append(time.perf_counter() - begun)
        cache.truncate(0, len(prompt))
    return statistics.median(times)


def qwen_like(beam: Beam) -> torch.nn.Module:
    """Qwen3-MoE with beam-tiny's sizes (its MLPs are all sparse, its attention has no gate)."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    c = beam.config
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        moe_intermediate_size=c.moe_intermediate_size,
        num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        num_experts=c.num_experts,
        num_experts_per_tok=c.num_experts_per_tok,
        norm_topk_prob=c.norm_topk_prob,
        max_position_embeddings=c.max_position_embeddings,
        mlp_only_layers=[i for i in range(c.num_hidden_layers) if not c.is_sparse(i)],
        tie_word_embeddings=False,
    )
    return Qwen3MoeForCausalLM(config).eval()


def qwen_round(model: torch.nn.Module, prompt: torch.Tensor, tokens: int) -> float:
    """As :func:`beam_round`, through the model's own cache."""
    out = model(input_ids=prompt[None], use_cache=True)
    begun = time.perf_counter()
    for _ in range(tokens):
        token = out.logits[:, -1:].argmax(-1)
        out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
    return (time.perf_counter() - begun) / tokens


def main() -> None:
    """Run, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    beam = workbench.load("beam-tiny", device="cpu", dtype=torch.float32)
    qwen = qwen_like(beam)
    prompt = torch.randint(16, 4096, (PROMPT,), generator=torch.Generator().manual_seed(0))
    sides: dict[str, Callable[[], float]] = {
        "beam-tiny": lambda: beam_round(beam, prompt, args.tokens),
        "qwen3-moe": lambda: qwen_round(qwen, prompt, args.tokens),
        "1 row": lambda: rows_round(beam, prompt, 1, args.tokens),
        "8 rows": lambda: rows_round(beam, prompt, 8, args.tokens),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    with torch.inference_mode():
        for side in sides.values():  # warm-up, not counted
            side()
        for _ in range(args.rounds):
            for name, side in sides.items():
                seconds[name].append(side())
    median = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        print(
            f"{name:10} {median[name] * 1e3:7.2f} ms  ({min(values) * 1e3:.2f} … "
            f"{max(values) * 1e3:.2f})  {1 / median[name]:7.1f} a second"
        )
    result = {
        "tokens_per_second": {n: round(1 / median[n], 1) for n in ("beam-tiny", "qwen3-moe")},
        "ratio_to_qwen3_moe": round(median["qwen3-moe"] / median["beam-tiny"], 2),
        "milliseconds": {n: round(m * 1e3, 3) for n, m in median.items()},
        "rows_8_over_1": round(median["8 rows"] / median["1 row"], 3),
        "parameters": {
            "beam-tiny": sum(p.numel() for p in beam.parameters()),
            "qwen3-moe": sum(p.numel() for p in qwen.parameters()),
        },
        "threads": args.threads,
        "hardware": workbench.machine().to_dict()["cpu"],
        "versions": {n: version(n) for n in ("torch", "transformers")},
        "date": date.today().isoformat(),
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
