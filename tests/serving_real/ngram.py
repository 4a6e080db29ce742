"""What n-gram speculation does with a known greedy text: drafts and verdicts, step by step.

Written from the description of prompt lookup: the longest run of ``most`` down to ``least`` last
tokens that occurred earlier, its first occurrence, and the tokens that followed it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Counts:
    """Totals over requests, in the words of vLLM's counters.

    ``per_position[i]`` counts drafts whose token ``i`` was accepted.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    steps: int = 0
    per_position: list[int] = field(default_factory=list)


def propose(tokens: Sequence[int], *, least: int, most: int, k: int) -> list[int]:
    """The draft for what comes after ``tokens``: up to ``k`` of them, or none."""
    total = len(tokens)
    for length in range(min(most, total - 1), least - 1, -1):
        suffix = tokens[total - length :]
        for start in range(total - length):
            if tokens[start : start + length] == suffix:
                return list(tokens[start + length : start + length + k])
    return []


def count(
    prompt: Sequence[int],
    continuation: Sequence[int],
    *,
    new_tokens: int,
    least: int,
    most: int,
    k: int,
) -> Counts:
    """One request of ``new_tokens`` tokens; ``continuation`` goes at least ``k`` beyond them.

    The first token comes from the prefill; after it each step verifies a draft, if there is one,
    and adds a token of its own.
    """
    counts = Counts(per_position=[0] * k, steps=1)
    done = 1
    while done < new_tokens:
        known = [*prompt, *continuation[:done]]
        draft = propose(known, least=least, most=most, k=k)
        right = 0
        while right < len(draft) and draft[right] == continuation[done + right]:
            counts.per_position[right] += 1
            right += 1
        counts.steps += 1
        counts.drafts += bool(draft)
        counts.draft_tokens += len(draft)
        counts.accepted += right
        done += right + 1
    return counts


def total(parts: Sequence[Counts]) -> Counts:
    """The sum of several requests' counts."""
    return Counts(
        drafts=sum(p.drafts for p in parts),
        draft_tokens=sum(p.draft_tokens for p in parts),
        accepted=sum(p.accepted for p in parts),
        steps=sum(p.steps for p in parts),
        per_position=[sum(at) for at in zip(*(p.per_position for p in parts), strict=True)],
    )
