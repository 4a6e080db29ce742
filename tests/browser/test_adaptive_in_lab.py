"""Notebook 05 in JupyterLab in a real Chromium: decisions are watched, the policy and the number of
sequences change while it runs, and what the page says of a step agrees with itself."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jupyterlab")
playwright = pytest.importorskip("playwright.sync_api")

from browser.lab import CHROMIUM_FLAGS, Lab, Notebook, open_notebook, running_lab  # noqa: E402
from workbench.views.adaptive_page import _script  # noqa: E402

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

_READ = """() => {
    const board = document.querySelector('.bw-adapt');
    if (!board) return null;
    return {
        state: board.dataset.state,
        status: board.querySelector('.bw-draft-status').textContent,
        reason: board.querySelector('.bw-adapt-reason').textContent,
        map: board.querySelector('.bw-adapt-map').getAttribute('aria-label') ?? '',
        readout: board.querySelector('.bw-adapt-readout').textContent,
        notes: [...board.querySelectorAll('.bw-adapt-note')].map(e => e.textContent),
        charts: [...board.querySelectorAll('svg[role=img]')].map(
            e => e.getAttribute('aria-label') ?? ''),
        costs: board.querySelector('.bw-adapt-costs').textContent,
        tiles: Object.fromEntries([...board.querySelectorAll('.bw-draft-tile')].map(
            e => [e.dataset.label, [...e.children].map(c => c.textContent)])),
    };
}"""
# Run everything the live cell needs, and the live cell itself.
_RUN = """async () => {
    const panel = window.jupyterapp.shell.currentWidget;
    const notebook = panel.content;
    const wanted = ['import ', 'beam = workbench.load', 'board = views.adaptive('];
    for (const [index, cell] of notebook.widgets.entries()) {
        const source = cell.model.sharedModel.getSource();
        if (cell.model.type !== 'code' || !wanted.some(w => source.includes(w))) continue;
        notebook.activeCellIndex = index;
        await window.jupyterapp.commands.execute('notebook:run-cell');
        if (source.includes('board = views.adaptive(')) return true;
    }
    return false;
}"""
# Of what is drawn, whatever ends right of the page, in px.
_CLIPPED = """() => {
    const board = document.querySelector('.bw-adapt');
    const edge = board.closest('.jp-OutputArea').getBoundingClientRect().right;
    return [...board.querySelectorAll('*')]
        .filter(e => e.getBoundingClientRect().width && e.getBoundingClientRect().right > edge + 1)
        .map(e => `${e.tagName} ${e.textContent.slice(0, 40)}`);
}"""

# Of the figure of a cell: texts that end beyond it or lie over each other; nothing while it is not
# drawn. Of axes alone, "0" may touch "0".
_FIGURE = """index => {
    const panel = window.jupyterapp.shell.currentWidget.content;
    const figure = panel.widgets[index].node.querySelector('.js-plotly-plot');
    if (!figure || !figure.querySelector('svg text')) return null;
    const edge = figure.getBoundingClientRect();
    const texts = [...figure.querySelectorAll('svg text')]
        .filter(e => e.textContent && e.getBoundingClientRect().width)
        .map(e => [e.textContent.slice(0, 60), e.getBoundingClientRect()]);
    const wrong = texts
        .filter(([, r]) => r.right > edge.right + 1 || r.left < edge.left - 1)
        .map(([words]) => `clipped: ${words}`);
    texts.forEach(([words, a], n) => texts.slice(n + 1).forEach(([other, b]) => {
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 2 && high > 3 && words + other !== '00') wrong.push(`${words} over ${other}`);
    }));
    return {width: Math.round(edge.width), wrong};
}"""
_FIGURES = """() => window.jupyterapp.shell.currentWidget.content.widgets
    .map((cell, index) => [cell, index])
    .filter(([cell]) => cell.model.type === 'code' && cell.model.outputs.toJSON()
        .some(o => 'application/vnd.plotly.v1+json' in (o.data ?? {})))
    .map(([, index]) => index)"""


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


def read(notebook: Notebook) -> dict[str, Any]:
    found: dict[str, Any] = notebook.page.evaluate(_READ)
    return found


def wait(notebook: Notebook, condition: str, timeout: float = 60) -> dict[str, Any]:
    """Until a JavaScript condition over what is read, as ``p``, holds."""
    notebook.until(f"() => {{ const p = ({_READ})(); return !!p && ({condition}); }}", timeout)
    return read(notebook)


def steps(page: dict[str, Any]) -> int:
    return int(page["status"].split(" step")[0].replace(",", ""))


def check(page: dict[str, Any], requests: int) -> tuple[int, int]:
    """Every place that speaks of the newest step says the same; drafts verified, and all."""
    said = re.match(r"(\d+) requests, (\d+) drafts: (\d+) verified, (\d+) accepted", page["map"])
    assert said is not None, page["map"]
    of, drafted, verified, accepted = map(int, said.groups())
    assert of == requests
    assert accepted <= verified <= drafted <= 7 * requests
    curve = re.match(r"verified ([\d,]+) of ([\d,]+); best in hindsight ([\d,]+)", page["notes"][0])
    assert curve is not None, page["notes"]
    chosen, budgets, best = (int(n.replace(",", "")) for n in curve.groups())
    assert chosen == verified
    assert verified <= budgets <= drafted
    assert best <= drafted
    assert page["tiles"]["tokens/s"][2].startswith(f"{requests} together, ")
    return verified, drafted


@pytest.mark.full  # make test has the live board of 04
def test_adaptive_verification(lab: Lab, browser: "playwright.Browser", screenshots: Path) -> None:
    with open_notebook(browser, lab, "05_adaptive_verification.ipynb") as notebook:
        page = notebook.page
        assert page.evaluate(_RUN)
        page.set_viewport_size({"width": 1280, "height": 1250})
        page.locator(".bw-adapt").scroll_into_view_if_needed()
        wait(notebook, "p.state === 'running' && 'tokens/s' in p.tiles && p.costs", 120)
        policy = page.locator(".bw-adapt select").first
        size = page.locator(".bw-adapt input[type=range]").first
        buttons = {
            word: page.locator(".bw-draft-button", has_text=word)
            for word in ("Pause", "Resume", "Step", "Stop")
        }

        # Held, every part of the page is of the same step; a step is one step.
        buttons["Pause"].click()
        held = wait(notebook, "p.state === 'paused' && p.status.endsWith('paused')")
        page.wait_for_timeout(400)
        held = read(notebook)
        check(held, 32)
        assert re.match(r"adaptive: \d+ of \d+ drafts give the most tokens", held["reason"])
        buttons["Step"].click()
        wait(notebook, f"p.status.startsWith('{steps(held) + 1:,} steps')")

        # The policy changes in the run that goes on: all drafts are verified.
        policy.select_option("fixed")
        buttons["Resume"].click()
        wait(notebook, "p.reason === 'fixed: all drafts' && 'over adaptive' in p.tiles")
        buttons["Pause"].click()
        page.wait_for_timeout(500)
        fixed = read(notebook)
        verified, drafted = check(fixed, 32)
        assert verified > 0.9 * drafted
        assert "what adaptive would have weighed" in fixed["notes"][0]
        assert steps(fixed) > steps(held)

        # A cell of the map, by mouse and by keys.
        page.locator(".bw-adapt-map").hover(position={"x": 60, "y": 12})
        notebook.until(
            "() => /slot 1: survival \\\\d/.test(document.querySelector("
            "'.bw-adapt-readout').textContent)".replace("\\\\", "\\")
        )
        page.locator(".bw-adapt-map").focus()
        for _ in range(2):
            page.keyboard.press("ArrowRight")
        assert re.match(r"request \d+, slot 3: survival \d", read(notebook)["readout"])
        page.locator(".bw-adapt select").nth(1).select_option("by request")

        # In turn, and 128 together; then one.
        buttons["Resume"].click()
        policy.select_option("adaptive and fixed in turn")
        wait(notebook, "/^\\d/.test(p.tiles['over fixed']?.[1] ?? '')", 90)
        size.focus()
        for _ in range(2):
            size.press("ArrowRight")
        wait(notebook, "p.map.startsWith('128 requests') && /^128 /.test(p.tiles['tokens/s'][2])")
        buttons["Pause"].click()
        page.wait_for_timeout(800)
        check(read(notebook), 128)
        for theme in ("Light", "Dark"):
            notebook.theme(f"JupyterLab {theme}")
            for width in (1280, 800):
                page.set_viewport_size({"width": width, "height": 1400})
                page.wait_for_timeout(400)
                assert page.evaluate(_CLIPPED) == []
                page.screenshot(path=screenshots / f"05-live-{width}-{theme.lower()}.png")
        notebook.theme("JupyterLab Light")
        page.set_viewport_size({"width": 1280, "height": 1250})
        buttons["Resume"].click()
        for _ in range(7):
            size.press("ArrowLeft")
        wait(notebook, "p.map.startsWith('1 request,') && /^1 /.test(p.tiles['tokens/s'][2])", 90)

        # An interrupt of the kernel, idle by now, ends it; a new kernel knows nothing of it.
        notebook.command("notebook:interrupt-kernel")
        wait(notebook, "p.state === 'ended' && p.status.endsWith('stopped')")
        assert notebook.cell_errors() == []
        assert notebook.errors == [], "the browser's console has errors"
        assert notebook.outside == [], "the page asked other hosts"
        page.evaluate(
            "async () => {"
            " await window.jupyterapp.shell.currentWidget.sessionContext.restartKernel(); }"
        )
        page.locator(".bw-draft-button").first.click()
        wait(notebook, "p.status.includes('the kernel has ended')")


def test_lines_break_where_another_policy_decided(browser: "playwright.Browser") -> None:
    def points(*stretches: tuple[str, int]) -> list[list[Any]]:
        """Of half a second each, and the policy and sequences of each stretch of two."""
        every = [stretch for stretch in stretches for _ in range(2)]
        return [[0.5 * (n + 1 - len(every)), 1, 1, 1, 1, *s] for n, s in enumerate(every)]

    script = _script().replace("export default { render: renderAdaptive };", "")
    page = browser.new_page()
    read_lines = f"""points => {{ {script}
        return [runs(points).map(r => [r[0][5], r.length]), changes(points).map(c => c[1])]; }}"""
    try:
        turns = points(("adaptive", 4), ("fixed", 4), ("adaptive", 4), ("fixed", 4))
        assert page.evaluate(read_lines, turns) == [[["adaptive", 4], ["fixed", 4]], []]
        shortly = points(("adaptive", 4), ("none", 4), ("adaptive", 4))
        assert page.evaluate(read_lines, shortly) == [
            [["adaptive", 2], ["none", 2], ["adaptive", 2]], ["none", "adaptive"],
        ]  # fmt: skip
        more = points(("adaptive", 4), ("adaptive", 8), ("adaptive", 4))
        assert page.evaluate(read_lines, more) == [
            [["adaptive", 2]] * 3, ["8 together", "4 together"],
        ]  # fmt: skip
    finally:
        page.close()


@pytest.mark.full  # make test has the live board of 04
def test_saved_figures_fit_a_narrow_page(
    lab: Lab, browser: "playwright.Browser", screenshots: Path
) -> None:
    with open_notebook(browser, lab, "05_adaptive_verification.ipynb") as notebook:
        page = notebook.page
        page.set_viewport_size({"width": 800, "height": 1000})  # beside the file browser
        page.reload()
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        cells = notebook.until(f"() => {{ const f = ({_FIGURES})(); return f.length && f; }}")
        assert len(cells) == 9
        for index in cells:
            page.evaluate(
                "index => window.jupyterapp.shell.currentWidget.content.scrollToItem(index)", index
            )
            notebook.until(_FIGURE, argument=index)
            page.wait_for_timeout(400)
            found = page.evaluate(_FIGURE, index)
            page.screenshot(path=screenshots / f"05-narrow-{index:02}.png")
            assert found["width"] < 400
            assert found["wrong"] == [], index
