"""The training configuration: one TOML file, checked field by field."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from workbench.errors import ConfigError, TrainingError
from workbench.model.config import BeamConfig
from workbench.model.presets import ZOO, bundled
from workbench.model.tensors import total_parameters
from workbench.model.tokenizer import Tokenizer

CONFIGS = Path(__file__).parent / "configs"

# Keys of a config.json that say nothing about the model's shape, for a [model] copied from one.
_CONFIG_JSON_KEYS = ("architectures", "model_type", "torch_dtype", "dtype", "transformers_version")
# Far above any run; beyond them the arithmetic of torch or numpy overflows.
_AT_MOST = {
    "steps": 10**9,
    "batch": 10**6,
    "length": 10**9,
    "warmup": 10**9,
    "save_every": 10**9,
    "evaluate_bytes": 10**12,
    "responses": 10**9,
    "rows": 10**6,
    "response": 10**9,
    "response_min": 10**9,
    "prompt_min": 10**9,
    "prompt_max": 10**9,
    "anchors": 10**6,
    "evaluate_prompts": 10**6,
    "evaluate_tokens": 10**9,
    "repeat_run": 10**6,
    "repeat_grace": 10**6,
    "seed": 2**63 - 1,
}
_MOST_IN_MODEL = 2**53
_MOST_LAYERS = 10_000
MOST_PARAMETERS = 10**10  # 40 GB of float32 weights, before gradients and optimizers
_AT_LEAST_ONE = (
    "steps",
    "batch",
    "length",
    "save_every",
    "responses",
    "rows",
    "response",
    "prompt_min",
    "prompt_max",
    "anchors",
    "evaluate_tokens",
)
_KINDS = {  # what a value must be, by the field's type
    "Path": "a path in quotes",
    "str": "a text in quotes",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """What ``workbench train model --config F`` reads. Lengths are tokens, rates are per step."""

    model: BeamConfig
    output: Path  # folder of the finished checkpoint
    state: Path  # folder of the resumable state
    corpus: str  # folder with train.tokens.u16, or "stdlib": this interpreter's own sources
    tokenizer: Path  # folder with tokenizer.json; a file may give a bundled model's name instead
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
    data, file = read_toml(path, "model")
    return settings_from_dict(data, str(file))


def read_toml(path: str | Path, table: str) -> tuple[dict[str, Any], Path]:
    """What is in a TOML file, or in the bundled configuration of that name, and the file.

    ``table`` is what the bundled ones that a message names must have.

    Raises:
        TrainingError: it cannot be read or parsed.
    """
    file = Path(path)
    if "\0" in str(path):
        raise TrainingError(f"{str(path)!r} is not a path (it holds a NUL); name a TOML file")
    try:
        if not file.exists() and (CONFIGS / f"{path}.toml").exists():
            file = CONFIGS / f"{path}.toml"
        if file.is_char_device() or file.is_block_device():  # /dev/zero never ends
            raise TrainingError(f"{file} is a device; give a TOML file")
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainingError(
            f"training configuration {file} cannot be read ({error.strerror}); "
            f"give a TOML file or one of {', '.join(bundled_settings(table))}"
        ) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TrainingError(f"{file} is not valid TOML ({error}); correct it") from error
    except TrainingError:
        raise
    except (ValueError, RecursionError) as error:  # Python's own limits
        raise TrainingError(
            f"{file} nests too deep or holds a number of too many digits; correct it"
        ) from error
    return data, file


def bundled_settings(table: str = "model") -> tuple[str, ...]:
    """Names of the configurations inside the package that have this table (model, drafter)."""
    return tuple(
        sorted(
            p.stem
            for p in CONFIGS.glob("*.toml")
            if f"\n[{table}]\n" in p.read_text(encoding="utf-8")
        )
    )


def settings_from_dict(data: Mapping[str, Any], where: str) -> TrainingSettings:
    """See :func:`read_settings`."""
    values = dict(data)
    model = values.pop("model", None)
    if not isinstance(model, Mapping):
        raise TrainingError(f"{where}: the table [model] with the config.json fields is missing")
    values["model"] = _model(model, f"{where} [model]")
    # A config.json may hold what it likes; here an unknown field is a misspelt one.
    for name in values["model"].extra:
        if name not in _CONFIG_JSON_KEYS:
            raise TrainingError(f"{where} [model]: {name!r} is not a field of Beam; remove it")
    settings = TrainingSettings(**checked_fields(TrainingSettings, values, where))
    if settings.length > settings.model.max_position_embeddings:
        raise TrainingError(
            f"{where}: length ({settings.length}) exceeds max_position_embeddings "
            f"({settings.model.max_position_embeddings}) of [model]; lower it"
        )
    if settings.cooldown > 1:
        raise TrainingError(
            f"{where}: cooldown is a share of the steps and must be at most 1, "
            f"not {settings.cooldown}"
        )
    return settings


def checked_fields(kind: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values of a settings dataclass's fields, each checked by its type and name.

    Raises:
        TrainingError: a value is wrong, unknown or missing; the message names it.
    """
    values = dict(values)
    known = {f.name: f for f in fields(kind)}
    for name in values:
        if name not in known:
            raise TrainingError(f"{where}: {name!r} is not a training field; remove it")
    for name, f in known.items():
        if name not in values:
            if f.default is MISSING:
                raise TrainingError(f"{where}: the field {name} is missing; add it")
            continue
        values[name] = _checked(name, values[name], str(f.type), where)
    return values


def _model(data: Mapping[str, Any], where: str) -> BeamConfig:
    """The [model] table, refused where building or recording it would fail later."""
    rope = data.get("rope_parameters")
    for name, value in [*data.items(), *(rope.items() if isinstance(rope, Mapping) else ())]:
        most = _MOST_LAYERS if name == "num_hidden_layers" else _MOST_IN_MODEL
        if isinstance(value, int) and value > most:
            raise TrainingError(f"{where}: {name} must be at most {most}, not {_shown(value)}")
    try:
        config = BeamConfig.from_dict(data, where=where)
        json.dumps(config.to_dict())
    except ConfigError as error:
        raise TrainingError(str(error)) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise TrainingError(
            f"{where} holds a value that a config.json cannot hold (a date, or one too deep or "
            "too large); remove it"
        ) from error
    parameters = total_parameters(config)
    if parameters > MOST_PARAMETERS:
        raise TrainingError(
            f"{where} has {parameters:,} parameters, and at most {MOST_PARAMETERS:,} can be "
            "trained here; make it smaller"
        )
    return config


def _shown(value: Any) -> str:
    """A wrong value for a message, cut when it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # over 4,300 digits, or nested too deep
        return "one too large to show"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _path(name: str, value: str, where: str) -> Path:
    if not value or "\0" in value:
        problem = "holds a NUL" if value else "is empty"
        raise TrainingError(f"{where}: {name} {problem}; name a folder")
    if name == "tokenizer" and value in bundled():
        return ZOO / value
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise TrainingError(
            f"{where}: {name} is {_shown(value)}, but there is no such user; write the path out"
        ) from error


def _checked(name: str, value: Any, kind: str, where: str) -> Any:
    if kind == "Path" and isinstance(value, str):
        return _path(name, value, where)
    if kind == "float" and isinstance(value, int | float) and not isinstance(value, bool):
        if 0 <= value < 1e300:  # a larger whole number is no float
            return float(value)
        raise TrainingError(f"{where}: {name} must be at least 0 and finite, not {_shown(value)}")
    if kind == "int" and isinstance(value, int) and not isinstance(value, bool):
        least = 1 if name in _AT_LEAST_ONE else 0
        if value < least:
            raise TrainingError(f"{where}: {name} must be at least {least}, not {_shown(value)}")
        if value > _AT_MOST[name]:
            raise TrainingError(
                f"{where}: {name} must be at most {_AT_MOST[name]}, not {_shown(value)}"
            )
        return value
    if kind == "str" and isinstance(value, str):  # the corpus, or the target
        return str(_path(name, value, where))
    if (kind == "bool" and isinstance(value, bool)) or kind not in _KINDS:  # a checked table
        return value
    raise TrainingError(f"{where}: {name} must be {_KINDS[kind]}, not {_shown(value)}")


def check_tokenizer(settings: TrainingSettings, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer whose ids the model of ``settings`` cannot embed or would misread.

    Raises:
        TrainingError: the vocabulary is larger than the model's, or a marker's id differs.
    """
    model = settings.model
    if tokenizer.vocab_size > model.vocab_size:
        raise TrainingError(
            f"the tokenizer in {settings.tokenizer} has {tokenizer.vocab_size} tokens, more than "
            f"the model's vocab_size of {model.vocab_size}; raise vocab_size in [model]"
        )
    for name, theirs in (
        ("bos_token_id", tokenizer.bos_id),
        ("eos_token_id", tokenizer.eos_id),
        ("pad_token_id", tokenizer.pad_id),
    ):
        ours = getattr(model, name)
        if ours is not None and ours != theirs:
            raise TrainingError(
                f"{name} is {ours} in [model], but {theirs} in the tokenizer in "
                f"{settings.tokenizer}; make them equal"
            )
