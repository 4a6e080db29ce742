"""A folder to serve where there is no checkpoint yet: shapes alone, for an engine's dummy weights.

With it a new node is tried out before half a terabyte is copied to it: does the engine start in
this layout, does the memory suffice, do the graphs capture? Its replies are noise.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from workbench.errors import ServingError
from workbench.files import FileError, cache_folder, write_whole
from workbench.model.presets import ZOO, drafter_of, resolve, resolve_drafter
from workbench.serving.launch.launch import Launch

# The real model's tokenizer is not public; of the bundled one every id is in any vocabulary.
_TOKENIZER = (ZOO / "beam-tiny" / "tokenizer.json", ZOO / "beam-tiny" / "tokenizer_config.json")


def dry_run(launch: Launch, model: str, *, folder: Path | None = None) -> Launch:
    """The launch with folders in place of what it lacks: a checkpoint, a drafter.

    They hold the ``config.json`` of the preset ``model`` and of its drafter, and the bundled
    model's tokenizer, in ``folder`` or the user's cache. The weights are then in BF16, since the
    shapes know of no other.

    Raises:
        ServingError: the launch is not for dummy weights, or the folder cannot be written.
        ModelNotFoundError: there is no such model.
    """
    if not launch.dummy_weights:
        raise ServingError("shapes without weights can be served with dummy weights only")
    base = folder or cache_folder() / "shapes"
    checkpoint, speculation = launch.checkpoint, launch.speculation
    if checkpoint is None:
        resolved = resolve(model)
        target = base / Path(resolved.name).name
        files = {path.name: path.read_bytes() for path in _TOKENIZER}
        _write(target, files | {"config.json": resolved.config.to_json().encode()})
        checkpoint = str(target.absolute())
    if speculation is not None and speculation.drafter is None:
        name = drafter_of(model)
        if name is None:
            raise ServingError(f"no drafter is known for {model}; name one, or serve without")
        drafter = resolve_drafter(name)
        _write(base / name, {"config.json": drafter.config.to_json().encode()})
        speculation = replace(speculation, drafter=str((base / name).absolute()))
    return replace(launch, checkpoint=checkpoint, speculation=speculation)


def _write(folder: Path, files: dict[str, bytes]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_whole(folder / name, data)
    except OSError as error:
        raise ServingError(
            f"{folder} cannot be made ({error.strerror or error}); free space or name another"
        ) from error
    except FileError as error:
        raise ServingError(str(error)) from error
