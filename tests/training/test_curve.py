"""The drawn loss curve, read back from the SVG."""

import json
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from workbench.errors import TrainingError
from workbench.training import curve

RECORD: dict[str, Any] = {
    "losses": [[10, 8.0], [20, 4.0], [30, 2.0], [40, 2.0]],
    "settings": {"batch": 4, "length": 250, "steps": 40, "cooldown": 0.25},
    "hardware": "a <fast> machine & more",
    "date": "2026-01-02",
}
NAME = "{http://www.w3.org/2000/svg}"


def parsed(record: dict[str, Any]) -> ElementTree.Element:
    return ElementTree.fromstring(curve.loss_curve(record))


def texts(svg: ElementTree.Element) -> dict[str, tuple[float, float]]:
    return {
        str(item.text): (float(item.attrib["x"]), float(item.attrib["y"]))
        for item in svg.iter(f"{NAME}text")
    }


def test_points_lie_where_the_axes_say() -> None:
    svg = parsed(RECORD)
    words = texts(svg)
    (path,) = svg.iter(f"{NAME}path")
    points = [(float(x), float(y)) for x, y in re.findall(r"[ML](\S+) (\S+)", path.attrib["d"])]
    assert len(points) == 4
    # Ticks: 1000 tokens a step, so 40 thousand; text baselines are 4 px under their line.
    x0, x40 = words["0"][0], words["40"][0]
    y2, y4, y8 = (words[tick][1] - 4 for tick in ("2", "4", "8"))
    for (x, y), share, height in zip(points, (0.25, 0.5, 0.75, 1), (y8, y4, y2, y2), strict=True):
        assert x == pytest.approx(x0 + share * (x40 - x0), abs=0.2)
        assert y == pytest.approx(height, abs=0.2)
    assert y4 - y8 == pytest.approx(y2 - y4, abs=0.3), "halving is the same distance everywhere"
    assert words["rates begin to fall"][0] == pytest.approx(x0 + 0.75 * (x40 - x0) + 6, abs=0.2)
    assert "thousand tokens" in words
    assert any("nats a token" in word for word in words)
    assert any("a <fast> machine & more, 2026-01-02" in word for word in words), "escaped"


def test_it_can_be_read_on_white_and_on_black() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    svg = parsed(RECORD)
    (path,) = svg.iter(f"{NAME}path")
    for colour in (svg.attrib["fill"], path.attrib["stroke"]):
        for page in ("#ffffff", "#111111"):
            light, dark = sorted((luminance(colour), luminance(page)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 3, f"{colour} on {page}"
    assert not list(svg.iter(f"{NAME}rect")), "no background of its own"


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, 12.5])
def test_axes_fit_any_run(scale: float) -> None:
    losses = [[step, 0.02 + scale * 3 / step] for step in range(1, 60)]
    words = texts(parsed(RECORD | {"losses": losses}))
    numbers = [w for w in words if re.fullmatch(r"[\d.]+", w)]
    assert len(numbers) >= 6
    assert all(math.isfinite(v) and 0 <= v <= 720 for place in words.values() for v in place)


def test_wrong_records_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TrainingError, match="two logged steps"):
        curve.loss_curve(RECORD | {"losses": [[1, 2.0]]})
    with pytest.raises(TrainingError, match="lacks what a curve needs"):
        curve.loss_curve({"losses": []})
    assert curve.main([str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "training.json cannot be read" in error
    (tmp_path / "training.json").write_text(json.dumps(RECORD))
    assert curve.main([str(tmp_path)]) == 0
    assert (tmp_path / "loss_curve.svg").read_text() == curve.loss_curve(RECORD)
