"""The model card of a trained drafter, from its ``training.json``: what was recorded, in words."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.errors import TrainingError, WorkbenchError
from workbench.files import write_whole
from workbench.training.curve import RECORD_FILE

CARD_FILE = "MODEL_CARD.md"
CLASSES = {
    "code": "held-out code",
    "package": "a package never seen: networkx",
    "prose": "held-out prose",
    "text": "held-out tenth of the text",
}
_CONFIG = (
    "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "sliding_window", "block_size",
)  # fmt: skip


def card(record: Mapping[str, Any]) -> str:
    """Markdown of a run's record.

    Raises:
        TrainingError: the record lacks a field.
    """
    try:
        return "\n".join([*_head(record), *_how(record), *_loss(record), *_figures(record), ""])
    except (KeyError, TypeError, IndexError) as error:
        raise TrainingError(f"the training record lacks what a card needs ({error!r})") from error


def write_card(folder: str | Path) -> Path:
    """Write ``MODEL_CARD.md`` beside the ``training.json`` of a drafter's folder.

    Raises:
        TrainingError: there is no such record, or it lacks a field.
        FileError: the card cannot be written.
    """
    file = Path(folder) / RECORD_FILE
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"{file} cannot be read ({error}); give the folder of a trained drafter"
        ) from error
    target = file.with_name(CARD_FILE)
    write_whole(target, card(record).encode())
    return target


def _head(record: Mapping[str, Any]) -> list[str]:
    drafter, settings = record["drafter"], record["settings"]
    nested = drafter["dflash_config"]
    drafts = drafter["block_size"] - 1
    lines = [
        f"# A DFlash2 drafter for {settings['target']}",
        "",
        f"It proposes {drafts} tokens at a time, which {settings['target']} then checks in one "
        "pass. What is written is the target's own text whatever the drafter proposes; a better "
        "drafter only makes it come faster. Embedding and head are the target's: the drafter "
        "cannot be used without it.",
        "",
        f"All figures on this page were **recorded** with the run that made these weights "
        f"({record['hardware']}, {record['date']}). `{RECORD_FILE}` beside this file is the "
        "record itself.",
        "",
        "| field | value |",
        "| --- | --- |",
        *(f"| `{name}` | {drafter[name]} |" for name in _CONFIG),
        *(
            f"| `{name}` | {nested[name]} |"
            for name in nested
            if name not in ("causal", "mask_token_id")
        ),
        "",
    ]
    return lines


def _how(record: Mapping[str, Any]) -> list[str]:
    s, made = record["settings"], record["regenerated"] or {}
    weights = (
        f"D-PACE, smoothing {s['dpace']:g}"
        if s["dpace"]
        else f"exp(-(k - 1) / {s['decay']:g}) for slot k"
    )
    soft = f", {s['soft_targets']:.0%} of it the target's own distribution" * bool(
        s["soft_targets"]
    )
    command = record.get("command") or "workbench train drafter --config FILE"
    rows = {
        "command": f"`{command}`",
        "hardware": record["hardware"],
        "date": record["date"],
        "versions": f"Python {record['versions']['python']}, torch {record['versions']['torch']}",
        "time": f"{record['seconds']:g} s in all, {record['training_seconds']:g} s of it up to the "
        "end of training",
        "seed": s["seed"],
        "responses": f"{made.get('responses', 0):,} of the target's own, "
        f"{made.get('tokens', 0):,} tokens, written in {made.get('seconds', 0):g} s; "
        f"{s['sampled_share']:.0%} sampled at temperature {s['temperature']:g}, the others greedy; "
        f"prompts of {s['prompt_min']} to {s['prompt_max']} tokens of the training text, responses "
        f"of {_lengths(s)}, cut {s['repeat_grace']} tokens after they fall into repetition"
        + f"; the target's streams of {made.get('with_streams', 0):,} kept for the steps"
        * bool(made.get("with_streams")),
        "from": "nothing" if s["start_from"] == "nothing" else f"the drafter {s['start_from']}",
        "steps": f"{record['steps']:,} of {s['batch']} sequences with {s['anchors']} blocks each: "
        f"{record['blocks']:,} blocks",
        "loss": f"cross-entropy with the target's tokens{soft}, weights {weights}; plus "
        f"{s['selector_weight']:g} times the selector's over its candidates",
        "optimizers": f"Muon for matrices (rate {s['matrix_rate']:g}); AdamW for the selector "
        f"({s['codebook_rate']:g}), norms and convolutions ({s['vector_rate']:g})",
        "schedule": f"{s['warmup']} steps up, flat, linearly to zero over the last "
        f"{s['cooldown']:.0%}",
        "arithmetic": "float32 weights and optimizer; bfloat16 products on CUDA",
    }
    return [
        "## How it was trained",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {k} | {v} |" for k, v in rows.items()),
        "",
    ]


def _loss(record: Mapping[str, Any]) -> list[str]:
    losses = record["losses"]
    if not losses:
        return []
    wanted = sorted({round(i * (len(losses) - 1) / 11) for i in range(12)})
    return [
        "Means since the logged step before; nats a slot, and the share of labels among the "
        "selector's candidates:",
        "",
        "| step | backbone | selector | among the candidates |",
        "| ---: | ---: | ---: | ---: |",
        *(
            f"| {step:,} | {backbone:.3f} | {selector:.3f} | {recall:.1%} |"
            for step, _, backbone, selector, recall in (losses[i] for i in wanted)
        ),
        "",
    ]


def _figures(record: Mapping[str, Any]) -> list[str]:
    held_out = record["held_out"]
    if not held_out:
        return ["There was no held-out text to evaluate on.", ""]
    drafts = record["drafter"]["block_size"] - 1
    lines = [
        "## How good it is",
        "",
        f"Greedy decoding of held-out prompts with {drafts} drafts a step, measured on the stored "
        "weights in float32. Acceptance length: tokens a step gives on average, pooled over all "
        "steps, the target's own token included. *Unary* drafts each slot's best token without the "
        "selector, *oracle* is the best that any choice among the candidates could give. *Before "
        "repetition* leaves out what follows once a response repeats itself; *behind real text* is "
        "the first step of each response, whose context nobody but the authors has written. "
        "*Repeated*: share of the tokens that begin an 8-gram which was there before.",
        "",
        "| held-out set | prompts | tokens | **acceptance length** | unary | oracle | "
        "before repetition | behind real text | repeated |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *(
            f"| {CLASSES.get(name, name)} | {h['prompts']} | {h['tokens']:,} | "
            f"**{_number(h['acceptance_length'])}** | {_number(h['acceptance_length_unary'])} | "
            f"{_number(h['acceptance_length_oracle'])} | {_number(h['without_loops'])} | "
            f"{_number(h['from_real_text'])} | {h['repeated_share']:.0%} |"
            for name, h in held_out.items()
        ),
        "",
        "By slot, over every position of the responses: the share of labels among the candidates "
        "(recall), and the share of right choices behind a right predecessor (accuracy).",
        "",
        "| held-out set | | " + " | ".join(f"slot {k}" for k in range(1, drafts + 1)) + " |",
        "| --- | --- |" + " ---: |" * drafts,
    ]
    for name, h in held_out.items():
        for kind in ("recall", "accuracy"):
            values = " | ".join(f"{x:.1%}" for x in h[kind])
            lines.append(f"| {CLASSES.get(name, name)} | {kind} | {values} |")
    return [
        *lines,
        "",
        "Read these with care: held-out code comes from packages whose other files the target was "
        "trained on, so networkx, which it never saw, is the honest figure for new code. Text that "
        "is sampled at a temperature is accepted less than greedy text.",
        "",
    ]


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"


def _lengths(settings: dict[str, Any]) -> str:
    """How long the responses are that were asked for."""
    least = settings.get("response_min")
    return f"{least} to {settings['response']}" if least else f"up to {settings['response']}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: writes the card of a drafter's folder again."""
    parser = argparse.ArgumentParser(
        prog="python -m workbench.training.drafter_card", description=main.__doc__
    )
    parser.add_argument("folder", type=Path, help=f"folder with {RECORD_FILE}")
    try:
        print(write_card(parser.parse_args(arguments).folder))
    except WorkbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
