"""The page of a running engine's layers: differences by word and colour, texts escaped."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest

from serving.stand_in_worker import StandInEngine, StandInWorker, TritonAttentionBackend
from workbench.model.config import BeamConfig
from workbench.model.drafter_config import DFlash2Config
from workbench.model.sizing import size_kv
from workbench.serving.layers.engine_layers import EngineLayers, engine_layers
from workbench.views import theme
from workbench.views.engine_layers import built_layers
from workbench.views.view import View

HOSTILE = "<script>alert(1)</script>"
KINDS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
CONFIG: dict[str, Any] = {
    "model_type": "beam", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
    "moe_intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2,
    "layer_types": KINDS, "mlp_layer_types": ["dense"] + ["sparse"] * 3, "sliding_window": 24,
    "max_position_embeddings": 512,
}  # fmt: skip
DRAFTER: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 12,
    "max_position_embeddings": 512, "conv_kernel_size": 2, "conv_group_size": 8,
    "dflash_config": {
        "target_layer_ids": [0, 2], "mask_token_id": 1, "conv_kernel_size": 2,
        "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 4,
        "final_logit_softcapping": 30.0,
    },
}  # fmt: skip
GROUPS = [[0], [2], [3], [1], [4]]  # one full layer: groups of one; the drafter's last
MODEL, DRAFT = BeamConfig.from_dict(CONFIG), DFlash2Config.from_dict(DRAFTER)


def worker(**changes: Any) -> StandInWorker:
    return StandInWorker(CONFIG, GROUPS, drafter=DRAFTER, **changes)


def asked(*workers: StandInWorker, **named: Any) -> EngineLayers:
    return engine_layers(StandInEngine(*workers), MODEL, drafter=DRAFT, **named)


def tables(view: View) -> list[list[list[str]]]:
    """Cells of every table of the page as text, without the fields behind a click and without the
    rows of one cell beneath others."""
    assert view.html is not None
    html = re.sub(r"<details.*?</details>", "", view.html, flags=re.DOTALL)
    found = []
    for table in re.findall(r"<table.*?</table>", html, re.DOTALL):
        rows = re.findall(r"<tr.*?</tr>", table, re.DOTALL)
        found.append([
            [unescape(re.sub(r"<[^>]+>", " ", cell)).strip()
             for cell in re.findall(r"<t[dh].*?</t[dh]>", row, re.DOTALL)]
            for row in rows if "colspan" not in row
        ])  # fmt: skip
    return found


def test_layers_that_are_alike_are_one_row() -> None:
    value = asked(worker())
    view = built_layers(value)
    layers, draft, groups = tables(view)
    assert [row[0].split()[1] for row in layers[1:]] == ["0", "1", "2…3"]
    assert "sliding" in layers[1][0]
    assert "full" in layers[2][0]
    assert "2 layers" in layers[3][0]
    assert "window 24" in layers[1][1]
    assert "window none" in layers[2][1]
    assert "group 1…2" in layers[3][2]
    assert "keeps window 24" in layers[1][2]
    assert "8 experts" in layers[3][3]
    assert "experts" not in layers[1][3]
    assert len(draft) == 2  # the drafter's only layer stands apart
    assert "window 12" in draft[1][1]
    assert [row[0] for row in groups[1:]] == ["0", "1", "2", "3", "4"]
    assert groups[5][4] == "drafter 0"
    assert all(row[5] == "✓" for row in groups[1:])
    assert view.html is not None
    assert "✓ all as expected" in view.html
    assert view.figure is None
    assert "✗" not in view.html
    # Names of kernels stand beneath the row, over all columns: they need none on a narrow page.
    beneath = re.findall(r'<td colspan="4"[^>]*>(.*?)</td>', view.html)
    assert len(beneath) == 4
    assert all(" of weights" in cell for cell in beneath)
    assert "weights and kernels" not in view.html
    assert re.search(r"white-space:nowrap[^>]*>sliding · 2 layers<", view.html)
    # Opened, what is folded widens no column of the table.
    assert "<details" not in re.sub("(?s)</table>.*?<table|</table>.*$", "", view.html)
    assert "2…3: all " in view.html
    assert "read off the running engine" in view.html
    recorded = built_layers(value, source="recorded 2026-11-30, <b>two cores</b>")
    assert recorded.html is not None
    assert "recorded 2026-11-30, &lt;b&gt;two cores&lt;/b&gt; · 1 worker" in recorded.html
    assert "running engine" not in recorded.html
    assert view.text.startswith("layers as vLLM ")
    assert "all as expected" in view.text


def test_differences_are_marked_by_word_and_colour() -> None:
    one = worker()
    one.attention(2).sliding_window = 128
    one.attention(1).attn_backend = TritonAttentionBackend
    del one.attention(3).head_size
    view = built_layers(asked(one))
    assert view.html is not None
    assert re.search(
        r"color:#D13438[^>]*font-weight:700[^>]*>✗ window 128, expected 24<", view.html
    )
    assert re.search(r">≠ TRITON_ATTN, expected FLASH_ATTN<", view.html)
    assert "? head size not known, expected 8" in view.html
    listed = next(rows for rows in tables(view) if rows[0][0] == "layers" and len(rows[0]) == 6)
    assert [row[:5] for row in listed[1:]] == [
        ["1", "backend", "TRITON_ATTN", "FLASH_ATTN", "≠ odd one out"],
        ["2", "window", "128", "24", "✗ differs"],
        ["3", "head size", "not known", "8", "? not found"],
    ]
    assert listed[2][5] == "the configuration"
    assert "✗ 3 fields to look at" in view.html
    assert "✗ 2: window 128, expected 24 by the configuration (differs)" in view.text.splitlines()
    # Layers that were one row are two once they differ.
    assert [row[0].split()[1] for row in tables(view)[0][1:]] == ["0", "1", "2", "3"]


def test_groups_and_ranks_that_differ() -> None:
    first, second = worker(tp=2), worker(tp=2, rank=1)
    for one in (first, second):
        one.move(3, 1)
    second.attention(0).impl.vllm_flash_attn_version = 2
    view = built_layers(asked(first, second))
    assert view.html is not None
    groups = next(rows for rows in tables(view) if rows[0][0] == "group")
    assert [(row[0], row[4], row[5]) for row in groups[2:4]] == [
        ("1", "2…3", "✗ 2"), ("2", "none", "✓"),
    ]  # fmt: skip
    assert [groups[-1][0], groups[-1][5].removeprefix("✗ ")] == ["–", "3"]
    ranks = next(rows for rows in tables(view) if rows[0] == ["where", "field", "differs"])
    assert ranks[1][:2] == ["target layer 0", "FlashAttention"]
    assert "✗ rank 0: 3" in ranks[1][2]
    assert "✗ rank 1: 2" in ranks[1][2]
    assert "Ranks 0…1" in view.html
    assert "✗ target layer 0: FlashAttention differs: rank 0 3, rank 1 2" in view.text
    agreeing = built_layers(asked(worker(tp=2), worker(tp=2, rank=1)))
    assert agreeing.html is not None
    assert "✓ all alike" in agreeing.html


def test_a_setting_that_is_not_the_plan_s() -> None:
    plan = size_kv(MODEL, context=256, kv_dtype="bf16", batched_tokens=2048, drafter=DRAFT)
    view = built_layers(asked(worker(), plan=plan))
    assert view.html is not None
    assert "✗ 512, expected 256" in view.html
    assert "✗ context: 512, planned 256" in view.text
    assert "✗ groups, settings or ranks to look at" in view.html
    assert "the plan" in view.html


def test_text_of_the_engine_stays_text() -> None:
    one = worker()
    one.attention(0).impl = type(HOSTILE, (), {"sliding_window": HOSTILE})()
    one.attention(1).kv_cache_dtype = HOSTILE
    one.vllm_config.compilation_config.mode = HOSTILE
    one.vllm_config.compilation_config.disabled_custom_ops = {HOSTILE: 1}
    one.vllm_config.cache_config.block_size = HOSTILE
    setattr(one.layer(2).self_attn, f"kernel {HOSTILE}", True)
    other = worker(rank=1)
    value = asked(one, other)
    view = built_layers(value)
    assert HOSTILE in view.text
    assert view.html is not None
    assert "<script" not in view.html
    assert "&lt;script" in view.html


def test_the_text_is_the_same_again() -> None:
    one, other = asked(worker()), asked(worker())
    assert built_layers(one).text == built_layers(other).text
    assert built_layers(one).html == built_layers(other).html
    assert " at 0x" not in built_layers(one).text


@pytest.mark.parametrize("color", ["#D13438", theme.SPARSE, theme.FULL, theme.NEUTRAL])
def test_marks_can_be_read_on_both_themes(color: str) -> None:
    def luminance(text: str) -> float:
        parts = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for paper in ("#ffffff", "#111111"):
        light, dark = sorted((luminance(color), luminance(paper)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3
    view = built_layers(asked(worker()))
    assert view.html is not None
    # Nothing paints a background of its own, and text takes the page's colour.
    assert not re.search(r"background(-color)?:(?!transparent)", view.html)
    assert "--jp-ui-font-color1" in view.html
