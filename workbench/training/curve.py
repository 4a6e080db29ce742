"""The loss curve of a training run as an SVG file, drawn from its ``training.json``.

``python -m workbench.training.curve FOLDER`` draws it again. Plain text, so that training needs no
plotting library; colours and greys that can be read on a white and on a dark page.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.errors import TrainingError, WorkbenchError
from workbench.files import write_whole

RECORD_FILE, CURVE_FILE = "training.json", "loss_curve.svg"

_WIDTH, _HEIGHT = 720, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 52, 48
_LINE, _INK = "#0072B2", "#7a7a7a"  # both at least 3 : 1 on white and on #111
_TICKS = (0.1, 0.2, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)  # of the logarithmic loss axis


def loss_curve(record: Mapping[str, Any]) -> str:
    """SVG of loss (nats a token, logarithmic) over training tokens, from a training record.

    Raises:
        TrainingError: the record has fewer than two points or lacks a field.
    """
    try:
        points = [(int(step), float(loss)) for step, loss in record["losses"]]
        per_step = record["settings"]["batch"] * record["settings"]["length"]
        cooldown = (1 - record["settings"]["cooldown"]) * record["settings"]["steps"]
        where = f"{record['hardware']}, {record['date']}"
    except (KeyError, TypeError, ValueError) as error:
        raise TrainingError(f"the training record lacks what a curve needs ({error!r})") from error
    if len(points) < 2:
        raise TrainingError("a loss curve needs two logged steps or more; train for longer")
    unit, factor = _unit(points[-1][0] * per_step)
    x_end = points[-1][0] * per_step / factor
    least = max(min(loss for _, loss in points), _TICKS[0])
    low = max(tick for tick in _TICKS if tick <= least)
    high = max(loss for _, loss in points) * 1.05

    def x(tokens: float) -> float:
        return _LEFT + tokens / x_end * (_WIDTH - _LEFT - _RIGHT)

    def y(loss: float) -> float:
        share = math.log(loss / low) / math.log(high / low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    path = " ".join(
        f"{'ML'[i > 0]}{x(step * per_step / factor):.1f} {y(max(loss, low)):.1f}"
        for i, (step, loss) in enumerate(points)
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" role="img" font-family="system-ui, sans-serif" '
        f'font-size="12" fill="{_INK}">',
        f"<title>Training loss over {x_end:.4g} {unit}: from {points[0][1]:.2f} "
        f"to {points[-1][1]:.2f} nats a token</title>",
        _text(
            _LEFT, 20, "Training loss", anchor="start", extra=' font-size="15" font-weight="600"'
        ),
        _text(
            _LEFT,
            38,
            f"recorded on {where}; each point is the mean since the one before",
            anchor="start",
        ),
    ]
    for tick in _TICKS:
        if low <= tick <= high:
            lines.append(_rule(_LEFT, y(tick), _WIDTH - _RIGHT, y(tick)))
            lines.append(_text(_LEFT - 8, y(tick) + 4, f"{tick:g}", anchor="end"))
    for value in _round_ticks(x_end):
        lines.append(_rule(x(value), _HEIGHT - _BOTTOM, x(value), _HEIGHT - _BOTTOM + 5))
        lines.append(_text(x(value), _HEIGHT - _BOTTOM + 19, f"{value:g}"))
    begins = cooldown * per_step / factor
    if 0 < begins < x_end:
        lines.append(
            _rule(x(begins), _TOP, x(begins), _HEIGHT - _BOTTOM, extra=' stroke-dasharray="4 4"')
        )
        lines.append(_text(x(begins) + 6, _TOP + 12, "rates begin to fall", anchor="start"))
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    lines += [
        _text(_LEFT + (_WIDTH - _LEFT - _RIGHT) / 2, _HEIGHT - 8, unit),
        _text(
            16, middle, "loss, nats a token (log)", extra=f' transform="rotate(-90 16 {middle})"'
        ),
        f'<path d="{path}" fill="none" stroke="{_LINE}" stroke-width="2" stroke-linejoin="round"/>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def draw(folder: str | Path) -> Path:
    """Write ``loss_curve.svg`` beside the ``training.json`` of a checkpoint folder.

    Raises:
        TrainingError: there is no such record, or nothing to draw in it.
        FileError: the curve cannot be written.
    """
    file = Path(folder) / RECORD_FILE
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"{file} cannot be read ({error}); give the folder of a trained checkpoint"
        ) from error
    target = file.with_name(CURVE_FILE)
    write_whole(target, loss_curve(record).encode())
    return target


def _unit(tokens: float) -> tuple[str, float]:
    for word, factor in (("million tokens", 1e6), ("thousand tokens", 1e3)):
        if tokens >= factor:
            return word, factor
    return "tokens", 1.0


def _round_ticks(end: float) -> list[float]:
    """Four to ten multiples of 1, 2 or 5 times a power of ten, from zero to ``end``."""
    step = 10.0 ** math.floor(math.log10(end))
    step = next(s for s in (step, step / 2, step / 5, step / 10) if end / s >= 4)
    return [round(i * step, 10) for i in range(int(end / step) + 1)]


def _text(x: float, y: float, text: str, *, anchor: str = "middle", extra: str = "") -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{text}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float, *, extra: str = "") -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" '
        f'stroke="{_INK}" stroke-opacity="0.3"{extra}/>'
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: draws the loss curve of a checkpoint folder again."""
    parser = argparse.ArgumentParser(
        prog="python -m workbench.training.curve", description=main.__doc__
    )
    parser.add_argument("folder", type=Path, help="folder with training.json")
    try:
        print(draw(parser.parse_args(arguments).folder))
    except WorkbenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
