"""Checkpoints of the Hugging Face hub: an id such as ``owner/name`` becomes a folder here.

:func:`look` fetches what describes a model (configuration, index, tokenizer: a few MB), so that it
can be decided what to do with it before hundreds of GB are on their way; :func:`fetch` then fetches
weight files, all or those that some layers need. Files lie in the hub's own cache, where other
programs (vLLM among them) find them; one that was cut off, by Ctrl-C too, is gone on with where the
hub's client can.

``HF_HUB_OFFLINE=1``, ``HF_HUB_CACHE``, ``HF_HOME`` and ``HF_ENDPOINT`` hold as everywhere. A token
is taken from the environment (``HF_TOKEN``) and from nowhere else; no message has it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from workbench.errors import CheckpointError
from workbench.files import LIMIT, FileError, expand, read_json
from workbench.hardware import gigabytes
from workbench.model.asked import shown
from workbench.model.presets import known_models

# As in checkpoint_save.py, which wants torch.
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# What describes a model, as far as it is read here or by an engine.
DESCRIBING = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    INDEX_FILE,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_WEIGHTS = re.compile(r"[A-Za-z0-9_][\w.-]{0,200}\.safetensors", re.ASCII)
_REVISION = re.compile(r"[\w][\w./+-]{0,254}", re.ASCII)
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_ASK_SECONDS = 30.0
_MARGIN = 1 << 30  # bytes of the disk that are left alone
# A token is a word of a header; the client would repeat any other in its error.
_TOKEN = re.compile(r"[!-~]{1,512}")

# What the client makes of answers that are not a hub's.
_NONSENSE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)

_T = TypeVar("_T")


class HubError(CheckpointError):
    """A model of the hub that cannot be had: no such one, no right to it, no network, no room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """A model of the hub whose description is on this machine.

    Attributes:
        repo: its id.
        revision: the branch, tag or commit that was asked for; None for the main one.
        commit: which commit that is.
        folder: where the description is, and where :func:`fetch` puts the weights.
        sizes: bytes of each file that the hub has, by name; empty where it was not asked
            (offline).
    """

    repo: str
    revision: str | None
    commit: str
    folder: Path
    sizes: Mapping[str, int]

    def weight_files(self, wanted: Callable[[str], bool] | None = None) -> tuple[str, ...]:
        """The files of the tensors of which ``wanted`` is true, of all by default.

        Raises:
            HubError: the model has no safetensors weights, or its index cannot be read.
        """
        files = listed_files(self.folder, self.repo, wanted)
        if files is None and SINGLE_FILE in self.sizes:
            files = (SINGLE_FILE,)
        if files is not None:
            absent = [file for file in files if self.sizes and file not in self.sizes]
            if absent:
                raise HubError(
                    f"the index of {self.repo} names {absent[0]}, which the hub does not have; "
                    "its owner has to upload it"
                )
            return files
        raise HubError(
            f"{self.repo} has no weights that can be read: neither {SINGLE_FILE} nor {INDEX_FILE} "
            f"is {'there' if self.sizes else 'in the cache of this machine'}; "
            f"take a model with safetensors files{'' if self.sizes else ', or go online'}"
        )

    def missing(self, files: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the files that are not on this machine yet."""
        return tuple(file for file in files if not (self.folder / file).exists())

    def bytes_of(self, files: tuple[str, ...]) -> int:
        """Bytes of the files, as far as the hub says."""
        return sum(self.sizes.get(file, 0) for file in files)


def hub_id(model: Any) -> str | None:
    """The text if it is to be looked for on the hub: ``owner/name``, and no folder or name known
    here."""
    if not isinstance(model, str) or not _ID.fullmatch(model) or model in known_models():
        return None
    return None if os.path.lexists(expand(model)) else model


def listed_files(
    folder: Path, model: str, wanted: Callable[[str], bool] | None = None
) -> tuple[str, ...] | None:
    """The weight files that a folder should have, by its index; None where it has no weights.

    Args:
        model: what errors call it.
        wanted: of which tensors; of all by default.

    Raises:
        HubError: the index cannot be read.
    """
    index = folder / INDEX_FILE
    if index.exists():
        names = _weight_map(index, model)
        return tuple(
            sorted({file for tensor, file in names.items() if wanted is None or wanted(tensor)})
        )
    return (SINGLE_FILE,) if (folder / SINGLE_FILE).exists() else None


def offline() -> bool:
    """Whether the hub must not be asked."""
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in _OFFLINE)


def look(repo: str, revision: str | None = None) -> HubModel:
    """Fetch what describes a model: configuration, index, tokenizer. No weights.

    Offline it is taken from the hub's cache as it is.

    Args:
        revision: a branch, a tag or a commit; the main branch by default.

    Raises:
        HubError: no such model or revision, no right to it, no network, not in the cache.
    """
    if revision is not None and (
        not isinstance(revision, str)
        or not _REVISION.fullmatch(revision)
        or ".." in revision  # the client makes paths of it
    ):
        raise HubError(f"revision is a branch, a tag or a commit of the hub, not {shown(revision)}")
    hub = _client()
    if offline():
        folder = _cached(hub, repo, revision)
        if folder is None:
            raise HubError(
                f"{repo} is no folder here, and the hub is switched off (HF_HUB_OFFLINE) with "
                f"nothing of {_named(repo, revision)} in its cache; unset that or give a folder"
            )
        return HubModel(
            repo=repo,
            revision=revision,
            commit=folder.name,
            folder=folder,
            sizes=MappingProxyType({}),
        )
    _check_token()
    sizes = _asked(hub, repo, revision, lambda: _sizes(hub, repo, revision))
    if "config.json" not in sizes:
        raise HubError(f"{repo} on the hub has no config.json, so it is no Beam checkpoint")
    for name in DESCRIBING:
        if sizes.get(name, 0) > LIMIT:
            raise HubError(
                f"{name} of {repo} has {gigabytes(sizes[name])}, which no description of a model "
                "has; take another model"
            )

    def describing() -> Path:
        # By the revision's own name, which the cache then knows when it is offline.
        config = Path(_download(hub, repo, "config.json", revision))
        for name in DESCRIBING[1:]:
            if name in sizes:
                _download(hub, repo, name, config.parent.name)
        return config.parent

    folder = _asked(hub, repo, revision, describing)
    return HubModel(
        repo=repo,
        revision=revision,
        commit=folder.name,
        folder=folder,
        sizes=MappingProxyType(sizes),
    )


def fetch(
    model: HubModel, files: tuple[str, ...], say: Callable[[str], object] | None = None
) -> None:
    """Fetch weight files that are not here yet, one after the other; the hub's client draws a bar
    for each. Ctrl-C ends it at once.

    Args:
        say: told before each file which it is, of how many and how large.

    Raises:
        HubError: it cannot be asked, has not the file, or the disk has no room for all of them.
    """
    missing = model.missing(files)
    if not missing:
        return
    if offline():
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise HubError(
            f"{', '.join(missing[:3])}{more} of {model.repo} are not in the hub's cache, and it "
            "is switched off (HF_HUB_OFFLINE); unset that"
        )
    _check_token()
    needed = model.bytes_of(missing)
    try:
        free = shutil.disk_usage(model.folder).free
    except OSError as error:
        raise HubError(
            f"{model.folder} of {model.repo} cannot be looked at ({error.strerror or error}); load "
            "it again"
        ) from error
    if needed + _MARGIN > free:
        raise HubError(
            f"{model.repo} has {gigabytes(needed)} to be fetched and the disk of {model.folder} "
            f"has {gigabytes(free)} free; free space, set HF_HUB_CACHE to another disk, or load "
            "some layers (layers=[0, 3])"
        )
    hub = _client()
    for number, name in enumerate(missing, 1):
        if say is not None:
            size = gigabytes(model.sizes.get(name, 0))
            say(f"fetching {name} of {model.repo}, {size} ({number} of {len(missing)})")
        _asked(
            hub,
            model.repo,
            model.revision,
            lambda name=name: _download(hub, model.repo, name, model.commit),  # type: ignore[misc]
        )


# -- asking -------------------------------------------------------------------------------------


def _client() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise HubError(
            "models of the hub are fetched with huggingface_hub, which is not installed beside "
            "this Python; pip install huggingface_hub, or give a folder"
        ) from error
    return huggingface_hub


def _token() -> str | bool:
    """The environment's, else none: not what a login left on the disk."""
    return next((word for name in _TOKENS if (word := os.environ.get(name, "").strip())), False)


def _check_token() -> None:
    if _token() and not _TOKEN.fullmatch(str(_token())):  # in no name: frames are shown
        raise HubError(
            "HF_TOKEN has characters that no token has; set it to the token alone, or unset it"
        )


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _cache() -> str | None:
    """Read when asked: a notebook may set it after the client was imported."""
    if os.environ.get("HF_HUB_CACHE"):
        return str(expand(os.environ["HF_HUB_CACHE"]))
    home = os.environ.get("HF_HOME")
    return str(expand(home) / "hub") if home else None


def _download(hub: Any, repo: str, name: str, revision: str | None) -> str:
    return str(
        hub.hf_hub_download(
            repo,
            name,
            revision=revision,
            token=_token(),
            endpoint=_endpoint(),
            cache_dir=_cache(),
        )
    )


def _cached(hub: Any, repo: str, revision: str | None) -> Path | None:
    found = hub.try_to_load_from_cache(repo, "config.json", revision=revision, cache_dir=_cache())
    return Path(found).parent if isinstance(found, str) else None


def _sizes(hub: Any, repo: str, revision: str | None) -> dict[str, int]:
    """Bytes of each file that the hub lists; 0 where it does not say."""
    said = hub.HfApi(endpoint=_endpoint()).model_info(
        repo, revision=revision, files_metadata=True, timeout=_ASK_SECONDS, token=_token()
    )
    return {str(one.rfilename): max(0, int(one.size or 0)) for one in said.siblings or ()}


def _asked(hub: Any, repo: str, revision: str | None, ask: Callable[[], _T]) -> _T:
    """The answer, or whatever the hub's client raises as one sentence of our own.

    Its error is let go rather than chained: its message may have a header, and the frames of its
    traceback have the token, which debuggers and notebooks show.
    """
    try:
        return ask()
    except Exception as error:
        sentence = _sentence(hub, repo, revision, error)
    raise HubError(sentence)


def _sentence(hub: Any, repo: str, revision: str | None, error: Exception) -> str:
    errors = hub.errors
    status = _status(error)
    token = "the token in HF_TOKEN" if _token() else "no token is set (HF_TOKEN)"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{repo} is gated, and {token}{' may not read it' if _token() else ''}; ask for "
            "access on its page, and set HF_TOKEN to a token of that account"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} has no revision {shown(revision)}; name a branch, a tag or a commit of it"
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        return (
            f"{repo} is no folder here, and on the hub there is no such model or it is private; "
            f"check the name ({'the token in HF_TOKEN may not read it' if _token() else token})"
        )
    if isinstance(error, errors.EntryNotFoundError) and status is not None:
        return f"the hub does not have a file of {repo} that it listed; ask again later"
    if status is not None:
        return f"the hub answered {status} when asked for {repo}; ask again later"
    if isinstance(error, errors.HFValidationError):
        return f"{repo} is no folder here and no id that the hub takes; give owner/name"
    if isinstance(error, OSError) and error.errno is not None and not _of_network(error):
        where = f"{error.filename}: " if error.filename else ""
        return (
            f"{repo} cannot be written to the hub's cache ({where}{error.strerror or error}); "
            "free space, or set HF_HUB_CACHE to another folder"
        )
    root = error.__cause__ or error
    if isinstance(root, (*_NONSENSE, errors.FileMetadataError)) or type(root) is OSError:
        return (
            f"what the hub answered of {repo} cannot be understood ({type(root).__name__}); check "
            "HF_ENDPOINT and the network, or give a folder"
        )
    here = "; HF_HUB_OFFLINE=1 takes the copy in its cache" if _cached(hub, repo, revision) else ""
    return (
        f"{repo} is no folder here, and the hub cannot be reached ({type(root).__name__})"
        f"{here or '; check the network, or give a folder'}"
    )


def _status(error: BaseException | None) -> int | None:
    """The hub's answer that an error is of; the client wraps some in others of its own."""
    for _ in range(4):
        found = getattr(getattr(error, "response", None), "status_code", None)
        if error is None or found is not None:
            return found
        error = error.__cause__
    return None


def _of_network(error: OSError) -> bool:
    return isinstance(error, ConnectionError | TimeoutError)


def _named(repo: str, revision: str | None) -> str:
    return repo if revision is None else f"revision {revision} of {repo}"


def _weight_map(index: Path, repo: str) -> dict[str, str]:
    try:
        names = {str(k): str(v) for k, v in read_json(index)["weight_map"].items()}
    except (FileError, TypeError, KeyError, AttributeError) as error:
        raise HubError(f"the index of {repo} ({index}) cannot be read; fetch it again") from error
    for tensor, file in names.items():
        # Names come from somebody else: nothing is fetched or written beside the folder.
        if not _WEIGHTS.fullmatch(file):
            raise HubError(
                f"the index of {repo} places {shown(tensor)} in {shown(file)}, which is not a "
                "safetensors file beside it"
            )
    if not names:
        raise HubError(f"the index of {repo} has an empty weight_map; its owner has to restore it")
    return names
