"""Distillation of a DFlash2 drafter: ``workbench train drafter --config F [--resume]``.

The target continues prefixes of training documents (``regenerate.py``). Each step takes some of
these sequences, runs the frozen target over them for the streams the drafter reads, draws anchors
afresh, and trains the drafter's blocks at these anchors: same mask, positions and window as when it
serves. Float32 weights, bfloat16 arithmetic on CUDA.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.errors import ConfigError, TrainingError, WorkbenchError
from workbench.files import write_whole
from workbench.kernels import registry
from workbench.kernels.requirements import Where
from workbench.model.beam import Beam
from workbench.model.checkpoint import load
from workbench.model.config import read_config_json
from workbench.spec.drafter_checkpoint import load_drafter, save_drafter
from workbench.training.anchors import draw_anchors
from workbench.training.curve import RECORD_FILE
from workbench.training.distil_settings import DistilSettings, read_distil_settings
from workbench.training.drafter_card import CARD_FILE, write_card
from workbench.training.drafter_evaluate import evaluate_drafter, headline, target_pass
from workbench.training.drafter_loss import Losses, LossTerms, sequence_losses
from workbench.training.drafter_start import drafter_optimizers, start
from workbench.training.interrupt import Interrupts
from workbench.training.optimizer import rate_factor, set_rates
from workbench.training.pretrain import Progress, check_folders, hardware
from workbench.training.regenerate import PromptSource, Responses
from workbench.training.responses import (
    RESPONSES_FILE,
    read_responses,
    save_responses,
    write_responses,
)
from workbench.training.state import (
    StateError,
    load_state,
    remove_states,
    save_state,
)
from workbench.training.streams import check_room
from workbench.training.texts import Texts, read_corpus

EVALUATION_SHARE = 0.1  # of a time limit, kept for the evaluation
REPLAN_EVERY = 20  # steps between two looks at the clock, under a time limit

_SAME_RUN = (
    "seed", "target", "start_from", "batch", "anchors", "responses", "rows", "response",
    "response_min", "prompt_min", "prompt_max", "from_start", "sampled_share", "temperature",
)  # fmt: skip


def train(
    settings: DistilSettings, *, resume: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Regenerate, train, save and evaluate; returns the record that is written as well.

    Interrupting (Ctrl-C) saves the state after the running step and re-raises; ``resume=True`` then
    goes on to exactly the weights an uninterrupted run would have had, where no time limit is set
    (with one, the speed of the machine decides how many steps there are). The drafter as of the
    last saved state lies in ``output`` all the while.

    Raises:
        TrainingError: folders, corpus or saved state cannot be used, the loss is no number, or the
            state or the checkpoint cannot be written.
    """
    return _Run(settings, resume, progress).go()


def run(
    config: str | Path, resume: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """What the command line calls: read the configuration, train, report the contract's keys.

    Keys: steps, seconds, loss (nats, of the last logged steps), acceptance_length (greedy, pooled,
    held-out code or the first class there is), checkpoint (folder), held_out (by class of text) and
    the rest of ``training.json``.
    """
    made = _Run(read_distil_settings(config), resume, progress)
    made.command = f"workbench train drafter --config {config}"
    return made.go()


class _Run:
    """One training run: what it holds from the first token to the record."""

    def __init__(self, settings: DistilSettings, resume: bool, progress: Progress | None) -> None:
        self.begun = time.perf_counter()
        self.settings, self.resume, self.progress = settings, resume, progress
        check_folders(settings.output, settings.state, resume)
        check_output(settings.output)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.target = load_target(settings.target, self.device)
        self.config = settings.drafter_config(self.target.config)
        if self.target.tokenizer is None:
            raise TrainingError(
                f"{settings.target} has no tokenizer.json, so no text can be read for it; give a "
                "target with one"
            )
        longest = settings.prompt_max + settings.response
        if longest > self.target.config.max_position_embeddings:
            raise TrainingError(
                f"prompt_max and response add up to {longest} tokens, more than the target's "
                f"context of {self.target.config.max_position_embeddings}; lower one"
            )
        if settings.stream_gigabytes:
            check_room(settings.stream_gigabytes, self.device)
        self.texts: Texts = read_corpus(settings.corpus, self.target.tokenizer)
        self.drafter = start(self.config, self.target, settings.seed)
        if settings.start_from != "nothing":
            self._start_from(settings.start_from)
        self.optimizers = drafter_optimizers(self.drafter, settings)
        self.record: dict[str, Any] = {
            "step": 0, "planned": settings.steps, "seconds": 0.0, "losses": [], "partial": [0.0] * 4
        }  # fmt: skip
        self.command = ""
        self.spent = 0.0  # seconds of the runs before this one
        self.updating = False

    def _start_from(self, name: str) -> None:
        """Take over the weights of a drafter of the same shape."""
        known = load_drafter(self.target, None if name == "bundled" else name)
        if known.config != self.config:
            raise TrainingError(
                f"the drafter in {name} (start_from) has another shape than [drafter] asks for; "
                "copy its fields, or start from nothing"
            )
        self.drafter.load_state_dict(known.state_dict())

    def elapsed(self) -> float:
        """Seconds of this run, those before it was interrupted included."""
        return self.spent + time.perf_counter() - self.begun

    def go(self) -> dict[str, Any]:
        settings, record = self.settings, self.record
        if self.resume:
            record.update(load_state(settings.state, self.drafter, self.optimizers))
            self._check_same_run()
            self.spent = record["seconds"]
        record["run"] = self._identity()
        self.kept = record["step"]
        try:
            with Interrupts() as interrupts:
                self.responses = self._responses(interrupts.check)
                self._steps(interrupts.check)
                if record["step"] > self.kept:
                    with suppress(StateError):  # writing the drafter is the only hope left then
                        self._keep()
                interrupts.check()
        except KeyboardInterrupt:
            if not self.updating and record["step"] > self.kept:
                self._keep()
            raise
        try:
            result = self._finish()
        except (OSError, WorkbenchError) as error:
            raise TrainingError(
                f"the drafter could not be written to {settings.output} and evaluated ({error}); "
                "correct that and go on with --resume"
            ) from error
        (settings.state / RESPONSES_FILE).unlink(missing_ok=True)
        remove_states(settings.state)
        return result

    # -- responses ------------------------------------------------------------------------------

    def _responses(self, check: Callable[[], None]) -> list[Responses]:
        file = self.settings.state / RESPONSES_FILE
        if self.resume and file.is_file():
            return read_responses(file)
        settings, began = self.settings, time.perf_counter()
        limit = settings.seconds * settings.regenerate_share
        eos = self.target.tokenizer.eos_id  # type: ignore[union-attr]
        source = PromptSource(self.texts.stream, eos, settings.seed)
        found: list[Responses] = []
        rows, room = 0, settings.stream_gigabytes * 1e9
        while rows < settings.responses:
            spent = time.perf_counter() - began
            # No further batch of rows that would end behind the limit.
            if limit and found and spent * (len(found) + 1) / len(found) > limit:
                break
            count = min(settings.rows, settings.responses - rows)
            batch = write_responses(
                self.target, source, len(found), count, settings, check,
                self.config if room else None, room,
            )  # fmt: skip
            room -= 0 if batch.streams is None else batch.streams.nbytes
            found.append(batch)
            rows += count
        found = [r for r in found if len(r.valid)]
        if not found:
            raise TrainingError(
                "no response of the target was long enough to train on; raise 'responses' or give "
                "another corpus"
            )
        self.record["regenerated"] = {
            "responses": sum(len(r.valid) for r in found),
            "written": rows,
            "tokens": sum(r.counted for r in found),
            "seconds": round(time.perf_counter() - began, 1),
            "with_streams": sum(len(r.valid) for r in found if r.streams is not None),
        }
        save_responses(found, file)
        return found

    def _batch(self, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Sequences of one step: tokens ``[S, T]``, valid ``[S]``, places ``[S, n]``, and streams.

        The streams ``[S, T, taps * H]`` are None where they were not kept; where they were, the
        sequences begin with the first token that has one.
        """
        settings = self.settings
        rng = np.random.default_rng((settings.seed, step))
        sizes = np.array([len(r.valid) for r in self.responses], dtype=np.float64)
        chosen = self.responses[int(rng.choice(len(sizes), p=sizes / sizes.sum()))]
        length = chosen.tokens.shape[1]
        # Of short responses more rows, so that a step always has about as many blocks.
        anchors = min(settings.anchors, length - chosen.prompt - 1)
        count = settings.batch * settings.anchors // anchors
        rows = torch.from_numpy(rng.integers(0, len(chosen.valid), size=count))
        generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
        valid = chosen.valid[rows]
        # With streams and without, the same blocks are trained on.
        places = draw_anchors(valid, chosen.prompt, anchors, length, generator)
        begin = chosen.begin
        places = torch.where(places >= 0, places - begin, places)
        tokens, valid, places, rows = (
            x.to(self.device, non_blocking=True)
            for x in (chosen.tokens[rows, begin:], valid - begin, places, rows)
        )
        return tokens, valid, places, None if chosen.streams is None else chosen.streams[rows]

    # -- steps ----------------------------------------------------------------------------------

    def _steps(self, check: Callable[[], None]) -> None:
        settings, record = self.settings, self.record
        totals = torch.tensor(record["partial"], device=self.device)
        loss_of = self._loss_function()
        pace = max(1, settings.steps // 200)  # about 200 points on the loss curve
        clock = first = time.perf_counter()
        first_step = record["step"]
        while record["step"] < record["planned"]:
            check()
            step = record["step"]
            plan = dataclasses.replace(settings, steps=record["planned"])
            set_rates(self.optimizers, rate_factor(step, plan))
            losses = loss_of(*self._batch(step))
            losses.total.backward()
            self.updating = True
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            parts = (losses.total.detach(), losses.backbone, losses.selector, losses.recall)
            totals += torch.stack([p.float() for p in parts])
            record["step"] = step = step + 1
            record["since"] = record.get("since", 0) + 1
            self.updating = False
            if settings.seconds:
                self._replan(first, step - first_step)
            if step % pace == 0 or step == record["planned"]:
                means = (totals / record["since"]).tolist()
                check_loss(means[0], step)
                record["losses"].append([step, *(round(x, 4) for x in means)])
                tokens = record["since"] * settings.batch * settings.anchors
                record["since"] = 0
                totals.zero_()
                if self.progress is not None:
                    speed = tokens / (time.perf_counter() - clock)
                    self.progress(step, record["planned"], means[0], speed)
                clock = time.perf_counter()
            record["partial"] = totals
            if step % settings.save_every == 0 and step < record["planned"]:
                self._keep()

    def _replan(self, first: float, done: int) -> None:
        """Under a time limit: as many steps as it leaves, fixed once the rates fall."""
        settings, record = self.settings, self.record
        step, planned = record["step"], record["planned"]
        left = settings.seconds * (1 - EVALUATION_SHARE) - self.elapsed()
        if left <= 0:
            record["planned"] = step
            return
        if step >= planned * (1 - settings.cooldown) and step > REPLAN_EVERY:
            return
        if step % REPLAN_EVERY and done not in (2, 5, 10):
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        a_step = (time.perf_counter() - first) / done
        record["planned"] = min(settings.steps, step + max(1, int(left / a_step)))

    def _loss_function(self) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Losses]:
        settings = self.settings
        terms = LossTerms(
            decay=settings.decay,
            dpace=settings.dpace,
            soft_targets=settings.soft_targets,
            selector_weight=settings.selector_weight,
            inject=settings.inject,
        )
        drafter, cuda = self.drafter, self.device.type == "cuda"

        def of_blocks(
            streams: Tensor, final: Tensor, tokens: Tensor, valid: Tensor, places: Tensor
        ) -> Losses:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=cuda):
                return sequence_losses(drafter, streams, final, tokens, valid, places, terms)

        inner = torch.compile(of_blocks, dynamic=True) if cuda and settings.compile else of_blocks

        def loss_of(
            tokens: Tensor, valid: Tensor, places: Tensor, streams: Tensor | None
        ) -> Losses:
            if streams is None:
                streams, final = target_pass(self.target, tokens, drafter.taps)
            else:
                streams, final = streams.flatten(0, 1), streams.new_empty(0)
            losses: Losses = inner(streams, final, tokens, valid, places)
            return losses

        return loss_of

    # -- keeping, and the end -------------------------------------------------------------------

    def _keep(self) -> None:
        record, settings = self.record, self.settings
        record["seconds"] = self.elapsed()
        partial = record["partial"]
        record["partial"] = partial.tolist() if isinstance(partial, Tensor) else partial
        if not all(bool(p.isfinite().all()) for p in self.drafter.parameters()):
            raise diverged("a weight is NaN or infinite", record["step"])
        save_state(settings.state, record["step"], self.drafter, self.optimizers, record)
        save_drafter(self.drafter, settings.output)
        self.kept = record["step"]
        record["partial"] = partial

    def _identity(self) -> dict[str, Any]:
        names = {name: getattr(self.settings, name) for name in _SAME_RUN}
        same: dict[str, Any] = json.loads(json.dumps(names | {"drafter": self.config.to_dict()}))
        return same

    def _check_same_run(self) -> None:
        then = self.record.get("run", {})
        for name, now in self._identity().items():
            if then.get(name) != now:
                change = f"is {now!r} here and was {then.get(name)!r} there"
                raise TrainingError(
                    f"the state in {self.settings.state} is of another run: {name} "
                    f"{'differs' if name == 'drafter' else change}; restore it, or name another "
                    "folder as 'state'"
                )

    def _finish(self) -> dict[str, Any]:
        settings, record = self.settings, self.record
        trained = self.elapsed()
        for name in (RECORD_FILE, CARD_FILE):  # of what is replaced now
            (settings.output / name).unlink(missing_ok=True)
        save_drafter(self.drafter, settings.output)
        # What is reported is measured on the file that was written, bfloat16 rounding included.
        target = load_target(settings.target, self.device, torch.float32)
        shipped = load_drafter(target, settings.output)
        held_out = evaluate_drafter(
            shipped,
            self.texts.held_out,
            prompts=settings.evaluate_prompts,
            prompt=min(settings.prompt_max, max(settings.prompt_min, 128)),
            response=settings.evaluate_tokens,
        )
        losses = record["losses"]
        result = {
            "steps": record["step"],
            "seconds": round(self.elapsed(), 1),
            "loss": losses[-1][1] if losses else None,
            "acceptance_length": headline(held_out),
            "checkpoint": str(settings.output),
            "held_out": held_out,
            "blocks": record["step"] * settings.batch * settings.anchors,
            "regenerated": record.get("regenerated"),
            "training_seconds": round(trained, 1),
            "hardware": hardware(self.device),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "date": time.strftime("%Y-%m-%d"),
            "settings": {
                f.name: getattr(settings, f.name)
                for f in dataclasses.fields(settings)
                if f.name not in ("drafter", "output", "state", "corpus")
            },
            "command": self.command,
            "drafter": self.config.to_dict(),
            "losses": losses,
        }
        write_whole(settings.output / RECORD_FILE, (json.dumps(result) + "\n").encode())
        write_card(settings.output)
        return result


# -- parts ----------------------------------------------------------------------------------------


def check_output(output: Path) -> None:
    """Refuse a folder with a model that is no drafter, such as the target's own.

    Raises:
        TrainingError: it has a ``config.json`` without ``dflash_config``.
    """
    file = output / "config.json"
    if not file.exists():
        return
    with suppress(ConfigError):
        if "dflash_config" in read_config_json(file):
            return
    raise TrainingError(
        f"output names {output}, whose config.json is none of a drafter and would be overwritten; "
        "name another folder"
    )


def load_target(name: str, device: torch.device, dtype: torch.dtype | None = None) -> Beam:
    """The frozen target: float32 on a CPU, bfloat16 with dense experts on CUDA."""
    target = load(name, device=device, dtype=dtype)
    if device.type == "cuda":
        # The dense form of the experts needs no host round trip.
        where = Where.of(device, target.dtype, target.shapes)
        target.pinned = registry.resolve(target.kinds, where, registry.rules(expert_mlp="dense"))
    return target


def check_loss(loss: float, step: int) -> None:
    """Raise TrainingError if a loss is no number."""
    if not np.isfinite(loss):
        raise diverged(f"the loss is {loss}", step)


def diverged(what: str, step: int) -> TrainingError:
    """What a run that has diverged ends with."""
    return TrainingError(
        f"{what} at step {step}: the run has diverged; lower its rates (matrix_rate first) or "
        "raise warmup, and start again or go on from the last saved state with --resume"
    )
