"""The KV-cache notebook in JupyterLab in a real Chromium: sliders, command, export, refusals."""

import csv
import io
import statistics
from pathlib import Path

import pytest

pytest.importorskip("jupyterlab")
playwright = pytest.importorskip("playwright.sync_api")

from browser import test_notebooks_in_lab as shared  # noqa: E402
from browser.lab import Lab, Notebook, open_notebook, running_lab  # noqa: E402

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

lab, browser, screenshots = shared.lab, shared.browser, shared.screenshots

SLOWEST = 0.25  # seconds from a key on a slider to the changed page
_ROUNDS = 4  # at most: whatever else runs on this machine slows a round as a whole
_DASHBOARD = """document.querySelector('.bw-kv-accounts').closest('.widget-vbox')"""
_PLOT = f"{_DASHBOARD}.querySelector('.js-plotly-plot')"
_COMMAND = f"{_DASHBOARD}.querySelector('.bw-kv-text').textContent"

# From the key that moves the slider until the command, the marker line and the heading of the plot
# all show the value that the slider's own readout shows by then.
_TIME = f"""() => {{
    const readout = {_DASHBOARD}.querySelector('.widget-slider .widget-readout');
    const before = readout.textContent;
    let start = 0;
    const now = () => {{ start = performance.now(); }};
    addEventListener('keydown', now, {{capture: true, once: true}});
    window.measured = new Promise(resolve => {{
        const look = () => {{
            const words = readout.textContent, number = Number(words.replaceAll(',', ''));
            const plot = {_PLOT};
            if (start && words !== before
                && {_COMMAND}.includes(`--max-model-len ${{number}} `)
                && plot.data[5].x[0] === number
                && plot.layout.annotations[0].text.includes(`${{words}} tokens`)) {{
                resolve([number, (performance.now() - start) / 1000]);
            }} else requestAnimationFrame(look);
        }};
        look();
    }});
}}"""


# What passes the right edge of the dashboard's cell and lies in nothing that scrolls; headings and
# legends that pass their plot's edge or lie on one another; menus too narrow for what they show.
_CUT_OFF = f"""() => {{
    const cut = [], root = {_DASHBOARD}, plot = {_PLOT};
    const edge = root.closest('.jp-OutputArea-output').getBoundingClientRect().right + 1;
    const scrolls = node => node !== root
        && (getComputedStyle(node).overflowX === 'auto' || scrolls(node.parentElement));
    for (const node of root.querySelectorAll('*'))
        if (node.getBoundingClientRect().right > edge && !scrolls(node)
            && !node.closest('.js-plotly-plot'))
            cut.push(`${{node.tagName}}.${{node.className}}: ${{node.textContent.slice(0, 40)}}`);
    const svg = plot.querySelector('.main-svg').getBoundingClientRect();
    const words = [...plot.querySelectorAll('.annotation, .legend .traces .legendtext')];
    const boxes = words.map(node => node.getBoundingClientRect());
    boxes.forEach((box, i) => {{
        if (box.right > svg.right) cut.push(`beyond the plot: ${{words[i].textContent}}`);
        boxes.slice(0, i).forEach((other, j) => {{
            if (Math.min(box.right, other.right) - Math.max(box.left, other.left) > 1
                && Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top) > 3)
                cut.push(`${{words[i].textContent}} on ${{words[j].textContent}}`);
        }});
    }});
    const pen = document.createElement('canvas').getContext('2d');
    for (const menu of root.querySelectorAll('select')) {{
        const style = getComputedStyle(menu);
        pen.font = style.font;
        const arrow = 20, shown = menu.selectedOptions[0].textContent;
        if (pen.measureText(shown).width + parseFloat(style.paddingLeft) + arrow
            > menu.clientWidth) cut.push(`menu too narrow: ${{shown}}`);
    }}
    return cut;
}}"""


def admission(context: int) -> int:
    """Bytes on one of 8 GPUs: 8 sequences, FP8, TP8, 8192 batched tokens twice in flight."""
    sliding = -(-(511 + 16384) // 16) + 1 if context > 511 + 16384 else -(-context // 16) + 1
    blocks = 5 * sliding + -(-context // 16)
    return 8 * blocks * 9 * 16 * 2 * 128


def gib(count: float) -> str:
    return f"{count / 2**30:,.2f} GiB"


def heading(notebook: Notebook, panel: int) -> str:
    return str(notebook.page.evaluate(f"i => {_PLOT}.layout.annotations[i].text", panel))


def choose(notebook: Notebook, name: str, label: str) -> None:
    menu = notebook.page.locator(".widget-dropdown").filter(
        has=notebook.page.locator(f"label:text-is('{name}')")
    )
    menu.locator("select").select_option(label)


@pytest.mark.full
def test_kv_cache(
    lab: Lab, browser: "playwright.Browser", screenshots: Path, tmp_path: Path
) -> None:
    with open_notebook(browser, lab, "02_kv_cache.ipynb") as notebook:
        page = notebook.page
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        notebook.run_all()
        shared.photograph(notebook, screenshots, "02")

        page.locator(".bw-kv-accounts").scroll_into_view_if_needed()
        notebook.until(f"() => !!{_PLOT}?.querySelector('.main-svg')", 60)
        assert gib(admission(131072)) == "3.70 GiB"
        assert gib(admission(131072)) in heading(notebook, 0)

        # The context slider by the keyboard: what it costs is on the page at once.
        handle = page.locator(".widget-slider .noUi-handle").first
        handle.focus()
        medians: list[float] = []
        for _ in range(_ROUNDS):
            times = []
            for key in ("ArrowRight",) * 4 + ("ArrowLeft",) * 5:
                page.evaluate(_TIME)
                handle.press(key)
                context, seconds = page.evaluate("() => window.measured")
                times.append(seconds)
                assert gib(admission(context)) in heading(notebook, 0)
            medians.append(statistics.median(times))
            if medians[-1] < SLOWEST:
                break
        print(f"slider to page, median of a round: {', '.join(f'{m:.3f} s' for m in medians)}")
        assert min(medians) < SLOWEST

        # The plot holds the bytes of the engine's bound at the end of its axis.
        end = page.evaluate(f"() => {_PLOT}.layout.xaxis.range[1]")
        parts = page.evaluate(f"() => [0, 1, 2, 3].map(i => Array.from({_PLOT}.data[i].y).at(-1))")
        unit = 2**30 if "GiB" in page.evaluate(f"() => {_PLOT}.layout.yaxis.title.text") else 2**20
        assert sum(parts) * unit == pytest.approx(admission(end), rel=1e-9)

        # The drafter comes with its layers, its groups and its part of the command.
        page.get_by_label("DFlash2 drafter").check()
        notebook.until(f"() => {_COMMAND}.includes('--speculative-config')")
        assert "1 group of 5 drafter" in groups_line(notebook)
        notebook.until(f"() => {_PLOT}.data[1].showlegend === true")

        # What cannot be planned is one sentence; the controls stay, and so does what was shown.
        choose(notebook, "GPUs", "72")
        notebook.until(f"() => {_COMMAND}.includes('--data-parallel-size')")
        before = page.evaluate(f"() => {_COMMAND}")
        choose(notebook, "experts", "sliced")
        notebook.until("() => document.querySelector('.bw-kv-problem')?.textContent.length > 20")
        assert "moe_intermediate_size" in page.locator(".bw-kv-problem").text_content()
        assert page.evaluate(f"() => {_COMMAND}") == before
        choose(notebook, "GPUs", "8")
        notebook.until("() => !document.querySelector('.bw-kv-problem')")
        choose(notebook, "TP", "4")
        notebook.until(f"() => {_COMMAND}.includes('--tensor-parallel-size 4 ')")

        # Copy: from the dashboard, and from the table, which is a page without a widget.
        page.get_by_role("button", name="Copy command").click()
        notebook.until("() => document.querySelector('.bw-kv-said').textContent === 'copied'")
        copied = page.evaluate("() => navigator.clipboard.readText()")
        assert copied == page.evaluate(f"() => {_COMMAND}")
        details = page.locator(".jp-RenderedHTMLCommon details").first
        details.locator("summary").click()
        details.get_by_role("button").click()
        notebook.until(
            "() => document.querySelector('.jp-RenderedHTMLCommon details button')"
            ".textContent === 'Copied'"
        )
        assert page.evaluate("() => navigator.clipboard.readText()").startswith("vllm serve")

        # Export: the same table as a download and as a file in the notebook's folder.
        page.get_by_role("button", name="Export layers").click()
        with page.expect_download() as download:
            page.locator(".bw-kv-link").click()
        saved = tmp_path / "layers.csv"
        download.value.save_as(saved)
        rows = list(csv.DictReader(io.StringIO(saved.read_text("utf-8"))))
        assert len(rows) == 52 + 5
        assert {row["tp_ranks"] for row in rows} == {"4"}
        written = page.locator(".bw-kv-said").text_content() or ""
        assert "also written to" in written
        assert Path(written.split("also written to ")[1]).read_text("utf-8") == saved.read_text(
            "utf-8"
        )

        # Run again, the cell shows another dashboard, and the first one's page goes quietly.
        for _ in range(2):
            run_again(notebook)
        for theme in ("Light", "Dark"):
            notebook.theme(f"JupyterLab {theme}")
            page.locator(".bw-kv-command").scroll_into_view_if_needed()
            page.wait_for_timeout(400)
            page.screenshot(path=screenshots / f"02-dashboard-end-{theme.lower()}.png")
        shared.assert_plots_are_whole(notebook, least=4)
        shared.assert_quiet(notebook)


@pytest.mark.full
def test_kv_cache_on_a_narrow_page(
    browser: "playwright.Browser", screenshots: Path, tmp_path: Path
) -> None:
    # A server of its own: on the shared one the notebook's earlier kernel would still be running.
    with running_lab(tmp_path) as lab, open_notebook(browser, lab, "02_kv_cache.ipynb") as notebook:
        page = notebook.page
        page.set_viewport_size({"width": 1000, "height": 1900})
        notebook.run_all()
        page.locator(".bw-kv-accounts").scroll_into_view_if_needed()
        notebook.until(f"() => !!{_PLOT}?.querySelector('.main-svg')", 60)
        page.get_by_label("DFlash2 drafter").check()
        choose(notebook, "KV dtype", "bf16")
        naive = gib(8 * 52 * 131_072 * 2 * 128 * 2)
        notebook.until(f"() => {_PLOT}.layout.annotations[0].text.includes('{naive}')"
                       f" && {_PLOT}.data[1].showlegend === true")  # fmt: skip
        page.wait_for_timeout(600)
        for theme in ("Light", "Dark"):
            notebook.theme(f"JupyterLab {theme}")
            page.wait_for_timeout(400)
            page.screenshot(path=screenshots / f"02-dashboard-narrow-{theme.lower()}.png")
        assert page.evaluate(_CUT_OFF) == []
        # The plans have more columns than there is room for: they scroll to the last.
        inside, whole = page.evaluate(
            "() => { const box = document.querySelector('.bw-kv-plans table').parentElement;"
            " return [box.clientWidth, box.scrollWidth]; }"
        )
        assert whole > inside > 300
        shared.assert_quiet(notebook)


def run_again(notebook: Notebook) -> None:
    """Run the dashboard's cell once more and wait for the plot of the new one."""
    notebook.page.evaluate(f"() => {{ {_PLOT}.dataset.before = 'yes'; }}")
    notebook.page.evaluate(
        """() => {
            const content = window.jupyterapp.shell.currentWidget.content;
            content.activeCellIndex = content.widgets.findIndex(
                cell => cell.model.sharedModel.getSource().includes('size_memory('));
        }"""
    )
    notebook.command("notebook:run-cell")
    notebook.until(
        f"() => document.querySelector('.bw-kv-accounts') && {_PLOT}?.querySelector('.main-svg')"
        # It is drawn, and drawn anew once it is on the page.
        f" && !{_PLOT}.dataset.before && {_PLOT}.layout.meta?.views",
        60,
    )


def groups_line(notebook: Notebook) -> str:
    text = notebook.page.locator(".bw-kv-accounts").text_content() or ""
    return text.split(" in the engine: ")[1]
