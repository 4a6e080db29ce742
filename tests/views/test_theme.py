"""The one look: contrast on both themes, text that follows them, escaping, scales."""

import re

import pytest

from workbench.views import theme

# JupyterLab 4's page colours, and its widest use of grey in the dark theme.
LIGHT, DARK = "#ffffff", "#111111"


def luminance(color: str) -> float:
    """Relative luminance of WCAG 2.1."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("page", [LIGHT, DARK])
def test_marks_stand_out_on_both_themes(page: str) -> None:
    for color in (theme.SLIDING, theme.FULL, theme.SPARSE, theme.DENSE, theme.HEAT):
        assert contrast(color, page) >= 3  # WCAG 1.4.11, graphical objects
    assert contrast(theme.NEUTRAL, page) >= 4.2  # tick labels, the only text of a fixed colour


def test_a_thing_has_one_colour() -> None:
    colors = [*theme.ATTENTION.values(), *theme.MLP.values(), theme.HEAT, theme.NEUTRAL]
    assert len(set(colors)) == len(colors)


def test_read_text_takes_the_pages_colour() -> None:
    assert (
        theme.ink("loss")
        == f'<span style="color:var(--jp-ui-font-color1,{theme.NEUTRAL})">loss</span>'
    )
    assert "--jp-ui-font-color2" in theme.ink("aside", faint=True)


def test_figures_are_transparent_and_text_has_three_sizes() -> None:
    layout = theme.TEMPLATE.layout
    assert layout.paper_bgcolor == layout.plot_bgcolor == "rgba(0,0,0,0)"
    sizes = set(re.findall(r"'size': (\d+)", str(layout.to_plotly_json())))
    assert sizes == {str(s) for s in (theme.TITLE, theme.TEXT, theme.SMALL)}


def test_scales_start_from_nothing_and_end_in_full() -> None:
    for scale in (theme.scale(), theme.linear_scale()):
        stops = [stop for stop, _ in scale]
        opacities = [float(color.rstrip(")").split(",")[3]) for _, color in scale]
        assert (stops[0], stops[-1], opacities[0], opacities[-1]) == (0, 1, 0, 1)
        assert stops == sorted(stops)
        assert opacities == sorted(opacities)
    for stop, color in theme.scale():
        assert float(color.rstrip(")").split(",")[3]) ** 3 == pytest.approx(stop, abs=1e-4)
    low, middle, high = theme.diverging_scale()
    assert middle == (0.5, theme.rgba(theme.NEUTRAL, 0))
    assert low[1] != high[1]


def test_a_long_subtitle_takes_lines_and_its_figure_the_room_for_them() -> None:
    short = theme.figure("t", "modelled", height=200)
    words = " ".join(["a <b>"] * 30)  # 179 characters
    long = theme.figure("t", words, height=200, margin={"l": 10, "t": 90})
    text = long.layout.title.subtitle.text
    assert "<b>" not in text
    lines = re.sub("</?span[^>]*>", "", text).split("<br>")
    assert " ".join(lines) == words.replace("<b>", "&lt;b&gt;")
    assert len(lines) == 3
    assert short.layout.height == 200
    assert long.layout.height - 200 == long.layout.margin.t - 90 > 0
    assert long.layout.margin.l == 10


def test_titles_start_at_the_edge_of_the_figure_whatever_its_margin() -> None:
    title = theme.TEMPLATE.layout.title
    assert (title.x, title.xref, title.xanchor) == (0, "container", "left")
    assert title.pad.l == theme.PAD < 10


@pytest.mark.parametrize("words", ["modelled", " ".join(["modelled"] * 25)])
def test_a_legend_under_the_title_starts_below_the_subtitle(words: str) -> None:
    fig = theme.figure("t", words, height=300, legend_under_title=True, legend={"entrywidth": 9})
    legend, layout = fig.layout.legend, fig.layout
    # Both of the container: plotly then moves the panels down by what the legend takes.
    assert (legend.xref, legend.yref, legend.yanchor) == ("container", "container", "top")
    assert legend.entrywidth == 9
    lines = layout.title.subtitle.text.count("<br>") + 1
    # The title's pad and line, its gap to the subtitle, then 16 px a line
    assert (1 - legend.y) * layout.height == pytest.approx(40 + 16 * lines, abs=0.5)


def test_remarks_of_a_subtitle_begin_no_line_with_their_dot() -> None:
    words = f"{'a' * 40} {'b' * 38} · {'c' * 30}"  # the dot is the 81st letter
    text = theme.figure("t", words, height=200).layout.title.subtitle.text
    lines = re.sub("</?span[^>]*>", "", text).split("<br>")
    assert lines == ["a" * 40, f"{'b' * 38} · {'c' * 30}"]


def test_folded_breaks_after_commas_first() -> None:
    assert theme.folded("decode, batch 1, before it", 20) == ["decode, batch 1,", "before it"]
    assert theme.folded("one two three four", 9) == ["one two", "three", "four"]
    for text in ("a, b, c", "decode, batch 64, context 32,768", "x" * 30):
        for width in (8, 16, 40):
            lines = theme.folded(text, width)
            assert max(map(len, lines)) <= width
            assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_token_labels_are_short_and_escaped() -> None:
    assert theme.token_label("<script>") == "&lt;script&gt;"
    assert theme.token_label("\"a\" & 'b'") == "\"a\" &amp; 'b'"
    assert theme.token_label("⏎········") == "⏎·×8"
    assert theme.token_label("····") == "····"
    assert theme.token_label("abcdefghijklmnop", 6) == "abcde…"
    # What is cut off is text, not half an entity.
    assert theme.token_label("<<<<<<<<", 4) == "&lt;&lt;&lt;…"
