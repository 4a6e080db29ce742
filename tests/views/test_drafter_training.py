"""Views of a drafter's training, and the example they show: against values worked out here."""

import json
import re
from dataclasses import replace
from math import exp, log, nan
from pathlib import Path
from typing import Any

import IPython.display
import numpy as np
import pytest

import workbench
from views.test_spec_figures import HOSTILE, Hostile
from workbench import views
from workbench.errors import TrainingError, WorkbenchError
from workbench.model.beam import Beam
from workbench.training.distil_settings import DistilSettings, read_distil_settings
from workbench.training.example import TrainingExample, training_example
from workbench.views import drafter_training

PROMPT = 'class Stack:\n    """A last-in, first-out list."""'
RECORD: dict[str, Any] = {
    "losses": [[10, 11.0, 8.0, 3.0, 0.05], [20, 7.5, 5.5, 2.0, 0.25], [30, 5.25, 4.0, 1.25, 0.5]],
    "drafter": {"vocab_size": 4096, "dflash_config": {"selector_top_k": 16}},
}


@pytest.fixture(scope="module")
def beam() -> Beam:
    return workbench.load("beam-tiny")


@pytest.fixture(scope="module")
def settings() -> DistilSettings:
    return read_distil_settings("minute-drafter")


@pytest.fixture(scope="module")
def example(beam: Beam, settings: DistilSettings) -> TrainingExample:
    return training_example(beam, settings, PROMPT, response=80, seed=2)


def planted(**changes: Any) -> TrainingExample:
    """Two blocks of three rows in eight tokens, the second without a label behind the first."""
    values: dict[str, Any] = {
        "token_ids": (10, 11, 12, 13, 14, 15, 16, 17),
        "prompt": 2,
        "valid": 7,
        "places": (3, 5),
        "labels": ((14, 15), (16, 17)),
        "live": ((True, True), (True, False)),
        "weights": (1.0, 0.5),
        "seen": seen_by_definition(8, (3, 5), 3, 4),
        "window": 4,
    }
    return TrainingExample(**(values | changes))


def seen_by_definition(length: int, places: tuple[int, ...], query: int, window: int) -> np.ndarray:
    """A row at p + k sees positions before p that are less than a window away, and its block."""
    rows = len(places) * query
    seen = np.zeros((rows, length + rows), bool)
    for i, place in enumerate(places):
        for k in range(query):
            for position in range(length):
                seen[i * query + k, position] = position < place and place + k - position < window
            seen[i * query + k, length + i * query : length + (i + 1) * query] = True
    return seen


# -- the example ----------------------------------------------------------------------------------


def test_an_example_is_the_targets_own_greedy_text(beam: Beam, example: TrainingExample) -> None:
    assert beam.tokenizer is not None
    written = workbench.generate(beam, PROMPT, max_new_tokens=80, stop_at_eos=False)
    ids = beam.tokenizer.encode(PROMPT)
    assert example.prompt == len(ids)
    assert list(example.token_ids) == [*ids, *written.token_ids]


def test_its_blocks_follow_from_the_text(example: TrainingExample) -> None:
    e = example
    assert len(set(e.places)) == 4
    assert list(e.places) == sorted(e.places)
    for place, labels, live in zip(e.places, e.labels, e.live, strict=True):
        assert e.prompt <= place <= e.valid - 2
        assert list(live) == [place + k < e.valid for k in range(1, 8)]
        real = [e.token_ids[place + k] for k in range(1, 8) if place + k < e.valid]
        assert [t for t, on in zip(labels, live, strict=True) if on] == real
    assert not all(e.live[-1])
    assert any(e.live[-1])
    assert e.weights == pytest.approx([exp(-k / 4) for k in range(7)])


def test_its_rows_see_what_the_definition_says(
    example: TrainingExample, settings: DistilSettings
) -> None:
    assert example.window == settings.drafter["sliding_window"] == 64
    expected = seen_by_definition(len(example.token_ids), example.places, 8, 64)
    assert np.array_equal(example.seen, expected)
    assert not expected[-1, example.places[-1] - 64 + 7]  # the window does cut here


def test_what_no_example_can_be_made_of_is_refused(beam: Beam, settings: DistilSettings) -> None:
    with pytest.raises(TrainingError, match="40 anchors do not fit 20 response tokens"):
        training_example(beam, settings, PROMPT, response=20, blocks=40)
    with pytest.raises(TrainingError, match="do not fit the target's context of"):
        training_example(beam, settings, PROMPT, response=1 << 20)
    strange = replace(settings, drafter={**settings.drafter, "target_layer_ids": (1, 99)})
    with pytest.raises(TrainingError, match="target_layer_ids"):
        training_example(beam, strange, PROMPT)


def test_a_loop_is_cut_where_the_settings_say(beam: Beam, settings: DistilSettings) -> None:
    looping = "x = 1\n" * 40
    kept = training_example(beam, settings, looping, response=64, blocks=1)
    harsh = replace(settings, repeat_run=2, repeat_grace=0)
    cut = training_example(beam, harsh, looping, response=64, blocks=1, seed=1)
    assert cut.token_ids == kept.token_ids
    assert cut.valid < kept.valid <= len(kept.token_ids)


# -- pictures of it -------------------------------------------------------------------------------


def test_the_mask_is_drawn_as_it_is(example: TrainingExample) -> None:
    view = views.training_mask(example)
    context, own, anchors = view.figure.data
    assert np.array_equal(np.hstack([context.z, own.z]), example.seen)
    assert list(anchors.x) == list(example.places)
    assert list(anchors.y) == [0, 8, 16, 24]
    assert view.figure.layout.yaxis.range == (31.5, -0.5)
    assert "measured here" in view.figure.layout.title.subtitle.text


def test_the_mask_in_words() -> None:
    assert views.training_mask(planted()).text.splitlines() == [
        "2 blocks of 3 rows, 8 positions, window 4",
        "block 1: anchor at 3, its row sees positions 0 to 2, its last row positions 2 to 2",
        "block 2: anchor at 5, its row sees positions 2 to 4, its last row positions 4 to 4",
    ]


def test_a_mask_without_context_is_drawn() -> None:
    first = planted(places=(0, 5), seen=seen_by_definition(8, (0, 5), 3, 4))
    assert "block 1: anchor at 0, its row sees no position" in views.training_mask(first).text


class Numbers(Hostile):
    """A tokenizer whose tokens are their ids."""

    def token_text(self, token_id: int) -> str:
        return f"t{token_id}"

    def push(self, token_id: int) -> str:
        return f"t{token_id} "


def test_blocks_are_shown_with_what_their_slots_learn() -> None:
    view = views.training_blocks(planted(), Numbers())
    assert view.text.splitlines() == [
        "prompt of 2 tokens, 6 written by the target, 5 count",
        "block 1 at 3: t13 -> t14 t15",
        "block 2 at 5: t15 -> t16 –",
        "weights 1.00 0.50",
    ]
    assert view.html is not None
    text, table = view.html.split("<table", 1)
    assert re.findall(r"<span[^>]*border-bottom[^>]*>([^<]*)<", text) == ["t14 ", "t16 ", "token"]
    assert re.findall(r"line-through[^>]*>([^<]*)<", text) == ["t17 "]
    cells = re.findall(r'<td[^>]*title="([^"]*)"[^>]*>([^<]*)<', table)
    assert cells == [("weight 1.00", "t14"), ("weight 0.50", "t15"), ("weight 1.00", "t16"),
                     ("does not count", "–")]  # fmt: skip
    assert table.count("dashed") == 1  # what does not count differs by more than its colour
    tints = [float(x) for x in re.findall(r"background:rgba\(0,158,115,([\d.]+)\)", table)]
    assert tints[0] == tints[2] == 2 * tints[1]


def test_token_texts_never_become_markup() -> None:
    view = views.training_blocks(planted(), Hostile())
    assert view.html is not None
    assert "<script" not in view.html
    assert view.html.count("&lt;script&gt;alert(1)") >= 8
    assert HOSTILE[:8] in view.text


def test_an_example_stays_small_in_a_notebook(beam: Beam, example: TrainingExample) -> None:
    assert beam.tokenizer is not None
    page = views.training_blocks(example, beam.tokenizer)._repr_mimebundle_()
    mask = views.training_mask(example)._repr_mimebundle_()
    assert len(json.dumps(page)) < 30_000
    assert len(json.dumps(mask)) < 30_000


# -- the loss -------------------------------------------------------------------------------------


def test_the_curve_has_the_records_numbers() -> None:
    view = views.training_curve(RECORD)
    backbone, selector, recall = view.figure.data
    assert [list(t.x) for t in view.figure.data] == [[10, 20, 30]] * 3
    assert list(backbone.y) == [8.0, 5.5, 4.0]
    assert list(selector.y) == [3.0, 2.0, 1.25]
    assert list(recall.y) == [np.float32(0.05), 0.25, 0.5]
    assert recall.yaxis == "y2"
    assert {t.line.dash for t in view.figure.data} == {"solid", "dash", "dot"}
    assert view.figure.layout.shapes[0].y0 == pytest.approx(log(4096))
    assert view.text == (
        "steps 10 to 30: backbone 8.00 to 4.00 nats a slot, selector 3.00 to 1.25\n"
        "label among the 16 candidates: 5% to 50%"
    )
    recorded = views.training_curve(RECORD, source="recorded on one H200, 2026-01-02")
    assert "recorded on one H200, 2026-01-02" in recorded.figure.layout.title.subtitle.text


def test_a_curve_of_no_or_one_step() -> None:
    assert views.training_curve(RECORD | {"losses": []}).text == "no step was logged"
    one = views.training_curve(RECORD | {"losses": RECORD["losses"][:1]})
    assert {trace.mode for trace in one.figure.data} == {"markers"}


@pytest.mark.parametrize("record", [{}, RECORD | {"losses": [[1, 2.0]]}, RECORD | {"drafter": 3}])
def test_what_is_no_record_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(WorkbenchError, match="no record of a drafter's training"):
        views.training_curve(record)


def page(watch: drafter_training.TrainingWatch) -> str:
    html = watch.view.html
    assert html is not None
    return html


class Page:
    """Stands where IPython's display handle is: keeps what was shown."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def display(self, view: views.View, *, display_id: bool) -> "Page":
        assert display_id
        self.shown.append(view.text)
        return self

    def update(self, view: views.View) -> None:
        self.shown.append(view.text)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Page:
    kept = Page()
    monkeypatch.setattr(IPython.display, "display", kept.display)
    return kept


def test_watching_draws_seldom_and_the_last_step_always(
    shown: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(drafter_training.time, "monotonic", lambda: clock[0])
    watch = views.watch_training()
    assert shown.shown == ["no step yet"]
    for step in range(1, 101):
        clock[0] += 0.01  # a second for all of them
        watch(step, 100, 8.0 - step / 50, 320.0)
    assert shown.shown[1] == "step 1 of 100, loss 7.98, 320 blocks/s"
    assert shown.shown[-1] == "step 100 of 100, loss 6.00, 320 blocks/s"
    assert len(shown.shown) == 5  # nothing yet, 0.01 s, 0.42 s, 0.83 s, the end
    columns = re.findall(r'height:(\d+)%;[^>]*title="step (\d+): ([\d.]+) nats"', page(watch))
    assert [int(step) for _, step, _ in columns] == list(range(1, 101))
    assert columns[0] == ("100", "1", "7.98")
    assert columns[49] == (f"{100 * 7 / 7.98:.0f}", "50", "7.00")
    assert "width:100.0%" in page(watch)
    assert len(page(watch)) < 30_000


def test_what_is_planned_has_its_room(shown: Page) -> None:
    watch = views.watch_training()
    assert "the target is writing what is trained on" in page(watch)
    for step in (11, 12, 13):  # resumed after ten
        watch(step, 20, 5.0, 10.0)
    assert "width:30.0%" in page(watch)
    assert len(shown.shown) == 2  # within 0.4 s of the first


def test_a_loss_that_is_no_number_is_said(shown: Page) -> None:
    watch = views.watch_training()
    watch(1, 5, nan, 10.0)
    assert shown.shown[-1] == "step 1 of 5, loss no number, 10 blocks/s"
    assert "height:0%" in page(watch)


def test_the_bundled_record_can_be_drawn() -> None:
    folder = Path(workbench.__file__).parent / "model" / "zoo" / "beam-tiny" / "dflash2"
    record = json.loads((folder / "training.json").read_text("utf-8"))
    view = views.training_curve(record)
    assert len(view.figure.data[0].x) == len(record["losses"])
    assert len(json.dumps(view._repr_mimebundle_())) < 30_000


def test_a_selector_that_had_no_label_to_judge_is_a_gap_and_not_perfect() -> None:
    record = {
        "losses": [[1, 8.0, 8.0, 0.0, 0.0], [2, 7.5, 7.0, 2.5, 0.25]],
        "drafter": {"vocab_size": 64, "dflash_config": {"selector_top_k": 4}},
    }
    view = views.training_curve(record)
    assert view.figure is not None
    selector = next(t for t in view.figure.data if "selector" in t.name)
    assert np.isnan(selector.y[0])
    assert selector.y[1] == 2.5
    assert "selector 2.50 to 2.50" in view.text
