"""What the engine's authors published of adaptive verification, to stand beside one's own figures.

Another machine, another model and another drafter: it says what to expect, and checks nothing here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Adaptive against fixed verification, as published.

    Attributes:
        concurrency: sequences decoded together.
        fixed_tokens_per_second, adaptive_tokens_per_second: all of them together.
        tokens_per_second_change: of adaptive against fixed, 0.108 for +10.8 %.
        tpot_p99_change: the same of the 99th percentile of the time per output token.
    """

    concurrency: int
    fixed_tokens_per_second: int
    adaptive_tokens_per_second: int
    tokens_per_second_change: float
    tpot_p99_change: float

    def to_dict(self) -> dict[str, Any]:
        """The figures by name, for JSON."""
        return asdict(self)


def published() -> Published:
    """The engine's figures."""
    return Published(
        concurrency=128,
        fixed_tokens_per_second=15012,
        adaptive_tokens_per_second=16632,
        tokens_per_second_change=0.108,
        tpot_p99_change=-0.09,
    )
