"""Two selections of kernels on one live model: what changes in its logits, its tokens, its speed.

Both sides decode the same tokens (side A's greedy ones), so a difference stays where it arises and
does not grow into another text. Steps of the two sides alternate, so that what else the machine
does meets both alike. A side with interpreted kernels is compared but never timed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from workbench.errors import KernelError
from workbench.kernels import registry
from workbench.kernels.registry import Selection
from workbench.kernels.requirements import Where
from workbench.kernels.tables import Resolved
from workbench.model.beam import Beam
from workbench.model.config import is_int
from workbench.model.prompts import prompt_ids

# What the median over positions of the relative L2 of the logits may be. The median, because at
# single positions two experts are so near to a tie that any rounding swaps them. In float32 the
# model itself is held to 1e-4 of a float64 reference; in bfloat16 the limit is a multiple of what
# the torch kernels differ from float32 by, or, where the float32 model is not given, a fixed one:
# two right sets of bfloat16 kernels, each a percent or two from float32, are this far apart.
FLOAT32_LIMIT = 1e-4
BFLOAT16_MULTIPLE = 1.5
BFLOAT16_LIMIT = 3e-2
# A median says nothing of the other half: few positions may be off by more than such a swap.
FAR = 10  # times the limit
FAR_SHARE = 0.1  # of the positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One selection: its table, and the seconds of its decode steps (empty: not timed, why)."""

    name: str
    rows: tuple[Resolved, ...]
    step_seconds: tuple[float, ...] = ()
    untimed: str = ""

    @property
    def tokens_per_second(self) -> float | None:
        """Of the median decode step; None where nothing was timed."""
        return 1 / median(self.step_seconds) if self.step_seconds else None

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON."""
        return {
            "name": self.name,
            "kernels": [row.to_dict() for row in self.rows],
            "step_seconds": list(self.step_seconds),
            "tokens_per_second": self.tokens_per_second,
            "untimed": self.untimed,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Side B beside side A, on ``positions`` positions: the prompt's and the new tokens'.

    Attributes:
        relative_error: L2 of the logit difference over L2 of A's logits, median over positions.
        largest_difference: of any logit.
        divergence: mean KL divergence of B's next-token distribution from A's, nats.
        limit: what the error may be, and ``limit_from`` in words where that comes from;
            ``own_error`` is how far side A is from float32 (bfloat16 with the float32 model), with
            which B is then compared as well.
        far: positions at which B's error, against A and against float32, is more than ten times the
            limit, or no number; at most a tenth of the positions may be.
        against_exact: B's relative error against float32 (bfloat16 only).
        tokens: greedy (A's, B's) at every new position, and ``margins`` A's lead of its first over
            its second choice there; ``slack`` is the largest margin that logits within the limit
            can turn over: twice the limit times the L2 of A's logits.
        per_position: relative error at every position, for a plot.
    """

    model: str
    dtype: str
    device: str
    prompt_tokens: int
    a: Side
    b: Side
    relative_error: float
    largest_difference: float
    divergence: float
    limit: float
    limit_from: str
    far: int
    own_error: float | None
    against_exact: float | None
    tokens: tuple[tuple[int, int], ...]
    margins: tuple[float, ...]
    slack: tuple[float, ...]
    per_position: tuple[float, ...] = field(repr=False)

    @property
    def positions(self) -> int:
        """How many positions were compared."""
        return len(self.per_position)

    @property
    def equal_tokens(self) -> int:
        """New positions at which both choose the same token."""
        return sum(a == b for a, b in self.tokens)

    @property
    def decided(self) -> bool:
        """Whether the greedy tokens differ only where logits within the limit could."""
        return all(
            a == b or margin <= slack
            for (a, b), margin, slack in zip(self.tokens, self.margins, self.slack, strict=True)
        )

    @property
    def passed(self) -> bool:
        """Whether the logits agree within the limit, and with them the decided tokens.

        Not-a-number anywhere never passes.
        """
        found = self.relative_error if self.against_exact is None else self.against_exact
        return (
            found <= self.limit
            and self.far <= FAR_SHARE * self.positions
            and math.isfinite(self.largest_difference)
            and self.decided
        )

    @property
    def speedup(self) -> float | None:
        """A's median step over B's; None where a side was not timed."""
        mine, theirs = self.a.tokens_per_second, self.b.tokens_per_second
        return None if mine is None or theirs is None else theirs / mine

    def to_dict(self) -> dict[str, Any]:
        """The values by name, for JSON, which has no NaN and no infinity: None stands for them."""
        found: dict[str, Any] = {name: _finite(getattr(self, name)) for name in self.__slots__}
        found |= {"a": self.a.to_dict(), "b": self.b.to_dict()}
        found |= {name: getattr(self, name) for name in ("passed", "equal_tokens", "speedup")}
        return found


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return tuple(map(_finite, value)) if isinstance(value, tuple) else value


Progress = Callable[[int, int, str], None]


def compare(
    beam: Beam,
    a: Selection | Mapping[str, str],
    b: Selection | Mapping[str, str],
    prompt: str | Sequence[int],
    *,
    new_tokens: int = 8,
    exact: Beam | None = None,
    on_progress: Progress | None = None,
    stop: Callable[[], bool] | None = None,
) -> Comparison | None:
    """Run both selections on ``prompt`` and ``new_tokens`` decode steps.

    A selection is what ``kernels.rules`` gives, () for the reference everywhere, or a dict from
    operation to variant; the prompt is text or token ids.
    ``exact`` is the same model in float32, for the limit of a bfloat16 one. ``on_progress(done, of,
    what)`` is told after each pass; where ``stop()`` says so the comparison ends early: None.

    Raises:
        KernelError: settings that cannot be, or a variant that cannot run on this model.
        PromptError: no prompt, ids that are not the model's, or more tokens than its context.
    """
    if not is_int(new_tokens) or new_tokens < 0:
        raise KernelError(
            f"new_tokens must be a whole number of at least 0, not {new_tokens!r:.40}"
        )
    if exact is not None and (exact.dtype != torch.float32 or exact.config != beam.config):
        raise KernelError(
            f"exact must be {beam.name} itself in float32, not {exact.name} in "
            f"{str(exact.dtype).removeprefix('torch.')}"
        )
    one = prompt if isinstance(prompt, str) else list(prompt)
    given = prompt_ids(beam, one, room=new_tokens)
    if len(given) != 1:
        raise KernelError(f"a comparison takes one prompt, not {len(given)}")
    ids_in = given[0]
    a, b = (_rules(side) if isinstance(side, Mapping) else side for side in (a, b))
    tables = []
    for rules in (a, b):
        with registry.exactly(rules), torch.no_grad():  # nothing is trained here
            tables.append(beam.kernels().rows)
    names = ("A", "B", "exact")
    sides = [(beam, a), (beam, b)]
    if exact is not None and beam.dtype != torch.float32:
        sides.append((exact, ()))
    told, of = on_progress or (lambda done, of, what: None), len(sides) * (new_tokens + 1)
    caches = [model.new_cache() for model, _ in sides]
    logits: list[list[Tensor]] = [[] for _ in sides]
    seconds: list[list[float]] = [[] for _ in sides]
    ids = torch.tensor(ids_in, device=beam.device)
    done = 0
    for step in range(new_tokens + 1):
        for side, (model, rules) in enumerate(sides):
            if stop is not None and stop():
                return None
            what = "prefill" if step == 0 else f"token {step} of {new_tokens}"
            told(done, of, f"{names[side]}: {what}")
            with registry.exactly(rules), torch.inference_mode():
                _wait(beam.device)
                started = time.perf_counter()
                out = model.logits(model.extend(caches[side], ids, [len(ids)]))
                _wait(beam.device)
                if step:
                    seconds[side].append(time.perf_counter() - started)
            logits[side].append(out.float().cpu())
            done += 1
        ids = logits[0][-1][-1:].argmax(-1).to(beam.device)
    told(of, of, "")
    return _compared(beam, tables, logits, seconds, (a, b), len(ids_in))


def _rules(variants: Mapping[str, str]) -> Selection:
    return tuple(rule for op, name in variants.items() for rule in registry.rules(**{op: name}))  # type: ignore[arg-type]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _compared(
    beam: Beam,
    tables: list[tuple[Resolved, ...]],
    logits: list[list[Tensor]],
    seconds: list[list[float]],
    rules: tuple[Selection, Selection],
    prompt: int,
) -> Comparison:
    whole = [torch.cat(parts).double() for parts in logits]
    first, second = whole[0], whole[1]
    apart = (second - first).norm(dim=-1) / first.norm(dim=-1)
    own = against = None
    held = apart
    limit, source = FLOAT32_LIMIT, "fixed: what the model itself is held to in float32"
    if len(whole) > 2:
        size = whole[2].norm(dim=-1)
        mine, held = ((x - whole[2]).norm(dim=-1) / size for x in (first, second))
        own, against = float(mine.median()), float(held.median())
        limit = BFLOAT16_MULTIPLE * own + 2.0**-12
        source = f"{BFLOAT16_MULTIPLE:g} times A's own error against the float32 model"
    elif beam.dtype != torch.float32:
        limit = BFLOAT16_LIMIT
        source = "fixed: what right bfloat16 kernels differ by; no float32 model was given"
    chances = first.log_softmax(-1)
    divergence = (chances.exp() * (chances - second.log_softmax(-1))).sum(-1).mean()
    best = first.topk(2, -1)
    new = slice(prompt - 1, None)
    pairs = zip(best.indices[new, 0].tolist(), second.argmax(-1)[new].tolist(), strict=True)
    margins = (best.values[:, 0] - best.values[:, 1])[new].tolist()
    slack = (2 * limit * first.norm(dim=-1))[new].tolist()
    return Comparison(
        model=beam.name,
        dtype=str(beam.dtype).removeprefix("torch."),
        device=beam.device.type,
        prompt_tokens=prompt,
        a=_side("A", beam, tables[0], seconds[0]),
        b=_side("B", beam, tables[1], seconds[1]),
        relative_error=float(apart.median()),
        largest_difference=float((second - first).abs().max()),
        divergence=max(0.0, float(divergence)),
        limit=limit,
        limit_from=source,
        # Where A itself is as far from float32 (a near tie), B beside it has done nothing wrong.
        far=int((~(torch.minimum(held, apart) <= FAR * limit)).sum()),
        own_error=own,
        against_exact=against,
        tokens=tuple(pairs),
        margins=tuple(margins),
        slack=tuple(slack),
        per_position=tuple(apart.tolist()),
    )


def _side(name: str, beam: Beam, rows: tuple[Resolved, ...], seconds: list[float]) -> Side:
    where = Where.of(beam.device, beam.dtype, beam.shapes)
    slow = sorted({r.op for r in rows if registry.interpreted(r.op, r.resolved, where)})
    if slow:
        return Side(
            name=name, rows=rows, untimed=f"interpreted: {', '.join(slow)}; not a measure of speed"
        )
    # The first step warms up: it may compile.
    return Side(name=name, rows=rows, step_seconds=tuple(seconds[1:]))
