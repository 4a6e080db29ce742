"""Several ranks of the full model at once, a GPU each: what a step of the whole model costs.

``ranks`` is how the ranks speak, ``start`` starts and ends them, ``mailbox`` is memory that all of
them see. ``tp_chain``, ``tp_fused``, ``tp_load`` and ``tp_prefill`` are the steps of
:mod:`workbench.kernels.rank` with their partial sums made whole; ``expert_parallel`` is the other
layout. ``check`` holds them against float64, ``measure`` times them with and without communication.
"""

from __future__ import annotations

from workbench.kernels.parallel.ranks import Ranks

__all__ = ["Ranks"]
