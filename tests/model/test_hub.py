"""Models of the hub: the real client and a hub on loopback; what is fetched and what is said."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from model.fake_hub import COMMIT, TOKEN, Hub, running_hub
from workbench.errors import CheckpointError, WorkbenchError
from workbench.model import hub as hubs
from workbench.model.checkpoint_save import INDEX_FILE, SINGLE_FILE
from workbench.model.hub import HubError, fetch, hub_id, look
from workbench.model.presets import ZOO

pytest.importorskip("huggingface_hub")
TINY = ZOO / "beam-tiny"
REPO = "some-lab/Beam-Tiny.v2"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    with running_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        running.repos[REPO] = files()
        yield running


def files(*, shards: int = 3) -> dict[str, bytes]:
    """A made-up checkpoint: the bundled description, layer ``n`` in shard ``n``."""
    found = {name: (TINY / name).read_bytes() for name in ("config.json", "tokenizer.json")}
    places = {f"model.layers.{n}.x.weight": _shard(n, shards) for n in range(shards)}
    places["lm_head.weight"] = _shard(shards - 1, shards)
    found[INDEX_FILE] = json.dumps({"weight_map": places}).encode()
    found |= {_shard(n, shards): bytes([n]) * (100 + n) for n in range(shards)}
    return found | {"README.md": b"read me", "pytorch_model.bin": b"never"}


def _shard(number: int, of: int) -> str:
    return f"model-{number + 1:05}-of-{of:05}.safetensors"


def test_names_agree_with_the_writer() -> None:
    assert (hubs.SINGLE_FILE, hubs.INDEX_FILE) == (SINGLE_FILE, INDEX_FILE)


@pytest.mark.parametrize(
    ("model", "is_one"),
    [
        ("some-lab/Beam-501B", True),
        ("a/b", True),
        ("beam-tiny", False),
        ("./a/b", False),
        ("/a/b", False),
        ("~/a", False),
        ("a/b/c", False),
        ("a/", False),
        ("../b", False),
        ("a/..", False),
        ("-x/y", False),
        ("a/b\n", False),
        ("a/ü", False),
        ("a" * 97 + "/b", False),
        (Path("a/b"), False),
        (None, False),
        (5, False),
    ],
)
def test_what_is_a_hub_id(model: Any, is_one: bool) -> None:
    assert hub_id(model) == (model if is_one else None)


def test_a_folder_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_id("a/b") == "a/b"
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert hub_id("a/b") is None


def test_looking_fetches_the_description_alone(hub: Hub) -> None:
    model = look(REPO)
    assert (model.repo, model.revision, model.commit) == (REPO, None, COMMIT)
    assert sorted(hub.fetched(REPO)) == ["config.json", INDEX_FILE, "tokenizer.json"]
    assert (model.folder / "config.json").read_bytes() == (TINY / "config.json").read_bytes()
    assert not list(model.folder.glob("*.safetensors"))
    assert model.sizes["README.md"] == 7
    weights = model.weight_files()
    assert weights == tuple(_shard(n, 3) for n in range(3))
    assert model.bytes_of(weights) == 100 + 101 + 102
    assert hub.tokens == {None}
    count = len(hub.fetched(REPO))
    assert look(REPO) == model
    assert len(hub.fetched(REPO)) == count  # the cache has them


def test_weights_are_fetched_once_and_in_part(hub: Hub) -> None:
    model, said = look(REPO), list[str]()
    some = model.weight_files(lambda name: ".layers.0." in name)
    assert some == (_shard(0, 3),)
    assert model.missing(some) == some
    fetch(model, some, said.append)
    assert [path.name for path in model.folder.glob("*.safetensors")] == [_shard(0, 3)]
    assert (model.folder / _shard(0, 3)).read_bytes() == bytes(100)
    assert said == [f"fetching {_shard(0, 3)} of {REPO}, 0.0 GB (1 of 1)"]
    fetch(model, model.weight_files())
    fetched = [name for name in hub.fetched(REPO) if name.endswith(".safetensors")]
    assert sorted(fetched) == [_shard(n, 3) for n in range(3)]
    assert not {"pytorch_model.bin", "README.md"} & set(hub.fetched(REPO))


def test_one_file_without_an_index(hub: Hub) -> None:
    del hub.repos[REPO][INDEX_FILE]
    hub.repos[REPO][SINGLE_FILE] = b"all"
    model = look(REPO)
    assert model.weight_files(lambda name: False) == (SINGLE_FILE,)
    fetch(model, model.weight_files())
    assert (model.folder / SINGLE_FILE).read_bytes() == b"all"


@pytest.mark.parametrize("revision", ["v1", COMMIT, "main"])
def test_a_revision(hub: Hub, revision: str) -> None:
    model = look(REPO, revision)
    assert (model.revision, model.commit) == (revision, COMMIT)
    assert any(path.startswith(f"/api/models/{REPO}/revision/{revision}") for path in hub.asked)
    assert f"/{REPO}/resolve/{revision}/config.json" in hub.asked


@pytest.mark.parametrize(
    ("how", "repo", "says"),
    [
        ({}, "some-lab/other", "there is no such model or it is private; check the name (no token"),
        ({"token": True}, "some-lab/other", "the token in HF_TOKEN may not read it"),
        ({"gated": True}, REPO, f"{REPO} is gated, and no token is set (HF_TOKEN); ask for access"),
        ({"revision": "nowhere"}, REPO, f"{REPO} has no revision 'nowhere'; name a branch"),
        (
            {"revision": "a b"},
            REPO,
            "is a branch, a tag or a commit of the hub, not 'a b'",
        ),
        ({"revision": 5}, REPO, "a commit of the hub, not 5"),
        ({"status": 503}, REPO, "the hub answered 503 when asked for"),
        ({"status": 403}, REPO, "there is no such model or it is private"),
        ({"without": "config.json"}, REPO, "has no config.json, so it is no Beam checkpoint"),
        ({"hidden": "tokenizer.json"}, REPO, "does not have a file of"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(
    how: dict[str, Any], repo: str, says: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how.get("token"):
        monkeypatch.setenv("HF_TOKEN", "hf_wrong" + "x" * 20)
    hub.gated = {REPO} if how.get("gated") else set()
    hub.hidden = {how["hidden"]} if "hidden" in how else set()
    hub.repos[REPO].pop(how.get("without", ""), None)
    hub.status = how.get("status")
    with pytest.raises(HubError) as caught:
        look(repo, how.get("revision"))
    text = str(caught.value)
    assert says in text
    assert "\n" not in text
    assert "hf_wrong" not in text
    assert "127.0.0.1" not in text
    assert isinstance(caught.value, CheckpointError)


def test_a_token_is_the_environments(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.gated = {REPO}
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    model = look(REPO)
    assert hub.tokens == {TOKEN}
    assert TOKEN not in repr(model)


def test_a_token_of_a_login_is_not_sent(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    look(REPO)
    assert hub.tokens == {None}


def test_offline_takes_what_is_there(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HubError, match=r"switched off \(HF_HUB_OFFLINE\) with nothing of some-lab"):
        look(REPO)
    assert hub.asked == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    online = look(REPO)
    fetch(online, (_shard(1, 3),))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    count = len(hub.asked)
    model = look(REPO)
    assert (model.folder, model.commit, dict(model.sizes)) == (online.folder, COMMIT, {})
    fetch(model, (_shard(1, 3),))
    with pytest.raises(HubError, match=rf"{_shard(0, 3)}, {_shard(2, 3)} of .* not in the hub's"):
        fetch(model, model.weight_files())
    assert len(hub.asked) == count
    with pytest.raises(HubError, match="nothing of revision v1 of"):
        look(REPO, "v1")


def test_no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    look(REPO)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(HubError, match=r"cannot be reached \(\w+\); HF_HUB_OFFLINE=1 takes the"):
        look(REPO)
    with pytest.raises(HubError, match=r"cannot be reached \(\w+\); check the network, or give"):
        look("some-lab/other")


def test_without_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(HubError, match="pip install huggingface_hub, or give a folder"):
        look(REPO)


def test_a_disk_without_room(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    model = look(REPO)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 2**30 + 303))
    fetch(model, (_shard(0, 3),))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 2**30 + 202))
    with pytest.raises(HubError, match=r"has 0.0 GB to be fetched and the disk of .* 1.1 GB free"):
        fetch(model, model.weight_files())
    assert hub.fetched(REPO).count(_shard(1, 3)) == 0


def test_a_cache_that_cannot_be_written(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "file"))
    with pytest.raises(HubError, match="cannot be written to the hub's cache"):
        look(REPO)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({"weight_map": {"a": "../../x.safetensors"}}, "not a safetensors file beside it"),
        ({"weight_map": {"a": "/etc/x.safetensors"}}, "not a safetensors file beside it"),
        ({"weight_map": {"a": "a\x1b[2J.safetensors"}}, "not a safetensors file beside it"),
        ({"weight_map": {"a": "x.bin"}}, "not a safetensors file beside it"),
        ({"weight_map": {"a": "x.safetensors"}}, "names x.safetensors, which the hub does not"),
        ({"weight_map": {}}, "empty weight_map"),
        ({"weight_map": []}, "cannot be read"),
        ([], "cannot be read"),
    ],
)
def test_hostile_indexes(index: Any, says: str, hub: Hub) -> None:
    hub.repos[REPO][INDEX_FILE] = json.dumps(index).encode()
    model = look(REPO)
    with pytest.raises(WorkbenchError, match=says):
        model.weight_files()


def test_other_formats_are_no_weights(hub: Hub) -> None:
    for name in [INDEX_FILE, *(_shard(n, 3) for n in range(3))]:
        del hub.repos[REPO][name]
    with pytest.raises(HubError, match="has no weights that can be read: neither"):
        look(REPO).weight_files()


def test_an_interrupt_ends_it_and_the_next_call_goes_on(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = look(REPO)

    def say(text: str) -> None:
        if "(2 of 3)" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(model, model.weight_files(), say)
    assert model.missing(model.weight_files()) == (_shard(1, 3), _shard(2, 3))
    fetch(model, model.weight_files())
    assert hub.fetched(REPO).count(_shard(0, 3)) == 1


# -- a hub that means no good ---------------------------------------------------------------------

SECRET = "hf_" + "q" * 30
JSON = {"Content-Type": "application/json"}


def frames(error: BaseException | None) -> Iterator[str]:
    """What an error, those it was made from and the frames of all of them would show."""
    while error is not None:
        yield repr(error)
        step = error.__traceback__
        while step is not None:
            if step.tb_frame.f_globals["__name__"] != __name__:
                yield repr(step.tb_frame.f_locals)
            step = step.tb_next
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize(
    ("status", "headers", "body", "says"),
    [
        (200, {"Content-Type": "text/html"}, b"<html>", "cannot be understood"),
        (200, JSON, b"[]", "cannot be understood"),
        (200, JSON, b'{"siblings": 5}', "cannot be understood"),
        (200, JSON, b'{"id": "x", "siblings": [{}]}', "cannot be understood"),
        (
            200,
            JSON,
            b'{"id": "x", "siblings": [{"rfilename": "config.json", "size": 1e999}]}',
            "cannot be understood",
        ),
        (200, JSON, b"[" * 100_000, "cannot be understood"),
        (200, JSON, b'{"id": "x"}', "has no config.json"),
        (500, {}, b"\x1b[2J", "answered 500"),
        (302, {"Location": "file:///etc/passwd"}, b"", "cannot be reached"),
    ],
)
def test_nonsense_is_one_sentence_and_shows_no_token(
    status: int,
    headers: dict[str, str],
    body: bytes,
    says: str,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    hub.instead = {f"api/models/{REPO}": (status, headers, body)}
    with pytest.raises(HubError, match=says) as caught:
        look(REPO)
    assert "\n" not in str(caught.value)
    assert hub.tokens == {SECRET}
    assert not [text for text in frames(caught.value) if SECRET in text]


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ({"ETag": '"x"'}, "cannot be understood"),
        ({"X-Repo-Commit": "../../../../elsewhere", "ETag": '"x"'}, "cannot be understood"),
        ({"X-Repo-Commit": COMMIT}, "cannot be understood"),
    ],
)
def test_files_whose_headers_are_wrong(
    headers: dict[str, str], says: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    hub.instead = {"config.json": (200, headers, b"{}")}
    with pytest.raises(HubError, match=says) as caught:
        look(REPO)
    assert not [text for text in frames(caught.value) if SECRET in text]
    assert not list(tmp_path.rglob("*elsewhere*"))


def test_a_refused_file_is_no_broken_network(hub: Hub) -> None:
    hub.instead = {"config.json": (403, {}, b"")}
    with pytest.raises(HubError, match="there is no such model or it is private"):
        look(REPO)


def test_another_host_does_not_get_the_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    with running_hub() as other:
        other.repos[REPO] = files()
        api = f"api/models/{REPO}"
        hub.instead = {api: (302, {"Location": f"{other.url}/{api}"}, b"")}
        look(REPO)
        assert other.asked
        assert other.tokens == {None}


@pytest.mark.parametrize("tail", ["\r\nX-Other: 1", "ü", "\x7f", " and more"])
def test_what_is_no_token_is_not_sent(tail: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET + tail)
    with pytest.raises(HubError, match="HF_TOKEN has characters that no token has") as caught:
        look(REPO)
    assert not [text for text in frames(caught.value) if SECRET in text]
    assert hub.asked == []


def test_blanks_around_a_token_are_not_of_it(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated = {REPO}
    monkeypatch.setenv("HF_TOKEN", f" {TOKEN}\n")
    assert look(REPO).repo == REPO
    monkeypatch.setenv("HF_TOKEN", "\n")
    hub.gated, hub.tokens = set(), set()
    look(REPO)
    assert hub.tokens == {None}


def test_sizes_below_nothing_and_beyond_a_description(hub: Hub) -> None:
    def says(**sizes: int) -> None:
        listed = [{"rfilename": name.replace("_json", ".json"), "size": size}
                  for name, size in sizes.items()]  # fmt: skip
        page = json.dumps({"id": REPO, "siblings": listed}).encode()
        hub.instead = {f"api/models/{REPO}": (200, JSON, page)}

    says(config_json=-5)
    assert look(REPO).sizes["config.json"] == 0
    says(config_json=1, tokenizer_json=10**11)
    count = len(hub.fetched(REPO))
    with pytest.raises(HubError, match=r"tokenizer.json of .* has 100 GB, which no description"):
        look(REPO)
    assert len(hub.fetched(REPO)) == count


@pytest.mark.parametrize("revision", ["../../x", "a/../../b", "", ".", "-x", "main ", "a\nb", b"x"])
def test_revisions_that_would_be_paths(hub: Hub, revision: Any) -> None:
    with pytest.raises(HubError, match="is a branch, a tag or a commit of the hub, not"):
        look(REPO, revision)
    assert hub.asked == []


def test_a_cache_that_is_emptied_meanwhile(hub: Hub) -> None:
    model = look(REPO)
    shutil.rmtree(model.folder)
    with pytest.raises(HubError, match=r"cannot be looked at \(No such file or directory\)"):
        fetch(model, (_shard(0, 3),))
    with pytest.raises(HubError, match="has no weights"):
        hubs.HubModel(
            repo=REPO, revision=None, commit=COMMIT, folder=model.folder, sizes={}
        ).weight_files()


def test_names_of_tensors_are_shown_on_one_line(tmp_path: Path) -> None:
    index = {"weight_map": {"a\n\x1b[2J": "../../etc/passwd"}}
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(HubError, match="not a safetensors file beside it") as caught:
        hubs.listed_files(tmp_path, "m")
    assert str(caught.value).isprintable()


def test_an_index_of_very_many_files(tmp_path: Path) -> None:
    places = {f"model.layers.{n}.x": f"m-{n}.safetensors" for n in range(50_000)}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": places}))
    files_ = hubs.listed_files(tmp_path, "m", lambda name: name.endswith("s.77.x"))
    assert files_ == ("m-77.safetensors",)
