"""Several ranks of the full model at once, a GPU each: what a step of the whole model costs.

``workbench bench decode --gpus N`` asks ``start.run_ranks`` for N processes (``rank_process``).
Each meets the others (``ranks.Ranks.join``) and does a job of ``jobs``: it makes its part of one
model (``weights``, ``ep_weights``), ``check`` holds every step against float64, ``measure`` and
``compare_prefill`` time it with communication and without. Rank 0's answer is the document that
the command writes and ``recorded_groups`` reads.

The steps are those of :mod:`workbench.kernels.rank` with their partial sums made whole: the chain
of single operations (``tp_chain``, with the registry's ``reduced_boundary`` of ``exchanges``), the
fused one (``tp_fused``), the one of many rows (``tp_load``) and the prefill (``tp_prefill``);
``expert_parallel`` is the other layout. ``mailbox`` is memory that all ranks see, by which the
kernels of ``triton_exchange`` and ``triton_push`` add up; ``triton_sums`` is the other layout's
kernel. ``targets`` compiles the decode steps for GPUs that are not here.

A way to exchange is a variant of ``reduced_boundary``, or a step of its own with a ``GroupStage``
in ``measure``; a layout of the prefill is a function in ``compare_prefill`` with a line in its
``TITLES``. docs/parallel.md says how.
"""

from __future__ import annotations

from workbench.kernels.parallel.ranks import Ranks

__all__ = ["Ranks"]
