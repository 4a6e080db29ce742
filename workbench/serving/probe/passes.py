"""``Pass``: what the probe holds of one pass of the engine until it is sent.

One pass is one ``execute_model`` and the ``sample_tokens`` behind it; the engine's worker runs them
in turn, however far its scheduler is ahead. What belongs together:

- the *drafts* verified in a pass, their *live* confidences and the lengths of the sequences were
  written by the pass before, and lie in the engine's buffers until this one drafts anew: they are
  copied between its forward and its sampling;
- the *budget* and the *stale* confidences (of the request's drafts before these) are of the
  manager's call in this pass, the *admitted* counts of its allocation in this pass;
- *sampled* tokens are what this pass's verdict gave: the accepted drafts and one more;
- the time of *drafting* is of the drafts that the next pass verifies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from workbench.serving.probe.frames import pack
from workbench.serving.probe.slots import Slot

End: TypeAlias = tuple[str, int | None, list[int]]


class Batch(NamedTuple):
    """The host's side of the engine's ``InputBatch``, R requests in the order of its rows.

    The engine makes these arrays anew for each pass and leaves them alone. Its tensors are not in
    here: a pass that waits must not keep the GPU's memory.
    """

    names: list[str]
    rows: Any  # persistent row of each request, [R]
    tokens: int  # rows of the forward
    drafted: Any  # [R], None where nothing was drafted
    scheduled: Any  # [R], drafts included
    computed: Any  # [R]
    prompt: Any  # [R]
    prefilling: Any  # bool [R]

    @classmethod
    def of(cls, batch: Any) -> Batch:
        """What is needed of an ``InputBatch``."""
        return cls(
            batch.req_ids,
            batch.idx_mapping_np,
            batch.num_tokens,
            batch.num_draft_tokens_per_req,
            batch.num_scheduled_tokens,
            batch.num_computed_tokens_np,
            batch.prefill_len_np,
            batch.is_prefilling_np,
        )


class Verdict(NamedTuple):
    """The host's side of the engine's ``AsyncOutput``: it is copied until ``copied`` is past."""

    tokens: Any  # [R, W]
    sampled: Any  # [R]
    copied: Any  # an event, or None


@dataclass(slots=True, kw_only=True)
class Pass:
    """A pass on its way. R requests, M persistent rows, K drafts.

    Attributes:
        number: of the pass since the probe began, from 0.
        at: seconds since the probe began.
        slot: what was copied from the device.
        batch, verdict: what the engine has of it on the host; None until then.
        budget: drafts that the manager wants verified; None where it was not asked.
        allocated: whether it has said who gets them.
        decide_seconds: the host's time in both.
        stale: float32 ``[M, K]``, as the manager saw them.
        most_drafts: the most that the rows of its logits leave room for.
        fitted: steps the estimator had learned from when ``slot.fit`` was copied; None if it was
            not.
        dropped: passes lost until now.
        ends: of the requests that are new: name, length it ends at, tokens it ends with.
    """

    number: int
    at: float
    slot: Slot
    batch: Batch | None = None
    verdict: Verdict | None = None
    budget: int | None = None
    allocated: bool = False
    decide_seconds: float = 0.0
    stale: Any = None
    most_drafts: int = 0
    fitted: int | None = None
    dropped: int = 0
    ends: tuple[End, ...] = ()

    def done(self) -> bool:
        """Whether everything has arrived on the host, asked without waiting."""
        copied = self.verdict.copied if self.verdict is not None else None
        return self.slot.done() and (copied is None or bool(copied.query()))

    def frame(self, seconds: tuple[float, float, float]) -> bytes:
        """What is sent of it, as it lies in memory: the engine waits for whoever makes this.

        Args:
            seconds: of :meth:`Slot.seconds`.
        """
        batch, verdict = self.batch, self.verdict
        assert batch is not None  # for the type checker: it is done
        assert verdict is not None
        decided = self.budget is not None and self.allocated
        values = {
            "what": "pass",
            "number": self.number,
            "at": self.at,
            "seconds": seconds,
            "decide_seconds": self.decide_seconds,
            "rows": int(batch.tokens),
            "budget": self.budget if decided else None,
            "most_drafts": self.most_drafts,
            "slots": self.slot.drafts.shape[1],
            "width": verdict.tokens.shape[1],
            "names": batch.names,
            "fitted": self.fitted,
            "dropped": self.dropped,
            "ends": self.ends,
        }
        arrays = {
            "row": _sent(batch.rows, np.int64),
            "scheduled": _sent(batch.scheduled, np.int32),
            "computed": _sent(batch.computed, np.int32),
            "prompt": _sent(batch.prompt, np.int32),
            "prefilling": _sent(batch.prefilling, np.bool_),
            "sampled": _sent(verdict.sampled, np.int32),
            "tokens": _sent(verdict.tokens, np.int64),
            "lengths": _sent(self.slot.lengths, np.int32),
            "drafts": _sent(self.slot.drafts, np.int64),
        }
        if batch.drafted is not None:
            arrays["drafted"] = _sent(batch.drafted, np.int32)
        if decided:
            arrays["admitted"] = _sent(self.slot.admitted, np.int32)
            arrays["live"] = _sent(self.slot.live, np.float32)
            arrays["stale"] = _sent(self.stale, np.float32)
        if self.fitted is not None:
            arrays["fit"] = _sent(self.slot.fit, np.float32)
        return pack(values, arrays)


_KINDS = {np.int32: "i", np.int64: "q", np.float32: "f", np.bool_: "?"}


def _sent(values: Any, dtype: Any) -> tuple[str, bytes]:
    if values.dtype != dtype:
        values = values.astype(dtype)
    return _KINDS[dtype], values.tobytes()
