"""Errors a user can act on: each message says what is wrong, where, and what to do."""


class WorkbenchError(ValueError):
    """Base of every error raised for a wrong value; the command line prints it as one sentence."""


class ConfigError(WorkbenchError):
    """A field of a ``config.json`` (or a preset) that Beam cannot be built from."""


class ModelNotFoundError(WorkbenchError):
    """A model name that is neither a preset, a bundled checkpoint nor a folder."""


class CheckpointError(WorkbenchError):
    """A checkpoint whose files or tensors are missing, truncated or of the wrong kind."""


class PromptError(WorkbenchError):
    """A prompt or sampling setting that cannot be decoded from."""


class TokenizerError(WorkbenchError):
    """A tokenizer file or a token id that cannot be used."""


class InspectionError(WorkbenchError):
    """A layer, expert or position that an inspection or an intervention names wrongly."""


class TrainingError(WorkbenchError):
    """A training configuration, corpus or saved state that training cannot go on with."""


class KernelError(WorkbenchError):
    """An operation, a variant of it or a selection of variants that cannot be used here."""


class DraftError(WorkbenchError):
    """A drafter, or a setting of speculative decoding, that does not go with its target."""


class TraceError(WorkbenchError):
    """A trace file that cannot be read or written."""


class ServingError(WorkbenchError):
    """A server that cannot be started, reached or understood, or a setting for one."""
