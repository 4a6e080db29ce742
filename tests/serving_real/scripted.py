"""A logits processor for the server under test: a request may say which tokens come out.

``beam-tiny`` writes Python and never learned to think or to call tools, so what the parsers are
to read is dictated, in ``vllm_xargs: {"script": "9,10,…"}``. Everything behind the sampled token is
the server's own.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class Scripted(AdapterLogitsProcessor):
    """Lets a request's script through, token by token, and everything after its end."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        text = (params.extra_args or {}).get("script")
        if text is None:
            return None
        script = [int(word) for word in str(text).split(",")]

        def dictate(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output_ids) < len(script):
                wanted = script[len(output_ids)]
                logits = torch.full_like(logits, float("-inf"))
                logits[wanted] = 0.0
            return logits

        return dictate
