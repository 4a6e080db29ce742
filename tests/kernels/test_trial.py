"""Variants that nobody has vouched for, in a process of their own: right, wrong, and destructive.

A child imports torch and Triton, which takes seconds, so every behaviour that needs a child of its
own beyond the first few is `full`.
"""

from __future__ import annotations

import json
import linecache
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from workbench.errors import KernelError
from workbench.kernels import ledger, registry, triton_compile
from workbench.kernels.check import STATUSES, Verdict, check
from workbench.kernels.child import MARK, Ended, taken
from workbench.kernels.registry import register, select
from workbench.kernels.shapes import Shapes
from workbench.kernels.trial import OUTPUT_BYTES, Trial, source_of, trial
from workbench.kernels.triton_runtime import why_not

needs_triton = pytest.mark.skipif(
    why_not("cpu") is not None, reason="Triton does not run on this machine's CPU"
)

HEAD = """
import os, signal, subprocess, sys, time
import torch
from workbench.kernels import reference
from workbench.kernels.reach import Reach
from workbench.kernels.registry import register
"""
RIGHT = """
import torch
from workbench.kernels.registry import register
from workbench.kernels.triton_runtime import tl, triton


@triton.jit
def root_mean_square(X, W, OUT, stride, H: tl.constexpr, EPS: tl.constexpr, B: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, B)
    here = at < H
    x = tl.load(X + row * stride + at, mask=here, other=0.0).to(tl.float32)
    w = tl.load(W + at, mask=here, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / H + EPS)
    tl.store(OUT + row * H + at, x * scale * w, mask=here)


@register("rms_norm", "mine")
def mine(x, weight, eps):
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        block = triton.next_power_of_2(width)
        root_mean_square[(rows,)](x, weight, out, x.stride(0), width, eps, block)
    return out
"""
FEW: dict[str, Any] = {"tokens": (1, 3), "dtypes": ("bfloat16",), "device": "cpu"}


def norm(body: str, before: str = "") -> str:
    """Source of an RMSNorm named "mine" with this body; ``y`` is the right answer."""
    inside = "y = reference.rms_norm(x, weight, eps)\n" + dedent(body).strip() + "\n"
    lines = "".join(f"    {line}\n" for line in inside.splitlines())
    return (
        f'{HEAD}{dedent(before)}\n@register("rms_norm", "mine")\ndef mine(x, weight, eps):\n{lines}'
    )


def tried(source: str, shapes: Shapes, **how: Any) -> Trial:
    return trial("rms_norm", "mine", shapes, source=source, **FEW | how)


def gone(pid: int, within: float = 5.0) -> bool:
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


HANGING = """
def note_and_hang(path):
    helper = subprocess.Popen(["sleep", "600"])
    with open(path + ".part", "w") as file:
        file.write(f"{os.getpid()} {helper.pid}")
    os.rename(path + ".part", path)
    while True:
        time.sleep(0.01)
"""


def own() -> None:
    """Register here what the child registers there: the trial's verdict is about it."""

    @register("rms_norm", "mine")
    def mine(x: Any, weight: Any, eps: Any) -> Any:
        return x


@contextmanager
def cell(text: str, name: str) -> Iterator[dict[str, Any]]:
    """Run a cell as IPython does: compiled under its own file name, lines in linecache."""
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(compile(text, name, "exec"), space)
        yield space
    finally:
        del linecache.cache[name]


# -- what is right ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def right(tiny: Shapes) -> tuple[Trial, list[str]]:
    told: list[str] = []
    return tried(RIGHT, tiny, on_progress=told.append), told


@needs_triton
def test_a_right_kernel_passes(right: tuple[Trial, list[str]]) -> None:
    found, told = right
    assert found.passed, str(found)
    assert (found.status, found.gate, found.error) == ("passed", "", "")
    assert found.verdict is not None
    assert found.verdict.passed
    assert found.verdict.cases == 5, "two sizes, one again, strided rows, an empty batch"
    assert found.verdict.max_error is not None
    assert 0 < found.verdict.max_error < 2**-8
    assert str(found) == found.verdict.sentence()
    assert told[0] == "importing"
    assert "checking 0 of 5: 1 token, bfloat16" in told
    assert told[-1] == "compiling for sm_90 and sm_100"


@needs_triton
def test_it_is_compiled_for_both_generations(right: tuple[Trial, list[str]]) -> None:
    compiled = right[0].compiled
    assert {(c.kernel, c.target) for c in compiled} == {
        ("root_mean_square", "sm_90"),
        ("root_mean_square", "sm_100"),
    }
    for one in compiled:
        assert one.error is None
        assert one.registers is not None
        assert 0 < one.registers <= 255
        assert one.spill_bytes == 0


@needs_triton
def test_it_is_not_timed_on_a_cpu(right: tuple[Trial, list[str]]) -> None:
    assert right[0].timing is None
    assert right[0].untimed == "interpreted: not a speed"


@needs_triton
def test_a_trial_as_json(right: tuple[Trial, list[str]]) -> None:
    values = json.loads(json.dumps(right[0].to_dict(), allow_nan=False))
    assert values["passed"] is True
    assert values["verdict"]["max_error"] == right[0].verdict.max_error  # type: ignore[union-attr]
    assert [c["target"] for c in values["compiled"]] == [c.target for c in right[0].compiled]
    assert values["seconds"] > 0


# -- what is refused ----------------------------------------------------------------------------

NOISY = norm(
    """
    print("loud " * 100_000)
    sys.stderr.write("louder " * 100_000 + "\\n")
    os.write(1, b'{"verdict": {"status": "passed"}}\\n\\xff\\xfe\\x00 [] \\n' * 1000)
    os.system("echo from a shell")
    return torch.zeros_like(y)
    """
)


@pytest.mark.full
def test_zeros_are_refused_however_loud_they_are(tiny: Shapes) -> None:
    """Megabytes of output neither block the child nor get among its answers."""
    with cell(NOISY, "/tmp/ipykernel_4242/1.py"):
        select(rms_norm="mine")
        select(softcap="torch")
        found = trial("rms_norm", "mine", tiny, **FEW)
    assert (found.status, found.gate) == ("refused", "relative error"), str(found)
    assert "1 token, bfloat16" in found.error
    assert found.verdict is not None
    assert [f.gate for f in found.verdict.findings] == ["relative error"], "the one that failed"
    assert found.verdict.findings[0].found == pytest.approx(1, abs=0.01)
    assert len(found.output) <= OUTPUT_BYTES
    assert "from a shell" in found.output or "loud" in found.output or "[]" in found.output
    json.dumps(found.to_dict(), allow_nan=False)
    # It is taken out of the selection, and nothing else is.
    assert [(r.op, r.variant) for r in registry.selection()] == [("softcap", "torch")]
    # The verdict is known until the variant is another.
    assert ledger.verdict("rms_norm", "mine") == found.verdict
    own()
    assert ledger.verdict("rms_norm", "mine") is None


def test_an_endless_loop_ends_at_the_time_limit(tiny: Shapes, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    source = norm(f"note_and_hang({str(note)!r})", before=HANGING)
    own()
    select(rms_norm="mine")
    limit = 5.0
    while True:  # a machine that is busy may take longer than that to get to the loop
        started = time.monotonic()
        found = tried(source, tiny, seconds=limit)
        took = time.monotonic() - started
        if note.exists() or limit > 100:
            break
        limit *= 3
    assert found.status == "time limit", str(found)
    assert f"did not return within {limit:g} s" in found.error
    assert "while checking 0 of 5" in found.error
    assert limit <= took < limit + 5
    assert found.seconds == pytest.approx(took, abs=1)
    pids = [int(pid) for pid in note.read_text().split()]
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids), "neither the child nor what it started is left"
    assert registry.selection() == ()
    assert found.verdict is not None
    assert found.verdict.status == "time limit"
    assert ledger.verdict("rms_norm", "mine") is None, "the source was not the registered one's"


@needs_triton
def test_a_write_out_of_bounds_takes_down_the_child_alone(tiny: Shapes) -> None:
    far = RIGHT.replace("OUT + row * H + at", "OUT + (row + 1) * 1099511627776 + at")
    assert far != RIGHT
    found = tried(far, tiny)
    assert found.status == "crashed", str(found)
    assert "signal SIG" in found.error
    assert "while checking 0 of 5" in found.error
    assert found.compiled == ()
    assert found.verdict is not None
    assert found.verdict.status == "crashed"


def test_an_interrupt_here_ends_the_child(tiny: Shapes, tmp_path: Path) -> None:
    """Ctrl-C, or a notebook's stop button, while the child is inside the kernel."""
    note = tmp_path / "pids"
    source = norm("return y", before=f"{HANGING}\nnote_and_hang({str(note)!r})")

    def interrupt() -> None:
        while not note.exists() and not over.is_set():
            time.sleep(0.02)
        if not over.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    over = threading.Event()
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            tried(source, tiny, seconds=200)
    finally:
        over.set()
        thread.join()
    pids = [int(pid) for pid in note.read_text().split()]
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)


def test_a_trial_inside_a_trial_is_refused(tiny: Shapes) -> None:
    """A cell that registers and tries: the child runs it again, and must not start another."""
    inside = """
    from workbench.kernels import Shapes, try_variant
    from workbench.model.presets import resolve
    try_variant("rms_norm", "mine", Shapes.of(resolve("beam-tiny").config))
    """
    found = tried(norm("return y") + dedent(inside), tiny)
    assert found.status == "raised", str(found)
    assert "KernelError: mine of rms_norm is being tried in this very process" in found.error
    assert "in another cell or file" in found.error


def test_a_child_starts_no_child(monkeypatch: pytest.MonkeyPatch, tiny: Shapes) -> None:
    monkeypatch.setenv(MARK, "1")
    with pytest.raises(KernelError, match="starts no trial of its own"):
        tried(norm("return y"), tiny)
    with pytest.raises(triton_compile.CompileError, match="it starts none"):
        triton_compile.compile_in_child([], timeout=5)


# -- what a child may say -----------------------------------------------------------------------


@pytest.mark.full
def test_what_a_kernel_writes_on_the_pipe_is_no_verdict(tiny: Shapes) -> None:
    body = """
    for fd in range(3, 40):
        try:
            os.write(fd, b'\\n{"verdict": 5}\\n')
        except OSError:
            pass
    return y
    """
    found = tried(norm(body), tiny)
    assert (found.status, found.gate) == ("crashed", ""), str(found)
    assert found.error == (
        "the process wrote something that is no verdict, while checking 0 of 5: 1 token, bfloat16"
    )


PASSED = Verdict(op="rms_norm", variant="mine", status="passed", cases=5, max_error=1e-3).to_dict()
REFUSED = Verdict(
    op="rms_norm", variant="mine", status="refused", gate="finite", reason="1 of 8"
).to_dict()
FAILED = {
    "case": "1 token", "output": "y", "gate": "finite", "found": 1.0, "limit": 0.0,
    "passed": False, "note": "",
}  # fmt: skip


def said(monkeypatch: pytest.MonkeyPatch, tiny: Shapes, *lines: str | bytes) -> Trial:
    """A trial whose child writes these lines and ends well."""

    def child(module: str, request: str, deadline: float, take: Any, **how: Any) -> Ended:
        for line in lines:
            if not taken(line if isinstance(line, bytes) else line.encode(), take):
                return Ended(code=-9, late=False, spoiled=True, output="")
        return Ended(code=0, late=False, spoiled=False, output="")

    monkeypatch.setattr("workbench.kernels.trial.run_child", child)
    return tried(norm("return y"), tiny)


@pytest.mark.parametrize(
    "line",
    [
        "", "\n", "5", "null", "[1, 2]", "{}", "{", b"\xff\xfe", "[" * 100_000, "9" * 5000,
        '{"verdict": NaN}', '{"progress": 5}', '{"error": {"a": [1]}}', '{"untimed": 7}',
        '{"status": "passed"}', '{"progress": "a", "verdict": {}}', '{"timing": "x"}',
        json.dumps({"timing": {"op": "rms_norm", "variant": "mine", "microseconds": 1.0}}),
        *(
            json.dumps({"verdict": PASSED | change})
            for change in (
                {"op": []}, {"op": "softcap"}, {"variant": None}, {"variant": "yours"},
                {"status": "banana"}, {"status": ["passed"]}, {"status": "refused"},
                {"passed": False}, {"passed": 1}, {"gate": 3}, {"reason": None}, {"cases": True},
                {"cases": -1}, {"cases": 2.5}, {"max_error": "0"}, {"max_error": float("inf")},
                {"max_error": 10**400}, {"seconds": None}, {"failed": 5}, {"failed": [5]},
                {"failed": [{}]}, {"more": 1}, {"failed": [FAILED | {"found": "x"}]},
                {"failed": [FAILED | {"passed": True}]}, {"failed": [FAILED | {"limit": False}]},
            )
        ),
        *(
            json.dumps({"verdict": {k: v for k, v in PASSED.items() if k != lost}})
            for lost in PASSED
        ),
        json.dumps({"verdict": {}}), json.dumps({"verdict": [PASSED]}),
    ],
)  # fmt: skip
def test_anything_else_counts_as_a_crash(
    line: str | bytes, monkeypatch: pytest.MonkeyPatch, tiny: Shapes
) -> None:
    for before in ((), (json.dumps({"verdict": PASSED}),)):
        found = said(monkeypatch, tiny, *before, line)
        assert found.status == "crashed", found
        assert "wrote something that is no verdict" in found.error
        assert found.verdict is not None
        assert not found.verdict.passed
        json.dumps(found.to_dict(), allow_nan=False)


def test_what_is_well_formed_is_believed(monkeypatch: pytest.MonkeyPatch, tiny: Shapes) -> None:
    """And what is refused stays refused, whatever is said after it."""
    passed, refused = (json.dumps({"verdict": v}) for v in (PASSED, REFUSED | {"failed": [FAILED]}))
    assert said(monkeypatch, tiny, '{"progress": "x"}', passed, '{"untimed": "y"}').passed
    for lines in ((refused, passed), (passed, refused), (refused, "garbage")):
        found = said(monkeypatch, tiny, *lines)
        assert (found.status, found.gate) == ("refused", "finite")
        assert found.verdict is not None
        assert found.verdict.to_dict() == REFUSED | {"failed": [FAILED]}
    odd = said(monkeypatch, tiny, '{"error": "\\udc80 bad\\n\\n second"}')
    assert odd.error == "? bad second", "half a character and a second line are taken out"


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    """Killed without a chance to clean up: no process is left, and no file."""
    note, scratch = tmp_path / "pid", tmp_path / "scratch"
    scratch.mkdir()
    # The module "code" runs what it is sent, line by line (and would print a value: an answer).
    request = (
        f"import os, time; n = open({str(note)!r} + '.part', 'w').write(str(os.getpid())); "
        f"os.rename({str(note)!r} + '.part', {str(note)!r}); time.sleep(600)\n"
    )
    source = (
        "import time; from workbench.kernels.child import run_child\n"
        f"run_child('code', {request!r}, time.monotonic() + 600, lambda message: True)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", source], env=os.environ | {"TMPDIR": str(scratch)}
    )
    end = time.monotonic() + 60
    while not note.exists() and parent.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    parent.send_signal(signal.SIGTERM)
    parent.wait()
    assert gone(int(note.read_text()))
    assert list(scratch.iterdir()) == []


def result(**change: Any) -> str:
    made = {"kernel": "k", "target": "sm_90", "registers": 32, "seconds": 1.0, "features": ("mma",)}
    fields = triton_compile.Compiled(job="mine", **made).to_dict()  # type: ignore[arg-type]
    return json.dumps({"result": fields | change})


@pytest.mark.parametrize(
    "line",
    [
        "[]", "{}", "nonsense", "[" * 100_000, '{"done": "yours"}', '{"result": {}}',
        '{"result": 7}',
        result(job="yours"), result(registers="many"), result(registers=True), result(kernel=None),
        result(registers=1.5), result(seconds=float("nan")), result(seconds=10**400),
        result(features="mma"), result(features=[1]), result(constants=[]), result(error=3),
        result(constants={"B": 1}), result(more=1),
    ],
)  # fmt: skip
def test_what_is_no_compiled_kernel(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs the job that was running, and the next goes on in another child."""
    runs = iter(((result(), line), ('{"done": "next"}',)))

    def child(module: str, request: str, deadline: float, take: Any, **how: Any) -> Ended:
        fine = all(taken(each.encode(), take) for each in next(runs))
        return Ended(code=0, late=False, spoiled=not fine, output="")

    monkeypatch.setattr(triton_compile, "run_child", child)
    jobs = [triton_compile.Job(name=name, call="x:y") for name in ("mine", "next")]
    found = triton_compile.compile_in_child(jobs, 60)
    assert [(c.job, c.registers, c.error) for c in found] == [
        ("mine", 32, None),
        ("mine", None, "the compiling process wrote something that is no result"),
    ]


# status, gate, and what the error says
BAD: dict[str, tuple[str, str, str, str]] = {
    "no Python": ("def mine(:\n", "raised", "", "SyntaxError: "),
    "a requirement that fails": (
        norm("return y").replace('"mine")', '"mine", requires=[lambda where: 1 / 0])'),
        "unavailable", "", "its requirement <lambda> failed: ZeroDivisionError: division by zero",
    ),
    "wrong dtype": (norm("return y.float()"), "refused", "dtype", "torch.float32 where"),
    "NaN": (norm("y[-1, -1] = float('nan')\nreturn y"), "refused", "finite", "1 of"),
    "not written": (norm("return torch.empty_like(y)"), "refused", "unwritten", "not written"),
    "wrong shape": (norm("return y[None]"), "refused", "shape", "is due"),
    "no result": (norm("pass"), "raised", "result", "rms_norm must return 1 tensor(s)"),
    "raises at call": (norm("raise ValueError('no luck')"), "raised", "", "ValueError: no luck"),
    "raises at import": (norm("return y", "1 / 0"), "raised", "", "ZeroDivisionError"),
    "exits at import": (norm("return y", "sys.exit(3)"), "raised", "", "SystemExit: 3"),
    "exits at call": (norm("sys.exit(3)"), "raised", "", "1 token, bfloat16: SystemExit: 3"),
    "exits as if well": (norm("os._exit(0)"), "crashed", "", "exit code 0, while checking"),
    "exits hard": (norm("os._exit(7)"), "crashed", "", "exit code 7, while checking 0 of 5"),
    "breaks after it passed": (
        norm("return y", "import atexit\natexit.register(os.kill, os.getpid(), signal.SIGSEGV)"),
        "crashed", "", "ended with signal SIGSEGV, while timing",
    ),
    "registers nothing": (HEAD, "raised", "", "there is no variant 'mine' of rms_norm"),
    "registers another": (
        norm("return y").replace('"mine"', '"yours"'), "raised", "", "there is no variant 'mine'",
    ),
    "closes what it answers on": (
        norm("os.closerange(3, 256)\nreturn y"), "crashed", "", "ended with exit code 1",
    ),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_said(case: str, tiny: Shapes) -> None:
    source, status, gate, says = BAD[case]
    own()
    select(rms_norm="mine")
    found = tried(source, tiny)
    assert status in STATUSES
    assert (found.status, found.gate) == (status, gate), str(found)
    assert says in found.error
    assert "\n" not in found.error
    assert not found.passed
    assert found.compiled == ()
    assert found.timing is None
    assert registry.selection() == ()
    assert found.verdict is not None
    kept = found.verdict
    assert (kept.status, kept.gate, kept.reason) == (status, gate, found.error)
    assert ledger.verdict("rms_norm", "mine") is None, "the source was not the registered one's"
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.full
@pytest.mark.parametrize("by", [-1, 1])
def test_a_window_that_is_off_by_one(by: int, tiny: Shapes) -> None:
    source = f"""{HEAD}
@register("decode_attention", "mine")
def mine(q, k, v, reach, **scales):
    window = None if reach.window is None else reach.window + {by}
    other = Reach(reach.slots, reach.first, span=reach.span, window=window)
    return reference.decode_attention(q, k, v, other, **scales)
"""
    found = trial("decode_attention", "mine", tiny, source=source, **FEW)
    assert found.status == "refused", str(found)
    assert found.gate in ("relative error", "worst row", "worst element")
    assert "sliding" in found.error
    if by == 1:
        same = source.replace("reach.window + 1", "reach.window")
        assert trial("decode_attention", "mine", tiny, source=same, **FEW).passed


@pytest.mark.full
def test_a_helper_that_left_the_group_keeps_nobody_waiting(tiny: Shapes, tmp_path: Path) -> None:
    """It holds the pipe of the answers open, and outlives the child."""
    note = tmp_path / "pid"
    body = f"""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        time.sleep(60)
        os._exit(0)
    open({str(note)!r}, "w").write(str(pid))
    os._exit(5)
    """
    started = time.monotonic()
    found = tried(norm(body), tiny, seconds=15)
    try:
        assert not found.passed
        assert found.status in ("crashed", "time limit")
        assert time.monotonic() - started < 30
    finally:
        os.kill(int(note.read_text()), signal.SIGKILL)


@pytest.mark.full
def test_a_torch_variant_is_timed_and_not_compiled(tiny: Shapes) -> None:
    """It runs as it is, on a CPU too: what is timed is not an interpreter."""
    told: list[str] = []
    found = tried(norm("time.sleep(0.002)\nreturn y"), tiny, on_progress=told.append)
    assert found.passed
    assert found.compiled == ()
    assert found.untimed == ""
    assert found.timing is not None
    assert (found.timing["op"], found.timing["variant"]) == ("rms_norm", "mine")
    assert (found.timing["tokens"], found.timing["status"]) == (3, "passed")
    assert 2000 < found.timing["microseconds"] < 200_000, "it sleeps two milliseconds"
    assert found.timing["ratio_to_reference"] < 1
    assert "timing" in told
    json.dumps(found.to_dict(), allow_nan=False)


# -- the verdicts that are kept -----------------------------------------------------------------


@pytest.mark.full
def test_a_variant_that_is_replaced_during_its_trial(tiny: Shapes) -> None:
    """The verdict is on what was registered when the trial began."""
    with cell(norm("return y"), "/tmp/ipykernel_4242/5.py"):
        found = trial(
            "rms_norm", "mine", tiny, **FEW,
            on_progress=lambda said: own() if said == "importing" else None,
        )  # fmt: skip
    assert found.passed
    assert ledger.verdict("rms_norm", "mine") is None


def test_a_verdict_is_kept_for_the_source_that_was_tried(
    monkeypatch: pytest.MonkeyPatch, tiny: Shapes
) -> None:
    """Other code under the same name vouches for nothing."""
    passed = json.dumps({"verdict": PASSED})
    text = norm("return 2 * y")
    with cell(text, "/tmp/ipykernel_4242/77.py"):
        assert said(monkeypatch, tiny, passed).passed  # of other source
        assert ledger.verdict("rms_norm", "mine") is None
        assert trial("rms_norm", "mine", tiny, source=text, **FEW).passed
        assert ledger.verdict("rms_norm", "mine") is not None
        registry.register("rms_norm", "mine")(registry.find("rms_norm", "mine").function)
        assert trial("rms_norm", "mine", tiny, **FEW).passed
        kept = ledger.verdict("rms_norm", "mine")
        assert kept is not None
        assert kept.passed


# -- where the source comes from ----------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["/tmp/ipykernel_4242/1234567890.py", "<ipython-input-7-0a1b2c3d4e5f>"]
)
def test_the_source_is_the_whole_cell(name: str) -> None:
    text = f"{HEAD}\nHALF = 0.5\n" + norm("return HALF * y")
    with cell(text, name):
        assert source_of("rms_norm", "mine") == text
        # A decorated function counts as what it wraps.
        register("rms_norm", "wrapped")(torch.no_grad()(registry.function("rms_norm", "mine")))
        assert source_of("rms_norm", "wrapped") == text
    with pytest.raises(KernelError, match="source of mine of rms_norm is not to be had"):
        source_of("rms_norm", "mine")


@pytest.mark.full
def test_a_cell_is_tried_without_saying_source(tiny: Shapes) -> None:
    with cell(norm("return 1.02 * y"), "/tmp/ipykernel_4242/55.py"):
        found = trial("rms_norm", "mine", tiny, **FEW)
    assert (found.status, found.gate) == ("refused", "relative error")
    assert found.verdict is not None
    assert found.verdict.findings[0].found == pytest.approx(0.02, rel=0.2)


def test_the_source_of_a_file_is_the_file() -> None:
    own()
    assert source_of("rms_norm", "mine") == Path(__file__).read_text()


def test_source_that_is_not_to_be_had(tiny: Shapes) -> None:
    space: dict[str, Any] = {}
    exec(norm("return y"), space)
    with pytest.raises(KernelError, match=r"register it in a notebook cell or a file, or give"):
        trial("rms_norm", "mine", tiny)
    register("softcap", "built_in")(max)
    with pytest.raises(KernelError, match="not to be had"):
        trial("softcap", "built_in", tiny)


@pytest.mark.parametrize(
    ("op", "variant", "how", "says"),
    [
        ("nonsense", "mine", {}, "there is no operation 'nonsense'"),
        ("rms_norm", "nobody", {"source": None}, "there is no variant 'nobody' of rms_norm"),
        ("rms_norm", "../mine", {}, "identifier"),
        ("rms_norm", "", {}, "identifier"),
        ("rms_norm", "a" * 61, {}, "at most 60 characters, and a{20}… has 61"),
        ("rms_norm", "torch", {}, "torch of rms_norm comes with the workbench"),
        ("rms_norm", "triton", {"source": None}, "comes with the workbench"),
        *(
            ("rms_norm", "mine", {"seconds": s}, "seconds must be a number more than 0")
            for s in (0, -1, float("nan"), float("inf"), 1e300, 10**400, True, "60", None)
        ),
        *(
            ("rms_norm", "mine", {"tokens": t}, "tokens must be one or more whole numbers above 0")
            for t in ((), [-1], [0], [1.5], "17", [True], 7, None)
        ),
        *(
            ("rms_norm", "mine", {"dtypes": d}, "dtypes must be one or more of bfloat16, float32")
            for d in ((), ["float16"], "bfloat16", [torch.float32], [["bfloat16"]], None)
        ),
        ("rms_norm", "mine", {"device": "tpu"}, "device must be"),
        ("rms_norm", "mine", {"device": "cuda:9"}, "device must be"),
        pytest.param(
            "rms_norm", "mine", {"device": "cuda"}, "torch sees no GPU here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)  # fmt: skip
def test_settings_that_cannot_be(
    op: str, variant: str, how: dict[str, Any], says: str, tiny: Shapes
) -> None:
    """One sentence, at once: no child is started for it."""
    told: list[str] = []
    started = time.monotonic()
    with pytest.raises(KernelError, match=says) as raised:
        trial(op, variant, tiny, **{"source": norm("return y"), "on_progress": told.append} | how)
    assert "\n" not in str(raised.value)
    assert told == []
    assert time.monotonic() - started < 1


def test_a_trial_in_words() -> None:
    refused = Trial(op="softcap", variant="mine", status="refused", gate="finite", error="1 of 8")
    assert str(refused) == "mine of softcap: refused by the gate 'finite': 1 of 8"
    crashed = Trial(op="softcap", variant="mine", status="crashed", error="signal SIGSEGV")
    assert str(crashed) == "mine of softcap: crashed: signal SIGSEGV"
    assert not crashed.passed
    assert crashed.to_dict()["verdict"] is None


def test_a_checked_variant_and_a_tried_one_say_the_same(tiny: Shapes) -> None:
    """What a trial shows of a verdict is what a check here would show."""
    verdict = Verdict(op="softcap", variant="mine", status="passed", cases=3, max_error=1e-3)
    found = Trial(op="softcap", variant="mine", status="passed", verdict=verdict)
    assert str(found) == verdict.sentence()
    assert found.to_dict()["verdict"] == verdict.to_dict()
    assert check("softcap", "torch", tiny, tokens=(1,)).passed
