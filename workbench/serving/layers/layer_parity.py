"""Whether an engine's layers compute what the PyTorch model computes, layer by layer.

:func:`layer_parity` runs one prompt through a ``vllm.LLM`` of any size, in one piece, while hooks
in its workers (``parity_worker.py``) keep the residual stream before and after the chosen layers.
Each layer is then loaded by itself (``workbench.load(folder, layers=[i])``), given the same stream,
and its output compared: the engine's error against a float32 run of ours, beside the error that our
own run in the engine's precision has against it. So no layer is blamed for what the layers below it
did, and the model need not fit in the memory that the comparison runs in.

Errors are relative to what a layer adds: the norm of a token's difference over that of
``after - keep * before``, with ``keep`` the factor that depth scaling leaves of the stream. Deep
layers add little to a large stream; relative to the stream a wrong one would look harmless.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workbench.errors import ServingError
from workbench.model.asked import shown
from workbench.model.config import BeamConfig, is_number
from workbench.model.presets import resolve
from workbench.serving.layers.parity_asking import (
    KeptStreams,
    ask,
    check_engine,
    compute,
    prompt_ids,
)
from workbench.serving.layers.parity_judging import Limits
from workbench.serving.layers.parity_values import (
    VERDICTS,
    Flip,
    Gap,
    LayerFigures,
    LayerParity,
    RouterFigures,
    Verdict,
)

__all__ = [
    "VERDICTS",
    "Flip",
    "Gap",
    "LayerFigures",
    "LayerParity",
    "RouterFigures",
    "Verdict",
    "layer_parity",
]

FACTOR = 2.0
_MOST_FACTOR = 1_000_000
_NOT_SHOWN = ("schema", "error", "here", "rank")  # of what the first worker says of itself


def layer_parity(
    llm: Any,
    checkpoint: str | Path,
    *,
    layers: Iterable[int],
    prompt_token_ids: Sequence[int] | None = None,
    device: Any = None,
    head: bool = True,
    factor: float = FACTOR,
    progress: Callable[[str], None] | None = None,
) -> LayerParity:
    """Compare layers of a running engine with the same layers of ``checkpoint`` in PyTorch.

    One prompt is prefilled and one token generated; the engine is as before afterwards, but for
    its prefix cache, which is emptied first.

    Args:
        llm: a ``vllm.LLM`` made with ``worker_extension_cls=EXTENSION`` (of
            ``workbench.serving.layers.engine_worker``) and ``enforce_eager=True``: captured graphs
            and compiled code run no hooks.
        checkpoint: the folder that the engine serves, or a bundled model's name.
        layers: numbers of the layers, such as ``[0, 3, 51]``.
        prompt_token_ids: at most what the engine computes in one piece (``max_num_batched_tokens``)
            and, for windows to matter, more than ``sliding_window``. Text of the model's kind shows
            the router as it works; None draws ids at random, somewhat more than two windows.
        device: where our layers run, "cpu" when None. A sparse layer of the 501B model takes 41 GB
            in float32, then 21 GB in bfloat16, embedding and head 7 GB.
        head: whether final norm and head are compared too, for the prompt's last token.
        factor: how many times the error of our own run in the engine's precision still agrees.
        progress: told in words what is done next.

    Raises:
        ServingError: the engine was made without the extension or with graphs, its layers are not
            understood, or the prompt was not computed in one piece; each says what to do.
        CheckpointError, ModelNotFoundError: see :func:`workbench.load`.
    """
    # These need torch; what was found is read and shown where there is none.
    from workbench.serving.layers.parity_comparing import Comparison
    from workbench.serving.layers.parity_reference import Reference

    resolved = resolve(checkpoint)
    config, say = resolved.config, progress or (lambda _: None)
    numbers = _numbers(layers, config)
    if not is_number(factor) or not 1 <= factor <= _MOST_FACTOR:
        raise ServingError(
            f"factor must be a number from 1 to {_MOST_FACTOR:,}, not {shown(factor)}"
        )
    if resolved.folder is None:
        raise ServingError(
            f"{resolved.name} is known by its shape only; give the checkpoint that the engine "
            "serves"
        )
    ranks = ask(llm, "about")
    about = ranks[0]
    check_engine(ranks, config, resolved.name)
    ids = prompt_ids(prompt_token_ids, config, about)
    dtype = str(about.get("dtype"))
    reference = Reference(resolved.folder, device, dtype)
    limits = Limits(factor=float(factor), precise=dtype == "float32")
    watched = sorted({*numbers, config.num_hidden_layers - 1} if head else numbers)
    figures: list[LayerFigures] = []
    try:
        ask(llm, "watch", watched, len(ids), head)
        say(f"the engine computes {len(ids)} tokens")
        compute(llm, ids)
        kept = KeptStreams(llm=llm, seen=ask(llm, "seen"))
        kept.check(watched, len(ids), about)
        comparison = Comparison(config=config, kept=kept, reference=reference, limits=limits)
        for layer in numbers:
            figures += comparison.compare(layer, say, head=head and layer == numbers[-1])
    except BaseException:
        with suppress(ServingError):  # an engine that died says so here a second time
            ask(llm, "stop")
        raise
    ask(llm, "stop")
    return LayerParity(
        model=resolved.name.rstrip("/").rpartition("/")[2],  # a path says more of a machine
        engine={name: value for name, value in about.items() if name not in _NOT_SHOWN},
        reference=reference.about(),
        tokens=len(ids),
        window=config.sliding_window,
        factor=limits.factor,
        recorded_on=datetime.now(UTC).date().isoformat(),
        layers=tuple(figures),
        notes=tuple(_notes(about, config, len(ids), numbers, head, figures)),
    )


def _numbers(layers: Iterable[int], config: BeamConfig) -> list[int]:
    if isinstance(layers, str | bytes) or not isinstance(layers, Iterable):
        raise ServingError(f"layers takes a list of numbers, such as [0, 3], not {shown(layers)}")
    numbers = []
    for layer in layers:
        try:
            number = None if isinstance(layer, bool) else operator.index(layer)
        except TypeError:
            number = None
        if number is None or not 0 <= number < config.num_hidden_layers:
            raise ServingError(
                f"there is no layer {shown(layer)} to compare; the model has layers 0 to "
                f"{config.num_hidden_layers - 1}"
            )
        numbers.append(number)
    if not numbers:
        raise ServingError("layers is empty; name at least one layer, such as [0]")
    return sorted(set(numbers))


def _notes(
    about: Mapping[str, Any],
    config: BeamConfig,
    tokens: int,
    numbers: Sequence[int],
    head: bool,
    figures: Sequence[LayerFigures],
) -> Iterator[str]:
    if any(not config.is_full(i) for i in numbers) and tokens <= config.sliding_window:
        yield (
            f"the prompt of {tokens} tokens stays within the window of {config.sliding_window}: "
            "windows made no difference"
        )
    quantised = about.get("quantization")
    if quantised not in (None, "none"):
        yield (
            f"the engine multiplies in {quantised}, whose rounding the yardstick does not have: "
            "errors above it are expected"
        )
    cache = str(about.get("kv_cache_dtype"))
    if "fp8" in cache or "int8" in cache or "nvfp4" in cache:
        yield (
            f"the KV cache is {cache}, the yardstick's is not: errors above it are expected in "
            "attention"
        )
    if head and all(each.layer is not None for each in figures):
        yield "the engine's logits were not seen: the head is not compared"
    if any(each.router is not None and each.router.source == "none" for each in figures):
        yield (
            "which experts the engine chose could not be seen: exchanged ones are among the errors"
        )
