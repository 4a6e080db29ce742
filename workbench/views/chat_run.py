"""``Speaking``: one turn of a chat in the background, its events handed over in batches."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from workbench.serving.client.chat import Chat, Event
from workbench.serving.client.conversation import Turn
from workbench.views.background import Background


class Speaking(Background):
    """Runs a turn in a thread.

    Args:
        show: called with what is new, at most ten times a second, and a last time at the end.
        settings: as :meth:`workbench.serving.client.chat.Chat.stream` takes them.

    Attributes:
        text: what was said.
        turn: once it is over, None before and where it failed.
    """

    def __init__(
        self,
        chat: Chat,
        text: str,
        show: Callable[[Speaking, list[Event], bool], None],
        **settings: Any,
    ) -> None:
        super().__init__(chat, threading.Event())
        self.chat, self.text = chat, text
        self.turn: Turn | None = None
        self._show = show
        self._queue: deque[Event] = deque()
        # Asked for here, so that what cannot be sent is refused before a thread starts.
        self._events = chat.stream(text, ended=self._ended, **settings)

    def cancel(self) -> None:
        """End the turn, whatever it waits for, and return at once."""
        super().cancel()
        if self.decoding:  # otherwise it may be a later turn that is under way
            self.chat.stop()

    def _ended(self, turn: Turn) -> None:
        self.turn = turn

    def _work(self) -> None:
        for event in self._events:
            self._queue.append(event)

    def _hand_over(self, ended: bool) -> None:
        batch = [self._queue.popleft() for _ in range(len(self._queue))]
        if batch or ended:
            self._show(self, batch, ended)
