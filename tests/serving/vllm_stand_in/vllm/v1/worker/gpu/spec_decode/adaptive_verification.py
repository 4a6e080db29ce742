"""Stand-in: a manager with the engine's rules, written plainly: every budget is tried in turn."""

from types import SimpleNamespace

import numpy as np
import torch


class AdaptiveVerificationManager:
    def __init__(self, req_states, query_start_loc, num_bonus_tokens, max_total_logits):
        self.req_states = req_states
        self.num_speculative_steps = req_states.num_speculative_steps
        self.num_bonus_tokens = num_bonus_tokens
        self._max_total_logits = max_total_logits
        self.cost_tables = None
        self._cudagraph_limit = 0
        self._batch_budget = None
        shape = (req_states.max_num_reqs, self.num_speculative_steps)
        self._confidence_probs = torch.ones(shape)
        self._batch_draft_capacity = torch.full((shape[0],), -7, dtype=torch.int32)
        self._stale_confidences = [SimpleNamespace(np=np.ones(shape, np.float32)) for _ in "ab"]
        self._stale_idx = 0

    def set_cost_curves(self, draft_curve, verify_curve):
        limit, tables = self._cudagraph_limit, []
        sizes = (self.req_states.max_num_reqs, self.req_states.max_num_batched_tokens)
        for curve, size in zip((draft_curve, verify_curve), sizes, strict=True):
            table = []
            for n in range(size + 1):
                above = [(x, ms) for x, ms in curve if x >= n]
                ms = (above[0] if above else curve[-1])[1]
                if n > curve[-1][0]:
                    (x1, ms1), (x2, ms2) = curve[-2:]
                    ms = ms2 + (ms2 - ms1) / (x2 - x1) * (n - x2)
                table.append(ms)
            tables.append(np.array(table))
        assert limit >= max(x for x, _ in (*draft_curve, *verify_curve))  # steps everywhere
        self.cost_tables = tuple(tables)

    def add_request(self, row):
        self._confidence_probs[row] = 1.0
        for each in self._stale_confidences:
            each.np[row] = 1.0

    def get_num_tokens(self, num_tokens_per_req, draft_tokens):
        states = self.req_states
        drafts = {r: len(draft_tokens.get(r, ())) for r in num_tokens_per_req}
        own = {r: n - drafts[r] for r, n in num_tokens_per_req.items()}
        likely, sampling = [], 0
        for r, n in own.items():
            row, product = states.req_id_to_index[r], 1.0
            sampling += states.num_computed_tokens_np[row] + n >= states.prefill_len.np[row]
            for k in range(drafts[r]):
                product *= float(self._stale_confidences[self._stale_idx].np[row, k])
                likely.append(product)
        likely.sort(reverse=True)
        room = max(0, self._max_total_logits - len(own) * self.num_bonus_tokens)
        draft_ms, verify_ms = self.cost_tables
        best, budget, gained = -1.0, 0, 0.0
        for b in range(min(len(likely), room) + 1):
            gained += likely[b - 1] if b else 0.0
            value = (sampling + gained) / (draft_ms[len(own)] + verify_ms[sum(own.values()) + b])
            if value > best:
                best, budget = value, b
        self._batch_budget = (drafts, own, budget)
        return sum(own.values()) + budget

    def reallocate_drafts(self, req_ids, idx_mapping):
        (drafts, _, budget), self._batch_budget = self._batch_budget, None
        slots = []
        for i, (r, row) in enumerate(zip(req_ids, idx_mapping.tolist(), strict=True)):
            product = 1.0
            for k in range(drafts[r]):
                product *= float(self._confidence_probs[row, k])
                slots.append((-product, k, i))
        admitted = [0] * len(req_ids)
        for _, _, i in sorted(slots)[:budget]:
            admitted[i] += 1
        self._batch_draft_capacity[: len(req_ids)] = torch.tensor(admitted, dtype=torch.int32)
        return torch.tensor(admitted), idx_mapping, budget

    def record_confidences(self, confidence_probs, input_batch):
        rows = input_batch.idx_mapping
        # What the last call copied is read from now on; what this one copies, from the next one.
        ready = self._stale_idx ^ 1
        self._stale_idx, write = ready, self._stale_idx
        self._confidence_probs[rows] = confidence_probs[: len(rows)]
        self._stale_confidences[write].np[:] = self._confidence_probs.numpy()
