"""Training configurations: what is read, and that a wrong one is named in one sentence."""

import datetime
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import TrainingError
from workbench.model.tokenizer import Tokenizer
from workbench.training.settings import (
    CONFIGS,
    bundled_settings,
    check_tokenizer,
    read_settings,
    settings_from_dict,
)

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
    "huge batch": (MINUTE | {"batch": 2**70}, f"batch must be at most 1000000, not {2**70}"),
    "huge seed": (MINUTE | {"seed": 10**23}, f"seed must be at most {2**63 - 1}, not 1000000"),
    "too many digits": (MINUTE | {"steps": 16**9000}, "at most 1000000000, not one too large"),
    "huge rate": (MINUTE | {"head_rate": 10**400}, "head_rate must be at least 0 and finite"),
    "no such user": (MINUTE | {"output": "~nosuchuser/x"}, "output is '~nosuchuser/x', but there"),
    "NUL in a path": (MINUTE | {"state": "a\0b"}, "state holds a NUL; name a folder"),
    "no path": (MINUTE | {"output": ""}, "output is empty; name a folder"),
    "number as path": (MINUTE | {"output": 3}, "output must be a path in quotes, not 3"),
    "number as text": (MINUTE | {"corpus": 3}, "corpus must be a text in quotes, not 3"),
    "number as bool": (MINUTE | {"compile": 1}, "compile must be true or false, not 1"),
    "long cool-down": (MINUTE | {"cooldown": 1.5}, "cooldown is a share .* not 1.5"),
    "long windows": (MINUTE | {"length": 300}, "length (300) exceeds max_position_embeddings"),
    "misspelt model field": (
        MINUTE | {"model": MODEL | {"n_groups": 1}},
        r"here [model]: 'n_groups' is not a field of Beam; remove it",
    ),
    "huge layer count": (
        MINUTE | {"model": MODEL | {"num_hidden_layers": 2**70}},
        "here [model]: num_hidden_layers must be at most 10000, not ",
    ),
    "huge model": (
        MINUTE | {"model": MODEL | {"hidden_size": 10**9}},
        "here [model] has .* parameters, and at most 10,000,000,000 can be trained here",
    ),
    "date in the model": (
        MINUTE | {"model": MODEL | {"torch_dtype": datetime.date(2026, 1, 1)}},
        "here [model] holds a value that a config.json cannot hold",
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
    for text in ("a = " + "[" * 100_000, "a = " + "1" * 5_000):
        (tmp_path / "a.toml").write_text(text)
        with pytest.raises(TrainingError, match=r"a\.toml nests too deep or holds a number of too"):
            read_settings(tmp_path / "a.toml")
    with pytest.raises(TrainingError, match="/dev/zero is a device"):
        read_settings("/dev/zero")
    with pytest.raises(TrainingError, match="holds a NUL"):
        read_settings("a\0b")


def test_bundled_configurations_read_their_tokenizer_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in bundled_settings():
        settings = read_settings(name)
        check_tokenizer(settings, Tokenizer.from_folder(settings.tokenizer))
    mine = settings_from_dict(MINUTE | {"tokenizer": "~/mine", "corpus": "~/text"}, "here")
    assert mine.tokenizer == Path.home() / "mine"
    assert mine.corpus == str(Path.home() / "text")
