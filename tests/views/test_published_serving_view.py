"""The table of published figures: each number with its kind and source, texts escaped."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape

import pytest

from workbench import views
from workbench.model.plan import make_plan
from workbench.serving.published_row import KINDS, Figure, Row
from workbench.serving.published_serving import PublishedBeside, beside_published
from workbench.views.published_serving import number

HOSTILE = "<script>alert(1)</script>"
PLAN = make_plan(
    "beam-501b", "GB200", gpus=8, weights="nvfp4", context=131_072, sequences=32,
    drafter="beam-501b-dflash2",
)  # fmt: skip


@pytest.fixture(scope="module")
def value() -> PublishedBeside:
    return beside_published(PLAN)


def cells(html: str) -> list[list[str]]:
    """Words of every row of the table that has a cell for each kind."""
    rows = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.S)
            for row in re.findall(r"<tr.*?</tr>", html, re.S)]  # fmt: skip
    plain = [[unescape(re.sub(r"<[^>]+>", " ", cell)) for cell in row] for row in rows]
    return [row for row in plain if len(row) == len(KINDS)]


def test_each_kind_has_its_column_and_each_row_its_figures(value: PublishedBeside) -> None:
    view = views.beside_published(value)
    assert view.html is not None
    head, *rows = cells(view.html)
    assert [word.split()[1] for word in head] == ["published", "modelled", "recorded", "measured"]
    assert len(rows) == len(value.rows) == 9
    for row, shown in zip(value.rows, rows, strict=True):
        for kind, cell in zip(KINDS, shown, strict=True):
            for one in row.of(kind):
                assert number(one, row.unit) in cell
                assert one.label in cell
            if kind in row.missing:
                assert row.missing[kind] in cell
    assert "8.95 ms" in rows[0][0]
    assert "+10.8 %" in rows[5][0]


def test_the_text_says_kind_and_source_of_each(value: PublishedBeside) -> None:
    text = views.beside_published(value).text
    assert "nothing was measured here" in text
    assert re.search(r"◆ published +8\.95 ms  before the optimisations; GB200, TP8", text)
    assert re.search(r"■ recorded +1\.99 ms  the workbench's own kernel; NVIDIA H200, 2026-", text)
    assert text.count("◆") == sum(len(row.of("published")) for row in value.rows)
    assert max(map(len, text.splitlines()[2:])) <= 130


def test_what_was_measured_is_drawn(value: PublishedBeside) -> None:
    one = Figure(value=3.456, kind="measured here", label="", source="40 draft events; 20 s")
    row = value.rows[3]
    filled = replace(row, figures=(*row.figures, one), missing={"modelled": "not modelled"})
    view = views.beside_published(replace(value, rows=(filled,), seconds=20.0))
    assert view.html is not None
    assert "3.46" in cells(view.html)[1][3]
    assert "not measured" not in view.html
    assert "measured here: 20 s of a server's metrics" in view.text


def test_a_source_stands_once_under_the_figures_it_is_of() -> None:
    def one(value: float, label: str, source: str) -> Figure:
        return Figure(value=value, kind="published", label=label, source=source)

    figures = (one(168_800, "A", "blog, 4 GPUs"), one(2, "B", "blog, 4 GPUs"), one(3, "C", "else"))
    row = Row(name="speed", unit="tokens/s", remark="", missing={}, figures=figures)
    view = views.beside_published(PublishedBeside(plan="p", seconds=0.0, rows=(row,)))
    assert view.html is not None
    shown = cells(view.html)[1][0]
    assert [shown.count(word) for word in ("blog, 4 GPUs", "else")] == [1, 1]
    assert re.sub(r"\s+", " ", shown).strip() == (
        "◆ 168,800 tokens/s A ◆ 2.00 tokens/s B blog, 4 GPUs ◆ 3.00 tokens/s C else"
    )
    assert view.text.count("blog, 4 GPUs") == 1
    assert "B; as above" in view.text
    # A long number goes to the next line with its sign: nothing there is unbreakable but itself.
    assert "nowrap" not in view.html


def test_numbers_have_the_digits_that_tell_them_apart() -> None:
    def shown(value: float, unit: str = "ms") -> str:
        return number(Figure(value=value, kind="published", label="", source=""), unit)  # type: ignore[arg-type]

    assert [shown(x) for x in (0.387, 8.95, 81.04, 328)] == ["0.39 ms", "8.95 ms", "81.0 ms",
                                                            "328 ms"]  # fmt: skip
    assert shown(-0.09, "change") == "−9.0 %"
    assert shown(16632, "tokens/s") == "16,632 tokens/s"
    assert shown(3.7, "tokens a step") == "3.70"


def test_texts_are_escaped() -> None:
    hostile = Row(
        name=HOSTILE, unit="ms", remark=HOSTILE, missing={"modelled": HOSTILE},
        figures=(Figure(value=1.0, kind="published", label=HOSTILE, source=HOSTILE),),
    )  # fmt: skip
    view = views.beside_published(PublishedBeside(plan=HOSTILE, seconds=0.0, rows=(hostile,)))
    assert view.html is not None
    assert "<script" not in view.html
    assert view.html.count("&lt;script&gt;") == 6
