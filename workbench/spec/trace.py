"""Trace files: the steps of a run on disk, one JSON line a step, readable at any moment.

The first line is a header that says what was run, where and with which settings (:func:`header`);
every further line is one :class:`~workbench.spec.step.Step`, or one
:class:`~workbench.spec.positions.Position` where the header's ``mode`` is ``every-position``. A
line reaches the file in one write, so whatever ends the program, all lines but the last are whole.
Reading takes a file for data and nothing else: no text in it is evaluated, and a line that is not
what it should be is skipped and counted.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from workbench.errors import TraceError
from workbench.files import expand
from workbench.spec import trace_lines
from workbench.spec.metrics import Acceptance, Tally
from workbench.spec.positions import Position, replayed
from workbench.spec.step import Step
from workbench.spec.trace_lines import FORMAT, MODES, VERSION, Mode
from workbench.spec.trace_writer import TraceWriter as TraceWriter

if TYPE_CHECKING:
    import pandas as pd

    from workbench.model.sampling import Sampling


def header(
    *,
    model: str,
    drafter: str | None = None,
    sampling: Sampling | Mapping[str, Any] | None = None,
    speculative_tokens: int | None = None,
    method: str = "standard",
    proposals: str = "greedy",
    mode: Mode = "steps",
    **settings: Any,
) -> dict[str, Any]:
    """The header of a run on this machine, now.

    Args:
        model, drafter: names, as they were loaded; no drafter is plain decoding.
        sampling: temperature, top-p and seed; None is greedy.
        speculative_tokens: drafts a block, None without a drafter.
        method, proposals, mode: as the decode loop names them.
        settings: whatever else the run depended on (``max_new_tokens``, prompts' classes), JSON
            values by name.

    Raises:
        TraceError: the mode is unknown, or a setting has the name of a field.
    """
    from workbench.hardware import machine  # asks for the GPUs, which takes torch a while
    from workbench.model.sampling import Sampling

    if mode not in MODES:
        raise TraceError(f"a trace's mode is one of {', '.join(MODES)}, not {mode!r}")
    here = machine().to_dict()
    versions = here.pop("versions")
    chosen = Sampling() if sampling is None else sampling
    if isinstance(chosen, Sampling):
        chosen = {k: getattr(chosen, k) for k in ("temperature", "top_p", "seed")}
    made = {
        "format": FORMAT,
        "version": VERSION,
        "mode": mode,
        "model": model,
        "drafter": drafter,
        "sampling": dict(chosen),
        "speculative_tokens": speculative_tokens,
        "method": method,
        "proposals": proposals,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": here,
        "versions": versions,
    }
    if double := made.keys() & settings.keys():
        raise TraceError(f"{', '.join(sorted(double))} of the header cannot be set by hand")
    return made | settings


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Trace:
    """What a trace file holds.

    Attributes:
        header: its first line, as written.
        steps: in the order of the file; empty in the every-position mode.
        positions: in the order of the file; empty in the other mode.
        skipped: lines that could not be read.
    """

    header: dict[str, Any]
    steps: tuple[Step, ...] = ()
    positions: tuple[Position, ...] = ()
    skipped: int = 0

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a trace, also one that is still being written or ended in a crash.

        Raises:
            TraceError: the file cannot be read, has no header, another's, or that of a newer
                version.
        """
        steps: list[Step] = []
        positions: list[Position] = []
        skipped = 0
        try:
            where = expand(path)
            if not stat.S_ISREG(where.stat().st_mode):  # before opening, which may wait for ever
                raise TraceError(f"{where} is not a regular file; give a trace file")
            with where.open("rb") as file:
                found = trace_lines.lines(file)
                head = trace_lines.read_header(next(found, b""), str(where))
                every = head["mode"] == "every-position"
                for line in found:
                    try:
                        data = trace_lines.parse(line)
                        if every:
                            positions.append(Position.from_dict(data))
                        else:
                            steps.append(Step.from_dict(data))
                    except trace_lines.BAD:
                        skipped += 1
        except OSError as error:
            raise TraceError(
                f"{path} cannot be read ({error.strerror or error}); give a trace file"
            ) from error
        except TraceError:
            raise
        except ValueError as error:  # a NUL in the name, or no such home folder
            raise TraceError(f"{path} cannot be read ({error}); give a trace file") from error
        return cls(header=head, steps=tuple(steps), positions=tuple(positions), skipped=skipped)

    @property
    def mode(self) -> Mode:
        """``steps`` or ``every-position``."""
        mode: Mode = self.header["mode"]
        return mode

    def acceptance(self) -> Acceptance:
        """Figures of the run; of an every-position trace those of its full replay."""
        if self.mode == "every-position":
            return replayed(self.positions)
        tally = Tally()
        for step in self.steps:
            tally.add(step)
        return tally.acceptance()

    def frame(self) -> pd.DataFrame:
        """A table for pandas: one row a request of a step, or a position in that mode."""
        import pandas as pd

        rows = self._positions() if self.mode == "every-position" else self._parts()
        return pd.DataFrame(list(rows))

    def __str__(self) -> str:
        count = (
            f"{len(self.positions):,} positions, replayed as a run"
            if self.mode == "every-position"
            else f"{len(self.steps):,} steps"
        )
        skipped = f"{self.skipped:,} lines skipped" if self.skipped else "every line read"
        return f"{trace_lines.describe(self.header)}\n{count}, {skipped}\n{self.acceptance()}"

    __repr__ = __str__

    def _parts(self) -> Iterator[dict[str, Any]]:
        for step in self.steps:
            for r in step.requests:
                yield {
                    "step": step.index,
                    "phase": step.phase,
                    "request": r.request,
                    "position": r.position,
                    "drafted": len(r.drafted),
                    "admitted": r.admitted,
                    "accepted": r.accepted,
                    "rejected": r.rejected,
                    "trimmed": r.trimmed,
                    "emitted": len(r.token_ids),
                    "finished": r.finished,
                    "batch": len(step.requests),
                    "draft_seconds": step.draft_seconds,
                    "verify_seconds": step.verify_seconds,
                    "seconds": step.seconds,
                    "draft_ids": r.drafted,
                    "confidences": r.confidences,
                    "token_ids": r.token_ids,
                    "kinds": r.kinds,
                }

    def _positions(self) -> Iterator[dict[str, Any]]:
        for p in self.positions:
            yield {
                "request": p.request,
                "position": p.position,
                "token_id": p.token_id,
                "left": p.left,
                "drafted": len(p.drafted),
                "accepted": p.accepted,
                "draft_ids": p.drafted,
            }
