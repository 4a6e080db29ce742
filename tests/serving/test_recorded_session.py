"""Recorded serving sessions that come with the workbench: read back, and their figures agree."""

import json
import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import workbench
from workbench import views
from workbench.serving.client.conversation import Conversation, read_conversation
from workbench.serving.launch.extra_arguments import unknown_options
from workbench.serving.monitor.monitor_file import read_recording

FOLDER = Path(str(files("workbench.serving") / "recorded"))
SESSIONS = sorted(path for path in FOLDER.glob("session-*") if path.is_dir())
CHATS = ("plain", "reasoning", "tool", "structured")
COUNTS = ("prompt_tokens", "generation_tokens", "drafts", "draft_tokens", "accepted_tokens")
MOST_BYTES = 700_000  # of all sessions together: they are installed with the library
PAUSE = 1.0  # seconds around the edges of a phase, in which the one before or after may still count


@pytest.fixture(params=SESSIONS, ids=lambda path: path.name)
def folder(request: pytest.FixtureRequest) -> Path:
    """Of one session."""
    return Path(request.param)


def talk_of(folder: Path, name: str) -> Conversation:
    """A chat of the session; skips where it has none."""
    path = folder / f"chat_{name}.json"
    if not path.exists():
        pytest.skip(f"this session has no chat of the kind {name}")
    return read_conversation(path)


@pytest.fixture
def session(folder: Path) -> dict[str, Any]:
    """What was written down of it."""
    found: dict[str, Any] = json.loads((folder / "session.json").read_text("utf-8"))
    return found


@pytest.fixture
def lines(folder: Path) -> list[dict[str, Any]]:
    """Samples as they stand in the file, without the workbench's reader."""
    text = (folder / "monitor.jsonl").read_text("utf-8")
    return [line for line in map(json.loads, text.splitlines()) if line.get("kind") == "sample"]


def added(lines: list[dict[str, Any]], name: str) -> int:
    return sum(line.get(name, 0) for line in lines)


def test_there_is_one() -> None:
    assert SESSIONS


def test_what_failed_is_said(folder: Path, session: dict[str, Any]) -> None:
    assert session["stop"]["processes_left"] == 0
    assert set(session["chats"]) == set(CHATS)
    wrong = {name: said["failed"] for name, said in session["chats"].items() if "failed" in said}
    assert len(session["failed"]) == len(wrong)
    for name, why in wrong.items():
        assert not (folder / f"chat_{name}.json").exists()
        assert any(why.split(": ", 1)[1] in failed for failed in session["failed"])


def test_each_kind_of_chat_was_recorded_somewhere() -> None:
    assert {path.name for each in SESSIONS for path in each.glob("chat_*")} == {
        f"chat_{name}.json" for name in CHATS
    }


def test_the_files_are_small() -> None:
    there = [path for each in SESSIONS for path in each.iterdir()]
    assert sum(path.stat().st_size for path in there) < MOST_BYTES


def test_the_files_are_installed() -> None:
    root = Path(__file__).resolve().parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["workbench"]
    for path in (path for each in SESSIONS for path in each.iterdir()):
        assert f"**/*{path.suffix}" in patterns, path.name


def test_it_names_no_folder_and_no_other_machine(folder: Path) -> None:
    for path in folder.iterdir():
        text = path.read_text("utf-8")
        # A folder of a Unix machine: what follows is no web address and no path of the API.
        found = re.findall(
            r"(?<![\w.:/])/(?:home|root|tmp|work|opt|usr|var|mnt|data|Users)\b", text
        )
        assert not found, path.name
        addresses = set(re.findall(r"https?://([^/\s\"':]+)", text)) - {"127.0.0.1"}
        assert not addresses, path.name
        assert not re.search(r"(?i)bearer |api[-_]key|hf_[a-z0-9]{20}|sk-[a-z0-9]{16}", text)


def test_the_recording_is_whole(folder: Path, lines: list[dict[str, Any]]) -> None:
    recording = read_recording(folder / "monitor.jsonl")
    assert recording.skipped == 0
    assert len(recording.samples) == len(lines) > 60
    assert sum(sample.missed for sample in recording.samples) <= 0.1 * len(lines)
    assert not any(sample.restarted for sample in recording.samples)
    assert recording.source.startswith("recorded: ")
    assert "vLLM 0.3" in recording.source
    assert "beam-tiny" in recording.source


def test_client_counters_and_monitor_counted_the_same(
    session: dict[str, Any], lines: list[dict[str, Any]]
) -> None:
    for name in COUNTS:
        counted = session["counters"]["counts"][name]
        assert counted > 0
        assert session["client"]["counts"][name] == counted, name
        assert session["monitor"]["counts"][name] == added(lines, name) == counted, name
    assert session["client"]["uncounted"] == 0


def test_every_request_is_in_every_histogram(
    session: dict[str, Any], lines: list[dict[str, Any]]
) -> None:
    requests = session["client"]["requests"]
    assert sum(sum(line.get("finished", {}).values()) for line in lines) == requests
    for name in ("ttft", "e2e"):
        there = [line[name]["buckets"] for line in lines if name in line]
        assert sum(count for buckets in there for *_, count in buckets) == requests, name


def test_the_probe_saw_what_the_counters_counted(folder: Path, session: dict[str, Any]) -> None:
    if "probe" not in session:
        pytest.skip("recorded without a probe, on a CPU")
    probe, total = session["probe"], session["counters"]["total"]
    assert probe["dropped"] == probe["inconsistent"] == 0
    for name in ("drafts", "accepted_tokens"):
        assert probe["counts"][name] == total[name] > 0, name
    # A grammar refuses drafts before they are verified: the engine then counts them as not drafted,
    # the probe saw them. They are those of the structured answers and of the forced call.
    replies = [
        reply.speculation
        for path in folder.glob("chat_*.json")
        for turn in read_conversation(path).turns
        for reply in turn.replies
        if reply.speculation is not None
    ]
    refused = sum(spec.steps * spec.speculative_tokens - spec.drafted for spec in replies)
    assert refused > 0
    # Of calls that were tried before the one that is kept some were refused, too: at most all.
    tried = len(session["chats"]["tool"].get("tried_before", []))
    more = probe["counts"]["draft_tokens"] - total["draft_tokens"] - refused
    assert 0 <= more <= tried * 2 * 64 * 7
    assert probe["admitted"] + probe["trimmed"] == probe["counts"]["draft_tokens"]


def test_acceptance_by_slot_adds_up(session: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    slots = [line["accepted_at"] for line in lines if line.get("accepted_at")]
    assert sum(map(sum, slots)) == session["counters"]["counts"]["accepted_tokens"]


def test_phases_are_to_be_seen(session: dict[str, Any], lines: list[dict[str, Any]]) -> None:
    def within(phase: dict[str, Any]) -> list[dict[str, Any]]:
        begin, end = phase["at"], phase["at"] + phase["seconds"]
        return [line for line in lines if begin + PAUSE <= line["at"] <= end - PAUSE / 2]

    for phase in session["phases"]:
        some = within(phase)
        running = max(line["running"] for line in some)
        if phase["phase"] == "idle":
            assert added(some, "generation_tokens") == running == 0
        else:
            together = {"one": 1, "four": 4}.get(phase["phase"].split()[0], 16)
            assert 0 < running <= together, phase["phase"]
    assert max(line["running"] for line in lines) == 16
    assert max(line["waiting"] for line in lines) >= 1  # twenty-four are more than it takes
    assert max(line["kv_usage"] for line in lines) > 0.01


def test_the_figures_say_the_same(folder: Path, session: dict[str, Any]) -> None:
    recording = read_recording(folder / "monitor.jsonl")
    counts = session["counters"]["counts"]
    length = 1 + counts["accepted_tokens"] / counts["drafts"]
    for view in (views.serving_throughput, views.serving_acceptance):
        text = view(recording.samples, source=recording.source).text
        assert f"acceptance length {length:.2f} (n = {counts['drafts']:,} draft events)" in text
    text = views.serving_latency(recording.samples, source=recording.source).text
    assert text.count(f"(n = {session['client']['requests']:,})") >= 1


def test_start_and_words(session: dict[str, Any]) -> None:
    at = [stage["at"] for stage in session["start"]["stages"]]
    assert at == sorted(at)
    assert session["start"]["stages"][-1]["stage"] == "ready"
    assert at[-1] <= session["start"]["seconds"] + 1
    assert unknown_options(session["words"]) == ()
    assert session["words"][:3] == ["vllm", "serve", "beam-tiny"]
    assert session["versions"]["vllm"]
    assert session["versions"]["torch"]


@pytest.mark.parametrize("name", CHATS)
def test_chats_are_read_back(folder: Path, session: dict[str, Any], name: str) -> None:
    talk = talk_of(folder, name)
    assert talk.model == "beam-tiny"
    assert talk.note == session["note"]
    assert len(talk.turns) == session["chats"][name]["turns"]
    for reply in (reply for turn in talk.turns for reply in turn.replies):
        assert reply.usage is not None
        assert reply.speculation is not None
        assert reply.notes == ()
        spec = reply.speculation
        assert sum(spec.histogram) == spec.steps
        assert sum(i * n for i, n in enumerate(spec.histogram)) == spec.accepted <= spec.drafted
        # Every step gives what was accepted and one token more; the last may be cut by a limit.
        assert spec.accepted + spec.steps <= reply.usage.completion + spec.speculative_tokens
        assert reply.timing.first is not None
        assert 0 < reply.timing.first <= reply.timing.total
    assert talk.turns[0].user in views.conversation(talk).text


def test_reasoning_is_apart(folder: Path) -> None:
    reply = talk_of(folder, "reasoning").turns[0].reply
    assert len(reply.reasoning) > 40
    assert "<think>" not in reply.reasoning + reply.text
    assert reply.usage is not None
    assert reply.usage.reasoning in (None, *range(1, reply.usage.completion + 1))


def test_the_tool_gave_what_the_model_is(folder: Path) -> None:
    talk = talk_of(folder, "tool")
    (turn,) = talk.turns
    (result,) = turn.results
    assert result.error is None
    asked = json.loads(result.call.arguments)
    (offered,) = talk.tools
    jsonschema.validate(asked, offered["function"]["parameters"])
    kinds = workbench.resolve("beam-tiny").config.layer_types
    given = json.loads(result.content)
    assert given["layer"] == asked["layer"]
    assert given["attention"] == kinds[asked["layer"]].removesuffix("_attention")
    assert turn.messages[-2] == {
        "role": "tool", "tool_call_id": result.call.id, "content": result.content,
    }  # fmt: skip


def test_structured_answers_are_what_was_asked_for(folder: Path) -> None:
    described, reviewed = talk_of(folder, "structured").turns
    for turn in (described, reviewed):
        assert turn.reply.finish == "stop"
        assert turn.value == json.loads(turn.text)
    assert described.value["language"] in ("python", "rust", "prose")
    assert described.value["functions"] in range(10)
    assert set(reviewed.value) == {"verdict", "risk", "certain"}
    assert reviewed.value["verdict"] in ("keep", "change")
    assert isinstance(reviewed.value["certain"], bool)
