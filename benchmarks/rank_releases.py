"""Are the ring's slots released only after they were read? From the machine code, without a GPU.

    PYTHONPATH=. python benchmarks/rank_releases.py [--architecture sm_90a]

A consumer warp releases a group of the ring by arriving at a named barrier (BAR.ARV). Loads of
shared memory end later than they are issued, in order, and a scoreboard tells: an instruction's
control bits name the scoreboard that a load sets and those that it waits for (a load without one
has ended when the next that has one has). Followed through all branches, this says which loads may
still be under way at each release. What is printed are those that can be loads of the ring: others
have an address behind it. Needs nvcc, and nvdisasm, which comes with Triton.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton

from workbench.kernels.rank.cuda_build import ARCHITECTURES, SOURCES, find_nvcc

RING_END = 0x32000  # shape.cuh: S_PART, less what a load adds to its address
NONE = 7  # no scoreboard


class Instruction(NamedTuple):
    """Address, text, the scoreboard it sets, and those it waits for (bits)."""

    at: str
    text: str
    sets: int
    waits: int


def disassembled(architecture: str) -> str:
    """nvdisasm's listing of the step, with the encoding."""
    nvdisasm = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    number = architecture.removeprefix("sm_")
    with tempfile.TemporaryDirectory() as folder:
        cubin = str(Path(folder) / "step.cubin")
        code = f"-gencode=arch=compute_{number},code={architecture}"
        source = str(SOURCES / "step.cu")
        command = [find_nvcc(), "-O3", "-std=c++17", code, "-cubin", source, "-o", cubin]
        subprocess.run(command, check=True)
        listing = [str(nvdisasm), "-c", "-hex", cubin]
        return subprocess.run(listing, check=True, capture_output=True, text=True).stdout


def parsed(section: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions of a kernel, and where its labels point."""
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    first: re.Match[str] | None = None
    for line in section.splitlines():
        if label := re.match(r"^(\.L\S+):", line):
            labels[label[1]] = len(found)
        elif match := re.match(r"\s*/\*([0-9a-f]+)\*/\s+(.*?)\s*;\s*/\* 0x[0-9a-f]+ \*/", line):
            first = match
        elif first and (upper := re.match(r"\s*/\* (0x[0-9a-f]+) \*/", line)):
            bits = int(upper[1], 16)
            found.append(Instruction(first[1], first[2], bits >> 46 & 7, bits >> 52 & 63))
            first = None
    return found, labels


def targets(one: Instruction) -> list[str]:
    """Labels an instruction names."""
    return re.findall(r"`\((\.L[^)]+)\)", one.text)


def successors(code: list[Instruction], labels: dict[str, int]) -> list[list[int]]:
    """Where each instruction can lead."""
    joins: dict[str, list[int]] = {}
    for one in code:
        if match := re.search(r"BSSY\S*\s+(B\d+)", one.text):
            joins.setdefault(match[1], []).extend(labels[t] for t in targets(one))
    led = []
    for index, one in enumerate(code):
        name = re.sub(r"^@!?U?P\w+\s+", "", one.text).split()[0]
        to = [labels[t] for t in targets(one)] if name.startswith(("BRA", "WARPSYNC")) else []
        if match := re.search(r"BSYNC\S*\s+(B\d+)", one.text):
            to += joins.get(match[1], [])
        ends = name.startswith(("EXIT", "RET", "BRA.U")) or name == "BRA"
        if not ends or one.text.startswith("@"):
            to.append(index + 1)
        led.append([t for t in to if t < len(code)])
    return led


def behind_the_ring(text: str) -> bool:
    """Whether a load's address lies behind the ring."""
    offset = re.search(r"\+(0x[0-9a-f]+)\]", text)
    return offset is not None and int(offset[1], 16) >= RING_END


Loads = frozenset[tuple[int, int]]  # instruction, and the scoreboard that its end is known by


def behind(state: Loads, index: int, one: Instruction) -> Loads:
    """The loads under way behind an instruction."""
    left = {(i, board) for i, board in state if board == NONE or not one.waits >> board & 1}
    if re.search(r"\bLDS", one.text):
        if one.sets != NONE:
            left = {(i, one.sets if board == NONE else board) for i, board in left}
        left.add((index, one.sets))
    return frozenset(left)


def under_way(code: list[Instruction], labels: dict[str, int]) -> dict[str, set[str]]:
    """For each release that can be reached: the loads that may be under way when it arrives."""
    led = successors(code, labels)
    before: list[Loads | None] = [None] * len(code)
    before[0] = frozenset()
    work = [0]
    while work:
        index = work.pop()
        state = behind(before[index] or frozenset(), index, code[index])
        for to in led[index]:
            known = before[to]
            joined = state if known is None else known | state
            if joined != known:
                before[to] = joined
                work.append(to)
    found = {}
    for index, one in enumerate(code):
        reached = before[index]
        if "BAR.ARV" in one.text and reached is not None:
            left = {code[i] for i, _ in behind(reached, index, one)}
            found[one.at] = {
                f"{load.at}: {load.text}" for load in left if not behind_the_ring(load.text)
            }
    return found


def main() -> int:
    """Parse the command line, analyse, print; 1 where a release is not proven."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="sm_90a")
    given = parser.parse_args()
    proven = True
    listing = disassembled(given.architecture)
    for section in re.split(r"\n\t\.section\t(?=\.text\.)", listing)[1:]:
        code, labels = parsed(section)
        arrivals = sum("BAR.ARV" in one.text for one in code)
        found = under_way(code, labels)
        name = section.split(",")[0].removeprefix(".text.")
        print(f"{name}: {len(found)} of {arrivals} releases reached")
        proven &= len(found) == arrivals and not any(found.values())
        for at, loads in found.items():
            print(f"  {at}: {'; '.join(sorted(loads)) or 'every load of the ring has ended'}")
    return 0 if proven else 1


if __name__ == "__main__":
    sys.exit(main())
