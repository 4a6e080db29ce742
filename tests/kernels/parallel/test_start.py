"""Ranks that answer, fail, hang and are killed: what is said, and that nothing is left."""

from __future__ import annotations

import errno
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import workbench
from workbench.errors import KernelError
from workbench.kernels.parallel import start
from workbench.kernels.parallel.rank_process import in_words
from workbench.kernels.parallel.start import FOLLOW_UP, Failure, first_of, run_ranks

HERE = Path(__file__).parent
ROOT = Path(workbench.__file__).parent.parent
SURROUNDINGS = {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}


def ended(pid: int, within: float = 5.0) -> bool:
    """Whether the process has ended (a zombie that nobody has waited for has)."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return True
        if stat.rpartition(")")[2].split()[0] in "ZX":
            return True
        time.sleep(0.05)
    return False


class Heard:
    """Progress that is kept; the ranks tell their process ids by it."""

    def __init__(self) -> None:
        self.all: list[tuple[int, int, str]] = []
        self.last: float | None = None

    def __call__(self, done: int, of: int, label: str) -> None:
        self.last = time.monotonic()
        self.all.append((done, of, label))

    def pids(self) -> list[int]:
        return [int(each) for _, _, label in self.all for each in label.split()]


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: Heard) -> Iterator[None]:
    """No temporary file, no shared memory and no process that told its id is left by any test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    shared = set(os.listdir("/dev/shm"))
    yield
    assert list(folder.iterdir()) == []
    assert {each for each in os.listdir("/dev/shm") if "torch_" in each or "nccl" in each} <= shared
    assert [pid for pid in heard.pids() if not ended(pid, within=0.2)] == []


def run(job: str, heard: Heard, ranks: int = 2, /, **request: Any) -> dict[str, Any]:
    return run_ranks(
        f"start_jobs:{job}", request, ranks, device="cpu", told=heard, environment=SURROUNDINGS
    )


def refusal(job: str, heard: Heard, ranks: int = 2, /, **request: Any) -> KernelError:
    """What the job fails with, within ten seconds after the ranks have met."""
    with pytest.raises(KernelError) as caught:
        run(job, heard, ranks, **request)
    assert heard.last is None or time.monotonic() - heard.last < 10
    return caught.value


# -- what goes well -----------------------------------------------------------------------------


def test_two_ranks_add_up_and_the_answer_of_rank_0_comes_back(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    answer = run("total", heard, values=[1.5, -4.0], long=3_000_000)
    assert answer["sum"] == [4.5, -12.0], "one and two times the values"
    assert (answer["rank"], answer["world"], len(answer["long"])) == (0, 2, 3_000_000)
    assert answer["multicast"] == ["0", "1", "1"], "also where the user asks for it"
    assert [each[:2] for each in heard.all] == [(0, 1)], "rank 0 alone tells"
    assert len(set(heard.pids())) == 2
    assert os.getpid() not in heard.pids()


@pytest.mark.full
def test_four_ranks(heard: Heard) -> None:
    answer = run("total", heard, 4, values=[1.0])
    assert (answer["sum"], answer["world"]) == ([10.0], 4)
    assert len(set(heard.pids())) == 4


def test_the_cores_are_shared_out(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    for ranks in (1, 2 * cores):
        made = start._environment(0, ranks, "cpu", 1, {})
        assert made["OMP_NUM_THREADS"] == str(max(1, cores // ranks))
    assert start._environment(0, 1, "cpu", 1, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"


# -- ranks that end badly -----------------------------------------------------------------------


@pytest.mark.parametrize("leave_first", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_first_error_is_said_and_not_what_it_does_to_the_others(
    heard: Heard, leave_first: bool
) -> None:
    error = refusal("refuse", heard, 3, leave_first=leave_first)
    assert str(error) == "rank 1 of 3: the third layer is missing"
    assert len(heard.pids()) == 3


@pytest.mark.full
def test_what_all_ranks_say_is_said_once(heard: Heard) -> None:
    assert str(refusal("refuse_alike", heard)) == "there is nothing to do"


@pytest.mark.full
def test_a_rank_that_leaves_without_a_word(heard: Heard) -> None:
    said = str(refusal("leave", heard))
    assert said.startswith("rank 1 of 2: it ended with exit code 3 and no answer")
    assert said.endswith("its last words: the disk is on fire")


@pytest.mark.full
def test_a_full_gpu(heard: Heard) -> None:
    said = str(refusal("fill_memory", heard))
    assert said.startswith("rank 1 of 2: the GPU's memory was full (CUDA out of memory. Tried to ")
    assert "--layers" in said
    assert "\n" not in said


def test_a_defect_is_one_sentence_and_its_traceback_a_note(
    heard: Heard, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORKBENCH_DEBUG", "1")
    error = refusal("divide", heard)
    assert str(error).startswith("rank 1 of 2: ZeroDivisionError: ")
    assert "(start_jobs.py, line " in str(error)
    assert "\n" not in str(error)
    assert "1 // (ranks.rank - 1)" in error.__notes__[0]
    assert "1 // (ranks.rank - 1)" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ("start_jobs:nothing", "start_jobs has no function nothing, which the job start_jobs:not"),
        ("start_jobs_elsewhere:total", "the job start_jobs_elsewhere:total is in no module that"),
    ],
)
def test_a_job_that_does_not_exist(job: str, said: str) -> None:
    with pytest.raises(KernelError, match="^" + said):
        run_ranks(job, {}, 1, device="cpu", environment=SURROUNDINGS)


@pytest.mark.parametrize("tensor", [True, pytest.param(False, marks=pytest.mark.full)])
def test_an_answer_that_json_cannot_say(heard: Heard, tensor: bool) -> None:
    said = str(refusal("unsayable", heard, 1, tensor=tensor))
    assert said.startswith("the job start_jobs:unsayable answers with what JSON cannot say: ")


def test_a_rank_that_never_comes(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "JOIN_SECONDS", 2.0)
    monkeypatch.setitem(SURROUNDINGS, "START_JOBS_ABSENT", "0")
    assert str(refusal("total", heard, 1)).startswith("rank 0 of 1 had not started after 2 s; ")


@pytest.mark.parametrize(
    ("here", "joined", "said"),
    [
        ((True, False, False), (False, False, False), "ranks 1, 2 of 3 had not started"),
        ((True, True, True), (True, False, True), "the 3 ranks started and did not meet"),
    ],
)
def test_who_has_not_come(here: tuple[bool, ...], joined: tuple[bool, ...], said: str) -> None:
    ranks: list[Any] = [
        SimpleNamespace(number=i, here=each[0], joined=each[1])
        for i, each in enumerate(zip(here, joined, strict=True))
    ]
    assert start._apart(ranks).startswith(said)
    assert ("(waiting: 1)" in start._apart(ranks)) == all(here)


def test_a_killed_rank_and_what_it_left_in_shared_memory(heard: Heard) -> None:
    """What another process uses stays."""
    used, left = (Path(f"/dev/shm/nccl-{os.getpid()}{each}") for each in ("use", "new"))
    try:
        with used.open("wb"):
            said = str(refusal("litter", heard, nccl=str(left)))
            assert said.startswith("rank 1 of 2: it was ended by SIGKILL, often because the machi")
            assert used.exists()
        assert not left.exists()
        assert not Path(f"/dev/shm/torch_{heard.pids()[1]}_77_0").exists()
    finally:
        for each in (used, left):
            each.unlink(missing_ok=True)


def test_what_was_there_before_the_ranks_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of its own: ranks of other tests sweep the real one."""
    monkeypatch.setattr(start, "_SHARED_MEMORY", tmp_path)
    theirs, other = tmp_path / "nccl-abc", tmp_path / "else-abc"
    for each in (theirs, other):
        each.write_bytes(b"1")
    start._sweep([], time.time() + 10)
    assert theirs.exists()
    start._sweep([], time.time() - 10)
    assert not theirs.exists()
    assert other.exists()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("job", ["refuse", "spin"])
def test_ranks_on_gpus_are_ended_in_a_collective_and_in_a_kernel(heard: Heard, job: str) -> None:
    with pytest.raises(KernelError, match=r"^rank 1 of 2: the third layer is missing$"):
        run_ranks(f"start_jobs:{job}", {}, 2, told=heard, environment=SURROUNDINGS)
    assert heard.last is not None
    assert time.monotonic() - heard.last < 10


# -- ranks that are stopped, or cannot be started --------------------------------------------------


def quiet_rank(pid: int = -1, **more: Any) -> Any:
    child = SimpleNamespace(pid=pid, poll=lambda: None, returncode=None)
    return start._Rank(0, child, tempfile.TemporaryFile(), threading.Thread(), **more)  # type: ignore[arg-type]


def test_a_stopped_rank_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "STOPPED_SECONDS", 0.05)
    with subprocess.Popen(["sleep", "60"]) as child:
        rank = quiet_rank(child.pid)
        try:
            start._refuse_stopped(rank, 2)
            assert rank.stopped_at is None
            child.send_signal(signal.SIGSTOP)
            while not start.is_stopped(child.pid):
                time.sleep(0.01)
            start._refuse_stopped(rank, 2)  # it may go on yet
            time.sleep(0.06)
            with pytest.raises(KernelError, match=r"rank 0 of 2 \(process \d+\) was stopped by a"):
                start._refuse_stopped(rank, 2)
            child.send_signal(signal.SIGCONT)  # one that goes on has lost nothing
            while start.is_stopped(child.pid):
                time.sleep(0.01)
            start._refuse_stopped(rank, 2)
            assert rank.stopped_at is None
        finally:
            child.kill()
            rank.errors.close()


@pytest.mark.full
def test_a_stopped_rank_is_ended_with_the_others(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "STOPPED_SECONDS", 1.0)

    def told(done: int, of: int, label: str) -> None:
        heard(done, of, label)
        os.kill(heard.pids()[1], signal.SIGSTOP)

    with pytest.raises(KernelError, match=r"^rank 1 of 2 \(process \d+\) was stopped by a signal"):
        run_ranks(
            "start_jobs:stand", {}, 2, device="cpu", told=told, environment=SURROUNDINGS
        )  # fmt: skip


def test_what_was_said_counts_also_where_nobody_listened_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After this process was stopped for longer than the ranks may take to meet."""
    monkeypatch.setattr(start, "JOIN_SECONDS", -1.0)
    rank = quiet_rank()
    events: queue.Queue[Any] = queue.Queue()
    for line in (b'{"state": "joined"}', b'{"result": {"a": 1}}'):
        events.put((rank, line, time.monotonic()))
    start._watch([rank], events, None)
    assert rank.result == {"a": 1}
    rank.errors.close()


@pytest.mark.parametrize("line", [b"3", b'"told"', b"null", b"[" * 100_000, b"\xff", b"{"])
def test_a_line_that_is_no_answer(line: bytes) -> None:
    rank = quiet_rank()
    start._take(rank, line, 1.0, None)
    assert rank.failure is not None
    assert rank.failure.sentence == "it wrote what is no answer"
    rank.errors.close()


def test_a_rank_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", full)
    with pytest.raises(KernelError, match="rank 0 of 2 could not be started: Resource temporarily"):
        run_ranks("start_jobs:total", {}, 2, device="cpu")


def test_a_rank_that_nobody_can_listen_to_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[subprocess.Popen[bytes]] = []
    given = subprocess.Popen

    def noted(*arguments: Any, **more: Any) -> Any:
        began.append(given(["sleep", "60"], **more))
        return began[-1]

    def no_thread(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(subprocess, "Popen", noted)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(KernelError, match="could not be started: can't start new thread"):
        run_ranks("start_jobs:total", {}, 1, device="cpu")
    assert [child.poll() for child in began] == [-signal.SIGKILL]


def test_no_socket_to_meet_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("socket.create_server", full)
    with pytest.raises(KernelError, match="Too many open files; bring the loopback"):
        run_ranks("start_jobs:total", {}, 1, device="cpu")


def test_a_store_that_cannot_reach_itself_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(*_: Any, master_listen_fd: int, timeout: Any, **__: Any) -> Any:
        os.close(master_listen_fd)
        assert timeout.total_seconds() <= 30
        raise torch.distributed.DistNetworkError("no connection\nframe #1")

    monkeypatch.setattr("torch.distributed.TCPStore", unreachable)
    with pytest.raises(KernelError, match=r"cannot meet on 127\.0\.0\.1: no connection frame #1; "):
        run_ranks("start_jobs:total", {}, 1, device="cpu")


def test_a_killed_ranks_mailbox_is_swept_up_and_no_other() -> None:
    left, other = (Path(f"/dev/shm/workbench-mailbox-{n}-x_y1") for n in (2**22 + 1, 2**22 + 2))
    try:
        for each in (left, other):
            each.write_bytes(b"1")
        start._sweep([2**22 + 1], time.time())
        assert not left.exists()
        assert other.exists()
    finally:
        for each in (left, other):
            each.unlink(missing_ok=True)


# -- which error is the first -------------------------------------------------------------------


def failure(rank: int, at: float, kind: str) -> Failure:
    return Failure(rank=rank, at=at, kind=kind, sentence="")


@pytest.mark.parametrize(
    ("failures", "first"),
    [
        ([failure(0, 2.0, "refused"), failure(1, 1.0, "memory")], 1),
        ([failure(0, 1.0, FOLLOW_UP), failure(1, 2.0, "ended"), failure(2, 3.0, "defect")], 1),
        ([failure(3, 1.5, FOLLOW_UP), failure(1, 2.0, FOLLOW_UP)], 3),
        ([failure(2, 1.0, "refused"), failure(1, 1.0, "refused")], 1),
    ],
)
def test_the_earliest_counts_that_is_no_follow_up(failures: list[Failure], first: int) -> None:
    assert first_of(failures).rank == first
    assert first_of(failures[::-1]).rank == first


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.distributed.DistBackendError("NCCL error: remote process exited"), FOLLOW_UP),
        (torch.distributed.DistNetworkError("the store is gone"), FOLLOW_UP),
        (RuntimeError("[gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), FOLLOW_UP),
        (raised_from(KernelError("no sum"), RuntimeError("NCCL communicator")), FOLLOW_UP),
        (torch.distributed.DistBackendError("Cuda failure 2 'out of memory'"), "memory"),
        (KernelError("an expert by the name of gloo"), "refused"),
        (RuntimeError("shapes do not fit"), "defect"),
        (RuntimeError("DefaultCPUAllocator: not enough memory"), "memory"),
        (torch.AcceleratorError("CUDA error: an illegal memory access", 700), "gpu"),
        (FileNotFoundError(2, "No such file", "weights"), "defect"),
        (SystemExit(2), "defect"),
    ],
)  # fmt: skip
def test_the_kinds_of_errors(error: BaseException, kind: str) -> None:
    found, sentence = in_words(error)
    assert found == kind
    assert sentence
    assert "\n" not in sentence


# -- a parent that is interrupted or killed -----------------------------------------------------

PARENT = """
import sys
from workbench.kernels.parallel.start import run_ranks
told = lambda done, of, label: print(label, flush=True)
there = {"PYTHONPATH": sys.argv[1]}
run_ranks("start_jobs:hang", {}, 2, device="cpu", told=told, environment=there)
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_the_ranks_end_with_their_parent(number: signal.Signals, code: int) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(HERE)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert parent.stdout is not None
    pids = [int(each) for each in parent.stdout.readline().split()]
    ranks, helpers = pids[::2], pids[1::2]
    try:
        assert len(pids) == 4, parent.communicate()
        assert not any(ended(pid, within=0.1) for pid in pids)
        parent.send_signal(number)
        _, errors = parent.communicate(timeout=15)
        assert parent.returncode == code, errors
        assert [pid for pid in ranks if not ended(pid)] == []
        if number == signal.SIGINT:  # nobody is left to end a rank's own helpers after SIGKILL
            assert "KeyboardInterrupt" in errors
            assert [pid for pid in helpers if not ended(pid)] == []
    finally:
        parent.kill()
        parent.wait()
        for pid in pids:
            if not ended(pid, within=0.1):
                os.kill(pid, signal.SIGKILL)


# -- what is refused before anything starts -----------------------------------------------------


@pytest.mark.parametrize(
    ("job", "request_", "ranks", "device", "said"),
    [
        ("start_jobs:total", {}, 0, "cpu", "^0 is no number of ranks"),
        ("start_jobs:total", {}, True, "cpu", "^True is no number of ranks"),
        ("start_jobs:total", {}, 2, "tpu", "^ranks run on cuda or cpu, not on 'tpu'"),
        ("start_jobs", {}, 2, "cpu", "^'start_jobs' names no job; write module:function"),
        ("start_jobs:total", {"x": float("inf")}, 2, "cpu", "^the request for start_jobs:total"),
        ("start_jobs:total", {"x": object()}, 2, "cpu", "^the request for start_jobs:total"),
    ],
)
def test_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, job: str, request_: Any, ranks: int, device: str, said: str
) -> None:
    monkeypatch.setattr(subprocess, "Popen", pytest.fail)
    with pytest.raises(KernelError, match=said):
        run_ranks(job, request_, ranks, device=device)


@pytest.mark.parametrize(("gpus", "said"), [(2, "give --gpus 2 or fewer"), (0, "sees no GPU")])
def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch, gpus: int, said: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(subprocess, "Popen", pytest.fail)
    with pytest.raises(KernelError, match=said):
        run_ranks("start_jobs:total", {}, 3)


def test_a_rank_starts_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(start.MARK, "1")
    with pytest.raises(KernelError, match="a rank starts none"):
        run_ranks("start_jobs:total", {}, 2, device="cpu")


def test_the_store_is_on_the_loopback_address_alone() -> None:
    with start.contextlib.ExitStack() as held:
        port = start._hold_store(held)
        listening = [
            fields[1]
            for name in ("tcp", "tcp6")
            for fields in map(str.split, Path(f"/proc/net/{name}").read_text().splitlines()[1:])
            if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A"
        ]
    assert listening == [f"0100007F:{port:04X}"]


# -- torchrun -----------------------------------------------------------------------------------


def torchrun(job: str, request: dict[str, Any], folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "request.json").write_text(json.dumps(request))
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
            *("-m", "workbench.kernels.parallel.rank_process", f"start_jobs:{job}"),
            *("--request", str(folder / "request.json"), "--device", "cpu"),
            *("--out", str(folder / "answer.json")),
        ],
        # A folder for what torchrun itself leaves behind.
        env={**os.environ, **SURROUNDINGS, "PYTHONPATH": f"{ROOT}:{HERE}", "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )  # fmt: skip


@pytest.mark.full
def test_torchrun_starts_them_too(tmp_path: Path) -> None:
    done = torchrun("total", {"values": [2.0]}, tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert (answer["sum"], answer["world"]) == ([6.0], 2)
    assert answer["multicast"] == ["0", "1", "1"]


@pytest.mark.full
def test_under_torchrun_an_error_is_a_sentence(tmp_path: Path) -> None:
    done = torchrun("refuse", {}, tmp_path)
    assert done.returncode != 0
    assert "workbench: rank 1 of 2: the third layer is missing\n" in done.stderr
    assert not (tmp_path / "answer.json").exists()


def test_under_torchrun_an_answer_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path,
) -> None:
    from workbench.kernels.parallel import rank_process

    options = rank_process._options(["json:loads", "--out", str(tmp_path)])
    with pytest.raises(workbench.errors.WorkbenchError, match="it is a folder"):
        rank_process._run(options, None)  # type: ignore[arg-type]
