"""Notebook 06 in JupyterLab in a real Chromium: without a server it shows the recorded session, to
its end; with an address the same cells talk to that server, made up here."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jupyterlab")
playwright = pytest.importorskip("playwright.sync_api")

from browser.lab import CHROMIUM_FLAGS, Lab, Notebook, open_notebook, running_lab  # noqa: E402
from serving import openai_server as fake  # noqa: E402

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

NAME = "06_serving.ipynb"
_BOARD = """() => {
    const board = document.querySelector('.bw-serve');
    if (!board || !board.querySelector('.bw-draft-tile')) return null;
    return {
        state: board.dataset.state,
        status: board.querySelector('.bw-draft-status').textContent,
        tiles: Object.fromEntries([...board.querySelectorAll('.bw-draft-tile')].map(
            e => [e.dataset.label, [...e.children].map(c => c.textContent)])),
        charts: [...board.querySelectorAll('.bw-serve-chart svg[role=img]')].length,
    };
}"""
# Texts of a figure that end beyond it; nothing while it is not drawn.
_FIGURE = """index => {
    const panel = window.jupyterapp.shell.currentWidget.content;
    const figure = panel.widgets[index].node.querySelector('.js-plotly-plot');
    if (!figure || !figure.querySelector('svg text')) return null;
    const edge = figure.getBoundingClientRect();
    return {wrong: [...figure.querySelectorAll('svg text')]
        .filter(e => e.textContent && e.getBoundingClientRect().width)
        .filter(e => e.getBoundingClientRect().right > edge.right + 1
                     || e.getBoundingClientRect().left < edge.left - 1)
        .map(e => e.textContent.slice(0, 60))};
}"""
_FIGURES = """() => window.jupyterapp.shell.currentWidget.content.widgets
    .map((cell, index) => [cell, index])
    .filter(([cell]) => cell.model.type === 'code' && cell.model.outputs.toJSON()
        .some(o => 'application/vnd.plotly.v1+json' in (o.data ?? {})))
    .map(([, index]) => index)"""
# Cells by what they say, run one after the other; the address takes the place of None.
_RUN = """async ([address, wanted]) => {
    const panel = window.jupyterapp.shell.currentWidget;
    let ran = 0;
    for (const [index, cell] of panel.content.widgets.entries()) {
        const source = cell.model.sharedModel.getSource();
        if (cell.model.type !== 'code' || !wanted.some(w => source.includes(w))) continue;
        cell.model.sharedModel.setSource(
            source.replace(/^ADDRESS = None/m, `ADDRESS = "${address}"`));
        panel.content.activeCellIndex = index;
        await window.jupyterapp.commands.execute('notebook:run-cell');
        ran += 1;
    }
    return ran;
}"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """With a cache of its own: a server of the user that runs is not asked anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BEAM_WORKBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
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


def outputs(notebook: Notebook) -> str:
    """All text of the outputs."""
    return str(
        notebook.page.evaluate(
            """() => window.jupyterapp.shell.currentWidget.content.widgets
                .filter(cell => cell.model.type === 'code')
                .flatMap(cell => cell.model.outputs.toJSON())
                .map(o => [o.text, o.data?.['text/plain']].flat().join('')).join('\\n')"""
        )
    )


@pytest.mark.full  # make test has the notebook through nbval, and the page in another file
def test_without_a_server(lab: Lab, browser: "playwright.Browser", screenshots: Path) -> None:
    with open_notebook(browser, lab, NAME) as notebook:
        page = notebook.page
        notebook.run_all(120)
        assert notebook.cell_errors() == []
        text = outputs(notebook)
        assert "no server; recorded: " in text
        assert "nothing is started" in text
        given = re.search(r"([\d,]+) tokens given out", text)
        assert given is not None

        # The replay runs by itself to the end of the recording, and then says what figures say.
        page.locator(".bw-serve").scroll_into_view_if_needed()
        notebook.until(_BOARD, 30)
        condition = "p.status.endsWith('end of the recording')"
        notebook.until(f"() => {{ const p = ({_BOARD})(); return !!p && {condition}; }}", 90)
        board: dict[str, Any] = page.evaluate(_BOARD)
        assert board["state"] == "ended"
        assert board["status"].startswith("recorded: ")
        length = re.search(r"acceptance length (\d\.\d\d) \(n = ([\d,]+) draft events\)", text)
        assert length is not None
        label, value, note = board["tiles"]["acceptance length"]
        assert (label, value, note) == (
            "acceptance length", length.group(1), f"{length.group(2)} draft events",
        )  # fmt: skip
        assert board["charts"] >= 5

        # All figures are whole, at two widths.
        indices = page.evaluate(_FIGURES)
        assert len(indices) == 4
        for width in (1280, 1000):
            page.set_viewport_size({"width": width, "height": 1000})
            for index in indices:
                page.evaluate(
                    "i => window.jupyterapp.shell.currentWidget.content.scrollToItem(i, 'center')",
                    index,
                )
                found = notebook.until(_FIGURE, 20, index)
                # A figure that was out of sight when the window changed hears of it only now.
                page.evaluate("window.dispatchEvent(new Event('resize'))")
                page.wait_for_timeout(300)
                found = page.evaluate(_FIGURE, index) or found
                assert found["wrong"] == [], (width, index)
        page.set_viewport_size({"width": 1280, "height": 900})
        notebook.photograph(screenshots, "06-recorded")
        assert notebook.outside == []
        assert notebook.errors == []


def test_with_an_address(lab: Lab, browser: "playwright.Browser") -> None:
    value = '{"verdict":"keep","risk":"low","certain":true}'
    steps = (
        fake.stream(
            fake.delta(reasoning="It pushes."), fake.delta(content="So."), fake.delta("stop")
        ),
        fake.call(("layer_kind", '{"layer": 2}')),
        fake.say("full, it says"),
        fake.say(value),
        fake.say("typed by hand"),
    )
    wanted = ["import json", "ADDRESS = None", "page = views.chat", "thoughtful =", "layer_kind(",
              "called =", "class Finding", "reply.speculation"]  # fmt: skip
    with fake.serving(*steps) as server, open_notebook(browser, lab, NAME) as notebook:
        page = notebook.page
        assert page.evaluate(_RUN, [server.url, wanted]) >= len(wanted)
        notebook.until(
            "() => window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status"
            " === 'idle'"
        )
        assert notebook.cell_errors() == []
        text = outputs(notebook)
        assert f"live: {fake.MODEL} at {server.url}" in text
        assert "thought 10 letters, said 3; it ended by stop" in text
        assert 'layer_kind({"layer": 2}) gave {"layer": 2, "attention": "full"}' in text
        assert "Finding(verdict='keep', risk='low', certain=True)" in text
        thinking, forced, after, structured = server.chats
        assert thinking["chat_template_kwargs"]["thinking"] is True
        assert forced["tool_choice"]["function"]["name"] == "layer_kind"
        # The answer to the result is not to be another call.
        assert after["tool_choice"] == "auto"
        assert after["messages"][-1]["role"] == "tool"
        assert structured["response_format"]["type"] == "json_schema"

        # The chat above is the reader's.
        box = page.get_by_label("Message")
        box.scroll_into_view_if_needed()
        assert box.input_value().startswith("class Stack:")
        box.fill("hello")
        page.get_by_role("button", name="Send").click()
        notebook.until(
            "() => [...document.querySelectorAll('.bw-chat-answer')]"
            ".some(e => e.textContent.includes('typed by hand'))"
        )
        assert server.chats[-1]["messages"][-1]["content"] == "hello"
        assert notebook.outside == []
