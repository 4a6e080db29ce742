"""``workbench.load``: a model by name, folder or hub id; into memory if it fits, else to vLLM.

``model/checkpoint.py`` loads, ``model/hub.py`` fetches, ``model/fits.py`` judges,
``serving/served_model.py`` serves. Here it is decided which.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from workbench.errors import CheckpointError, WorkbenchError
from workbench.model.asked import shown
from workbench.model.fits import DoesNotFitError, Fit, fit_on
from workbench.model.hub import INDEX_FILE, SINGLE_FILE, HubModel, fetch, hub_id, look
from workbench.model.partial import take_layers
from workbench.model.presets import ResolvedModel, resolve

if TYPE_CHECKING:
    import torch

    from workbench.model.beam import Beam
    from workbench.model.checkpoint import Progress
    from workbench.model.config import BeamConfig
    from workbench.model.info import ModelInfo
    from workbench.model.parallel import Shard
    from workbench.serving.served_model import ServedBeam

_MOST_LAYERS = 10_000  # that somebody may name; no model has as many


@overload
def load(
    model: str | Path = ...,
    *,
    device: torch.device | str | None = ...,
    dtype: torch.dtype | None = ...,
    shard: Shard | None = ...,
    layers: Iterable[int] | None = ...,
    check_finite: bool = ...,
    progress: Progress | None = ...,
    revision: str | None = ...,
    serve: Literal[False] | None = ...,
) -> Beam: ...


@overload
def load(
    model: str | Path = ...,
    *,
    device: torch.device | str | None = ...,
    revision: str | None = ...,
    serve: Literal[True],
) -> ServedBeam: ...


def load(
    model: str | Path = "beam-tiny",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    shard: Shard | None = None,
    layers: Iterable[int] | None = None,
    check_finite: bool = True,
    progress: Progress | None = None,
    revision: str | None = None,
    serve: bool | None = None,
) -> Beam | ServedBeam:
    """A Beam with its weights, ready for inference; or, where it does not fit, a plan to serve it.

    A model is first judged by its configuration (:mod:`workbench.model.fits`): what its weights
    take on the device, and what is free there. If it fits, it is loaded. If it does not, and
    neither ``device`` nor ``layers`` nor ``shard`` says otherwise, the answer is a
    :class:`~workbench.serving.served_model.ServedBeam`: it shows the plan for this machine's GPUs
    and the engine's command, and starts nothing before its ``serve()``. It is declared as a
    ``Beam``, since that is what nearly every call gives; whatever takes a model refuses a served
    one in a sentence.

    Of a hub's model nothing but its description is fetched before that is decided, and with
    ``layers`` only the files that hold them.

    Args:
        model: a bundled checkpoint, a folder with ``config.json`` and safetensors, or a hub id
            such as ``owner/name`` (:mod:`workbench.model.hub`).
        device: where the weights go; the CPU when None. ``"meta"`` reads no weights and allocates
            nothing: the shapes of any model, ``beam-501b`` included.
        dtype: of weights and activations: float32 on a CPU and bfloat16 elsewhere when None.
            Routers are float32 always.
        shard: the tensor-parallel rank to read; the whole model when None.
        layers: some layers only, such as ``[0, 3, 51]``, between the embedding and the head: for
            study, from a checkpoint of any size. See :mod:`workbench.model.partial`.
        check_finite: refuse weights that are NaN or infinite.
        progress: told after each tensor how many bytes of the model are filled, of how many.
        revision: a branch, a tag or a commit of a hub's model; its main branch when None.
        serve: False refuses what does not fit (:class:`DoesNotFitError`) instead of planning it;
            True serves the model whether it fits or not: the plan is printed, then the engine is
            started. With ``device="cpu"`` that is vLLM's CPU build.

    Raises:
        DoesNotFitError: it does not fit what was asked for; or a GPU of this machine has room for
            it where the CPU has not.
        HubError: the hub has no such model, no right to it, or cannot be reached.
        ModelNotFoundError, ConfigError, CheckpointError, TokenizerError: see
            :func:`workbench.model.checkpoint.load`.
        ServingError: with ``serve=True``: it cannot be served on this machine.
    """
    from workbench.model import checkpoint

    chosen = None if layers is None else _once(layers)
    _check(serve, shard)
    if serve is True:
        if not (dtype is None and shard is None and chosen is None):
            raise CheckpointError(
                "serve=True is of the whole model in its own precision; leave dtype, shard and "
                "layers out"
            )
        cpu = _is_cpu(device)
        served = _served(*_found(model, revision), cpu=cpu)
        served.serve()
        return served
    resolved, hub = _found(model, revision)
    where = checkpoint.target_device(device)
    shapes_alone = where.type == "meta" or (hub is None and not _has_weights(resolved.folder))
    if shapes_alone or None not in (chosen, shard):
        # Nothing to judge, or an error that loading knows.
        return _loaded(resolved, hub, chosen, device=device, dtype=dtype, shard=shard)
    config, title, wanted = resolved.config, resolved.name, None
    if chosen is not None:
        config = part = take_layers(config, chosen)
        title, wanted = f"{part.words} of {title}", part.wants
    fit = fit_on(
        config,
        name=title,
        device=where,
        dtype=checkpoint.target_dtype(dtype, where),
        shard=shard,
    )
    if not fit.fits:
        remedy = _remedy(device, shard, chosen)
        if remedy is not None:
            raise DoesNotFitError(f"{fit}; {remedy}", fit)
        return _elsewhere(resolved, hub, fit, dtype, refuse=serve is False)
    if hub is not None:
        fetch(hub, hub.weight_files(wanted))
    return _loaded(
        resolved,
        hub,
        chosen,
        device=device,
        dtype=dtype,
        shard=shard,
        check_finite=check_finite,
        progress=progress,
    )


def describe(model: str | Path, *, revision: str | None = None) -> tuple[ModelInfo, str | None]:
    """What a model is (:func:`workbench.info`), of a hub's model too, and a remark on serving it.

    The remark is one sentence where a checkpoint does not fit this machine's CPU, and None where it
    fits or has no weights at all.

    Raises:
        HubError: see :func:`load`.
        ModelNotFoundError, ConfigError: see :func:`workbench.model.presets.resolve`.
    """
    from workbench.model.info import info

    resolved, hub = _found(model, revision)
    found = info(model) if hub is None else replace(info(hub.folder), name=resolved.name)
    if hub is None and not _has_weights(resolved.folder):
        return found, None
    fit = fit_on(resolved.config, name=resolved.name)
    if fit.fits:
        return found, None
    try:
        advice = _served(resolved, hub, fit=fit).advice
    except WorkbenchError as error:  # what it is can be said though it cannot be served
        advice = f"nor can it be served: {error}"
    return found, f"{fit}; {advice}"


# -- parts --------------------------------------------------------------------------------------


def _found(model: str | Path, revision: str | None) -> tuple[ResolvedModel, HubModel | None]:
    repo = hub_id(model)
    if repo is None:
        if revision is not None:
            raise CheckpointError(
                f"revision is of a model of the hub, and {shown(str(model))} is none; leave it out"
            )
        return resolve(model), None
    hub = look(repo, revision)
    return replace(resolve(hub.folder), name=repo), hub


def _loaded(
    resolved: ResolvedModel, hub: HubModel | None, layers: tuple[Any, ...] | None, **options: Any
) -> Beam:
    from workbench.model import checkpoint

    source = resolved.name if hub is None else hub.folder
    beam = checkpoint.load(source, layers=layers, **options)
    if hub is not None:
        beam.name = beam.name.replace(str(hub.folder), hub.repo)
    return beam


def _elsewhere(
    resolved: ResolvedModel,
    hub: HubModel | None,
    fit: Fit,
    dtype: torch.dtype | None,
    *,
    refuse: bool,
) -> Any:
    """What becomes of a whole model that does not fit the CPU: an error, or one to serve."""
    other = _on_a_gpu(resolved.config, resolved.name, dtype)
    if other is not None:
        raise DoesNotFitError(
            f"{fit}; {other.device} has room for it in {other.dtype}: "
            f"load it with device='{other.device}'",
            fit,
        )
    served = _served(resolved, hub, fit=fit)
    if refuse:
        raise DoesNotFitError(f"{fit}; {served.advice}", fit)
    return served


def _has_weights(folder: Path | None) -> bool:
    """Whether a folder has weights to load, as far as its names say."""
    return folder is not None and any(
        (folder / name).exists() for name in (SINGLE_FILE, INDEX_FILE)
    )


def _remedy(
    device: torch.device | str | None, shard: Shard | None, layers: tuple[Any, ...] | None
) -> str | None:
    """What to do about a wish that there is no room for; None where nothing special was wished."""
    if layers is not None:
        return "load fewer layers, or choose another device or a narrower dtype"
    if shard is not None:
        return "split it over more ranks, or choose another device or a narrower dtype"
    if device is not None:
        return (
            "leave device out to have it planned for vLLM, or load some of its layers "
            "(layers=[0, 3])"
        )
    return None


def _on_a_gpu(config: BeamConfig, name: str, dtype: torch.dtype | None) -> Fit | None:
    import torch

    from workbench.model import checkpoint

    for number in range(torch.cuda.device_count()):
        where = torch.device("cuda", number)
        kind = checkpoint.target_dtype(dtype, where)
        # Asking what is free takes memory there, which an engine may want: not for a hopeless case.
        total = torch.cuda.get_device_properties(number).total_memory
        if not fit_on(config, name=name, device=where, dtype=kind, free=total).fits:
            continue
        fit = fit_on(config, name=name, device=where, dtype=kind)
        if fit.fits:
            return fit
    return None


def _served(
    resolved: ResolvedModel, hub: HubModel | None, *, fit: Fit | None = None, cpu: bool = False
) -> ServedBeam:
    from workbench.serving.served_model import served_beam

    if resolved.folder is None:
        raise CheckpointError(
            f"{resolved.name} is known by its shape only and has no weights to serve; give the "
            "folder or hub id of its checkpoint"
        )
    if hub is not None:
        hub.weight_files()  # refused here rather than in an engine
    return served_beam(resolved.name, resolved.config, resolved.folder, hub=hub, fit=fit, cpu=cpu)


def _is_cpu(device: torch.device | str | None) -> bool:
    if device is None or str(device) == "cuda":
        return False
    if str(device) != "cpu":
        raise CheckpointError(
            f"device {shown(str(device))} cannot be served on: use 'cuda', which is all GPUs of "
            "this machine, or 'cpu'"
        )
    return True


def _check(serve: Any, shard: Any) -> None:
    from workbench.model.parallel import Shard

    if not (serve is None or isinstance(serve, bool)):
        raise CheckpointError(f"serve must be True, False or None, not {shown(serve)}")
    if shard is not None and not isinstance(shard, Shard):
        raise CheckpointError(f"shard must be a Shard(rank=, world=), not {shown(shard)}")


def _once(layers: Any) -> Any:
    """An iterator can be read once, and layers are looked at twice.

    Raises:
        CheckpointError: this is no list; or one without an end.
    """
    if isinstance(layers, str | bytes) or not isinstance(layers, Iterable):
        raise CheckpointError(f"layers takes a list, such as [0, 3], not {shown(layers)}")
    found = tuple(islice(layers, _MOST_LAYERS + 1))
    if len(found) > _MOST_LAYERS:
        raise CheckpointError(f"layers has more than {_MOST_LAYERS:,} numbers; name each once")
    return found
