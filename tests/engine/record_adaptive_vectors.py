"""Record what vLLM's adaptive verification decides and learns on a CPU, for ordinary tests.

Run with the python of the environment that README.md beside this file describes:

    python tests/engine/record_adaptive_vectors.py    # writes tests/data/engine_adaptive.json

Cost tables, budgets and allocations are the engine's own functions. Its manager needs a GPU to be
made; here it gets the few attributes that its budget reads, and no constructor. The allocation is
the function that the engine compiles, not compiled. The estimator runs whole, its Triton kernels in
Triton's interpreter.

Numbers that go in are written down exactly: confidences as multiples of 2**-20, scores of 1/8.
"""

import argparse
import json
import math
import os
import platform
import random
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Each must be set before vllm or triton is first imported.
os.environ["VLLM_TARGET_DEVICE"] = "cpu"
os.environ["TRITON_INTERPRET"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # an empty list makes vllm keep the real triton
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch

DATA = Path(__file__).resolve().parents[2] / "tests" / "data" / "engine_adaptive.json"
UNIT = 1 << 20  # of a confidence
ROWS = 280  # largest size of a recorded table

# name, draft curve, verify curve, largest captured size
CURVES: list[tuple[str, list[tuple[int, float]], list[tuple[int, float]], int]] = [
    (
        "graphs, then none",
        [(1, 0.5), (2, 0.5625), (4, 0.625), (8, 0.75), (16, 1.0), (32, 1.5), (64, 2.25)],
        [
            *((1, 5.0), (2, 5.125), (4, 5.25), (8, 5.5), (16, 6.0), (24, 7.5), (32, 7.75)),
            *((40, 9.0), (48, 9.5), (64, 11.25), (96, 16.0), (128, 20.5), (256, 47.0)),
        ],
        64,
    ),
    (
        "falls in places",
        [(1, 0.75), (4, 0.5), (8, 1.0)],
        [(8, 4.0), (16, 3.5), (32, 6.25), (64, 6.0), (128, 9.0), (192, 8.5), (250, 12.0)],
        32,
    ),
    ("captured to the end", [(8, 1.0), (16, 1.0)], [(16, 3.0), (64, 4.5), (200, 9.25)], 200),
    ("no captured size", [(1, 0.25), (8, 0.5)], [(1, 2.0), (8, 3.0), (32, 7.0), (128, 20.0)], 0),
    ("one point each", [(4, 0.5)], [(16, 3.25)], 16),
    ("free", [(1, 0.0), (8, 0.0)], [(1, 0.0), (8, 0.0), (16, 1.0)], 8),
]

# table, requests, slots, most rows of logits, how confident, mixed with prefill
CASES: list[tuple[int, int, int, int, float, bool]] = [
    (0, 1, 7, 1 << 12, 0.8, False),
    (0, 4, 7, 1 << 12, 0.7, True),
    (0, 12, 7, 1 << 12, 0.85, True),
    (0, 12, 7, 40, 0.9, False),
    (0, 12, 7, 12, 0.9, False),
    (0, 30, 5, 1 << 12, 0.6, False),
    (0, 128, 1, 1 << 12, 0.7, False),
    (1, 6, 4, 1 << 12, 0.75, True),
    (1, 16, 6, 1 << 12, 0.5, False),
    (1, 32, 7, 1 << 12, 0.9, False),
    (1, 32, 7, 1 << 12, 0.3, True),
    (2, 9, 3, 1 << 12, 0.8, True),
    (2, 20, 7, 90, 0.8, False),
    (3, 10, 7, 1 << 12, 0.8, True),
    (3, 24, 7, 1 << 12, 0.7, False),
    (4, 5, 3, 1 << 12, 0.6, False),
    (5, 8, 2, 1 << 12, 0.6, False),
    (0, 10, 5, 1 << 12, 1.0, False),  # all new: confidences of 1, ties everywhere
]
R, K, C = 6, 4, 5  # of the estimator
BATCHES, ROUNDS = 10, 5
TEMPERATURES = (0.0, 0.5, 1.0, 1.5)


def tables() -> list[dict[str, Any]]:
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as engine

    found = []
    for name, draft, verify, captured in CURVES:
        d, v = engine.build_cost_tables_from_curves(draft, verify, 128, ROWS, captured)
        found.append(
            {"name": name, "draft_curve": draft, "verify_curve": verify, "captured": captured}
            | {"draft_ms": d.tolist(), "verify_ms": v.tolist()}
        )
    return found


def decision(rng: random.Random, case: tuple[int, int, int, int, float, bool]) -> dict[str, Any]:
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as engine

    table, requests, slots, most_rows, level, mixed = case
    _, draft_curve, verify_curve, captured = CURVES[table]
    tied = level == 1.0

    def confidences() -> list[list[int]]:
        if tied:
            return [[UNIT] * slots for _ in range(requests)]
        spread = 6
        return [
            [
                int(UNIT * rng.betavariate(spread * level, spread * (1 - level)))
                for _ in range(slots)
            ]
            for _ in range(requests)
        ]

    stale, live = confidences(), confidences()
    drafted = [slots if rng.random() < 0.8 else rng.randrange(slots + 1) for _ in range(requests)]
    plain, samples = [1] * requests, [True] * requests
    if mixed:  # the last request still reads its prompt, the one before it ends doing so
        drafted[-2:], plain[-2:] = [0, 0], [17, 6]
        samples[-1] = False
    ids = [f"r{i}" for i in range(requests)]
    # A persistent index that is not the row: the engine looks confidences up by it.
    index = rng.sample(range(requests + 3), requests)

    manager = object.__new__(engine.AdaptiveVerificationManager)
    manager.num_speculative_steps = slots
    manager.num_bonus_tokens = 1
    manager._max_total_logits = most_rows
    manager._batch_budget = None
    manager.cost_tables = engine.build_cost_tables_from_curves(
        draft_curve, verify_curve, 128, 4096, captured
    )
    held = np.full((requests + 3, slots), 0.5, np.float32)
    held[index] = np.array(stale) / UNIT
    manager._stale_confidences = [SimpleNamespace(np=held)]
    manager._stale_idx = 0
    computed = np.zeros(requests + 3, np.int64)
    prompt = np.zeros(requests + 3, np.int64)
    for i, at in enumerate(index):
        computed[at] = 100
        prompt[at] = 100 if samples[i] and plain[i] == 1 else 100 + plain[i] + (not samples[i])
    manager.req_states = SimpleNamespace(
        req_id_to_index=dict(zip(ids, index, strict=True)),
        num_computed_tokens_np=computed,
        prefill_len=SimpleNamespace(np=prompt),
    )
    rows = manager.get_num_tokens(
        {i: n + d for i, n, d in zip(ids, plain, drafted, strict=True)},
        {i: [0] * d for i, d in zip(ids, drafted, strict=True)},
    )
    budget = manager._batch_budget[2]
    # As reallocate_drafts does around the function that it compiles.
    admitted = torch.tensor(drafted, dtype=torch.int32)
    if budget == 0:
        admitted.zero_()
    elif budget < sum(drafted):
        probabilities = torch.full((requests + 3, slots), 0.5)
        probabilities[index] = torch.tensor(live) / UNIT
        engine._assign_draft_token_budget(
            probabilities, torch.tensor(index), admitted, budget, slots
        )
        border = sorted(
            (
                math.prod(row[: k + 1]) / UNIT ** (k + 1)
                for row, d in zip(live, drafted, strict=True)
                for k in range(d)
            ),
            reverse=True,
        )
        apart = border[budget - 1] - border[budget]
        assert tied or apart > 1e-6 * border[budget], "a tie at the border: take another seed"
    return {
        "table": table,
        "drafted": drafted,
        "plain": plain,
        "samples": [int(s) for s in samples],
        "most_rows": most_rows,
        "tied": tied,
        "stale": stale,
        "live": live,
        "rows": rows,
        "budget": budget,
        "admitted": admitted.tolist(),
    }


def digits(values: torch.Tensor) -> Any:
    """As lists, each number with the nine digits that tell a float32 from all others."""
    return json.loads(
        json.dumps(values.tolist()), parse_float=lambda text: float(f"{float(text):.9g}")
    )


def estimator(rng: random.Random) -> dict[str, Any]:
    """Rounds of verdicts drawn from a known model; the later ones from its opposite."""
    from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

    scores = torch.tensor(
        [
            [
                [[round(rng.gauss(0, 2.5) * 8) / 8 for _ in range(C)] for _ in range(K)]
                for _ in range(R)
            ]
            for _ in range(BATCHES)
        ]
    )
    temperature = torch.tensor([TEMPERATURES[r % len(TEMPERATURES)] for r in range(R)])
    # One slot is certain, so that its feature is at the limit, and one knows nothing at all.
    scores[0, 0, 0] = torch.tensor([64.0, 0.0, 0.0, 0.0, 0.0])
    scores[1, 3, 2] = torch.tensor([3.0, 3.0, 3.0, 3.0, 3.0])
    engine = OnlineAcceptanceEstimator(R, K, torch.device("cpu"))
    rows = torch.arange(R, dtype=torch.int32)
    document: dict[str, Any] = {"slots": K, "temperature": temperature.tolist()}
    document["scores"] = scores.tolist()
    document["rounds"] = []

    def propose(batch: int) -> None:
        for k in range(K):
            engine.predict(
                scores[batch, :, k].contiguous(), rows, torch.tensor(k), confidences, temperature
            )

    confidences = torch.zeros(R, K)
    features = []
    for number in range(ROUNDS):
        predictions, verdicts = [], []
        for batch in range(BATCHES):
            propose(batch)
            assert torch.equal(confidences, engine.predictions)
            predictions.append(digits(engine.predictions))
            if number == 0:
                features.append(digits(engine.features))
        for step in range(engine.REFIT_INTERVAL):
            propose(step % BATCHES)
            admitted = [rng.choice((0, 1, 2, 3, 4, 4, 4)) for _ in range(R)]
            accepted = []
            for r, m in enumerate(admitted):
                a = 0
                while a < m:
                    odds = 0.8 * float(engine.features[r, a]) + (0.5, 0.0, -0.5, -1.0)[a]
                    if rng.random() >= 1 / (1 + math.exp(-odds if number < 3 else odds)):
                        break
                    a += 1
                accepted.append(a)
            verdicts.append(["".join(map(str, accepted)), "".join(map(str, admitted))])
            # A request that drafted nothing may also have sampled nothing.
            sampled = [
                0 if m == 0 and r == 5 else a + 1
                for r, (a, m) in enumerate(zip(accepted, admitted, strict=True))
            ]
            engine.step(
                rows,
                torch.tensor(sampled, dtype=torch.int32),
                torch.tensor(admitted, dtype=torch.int32)
                - torch.tensor(accepted, dtype=torch.int32),
            )
        document["rounds"].append(
            {
                "predictions": predictions,
                "verdicts": verdicts,
                "slope": digits(engine.slope)[0],
                "intercepts": digits(engine.intercepts),
            }
        )
    document["features"] = features
    return document


def main() -> None:
    """Command line; writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=DATA, metavar="FILE")
    output = parser.parse_args().output
    rng = random.Random(7)
    document = {
        "about": "the engine's cost tables, budgets, admitted drafts and estimator, "
        "see tests/engine/record_adaptive_vectors.py",
        "called": "vllm.v1.worker.gpu.spec_decode.adaptive_verification and acceptance_estimator",
        "versions": {name: version(name) for name in ("vllm", "torch", "triton", "numpy")},
        "hardware": f"CPU, {platform.machine()}, Triton's interpreter",
        "recorded_on": datetime.now(UTC).date().isoformat(),
        "unit": UNIT,
        "tables": tables(),
        "decisions": [decision(rng, case) for case in CASES],
        "estimator": estimator(rng),
    }
    output.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{output.name}: {output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
