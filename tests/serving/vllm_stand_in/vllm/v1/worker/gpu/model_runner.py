"""Stand-in: one worker's passes, in the engine's order, with verdicts drawn at random."""

from typing import Any, NamedTuple

import numpy as np
import torch

from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager
from vllm.v1.worker.gpu.states import RequestState


class ExecuteModelState(NamedTuple):
    input_batch: InputBatch
    attn_metadata: Any = None


class Clock:
    now = 0


class GPUModelRunner:
    def __init__(self, vllm_config, device):
        self.vllm_config = vllm_config
        asked = vllm_config.stand_in
        self.drafts = vllm_config.speculative_config.num_speculative_tokens
        self.req_states = RequestState(
            asked.requests, 4096, asked.tokens, self.drafts, 1000, torch.device("cpu")
        )
        self.adaptive_verification = None
        if asked.adaptive:
            self.adaptive_verification = AdaptiveVerificationManager(
                self.req_states, None, 1, asked.logits
            )
        self.estimator = OnlineAcceptanceEstimator(asked.requests, self.drafts, device)
        self.execute_model_state = None
        self.lag = asked.lag
        self.main_stream = Clock()
        self.generator = torch.Generator().manual_seed(asked.seed)
        self.truth = []

    def rand(self, *shape):
        # Of 2**-20 each, so that every number is a float32.
        return torch.randint(1, 1 << 20, shape, generator=self.generator) / (1 << 20)

    def ids(self, *shape):
        return torch.randint(3, 1000, shape, generator=self.generator)

    def execute_model(
        self, scheduler_output, intermediate_tensors=None, dummy_run=False, is_profile=False
    ):
        self.main_stream.now += 1
        if dummy_run:
            return None
        states, manager = self.req_states, self.adaptive_verification
        for name in scheduler_output.finished_req_ids:
            states.remove_request(name)
        for name, length in scheduler_output.scheduled_new_reqs:
            row = states.add_request(name, length)
            if manager is not None:
                manager.add_request(row)
        if scheduler_output.total_num_scheduled_tokens == 0:
            return "nothing to run"
        tokens, drafts = (
            scheduler_output.num_scheduled_tokens,
            scheduler_output.scheduled_spec_decode_tokens,
        )
        total = sum(tokens.values())
        if manager is not None and drafts:
            total = manager.get_num_tokens(tokens, drafts)
        budget = manager._batch_budget[2] if manager is not None and drafts else None
        names = sorted(tokens, key=lambda r: (not drafts.get(r), tokens[r], r))
        rows = np.array([states.req_id_to_index[r] for r in names])
        counts = np.array([len(drafts.get(r, ())) for r in names], np.int32)
        admitted = counts.tolist()
        if budget is not None:
            admitted = manager.reallocate_drafts(names, torch.tensor(rows))[0].tolist()
        prefilling = states.num_computed_tokens_np[rows] < states.prefill_len.np[rows]
        batch = InputBatch(
            req_ids=names,
            num_reqs=len(names),
            idx_mapping=torch.tensor(rows),
            idx_mapping_np=rows,
            num_scheduled_tokens=np.array([tokens[r] for r in names], np.int32),
            num_tokens=total,
            num_draft_tokens_per_req=counts if drafts else None,
            num_computed_tokens_np=states.num_computed_tokens_np[rows],
            prefill_len_np=states.prefill_len.np[rows],
            is_prefilling_np=prefilling,
        )
        self.execute_model_state = ExecuteModelState(batch)
        seen = {"rows": total, "budget": budget, "requests": {}}
        for i, (r, row) in enumerate(zip(names, rows.tolist(), strict=True)):
            said = [] if budget is None else manager._confidence_probs[row].tolist()
            stale = (
                []
                if budget is None
                else manager._stale_confidences[manager._stale_idx].np[row].tolist()
            )
            n = len(drafts.get(r, ()))
            seen["requests"][r] = {
                "position": int(states.total_len.gpu[row]),
                "own": tokens[r] - n,
                "samples": bool(batch.num_computed_tokens_np[i] + tokens[r] - n
                                >= batch.prefill_len_np[i]),
                "prefilling": bool(prefilling[i]),
                "drafted": states.draft_tokens[row, :n].tolist(),
                "expected": said[:n],
                "stale": stale[:n],
                "admitted": admitted[i],
            }  # fmt: skip
        self.truth.append(seen)
        return None

    def sample_tokens(self, grammar_output):
        if self.execute_model_state is None:
            return None
        batch, self.execute_model_state = self.execute_model_state.input_batch, None
        seen = self.truth[-1]["requests"]
        states, count = self.req_states, batch.num_reqs
        tokens = self.ids(count, self.drafts + 1)
        sampled = torch.zeros(count, dtype=torch.int32)
        rejected = torch.zeros(count, dtype=torch.int32)
        for i, r in enumerate(batch.req_ids):
            accepted = 0
            while accepted < seen[r]["admitted"] and float(self.rand(1)) < 0.7:
                accepted += 1
            sampled[i] = accepted + 1 if seen[r]["samples"] else 0
            rejected[i] = seen[r]["admitted"] - accepted
            seen[r]["tokens"] = tokens[i, : int(sampled[i])].tolist()
            row = int(batch.idx_mapping_np[i])
            states.num_computed_tokens_np[row] += seen[r]["own"] + accepted
            states.total_len.gpu[row] += int(sampled[i])
        output = AsyncOutput(None, tokens, sampled, self.main_stream, self.lag)
        self.estimator.step(batch.idx_mapping, sampled, rejected)
        self.truth[-1]["fit"] = [float(self.estimator.slope), *self.estimator.intercepts.tolist()]
        # Drafting: new ids and confidences in the same buffers.
        states.draft_tokens[batch.idx_mapping] = self.ids(count, self.drafts)
        if self.adaptive_verification is not None:
            self.adaptive_verification.record_confidences(self.rand(count, self.drafts), batch)
        return output
