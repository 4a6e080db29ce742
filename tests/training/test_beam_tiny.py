"""The shipped checkpoint: how good it is on text it was not trained on, and what its card says."""

import hashlib
import json
import re
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import workbench
from workbench.model.beam import Beam
from workbench.model.config import BeamConfig
from workbench.model.presets import ZOO
from workbench.model.tensors import active_parameters, parameters_by_part, total_parameters
from workbench.training import curve
from workbench.training.evaluate import bits_per_byte, counted_experts
from workbench.training.filters import clean, reason_to_drop
from workbench.training.settings import CONFIGS, read_settings
from workbench.training.sources import PACKAGES_FILE, load_packages
from workbench.training.trainable import build

FOLDER = ZOO / "beam-tiny"
CARD = (FOLDER / "MODEL_CARD.md").read_text(encoding="utf-8")
RECORD: dict[str, Any] = json.loads((FOLDER / "training.json").read_text())
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"

BAR = 1.25  # bits per byte of held-out code
SCORED_BYTES = 32_000


@pytest.fixture(scope="module")
def beam() -> Beam:
    return workbench.load("beam-tiny")


# -- the weights ----------------------------------------------------------------------------------


def held_out_sources() -> list[str]:
    """This interpreter's own files that the hold-out rule keeps from training, SCORED_BYTES in all.

    The rule is written out once more: first 16 hex digits of the SHA-256 of package/path, modulo
    10 000, below 100.
    """
    package = next(p for p in load_packages() if p.source == "stdlib")
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: list[str] = []
    left = SCORED_BYTES
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root).as_posix()
        key = hashlib.sha256(f"cpython-stdlib/{path}".encode()).hexdigest()
        if int(key[:16], 16) % 10_000 >= 100 or reason_to_drop(package, path, file.read_bytes()):
            continue
        text = clean(file.read_text(encoding="utf-8"), "code")[:left]
        texts.append(text)
        left -= len(text)
    assert left == 0, "the standard library should have more held-out text"
    return texts


@pytest.mark.full
def test_held_out_code_is_under_the_bar_and_no_expert_is_dead(beam: Beam) -> None:
    with counted_experts(beam) as counts:
        result = bits_per_byte(beam, held_out_sources())
    assert result["bytes"] >= SCORED_BYTES
    assert 0.2 < result["bits_per_byte"] <= BAR
    assert set(counts) == set(beam.config.sparse_layers)
    for layer, load in counts.items():
        assert int(load.sum()) >= result["tokens"] * beam.config.num_experts_per_tok
        assert load.min() >= 0.01 * load.double().mean(), f"layer {layer}: {load.tolist()}"


def test_markers_were_never_trained(beam: Beam) -> None:
    """Their embeddings are those of initialisation, which shows the seed as well."""
    first = build(beam.config, RECORD["settings"]["seed"], torch.device("cpu")).embed_tokens
    first = first.detach().bfloat16().float()
    assert beam.tokenizer is not None
    markers = set(beam.tokenizer.markers.values()) - {
        beam.tokenizer.bos_id,
        beam.tokenizer.eos_id,
    }
    assert len(markers) == 14
    for marker in markers:
        assert torch.equal(beam.embed_tokens[marker], first[marker])
    changed = (beam.embed_tokens != first).any(-1)
    assert changed.float().mean() > 0.97
    assert changed[[beam.tokenizer.bos_id, beam.tokenizer.eos_id]].all()


def test_the_zoo_is_small_enough_to_ship() -> None:
    size = sum(file.stat().st_size for file in ZOO.rglob("*") if file.is_file())
    assert 22_000_000 < size <= 28 * 1_000_000


def test_record_and_configuration_are_of_the_same_run() -> None:
    settings = read_settings("beam-tiny")
    assert settings.model == BeamConfig.from_json(FOLDER)
    for name, value in RECORD["settings"].items():
        assert getattr(settings, name) == value, name
    assert RECORD["steps"] == settings.steps
    assert RECORD["tokens"] == settings.steps * settings.batch * settings.length
    assert RECORD["seconds"] < 600, "ten minutes on one H200"
    assert RECORD["losses"][-1] == [RECORD["steps"], RECORD["loss"]]
    assert RECORD["bits_per_byte"] == RECORD["held_out"]["heldout_code"]["bits_per_byte"] <= BAR


# -- the card -------------------------------------------------------------------------------------


def rows(heading: str) -> list[list[str]]:
    """Cells of all table rows under a heading, without header and rule lines."""
    section = re.split(r"^#+ ", CARD.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.M)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [row for i, row in enumerate(cells) if not _rule(row) and not _before_rule(cells, i)]


def _rule(row: list[str]) -> bool:
    return all(re.fullmatch(r":?-+:?", cell) for cell in row)


def _before_rule(cells: list[list[str]], index: int) -> bool:
    return index + 1 < len(cells) and _rule(cells[index + 1])


def number(text: str) -> float:
    return float(text.replace(",", "").strip("*"))


def test_card_lists_every_field_of_the_config() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    told = {row[0].strip("`"): row[1] for row in rows("Architecture") if row[0].startswith("`")}
    assert list(told) == list(config)
    for name, value in config.items():
        if name in ("layer_types", "mlp_layer_types"):
            continue
        assert json.loads(told[name].strip("`")) == value, name
    model = BeamConfig.from_json(FOLDER)
    full = " and ".join(map(str, model.full_layers))
    assert told["layer_types"] == (
        f"`full_attention` in layers {full}, `sliding_attention` in the other seven"
    )
    assert len(model.sliding_layers) == 7
    assert told["mlp_layer_types"] == "`dense` in layer 0, `sparse` in the other eight"
    assert model.sparse_layers == tuple(range(1, 9))


def test_card_counts_the_parameters(beam: Beam) -> None:
    model = BeamConfig.from_json(FOLDER)
    told = {row[0].strip("*"): row[1] for row in rows("Architecture") if "`" not in row[0]}
    parts = {part.replace("_", " "): n for part, n in parameters_by_part(model).items()}
    parts |= {"total": total_parameters(model), "active for a token": active_parameters(model)}
    assert {name: number(value) for name, value in told.items()} == parts
    assert sum(p.numel() for p in beam.parameters()) == parts["total"]
    summary = dict(row[:2] for row in rows("beam-tiny"))
    assert summary["parameters"].startswith(
        f"{parts['total']:,} in all (11.2 M), {parts['active for a token']:,} active"
    )
    assert f"{(FOLDER / 'model.safetensors').stat().st_size:,} bytes" in summary["file"]
    assert summary["context"] == f"{model.max_position_embeddings:,} tokens"


def test_card_says_how_good_it_is_as_the_record_does() -> None:
    table = rows("How good it is")
    assert len(table) == 3
    for row, (name, result) in zip(table, RECORD["held_out"].items(), strict=True):
        shares = result["expert_share"]
        expected = [
            result["bytes"], result["tokens"], result["bits_per_byte"],
            shares["least"], shares["most"],
        ]  # fmt: skip
        assert [number(cell) for cell in row[2:]] == expected, name
    summary = dict(row[:2] for row in rows("beam-tiny"))
    held_out = RECORD["held_out"]
    assert summary["held-out code"] == f"{held_out['heldout_code']['bits_per_byte']} bits per byte"
    unseen = held_out["heldout_package"]["bits_per_byte"]
    assert summary["package never seen"] == f"{unseen} bits per byte"
    sizes = {row[0]: row[1:3] for row in rows("Training data")}
    for row, name in zip(table, ("code", "package", "prose"), strict=True):
        assert sizes[f"held-out {name}"] == row[1:3]


def test_card_tells_the_run_as_the_record_does() -> None:
    run = dict(row[:2] for row in rows("How it was trained"))
    settings = RECORD["settings"]
    assert run["hardware"] == f"one {RECORD['hardware']}"
    assert run["date"] == RECORD["date"]
    versions = RECORD["versions"]
    assert run["versions"] == f"Python {versions['python']}, torch {versions['torch']}"
    assert run["time"].startswith(f"{RECORD['seconds']:.0f} s of training")
    assert run["seed"] == str(settings["seed"])
    assert run["steps"] == (
        f"{RECORD['steps']:,} of {settings['batch']} windows of {settings['length']:,} tokens: "
        f"{RECORD['tokens']:,} tokens"
    )
    assert settings["cooldown"] == 0.5
    assert "over the last half" in run["schedule"]
    assert run["schedule"].startswith(f"{settings['warmup']} steps up")
    for name in ("matrix_rate", "weight_decay", "embedding_rate", "head_rate", "router_rate",
                 "vector_rate"):  # fmt: skip
        assert re.search(rf"\b{re.escape(str(settings[name]))}\b", run["optimizers"]), name
    assert str(settings["balance_rate"]) in run["experts"]
    for command in (
        "python -m workbench.training.corpus --out build/corpus",
        "python -m workbench.training.bpe --corpus build/corpus",
        "workbench train model --config beam-tiny",
    ):
        assert command in CARD


def test_card_has_the_loss_curve_of_the_record() -> None:
    losses = dict(map(tuple, RECORD["losses"]))
    table = rows("Loss")
    assert len(table) >= 10
    for step, tokens, loss in table:
        assert number(loss) == losses[int(number(step))]
        assert number(tokens) == pytest.approx(number(step) * 65536 / 1e6, abs=0.05)
    assert number(table[-1][0]) == RECORD["steps"]
    assert "![Training loss over tokens](loss_curve.svg)" in CARD
    assert (FOLDER / curve.CURVE_FILE).read_text() == curve.loss_curve(RECORD)


def test_card_attributes_every_package() -> None:
    table = {row[0]: row[1:] for row in rows("Licence and attribution")}
    listed = tomllib.loads(PACKAGES_FILE.read_text())["package"]
    assert list(table) == [package["name"] for package in listed]
    for package in listed:
        version, licence, kinds, files, size = table[package["name"]]
        assert licence == package["license"]
        assert kinds == " and ".join(package["kinds"])
        if package["version"] == "running":
            assert f"that of CPython {version}." in CARD
        else:
            assert version == package["version"]
        assert (number(files) > 0) is (number(size) > 0)
        assert (number(files) == 0) is (package.get("role") == "heldout_package")
    sizes = {row[0]: row[1:3] for row in rows("Training data")}
    assert f"{sum(number(row[3]) for row in table.values()):,.0f}" == sizes["training"][0]
    assert f"{sum(number(row[4]) for row in table.values()):,.0f}" == sizes["training"][1]


def test_card_shows_the_sweep_as_it_was_recorded() -> None:
    sweep = json.loads((RESULTS / "beam-tiny-sweep-h200.json").read_text())
    assert {"hardware", "versions", "date", "settings"} <= sweep.keys()
    table = {row[0]: row[1:] for row in rows("How the rates were chosen")}
    assert list(table) == [variant["name"] for variant in sweep["variants"]]
    for variant in sweep["variants"]:
        bits = [f"{held['bits_per_byte']:.4f}" for held in variant["held_out"].values()]
        speed = f"{variant['tokens_per_second'] / 1e6:.2f}"
        assert table[variant["name"]] == [*bits, speed]
        settings = sweep["settings"] | variant["changes"]
        assert variant["tokens"] == settings["steps"] * settings["batch"] * settings["length"]
    base, *_, small = sweep["variants"]
    assert f"{base['tokens_per_second'] / small['tokens_per_second']:.1f} times as long" in (
        " ".join(CARD.split())
    )
    # The shipped rates are the best of the matrix rates and of the other rates by held-out code.
    code = {v["name"]: v["held_out"]["heldout_code"]["bits_per_byte"] for v in sweep["variants"]}
    matrix, adam = "matrix rate 0.04", "AdamW rates halved"
    assert code[matrix] == min(code[n] for n in ("base", "matrix rate 0.01", matrix))
    assert code[adam] == min(code[n] for n in ("base", adam, "AdamW embedding 0.5, head 0.012"))
    changes = {v["name"]: v["changes"] for v in sweep["variants"]}
    shipped = tomllib.loads((CONFIGS / "beam-tiny.toml").read_text())
    for name, value in (changes[matrix] | changes[adam]).items():
        assert shipped[name] == value
