"""Our ``BeamConfig`` in the form that vLLM hands about: a configuration of ``transformers``."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from workbench.model.config import BeamConfig


class BeamEngineConfig(PretrainedConfig):
    """A Beam ``config.json``, checked by :class:`BeamConfig`; fields have the file's names.

    Raises:
        ConfigError: as of ``BeamConfig.from_dict``.
    """

    model_type = "beam"
    has_no_defaults_at_init = True  # transformers would otherwise make one without arguments

    def __init__(self, **values: Any) -> None:
        checked = BeamConfig.from_dict(values).to_dict()
        del checked["model_type"]
        super().__init__(**checked)

    def beam(self) -> BeamConfig:
        """The configuration as it is now: the engine's ``--hf-overrides`` change fields."""
        return BeamConfig.from_dict(self.to_dict())
