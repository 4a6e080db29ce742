"""The cost table of this machine: what is timed, what is kept, what is refused."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from spec.planted import small_drafter, small_target
from workbench.errors import DraftError, PromptError
from workbench.model.beam import Beam
from workbench.model.sampling import Sampling
from workbench.spec import profile as profile_module
from workbench.spec.drafter import Drafter
from workbench.spec.loop import Decoding
from workbench.spec.profile import profile


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Beam:
    return small_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafter(target: Beam) -> Drafter:
    return small_drafter(target)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BEAM_WORKBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_every_size_is_timed_by_steps_of_its_own(
    target: Beam, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = target.logits
    seen: list[int] = []

    def slow(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        time.sleep(0.004 * len(hidden))
        return real(hidden)

    monkeypatch.setattr(target, "logits", slow)
    told: list[tuple[int, int]] = []
    table = profile(
        target, drafter, requests=4, context=20, rounds=2, progress=lambda *at: told.append(at)
    )
    # One row of 1, 2, 4 sequences, then half a row of all of them more each time, to 5 rows each.
    sizes = [1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20]
    assert [n for n, _ in table.verify] == sizes
    assert [n for n, _ in table.draft] == [1, 2, 4]
    # Each three times; the most rows of one and of two sequences are for the draft curve. A run's
    # first logits are its prompts', one row each.
    steps = dict.fromkeys(sizes, 3) | {5: 3, 10: 6}
    prefills = {n: seen.count(n) - steps[n] for n in set(seen)}
    assert all(count >= 0 for count in prefills.values())
    assert {n for n, count in prefills.items() if count} <= {1, 2, 4}
    for n, milliseconds in table.verify:
        assert milliseconds >= 4 * n
    assert table.draft_ms(4) < 16, "the target is no part of it"
    of = 2 * 3 + 2 * 3 + 9 * 3
    assert told == [(at, of) for at in range(1, of + 1)]
    assert "measured here" in table.label
    assert "up to 4 sequences, context 20, temperature 0" in table.label


def test_the_rest_of_a_step_is_in_the_draft_curve(
    target: Beam, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Decoding._give

    def slow(*args: Any) -> Any:
        time.sleep(0.05)  # for each sequence
        return real(*args)

    monkeypatch.setattr(Decoding, "_give", slow)
    table = profile(target, drafter, requests=2, context=20, rounds=1, keep=False)
    assert table.draft_ms(2) >= 100 > 60 >= table.verify_ms(2)


def test_a_temperature_is_a_table_of_its_own(target: Beam, drafter: Drafter, cache: Path) -> None:
    asked: dict[str, Any] = {"requests": 1, "context": 20, "rounds": 1}
    for heat, seed in ((0.0, 0), (1.0, 0), (1.0, 5)):
        table = profile(target, drafter, **asked, sampling=Sampling(temperature=heat, seed=seed))
    assert "temperature 1" in table.label
    assert len(list(cache.iterdir())) == 2, "a seed changes no time"


@pytest.mark.parametrize(("rows", "requests"), [(1, 4), (3, 4), (4, 4), (9, 4), (40, 8), (20, 4)])
def test_rows_are_dealt_out_over_the_sequences(rows: int, requests: int) -> None:
    several = [profile_module._spread(rows, requests, 5, turn) for turn in range(20)]
    for counts in several:
        assert sum(counts) == rows
        assert len(counts) == min(rows, requests)
        assert 1 <= min(counts) <= max(counts) <= 5
    full = rows in (requests, 5 * requests) or rows < requests
    assert (len(set(map(tuple, several))) == 1) == full, "uneven, and another way each time"
    assert several[3] == profile_module._spread(rows, requests, 5, 3)


def test_drafts_are_dealt_out_as_a_policy_would() -> None:
    counts = [n for turn in range(10) for n in profile_module._spread(192, 64, 8, turn)]
    # Of a chance uniform from 0 to 1, k drafts are in where chance ** k is above a threshold: with
    # two drafts a sequence a quarter or so have none and some all seven.
    assert 0.15 < counts.count(1) / len(counts) < 0.4
    assert 0.05 < counts.count(8) / len(counts) < 0.25


def test_a_table_is_measured_once(target: Beam, drafter: Drafter, cache: Path) -> None:
    asked: dict[str, Any] = {"requests": 2, "context": 20, "rounds": 1}
    first = profile(target, drafter, **asked)
    (file,) = cache.iterdir()

    def never(*_: int) -> None:
        raise AssertionError("it was measured again")

    assert profile(target, drafter, **asked, progress=never) == first
    assert first.to_dict().items() <= json.loads(file.read_text()).items()
    profile(target, drafter, **asked | {"context": 21})
    assert len(list(cache.iterdir())) == 2, "another context is another table"
    told: list[int] = []
    profile(target, drafter, **asked, keep=False, progress=lambda at, _: told.append(at))
    assert told
    assert len(list(cache.iterdir())) == 2


BEGUN = '{"schema": "SCHEMA", "captured": 0, "label": "", "verify": [[1, 1]], "draft": [[1, '


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"schema": "other/1"}',
        '{"schema": "SCHEMA"}',
        "[" * 100_000,
        "\x00",
        BEGUN + "1" * 400 + "]]}",
        BEGUN + "1" * 5000 + "]]}",
        BEGUN + "NaN]]}",
    ],
)
def test_a_damaged_table_is_measured_again(
    target: Beam, drafter: Drafter, cache: Path, text: str
) -> None:
    asked: dict[str, Any] = {"requests": 1, "context": 20, "rounds": 1}
    profile(target, drafter, **asked)
    (file,) = cache.iterdir()
    file.write_text(text.replace("SCHEMA", profile_module.SCHEMA))
    assert profile_module._read(file) is None
    again = profile(target, drafter, **asked)
    assert again.to_dict().items() <= json.loads(file.read_text()).items()


def test_a_pipe_in_the_tables_place_is_not_waited_for(
    target: Beam, drafter: Drafter, cache: Path
) -> None:
    asked: dict[str, Any] = {"requests": 1, "context": 20, "rounds": 1}
    profile(target, drafter, **asked)
    (file,) = cache.iterdir()
    file.unlink()
    os.mkfifo(file)
    assert profile(target, drafter, **asked).verify


def test_a_cache_that_cannot_be_written_costs_time_alone(
    target: Beam, drafter: Drafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BEAM_WORKBENCH_CACHE", str(tmp_path / "file" / "below"))
    assert profile(target, drafter, requests=1, context=20, rounds=1).verify


def test_an_interrupt_keeps_nothing(target: Beam, drafter: Drafter, cache: Path) -> None:
    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile(target, drafter, requests=1, context=20, rounds=1, progress=stop)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"requests": 0}, "requests must be a whole number from 1 to 512"),
        ({"rounds": 0}, "rounds must be"),
        ({"drafts": 64}, "drafts must be"),
        ({"context": 100_000}, "context must be a whole number from 1 to"),
        ({"sampling": None}, "sampling must be a Sampling"),
    ],
)
def test_a_setting_out_of_range_is_refused(
    target: Beam, drafter: Drafter, change: dict[str, Any], words: str
) -> None:
    with pytest.raises((DraftError, PromptError), match=words):
        profile(target, drafter, **{"requests": 2, "context": 20} | change)


@pytest.mark.parametrize(("own", "room"), [({}, 96), ({"max_position_embeddings": 40}, 40)])
@pytest.mark.parametrize("drafts", [1, 4, 30])
def test_the_longest_context_that_is_taken_has_room_for_every_size(
    target: Beam, own: dict[str, Any], room: int, drafts: int
) -> None:
    drafter = small_drafter(target, **own)
    asked: dict[str, Any] = {"requests": 2, "drafts": drafts, "rounds": 1, "keep": False}
    longest = room - drafts - 2  # its first token, and a step of one row more than drafts
    table = profile(target, drafter, context=longest, **asked)
    assert [n for n, _ in table.verify] == [1, *range(2, 2 * drafts + 3)]
    with pytest.raises(DraftError, match=f"from 1 to {longest}, not {longest + 1}"):
        profile(target, drafter, context=longest + 1, **asked)


def test_a_context_that_nobody_asked_for_fits(target: Beam) -> None:
    drafter = small_drafter(target, max_position_embeddings=40)
    asked: dict[str, Any] = {"requests": 1, "rounds": 1, "keep": False}
    for drafts, context in ((4, 20), (30, 8), (37, 1)):
        table = profile(target, drafter, drafts=drafts, **asked)
        assert f"context {context}, " in table.label
    with pytest.raises(DraftError, match=r"38 drafts a step leave no room .* 40 positions"):
        profile(target, drafter, drafts=38, **asked)
    assert "context 48, " in profile(target, small_drafter(target), **asked).label
