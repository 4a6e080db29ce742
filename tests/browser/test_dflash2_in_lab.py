"""Notebook 04 in JupyterLab in a real Chromium: drafting is watched, held, stepped and stopped,
and the page has the numbers that Python has."""

import os
from collections.abc import Iterator
from math import floor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jupyterlab")
playwright = pytest.importorskip("playwright.sync_api")

import torch  # noqa: E402

import workbench  # noqa: E402
from browser.lab import CHROMIUM_FLAGS, Lab, Notebook, open_notebook, running_lab  # noqa: E402
from workbench.model.beam import Beam  # noqa: E402
from workbench.spec.bench_prompts import PROMPTS  # noqa: E402
from workbench.spec.drafter import Drafter  # noqa: E402
from workbench.spec.metrics import Acceptance, Tally  # noqa: E402
from workbench.spec.step import KINDS, Step  # noqa: E402
from workbench.views.theme import short_token  # noqa: E402

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

# Of the notebook's live cell.
PROMPT, NEXT, NEW_TOKENS = PROMPTS[2], PROMPTS[0], 160

_BOARD = "document.querySelector('.bw-draft')"
_READ = f"""() => {{
    const board = {_BOARD};
    const words = (selector) => [...board.querySelectorAll(selector)].map(e => e.textContent);
    return {{
        state: board.dataset.state,
        status: board.querySelector('.bw-draft-status').textContent,
        kinds: [...board.querySelectorAll('.bw-draft-page .bw-draft-token')]
            .map(e => e.dataset.kind),
        tiles: Object.fromEntries([...board.querySelectorAll('.bw-draft-tile')].map(e =>
            [e.dataset.label, [...e.children].map(c => c.textContent)])),
        counts: [...board.querySelectorAll('rect[data-count]')].map(e => +e.dataset.count),
        curves: board.querySelectorAll('.bw-draft-charts svg[role=img]')[2]
            ?.getAttribute('aria-label'),
        blocks: [...board.querySelectorAll('.bw-draft-block')].map(e => ({{
            step: +e.dataset.step,
            label: e.getAttribute('aria-label'),
            accepted: e.querySelectorAll('.bw-draft-accepted').length,
            slots: e.querySelectorAll('.bw-draft-track').length,
        }})),
        inside: words('.bw-draft-column .bw-draft-label'),
        taken: words('.bw-draft-taken .bw-draft-name'),
    }};
}}"""
# Run everything the live cell needs, and the live cell itself.
_RUN = """async () => {
    const panel = window.jupyterapp.shell.currentWidget;
    const notebook = panel.content;
    const wanted = ['import ', 'beam = workbench.load', 'board = views.drafting('];
    for (const [index, cell] of notebook.widgets.entries()) {
        const source = cell.model.sharedModel.getSource();
        if (cell.model.type !== 'code' || !wanted.some(w => source.includes(w))) continue;
        notebook.activeCellIndex = index;
        await window.jupyterapp.commands.execute('notebook:run-cell');
        if (source.includes('board = views.drafting(')) return true;
    }
    return false;
}"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with running_lab(tmp_path_factory.mktemp("lab")) as server:
        yield server


@pytest.fixture(scope="module")
def browser(chromium_path: str) -> Iterator["playwright.Browser"]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(
            executable_path=chromium_path, headless=True, args=CHROMIUM_FLAGS
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures go; SCREENSHOTS in the environment keeps them."""
    named = os.environ.get("SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Beam, Drafter]]:
    """Model and drafter in this process, with as many threads as the notebook's kernel has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    beam = workbench.load("beam-tiny")
    yield beam, workbench.load_drafter(beam)
    torch.set_num_threads(threads)


def read(notebook: Notebook) -> dict[str, Any]:
    found: dict[str, Any] = notebook.page.evaluate(_READ)
    return found


def steps_of(pair: tuple[Beam, Drafter], count: int) -> list[Step]:
    """The first steps that the board has taken, decoded in this process."""
    beam, drafter = pair
    steps: list[Step] = []
    for prompt in (PROMPT, NEXT):
        for step in workbench.decode(beam, drafter, prompt, max_new_tokens=NEW_TOKENS, detail=True):
            steps.append(step)
            if len(steps) == count:
                return steps
    raise AssertionError(f"the board has taken {count} steps, more than this test follows")


def acceptance(steps: list[Step]) -> Acceptance:
    tally = Tally()
    for step in steps:
        tally.add(step)
    return tally.acceptance()


def taken(page: dict[str, Any]) -> int:
    """Steps that the page says it has."""
    return int(page["status"].split(" step")[0].replace(",", ""))


def check(page: dict[str, Any], pair: tuple[Beam, Drafter]) -> list[Step]:
    """Everything in the page against the same steps, decoded here."""
    steps = steps_of(pair, taken(page))
    found = acceptance(steps)
    tokenizer = pair[0].tokenizer
    assert tokenizer is not None
    kinds = [kind for step in steps for r in step.requests for kind in r.kinds]
    assert [kind for kind in page["kinds"] if kind in KINDS] == kinds
    assert found.length_pooled is not None
    assert page["tiles"]["acceptance length"][1] == f"{found.length_pooled:.2f}"
    assert page["tiles"]["acceptance length"][2].startswith(f"n = {found.events} draft event")
    refused = [r for step in steps for r in step.requests if r.kinds[-1] == "corrected"]
    offered = sum(r.token_ids[-1] in r.candidates[r.accepted] for r in refused)
    if refused:
        tile = page["tiles"]["target's token among the 16"]
        assert tile[1] == f"{offered / len(refused):.0%}"
        assert tile[2].startswith(f"{offered} of {len(refused)} refused slot")
    assert page["tiles"]["drafts accepted"][1] == f"{found.rate_drafted:.0%}"
    assert float(page["tiles"]["tokens/s"][1].replace(",", "")) > 0
    assert page["counts"] == list(found.histogram)
    for slot, rate in enumerate(found.rates("survival"), 1):
        assert rate.value is not None
        share = floor(100 * round(rate.value, 4) + 0.5)
        assert f"slot {slot}, survival: {share}% (" in page["curves"]
        assert f"n = {rate.n}" in page["curves"]
    # The strip: the last blocks, oldest first.
    last = page["blocks"][-1]
    part = steps[-1].requests[0]
    assert last["slots"] == len(part.drafted)
    assert last["accepted"] == part.accepted
    for block, step in zip(page["blocks"][::-1], steps[::-1], strict=False):
        assert block["accepted"] == step.requests[0].accepted
    return steps


def test_watch_hold_step_and_stop(
    lab: Lab, browser: "playwright.Browser", pair: tuple[Beam, Drafter], screenshots: Path
) -> None:
    with open_notebook(browser, lab, "04_dflash2.ipynb") as notebook:
        page = notebook.page
        page.set_viewport_size({"width": 1280, "height": 1250})
        assert notebook.until(_RUN, 60)
        notebook.until(f"() => {_BOARD}?.querySelectorAll('.bw-draft-token').length > 12", 60)
        start, pause, step, stop = (page.locator(".bw-draft-button").nth(i) for i in range(4))

        # Hold it on its way: nothing moves, and the page says what Python says.
        pause.click()
        notebook.until(f"() => {_BOARD}.dataset.state === 'paused'")
        page.wait_for_timeout(300)
        held = read(notebook)
        steps = check(held, pair)
        page.wait_for_timeout(300)
        assert read(notebook)["kinds"] == held["kinds"], "it went on though it is held"

        # One step.
        step.click()
        notebook.until(
            f"text => {_BOARD}.querySelector('.bw-draft-status').textContent.startsWith(text)",
            argument=f"{len(steps) + 1} steps",
        )
        page.wait_for_timeout(200)
        steps = check(read(notebook), pair)

        # Look into a block that is not the last: candidates come from the kernel.
        block = page.locator(".bw-draft-block").nth(-2 if len(steps) > 3 else -1)
        block.focus()
        number = int(block.get_attribute("data-step") or -1)
        chosen = steps[number].requests[0]
        tokenizer = pair[0].tokenizer
        assert tokenizer is not None
        names = [short_token(tokenizer.token_text(i)) for i in chosen.drafted]
        notebook.until(
            f"n => {_BOARD}.querySelectorAll('.bw-draft-taken').length === n", argument=len(names)
        )
        inside = read(notebook)
        assert inside["taken"] == names
        assert inside["inside"][1 : 1 + len(names)] == names
        # A token in the text pins its block, also one that has left the strip, until it is let go.
        words = page.locator(".bw-draft-inside-words")
        page.locator(".bw-draft-token[data-step='1']").first.click()
        notebook.until(
            f"() => {_BOARD}.querySelector('.bw-draft-inside-words').textContent"
            ".startsWith('pinned · step 1:')"
        )
        notebook.until(f"n => {_BOARD}.querySelectorAll('.bw-draft-taken').length === n",
                       argument=len(steps[1].requests[0].drafted))  # fmt: skip
        assert page.locator(".bw-draft-pointed").count() == len(steps[1].requests[0].token_ids)
        page.locator(".bw-draft-release").click()
        assert (words.text_content() or "").startswith(f"step {len(steps) - 1}:")
        assert page.locator(".bw-draft-pointed").count() == 0
        page.locator(".bw-draft").screenshot(path=screenshots / "04-board-light.png")
        notebook.theme("JupyterLab Dark")
        page.wait_for_timeout(300)
        page.locator(".bw-draft").screenshot(path=screenshots / "04-board-dark.png")
        notebook.theme("JupyterLab Light")

        # Go on, and end it.
        count = len(read(notebook)["kinds"])
        pause.click()
        notebook.until(
            f"n => {_BOARD}.querySelectorAll('.bw-draft-token').length > n + 5", argument=count
        )
        stop.click()
        notebook.until(f"() => {_BOARD}.dataset.state === 'ended'")
        ended = read(notebook)
        assert ended["status"].endswith("stopped")
        page.wait_for_timeout(300)
        assert read(notebook)["kinds"] == ended["kinds"], "tokens arrived after the stop"

        # Start anew; an interrupt of the kernel, idle by now, ends it too.
        start.click()
        notebook.until(f"() => {_BOARD}.dataset.state === 'running'")
        notebook.command("notebook:interrupt-kernel")
        notebook.until(f"() => {_BOARD}.dataset.state === 'ended'")

        # What cannot be is said, and marked as what went wrong; the keyboard starts, too.
        page.locator(".bw-draft-prompt").fill("")
        page.keyboard.press("Control+Enter")
        notebook.until(f"() => {_BOARD}.querySelector('.bw-draft-trouble')")
        assert "empty" in page.locator(".bw-draft-status").inner_text()

        # Text is text, also in the prompt.
        hostile = "<img src=x onerror=document.title='hit'>"
        page.locator(".bw-draft-prompt").fill(hostile)
        start.click()
        notebook.until(
            f"text => {_BOARD}.querySelector('.bw-draft-given')?.textContent === text",
            argument=hostile,
        )
        stop.click()
        assert page.locator(".bw-draft img").count() == 0
        assert page.title() != "hit"

        width = page.evaluate(f"() => {_BOARD}.scrollWidth - {_BOARD}.clientWidth")
        assert width <= 0, "something is clipped at this width"
        assert notebook.cell_errors() == []
        assert notebook.errors == [], "the browser's console has errors"
        assert notebook.outside == [], "the page asked other hosts"


@pytest.mark.full
def test_the_whole_notebook(lab: Lab, browser: "playwright.Browser", screenshots: Path) -> None:
    with open_notebook(browser, lab, "04_dflash2.ipynb") as notebook:
        notebook.run_all(200)
        page = notebook.page
        # Side by side: start the pair, which waits for the button.
        boards = page.locator(".bw-draft")
        boards.nth(1).scroll_into_view_if_needed()
        boards.nth(1).locator(".bw-draft-button").first.click()
        notebook.until(
            "() => document.querySelectorAll('.bw-draft')[1]"
            ".querySelectorAll('.bw-draft-lane').length === 2"
        )
        notebook.until(
            "() => document.querySelectorAll('.bw-draft')[1].dataset.state === 'ended'", 120
        )
        # The replay comes to its end, too.
        boards.nth(2).scroll_into_view_if_needed()
        notebook.until(
            "() => document.querySelectorAll('.bw-draft')[2]"
            ".querySelector('.bw-draft-status').textContent.endsWith('end of the recording')",
            120,
        )
        for theme in ("Light", "Dark"):
            notebook.theme(f"JupyterLab {theme}")
            notebook.photograph(screenshots, f"04-{theme.lower()}")
        assert notebook.cell_errors() == []
        assert notebook.errors == []
        assert notebook.outside == []
