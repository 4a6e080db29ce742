"""Gates for outputs that are choices: experts of a token, tokens of a walk.

A choice is right when no better one was there; between two that are equal to within rounding either
is. So what is measured is how much worse the chosen ones are than the best, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workbench.kernels import oracle, oracle_dflash2
from workbench.kernels.case import Case, Outputs
from workbench.kernels.gates import Gate, errors, limits

# Scores are sigmoids of float32 sums over the hidden size: two that are nearer than this may swap.
TIE = 2e-6
# A float32 weight, its sum of K and one division.
WEIGHT_ERROR = 5e-6


def router(case: Case, outputs: Outputs) -> list[tuple[str, float, float]]:
    """ "choice": how far below the K-th best eligible expert a chosen one is, over all tokens;
    "weights": relative error of the weights of the experts that were chosen."""
    x, weight, bias = case.args
    k = case.kwargs["top_k"]
    ids, weights = outputs["ids"], outputs["weights"].double()
    if not ids.numel():
        return []
    scores = oracle.router_scores(x, weight)
    experts = scores.shape[1]
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= experts:
        return [("experts exist", float(max(-low, high)), float(experts - 1))]
    ordered = ids.sort(-1).values
    repeated = int((ordered[:, 1:] == ordered[:, :-1]).sum())
    found = [("experts differ", float(repeated), 0.0)]
    biased = scores + bias.double()
    eligible = _eligible(biased, case.kwargs["n_group"], case.kwargs["topk_group"])
    best = eligible.sort(-1, descending=True).values[:, k - 1]
    regret = best - eligible.gather(1, ids).amin(-1)  # infinite: of a group that takes no part
    # A group that lost by less than a tie may be taken: then its experts are judged as eligible.
    found.append(("choice", float(regret.max()), TIE + _group_slack(biased, case.kwargs)))
    share = scores.gather(1, ids)
    if case.kwargs["renormalise"]:
        share = share / share.sum(-1, keepdim=True)
    error = ((weights - share).abs() / share).max()
    finite = bool(torch.isfinite(weights).all())
    found.append(("weights", float(error) if finite else float("inf"), WEIGHT_ERROR))
    return found


def _groups(biased: Tensor, n_group: int, topk_group: int) -> tuple[Tensor, Tensor]:
    """(rank of every group, whether it takes part), both ``[N, groups]``."""
    rank = biased.unflatten(-1, (n_group, -1)).sort(-1, descending=True).values[..., :2].sum(-1)
    worst = rank.sort(-1, descending=True).values[:, topk_group - 1, None]
    return rank, rank >= worst


def _eligible(biased: Tensor, n_group: int | None, topk_group: int | None) -> Tensor:
    """Biased scores ``[N, E]``, -inf for the experts whose group does not take part."""
    if n_group is not None and topk_group is not None and topk_group < n_group:
        _, inside = _groups(biased, n_group, topk_group)
        width = biased.shape[1] // n_group
        biased = biased.masked_fill(~inside.repeat_interleave(width, 1), float("-inf"))
    return biased


def _group_slack(biased: Tensor, kwargs: Any) -> float:
    """Regret that a tie between two groups could explain: infinite where one exists, else 0."""
    n_group, topk_group = kwargs["n_group"], kwargs["topk_group"]
    if n_group is None or topk_group is None or topk_group >= n_group:
        return 0.0
    rank, _ = _groups(biased, n_group, topk_group)
    ordered = rank.sort(-1, descending=True).values
    gap = (ordered[:, topk_group - 1] - ordered[:, topk_group]).min()
    return float("inf") if float(gap) < TIE else 0.0


def boundary(case: Case, outputs: Outputs) -> list[tuple[str, float, float]]:
    """ "second norm": relative error of x' as the norm of the variant's own h'.

    Against the whole oracle a second rounding of x' hides behind the roundings of the stream.
    """
    return _second_norm(outputs, case.args[4], case.args[5], oracle.boundary(*case.args)["x"])


def conv_residual_norm(case: Case, outputs: Outputs) -> list[tuple[str, float, float]]:
    """As :func:`boundary`."""
    exact = oracle_dflash2.conv_residual_norm(*case.args)[1]
    return _second_norm(outputs, case.args[4], case.args[5], exact)


def _second_norm(
    outputs: Outputs, weight: Tensor, eps: float, exact: Tensor
) -> list[tuple[str, float, float]]:
    x = outputs["x"]
    if not x.numel():
        return []
    own = oracle.rms_norm(outputs["h"], weight, eps)["y"]
    # A kernel that norms the stream before it is rounded is nearer to the exact one: right too.
    found = min(errors(x, own).relative, errors(x, exact).relative)
    once = errors(own.to(x.dtype), own)  # one rounding
    return [("second norm", found, limits(Gate(), once, x.dtype).relative)]


def selector_walk(case: Case, outputs: Outputs) -> list[tuple[str, float, float]]:
    """ "choice": how far below the best candidate of the path taken a chosen one is."""
    if not outputs["tokens"].numel():
        return []
    edges, ids, temperature, noise = case.args
    regret = oracle_dflash2.walk_regret(
        edges, ids, temperature, noise, outputs["tokens"], outputs["realized"]
    )
    return [("choice", float(regret.max()), 1e-5)]


def _edges(*args: Any, **kwargs: Any) -> Outputs:
    return {"edges": oracle_dflash2.candidate_edges(*args, **kwargs)}


def _conv(*args: Any, **kwargs: Any) -> Outputs:
    return {"y": oracle_dflash2.dynamic_conv(*args, **kwargs)}


def _residual(*args: Any, **kwargs: Any) -> Outputs:
    h, x = oracle_dflash2.conv_residual_norm(*args, **kwargs)
    return {"h": h, "x": x}


def _context(*args: Any, **kwargs: Any) -> Outputs:
    k, v = oracle_dflash2.context_kv_write(*args, **kwargs)
    rows = args[6]
    wanted = rows[rows >= 0].to(k.device)
    found = {}
    for name, values in (("k", k), ("v", v)):  # as stored: the oracle gives what it stands for
        scale = kwargs[f"{name}_scale"]
        if scale is not None:
            values = values / scale.to(values.device).double()[:, None, None, None]
        found[name] = values.index_select(1, wanted)
    return found


DRAFTER_ORACLES: dict[str, Callable[..., Outputs]] = {
    "dynamic_conv": _conv,
    "conv_residual_norm": _residual,
    "candidate_edges": _edges,
    "context_kv_write": _context,
}
