"""Chat, monitor and the engine's layers in JupyterLab in a real Chromium, before servers that are
made up here: what only a browser shows. Long and hostile text, the keyboard, a server that goes
away, a kernel that is started anew, both themes and narrow pages."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jupyterlab")
playwright = pytest.importorskip("playwright.sync_api")

import nbformat  # noqa: E402

from browser.lab import CHROMIUM_FLAGS, Lab, Notebook, open_notebook, running_lab  # noqa: E402
from serving import openai_server as fake  # noqa: E402
from serving.metrics_server import Child  # noqa: E402
from workbench.views.serving_page import _script  # noqa: E402

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

DATA = Path(__file__).parent.parent / "data" / "engine_layers_cpu.json"
EVIL = '<img src=x onerror="window.hit=1"><script>window.hit=2</script>\x1b[31m\u202eleft'
SEEN = EVIL.replace("\x1b", "␛").replace("\u202e", "\ufffd")
ENDLESS = "A" * 300_000  # Chromium takes a minute to break this in letters of several widths
# Of what is drawn, whatever ends right of the cell's output, in px.
_CLIPPED = """name => {
    const board = document.querySelector(name);
    const edge = board.closest('.jp-OutputArea').getBoundingClientRect().right;
    return [...board.querySelectorAll('*')]
        .filter(e => e.getBoundingClientRect().width && e.getBoundingClientRect().right > edge + 1)
        .map(e => `${e.tagName} ${e.textContent.slice(0, 40)}`);
}"""
_RUN = """async cells => {
    const panel = window.jupyterapp.shell.currentWidget;
    for (const index of cells) {
        panel.content.activeCellIndex = index;
        await window.jupyterapp.commands.execute('notebook:run-cell');
    }
}"""
_RESTART = "() => window.jupyterapp.shell.currentWidget.sessionContext.restartKernel()"
_MONITOR = """() => {
    const board = document.querySelector('.bw-serve');
    const stale = board.querySelector('.bw-serve-stale');
    return {
        state: board.dataset.state,
        title: board.querySelector('.bw-serve-title').textContent,
        status: board.querySelector('.bw-draft-status').textContent,
        stale: stale.hidden ? '' : stale.textContent,
        tiles: [...board.querySelectorAll('.bw-draft-tile')].map(e => e.dataset.label),
        left: [...board.querySelectorAll('.bw-draft-tile')].map(
            e => Math.round(e.getBoundingClientRect().left)),
        charts: [...board.querySelectorAll('.bw-serve-chart svg[role=img]')].map(
            e => e.getAttribute('aria-label')),
        wrong: [...board.querySelectorAll('.bw-serve-chart')].flatMap(chart => {
            const edge = chart.getBoundingClientRect();
            return [...chart.querySelectorAll('svg text')].filter(e => {
                const r = e.getBoundingClientRect();
                return r.left < edge.left - 1 || r.right > edge.right + 1;
            }).map(e => e.textContent);
        }),
    };
}"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("lab")
    with running_lab(folder) as server:
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


def written(lab: Lab, name: str, *cells: str) -> str:
    """A notebook of these cells, beside the others."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    book.metadata.kernelspec = {"name": "python3", "display_name": "x", "language": "python"}
    nbformat.write(book, lab.log.parent / "notebooks" / name)
    return name


def both_themes(notebook: Notebook, board: str, name: str, folder: Path) -> None:
    """Nothing is clipped, at two widths and in both themes; pictures of it."""
    page = notebook.page
    for theme in ("Dark", "Light"):
        notebook.theme(f"JupyterLab {theme}")
        for width in (1000, 1280):
            page.set_viewport_size({"width": width, "height": 1000})
            page.wait_for_timeout(300)
            assert page.evaluate(_CLIPPED, board) == [], (theme, width)
            page.screenshot(path=folder / f"{name}-{width}-{theme.lower()}.png")


@pytest.mark.full
def test_chat(lab: Lab, browser: "playwright.Browser", screenshots: Path) -> None:
    steps = (
        fake.stream(
            fake.delta(reasoning=EVIL), fake.delta(content=EVIL), fake.delta("stop"),
        ),
        fake.say(ENDLESS),
        fake.drips("word "),
        fake.document({"error": {"message": EVIL}}, code=401),
        fake.drips("word "),
    )  # fmt: skip
    with fake.serving(*steps) as server:
        code = f'from workbench import views\nboard = views.chat("{server.url}")\nboard'
        name = written(lab, "chat.ipynb", code)
        with open_notebook(browser, lab, name) as notebook:
            page = notebook.page
            page.evaluate(_RUN, [0])
            box, log = page.get_by_label("Message"), page.get_by_role("log")
            box.wait_for(timeout=30_000)
            assert log.bounding_box()["height"] < 100
            is_ready = "() => document.querySelector('.bw-chat').dataset.state === 'ready'"

            box.fill("hello")
            page.get_by_role("button", name="Send").click()
            notebook.until("() => document.querySelector('.bw-chat-foot')?.textContent")
            notebook.until(is_ready)
            assert log.locator(".bw-chat-answer > .bw-chat-text").text_content() == SEEN
            assert page.evaluate("window.hit") is None
            # The button was disabled meanwhile; the keyboard is not JupyterLab's by that.
            assert page.evaluate("document.activeElement.ariaLabel") == "Message"

            box.fill("on and on")
            begin = time.monotonic()
            box.press("Enter")
            notebook.until("() => document.querySelector('.bw-chat-more')", 20)
            notebook.until(is_ready, 20)
            assert time.monotonic() - begin < 15
            assert "200,000 letters more" in log.text_content()

            box.fill("drip")
            box.press("Enter")
            notebook.until("() => /word word/.test(document.querySelector('.bw-chat').innerText)")
            # The page has grown, the box is in sight and has the focus: Escape stops.
            page.keyboard.press("Escape")
            notebook.until(is_ready)
            assert "stopped here" in log.text_content()
            box.fill("key")
            box.press("Enter")
            notebook.until("() => document.querySelector('.bw-chat-error')")
            assert "wants an API key" in page.get_by_role("alert").text_content()
            assert box.input_value() == "key"
            both_themes(notebook, ".bw-chat", "chat", screenshots)

            # A kernel that is started anew is noticed, also where the page waits for it.
            box.press("Enter")
            notebook.until("() => document.querySelector('.bw-chat').dataset.state === 'writing'")
            page.evaluate(_RESTART)
            notebook.until("() => document.querySelector('.bw-chat').dataset.state === 'lost'")
            assert "run the cell again" in page.locator(".bw-chat-status").text_content()
            assert page.get_by_role("button", name="Send").is_disabled()
            assert notebook.errors == [], "the browser's console has errors"
            assert notebook.outside == [], "the page asked other hosts"


@pytest.mark.full
def test_monitor_and_layers(lab: Lab, browser: "playwright.Browser", screenshots: Path) -> None:
    layers = (
        "import json\nfrom workbench.serving.layers.engine_layers import engine_layers\n"
        f"kept = json.load(open({json.dumps(str(DATA))}))\n"
        "views.built_layers(engine_layers(kept, 'beam-tiny'), source='recorded')"
    )

    def read() -> dict[str, Any]:
        found: dict[str, Any] = notebook.page.evaluate(_MONITOR)
        return found

    def wait(condition: str, seconds: float = 20) -> dict[str, Any]:
        notebook.until(f"() => {{ const p = ({_MONITOR})(); return {condition}; }}", seconds)
        return read()

    with Child() as first:
        code = f'from workbench import views\nviews.serving("{first.url}", window="30 s")'
        name = written(lab, "monitor.ipynb", code, layers)
        with open_notebook(browser, lab, name) as notebook:
            page = notebook.page
            page.evaluate(_RUN, [0])
            page.locator(".bw-serve").wait_for(timeout=30_000)
            first.request([3, 0, 2])
            live = wait("p.tiles.length && p.status.includes('3 samples')")
            assert live["title"] == f"beam-tiny at {first.url}"
            assert live["tiles"][:6] == [
                "tokens/s", "TPOT p50", "TTFT p50", "acceptance length", "running",
                "KV cache in use",
            ]  # fmt: skip
            # In columns: a number that gets longer moves nothing.
            rows = len(set(live["left"]))
            assert rows < len(live["left"])
            assert live["left"][:rows] == sorted(live["left"][:rows])
            assert live["left"][rows:] == live["left"][: len(live["left"]) - rows]
            assert live["wrong"] == []

            first.kill()
            stale = wait("p.stale")
            assert stale["stale"].startswith("stale since ")
            assert "asked again by itself" in stale["stale"]
            assert "live" not in stale["status"]
            assert all("now" not in words for words in stale["charts"])
            both_themes(notebook, ".bw-serve", "monitor", screenshots)
            with Child(first.port):
                back = wait("!p.stale && p.status.includes('live')", 30)
                assert back["state"] == "running"

            # The table of layers: opening what is folded moves no column and breaks no word.
            page.set_viewport_size({"width": 1000, "height": 1000})
            page.evaluate(_RUN, [1])
            fold = page.locator("details summary").first
            fold.wait_for(timeout=20_000)
            columns = "() => [...document.querySelectorAll('.jp-RenderedHTMLCommon th')].map("
            columns += "e => Math.round(e.getBoundingClientRect().width))"
            before = page.evaluate(columns)
            fold.click()
            assert page.evaluate(columns) == before
            assert min(before[:4]) >= 100
            page.screenshot(path=screenshots / "layers-open.png")

            page.evaluate(_RESTART)
            wait("p.state === 'lost' && p.status.includes('run the cell again')")
            assert notebook.errors == [], "the browser's console has errors"
            assert notebook.outside == [], "the page asked other hosts"


def test_scale_of_a_chart(browser: "playwright.Browser") -> None:
    """Of values of several orders from one power of ten to another, otherwise from 0."""
    script = _script().replace("export default { render: renderServing };", "")
    page = browser.new_page()
    draw = f"""values => {{ {script}
        const chart = new TimeChart("T", [{{ name: "a", color: "red", dash: "" }}],
                                    {{ form: (v) => `${{v}} ms`, orders: 30 }});
        document.body.replaceChildren(chart.element);
        chart.update(values.map((v, n) => [n - values.length, v]), 0);
        const texts = [...chart.svg.querySelectorAll("text")].map((e) => e.textContent);
        const points = chart.svg.querySelector("path, polyline");
        return [texts.filter((t) => t.endsWith("ms")),
                (points.getAttribute("points") ?? points.getAttribute("d"))
                    .match(/-?[0-9.]+/g).map(Number).filter((_, n) => n % 2)]; }}"""
    try:
        marks, heights = page.evaluate(draw, [33, 330, 3300])
        assert [round(float(mark.split()[0])) for mark in marks] == [10, 100, 1000, 10000]
        # One power of ten is as high as the next.
        assert abs((heights[0] - heights[1]) - (heights[1] - heights[2])) < 0.5
        marks, heights = page.evaluate(draw, [10, 20, 30])
        assert marks == ["0 ms", "15 ms", "30 ms"]
        assert abs((heights[0] - heights[1]) - (heights[1] - heights[2])) < 0.5
    finally:
        page.close()
