"""Fixtures shared by all tests."""

import os
import shutil
import signal

import pytest

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
