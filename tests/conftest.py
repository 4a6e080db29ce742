"""Fixtures shared by all tests."""

import os
import shutil
import signal

import pytest

# Several workers share the cores: one thread each, for the programs and kernels they start as well.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from workbench.kernels import triton_runtime  # after that: torch reads it when imported

# Triton decides once a process whether it interprets, and other people's modules import it: without
# a GPU its interpreter is switched on before any test file is read.
if triton_runtime.why_not("cpu") is None:
    triton_runtime.triton  # noqa: B018 - asking for it imports it

# Started by a script in the background or by nohup, pytest ignores SIGINT or SIGHUP, and so would
# every program it starts: tests that interrupt one would wait for ever.
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def chromium_path() -> str:
    """Path of a Chromium to drive with playwright; skips the test where there is none.

    `CHROMIUM` in the environment names another one.
    """
    named = os.environ.get("CHROMIUM")
    if named:
        found = shutil.which(named)
        if found is None:
            pytest.fail(f"CHROMIUM={named} is not a program")
        return found
    for name in CHROMIUM_NAMES:
        found = shutil.which(name)
        if found is not None:
            return found
    pytest.skip("no Chromium on PATH: install it (Debian: apt install chromium) or set CHROMIUM")
