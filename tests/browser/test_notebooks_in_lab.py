"""Both notebooks in JupyterLab in a real Chromium: what the page shows is what Python computes."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("jupyterlab")
playwright = pytest.importorskip("playwright.sync_api")

import torch  # noqa: E402

import workbench  # noqa: E402
from browser.lab import CHROMIUM_FLAGS, Lab, Notebook, open_notebook, running_lab  # noqa: E402

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

LIVE_PROMPT = "def fibonacci(n):\n"  # those of 00_start_here, cells "write" and "live"
WRITE_PROMPT = "def read_lines(path):\n"
SAMPLING = workbench.Sampling(temperature=0.7, top_p=0.95, seed=3)
EXPLORED = "def mean(values):\n    return sum(values) / len(values)"  # that of 01_inside_beam

_LIVE = "() => document.querySelector('.bw-live-status')?.textContent"
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
def beam() -> workbench.model.beam.Beam:
    return workbench.load("beam-tiny")


def photograph(notebook: Notebook, folder: Path, name: str) -> None:
    for theme in ("Light", "Dark"):
        notebook.theme(f"JupyterLab {theme}")
        notebook.photograph(folder / f"{name}-{theme.lower()}.png")
    notebook.theme("JupyterLab Light")


def assert_quiet(notebook: Notebook) -> None:
    assert notebook.cell_errors() == []
    assert notebook.errors == [], "the browser's console has errors"
    assert notebook.outside == [], "the page asked other hosts"


def status_of(notebook: Notebook) -> str:
    return str(notebook.page.evaluate(_LIVE))


def live_text(notebook: Notebook) -> str:
    return str(
        notebook.page.evaluate("() => document.querySelector('.bw-live-written').textContent")
    )


def test_start_here(
    lab: Lab,
    browser: "playwright.Browser",
    beam: workbench.model.beam.Beam,
    screenshots: Path,
) -> None:
    live_tokens = list(workbench.stream(beam, LIVE_PROMPT, max_new_tokens=600, sampling=SAMPLING))
    whole = "".join(token.text for token in live_tokens)
    written = "".join(t.text for t in workbench.stream(beam, WRITE_PROMPT, max_new_tokens=72))
    with open_notebook(browser, lab, "00_start_here.ipynb") as notebook:
        page = notebook.page
        notebook.run_all()

        # Two layer strips; what was written stands in the page, word for word.
        page.wait_for_function(
            "() => document.querySelectorAll('.jp-RenderedPlotly .main-svg').length >= 2"
        )
        texts = page.locator(".jp-RenderedHTMLCommon").all_text_contents()
        assert any(WRITE_PROMPT + written in text for text in texts)

        # Live generation started by itself when it was shown, and runs to its end.
        page.locator(".bw-live").scroll_into_view_if_needed()
        notebook.until(_ended(live_tokens), 60)
        assert live_text(notebook) == whole
        count = re.match(r"([\d,]+) tokens", status_of(notebook))
        assert count is not None
        assert int(count[1].replace(",", "")) == len(live_tokens)

        # Start and stop at once: what is there is the beginning of the same text.
        start, stop = (page.locator(".bw-live-button", has_text=t) for t in ("art", "Stop"))
        start.click()
        notebook.until("() => document.querySelector('.bw-live-written').childElementCount > 0")
        stop.click()
        notebook.until(
            "() => document.querySelector('.bw-live-status').textContent.includes('stopped')"
        )
        part = live_text(notebook)
        assert whole.startswith(part)
        assert 0 < len(part) < len(whole)
        page.wait_for_timeout(400)
        assert live_text(notebook) == part, "tokens arrived after the stop"

        # An interrupt of the idle kernel stops it as well.
        start.click()
        notebook.until("() => document.querySelector('.bw-live-written').childElementCount > 0")
        page.wait_for_timeout(300)
        notebook.command("notebook:interrupt-kernel")
        notebook.until(
            "() => document.querySelector('.bw-live-status').textContent.includes('stopped')"
        )

        # Another prompt, which the page must show as text.
        hostile = "<img src=x onerror=document.title='hit'>"
        page.locator(".bw-live-prompt").fill(hostile)
        start.click()
        notebook.until(
            "text => document.querySelector('.bw-live-given').textContent === text",
            argument=hostile,
        )
        stop.click()
        assert page.locator(".bw-live img").count() == 0
        assert page.title() != "hit"

        photograph(notebook, screenshots, "00")
        assert_quiet(notebook)


def _ended(tokens: list[workbench.model.generate.Token]) -> str:
    word = "ended by the model" if tokens[-1].finished == "eos" else "limit of"
    return f"() => document.querySelector('.bw-live-status').textContent.includes('{word}')"


def shown(notebook: Notebook) -> str:
    return str(
        notebook.page.evaluate("() => document.querySelector('.bw-explore-readout').textContent")
    )


def expected_lines(
    seen: workbench.model.inspect.Capture,
    beam: workbench.model.beam.Beam,
    layer: int,
    head: int | None,
) -> list[str]:
    """The explorer's figures, worked out here from the captured tensors alone."""
    maps = seen.attention[layer].double().numpy()
    chosen = maps.mean(0) if head is None else maps[head]
    size = len(chosen)
    distance = sum(chosen[q, k] * (q - k) for q in range(size) for k in range(q + 1)) / size
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
        f"first token, {chosen.diagonal().mean():.2f} on itself",
        f"RMS {rms:.3f}",
        f"{beam.tokenizer.token_text(best)} {float(p[best]):.2f}",
    ]


@torch.inference_mode()
def test_inside_beam(
    lab: Lab,
    browser: "playwright.Browser",
    beam: workbench.model.beam.Beam,
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
                const row = ({_EXPLORER})().data[0].z.at(-1);
                const last = Array.from(row._inputArray ?? row);
                return Math.abs(last.at(-1) - wanted) < 1e-6 && last;
            }}""",
            argument=float(last[-1]),
        )
        assert drawn == pytest.approx(last.tolist(), abs=1e-6)

        # Every picture of the notebook is there.
        plots = page.evaluate("() => document.querySelectorAll('.js-plotly-plot .main-svg').length")
        assert plots >= 8
        photograph(notebook, screenshots, "01")
        assert_quiet(notebook)
