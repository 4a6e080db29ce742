"""One tensor-parallel rank of the full Beam at full depth: weights, state, decode step.

``RankWeights.random`` allocates the rank in place, ``RankState`` holds what a step changes,
``chain.RankStep`` and ``fused.FusedStep`` are decode steps (token id -> next token id) that one
CUDA graph holds, ``reference`` is the float64 they are compared with and ``waterfall`` times them.
No all-reduce is in any of them: the partial sums of the rank are used as if they were whole.
"""

from __future__ import annotations

from workbench.kernels.rank.state import RankState
from workbench.kernels.rank.weights import LayerWeights, RankWeights

__all__ = ["LayerWeights", "RankState", "RankWeights"]
