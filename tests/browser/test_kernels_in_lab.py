"""The kernels notebook in JupyterLab in a real Chromium: choose, refuse, compare, stay alive."""

from pathlib import Path

import pytest

pytest.importorskip("jupyterlab")
playwright = pytest.importorskip("playwright.sync_api")
pytest.importorskip("triton")

from browser import test_notebooks_in_lab as shared  # noqa: E402
from browser.lab import Lab, Notebook, open_notebook  # noqa: E402

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

lab, browser, screenshots = shared.lab, shared.browser, shared.screenshots

_BOARD = "document.querySelector('.bw-kernels')"
_TABLE = f"{_BOARD}.querySelector('.bw-kernels-table').textContent"
_TABLE_TOP = f"{_BOARD}.querySelector('.bw-kernels-table').offsetTop"
_STOP = f"[...{_BOARD}.querySelectorAll('button')].find(b => b.textContent === 'Stop')"

# From the click on Apply until the table says what the menu said.
_TIME = f"""() => {{
    let start = 0;
    const now = () => {{ start = performance.now(); }};
    addEventListener('click', now, {{capture: true, once: true}});
    window.measured = new Promise(resolve => {{
        const look = () => {{
            if (start && {_TABLE}.includes('rms_norm–tritontriton'))
                resolve((performance.now() - start) / 1000);
            else requestAnimationFrame(look);
        }};
        look();
    }});
}}"""

# What passes the right edge of the board's cell and lies in nothing that scrolls.
_CUT_OFF = f"""() => {{
    const root = {_BOARD}, cut = [];
    const edge = root.closest('.jp-OutputArea-output').getBoundingClientRect().right + 1;
    const scrolls = node => node !== root
        && (getComputedStyle(node).overflowX === 'auto' || scrolls(node.parentElement));
    for (const node of root.querySelectorAll('*'))
        if (node.getBoundingClientRect().right > edge && !scrolls(node)
            && !node.closest('.js-plotly-plot'))
            cut.push(`${{node.tagName}}.${{node.className}}: ${{node.textContent.slice(0, 40)}}`);
    return cut;
}}"""


def choose(notebook: Notebook, name: str, label: str) -> None:
    menu = notebook.page.locator(".bw-kernels .widget-dropdown").filter(
        has=notebook.page.locator(f"label:text-is('{name}')")
    )
    menu.locator("select").select_option(label)


def press(notebook: Notebook, word: str) -> None:
    notebook.page.locator(f".bw-kernels button:text-is('{word}')").click()


@pytest.mark.full  # make test has the live board of 04
def test_kernels(lab: Lab, browser: "playwright.Browser", screenshots: Path) -> None:
    with open_notebook(browser, lab, "03_kernels.ipynb") as notebook:
        page = notebook.page
        notebook.run_all(180)
        assert notebook.cell_errors() == []
        shared.photograph(notebook, screenshots, "03")

        # A variant of the workbench is in the table within a second.
        page.locator(".bw-kernels").scroll_into_view_if_needed()
        choose(notebook, "rms_norm", "triton")
        page.evaluate(_TIME)
        press(notebook, "Apply")
        assert page.evaluate("window.measured") < 1

        # Variants of cells that ran later are in the menus; the wrong and the crashing stay out.
        below = page.evaluate(_TABLE_TOP)
        choose(notebook, "softcap", "far")
        choose(notebook, "router", "biased")
        press(notebook, "Apply")
        notebook.until(f"() => {_BOARD}.textContent.includes('biased of router')", 30)
        assert page.evaluate(_TABLE_TOP) == below  # the page does not move while something runs
        notebook.until(f"() => {_TABLE}.includes('far stays out')", 60)
        assert "biased stays out: refused by the gate" in page.evaluate(_TABLE)
        assert "2 not applied, see the table" in page.evaluate(f"{_BOARD}.textContent")
        assert "SIGSEGV" in page.evaluate(_TABLE)
        assert "softcap–torchtorch" in page.evaluate(_TABLE)

        # One that does not run here says so and is not chosen.
        label = page.evaluate(
            f"[...{_BOARD}.querySelectorAll('option')].map(o => o.textContent)"
            ".find(text => text.startsWith('✕'))"
        )
        choose(notebook, "qkvg", label)
        notebook.until(f"() => {_BOARD}.textContent.includes('does not run here')")

        # A beside B: progress while it runs, then the figure.
        press(notebook, "Compare A/B")
        notebook.until(f"() => /[AB]: (prefill|token)/.test({_BOARD}.textContent)", 30)
        notebook.until(f"() => !!{_BOARD}.querySelector('.js-plotly-plot .main-svg')", 60)
        notebook.until(f"() => {_STOP}.disabled")
        assert page.evaluate(_CUT_OFF) == []
        page.screenshot(path=screenshots / "03-board.png")

        press(notebook, "All reference")
        notebook.until(f"() => !{_TABLE}.includes('triton')")
        shared.assert_quiet(notebook)
