"""Both notebooks in JupyterLab in a real Chromium: what the page shows is what Python computes."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jupyterlab")
playwright = pytest.importorskip("playwright.sync_api")

import torch  # noqa: E402

import workbench  # noqa: E402
from browser.lab import CHROMIUM_FLAGS, Lab, Notebook, open_notebook, running_lab  # noqa: E402
from workbench.model.beam import Beam  # noqa: E402
from workbench.model.inspect import Capture  # noqa: E402

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

# The prompts of the notebooks' cells.
WRITE_PROMPT = 'class Stack:\n    """A last-in, first-out list."""'
LIVE_PROMPT = "def fibonacci(n):"
SAMPLING = workbench.Sampling(temperature=0.7, top_p=0.95, seed=0)
EXPLORED = (
    'def mean(values):\n    """Return the arithmetic mean of some numbers."""\n'
    "    return sum(values) / len(values)"
)

_STATUS = "document.querySelector('.bw-live-status').textContent"
_WRITTEN = "document.querySelector('.bw-live-written')"
_EXPLORER = """() => {
    const widget = document.querySelector('.bw-explore-readout')?.closest('.widget-vbox');
    return widget?.querySelector('.js-plotly-plot');
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
def beam() -> Iterator[Beam]:
    """The model in this process, with as many threads as the notebooks' kernels have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield workbench.load("beam-tiny")
    torch.set_num_threads(threads)


def photograph(notebook: Notebook, folder: Path, name: str) -> None:
    for theme in ("Light", "Dark"):
        notebook.theme(f"JupyterLab {theme}")
        notebook.photograph(folder, f"{name}-{theme.lower()}")
    notebook.theme("JupyterLab Light")


def assert_plots_are_whole(notebook: Notebook, least: int) -> None:
    """So many plots, none flattened by JupyterLab's resizing of what it shows, none clipped.

    Call it after the window has changed its size, which is when plots are resized.
    """
    plots = notebook.page.evaluate(
        """() => [...document.querySelectorAll('.js-plotly-plot')].map(plot => {
            const svg = plot.querySelector('.main-svg').getBoundingClientRect();
            const page = plot.closest('.jp-OutputArea').getBoundingClientRect();
            return [svg.height, page.right - svg.right];
        })"""
    )
    assert len(plots) >= least
    for height, room in plots:
        assert height >= 200
        assert room >= 0


def assert_quiet(notebook: Notebook) -> None:
    assert notebook.cell_errors() == []
    assert notebook.errors == [], "the browser's console has errors"
    assert notebook.outside == [], "the page asked other hosts"


def live_text(notebook: Notebook) -> str:
    return str(notebook.page.evaluate(f"() => {_WRITTEN}.textContent"))


def decode(beam: Beam, prompt: str, count: int, **options: Any) -> str:
    """The first ``count`` tokens as text, decoded in this process."""
    tokens = workbench.stream(beam, prompt, max_new_tokens=count, **options)
    return "".join(token.text for token in tokens)


@pytest.mark.full  # make test has the live board of 04
def test_start_here(lab: Lab, browser: "playwright.Browser", beam: Beam, screenshots: Path) -> None:
    with open_notebook(browser, lab, "00_start_here.ipynb") as notebook:
        page = notebook.page
        notebook.run_all()

        # Two layer strips; what was written stands in the page, word for word.
        notebook.until(
            "() => document.querySelectorAll('.jp-RenderedPlotly .main-svg').length >= 2"
        )
        texts = page.locator(".jp-RenderedHTMLCommon").all_text_contents()
        written = WRITE_PROMPT + decode(beam, WRITE_PROMPT, 96)
        assert any(written in text for text in texts)

        # Live generation starts by itself when it is shown. Stop it on its way.
        page.locator(".bw-live").scroll_into_view_if_needed()
        start, stop = (page.locator(".bw-live-button").nth(i) for i in (0, 1))
        notebook.until(f"() => {_WRITTEN}.childElementCount >= 20", 60)
        stop.click()
        check_stopped(notebook, beam)

        # Start anew: the same beginning. An interrupt of the kernel, idle by now, ends it too.
        start.click()
        notebook.until(f"() => !{_STATUS}.includes('stopped')")
        notebook.until(f"() => {_WRITTEN}.childElementCount >= 10", 60)
        notebook.command("notebook:interrupt-kernel")
        check_stopped(notebook, beam)

        photograph(notebook, screenshots, "00")
        assert_plots_are_whole(notebook, least=2)

        # Another prompt, which the page must show as text.
        hostile = "<img src=x onerror=document.title='hit'>"
        page.locator(".bw-live-prompt").fill(hostile)
        start.click()
        notebook.until(
            "text => document.querySelector('.bw-live-given').textContent === text",
            argument=hostile,
        )
        notebook.until(f"() => {_WRITTEN}.childElementCount > 0", 60)
        stop.click()
        assert page.locator(".bw-live img").count() == 0
        assert page.title() != "hit"

        assert_quiet(notebook)

        # A new kernel knows nothing of this view: what is pressed is answered, not lost.
        page.evaluate(
            "async () => {"
            " await window.jupyterapp.shell.currentWidget.sessionContext.restartKernel(); }"
        )
        start.click()
        notebook.until(f"() => {_STATUS}.includes('the kernel has ended')")
        assert start.is_disabled()
        assert stop.is_disabled()


def check_stopped(notebook: Notebook, beam: Beam) -> None:
    """It says so, stays so, and what stands there is the beginning of what Python decodes."""
    notebook.until(f"() => {_STATUS}.includes('stopped')")
    text = live_text(notebook)
    said = re.match(
        r"([\d,]+) tokens · ([\d,]+) tokens/s", notebook.page.evaluate(f"() => {_STATUS}")
    )
    assert said is not None
    count, speed = (int(number.replace(",", "")) for number in said.groups())
    assert speed > 0
    assert notebook.page.evaluate(f"() => {_WRITTEN}.childElementCount") == count
    assert text == decode(beam, LIVE_PROMPT, count, sampling=SAMPLING)
    notebook.page.wait_for_timeout(400)
    assert live_text(notebook) == text, "tokens arrived after the stop"


def shown(notebook: Notebook) -> str:
    return str(
        notebook.page.evaluate("() => document.querySelector('.bw-explore-readout').textContent")
    )


def expected_lines(
    seen: Capture,
    beam: Beam,
    layer: int,
    head: int | None,
) -> list[str]:
    """The explorer's figures, worked out here from the captured tensors alone."""
    maps = seen.attention[layer].double().numpy()
    chosen = maps.mean(0) if head is None else maps[head]
    size = len(chosen)
    distance = sum(chosen[q, k] * (q - k) for q in range(size) for k in range(q + 1)) / (size - 1)
    assert seen.hidden is not None
    stream = seen.hidden[layer + 1][1:].double().numpy()
    rms = (stream**2).mean() ** 0.5
    hidden = seen.hidden[layer + 1][-1].to(beam.dtype)
    scaled = hidden / (hidden.square().mean() + beam.config.rms_norm_eps).sqrt() * beam.norm
    p = beam.logits(scaled[None])[0].softmax(-1)
    best = int(p.argmax())
    assert beam.tokenizer is not None
    return [
        f"looks back {distance:.1f} tokens on average",
        f"attention {chosen[1:, 0].mean():.2f} on the first token",
        f"{chosen.diagonal()[1:].mean():.2f} on itself",
        f"RMS {rms:.3f}",
        f"{beam.tokenizer.token_text(best)} {float(p[best]):.2f}",
    ]


@torch.inference_mode()
@pytest.mark.full  # make test has the live board of 04
def test_inside_beam(
    lab: Lab,
    browser: "playwright.Browser",
    beam: Beam,
    screenshots: Path,
) -> None:
    seen = workbench.capture(beam, EXPLORED, attention=True)
    with open_notebook(browser, lab, "01_inside_beam.ipynb") as notebook:
        page = notebook.page
        notebook.run_all()
        page.locator(".bw-explore-readout").scroll_into_view_if_needed()
        notebook.until(f"() => !!({_EXPLORER})()?.querySelector('.main-svg')", 60)
        for line in expected_lines(seen, beam, 2, None):
            assert line in shown(notebook)
        notebook.until(
            f"""() => {{
                const plot = ({_EXPLORER})();
                const box = plot.closest('.widget-vbox').getBoundingClientRect();
                const svg = plot.querySelector('.main-svg').getBoundingClientRect();
                return Math.abs(svg.width - box.width) < 24 && svg.height > 400;
            }}"""
        )
        chosen = page.locator(".widget-dropdown select").first
        label = chosen.evaluate("list => list.selectedOptions[0]?.text ?? ''")
        assert label.split() == ["mean", "over", "heads"]

        # Move the slider with the keyboard, as a hand would.
        handle = page.locator(".widget-slider .noUi-handle").first
        handle.focus()
        for layer in (3, 4):
            handle.press("ArrowRight")
            notebook.until(
                "text => document.querySelector('.bw-explore-readout').textContent.includes(text)",
                argument=f"layer {layer} (",
            )
            for line in expected_lines(seen, beam, layer, None):
                assert line in shown(notebook)

        # Another head; the plot holds the very numbers, hidden keys left out.
        page.locator(".widget-dropdown select").first.select_option("head 1")
        notebook.until(
            "() => document.querySelector('.bw-explore-readout').textContent.includes('head 1')"
        )
        for line in expected_lines(seen, beam, 4, 1):
            assert line in shown(notebook)
        last = seen.attention[4][1][-1]
        drawn = notebook.until(
            f"""wanted => {{
                const rows = ({_EXPLORER})()?.data?.[0]?.z;
                if (!rows) return false;  // not drawn yet
                const last = Array.from(rows[rows.length - 1]);
                return Math.abs(last[last.length - 1] - wanted) < 1e-6 && last;
            }}""",
            argument=float(last[-1]),
        )
        assert drawn == pytest.approx(last.tolist(), abs=1e-6)

        photograph(notebook, screenshots, "01")
        assert_plots_are_whole(notebook, least=8)
        assert_quiet(notebook)
