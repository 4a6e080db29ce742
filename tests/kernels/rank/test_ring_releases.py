"""The slots of the ring are released after they were read: from the machine code of the step."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "rank_releases.py"


@pytest.fixture(scope="module")
def releases() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rank_releases", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def listing(*lines: tuple[str, int, int]) -> str:
    """As nvdisasm prints them: text, the scoreboard set (7: none), those waited for (bits)."""
    found = []
    for at, (text, sets, waits) in enumerate(lines):
        if text.startswith(".L"):
            found.append(f"{text}:")
            continue
        found.append(f"        /*{16 * at:04x}*/   {text} ;   /* 0x0000000000000000 */")
        found.append(f"                /* {sets << 46 | waits << 52:#018x} */")
    return "\n".join(found)


LOAD, ARRIVE, EXIT = ("LDS.128 R4, [R8]", 2, 0), ("BAR.ARV R1, 0x160", 7, 0), ("EXIT", 7, 0)
USE = ("FADD R5, R4, R4", 7, 1 << 2)


@pytest.mark.parametrize(
    ("lines", "under_way"),
    [
        ((LOAD, USE, ARRIVE, EXIT), 0),
        ((LOAD, ARRIVE, USE, EXIT), 1),
        ((LOAD, ("FADD R5, R4, R4", 7, 1 << 3), ARRIVE, EXIT), 1),  # waits for another
        ((LOAD, ("BAR.ARV R1, 0x160", 7, 1 << 2), EXIT), 0),  # the arrival waits itself
        ((("LDS R4, [R8+0x38020]", 2, 0), ARRIVE, EXIT), 0),  # behind the ring
        # Without a scoreboard of its own, a load has ended when the next with one has.
        ((("LDS R3, [R8]", 7, 0), LOAD, USE, ARRIVE, EXIT), 0),
        ((LOAD, ("LDS R3, [R8]", 7, 0), USE, ARRIVE, EXIT), 1),
        # The wait is on one of two ways.
        ((LOAD, ("@P0 BRA `(.L_x_1)", 7, 0), USE, (".L_x_1", 0, 0), ARRIVE, EXIT), 1),
        # A loop whose load is under way when it comes round.
        (((".L_x_1", 0, 0), ARRIVE, LOAD, ("@P0 BRA `(.L_x_1)", 7, 0), EXIT), 1),
    ],
)
def test_what_is_under_way_at_a_release(
    releases: ModuleType, lines: tuple[tuple[str, int, int], ...], under_way: int
) -> None:
    found = releases.under_way(*releases.parsed(listing(*lines)))
    assert [len(loads) for loads in found.values()] == [under_way]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_every_release_of_the_step_comes_after_its_loads(releases: ModuleType) -> None:
    sections = re.split(r"\n\t\.section\t(?=\.text\.)", releases.disassembled("sm_90a"))[1:]
    assert len(sections) == 2  # with long attention and without
    for section in sections:
        code, labels = releases.parsed(section)
        arrivals = sum("BAR.ARV" in one.text for one in code)
        found = releases.under_way(code, labels)
        assert len(found) == arrivals >= 10
        assert not any(found.values()), found
