"""Host memory that a pass's tensors are copied to, without waiting for the copies.

All of it is allocated once, pinned where the engine's tensors are on a GPU: pinning takes long.
What the engine overwrites pass by pass is small (128 requests with 7 drafts: 11.8 KB), so it is
copied whole, persistent row by persistent row, in the order of the engine's own stream: another
stream would have to wait for this one. A call into torch costs the engine's thread some ten
microseconds, so the tensors are put side by side on the device first and copied as one.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from time import perf_counter
from typing import Any

import numpy as np

_MOST_BYTES = 32 * 2**20


class Gather:
    """Puts a pass's tensors side by side on the device and begins to copy them as one.

    One staging buffer serves all passes: the engine's stream writes and reads it in turn.

    Attributes:
        sizes: bytes of drafts and lengths, and of these with live and admitted.
        each: bytes of drafts, lengths, live and admitted.
    """

    def __init__(self, rows: int, drafts: int, device: Any) -> None:
        """``device``: where the staging buffer lies; None puts them together on the host."""
        import torch

        cells = rows * drafts
        self._shapes = (
            ((rows, drafts), np.int64, cells * 8),
            ((rows,), np.int32, rows * 4),
            ((rows, drafts), np.float32, cells * 4),
            ((rows,), np.int32, rows * 4),
        )
        self._dtypes = (torch.int64, torch.int32, torch.float32, torch.int32)
        self.each = (cells * 8, rows * 4, cells * 4, rows * 4)
        first = cells * 8 + rows * 4
        self.sizes = (first, first + cells * 4 + rows * 4)
        self._staged: dict[int, Any] = {}
        if device is not None:
            buffer = torch.empty(self.sizes[-1], dtype=torch.uint8, device=device)
            self._staged = {size: buffer[:size] for size in self.sizes}
        self._sources: tuple[Any, ...] = ()
        self._bytes: list[Any] = []
        self._cat = torch.cat

    def parts(self, packed: Any) -> tuple[Any, Any, Any, Any]:
        """Drafts, lengths, live and admitted, in bytes of the host."""
        found, at = [], 0
        for shape, dtype, size in self._shapes:
            found.append(packed[at : at + size].view(dtype).reshape(shape))
            at += size
        return found[0], found[1], found[2], found[3]

    def copy(self, sources: tuple[Any, ...], packed: dict[int, Any]) -> None:
        """Begin to copy drafts and lengths, or all four, to the host's bytes of that size."""
        if len(sources) != len(self._sources) or not all(map(is_, sources, self._sources)):
            self._look(sources)
        size = self.sizes[len(sources) > 2]
        if not self._staged:
            self._cat(self._bytes, out=packed[size])
            return
        self._cat(self._bytes, out=self._staged[size])
        packed[size].copy_(self._staged[size], non_blocking=True)

    def _look(self, sources: tuple[Any, ...]) -> None:
        """The tensors' own bytes, looked at once: the engine keeps these buffers.

        Raises:
            TypeError: they are not what the engine is known to keep.
        """
        import torch

        for source, dtype, (shape, _, _) in zip(sources, self._dtypes, self._shapes, strict=False):
            if source.dtype != dtype or source.shape != shape or not source.is_contiguous():
                raise TypeError(
                    f"the engine keeps {source.dtype} {tuple(source.shape)}, "
                    f"not {dtype} {shape} without gaps"
                )
        self._bytes = [source.view(torch.uint8).reshape(-1) for source in sources]
        self._sources = sources


class Slot:
    """Room for one pass. M persistent rows, K drafts.

    Attributes:
        live: float32 ``[M, K]``, confidences of the drafts that are verified.
        drafts: int64 ``[M, K]``, their ids.
        lengths: int32 ``[M]``, tokens of each sequence before the pass.
        admitted: int32 ``[M]``, by row of the *batch*.
        fit: float32 ``[1 + K]``, the estimator's slope and intercepts.
        whole, half: the bytes of drafts, lengths, live and admitted, one behind the other; those
            of the first two.
        sizes: bytes of each of the four.
        marks: begin, middle (the verdict is there, drafting begins) and end: events on a GPU,
            seconds without one; None where not passed.
    """

    __slots__ = (
        "_fit", "_gather", "_packed", "_stream", "_stream_of", "admitted", "drafts", "events",
        "fit", "half", "lengths", "live", "marks", "sizes", "whole",
    )  # fmt: skip

    def __init__(
        self,
        packed: Any,
        fit: Any,
        gather: Gather,
        events: tuple[Any, Any, Any] | None,
        stream_of: Callable[[], Any],
    ) -> None:
        """Nothing was copied yet.

        Args:
            packed: bytes on the host, as ``gather`` lays them out.
            fit: memory of its own.
            gather: what copies to ``packed``.
            events: of a GPU.
            stream_of: the stream that is used now; asked where a pass is not given one, since an
                event that is given none asks itself, which takes as long as recording it.
        """
        self._gather, self._fit, self.events = gather, fit, events
        self._stream_of, self._stream = stream_of, None
        self._packed = {size: packed[:size] for size in gather.sizes}
        self.whole, self.sizes = memoryview(packed.numpy()), gather.each
        self.half = self.whole[: gather.sizes[0]]
        self.drafts, self.lengths, self.live, self.admitted = gather.parts(packed.numpy())
        self.fit = fit.numpy()
        self.marks: list[Any] = [None, None, None]

    def mark(self, which: int, stream: Any = None) -> None:
        """The engine's stream is here: 0 begin, 1 middle, 2 end.

        ``stream``: given at the begin, the one that the engine uses; None asks for it.
        """
        if self.events is None:
            self.marks[which] = perf_counter()
        else:
            if not which:
                self._stream = self._stream_of() if stream is None else stream
            event = self.marks[which] = self.events[which]
            event.record(self._stream)

    def copy(self, live: Any, drafts: Any, lengths: Any, admitted: Any) -> None:
        """Begin to copy what the pass has decided by; live is None, and admitted, undecided."""
        sources = (drafts, lengths) if live is None else (drafts, lengths, live, admitted)
        self._gather.copy(sources, self._packed)

    def copy_fit(self, slope: Any, intercepts: Any) -> None:
        """Begin to copy the estimator's coefficients."""
        to = self._fit
        to[:1].copy_(slope, non_blocking=True)
        to[1:].copy_(intercepts, non_blocking=True)

    def done(self) -> bool:
        """Whether the stream is past the end, asked without waiting."""
        return self.events is None or bool(self.events[2].query())

    def seconds(self) -> tuple[float, float, float]:
        """Of the whole pass, of the part up to the verdict, and of drafting; once it is done.

        Where nothing told the verdict from the drafting, all of it is the former.
        """
        begin, middle, end = self.marks
        if middle is None:
            whole = self._between(begin, end)
            return whole, whole, 0.0
        verify, draft = self._between(begin, middle), self._between(middle, end)
        return verify + draft, verify, draft

    def _between(self, a: Any, b: Any) -> float:
        if self.events is None:
            return float(b - a)
        return float(a.elapsed_time(b)) / 1e3

    def reset(self) -> None:
        """Ready for another pass."""
        self.marks = [None, None, None]


def _no_stream() -> None: ...


def make_slots(rows: int, drafts: int, device: Any, most: int = 64) -> list[Slot]:
    """Slots for M = ``rows`` and K = ``drafts``: ``most``, or as many as 32 MiB hold, at least 4.

    Allocates pinned memory and must not run while a graph is captured.
    """
    import torch

    on_gpu = getattr(device, "type", str(device)) == "cuda"
    # The engine calls from inference mode, whose tensors cannot be written to outside of it.
    with torch.inference_mode(False):
        gather = Gather(rows, drafts, device if on_gpu else None)
        size = gather.sizes[-1]
        count = max(4, min(most, _MOST_BYTES // (size + (1 + drafts) * 4)))
        packed = torch.zeros((count, -(-size // 8) * 8), dtype=torch.uint8, pin_memory=on_gpu)
        fits = torch.zeros((count, 1 + drafts), dtype=torch.float32, pin_memory=on_gpu)
        return [
            Slot(
                packed[i, :size],
                fits[i],
                gather,
                tuple(torch.cuda.Event(enable_timing=True) for _ in range(3))  # type: ignore[arg-type]
                if on_gpu
                else None,
                torch.cuda.current_stream if on_gpu else _no_stream,
            )
            for i in range(count)
        ]
