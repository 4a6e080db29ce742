"""Stand-in: a batch, as the engine hands it from one stage to the next."""

from dataclasses import dataclass
from typing import Any


@dataclass
class InputBatch:
    req_ids: list[str]
    num_reqs: int
    idx_mapping: Any
    idx_mapping_np: Any
    num_scheduled_tokens: Any
    num_tokens: int
    num_draft_tokens_per_req: Any
    num_computed_tokens_np: Any
    prefill_len_np: Any
    is_prefilling_np: Any
