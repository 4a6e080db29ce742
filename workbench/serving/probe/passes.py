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

import struct
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from workbench.serving.probe.frames import dumped, framed
from workbench.serving.probe.slots import Slot

End: TypeAlias = tuple[str, int | None, list[int]]


@dataclass(slots=True)
class Pass:
    """A pass on its way. R requests, M persistent rows, K drafts.

    The engine's own arrays are kept, not copied: it makes them anew for each pass and leaves them
    alone. Its tensors are not: a pass that waits must not keep the GPU's memory.

    Attributes:
        number: of the pass since the probe began, from 0.
        at: seconds since the probe began.
        slot: what was copied from the device.
        dropped: passes lost until now.
        ends: of the requests that are new: name, length it ends at, tokens it ends with.
        names: of the requests, in the order of the batch's rows; None until they are known, and
            then so is what follows.
        rows: persistent row of each request, [R].
        tokens: rows of the forward.
        drafted: [R], None where nothing was drafted.
        scheduled: [R], drafts included.
        computed, prompt, prefilling: [R], the last one bool.
        budget: drafts that the manager wants verified; None where it was not asked.
        allocated: whether it has said who gets them.
        decide_seconds: the host's time in both.
        stale: float32 ``[M, K]``, as the manager saw them.
        most_drafts: the most that the rows of its logits leave room for.
        fitted: steps the estimator had learned from when ``slot.fit`` was copied; None if it was
            not.
        ids: tokens that were sampled, ``[R, W]``; copied to the host until ``copied`` is past.
        sampled: how many of them, [R]; likewise.
        copied: an event, or None.
    """

    number: int
    at: float
    slot: Slot
    dropped: int
    ends: tuple[End, ...]
    names: list[str] | None = None
    rows: Any = field(init=False)
    tokens: int = field(init=False)
    drafted: Any = field(init=False)
    scheduled: Any = field(init=False)
    computed: Any = field(init=False)
    prompt: Any = field(init=False)
    prefilling: Any = field(init=False)
    budget: int | None = None
    allocated: bool = False
    decide_seconds: float = 0.0
    stale: Any = None
    most_drafts: int = 0
    fitted: int | None = None
    ids: Any = field(init=False)
    sampled: Any = field(init=False)
    copied: Any = None

    def done(self) -> bool:
        """Whether everything has arrived on the host, asked without waiting."""
        return self.slot.done() and (self.copied is None or bool(self.copied.query()))

    def frame(self, seconds: tuple[float, float, float], texts: Texts) -> bytes:
        """What is sent of it, as it lies in memory: the engine waits for whoever makes this.

        Args:
            seconds: of :meth:`Slot.seconds`.
            texts: of the thread that calls this.
        """
        slot, ids, budget, fitted = self.slot, self.ids, self.budget, self.fitted
        decided = self.allocated and budget is not None
        numbers = _NUMBERS.pack(
            self.number,
            self.tokens,
            self.most_drafts,
            slot.drafts.shape[1],
            ids.shape[1],
            self.dropped,
            budget if decided else 0,
            0 if fitted is None else fitted,
            self.at,
            self.decide_seconds,
            *seconds,
        )
        data = [
            numbers,
            _bytes(self.rows, _INT64),
            _bytes(self.scheduled, _INT32),
            _bytes(self.computed, _INT32),
            _bytes(self.prompt, _INT32),
            _bytes(self.prefilling, _BOOL),
            _bytes(self.sampled, _INT32),
            _bytes(ids, _INT64),
        ]
        if self.drafted is not None:
            data.append(_bytes(self.drafted, _INT32))
        if decided:
            data.append(_bytes(self.stale, _FLOAT32))
        if fitted is not None:
            data.append(_bytes(slot.fit, _FLOAT32))
        there = (self.drafted is not None, decided, fitted is not None)
        text = texts.of(self.names, self.ends, there, [*map(len, data)], slot.sizes)
        return framed(text, *data, slot.whole if decided else slot.half)


_COUNTS = ("number", "rows", "most_drafts", "slots", "width", "dropped", "budget", "fitted")
_TIMES = (("at", 0), ("decide_seconds", 0), ("seconds", 3))
_NUMBERS = struct.Struct("=8q5d")
_INT32, _INT64, _FLOAT32, _BOOL = map(np.dtype, (np.int32, np.int64, np.float32, np.bool_))
_ALWAYS = (
    ("row", "q"), ("scheduled", "i"), ("computed", "i"), ("prompt", "i"), ("prefilling", "?"),
    ("sampled", "i"), ("tokens", "q"),
)  # fmt: skip
_SOMETIMES = (("drafted", "i"), ("stale", "f"), ("fit", "f"))
_SLOT = (("drafts", "q"), ("lengths", "i"), ("live", "f"), ("admitted", "i"))


class Texts:
    """The JSON of frames, kept by whoever makes them: many in a row have the same."""

    def __init__(self) -> None:
        """Nothing was made yet."""
        self._key: Any = None
        self._names: list[str] | None = None
        self._text = b""

    def of(
        self,
        names: list[str] | None,
        ends: tuple[End, ...],
        there: tuple[bool, bool, bool],
        sizes: list[int],
        slot: tuple[int, ...],
    ) -> bytes:
        """That of a pass.

        Args:
            names: of its requests.
            ends: of its new requests.
            there: whether it has drafts, was decided, brings coefficients.
            sizes: bytes of its numbers and of its arrays but those of the slot.
            slot: bytes of each of the slot's.
        """
        key = (there, sizes, slot)
        if ends or names != self._names or key != self._key:
            self._text = _text(names, ends, there, sizes, slot)
            # The encoder takes longer than all the rest of a frame.
            self._key, self._names = (None, None) if ends else (key, list(names or ()))
        return self._text


def _text(
    names: list[str] | None,
    ends: tuple[End, ...],
    there: tuple[bool, bool, bool],
    sizes: list[int],
    slot: tuple[int, ...],
) -> bytes:
    _, decided, fits = there
    unknown = {name for name, has in (("budget", decided), ("fitted", fits)) if not has}
    values = {
        "what": "pass",
        **dict.fromkeys(unknown),
        "names": names,
        "ends": ends,
        "fields": {
            "counts": [("" if name in unknown else name, 0) for name in _COUNTS],
            "times": _TIMES,
        },
    }
    given = [*_ALWAYS, *(part for part, has in zip(_SOMETIMES, there, strict=True) if has)]
    parts = [*given, *_SLOT[: 4 if decided else 2]]
    counts = 8 * len(_COUNTS)
    layout = [("counts", "q", counts), ("times", "d", sizes[0] - counts)]
    for (name, kind), size in zip(parts, (*sizes[1:], *slot), strict=False):
        layout.append((name, kind, size))
    return dumped([values, layout])


def _bytes(values: Any, dtype: Any) -> bytes:
    """The array's, as a dtype: the engine's own nearly always, and then the same object."""
    if values.dtype is not dtype:
        values = values.astype(dtype)
    data: bytes = values.tobytes()
    return data
