"""Live generation without a browser: threads, batches, stopping, errors, messages to the page."""

import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

import workbench
from workbench.errors import PromptError, WorkbenchError
from workbench.model.beam import Beam
from workbench.model.generate import Token
from workbench.model.sampling import Sampling
from workbench.views.live_tokens import Live, live
from workbench.views.writer import HERTZ, Writer, _stop_after_interrupted_cell, stop_all

PROMPT = "def f(x):"
ENDLESS = 2000  # more tokens than any test waits for
WARM = Sampling(temperature=0.8, top_p=0.9, seed=4)


@pytest.fixture(autouse=True)
def _nothing_left_running() -> Iterator[None]:
    yield
    stop_all()
    deadline = time.monotonic() + 10
    while any(t.name.startswith("workbench-") for t in threading.enumerate()):
        assert time.monotonic() < deadline, "a thread goes on after it was cancelled"
        time.sleep(0.01)


class Page:
    """What a page would have been sent."""

    def __init__(self, view: Live) -> None:
        self.messages: list[dict[str, Any]] = []
        view.widget.send = self.messages.append

    def texts(self) -> list[str]:
        """The tokens since the last reset."""
        texts: list[str] = []
        for message in self.messages:
            if message["kind"] == "reset":
                texts = []
            else:
                texts += [text for text, _ in message["items"]]
        return texts


def wait_for(condition: Any, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def test_a_writer_hands_over_every_token_in_order_and_not_too_often(beam: Beam) -> None:
    calls: list[tuple[float, list[Token]]] = []
    writer = Writer(
        beam,
        PROMPT,
        lambda _, batch: calls.append((time.monotonic(), batch)),
        max_new_tokens=300,
        sampling=WARM,
    )
    writer.start()
    writer.wait(60)
    expected = list(workbench.stream(beam, PROMPT, max_new_tokens=300, sampling=WARM))
    assert writer.tokens == expected
    assert [token for _, batch in calls for token in batch] == expected
    # All but the last call are a full period apart; the last comes when decoding ends.
    gaps = [b - a for (a, _), (b, _) in pairwise(calls[:-1])]
    assert all(gap > 0.9 / HERTZ for gap in gaps)
    assert writer.tokens_per_second > 0
    assert not writer.running


def test_stop_ends_it_between_two_steps(beam: Beam) -> None:
    writer = Writer(beam, PROMPT, lambda *_: None, max_new_tokens=ENDLESS)
    writer.start()
    wait_for(lambda: len(writer.tokens) > 5)
    writer.stop()
    count = len(writer.tokens)
    assert not writer.running
    assert writer.cancelled
    assert 5 < count < ENDLESS
    ids = [t.id for t in workbench.stream(beam, PROMPT, max_new_tokens=count)]
    assert [t.id for t in writer.tokens] == ids


def test_a_new_writer_on_the_same_model_stops_the_one_before(beam: Beam) -> None:
    first = Writer(beam, PROMPT, lambda *_: None, max_new_tokens=ENDLESS)
    first.start()
    second = Writer(beam, PROMPT, lambda *_: None, max_new_tokens=3)
    second.start()
    first.wait(20)
    second.wait(20)
    assert first.cancelled
    assert len(first.tokens) < ENDLESS
    assert not second.cancelled
    assert len(second.tokens) == 3


def test_an_interrupt_stops_every_writer(beam: Beam) -> None:
    writer = Writer(beam, PROMPT, lambda *_: None, max_new_tokens=ENDLESS)
    writer.start()
    # IPython reports a cell that failed otherwise, and one that was interrupted.
    _stop_after_interrupted_cell(SimpleNamespace(error_in_exec=ValueError()))
    assert not writer.cancelled
    _stop_after_interrupted_cell(SimpleNamespace(error_in_exec=KeyboardInterrupt()))
    writer.wait(20)
    assert writer.cancelled
    assert len(writer.tokens) < ENDLESS


def test_what_fails_in_a_thread_is_kept_and_raised(
    beam: Beam, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, calls = Beam.logits, [0]

    def failing(self: Beam, hidden: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] > 4:
            raise RuntimeError("the fifth step fails")
        return logits(self, hidden)

    monkeypatch.setattr(Beam, "logits", failing)
    shown: list[Token] = []
    writer = Writer(beam, PROMPT, lambda _, batch: shown.extend(batch), max_new_tokens=ENDLESS)
    writer.start()
    with pytest.raises(RuntimeError, match="the fifth step fails"):
        writer.wait(20)
    assert len(shown) == 4  # what was decoded before is shown
    with pytest.raises(RuntimeError, match="the fifth step fails"):
        writer.stop()


def test_a_page_that_fails_ends_decoding(beam: Beam) -> None:
    def show(_: Writer, batch: list[Token]) -> None:
        raise OSError("the page is gone")

    writer = Writer(beam, PROMPT, show, max_new_tokens=ENDLESS)
    writer.start()
    with pytest.raises(OSError, match="the page is gone"):
        writer.wait(20)
    assert writer.cancelled


def test_a_bad_prompt_starts_no_thread(beam: Beam) -> None:
    with pytest.raises(PromptError, match="empty"):
        Writer(beam, "", lambda *_: None)


def test_waiting_has_an_end(beam: Beam) -> None:
    writer = Writer(beam, PROMPT, lambda *_: None, max_new_tokens=ENDLESS)
    writer.start()
    with pytest.raises(TimeoutError, match="has not ended"):
        writer.wait(0.05)


# -- the widget -------------------------------------------------------------------------------


def test_it_starts_when_a_page_shows_it_and_shows_everything(beam: Beam) -> None:
    view = live(beam, PROMPT, max_new_tokens=40, sampling=WARM)
    page = Page(view)
    assert view.writer is None
    assert view.widget.status == "ready"
    view._message(None, {"kind": "ready"}, None)
    assert page.messages[0] == {"kind": "reset", "prompt": PROMPT}
    view.wait(60)
    tokens = list(workbench.stream(beam, PROMPT, max_new_tokens=40, sampling=WARM))
    assert page.texts() == [t.text for t in tokens]
    assert not view.widget.running
    assert view.widget.status.startswith("40 tokens · ")
    assert view.widget.status.endswith(" tokens/s, measured here · limit of 40")
    assert view.text.startswith(PROMPT + "".join(t.text for t in tokens))

    # A second view of the same widget is given what the first has, and starts nothing anew.
    writer = view.writer
    page.messages.clear()
    view._message(None, {"kind": "ready"}, None)
    assert view.writer is writer
    assert page.texts() == [t.text for t in tokens]


def test_without_autostart_it_waits_for_the_button(beam: Beam) -> None:
    view = Live(beam, PROMPT, autostart=False, max_new_tokens=3)
    page = Page(view)
    view._message(None, {"kind": "ready"}, None)
    assert view.writer is None
    view._message(None, {"kind": "start", "prompt": "x = "}, None)
    view.wait(20)
    assert view.widget.prompt == "x = "
    assert page.texts() == [t.text for t in workbench.stream(beam, "x = ", max_new_tokens=3)]


def test_the_buttons(beam: Beam) -> None:
    view = live(beam, PROMPT, max_new_tokens=ENDLESS)
    page = Page(view)
    view._message(None, {"kind": "start", "prompt": PROMPT}, None)
    assert view.widget.running
    wait_for(lambda: len(page.texts()) > 0)
    view._message(None, {"kind": "stop"}, None)
    view.wait(20)
    assert not view.widget.running
    assert view.widget.status.endswith("stopped")
    assert 0 < len(page.texts()) < ENDLESS

    # Start twice in a row: the page shows the second run alone.
    view._message(None, {"kind": "start", "prompt": PROMPT}, None)
    first = view.writer
    view._message(None, {"kind": "start", "prompt": "y = "}, None)
    assert first is not None
    first.wait(20)
    wait_for(lambda: len(page.texts()) > 3)
    view.stop()
    count = len(page.texts())
    tokens = list(workbench.stream(beam, "y = ", max_new_tokens=count))
    assert page.texts() == [t.text for t in tokens]

    # What the first run still had to show comes too late.
    status = view.widget.status
    view._show(first, tokens)
    assert page.texts() == [t.text for t in tokens]
    assert view.widget.status == status


def test_a_prompt_that_cannot_be_decoded_is_told_and_the_next_works(beam: Beam) -> None:
    view = live(beam, PROMPT, max_new_tokens=2)
    page = Page(view)
    view._message(None, {"kind": "start", "prompt": ""}, None)
    assert view.widget.status == "the prompt is empty; give it at least one character"
    assert not view.widget.running
    view._message(None, {"kind": "start", "prompt": "z"}, None)
    view.wait(20)
    assert len(page.texts()) == 2


def test_an_error_in_the_background_is_shown_and_raised_on_stop(
    beam: Beam, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Beam, hidden: Tensor) -> Tensor:
        raise RuntimeError("<b>broken</b>")

    monkeypatch.setattr(Beam, "logits", failing)
    view = live(beam, PROMPT)
    Page(view)
    view.start()
    with pytest.raises(RuntimeError, match="broken"):
        view.wait(20)
    # The page puts the status in as text, so it is sent as it is.
    assert view.widget.status == "RuntimeError: <b>broken</b>"
    assert not view.widget.running
    with pytest.raises(RuntimeError, match="broken"):
        view.stop()


def test_foreign_messages_are_ignored(beam: Beam) -> None:
    view = live(beam, PROMPT)
    for content in ({}, {"kind": "other"}, "text", None, {"kind": "stop"}):
        view._message(None, content, None)
    assert view.writer is None


def test_the_page_gets_text_and_never_html(beam: Beam) -> None:
    source = view_source()
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way not in source
    view = live(beam, "<script>alert(1)</script>")
    bundle = view._repr_mimebundle_()
    assert "<script" not in bundle["text/html"]
    assert "&lt;script&gt;" in bundle["text/html"]
    assert bundle["text/plain"] == "<script>alert(1)</script>\n-- ready"


def view_source() -> str:
    from workbench.views import live_tokens

    return str(live_tokens.LiveWidget._esm)


def test_it_is_small_on_the_wire(beam: Beam) -> None:
    view = live(beam, PROMPT, max_new_tokens=200)
    state = view.widget.get_state()
    assert sum(len(str(value)) for value in state.values()) < 12_000
    page = Page(view)
    view.start()
    view.wait(60)
    sent = sum(len(str(message)) for message in page.messages)
    assert sent < 200 * 40
    assert len(page.messages) < 200


def test_a_model_without_a_tokenizer_is_refused(
    beam: Beam, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beam, "tokenizer", None)
    with pytest.raises(WorkbenchError, match="no tokenizer"):
        live(beam, PROMPT)


def test_control_characters_do_not_reach_the_page(
    beam: Beam, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Escape sequences and marks that turn the writing direction are shown, not obeyed."""
    hidden = {"\x1b", "\u202e", "\u200f"}
    hostile = "a\x1b[31mb\u202ec\u200fd"
    view = live(beam, hostile, autostart=False, max_new_tokens=2)
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(view.widget, "send", sent.append)
    view.start()
    view.wait(20)
    view._send([Token(sequence=0, index=0, id=5, text=hostile, logprob=-1.0, finished=None)])
    texts = [m["prompt"] for m in sent if m["kind"] == "reset"]
    texts += [text for m in sent if m["kind"] == "tokens" for text, _ in m["items"]]
    assert len(texts) >= 3
    for text in (*texts, view.text):
        assert not hidden & set(text)
