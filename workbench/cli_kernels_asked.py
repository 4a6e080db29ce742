"""What ``workbench kernels`` is asked for: options resolved, checked, and refused in a sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.errors import KernelError

if TYPE_CHECKING:
    import torch

    from workbench.kernels.shapes import Shapes
    from workbench.kernels.trial import Trial


CPU_BYTES = 10**9  # inputs of one call on a CPU: more take many minutes to check


class KernelDtype(StrEnum):
    """Activation dtype."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class KernelDevice(StrEnum):
    """Where the tensors are."""

    cpu = "cpu"
    cuda = "cuda"


class Asked:
    """The options that the three commands share, resolved and checked."""

    def __init__(
        self,
        op: list[str] | None,
        variant: list[str] | None,
        device: KernelDevice | None,
        model: str | None,
        tp: int | None,
        tokens: list[int] | None,
        file: Path | None = None,
        seconds: float | None = None,
    ) -> None:
        import torch

        from workbench.kernels import registry
        from workbench.kernels.catalogue import OPS
        from workbench.kernels.ops import operation
        from workbench.kernels.shapes import Shapes
        from workbench.model.presets import resolve

        gpu = torch.cuda.is_available()
        self.device = device.value if device is not None else "cuda" if gpu else "cpu"
        if self.device == "cuda" and not gpu:
            raise KernelError("this machine has no CUDA GPU that torch can use; use --device cpu")
        resolved = resolve(model or ("beam-501b" if self.device == "cuda" else "beam-tiny"))
        self.model = resolved.name
        self.tp = tp if tp is not None else 8 if resolved.name == "beam-501b" else 1
        self.shapes: Shapes = Shapes.of(resolved.config, self.tp)
        self.config = resolved.config
        self.small = self.shapes.hidden < 1024
        self.ops = list(dict.fromkeys(op)) if op else list(OPS)
        for name in self.ops:
            operation(name)  # raises where there is none
        self.file = file
        self.seconds = _limit(seconds, file)
        self._wanted = list(dict.fromkeys(variant)) if variant else None
        if self._wanted and file is None:
            known = [v for name in self.ops for v in registry.names(name)]
            for one in self._wanted:
                if one not in known:
                    raise KernelError(
                        f"there is no variant {one!r:.60} of {', '.join(self.ops):.80}; there are "
                        f"{', '.join(dict.fromkeys(known))}"
                    )
        self.tokens = list(dict.fromkeys(tokens)) if tokens else None or self._usual_tokens()
        for n in self.tokens:
            if n < 1:
                raise KernelError(f"--tokens must be 1 or more, not {n}")

    def _usual_tokens(self) -> list[int]:
        return [1, 7, 64] if self.device == "cuda" else [1, 7]

    def variants_of(self, op: str) -> list[str]:
        """The variants of ``op`` that are asked for."""
        from workbench.kernels import registry

        names = registry.names(op)
        return names if self._wanted is None else [n for n in names if n in self._wanted]

    def dtypes(self, given: KernelDtype | None, *, both: bool) -> list[torch.dtype]:
        """The activation dtypes that are meant."""
        from workbench.kernels.ops import DTYPES

        if given is not None:
            return [DTYPES[given.value]]
        if both:
            return [DTYPES["bfloat16"], DTYPES["float32"]]
        return [DTYPES["float32" if self.device == "cpu" else "bfloat16"]]

    def heading(self) -> dict[str, Any]:
        """What every document begins with."""
        return {
            "model": self.model,
            "tp": self.tp,
            "device": self.device,
            "tokens": self.tokens,
        }

    def refuse_what_does_not_fit(self, dtypes: Sequence[torch.dtype]) -> None:
        """Nothing is allocated for what memory cannot hold; on a CPU, large sizes get a warning.

        Raises:
            KernelError: with the bytes that are needed and those that are free.
        """
        from workbench.hardware import gigabytes
        from workbench.kernels.case import Request
        from workbench.kernels.footprint import footprint, too_large
        from workbench.kernels.ops import operation
        from workbench.terminal import note

        most = 0
        for name in self.ops:
            for flavour in operation(name).flavours:
                request = Request(
                    shapes=self.shapes,
                    tokens=max(self.tokens),
                    dtype=max(dtypes, key=lambda d: d.itemsize),
                    device=self.device,
                    flavour=flavour,
                )
                reason = too_large(name, request)
                if reason is not None:
                    raise KernelError(
                        f"{name}: {reason}; name other operations with --op, or ask for fewer "
                        "--tokens, a larger --tp or a smaller --model"
                    )
                need = footprint(name, request)
                if self.device == "cpu" and need.held > CPU_BYTES:
                    raise KernelError(
                        f"{name} of {self.model}, TP{self.tp}, takes {gigabytes(need.held)} of "
                        "inputs a call, which a CPU takes far too long over; use --model "
                        "beam-tiny, other operations with --op, or run it on a GPU"
                    )
                most = max(most, need.peak)
        if self.device == "cpu" and not self.small:
            note(
                f"workbench: sizes of {self.model}, TP{self.tp}, on a CPU: up to "
                f"{gigabytes(most)} of memory for one call, and minutes for an operation "
                "(--model beam-tiny takes seconds)"
            )

    def trials(self, file: Path, dtypes: Sequence[torch.dtype]) -> list[Trial]:
        """Every variant that a file registers, tried in a child process.

        Raises:
            FileError: the file cannot be read.
            KernelError: it registers none, or none of those that are asked for.
        """
        from workbench.files import read_text
        from workbench.kernels.trial import trial
        from workbench.terminal import note

        source = read_text(file).removeprefix("\ufeff")  # as Python itself takes a file
        from workbench.kernels.ops import operation

        every = registered_in(source, str(file))
        for op, _ in every:
            operation(op)  # a misspelt one is named, with those that there are
        found = [
            (op, variant)
            for op, variant in every
            if op in self.ops and (self._wanted is None or variant in self._wanted)
        ]
        if not found:
            raise KernelError(
                f"{file} registers none of the variants that are asked for; it needs a line like "
                '@register("boundary", "mine") before the function'
            )
        made = []
        for op, variant in found:
            t = trial(
                op,
                variant,
                self.shapes,
                source=source,
                folder=Path.cwd() if str(file) == "-" else file.parent,
                tokens=self.tokens,
                dtypes=[dtype_name(d) for d in dtypes],
                device=self.device,
                seconds=self.seconds,
                on_progress=_on_terminal(note),
            )
            note(str(t))
            made.append(t)
        return made


def registered_in(source: str, where: str) -> list[tuple[str, str]]:
    """(operation, variant) of every ``@register("op", "name")`` in Python source, which is read,
    not run.

    Raises:
        KernelError: it is not Python.
    """
    import ast
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its syntax: the child says what matters
            tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        line = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
        raise KernelError(f"{where} is not Python{line}: {error}") from None
    except (RecursionError, MemoryError):  # what the parser raises for thousands of brackets
        raise KernelError(
            f"{where} cannot be read as Python: an expression in it is nested too deeply"
        ) from None
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else None
        name = node.func.id if isinstance(node.func, ast.Name) else name
        if name != "register":
            continue
        given = dict(zip(("op", "name"), node.args, strict=False))
        given |= {k.arg: k.value for k in node.keywords if k.arg in ("op", "name")}
        values = [v.value for v in map(given.get, ("op", "name")) if isinstance(v, ast.Constant)]
        if len(values) == 2 and all(isinstance(v, str) for v in values):
            found.append((str(values[0]), str(values[1])))
    return list(dict.fromkeys(found))


def _limit(seconds: float | None, file: Path | None) -> float:
    """The time limit of a trial."""
    from workbench.kernels.trial import MOST_SECONDS, SECONDS

    if seconds is None:
        return SECONDS
    if file is None:
        raise KernelError("--seconds is the time limit of a variant of --file; leave it out")
    if not 0 < seconds <= MOST_SECONDS:
        raise KernelError(
            f"--seconds must be more than 0 and at most {MOST_SECONDS:,.0f} (a day), not {seconds}"
        )
    return seconds


def _on_terminal(tell: Callable[[str], None]) -> Callable[[str], None] | None:
    return tell if sys.stderr.isatty() else None


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def refuse_unwritable(*paths: Path | None) -> None:
    """Refuse a file that could not be written, before minutes go into what it is for.

    Raises:
        FileError: a folder, a missing or read-only folder; or one file for two things.
    """
    import os
    import stat
    import tempfile

    from workbench.files import FileError

    given = [path for path in paths if path is not None]
    for path in given:
        try:
            mode = path.stat().st_mode if path.exists() else None
            if mode is not None and stat.S_ISCHR(mode):
                continue
            if mode is not None and not stat.S_ISREG(mode):
                kind = "a folder" if stat.S_ISDIR(mode) else "not a regular file"
                raise FileError(f"{path} cannot be written: it is {kind}; give the name of a file")
            # As it will be written: beside the file, which it then replaces.
            target = Path(os.path.realpath(path))
            with tempfile.TemporaryFile(dir=target.parent):
                pass
        except OSError as error:
            raise FileError(
                f"{path} cannot be written ({error.strerror or error}); choose another file"
            ) from error
        except FileError:
            raise
        except ValueError as error:  # a NUL in the name
            raise FileError(f"{path} cannot be written ({error}); choose another name") from error
    if len({os.path.realpath(path) for path in given}) < len(given):
        raise FileError(f"{given[0]} is named for two things; give each a file of its own")


def write_document(path: Path | None, document: dict[str, Any]) -> None:
    if path is None:
        return
    import json

    from workbench.files import write_whole

    write_whole(path, (json.dumps(document, allow_nan=False, indent=1) + "\n").encode())


def fail_on(found: Sequence[tuple[str, str, str, str, str]], *, explicit: bool) -> None:
    """Raise the sentence of the first variant that is not right, saying how many there are.

    A variant that cannot run here counts only where it was asked for by name and runs nowhere.
    """
    bad = [f for f in found if f[2] not in ("passed", "unavailable")]
    if not bad and explicit and found and all(f[2] == "unavailable" for f in found):
        op, variant, _, _, reason = found[0]
        raise KernelError(f"{variant} of {op} cannot run here: {reason}")
    if not bad:
        return
    op, variant, status, gate, reason = bad[0]
    gated = f" by the gate {gate!r}" if gate else ""
    others = len({(f[0], f[1]) for f in bad}) - 1
    more = f" ({others} more variant{'s' * (others != 1)} failed too)" if others > 0 else ""
    raise KernelError(f"{variant} of {op}: {status}{gated}: {reason}{more}")
