"""What each rank does for ``workbench bench decode --gpus N`` and ``bench prefill --gpus N``.

A job takes a request, this process's :class:`Ranks` and whom to tell of progress, and answers with
a document; ``rank_process.py`` calls it. Requests are what JSON can say:

* both: ``model`` (its name), ``config`` (``BeamConfig.to_dict``), ``tp``, ``layers`` (null: all),
  ``dtype`` ("bfloat16" or "float32"), ``rounds``;
* ``decode``: ``batches``, ``contexts``, ``variants`` (null: all that suit the batch), ``experts``
  ("same" or "fp8"), and ``prefill``, null or the ``sequences``, ``tokens``, ``context`` of one on
  the same weights;
* ``prefill``: ``layouts``, ``sequences`` of the group (null: one a rank), ``tokens``, ``context``.

Only ``model`` and ``config`` have to be given; ``DECODE`` and ``PREFILL`` are what the others are
then.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from workbench.errors import KernelError
from workbench.kernels.parallel.ranks import Ranks
from workbench.kernels.peaks import measured_peaks
from workbench.kernels.rank.early import refuse_early
from workbench.kernels.rank.stages import NAMES, stage
from workbench.kernels.rank.state import RankState
from workbench.kernels.rank.weights import ExpertFormat, RankWeights
from workbench.kernels.roofline import Rates
from workbench.model.config import BeamConfig

Told = Callable[[int, int, str], None]

DECODE = {
    "tp": 8, "layers": None, "dtype": "bfloat16", "rounds": 40, "batches": [1], "contexts": [4096],
    "variants": None, "experts": "same", "prefill": None,
}  # fmt: skip
PREFILL = {
    "tp": 8, "layers": None, "dtype": "bfloat16", "rounds": 5, "layouts": ["tp", "ep"],
    "sequences": None, "tokens": 32_768, "context": 0,
}  # fmt: skip
# Which stage of one rank a step with an all-reduce of our own comes from.
WITHIN = {
    "products_boundary": "products", "fused_boundary": "fused", "fused_products": "fused",
    "load_boundary": "load",
}  # fmt: skip
VARIANTS = (*(name for name in NAMES if name != "persistent"), *WITHIN)


def decode(request: Mapping[str, Any], ranks: Ranks, told: Told) -> dict[str, Any]:
    """Check and time the group's decode steps; the document is rank 0's.

    A prefill that cannot be is left out of it, with the reason.

    Raises:
        KernelError: a request that lacks something or cannot be run; on every rank alike.
    """
    from workbench.kernels.parallel.measure import measure_group
    from workbench.kernels.parallel.weights import in_step, tp_weights

    asked, config, kind = _read(request, DECODE)
    pairs = [(batch, context) for context in asked["contexts"] for batch in asked["batches"]]
    with torch.inference_mode():

        def possible() -> bool:
            refuse_pairs(
                config, asked["tp"], pairs, layers=asked["layers"], device=ranks.device,
                dtype=kind, experts=asked["experts"], variants=asked["variants"] or (),
            )  # fmt: skip
            return True

        in_step(ranks, possible)
        rates = _rates(ranks, told, "memory bandwidth")
        told(0, 1, "making the weights")
        weights = tp_weights(
            config, ranks, asked["tp"], layers=asked["layers"], dtype=kind,
            experts=asked["experts"],
        )  # fmt: skip
        document = measure_group(
            weights, ranks, batches=asked["batches"], contexts=asked["contexts"],
            stages=asked["variants"], rounds=asked["rounds"], rates=rates, model=asked["model"],
            progress=told,
        )  # fmt: skip
        if asked["prefill"] is not None:
            _free(ranks)
            from workbench.kernels.parallel.compare_prefill import measure_tp_prefill

            try:
                document["prefill"] = measure_tp_prefill(
                    weights, ranks, **asked["prefill"], rates=rates, progress=told
                )
            except KernelError as error:  # on all ranks alike; the steps are measured by now
                document["left_out"]["prefill"] = str(error)
    return document


def prefill(request: Mapping[str, Any], ranks: Ranks, told: Told) -> dict[str, Any]:
    """Check and time a prefill in each of the layouts; the document is rank 0's.

    Raises:
        KernelError: a request that lacks something or cannot be run; on every rank alike.
    """
    from workbench.kernels.parallel.compare_prefill import compare_prefill

    asked, config, kind = _read(request, PREFILL)
    with torch.inference_mode():
        rates = _rates(ranks, told, "the matrix rate")
        return compare_prefill(
            config, ranks, asked["tp"], layouts=asked["layouts"], layers=asked["layers"],
            dtype=kind, sequences=asked["sequences"], tokens=asked["tokens"],
            context=asked["context"], rounds=asked["rounds"], rates=rates, model=asked["model"],
            progress=told,
        )  # fmt: skip


def refuse_variant(name: str) -> None:
    """Refuse a step that a group of ranks has not.

    Raises:
        KernelError: with those that it has, or why this one has no form for several ranks.
    """
    if name in VARIANTS:
        return
    if name in NAMES:
        raise KernelError(
            f"{stage(name).title} ({name}) has no all-reduce, so several ranks cannot run it; they "
            f"have {', '.join(VARIANTS)}"
        )
    raise KernelError(
        f"there is no variant {name!r:.60} of the step of several ranks; there are "
        f"{', '.join(VARIANTS)}"
    )


def refuse_pairs(
    config: BeamConfig,
    tp: int,
    pairs: Sequence[tuple[int, int]],
    *,
    layers: int | None,
    device: torch.device,
    dtype: torch.dtype,
    experts: ExpertFormat,
    variants: Sequence[str],
) -> None:
    """Refuse a run of which no (batch, context) can be on ``device``, as one rank would.

    One of several that cannot be is left out of the document later, with its reason.

    Raises:
        KernelError: why the first of them cannot be.
    """
    stages = [WITHIN.get(name, name) for name in variants]
    reasons = []
    for batch, context in pairs:
        try:
            refuse_early(
                config, tp, layers=layers, device=device, dtype=dtype, experts=experts,
                context=context, batch=batch, variants=stages,
            )  # fmt: skip
        except KernelError as error:
            reasons.append(error)
    if reasons and len(reasons) == len(pairs):
        raise reasons[0]


def refuse_sizes(
    config: BeamConfig,
    tp: int,
    pairs: Sequence[tuple[int, int]],
    *,
    layers: int | None,
    dtype: torch.dtype,
    experts: ExpertFormat,
) -> None:
    """Refuse what sizes alone forbid, for every pair; no device is touched.

    Whoever starts ranks calls it: asking a GPU for its free memory would take some of rank 0's.

    Raises:
        KernelError: ``tp``, ``layers``, a batch or a context do not suit the model.
    """
    weights = RankWeights.random(
        config, tp, layers=layers, device="meta", dtype=dtype, experts=experts
    )
    if experts == "fp8" and all(layer.dense for layer in weights.layers):
        raise KernelError(
            f"the first {len(weights.layers)} layers of this model have no experts, so none can be "
            "FP8; leave out --experts fp8, or take more --layers"
        )
    for batch, context in pairs:
        RankState(weights, context, batch=batch)


def _read(
    request: Mapping[str, Any], usual: Mapping[str, Any]
) -> tuple[dict[str, Any], BeamConfig, torch.dtype]:
    """A request with what it leaves out, its configuration and its dtype."""
    known = {"model", "config", *usual}
    missing = [name for name in ("model", "config") if name not in request]
    unknown = [name for name in request if name not in known]
    if missing or unknown:
        what = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown):.80}"
        raise KernelError(f"this request {what}; it may have {', '.join(sorted(known))}")
    asked = {**usual, **request}
    for name, value in asked.items():
        if name in _WANTED and not _suits(name, value):
            raise KernelError(
                f"this request's {name} should be {_WANTED[name][0]}, and is {value!r:.40}"
            )
    kinds = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    if not isinstance(asked["dtype"], str) or asked["dtype"] not in kinds:
        raise KernelError(f"dtype is {' or '.join(kinds)}, not {asked['dtype']!r:.40}")
    config = BeamConfig.from_dict(asked["config"], "the request's config")
    return asked, config, kinds[asked["dtype"]]


def _whole(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _some(value: Any, suits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(map(suits, value))


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _one_prefill(value: Any) -> bool:
    if not isinstance(value, Mapping) or not {*value} <= {"sequences", "tokens", "context"}:
        return False
    return all(_whole(each, least=name != "context") for name, each in value.items())


_SEVERAL = "a list of whole numbers from 1 on"
# What a request's values should be, in words; which of them may be null; whether one is that.
_WANTED: dict[str, tuple[str, bool, Callable[[Any], bool]]] = {
    "model": ("a text", False, _text),
    "config": ("an object", False, lambda value: isinstance(value, Mapping)),
    "tp": ("a whole number from 1 on", False, _whole),
    "layers": ("null or a whole number", True, lambda value: _whole(value, least=-(1 << 60))),
    "rounds": ("a whole number from 2 on", False, lambda value: _whole(value, least=2)),
    "batches": (_SEVERAL, False, lambda value: _some(value, _whole)),
    "contexts": (_SEVERAL, False, lambda value: _some(value, _whole)),
    "variants": ("null or a list of names", True, lambda value: _some(value, _text)),
    "experts": ("same or fp8", False, lambda value: value in ("same", "fp8")),
    "prefill": ("null or an object of sequences, tokens, context", True, _one_prefill),
    "layouts": ("a list of names", False, lambda value: _some(value, _text)),
    "sequences": ("null or a whole number from 1 on", True, _whole),
    "tokens": ("a whole number from 1 on", False, _whole),
    "context": ("a whole number from 0 on", False, lambda value: _whole(value, least=0)),
}


def _suits(name: str, value: Any) -> bool:
    _, absent, suits = _WANTED[name]
    return absent if value is None else suits(value)


def _rates(ranks: Ranks, told: Told, what: str) -> Rates:
    """This rank's rates, all ranks measuring at once: as they run afterwards."""
    told(0, 1, f"measuring {what}")
    rates = measured_peaks(str(ranks.device))
    _free(ranks)
    ranks.barrier()
    return rates


def _free(ranks: Ranks) -> None:
    """Give back what nothing uses: the card has no room to spare."""
    gc.collect()
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
