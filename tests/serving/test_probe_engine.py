"""The probe on vLLM 0.33's own classes, on a CPU; skipped where that is not importable.

tests/engine/README.md says how to make an environment in which it is. The manager is made as
tests/engine/record_adaptive_vectors.py makes it: its functions are the engine's, its constructor
wants a GPU. The pass around them is played here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from workbench.serving.probe_read import read_probe

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data" / "engine_adaptive.json"

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not importable here", allow_module_level=True)

SCRIPT = r"""
import json, sys
from types import SimpleNamespace

import numpy as np
import torch
import vllm

from workbench.serving import probe

probe.register()
from vllm.v1.worker.gpu import model_runner  # installs the hooks
from vllm.v1.worker.gpu.spec_decode import adaptive_verification as engine
from workbench.serving.probe import fit

made = probe.active()
print(json.dumps({"version": vllm.__version__, "differences": fit.differences(vllm.__version__),
                  "on": bool(made and made.on)}), flush=True)
if made is None or not made.on:
    sys.exit(1)
engine.async_tensor_h2d = lambda values, out=None: out.copy_(torch.as_tensor(values))
engine._assign_draft_token_budget_compiled = engine._assign_draft_token_budget
document = json.loads(open(sys.argv[1]).read())
unit = document["unit"]


def case_manager(case, table):
    count, slots = len(case["drafted"]), len(case["stale"][0])
    manager = object.__new__(engine.AdaptiveVerificationManager)
    manager.num_speculative_steps, manager.num_bonus_tokens = slots, 1
    manager._max_total_logits, manager._batch_budget = case["most_rows"], None
    manager._cudagraph_limit = table["captured"]
    manager._copy_admitted_drafts_to_host = False
    held = np.array(case["stale"], np.float32) / unit
    manager._stale_confidences, manager._stale_idx = [SimpleNamespace(np=held)], 0
    manager._confidence_probs = torch.tensor(case["live"], dtype=torch.float32) / unit
    manager._batch_draft_capacity = torch.empty(count, dtype=torch.int32)
    manager._num_non_draft_tokens = torch.empty(count, dtype=torch.int32)
    manager._cu_num_logits = torch.empty(count + 1, dtype=torch.int32)
    manager.query_start_loc = torch.empty(count + 1, dtype=torch.int32)
    computed = np.full(count, 100, np.int64)
    prompt = np.array([100 if s and p == 1 else 100 + p + (not s)
                       for s, p in zip(case["samples"], case["plain"])])
    ids = [f"r{i}" for i in range(count)]
    manager.req_states = SimpleNamespace(
        max_num_reqs=count, max_num_batched_tokens=4096, num_speculative_steps=slots,
        req_id_to_index={name: i for i, name in enumerate(ids)}, num_computed_tokens_np=computed,
        prefill_len=SimpleNamespace(np=prompt),
        draft_tokens=torch.arange(count * slots).reshape(count, slots),
        total_len=SimpleNamespace(gpu=torch.full((count,), 101, dtype=torch.int32)),
    )
    return manager, ids, computed, prompt


class Runner(model_runner.GPUModelRunner):
    # The two halves of a pass around the engine's own decisions.
    def __init__(self, manager):
        self.adaptive_verification, self.req_states = manager, manager.req_states
        self.vllm_config = SimpleNamespace()
        self.execute_model_state = None


def play(case, table, record):
    manager, ids, computed, prompt = case_manager(case, table)
    engine.get_tp_group = lambda: SimpleNamespace(broadcast_object=lambda both, src: both)
    manager.set_cost_curves(
        [tuple(p) for p in table["draft_curve"]], [tuple(p) for p in table["verify_curve"]]
    )
    drafted, plain = case["drafted"], case["plain"]
    tokens = {r: n + d for r, n, d in zip(ids, plain, drafted)}
    runner = Runner(manager)
    if record:
        made._begin(runner, (SimpleNamespace(total_num_scheduled_tokens=1),), {})
    rows = manager.get_num_tokens(tokens, {r: [0] * d for r, d in zip(ids, drafted)})
    budget = manager.reallocate_drafts(ids, torch.arange(len(ids)))[2]
    admitted = manager._batch_draft_capacity.tolist()
    if record:
        runner.execute_model_state = SimpleNamespace(input_batch=SimpleNamespace(
            req_ids=ids, num_reqs=len(ids), idx_mapping_np=np.arange(len(ids)), num_tokens=rows,
            num_draft_tokens_per_req=np.array(drafted, np.int32),
            num_scheduled_tokens=np.array(list(tokens.values()), np.int32),
            num_computed_tokens_np=computed, prefill_len_np=prompt,
            is_prefilling_np=computed < prompt,
        ))
        made._before_sampling(runner)
        sampled = np.array(case["samples"], np.int32)
        made._sampled(runner, (), {}, SimpleNamespace(
            sampled_token_ids=np.full((len(ids), len(case["stale"][0]) + 1), 7),
            num_sampled_tokens_np=sampled, copy_event=None,
        ))
    return rows, budget, admitted


number = int(sys.argv[2])
case = document["decisions"][number]
table = document["tables"][case["table"]]
probed = play(case, table, True)
made.pause()
plain = play(case, table, False)
made.resume()
assert probed == plain
assert probed == (case["rows"], case["budget"], case["admitted"]) or case["tied"], probed
if made.why_off:
    sys.exit(made.why_off)
made.close()
"""


@pytest.mark.parametrize("number", [1, 3, 10])
def test_the_engines_own_decisions_are_recorded(tmp_path: Path, number: int) -> None:
    path = tmp_path / "run.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(DATA), str(number)],
        env=os.environ
        | {
            "BEAM_PROBE": str(path), "VLLM_TARGET_DEVICE": "cpu", "TRITON_INTERPRET": "1",
            "CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        },
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.stdout, done.stderr
    said = json.loads(done.stdout.splitlines()[0])
    assert said["differences"] == []
    assert said["on"]
    assert done.returncode == 0, done.stderr
    document = json.loads(DATA.read_text("utf-8"))
    case, unit = document["decisions"][number], document["unit"]
    run = read_probe(path)
    (step,), (passed,) = run.trace.steps, run.passes
    assert passed.budget == case["budget"]
    assert step.rows == case["rows"]
    assert passed.plain == sum(case["plain"])
    assert passed.sampling == sum(case["samples"])
    sampling = [row for row, samples in enumerate(case["samples"]) if samples]
    for row, part in zip(sampling, step.requests, strict=True):
        assert part.admitted == case["admitted"][row]
        count = case["drafted"][row]
        assert list(part.expected) == [c / unit for c in case["live"][row][:count]]
        assert list(part.stale) == [c / unit for c in case["stale"][row][:count]]
    assert step.objective
    assert run.tables is not None
    recorded = document["tables"][case["table"]]
    for name in ("draft_ms", "verify_ms"):
        looked_up = [getattr(run.tables, name)(size) for size in range(len(recorded[name]))]
        assert looked_up == recorded[name]
