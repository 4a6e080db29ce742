"""What the probe of a vLLM engine recorded: :func:`read_probe`; and while it runs: :func:`follow`.

The file is a trace (:mod:`workbench.spec.trace`) with a few lines more, so ``Trace.read`` reads its
steps too, and counts those lines as skipped.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, replace

from workbench.errors import TraceError
from workbench.files import expand
from workbench.serving.probe_follow import Following as Following
from workbench.serving.probe_follow import follow as follow
from workbench.serving.probe_record import Pass as Pass
from workbench.serving.probe_record import Reading, read_header
from workbench.spec import trace_lines
from workbench.spec.acceptance import Coefficients
from workbench.spec.cost_table import CostTable
from workbench.spec.recording import Recording
from workbench.spec.step import Step
from workbench.spec.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ProbeRun:
    """What a probe recorded.

    Attributes:
        trace: header and steps, for every view of a decode run.
        passes: the engine's pass behind each step of ``trace``, in the same order.
        tables: the costs by which the engine decided; None where it had none.
        most_rows: rows that a verification of trimmed drafts may have, as the engine says.
        coefficients: of the estimator: as it was first seen, and after each fit.
        dropped: passes lost because the writer was behind.
        inconsistent: passes whose numbers contradicted each other, which were left out.
        ended: why the recording ended; None if it still goes on, or was cut.
    """

    trace: Trace
    passes: tuple[Pass, ...] = ()
    tables: CostTable | None = None
    most_rows: int | None = None
    coefficients: tuple[Coefficients, ...] = ()
    dropped: int = 0
    inconsistent: int = 0
    ended: str | None = None

    def recording(self, *, seed: int = 0) -> Recording:
        """The run as a source for replays and simulations of other policies.

        It is estimated, as every record of steps is. The engine says neither scores nor the
        drafter's own word; its *calibrated* confidences stand in their place, so a replay takes
        them as they are (``replay(..., estimator=None)``).

        Raises:
            TraceError: no pass had drafts.
        """
        steps = tuple(
            replace(step, requests=tuple(replace(r, confidences=r.expected) for r in step.requests))
            for step in self.trace.steps
        )
        return Recording.of(replace(self.trace, steps=steps), seed=seed)

    def __str__(self) -> str:
        """The trace, and what there is beside it."""
        fits = f"{len(self.coefficients):,} fits of the estimator"
        tables = "the engine's cost tables" if self.tables is not None else "no cost tables"
        lost = f"{self.dropped:,} passes dropped, {self.inconsistent:,} inconsistent"
        ended = self.ended or "it has no end, and may go on"
        return f"{self.trace}\n{tables}, {fits}, {lost}; {ended}"

    __repr__ = __str__


def read_probe(path: str | os.PathLike[str]) -> ProbeRun:
    """Read what a probe recorded, also while it is being written or after a crash.

    Confidences are the engine's float32 to the last bit; times are of its device.

    Raises:
        TraceError: the file cannot be read, or is no trace.
    """
    try:
        where = expand(path)
        if not stat.S_ISREG(where.stat().st_mode):  # before opening, which may wait for ever
            raise TraceError(f"{where} is not a regular file; give a recording of the probe")
        with where.open("rb") as file:
            found = trace_lines.lines(file)
            reading = Reading(read_header(next(found, b""), str(where)))
            steps: list[Step] = []
            passes: list[Pass] = []
            for line in found:
                if (step := reading.take(line)) is not None:
                    steps.append(step)
                    passes.append(reading.passed)
    except OSError as error:
        raise TraceError(
            f"{path} cannot be read ({error.strerror or error}); give a recording of the probe"
        ) from error
    except TraceError:
        raise
    except ValueError as error:  # a NUL in the name, or no such home folder
        raise TraceError(f"{path} cannot be read ({error}); give a recording") from error
    return ProbeRun(
        trace=Trace(header=reading.header, steps=tuple(steps), skipped=reading.skipped),
        passes=tuple(passes),
        tables=reading.tables,
        most_rows=reading.most_rows,
        coefficients=tuple(reading.coefficients),
        dropped=reading.dropped,
        inconsistent=reading.inconsistent,
        ended=reading.ended,
    )
