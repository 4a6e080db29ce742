"""Whether this vLLM is the one the probe knows: its version, and the internals it looks at.

Looked at, not tried: signatures, the fields of two tuples, and which attributes the code of a
function names. What is missing here would be an error in the middle of a pass.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import Any

SERIES = "0.33."
_GPU = "vllm.v1.worker.gpu"
RUNNER = f"{_GPU}.model_runner"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A function of the engine.

    Attributes:
        of: its module and class.
        name: its own name.
        parameters: the first ones, in order; more may follow.
        names: attributes that its code reads or sets.
    """

    of: tuple[str, str]
    name: str
    parameters: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


MANAGER = (f"{_GPU}.spec_decode.adaptive_verification", "AdaptiveVerificationManager")
ESTIMATOR = (f"{_GPU}.spec_decode.acceptance_estimator", "OnlineAcceptanceEstimator")
GPU_RUNNER = (RUNNER, "GPUModelRunner")
EXPECTED = (
    Expected(
        of=MANAGER, name="__init__",
        names=("req_states", "num_bonus_tokens", "_max_total_logits", "_confidence_probs",
               "_batch_draft_capacity", "_stale_confidences", "_stale_idx"),
    ),
    Expected(
        of=MANAGER, name="get_num_tokens",
        parameters=("self", "num_tokens_per_req", "draft_tokens"),
        names=("_batch_budget", "_stale_confidences", "_stale_idx", "cost_tables",
               "_max_total_logits", "num_bonus_tokens"),
    ),
    Expected(
        of=MANAGER, name="reallocate_drafts", parameters=("self", "req_ids", "idx_mapping"),
        names=("_batch_draft_capacity", "_confidence_probs"),
    ),
    Expected(
        of=MANAGER, name="set_cost_curves",
        parameters=("self", "draft_curve", "verify_curve"),
        names=("cost_tables", "_cudagraph_limit"),
    ),
    Expected(
        of=ESTIMATOR, name="__init__",
        names=("slope", "intercepts", "_steps_since_refit"),
    ),
    Expected(
        of=ESTIMATOR, name="step",
        parameters=("self", "idx_mapping", "num_sampled", "num_rejected"),
        names=("_steps_since_refit",),
    ),
    Expected(
        of=GPU_RUNNER, name="__init__",
        names=("vllm_config", "req_states", "adaptive_verification"),
    ),
    Expected(
        of=GPU_RUNNER, name="execute_model",
        parameters=("self", "scheduler_output", "intermediate_tensors", "dummy_run"),
        names=("execute_model_state", "total_num_scheduled_tokens"),
    ),
    Expected(
        of=GPU_RUNNER, name="sample_tokens", parameters=("self", "grammar_output"),
        names=("execute_model_state", "input_batch"),
    ),
    Expected(
        of=(f"{_GPU}.async_utils", "AsyncOutput"), name="__init__",
        names=("sampled_token_ids", "num_sampled_tokens_np", "copy_event"),
    ),
    Expected(
        of=(f"{_GPU}.states", "RequestState"), name="__init__",
        names=("max_num_reqs", "num_speculative_steps", "draft_tokens", "total_len"),
    ),
)  # fmt: skip
# A dataclass and a named tuple: their fields.
FIELDS = {
    (f"{_GPU}.input_batch", "InputBatch"): (
        "req_ids", "num_reqs", "idx_mapping_np", "num_tokens", "num_draft_tokens_per_req",
        "num_scheduled_tokens", "num_computed_tokens_np", "prefill_len_np", "is_prefilling_np",
    ),
    (RUNNER, "ExecuteModelState"): ("input_batch",),
}  # fmt: skip


def differences(version: str | None) -> list[str]:
    """What differs from the engine that the probe was written for, a few words each.

    Its modules are imported, which costs nothing behind that of the model runner: it imports them.
    """
    if version is None or not version.startswith(SERIES):
        return [f"it is vLLM {version or 'of an unknown version'}, not {SERIES}*"]
    found = [word for each in EXPECTED if (word := _differs(each))]
    for of, fields in FIELDS.items():
        try:
            held = _held(class_of(of))
        except (ImportError, AttributeError) as error:
            found.append(f"there is no {of[1]} ({error})")
            continue
        if missing := [name for name in fields if name not in held]:
            found.append(f"{of[1]} has no {', '.join(missing)}")
    return found


def class_of(of: tuple[str, str]) -> Any:
    """The class of a module and a name.

    Raises:
        ImportError, AttributeError: it is not there.
    """
    return getattr(import_module(of[0]), of[1])


def _differs(e: Expected) -> str:
    try:
        function = inspect.unwrap(getattr(class_of(e.of), e.name))
        parameters = tuple(inspect.signature(function).parameters)
        names = set(_names(function.__code__))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return f"there is no {e.of[1]}.{e.name} as known ({error})"
    if parameters[: len(e.parameters)] != e.parameters:
        return f"{e.of[1]}.{e.name} takes ({', '.join(parameters)})"
    if missing := [name for name in e.names if name not in names]:
        return f"{e.of[1]}.{e.name} knows no {', '.join(missing)}"
    return ""


def _names(code: Any) -> list[str]:
    """Names of the code and of the functions in it: comprehensions are such, before Python 3.12."""
    inner = [each for each in code.co_consts if hasattr(each, "co_names")]
    return [*code.co_names, *(name for each in inner for name in _names(each))]


def _held(owner: Any) -> tuple[str, ...]:
    if hasattr(owner, "_fields"):
        return tuple(owner._fields)
    return tuple(getattr(owner, "__dataclass_fields__", ()))
