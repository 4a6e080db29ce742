"""Training configurations: what is read, and that a wrong one is named in one sentence."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import TrainingError
from workbench.training.settings import CONFIGS, read_settings, settings_from_dict

MINUTE: dict[str, Any] = tomllib.loads((CONFIGS / "minute.toml").read_text())


def test_fields_come_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    text = (CONFIGS / "minute.toml").read_text()
    file.write_text(text.replace("warmup = 5", "warmup = 7\nmatrix_rate = 1"))
    settings = read_settings(file)
    assert (settings.steps, settings.batch, settings.warmup) == (120, 8, 7)
    assert settings.matrix_rate == 1.0
    assert isinstance(settings.matrix_rate, float)
    assert settings.output == Path("build/minute")
    assert settings.model.num_experts == 8
    assert settings.embedding_rate == 0.3, "a default"
    assert read_settings("minute").warmup == 5, "a bundled one, by its name"


def test_a_copied_config_json_is_a_model() -> None:
    extra = {"architectures": ["BeamForCausalLM"], "model_type": "beam", "torch_dtype": "bfloat16"}
    settings_from_dict(MINUTE | {"model": MINUTE["model"] | extra}, "here")


def without(data: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key != name}


MODEL = MINUTE["model"]
WRONG = {
    "unknown": (MINUTE | {"step": 5}, "'step' is not a training field; remove it"),
    "missing": (without(MINUTE, "steps"), "the field steps is missing; add it"),
    "no model": (without(MINUTE, "model"), r"the table [model] .* is missing"),
    "model is no table": (MINUTE | {"model": 3}, r"the table [model] .* is missing"),
    "zero steps": (MINUTE | {"steps": 0}, "steps must be at least 1, not 0"),
    "negative batch": (MINUTE | {"batch": -4}, "batch must be at least 1, not -4"),
    "negative seed": (MINUTE | {"seed": -1}, "seed must be at least 0, not -1"),
    "float steps": (MINUTE | {"steps": 1.5}, "steps must be a whole number, not 1.5"),
    "true steps": (MINUTE | {"steps": True}, "steps must be a whole number, not True"),
    "text rate": (MINUTE | {"matrix_rate": "x"}, "matrix_rate must be a number, not 'x'"),
    "true rate": (MINUTE | {"matrix_rate": True}, "matrix_rate must be a number, not True"),
    "negative rate": (MINUTE | {"head_rate": -0.1}, "head_rate must be at least 0 and finite"),
    "nan rate": (MINUTE | {"head_rate": float("nan")}, "head_rate must be at least 0 and finite"),
    "inf rate": (MINUTE | {"head_rate": float("inf")}, "head_rate must be at least 0 and finite"),
    "number as path": (MINUTE | {"output": 3}, "output must be a path in quotes, not 3"),
    "number as text": (MINUTE | {"corpus": 3}, "corpus must be a text in quotes, not 3"),
    "number as bool": (MINUTE | {"compile": 1}, "compile must be true or false, not 1"),
    "long cool-down": (MINUTE | {"cooldown": 1.5}, "cooldown is a share .* not 1.5"),
    "long windows": (MINUTE | {"length": 300}, "length (300) exceeds max_position_embeddings"),
    "misspelt model field": (
        MINUTE | {"model": MODEL | {"n_groups": 1}},
        r"here [model]: 'n_groups' is not a field of Beam; remove it",
    ),
    "model contradicts itself": (
        MINUTE | {"model": MODEL | {"num_hidden_layers": 5}},
        r"here [model]: layer_types has 4 entries for 5 layers",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_field_is_named_in_one_sentence(case: str) -> None:
    data, message = WRONG[case]
    with pytest.raises(TrainingError) as caught:
        settings_from_dict(data, "here")
    text = str(caught.value)
    assert re.search(re.escape(message).replace(r"\.\*", ".*"), text), text
    assert text.startswith("here")
    assert "\n" not in text


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"nowhere.toml cannot be read .* beam-tiny, minute"):
        read_settings(tmp_path / "nowhere.toml")
    for content in (b"steps = = 3", b"\xff"):
        (tmp_path / "a.toml").write_bytes(content)
        with pytest.raises(TrainingError, match=r"a\.toml is not valid TOML .*; correct it"):
            read_settings(tmp_path / "a.toml")
