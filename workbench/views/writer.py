"""``Writer``: decoding in the background, its tokens handed over in batches."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from workbench.model.generate import Token, TokenStream, stream
from workbench.model.sampling import Sampling
from workbench.views.background import HERTZ as HERTZ
from workbench.views.background import Background
from workbench.views.background import stop_after_interrupted_cell as _stop_after_interrupted_cell
from workbench.views.background import stop_all as stop_all

if TYPE_CHECKING:
    from workbench.model.beam import Beam

__all__ = ["HERTZ", "Writer", "_stop_after_interrupted_cell", "stop_all"]


class Writer(Background):
    """Decodes one prompt in a thread.

    Args:
        show: called from the flushing thread with the tokens that are new, at most ``HERTZ`` times
            a second, and a last time (perhaps with none) when decoding has ended.

    Attributes:
        tokens: all tokens handed to ``show`` so far.
        error: what ended decoding or showing if it failed; :meth:`wait` and :meth:`stop` raise it.
    """

    def __init__(
        self,
        beam: Beam,
        prompt: str,
        show: Callable[[Writer, list[Token]], None],
        *,
        max_new_tokens: int = 512,
        sampling: Sampling | None = None,
    ) -> None:
        cancel = threading.Event()
        super().__init__(beam, cancel)
        self.beam, self.show = beam, show
        self.tokens: list[Token] = []
        self._queue: deque[Token] = deque()
        # Made here, so that a prompt that cannot be decoded is refused before a thread starts.
        self._stream: TokenStream = stream(
            beam,
            prompt,
            max_new_tokens=max_new_tokens,
            sampling=sampling or Sampling(),
            cancel=cancel,
        )

    @property
    def tokens_per_second(self) -> float:
        """Measured decode speed so far; NaN before the second decode step."""
        return self._stream.tokens_per_second

    def _work(self) -> None:
        for token in self._stream:
            self._queue.append(token)

    def _hand_over(self, ended: bool) -> None:
        batch = [self._queue.popleft() for _ in range(len(self._queue))]
        if batch or ended:
            self.tokens += batch
            self.show(self, batch)
