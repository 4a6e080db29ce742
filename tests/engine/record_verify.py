"""Record verdicts of vLLM's own rejection sampler on a CPU, as a fixture for ordinary tests.

Run with the python of the environment that README.md beside this file describes:

    python tests/engine/record_verify.py        # writes tests/data/engine_verify.json

The engine's `rejection_sample` runs unchanged, its Triton kernels in Triton's interpreter. Two of
the functions it calls are wrapped to write down what passes through them and nothing more: the
uniform number of each draft that was tested, and the weights that the last token is drawn from. The
engine draws that token with Gumbel noise, the workbench by inverse CDF, so that its distribution is
recorded beside the token. Only `log1p` is replaced: the interpreter lacks it.
"""

import argparse
import json
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Each must be set before vllm or triton is first imported.
os.environ["VLLM_TARGET_DEVICE"] = "cpu"
os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # an empty list makes vllm keep the real triton
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch

DATA = Path(__file__).resolve().parents[2] / "tests" / "data" / "engine_verify.json"
B, N, V, K = 36, 5, 24, 4


def inputs(generator: torch.Generator) -> dict[str, Any]:
    """Numbers of few digits, so that the file holds exactly what the engine was given."""
    logits = (torch.randn(B, N + 1, V, generator=generator) * 4).mul(16).round() / 16
    temperature = torch.tensor([0.5, 0.75, 1.0, 1.5]).repeat(B // 4)
    # A drafter that is often right: near the target's logits, on its best K of noisy ones.
    noise = torch.randn(B, N, V, generator=generator) * 0.7
    near = logits[:, :N] * temperature[:, None, None] + noise
    scores, ids = (near.mul(16).round() / 16).topk(K)
    q = (scores / temperature[:, None, None]).softmax(-1)
    column = torch.multinomial(q.flatten(0, 1), 1, generator=generator).view(B, N, 1)
    drafts = ids.gather(2, column)[..., 0]
    drafts[torch.rand(B, N, generator=generator) < 0.04] = -1
    admitted = torch.randint(1, N + 1, (B,), generator=generator)
    admitted[:2] = torch.tensor([0, N])
    return {
        "logits": logits,
        "candidates": ids,
        "scores": scores,
        "temperature": temperature,
        "drafts": drafts,
        "admitted": admitted,
    }


def engine_verdicts(
    case: dict[str, Any], block: bool, sparse: bool, greedy: bool
) -> dict[str, Any]:
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils as engine

    uniforms: dict[int, float] = {}
    weights: dict[int, list[float]] = {}
    rand, resample = engine.tl_rand32, engine._seeded_resample_argmax

    def noted_rand(seed: Any, pos: Any, includes_zero: bool) -> Any:
        u = rand(seed, pos, includes_zero=includes_zero)
        uniforms[int(pos.handle.data.item())] = float(u.handle.data.item())
        return u

    def noted_resample(
        residual: Any, token_block: Any, mask: Any, row: Any, *rest: Any, **more: Any
    ):
        seen = residual.handle.data[:V].astype(np.float64)
        shares = np.exp(seen - seen.max())
        weights[int(row.handle.data.item())] = (shares / shares.sum()).tolist()
        return resample(residual, token_block, mask, row, *rest, **more)

    rows = (case["admitted"] + 1).tolist()
    starts = [0, *np.cumsum(rows).tolist()]
    total = starts[-1]
    draft_logits = torch.full((B, N, V), -torch.inf).scatter_(2, case["candidates"], case["scores"])
    engine.tl_rand32, engine._seeded_resample_argmax = noted_rand, noted_resample
    try:
        sampled, count = engine.rejection_sample(
            torch.cat([case["logits"][b, :n] for b, n in enumerate(rows)]).contiguous(),
            draft_logits if sparse else None,
            # Row 0 of a request is the token before its drafts, which the sampler does not read.
            torch.cat(
                [
                    torch.cat((torch.zeros(1).long(), case["drafts"][b, : n - 1]))
                    for b, n in enumerate(rows)
                ]
            ),
            torch.tensor(starts, dtype=torch.int32),
            torch.arange(total),  # positions: the row's number, by which the notes are found again
            torch.arange(B, dtype=torch.int32),
            torch.repeat_interleave(torch.arange(B, dtype=torch.int32), torch.tensor(rows)),
            torch.cat([torch.arange(n, dtype=torch.int32) for n in rows]),
            case["temperature"] * (0.0 if greedy else 1.0),
            torch.arange(B, dtype=torch.int64) + 7,
            N,
            use_block_verification=block,
        )
    finally:
        engine.tl_rand32, engine._seeded_resample_argmax = rand, resample
    accepted = [n - 1 for n in count.tolist()]
    return {
        "method": "greedy" if greedy else "block" if block else "standard",
        "proposals": "sparse" if sparse else "one-hot",
        "u": [
            [uniforms.get(s + i) for i in range(n - 1)] for s, n in zip(starts, rows, strict=False)
        ],
        "accepted": accepted,
        "token": [int(sampled[b, n]) for b, n in enumerate(accepted)],
        "emitted": [sampled[b, : n + 1].tolist() for b, n in enumerate(accepted)],
        "weights": None
        if greedy
        else [
            [round(w, 7) for w in weights[s + n]] for s, n in zip(starts, accepted, strict=False)
        ],
    }


def main() -> None:
    """Command line; writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=DATA, metavar="FILE")
    output = parser.parse_args().output
    import triton.language as tl
    from triton.runtime import interpreter
    from vllm.triton_utils import tldevice

    def log1p(x: Any) -> Any:
        data = np.log1p(x.handle.data).astype(x.handle.data.dtype)
        return tl.core.tensor(interpreter.TensorHandle(data, x.handle.dtype), x.type)

    tldevice.log1p = log1p
    case = inputs(torch.Generator().manual_seed(5))
    verdicts = [
        engine_verdicts(case, block, sparse, greedy=False)
        for block in (False, True)
        for sparse in (False, True)
    ]
    verdicts.append(engine_verdicts(case, block=False, sparse=False, greedy=True))
    document = {
        "about": "verdicts of the engine's rejection_sample, see tests/engine/record_verify.py",
        "called": "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils.rejection_sample",
        "versions": {name: version(name) for name in ("vllm", "torch", "triton", "numpy")},
        "hardware": f"CPU, {platform.machine()}, Triton's interpreter",
        "recorded_on": datetime.now(UTC).date().isoformat(),
        "inputs": {name: tensor.tolist() for name, tensor in case.items()},
        "verdicts": verdicts,
    }
    output.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")
    for v in verdicts:
        print(v["method"], v["proposals"], "accepted", v["accepted"])
    print(f"{output.name}: {output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
