"""The configuration of a drafter's training: one TOML file, checked field by field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from workbench.errors import ConfigError, TrainingError
from workbench.model.config import BeamConfig
from workbench.model.drafter_config import DFlash2Config, drafter_tensors
from workbench.training.settings import MOST_PARAMETERS, checked_fields, read_toml

_OF_THE_TARGET = ("vocab_size", "hidden_size", "max_position_embeddings")
_SHARES = ("cooldown", "from_start", "sampled_share", "soft_targets", "dpace", "regenerate_share")


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilSettings:
    """What ``workbench train drafter --config F`` reads. Lengths are tokens, rates are per step."""

    drafter: Mapping[str, Any]  # DFlash2Config's fields; those of the target are filled in
    target: str  # a bundled model or a folder
    output: Path  # folder of the drafter: as of the last save, and finished at the end
    state: Path  # folder of the resumable state
    corpus: str  # folder with train.tokens.u16, "stdlib", or text: a folder, a file, JSON lines
    start_from: str = "nothing"  # or "bundled", or a folder: a drafter of this shape to go on from
    # What the target writes for it
    responses: int  # at most this many
    rows: int  # of them at once
    response: int  # length of the longest
    response_min: int = 0  # of the shortest, every batch of rows has one; 0: as long as 'response'
    prompt_min: int = 64  # every batch of rows has one prompt length
    prompt_max: int = 256
    from_start: float = 0.3  # share of the prompts that begin where their document does
    sampled_share: float = 0.1  # share of the responses that are sampled, the others are greedy
    temperature: float = 0.8  # of the sampled ones
    repeat_run: int = 16  # a response is in a loop after so many repeated 8-grams in a row
    repeat_grace: int = 32  # and counts so many tokens further
    # Memory for the target's streams of the responses, so that a step needs no pass of the target;
    # responses beyond it are passed through it in each step.
    stream_gigabytes: float = 0.0
    # Training
    steps: int  # at most
    batch: int  # sequences a step
    anchors: int  # blocks a sequence and step
    seed: int = 0
    warmup: int = 50
    cooldown: float = 0.6  # last share of the steps, over which rates fall linearly to zero
    matrix_rate: float = 0.02  # Muon
    codebook_rate: float = 0.003  # AdamW from here on
    vector_rate: float = 0.01  # norms, convolutions
    weight_decay: float = 0.01  # matrices
    decay: float = 4.0  # slot k's weight is exp(-(k - 1) / decay)
    dpace: float = 0.0  # 0: these weights; above: D-PACE weights with this smoothing instead
    soft_targets: float = 0.0  # share of the target's own distribution in the backbone's labels
    selector_weight: float = 1.0
    inject: bool = False  # a label that is no candidate takes the last candidate's place
    save_every: int = 1000
    # Time, in seconds, of the whole run with its evaluation; 0: as long as it takes
    seconds: float = 0.0
    regenerate_share: float = 0.25  # most of it for the responses
    evaluate_prompts: int = 64  # of each held-out class
    evaluate_tokens: int = 128  # response of each
    compile: bool = False  # torch.compile on CUDA

    def drafter_config(self, target: BeamConfig) -> DFlash2Config:
        """The drafter's configuration for this target.

        Raises:
            TrainingError: a field is wrong, the drafter is too large to train, or the target has
                none of a tapped layer.
        """
        values = {name: getattr(target, name) for name in _OF_THE_TARGET} | dict(self.drafter)
        try:
            config = DFlash2Config(**values)
            config.check_target(target)
        except ConfigError as error:
            raise TrainingError(f"[drafter]: {error}") from None
        parameters = sum(tensor.size for tensor in drafter_tensors(config))
        if parameters > MOST_PARAMETERS:
            raise TrainingError(
                f"[drafter] has {parameters:,} parameters, and at most {MOST_PARAMETERS:,} can be "
                "trained here; make it smaller"
            )
        return config


def read_distil_settings(path: str | Path) -> DistilSettings:
    """Read and check a configuration; a bundled one's name will do.

    Raises:
        TrainingError: the file, a field or a value is wrong; the message names it.
    """
    data, file = read_toml(path, "drafter")
    return distil_settings_from_dict(data, str(file))


def distil_settings_from_dict(data: Mapping[str, Any], where: str) -> DistilSettings:
    """See :func:`read_distil_settings`."""
    values = dict(data)
    drafter = values.pop("drafter", None)
    if not isinstance(drafter, Mapping):
        raise TrainingError(f"{where}: the table [drafter] with the drafter's fields is missing")
    known = {f.name: f for f in fields(DFlash2Config) if f.name != "extra"}
    for name in drafter:
        if name not in known:
            raise TrainingError(f"{where} [drafter]: {name!r} is not a field of it; remove it")
    for name, f in known.items():
        if name not in drafter and name not in _OF_THE_TARGET and f.default is MISSING:
            raise TrainingError(f"{where} [drafter]: the field {name} is missing; add it")
    table = dict(drafter)
    if isinstance(table.get("target_layer_ids"), list):
        table["target_layer_ids"] = tuple(table["target_layer_ids"])
    if table.get("block_size") is None:
        raise TrainingError(f"{where} [drafter]: the field block_size is missing; add it")
    values["drafter"] = table
    settings = DistilSettings(**checked_fields(DistilSettings, values, where))
    for name in _SHARES:
        if getattr(settings, name) > 1:
            raise TrainingError(
                f"{where}: {name} is a share and must be at most 1, not {getattr(settings, name)}"
            )
    if settings.prompt_min > settings.prompt_max:
        raise TrainingError(
            f"{where}: prompt_min ({settings.prompt_min}) exceeds prompt_max "
            f"({settings.prompt_max}); lower it"
        )
    if settings.response_min > settings.response:
        raise TrainingError(
            f"{where}: response_min ({settings.response_min}) exceeds response "
            f"({settings.response}); lower it"
        )
    if settings.decay == 0 or settings.temperature == 0:
        raise TrainingError(f"{where}: decay and temperature must be above 0")
    if settings.stream_gigabytes and settings.soft_targets:
        raise TrainingError(
            f"{where}: soft_targets need the target's pass in each step, which stream_gigabytes "
            "spares; set one of them to 0"
        )
    block, shortest = table["block_size"], settings.response_min or settings.response
    if isinstance(block, int) and shortest < block:
        raise TrainingError(
            f"{where}: responses of {shortest} tokens hold no block of {block}; raise "
            f"{'response_min' if settings.response_min else 'response'}"
        )
    return settings
