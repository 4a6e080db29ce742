"""Every Triton kernel of the workbench, compiled for Hopper and Blackwell without either.

At the shapes of Beam-501B. Blackwell has run none of them: that they compile for it, fit into it
and use its matrix units is what can be known here.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from workbench.kernels.catalogue import BUILT_IN, OPS
from workbench.kernels.results import PACKAGED
from workbench.kernels.shapes import Shapes
from workbench.kernels.targets import compile_all, jobs
from workbench.kernels.triton_compile import Compiled, Job, compile_in_child
from workbench.kernels.triton_runtime import why_not
from workbench.model.presets import resolve

pytestmark = pytest.mark.skipif(
    "not installed" in (why_not("cpu") or ""), reason="Triton is not installed"
)

RECORDED = PACKAGED / "compiled-sm90-sm100.json"
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compile_kernels.py"
SHARED = 227 * 1024  # bytes a block may have on both
# Bytes of local memory of a thread that are known, by kernel, target and dtype. In bfloat16 it is
# a few values kept across a loop. float32 is there to be exact, not fast. What is not here spills
# nothing.
SPILLS: dict[tuple[str, str, str], int] = {
    ("_prefill", "sm_100", "bfloat16"): 16,
    ("_prefill", "sm_90", "float32"): 24,
    ("_decode", "sm_90", "float32"): 176,
    ("_decode", "sm_100", "float32"): 192,
}
# The two that take longest to compile; they go to one child, all others to another.
SLOW = ("decode_attention", "prefill_attention")


def beam(tp: int) -> Shapes:
    return Shapes.of(resolve("beam-501b").config, tp)


def wanted(
    tp: int, tokens: Iterable[int], dtype: str = "bfloat16", ops: Iterable[str] = OPS
) -> list[Job]:
    return [
        Job(name=f"{op} TP{tp} {n} {dtype}", call=job.call, argument=job.argument)
        for op in ops
        for n in tokens
        for job in jobs(beam(tp), ops=[op], tokens=[n], dtype=dtype)
    ]


def compiled(every: list[Job], cache: Path, seconds: float) -> list[Compiled]:
    """From an empty cache on disk, in two children at a time."""
    slow = [job for job in every if job.name.split()[0] in SLOW]
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setenv("TRITON_CACHE_DIR", str(cache))
        parts = [slow, [job for job in every if job not in slow]]
        return [c for part in pool.map(lambda p: compile_in_child(p, seconds), parts) for c in part]


def hold(found: list[Compiled], every: list[Job]) -> None:
    """What has to be true of every kernel."""
    assert [c for c in found if c.error] == []
    assert {c.job for c in found} == {job.name for job in every}, "an operation without a kernel"
    for c in found:
        what = f"{c.kernel} of {c.job} for {c.target}"
        assert c.registers is not None, what
        assert c.shared_bytes is not None, what
        assert c.spill_bytes is not None, what
        assert 0 < c.registers <= 255, what
        assert c.shared_bytes <= SHARED, what
        known = SPILLS.get((c.kernel, c.target, c.job.split()[-1]), 0)
        assert c.spill_bytes <= known, f"{what}: {c.spill_bytes} bytes spilled"
    # Each is compiled for one target and at once for the other.
    for hopper, blackwell in zip(found[::2], found[1::2], strict=True):
        assert (hopper.target, blackwell.target) == ("sm_90", "sm_100")
        assert (hopper.job, hopper.kernel) == (blackwell.job, blackwell.kernel)
        assert hopper.constants == blackwell.constants
        matrix = {"tcgen05.mma", "mma"} & set(blackwell.features)
        if {"wgmma", "mma"} & set(hopper.features):
            assert matrix, f"{hopper.kernel} of {hopper.job} has no matrix unit on Blackwell"
        assert "wgmma" not in blackwell.features
        assert "tcgen05.mma" not in hopper.features


@pytest.fixture(scope="module")
def at_eight(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    """Every kernel that a TP8 rank launches for eight tokens."""
    return compiled(wanted(8, [8]), tmp_path_factory.mktemp("triton"), 250)


@pytest.mark.full
def test_every_kernel_of_a_decode_step(at_eight: list[Compiled]) -> None:
    hold(at_eight, wanted(8, [8]))


@pytest.mark.full
def test_matrix_products_run_on_matrix_units(at_eight: list[Compiled]) -> None:
    """Eight rows are enough for them on both generations."""
    for op in ("qkvg", "dense_mlp", "prefill_attention"):
        for target, units in (("sm_90", {"wgmma", "mma"}), ("sm_100", {"tcgen05.mma", "mma"})):
            used = {
                f
                for c in at_eight
                if c.job.startswith(op) and c.target == target
                for f in c.features
            }
            assert used & units, f"{op} on {target}: {used}"


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tp", [8, 4])
def test_every_kernel(tp: int, dtype: str, tmp_path: Path) -> None:
    every = wanted(tp, [1, 7, 8, 64, 1024], dtype)
    hold(compiled(every, tmp_path, 3000), every)


# -- what is asked for --------------------------------------------------------------------------


def test_a_job_for_each_operation() -> None:
    made = jobs(beam(8), tokens=(1, 64), dtype="float32", context=100)
    assert [job.argument["op"] for job in made] == list(OPS)
    assert all("triton" in BUILT_IN[op] for op in OPS)
    assert all(job.argument["tokens"] == [1, 64] for job in made)
    assert all(job.argument["dtype"] == "float32" for job in made)
    assert all(Shapes(**job.argument["shapes"]) == beam(8) for job in made)
    assert len({job.name for job in made}) == len(made)
    json.dumps([job.argument for job in made])


@pytest.mark.full
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_all_flavours_are_compiled(at_eight: list[Compiled], target: str) -> None:
    """Sliding and full layers, bfloat16 and float8 caches: other constants, or other types."""
    for op in ("qkv_write", "decode_attention", "prefill_attention"):
        # A kernel is compiled once for all launches that agree, so there are as many as differ.
        made = [c for c in at_eight if c.job.startswith(op) and c.target == target]
        least = 2 if op == "prefill_attention" else 4
        assert len(made) >= least, (op, [c.constants for c in made])


@pytest.mark.full
def test_compile_all(tmp_path: Path) -> None:
    told: list[Compiled] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        found = compile_all(
            [beam(8), beam(4)], ops=["softcap", "rms_norm"], tokens=(1,), targets=(90,),
            on_result=told.append,
        )  # fmt: skip
    assert told == found
    assert [c for c in found if c.error] == []
    assert {c.target for c in found} == {"sm_90"}
    assert {c.kernel for c in found} == {"_softcap_kernel", "_rms_norm_kernel"}
    assert len({c.job for c in found}) == 4


# -- what is recorded ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDED.read_text())
    return found


def test_the_recorded_table_says_how_it_was_made(recorded: dict[str, Any]) -> None:
    assert RECORDED.stat().st_size < 150_000
    assert "compiled without a GPU" in recorded["note"]
    assert "never run on a Blackwell GPU" in recorded["note"]
    assert recorded["targets"] == ["sm_90", "sm_100"]
    assert (recorded["tp"], recorded["tokens"]) == ([8, 4], [1, 8, 1024])
    assert {"torch", "triton"} <= recorded["versions"].keys()


def test_the_recorded_table_holds_every_operation(recorded: dict[str, Any]) -> None:
    rows = recorded["rows"]
    met = {
        (row["op"], row["target"], tp, tokens)
        for row in rows
        for tp, several in row["at"].items()
        for tokens in several
    }
    assert met == {
        (op, target, tp, tokens)
        for op in OPS
        for target in ("sm_90", "sm_100")
        for tp in ("TP8", "TP4")
        for tokens in (1, 8, 1024)
    }
    for row in rows:
        assert "error" not in row
        assert 0 < row["registers"] <= 255
        assert row["shared_bytes"] <= SHARED
        assert row["spill_bytes"] <= SPILLS.get((row["kernel"], row["target"], row["dtype"]), 0)


@pytest.mark.full
def test_the_recorded_kernels_are_those_of_today(
    recorded: dict[str, Any], at_eight: list[Compiled]
) -> None:
    """One that was renamed or added wants a new recording (`benchmarks/compile_kernels.py`)."""
    then = {(r["op"], r["kernel"]) for r in recorded["rows"] if 8 in r["at"].get("TP8", ())}
    assert then == {(c.job.split()[0], c.kernel) for c in at_eight}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_kernels", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_that_agree_are_one(script: ModuleType) -> None:
    def made(job: str, **other: Any) -> Compiled:
        figures: dict[str, Any] = {"registers": 32, "shared_bytes": 64, "spill_bytes": 0}
        return Compiled(job=job, kernel="_k", target="sm_90", **figures | other)

    of = {
        f"softcap TP{tp} {n}": (None, {"op": "softcap", "tp": tp, "tokens": n, "dtype": "bfloat16"})
        for tp in (8, 4)
        for n in (1, 8)
    }
    rows = script.merged([*map(made, of), made("softcap TP8 8", registers=40)], of)
    assert [(row["registers"], row["at"]) for row in rows] == [
        (32, {"TP8": [1, 8], "TP4": [1, 8]}),
        (40, {"TP8": [8]}),
    ]
    failed = script.merged([made("softcap TP4 1", error="no")], of)
    assert failed[0]["error"] == "no"


@pytest.mark.full
def test_the_script(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--op", "softcap", "--tp", "8", "--tokens", "1", "--out", out],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert {row["target"] for row in found["rows"]} == {"sm_90", "sm_100"}
    assert all(row["at"] == {"TP8": [1]} for row in found["rows"])
    assert f"{len(found['rows'])} rows, 0 of them errors" in done.stdout
