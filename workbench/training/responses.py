"""The responses a drafter is trained on: written batch by batch, kept beside a run's state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from workbench.errors import TrainingError
from workbench.model.beam import Beam
from workbench.model.drafter_config import DFlash2Config
from workbench.training.distil_settings import DistilSettings
from workbench.training.regenerate import PromptSource, Responses, continue_rows, valid_lengths
from workbench.training.state import StateError
from workbench.training.streams import StreamStore

RESPONSES_FILE = "responses.safetensors"
LEAST_RESPONSE = 16  # response tokens a row must have left after its cut
ALIGNED = 16  # prompt lengths are multiples: attention kernels want aligned rows of their mask


def write_responses(
    target: Beam,
    source: PromptSource,
    round_: int,
    rows: int,
    settings: DistilSettings,
    check: Callable[[], None] | None = None,
    drafter: DFlash2Config | None = None,
    room: float = 0.0,
) -> Responses:
    """One batch of rows that the target continues, on the CPU, rows with too little left out.

    What ``drafter`` will read of the target is kept with them, on the target's device, where it
    takes at most ``room`` bytes.
    """
    rng = np.random.default_rng((settings.seed, round_, 1))
    prompt = _one_length(rng, settings.prompt_min, settings.prompt_max)
    # Short responses too: a drafter is at its worst just behind text that the target has not
    # written, and a long response holds little of that.
    shortest = settings.response_min or settings.response
    response = _one_length(rng, shortest, settings.response)
    prompts = source.draw(round_, rows, prompt, settings.from_start).to(target.device)
    temperature = torch.zeros(rows, device=target.device)
    temperature[: round(rows * settings.sampled_share)] = settings.temperature
    generator = torch.Generator(device=target.device).manual_seed(int(rng.integers(2**62)))
    keep = None
    if drafter is not None:
        # No block behind the prompt sees further back than its window.
        first = max(0, prompt - drafter.sliding_window)
        keep = StreamStore(target, drafter.target_layer_ids, first)
        keep = keep if keep.bytes(rows, prompt + response) <= room else None
    tokens = continue_rows(
        target,
        prompts,
        response,
        temperature=temperature,
        generator=generator,
        each_step=check,
        keep=keep,
    )
    valid = valid_lengths(
        tokens,
        prompt,
        target.config.eos_token_id,
        run=settings.repeat_run,
        grace=settings.repeat_grace,
    )
    whole = Responses(
        tokens=tokens.cpu(),
        prompt=prompt,
        valid=valid.cpu(),
        streams=None if keep is None else keep.kept,
    )
    if target.device.type == "cuda":
        torch.cuda.empty_cache()  # the next batch's cache has another length
    return whole.kept(min(LEAST_RESPONSE, response))


def _one_length(rng: np.random.Generator, shortest: int, longest: int) -> int:
    """A batch's length, drawn evenly over the ratio of the longest to the shortest."""
    if shortest == longest:
        return longest
    length = int(np.exp(rng.uniform(np.log(shortest), np.log(longest))))
    return max(shortest, length // ALIGNED * ALIGNED)


def save_responses(responses: list[Responses], file: Path) -> None:
    """Keep what the target wrote, so that a resumed run trains on the same; no streams.

    Raises:
        StateError: it cannot be written.
    """
    tensors = {}
    for i, r in enumerate(responses):
        tensors[f"{i}.tokens"] = r.tokens.to(torch.int32)
        tensors[f"{i}.valid"] = r.valid
        tensors[f"{i}.prompt"] = torch.tensor(r.prompt)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        save_file(tensors, part)
        part.replace(file)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StateError(
            f"the target's responses could not be written to {file.parent} ({reason}); make room "
            "and start again"
        ) from error


def read_responses(file: Path) -> list[Responses]:
    """Back from :func:`save_responses`.

    Raises:
        TrainingError: the file is damaged.
    """
    try:
        tensors = load_file(file)
        count = len(tensors) // 3
        return [
            Responses(
                tokens=tensors[f"{i}.tokens"].long(),
                prompt=int(tensors[f"{i}.prompt"]),
                valid=tensors[f"{i}.valid"],
            )
            for i in range(count)
        ]
    except (OSError, SafetensorError, KeyError) as error:
        raise TrainingError(
            f"the target's responses in {file} cannot be read ({error}); delete "
            f"{file.parent} to start anew"
        ) from error
