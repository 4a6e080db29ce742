"""The training configuration: one TOML file, checked field by field."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from workbench.errors import ConfigError, TrainingError
from workbench.model.config import BeamConfig

CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """What ``workbench train model --config F`` reads. Lengths are tokens, rates are per step."""

    model: BeamConfig
    output: Path  # folder of the finished checkpoint
    state: Path  # folder of the resumable state
    corpus: str  # folder with train.tokens.u16, or "stdlib": this interpreter's own sources
    tokenizer: Path  # folder with tokenizer.json
    steps: int
    batch: int  # sequences a step
    length: int  # tokens a sequence
    seed: int = 0
    warmup: int = 100
    cooldown: float = 0.5  # last share of the steps, over which rates fall linearly to zero
    matrix_rate: float = 0.02  # Muon
    embedding_rate: float = 0.3  # AdamW from here on
    head_rate: float = 0.006
    router_rate: float = 0.003
    vector_rate: float = 0.01
    weight_decay: float = 0.01  # matrices
    balance_rate: float = 1e-3  # step of the router's correction bias against uneven load
    save_every: int = 1000
    evaluate_bytes: int = 1_000_000  # of each held-out set, at the end; 0 for none
    compile: bool = True  # torch.compile on CUDA; a CPU always runs eagerly


def read_settings(path: str | Path) -> TrainingSettings:
    """Read and check a training configuration.

    Relative paths are taken from the current folder.

    Raises:
        TrainingError: the file, a field or a value is wrong; the message names it.
    """
    file = Path(path)
    if not file.exists() and (CONFIGS / f"{path}.toml").exists():
        file = CONFIGS / f"{path}.toml"
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainingError(
            f"training configuration {file} cannot be read ({error.strerror}); "
            f"give a TOML file or one of {', '.join(bundled_settings())}"
        ) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TrainingError(f"{file} is not valid TOML ({error})") from error
    return settings_from_dict(data, str(file))


def bundled_settings() -> tuple[str, ...]:
    """Names of the configurations inside the package."""
    return tuple(sorted(p.stem for p in CONFIGS.glob("*.toml")))


def settings_from_dict(data: Mapping[str, Any], where: str) -> TrainingSettings:
    """See :func:`read_settings`."""
    values = dict(data)
    model = values.pop("model", None)
    if not isinstance(model, Mapping):
        raise TrainingError(f"{where}: the table [model] with the config.json fields is missing")
    try:
        values["model"] = BeamConfig.from_dict(model, where=f"{where} [model]")
    except ConfigError as error:
        raise TrainingError(str(error)) from None
    known = {f.name: f for f in fields(TrainingSettings)}
    for name in values:
        if name not in known:
            raise TrainingError(f"{where}: {name!r} is not a training field; remove it")
    for name, f in known.items():
        if name not in values:
            if f.default is MISSING:
                raise TrainingError(f"{where}: the field {name} is missing; add it")
            continue
        values[name] = _checked(name, values[name], str(f.type), where)
    settings = TrainingSettings(**values)
    if settings.length > settings.model.max_position_embeddings:
        raise TrainingError(
            f"{where}: length ({settings.length}) exceeds max_position_embeddings "
            f"({settings.model.max_position_embeddings})"
        )
    if settings.cooldown > 1:
        raise TrainingError(f"{where}: cooldown is a share of the steps, at most 1")
    return settings


def _checked(name: str, value: Any, kind: str, where: str) -> Any:
    if kind == "Path" and isinstance(value, str):
        return Path(value).expanduser()
    if kind == "float" and isinstance(value, int | float) and not isinstance(value, bool):
        if 0 <= value < float("inf"):
            return float(value)
        raise TrainingError(f"{where}: {name} must be at least 0 and finite, not {value!r}")
    if kind == "int" and isinstance(value, int) and not isinstance(value, bool):
        if value >= (1 if name in ("steps", "batch", "length", "save_every") else 0):
            return value
        raise TrainingError(f"{where}: {name} is too small ({value!r})")
    if (
        (kind == "str" and isinstance(value, str))
        or (kind == "bool" and isinstance(value, bool))
        or kind == "BeamConfig"
    ):
        return value
    raise TrainingError(f"{where}: {name} must be of kind {kind.lower()}, not {value!r}")
