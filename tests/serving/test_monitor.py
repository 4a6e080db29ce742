"""The monitor against real web servers: right figures, whatever the server does meanwhile."""

from __future__ import annotations

import gc
import socket
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from serving.certificates import Certificate, make_certificate
from serving.metrics_pages import PretendServer, realistic, wait_until
from serving.metrics_server import Child, Scripted, serving
from workbench.errors import ServingError
from workbench.serving.address import Address
from workbench.serving.monitor import monitor as monitor_module
from workbench.serving.monitor import scrape
from workbench.serving.monitor.metrics_page import read_page
from workbench.serving.monitor.monitor import Monitor
from workbench.serving.monitor.sample import COUNTS, Sample
from workbench.serving.monitor.scrape import Answer, Scraper

KEY = "sk-very-secret-0123456789"


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(scrape.KEY_VARIABLE, raising=False)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == "workbench-monitor"])


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("certificate"))


def answering(status: int = 200, body: bytes = b"", **headers: str) -> Scripted:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Scripted(lambda path: (status, named, body))


def first_error(url: str, **more: Any) -> str:
    with Monitor(url, **more) as monitor:
        assert not monitor.reached(20)
        error = monitor.error
        assert error is not None
        assert error.isprintable()
        assert len(error) < 300
        assert monitor.stale_since is not None
        return error


# -- figures --------------------------------------------------------------------------------------


def test_figures_are_the_counts_of_the_requests() -> None:
    pretend = realistic(slots=3)
    with serving(pretend.page) as server, Monitor(server.url, hertz=20) as monitor:
        assert monitor.reached(20)
        monitor.wait(1, 20)
        for n in range(6):
            pretend.request([3, n % 4, 0], prompt=10 + n, ttft=0.03)
            monitor.wait(monitor.seen + 2, 20)
        samples = monitor.samples
        counted = pretend.counted["0"]
        before = realistic(slots=3).counted["0"]
        for name in COUNTS:
            added = getattr(counted, name) - getattr(before, name)
            assert sum(getattr(sample, name) or 0 for sample in samples) == added, name
        assert sum(sum((s.finished or {}).values()) for s in samples) == 6
        observed = [sample.ttft.count for sample in samples if sample.ttft is not None]
        assert sum(observed) == 6
        assert monitor.error is None
        assert monitor.stale_since is None
        assert monitor.version == "0.33.0"
        assert monitor.source == "measured here, live, vLLM 0.33.0"
        assert all(b.at > a.at for a, b in pairwise(samples))
        assert all(sample.model == "beam-tiny" for sample in samples)
        span = samples[-1].at - samples[0].at + samples[0].seconds
        assert sum(sample.seconds for sample in samples) == pytest.approx(span, abs=0.05)
    assert not monitor.running


def test_pages_are_asked_for_at_fixed_moments() -> None:
    """Twenty a second for a second and a half: late ones do not push the next ones back."""
    pretend = PretendServer(further=False)

    def slow_at_times() -> str:
        if len(server.times) % 7 == 0:
            time.sleep(0.03)
        return pretend.page()

    with serving(slow_at_times) as server, Monitor(server.url, hertz=20) as monitor:
        monitor.wait(30, 30)
        times = list(server.times)
    turns = [(t - times[0]) / 0.05 for t in times]
    off = [turn - round(turn) for turn in turns]
    assert sorted(abs(x) for x in off)[len(off) // 2] < 0.3
    assert times[-1] - times[0] >= 0.05 * (len(times) - 2)  # never faster than asked


def test_what_a_late_page_held_up_is_not_made_up_for() -> None:
    """A page that takes twelve moments is followed by one at the next of them, not by twelve."""
    pretend = PretendServer(further=False)

    def slow_once() -> str:
        if len(server.times) == 3:
            time.sleep(0.6)
        return pretend.page()

    with serving(slow_once, version=None) as server, Monitor(server.url, hertz=20) as monitor:
        monitor.wait(24, 30)
        times = list(server.times)
    assert times[-1] - times[0] >= 0.05 * (len(times) - 1) + 0.4


def test_a_slow_server_makes_no_queue() -> None:
    pretend = PretendServer(further=False)

    def slow() -> str:
        time.sleep(0.25)
        return pretend.page()

    with serving(slow, version=None) as server, Monitor(server.url, hertz=20) as monitor:
        monitor.wait(3, 30)
        assert server.most == 1
        assert len(server.times) <= 6
        assert all(sample.seconds >= 0.25 for sample in monitor.samples)
        begin = time.monotonic()
        assert len(monitor.samples) >= 3  # nobody waits for the page
        assert monitor.seen >= 3
        assert time.monotonic() - begin < 0.1


def test_the_newest_are_kept_and_all_are_counted() -> None:
    pretend = PretendServer(further=False)
    with serving(pretend.page) as server, Monitor(server.url, hertz=20, keep=4) as monitor:
        monitor.wait(9, 30)
        monitor.stop()
        assert len(monitor.samples) == 4
        assert monitor.seen >= 9
        new, seen = monitor.since(monitor.seen - 2)
        assert new == monitor.samples[-2:]
        assert seen == monitor.seen
        assert monitor.since(0) == (monitor.samples, monitor.seen)
        assert monitor.since(monitor.seen) == ([], monitor.seen)


def test_of_many_engines_fewer_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor_module, "KEEP_ENGINES", 10)
    pages = [PretendServer(engines=("0", "1", "2", "3"), further=False).page, realistic().page]
    for page, kept in ((pages[0], 2), (pages[1], 7)):
        with serving(page) as server, Monitor(server.url, hertz=20, keep=7) as monitor:
            monitor.wait(9, 20)
            monitor.stop()
            assert len(monitor.samples) == kept
            new, seen = monitor.since(monitor.seen - 5)
            assert (len(new), seen) == (min(5, kept), monitor.seen)


def test_listeners_hear_every_sample_until_they_leave_or_fail() -> None:
    heard: list[Sample] = []
    failed: list[Sample] = []

    def failing(sample: Sample) -> None:
        failed.append(sample)
        raise RuntimeError("mine")

    pretend = PretendServer(further=False)
    with serving(pretend.page) as server, Monitor(server.url, hertz=20) as monitor:
        monitor.listen(failing)
        leave = monitor.listen(heard.append)
        monitor.wait(5, 30)
        leave()
        leave()
        count = len(heard)
        monitor.wait(monitor.seen + 3, 30)
        assert count >= 4
        assert len(heard) <= count + 1
        first = monitor.samples.index(heard[0])
        assert heard == monitor.samples[first : first + len(heard)]
        assert len(failed) == 1
        assert monitor.error is None


def test_a_listener_that_exits_ends_itself_and_not_the_monitor() -> None:
    heard: list[int] = []

    def leaves(sample: Sample) -> None:
        heard.append(1)
        sys.exit(3)

    page = PretendServer(further=False).page
    with serving(page) as server, Monitor(server.url, hertz=20) as monitor:
        monitor.listen(leaves)
        monitor.wait(monitor.seen + 3, 20)
        assert monitor.running
    assert heard == [1]


def test_a_monitor_that_nobody_holds_ends() -> None:
    pretend = PretendServer(further=False)
    with serving(pretend.page) as server:
        monitor = Monitor(server.url, hertz=20)
        monitor.wait(1, 20)
        thread = monitor._thread
        del monitor
        gc.collect()
        thread.join(10)
        assert not thread.is_alive()


# -- servers that go ------------------------------------------------------------------------------


def test_a_server_that_is_killed_and_started_anew() -> None:
    """kill -9 while the monitor looks: nothing raises, nothing is negative, it is found again."""
    negative: list[str] = []

    def check(sample: Sample) -> None:
        for name in COUNTS:
            if (getattr(sample, name) or 0) < 0:
                negative.append(name)

    with Child() as first:
        monitor = Monitor(first.url, hertz=20)
        monitor.listen(check)
        monitor.wait(2, 20)
        first.request([3, 2])
        monitor.wait(monitor.seen + 2, 20)
        died = time.time()
        first.kill()
        wait_until(lambda: monitor.error is not None)
        stale = monitor.stale_since
        assert stale is not None
        assert died - 2 < stale < time.time()
        assert "nothing answers at" in (monitor.error or "") or "closed" in (monitor.error or "")
        before = monitor.seen
        time.sleep(0.3)
        assert monitor.seen == before  # nothing is made up meanwhile
        assert monitor.stale_since == stale
        with Child(first.port) as second:
            monitor.wait(before + 1, 30)
            assert monitor.stale_since is None
            assert monitor.error is None
            new = monitor.since(before)[0][0]
            assert new.restarted
            assert new.missed >= 2
            assert new.tokens_per_second is None
            # What the new process counted: the 40 requests that each begins with.
            assert new.drafts == 40 * 3
            second.request([7])
            monitor.wait(monitor.seen + 2, 20)
            after = monitor.since(before + 1)[0]
            assert sum(sample.drafts or 0 for sample in after) == 1
            assert not any(sample.restarted for sample in after)
            monitor.stop()
    assert negative == []
    assert sum(sample.drafts or 0 for sample in monitor.samples) == 2 + 120 + 1


def test_a_server_that_comes_later_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    begin = time.time()
    with Monitor(f"http://127.0.0.1:{port}", hertz=20) as monitor:
        assert not monitor.reached(10)
        since = monitor.stale_since
        assert since is not None
        assert begin - 1 <= since <= time.time()
        with Child(port):
            monitor.wait(1, 30)
            assert monitor.stale_since is None
            assert not monitor.samples[0].restarted


def test_a_page_that_does_not_come_is_stale_before_it_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitor_module, "_PATIENCE", 0.2)
    pretend, hold = PretendServer(further=False), threading.Event()
    hold.set()

    def page() -> str:
        hold.wait(10)
        return pretend.page()

    with serving(page) as server, Monitor(server.url, hertz=20) as monitor:
        monitor.wait(2, 20)
        assert monitor.stale_since is None
        hold.clear()
        wait_until(lambda: monitor.stale_since is not None)
        assert monitor.error is None  # it may still come
        hold.set()
        wait_until(lambda: monitor.stale_since is None)
        monitor.wait(monitor.seen + 1, 20)


def test_stopping_does_not_wait_for_a_server_that_hangs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monitor = Monitor(f"http://127.0.0.1:{silent.getsockname()[1]}", hertz=20)
        held, _ = silent.accept()
        time.sleep(0.1)
        begin = time.monotonic()
        monitor.stop()
        assert time.monotonic() - begin < 2
        assert not monitor._thread.is_alive()
        assert monitor.error is None  # it was cut off by us
        held.close()


def test_waiting_ends_with_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monitor = Monitor(f"http://127.0.0.1:{port}", hertz=20)
    monitor.reached(10)
    with pytest.raises(TimeoutError, match=r"0 of 1 samples.*nothing answers"):
        monitor.wait(1, 0.2)
    threading.Timer(0.2, monitor.stop).start()
    with pytest.raises(ServingError, match="was stopped"):
        monitor.wait(1, 20)
    with pytest.raises(ServingError, match="was stopped"):
        monitor.record("never.jsonl")
    assert "stopped" in repr(monitor)


# -- answers that are none ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "wants an API key; set VLLM_API_KEY"),
        (403, "wants an API key"),
        (404, "there is no such page"),
        (500, "answers 500; look at the server's log"),
        (503, "answers 503"),
    ],
)
def test_statuses_in_words(status: int, words: str) -> None:
    with answering(status, b"<script>alert(1)</script>") as server:
        error = first_error(server.url)
    assert words in error
    assert "script" not in error


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<html><body>hi", "an HTML page"),
        (b'{"object": "list"}', "JSON"),
        (b"", "empty"),
        (b"go_goroutines 3\ngo_threads 4\n", "without one of vllm:"),
    ],
)
def test_pages_that_are_none(body: bytes, words: str) -> None:
    with answering(200, body) as server:
        assert words in first_error(server.url)


def test_a_redirect_is_not_followed_and_no_key_goes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(scrape.KEY_VARIABLE, KEY)
    with serving(PretendServer(further=False).page) as other:
        there = f"{other.url}/metrics?<script>\x7f"
        with answering(307, b"", Location=there) as server:
            error = first_error(server.url)
            assert "a redirect to 'http://127.0.0.1:" in error
            assert "not followed" in error
            assert KEY not in error
        assert other.paths == []


def test_the_key_comes_from_the_environment_and_goes_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv(scrape.KEY_VARIABLE, KEY)
    pretend = PretendServer(further=False)
    path = tmp_path / "run.jsonl"
    with serving(pretend.page) as server:
        with Monitor(server.url, hertz=20, record=path) as monitor:
            monitor.wait(2, 20)
            assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
            monkeypatch.setenv(scrape.KEY_VARIABLE, "another")  # as it is at that moment
            monitor.wait(monitor.seen + 2, 20)
            assert server.headers[-1]["Authorization"] == "Bearer another"
        assert KEY not in path.read_text()
        assert KEY not in repr(monitor)
        assert KEY not in repr(vars(monitor._loop))
    with answering(401) as server:
        error = first_error(server.url)
        assert "refuses the key in VLLM_API_KEY" in error
    monkeypatch.setenv(scrape.KEY_VARIABLE, "sk-line\r\nX-Evil: 1")
    with answering(200) as server:
        error = first_error(server.url)
        assert "signs that no header takes" in error
        assert "Evil" not in error
        assert server.paths == []


def test_a_server_that_repeats_the_key_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(scrape.KEY_VARIABLE, KEY)
    with serving(PretendServer(model=KEY, further=False).page) as server:
        error = first_error(server.url)
    assert "repeats the API key" in error
    assert KEY not in error
    with answering(302, b"", Location=f"http://127.0.0.1/{KEY}") as server:
        assert KEY not in first_error(server.url)


def test_no_key_goes_over_plain_http_to_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(scrape.KEY_VARIABLE, KEY)
    away = Address.of("http://example.org", foreign=True)
    assert scrape._key(away) is None
    for near in (Address.of("https://example.org", foreign=True), Address.of("http://127.0.0.1")):
        found = scrape._key(near)
        assert found is not None
        assert found.header == f"Bearer {KEY}"


def test_without_a_key_none_is_sent() -> None:
    with serving(PretendServer(further=False).page) as server:
        with Monitor(server.url, hertz=20) as monitor:
            monitor.wait(1, 20)
        assert all("Authorization" not in headers for headers in server.headers)
        assert all(path in ("/metrics", "/version") for path in server.paths)
        assert server.paths.count("/version") == 1


def test_answers_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape.Scraper.get, "__kwdefaults__", {"limit": 5000})
    with answering(200, b"x" * 6000) as server:
        assert "longer than 5,000 bytes" in first_error(server.url)
    # Without saying how long it is.
    with answering(200, b"x" * 600_000, Content_Length="", Connection="close") as server:
        assert "longer than 5,000 bytes" in first_error(server.url)


def test_an_answer_that_is_cut_is_no_page() -> None:
    page = realistic().page().encode()
    short = page[: page.rfind(b"# HELP vllm:e2e")]  # whole lines: the text itself does not tell
    assert read_page(short)
    with answering(200, short, Content_Length=str(len(page)), Connection="close") as server:
        assert "was cut" in first_error(server.url)
    broken = b"%x\r\n" % len(short) + short + b"\r\n"  # a chunk, and no last one
    with answering(200, broken, Content_Length="", Transfer_Encoding="chunked",
                   Connection="close") as server:  # fmt: skip
        assert "was cut" in first_error(server.url)
    whole = b"%x\r\n" % len(page) + page + b"\r\n0\r\n\r\n"
    chunks = answering(200, whole, Content_Length="", Transfer_Encoding="chunked")
    with chunks as server, Monitor(server.url, hertz=20) as monitor:
        monitor.wait(2, 20)


def test_a_compressed_answer_is_refused() -> None:
    with answering(200, b"\x1f\x8b", Content_Encoding="gzip") as server:
        assert "came compressed" in first_error(server.url)


def raw_server(reply: Callable[[socket.socket], None]) -> socket.socket:
    """Something that listens, and answers each connection in its own way."""
    listening = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection:
            try:
                connection.recv(4096)
                reply(connection)
            except OSError:
                pass

    threading.Thread(target=accept, daemon=True).start()
    return listening


def test_what_speaks_no_http_is_told_apart() -> None:
    with raw_server(lambda c: c.sendall(b"SSH-2.0-OpenSSH_9.6 \x1b[31m\r\n")) as server:
        error = first_error(f"http://127.0.0.1:{server.getsockname()[1]}")
        assert "does not speak HTTP" in error
        assert "SSH" not in error
    with raw_server(lambda c: None) as server:
        error = first_error(f"http://127.0.0.1:{server.getsockname()[1]}")
        assert "closed the connection without an answer" in error
    with raw_server(lambda c: c.sendall(b"x")) as server:
        error = first_error(f"https://127.0.0.1:{server.getsockname()[1]}")
        assert "does not speak https" in error or "closed" in error


@pytest.mark.parametrize("part", ["head", "body", "to the end"])
def test_a_server_that_drips_is_given_up(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte comes in time, the whole never does."""
    monkeypatch.setattr(scrape, "WHOLE_SECONDS", 0.4)

    def drip(connection: socket.socket) -> None:
        if part == "to the end":
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
        else:
            connection.sendall(b"HTTP/1.1 200 OK\r\n")
        if part == "body":
            connection.sendall(b"Content-Length: 100000\r\n\r\n")
        for _ in range(400):
            connection.sendall(b"x")
            time.sleep(0.02)

    with raw_server(drip) as server:
        begin = time.monotonic()
        error = first_error(f"http://127.0.0.1:{server.getsockname()[1]}")
        assert "did not answer in time" in error
        assert time.monotonic() - begin < 3


def test_a_connection_is_kept_and_made_anew_where_the_server_closed_it() -> None:
    accepted: list[int] = []
    page = PretendServer(further=False).page().encode()

    def twice(connection: socket.socket) -> None:
        accepted.append(1)
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(page)
        for _ in range(2):
            connection.sendall(head + page)
            connection.recv(4096)

    with raw_server(twice) as server:
        scraper = Scraper(Address.of(f"http://127.0.0.1:{server.getsockname()[1]}"))
        for _ in range(6):
            assert scraper.get("/metrics").body == page
        scraper.close()
    assert 2 <= len(accepted) <= 4


def test_a_connection_that_the_server_closes_each_time_can_be_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of HTTP/1.0 the library opens the next connection by itself, unless it is done here."""
    monkeypatch.setattr(scrape, "WHOLE_SECONDS", 0.4)
    page = PretendServer(further=False).page().encode()
    asked: list[int] = []

    def answer(connection: socket.socket) -> None:
        asked.append(1)
        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
        if len(asked) == 1:
            connection.sendall(page)
            return
        for _ in range(200):
            connection.sendall(b"x")
            time.sleep(0.02)

    with raw_server(answer) as server:
        scraper = Scraper(Address.of(f"http://127.0.0.1:{server.getsockname()[1]}"))
        assert scraper.get("/metrics").body == page
        begin = time.monotonic()
        with pytest.raises(ServingError, match="did not answer in time"):
            scraper.get("/metrics")
        assert time.monotonic() - begin < 2
        monkeypatch.setattr(scrape, "WHOLE_SECONDS", 30)
        threading.Timer(0.2, scraper.abort).start()
        begin = time.monotonic()
        with pytest.raises(ServingError):
            scraper.get("/metrics")
        assert time.monotonic() - begin < 2
        scraper.close()


def test_a_certificate_that_is_not_trusted_and_one_that_is(
    monkeypatch: pytest.MonkeyPatch, certificate: Certificate
) -> None:
    page = PretendServer(further=False).page().encode()
    with certificate.serving(page, b"{}") as url:
        assert "a certificate that is not trusted" in first_error(url)
        plain = Scraper(Address.of(url.replace("https", "http")))
        with pytest.raises(ServingError, match="closed the connection"):
            plain.get("/metrics")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate.file))
        trusting = Scraper(Address.of(url))
        assert trusting.get("/metrics").body == page
        trusting.close()
    with serving(PretendServer(further=False).page) as server:
        assert "does not speak https" in first_error(server.url.replace("http", "https"))


@pytest.mark.parametrize(
    "answer",
    [(500, {}, b""), (200, {"Content-Encoding": "gzip"}, b"x"), (302, {"Location": "x"}, b""),
     (200, {"Content-Length": "99", "Connection": "close"}, b"x"), None],
)  # fmt: skip
@pytest.mark.parametrize("times", [100, pytest.param(1000, marks=pytest.mark.full)])
def test_scrapes_that_fail_leave_nothing_open(answer: Any, times: int) -> None:
    def left() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    with Scripted(lambda path: answer) as server:
        scraper = Scraper(Address.of(server.url if answer else "http://127.0.0.1:1"))
        before, threads = left(), threading.active_count()
        for _ in range(times):
            with pytest.raises(ServingError):
                scraper.get("/metrics")
        scraper.close()
        wait_until(lambda: left() <= before and threading.active_count() <= threads)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"address": "ftp://127.0.0.1"}, "http or https"),
        ({"address": "http://example.org"}, "not this machine"),
        ({"hertz": 0}, "once an hour"),
        ({"hertz": 21}, "once an hour"),
        ({"hertz": float("nan")}, "pages a second"),
        ({"hertz": True}, "pages a second"),
        ({"keep": 0}, "number of samples"),
        ({"record": "/nowhere/at/all.jsonl"}, "cannot be written"),
    ],
)
def test_settings_that_are_none(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ServingError, match=words):
        Monitor(**({"address": "http://127.0.0.1:9"} | arguments))


# -- costs ----------------------------------------------------------------------------------------


def test_a_scrape_costs_little() -> None:
    """200 scrapes at 2 Hz below 5 % of a core are 25 ms each; a page of 43 metrics takes less than
    15 ms of this process, its server being another."""
    with Child() as server, Monitor(server.url, hertz=20) as monitor:
        monitor.wait(2, 30)  # the first reads labels
        seen, begin = monitor.seen, time.process_time()
        monitor.wait(seen + 40, 60)
        used = time.process_time() - begin
        assert used / (monitor.seen - seen) < 0.015


@pytest.mark.parametrize("more", [800, pytest.param(10_000, marks=pytest.mark.full)])
def test_memory_is_flat(more: int) -> None:
    """Samples beyond those that are kept take no more memory; a kept one takes less than 8 kB, so
    the 10,000 that are kept by default stay below 80 MB."""
    first = read_page(realistic().page())
    engine = first.engines["0"]
    kept = more // 10
    loop = monitor_module._Loop(Address.of("http://127.0.0.1:9"), 0.5, kept)
    loop.pages = 1  # not the first: no version is asked for

    def take(count: int) -> None:
        """Pages on which every count grew, and every histogram in three buckets."""
        for _ in range(count):
            n = loop.pages
            histograms = {
                name: replace(old, cumulative=tuple(
                    c + n * ((i >= 3) + (i >= 5) + (i >= 8)) for i, c in enumerate(old.cumulative)
                ))
                for name, old in engine.histograms.items()
            }  # fmt: skip
            counters = {name: count + n for name, count in engine.counters.items()}
            later = replace(engine, counters=counters, histograms=histograms)
            loop._took(
                Answer(body=b"", at=float(n), clock=float(n)), replace(first, engines={"0": later})
            )

    gc.collect()
    tracemalloc.start()
    try:
        begin = tracemalloc.get_traced_memory()[0]
        take(kept + 1)
        full = tracemalloc.get_traced_memory()[0] - begin
        take(more)
        gc.collect()
        later = tracemalloc.get_traced_memory()[0] - begin
    finally:
        tracemalloc.stop()
    assert len(loop.samples) == kept
    assert loop.seen == kept + more
    assert not any(sample.restarted for sample in loop.samples)
    assert all(sample.ttft and sample.ttft.count == 3 for sample in loop.samples)
    assert full / kept < 8000
    assert later - full < 100_000
