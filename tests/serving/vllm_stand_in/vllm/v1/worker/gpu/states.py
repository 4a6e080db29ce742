"""Stand-in: what the engine keeps of each request, by persistent row."""

from types import SimpleNamespace

import numpy as np
import torch


class RequestState:
    def __init__(
        self,
        max_num_reqs,
        max_model_len,
        max_num_batched_tokens,
        num_speculative_steps,
        vocab_size,
        device,
        num_prefill_lookahead=1,
    ):
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.num_speculative_steps = num_speculative_steps
        self.vocab_size = vocab_size
        self.device = device
        self.req_id_to_index = {}
        self.free_indices = list(range(max_num_reqs))
        self.prefill_len = SimpleNamespace(np=np.zeros(max_num_reqs, np.int32))
        self.num_computed_tokens_np = np.zeros(max_num_reqs, np.int32)
        self.total_len = SimpleNamespace(gpu=torch.zeros(max_num_reqs, dtype=torch.int32))
        self.draft_tokens = torch.zeros(max_num_reqs, num_speculative_steps, dtype=torch.int64)

    def add_request(self, req_id, length):
        row = self.free_indices.pop()
        self.req_id_to_index[req_id] = row
        self.prefill_len.np[row] = length
        self.num_computed_tokens_np[row] = 0
        self.total_len.gpu[row] = length
        self.draft_tokens[row].zero_()
        return row

    def remove_request(self, req_id):
        self.free_indices.append(self.req_id_to_index.pop(req_id))
