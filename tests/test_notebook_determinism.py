"""The compared cells of every notebook print the same text whatever the CPU does underneath."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", ["default", "avx2"])
@pytest.mark.parametrize("threads", [1, 2])
def test_notebooks_do_not_depend_on_threads_or_vector_width(threads: int, capability: str) -> None:
    """`make test` compares them once; here with each thread count and vector width.

    The order of floating-point additions changes with both, so a cell that prints one digit too
    many, or breaks a tie by a last bit, fails here.
    """
    if not list((ROOT / "notebooks").glob("*.ipynb")):
        pytest.skip("there are no notebooks")
    environment = dict(os.environ, OMP_NUM_THREADS=str(threads), ATEN_CPU_CAPABILITY=capability)
    command = [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-current-env"]
    command += ["--nbval-cell-timeout=120", "notebooks"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
