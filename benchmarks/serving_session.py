"""A real serving session, recorded: what notebooks show where no server runs.

    PYTHONPATH=. python3 benchmarks/serving_session.py --out FOLDER --site FOLDER [--site FOLDER …]
    PYTHONPATH=. python3 benchmarks/serving_session.py --out FOLDER --cpu --engine …/bin/vllm

Starts ``vllm serve`` of beam-tiny through ``workbench.serving.server.server.serve`` and, with a
monitor that records twice a second, chats with it and loads it with held-out prompts, one, four and
sixteen together, with pauses. On a GPU: vLLM 0.33 with the bundled DFlash2 drafter, 7 draft tokens,
adaptive verification and the probe. With ``--cpu``: vLLM's CPU build and n-gram speculation, which
neither the drafter nor the probe can join.

vLLM need not be installed: ``--site`` are folders that it, and what the client needs, is imported
from. The folder gets ``monitor.jsonl``, ``chat_*.json``, ``probe.jsonl`` (cut at a whole line below
2 MB), ``metrics_end.txt`` and ``session.json``: versions, start-up, and the same counts by the
client, the counters, the monitor and the probe. Whatever fails is named there, what there is by
then is kept, and the server is ended. Exit code 1 where something failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

from workbench.errors import WorkbenchError
from workbench.files import read_json, write_whole
from workbench.hardware import cpu_name, driver_gpus, usable_cores
from workbench.serving.launch.launch import Launch, launch_for
from workbench.serving.server.server import EngineEndedError, Server, serve
from workbench.serving.server.startup_progress import Progress

HERE = Path(__file__).resolve().parents[1]
ZOO = HERE / "workbench" / "model" / "zoo" / "beam-tiny"
DATA = HERE / "tests" / "data"
DRAFTS = 7
TOGETHER = 16  # requests that the engine decodes at once
START_SECONDS = 300.0
STOP_SECONDS = 20.0  # after which the engine is killed
RESERVE = 50.0  # kept of --seconds for ending the server and writing
MOST_BYTES = 1_900_000  # of a probe's recording
MARK = "BEAM_SESSION"  # in the environment of all that is started here
BEGAN = time.monotonic()
FIXED = {
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_COLOR": "0", "VLLM_HOST_IP": "127.0.0.1",
    "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "DO_NOT_TRACK": "1",
}  # fmt: skip
ON_GPU = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_V2_MODEL_RUNNER": "1",
    # beam-tiny never learnt the markers that this grammar would have it write.
    "VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT": "0",
}  # fmt: skip
ON_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


NGRAM = (
    "--speculative-config",
    '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, '
    '"prompt_lookup_max": 4}',
)


class OutOfTimeError(BaseException):
    """The time that the whole may take is over; like an interrupt nobody keeps it for himself."""


def say(text: object) -> None:
    """Progress with the seconds since the start, on stderr."""
    print(f"{time.monotonic() - BEGAN:6.1f} s: {text}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------ the engine


def write_engine(folder: Path, sites: list[Path]) -> tuple[Path, str]:
    """A ``vllm`` program for a vLLM that lies in folders, with our probe as its only plugin; and
    its ``PYTHONPATH``."""
    plugins = folder / "plugins"
    facts = plugins / "beam_workbench-0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: beam-workbench\nVersion: 0\n", "utf-8"
    )
    (facts / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nworkbench_probe = workbench.serving.probe:register\n", "utf-8"
    )
    if not any(list(site.glob("vllm-*.dist-info")) for site in sites):
        files = [site / "vllm" / "_version.py" for site in sites]
        text = "".join(file.read_text("utf-8") for file in files if file.exists())
        found = re.search(r"^(?:__version__|version)\b.*?= *['\"]([\w.+]+)", text, re.MULTILINE)
        version = found.group(1) if found else "0.33.0"
        there = plugins / f"vllm-{version}.dist-info"
        there.mkdir()
        (there / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", "utf-8"
        )
    path = os.pathsep.join(map(str, (plugins, *sites, HERE)))
    program = folder / "vllm"
    program.write_text(
        f"#!/bin/sh\nPYTHONPATH={shlex.quote(path)} exec {shlex.quote(sys.executable)} "
        '-m vllm.entrypoints.cli.main "$@"\n',
        "utf-8",
    )
    program.chmod(0o755)
    return program, path


def write_ngram(folder: Path, engine: Path) -> Path:
    """The same engine with n-gram speculation, which a launch does not know."""
    program = folder / "vllm"
    words = [*NGRAM, "--per-request-spec-decode-metrics", "summary"]
    program.write_text(f'#!/bin/sh\nexec {engine} "$@" {shlex.join(words)}\n', "utf-8")
    program.chmod(0o755)
    return program


def write_template(folder: Path) -> Path:
    """beam-tiny's chat template, but that a reply to somebody who offers tools is not begun: vLLM
    0.33 can force a call only where the prompt has not opened the answer already."""
    template = str(read_json(ZOO / "tokenizer_config.json")["chat_template"])
    opened = "'<answer>') -}}"
    if template.count(opened) != 1:
        raise WorkbenchError("the chat template of beam-tiny is another one; look at what it opens")
    file = folder / "chat_template.jinja"
    file.write_text(template.replace(opened, "('' if tools else '<answer>')) -}}"), "utf-8")
    return file


def engine_facts(python: list[str], path: str | None) -> dict[str, str | None]:
    """Versions in the engine's Python."""
    names = ("vllm", "vllm-cpu", "torch", "triton", "transformers", "xgrammar", "llguidance")
    code = (
        "import importlib.metadata as m, json, platform\n"
        "def of(name):\n"
        "    try: return m.version(name)\n"
        "    except m.PackageNotFoundError: return None\n"
        f"found = {{n: of(n) for n in {names}}}\n"
        "print(json.dumps({'python': platform.python_version()} | found))"
    )
    variables = dict(os.environ) | ({} if path is None else {"PYTHONPATH": path})
    done = subprocess.run(
        [*python, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=variables,
    )
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        say(f"the engine's Python says no versions: {done.stderr.strip()[-200:]}")
        return {}


def launch_here(given: argparse.Namespace, facts: dict[str, str | None], template: Path) -> Launch:
    """What is started."""
    backend = next((n for n in ("xgrammar", "llguidance") if facts.get(n)), None)
    structured: tuple[str, ...] = ()
    if backend is not None:
        settings = {
            "backend": "xgrammar" if backend == "xgrammar" else "guidance",
            "disable_any_whitespace": True,
        }
        structured = ("--structured-outputs-config", json.dumps(settings))
    extra: tuple[str, ...] = ("--seed", "0", "--no-enable-prefix-caching", *structured)
    if given.cpu:
        return launch_for("beam-tiny", cpu=True, port=given.port, context=2048,
                          sequences=TOGETHER, batched_tokens=512, extra=extra)  # fmt: skip
    extra += ("--chat-template", str(template))
    graphs = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]}
    return launch_for(
        "beam-tiny", port=given.port, context=2048, sequences=TOGETHER, batched_tokens=4096,
        kv_dtype="bf16", speculative_tokens=DRAFTS, adaptive=True, statistics="summary",
        utilization=0.5,
        extra=(*extra, "--dtype", "bfloat16", "--compilation-config", json.dumps(graphs),
               # Small enough for its share in use to be seen: 16 requests of 700 tokens fill it.
               "--kv-cache-memory-bytes", str(64 * 2**20)),
    )  # fmt: skip


# ------------------------------------------------------------------ what is asked


@dataclass
class Asked:
    """Sums over the requests that were answered, as their answers count them; and what failed."""

    requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    uncounted: int = 0  # answers without counts
    failed: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, reply: Any) -> None:
        """Count one answer."""
        with self.lock:
            self.requests += 1
            if reply.usage is None:
                self.uncounted += 1
            else:
                self.prompt_tokens += reply.usage.prompt
                self.generation_tokens += reply.usage.completion
            if reply.speculation is not None:
                self.drafts += reply.speculation.steps
                self.draft_tokens += reply.speculation.drafted
                self.accepted_tokens += reply.speculation.accepted

    def fail(self, what: str) -> None:
        """Note what went wrong; a few are enough."""
        with self.lock:
            if len(self.failed) < 20:
                self.failed.append(what)

    def counts(self) -> dict[str, int]:
        """The sums by the names of the monitor's counts."""
        return {name: getattr(self, name) for name in COUNTED}


COUNTED = ("prompt_tokens", "generation_tokens", "drafts", "draft_tokens", "accepted_tokens")


class Load:
    """Held-out prompts, one after the other; each is continued where its text breaks off."""

    def __init__(self, client: Any, asked: Asked, extra: dict[str, Any] | None = None) -> None:
        self.client, self.asked = client, asked
        self.texts = {
            kind: read_json(DATA / f"heldout_{kind}.json")["prompts"] for kind in ("code", "prose")
        }
        self.number, self.lock = 0, threading.Lock()
        # The model goes on with the text as its own answer. A server that cannot do that is asked
        # in the usual way.
        begun = {"add_generation_prompt": False, "continue_final_message": True}
        self.extra = begun if extra is None else extra

    def try_prefilled(self) -> bool:
        """Whether the server lets an answer be begun; one short request."""
        try:
            self.one("code", 8)
        except WorkbenchError as error:
            say(f"an answer cannot be begun here: {error}")
            self.extra = {}
        return bool(self.extra)

    def one(self, kind: str, most: int) -> None:
        """One request, streamed to its end."""
        with self.lock:
            number, self.number = self.number, self.number + 1
        text = self.texts[kind][number % len(self.texts[kind])]
        messages: Any = text
        if self.extra:
            messages = [
                {"role": "user", "content": "Go on."},
                {"role": "assistant", "content": text},
            ]
        # Lengths differ, so that requests do not all end in the same moment.
        tokens = most - number * 7 % (most // 2)
        answer = self.client.chat(messages, max_tokens=tokens, temperature=0.0, extra=self.extra)
        self.asked.add(answer.finish())

    def together(self, count: int, kind: str, most: int, *, until: float = 0.0) -> None:
        """So many at once; again and again where ``until`` is a moment to come."""

        def work() -> None:
            while True:
                try:
                    self.one(kind, most)
                except Exception as error:
                    self.asked.fail(f"{kind}, {count} together: {type(error).__name__}: {error}")
                    return
                if time.monotonic() >= until:
                    return

        threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


# (name, what is sent, requests at once, share of the time, in bursts with pauses between them)
PHASES: tuple[tuple[str, str, int, float, bool], ...] = (
    ("one at a time, code", "code", 1, 0.17, False),
    ("four together, code", "code", 4, 0.2, False),
    ("bursts of sixteen, code", "code", TOGETHER, 0.25, True),
    ("idle", "", 0, 0.08, False),
    ("four together, prose", "prose", 4, 0.15, False),
    ("twenty-four at once, code: some wait", "code", TOGETHER * 3 // 2, 0.15, True),
)


def run_load(load: Load, seconds: float, most: int) -> list[dict[str, Any]]:
    """All phases; when each was."""
    done = []
    for name, kind, count, share, bursts in PHASES:
        began, at = time.monotonic(), time.time()
        until, before = began + share * seconds, load.asked.requests
        if not count:
            time.sleep(share * seconds)
        elif not bursts:
            load.together(count, kind, most, until=until)
        while bursts and time.monotonic() < until:
            load.together(count, kind, most)
            time.sleep(0.6)
        row = {"phase": name, "at": round(at, 2), "seconds": round(time.monotonic() - began, 2),
               "requests": load.asked.requests - before}  # fmt: skip
        say(row)
        done.append(row)
    return done


# ------------------------------------------------------------------ conversations


@dataclass
class Finding:
    """What a review found."""

    verdict: Literal["keep", "change"]
    risk: Literal["low", "high"]
    certain: bool


SCHEMA = {
    "type": "object",
    "properties": {
        "language": {"enum": ["python", "rust", "prose"]},
        "functions": {"type": "integer", "minimum": 0, "maximum": 9},
        "tests": {"type": "boolean"},
    },
    "required": ["language", "functions", "tests"],
    "additionalProperties": False,
}
LAYERS = read_json(ZOO / "config.json")["layer_types"]


def layer_kind(
    layer: Annotated[Literal[0, 1, 2, 3, 4, 5, 6, 7, 8], "counted from 0"],
) -> dict[str, Any]:
    """What kind of attention a layer of beam-tiny has."""
    return {"layer": layer, "attention": LAYERS[layer].removesuffix("_attention")}


def chats(client: Any, asked: Asked, out: Path, note: str) -> dict[str, Any]:
    """Each conversation and how it went: the file's name, or what was wrong."""
    from workbench.serving.client.chat import Chat
    from workbench.serving.client.chat_settings import ChatSettings
    from workbench.serving.client.reply import Reply
    from workbench.serving.client.tools import ToolResult

    def turn(chat: Any, text: str, **more: Any) -> None:
        """One turn, streamed; a tool that is forced is so for the first answer only, and is not
        offered after it, else the model could say nothing else ever after."""
        forced = dict(more.pop("extra", {}))
        for event in chat.stream(text, extra=forced, **more):
            if isinstance(event, Reply):
                asked.add(event)
            elif isinstance(event, ToolResult):
                forced["tool_choice"] = "none"

    def plain() -> Any:
        chat = Chat(client, settings=ChatSettings(max_tokens=120, temperature=0.2, seed=3))
        turn(chat, CODE)
        turn(chat, STACK)
        return chat

    def reasoning() -> Any:
        settings = ChatSettings(max_tokens=96, temperature=0.2, seed=3, reasoning=True)
        chat = Chat(client, settings=settings)
        turn(chat, CODE)
        return chat

    def tool() -> Any:
        """The first of the ways to force a call by which one came and gave something."""
        named = {"type": "function", "function": {"name": "layer_kind"}}
        for choice, text in (
            (named, "Which attention has layer 2?"),
            (named, "Call layer_kind for layer 2."),
            ("required", "Which attention has layer 2?"),
        ):
            # Greedy, and words after which this model calls: the grammar of vLLM 0.33 lets it think
            # before, for ever if it likes.
            settings = ChatSettings(max_tokens=64, temperature=0.0, reasoning=False)
            chat = Chat(client, tools=[layer_kind], settings=settings)
            try:
                turn(chat, text, extra={"tool_choice": choice})
            except WorkbenchError as error:
                tried.append(str(error))
                continue
            results = [result for each in chat.turns for result in each.results]
            if results and not any(result.error for result in results):
                return chat
            said = [(r.reasoning or r.text)[:80] for each in chat.turns for r in each.replies]
            tried.append(f"no call that gave something: {said} {[r.error for r in results]}")
        raise WorkbenchError("; ".join(tried))

    def structured() -> Any:
        chat = Chat(client, settings=ChatSettings(max_tokens=96, temperature=0.5, seed=3))
        turn(chat, f"Describe this text.\n{CODE}", schema=SCHEMA)
        turn(chat, "Review it.", schema=Finding)
        return chat

    tried: list[str] = []
    made: dict[str, Any] = {}
    for name, make in (("plain", plain), ("reasoning", reasoning), ("tool", tool),
                       ("structured", structured)):  # fmt: skip
        try:
            chat = make()
            chat.save(out / f"chat_{name}.json", note=note)
            made[name] = {"file": f"chat_{name}.json", "turns": len(chat.turns)}
            if name == "tool" and tried:
                made[name]["tried_before"] = tried
        except Exception as error:  # the others go on
            made[name] = {"failed": f"{type(error).__name__}: {error}"}
            asked.fail(f"chat {name}: {error}")
        say(f"chat {name}: {made[name]}")
    return made


CODE = (
    "import os\nimport sys\n\n\ndef main(argv=None):\n"
    '    """Run the program."""\n    parser = argparse.ArgumentParser('
)
STACK = "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push"


# ------------------------------------------------------------------ what came of it


def page_of(server: Server) -> str:
    """The server's page of metrics, past every proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{server.address.url}/metrics", timeout=10) as answer:
        return str(answer.read().decode("utf-8"))


PAGE_NAMES = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "drafts": "vllm:spec_decode_num_drafts_total",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
}


def counters(page: str) -> dict[str, int]:
    """The counters of a page, read without the workbench's own reader."""
    found: dict[str, int] = {}
    for name, series in PAGE_NAMES.items():
        values = re.findall(rf"^{re.escape(series)}\{{[^}}]*\}} (\S+)$", page, re.MULTILINE)
        if values:
            found[name] = round(sum(map(float, values)))
    return found


def length(counts: dict[str, int | None]) -> float | None:
    """Acceptance length."""
    drafts, accepted = counts.get("drafts"), counts.get("accepted_tokens")
    return 1 + accepted / drafts if drafts and accepted is not None else None


def monitored(path: Path) -> dict[str, Any]:
    """What the recording of the monitor adds up to."""
    from workbench.serving.monitor.intervals import pooled
    from workbench.serving.monitor.monitor_file import read_recording

    recording = read_recording(path)
    whole = pooled(recording.samples)
    return {
        "samples": len(recording.samples), "skipped": recording.skipped,
        "bytes": path.stat().st_size, "source": recording.source,
        "missed": sum(s.missed for s in recording.samples),
        "running_at_most": max((s.running or 0 for s in recording.samples), default=None),
        "waiting_at_most": max((s.waiting or 0 for s in recording.samples), default=None),
        "kv_usage_at_most": max((s.kv_usage or 0.0 for s in recording.samples), default=None),
        "tokens_per_second_at_most": max(
            (s.tokens_per_second or 0.0 for s in recording.samples), default=None
        ),
        "counts": {} if whole is None else {name: getattr(whole, name) for name in COUNTED},
    }  # fmt: skip


def probed(path: Path) -> dict[str, Any]:
    """What the whole recording of the probe says, before it is cut."""
    from workbench.serving.probe_read import read_probe

    run = read_probe(path)
    figures = run.trace.acceptance()
    decided = [step for step in run.trace.steps if step.policy]
    return {
        "steps": len(run.trace.steps), "dropped": run.dropped, "inconsistent": run.inconsistent,
        "skipped": run.trace.skipped, "ended": run.ended, "bytes": path.stat().st_size,
        "tables": run.tables is not None, "fits": len(run.coefficients), "decided": len(decided),
        "trimmed": sum(r.trimmed for s in decided for r in s.requests),
        "admitted": figures.admitted,
        "counts": {"drafts": figures.events, "draft_tokens": figures.drafted,
                   "accepted_tokens": figures.accepted},
    }  # fmt: skip


def keep(source: Path, target: Path) -> int:
    """Whole lines of a recording, below 2 MB, with an end that says so; how many."""
    kept: list[bytes] = []
    size = 0
    with source.open("rb") as file:
        for line in file:
            if size + len(line) > MOST_BYTES or not line.endswith(b"\n"):
                why = {"kind": "engine", "what": "end", "reason": "cut here, to be kept"}
                kept.append(json.dumps(why).encode() + b"\n")
                break
            kept.append(line)
            size += len(line)
    write_whole(target, b"".join(kept))
    return len(kept)


def left_over(mark: str, group: int | None) -> list[int]:
    """Processes that were started here and still run: by what their environment says, or, since an
    engine's process that names itself writes over that, by their group or session."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (entry / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            if int(entry.name) == os.getpid() or words[0] in ("Z", "X"):
                continue
            ours = group is not None and str(group) in words[2:4]
            if ours or mark in (entry / "environ").read_text("utf-8", "replace"):
                found.append(int(entry.name))
    return found


def stages(progress: list[Progress]) -> list[dict[str, Any]]:
    """When each stage of the start was first spoken of."""
    first: dict[str, float] = {}
    for each in progress:
        first.setdefault(each.stage, each.seconds)
    return [{"stage": stage, "at": round(seconds, 1)} for stage, seconds in first.items()]


def without_folders(text: str, names: dict[str, str]) -> str:
    """A text with folders of this machine replaced by names, longest first."""
    for folder in sorted(names, key=len, reverse=True):
        text = text.replace(folder, names[folder])
    return text


def compared(document: dict[str, Any]) -> dict[str, Any]:
    """The same counts by each who counted, and how they differ from the engine's counters: those of
    the session, for the probe those since the engine's start. The probe has drafts that a grammar
    refused before they were verified; the counters leave those out."""
    sources = {
        name: document.get(name, {}).get("counts", {})
        for name in ("counters", "client", "monitor", "probe")
    }
    since = {"probe": document.get("counters", {}).get("total", {})}
    return {
        "acceptance_length": {name: length(counts) for name, counts in sources.items()}
        | {"counters_since_start": length(since["probe"])},
        "differs_from_counters": {
            name: {
                key: value - reference[key]
                for reference in [since.get(name, sources["counters"])]
                for key, value in counts.items()
                if key in reference and value is not None and value != reference[key]
            }
            for name, counts in sources.items()
            if name != "counters" and counts
        },
    }


# ------------------------------------------------------------------ the whole


class Session:
    """One session: what there is of it goes into :attr:`document`, step by step."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.out, self.folder = given, given.out, folder
        self.asked = Asked()
        self.progress: list[Progress] = []
        self.probe_file = folder / "probe.jsonl"
        self.log = folder / "server.log"
        self.failed: list[str] = []
        self.document: dict[str, Any] = {
            "schema": "workbench-serving-session/1",
            "about": "a real serving session of beam-tiny; recorded, not measured where it is read",
            "recorder": "benchmarks/serving_session.py",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "hardware": {"cpu": cpu_name(), "cores": usable_cores(), "gpus": list(driver_gpus())},
        }
        self.names = {
            str(ZOO / "dflash2"): "beam-tiny/dflash2", str(ZOO): "beam-tiny",
            str(folder): "session", str(HERE): "workbench", str(self.out.resolve()): "out",
            str(Path.home()): "home", sys.prefix: "python", sys.base_prefix: "python",
            tempfile.gettempdir(): "temp",
        }  # fmt: skip
        for number, site in enumerate(given.site):
            self.names[str(site)] = f"site{number}"
        if given.engine:
            self.names[str(given.engine)] = "vllm"

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """A part that may fail without ending the others."""
        try:
            yield
        except (OutOfTimeError, KeyboardInterrupt):
            raise
        except Exception as error:
            self.fail(what, error)

    def fail(self, what: str, error: BaseException) -> None:
        """Note it."""
        text = without_folders(f"{what}: {type(error).__name__}: {error}", self.names)
        say(text)
        self.failed.append(text)

    def start(self) -> Server:
        """The server, once it answers."""
        given = self.given
        if given.cpu:
            engine = given.engine or HERE / ".venv-cpu-serving" / "bin" / "vllm"
            program, path = write_ngram(self.folder, engine), None
            python = [str(engine.with_name("python"))]
        else:
            program, path = write_engine(self.folder, given.site)
            python = [sys.executable]
            os.environ["BEAM_PROBE"] = str(self.probe_file)
        for name, value in (FIXED | (ON_CPU if given.cpu else ON_GPU)).items():
            os.environ.setdefault(name, value)
        os.environ["VLLM_CACHE_ROOT"] = str(self.folder / "cache")
        facts = engine_facts(python, path)
        launch = launch_here(given, facts, write_template(self.folder))
        words = [without_folders(word, self.names) for word in launch.words]
        if given.cpu:
            words += [*NGRAM, "--per-request-spec-decode-metrics", "summary"]
        self.document |= {"versions": facts, "words": words}
        say(shlex.join(words))

        def told(progress: Progress) -> None:
            self.progress.append(progress)
            say(progress)

        server = serve(launch, engine=program, log=self.log, keep=False, limit=START_SECONDS,
                       stop_seconds=STOP_SECONDS, say=told)  # fmt: skip
        self.document["start"] = {
            "seconds": round(server.seconds, 1), "stages": stages(self.progress)
        }  # fmt: skip
        return server

    def talk(self, server: Server) -> None:
        """Monitor, conversations, load."""
        from workbench.serving.client.client import Client
        from workbench.serving.monitor.monitor import Monitor

        client = Client(server.address, key=None, timeout=60.0)
        self.document["served"] = [asdict(model) for model in client.models()]
        # What is compiled at its first use is not of the session. The probe records it all the
        # same, so its counts are compared with all that the engine counted.
        warm = Load(client, Asked())
        with self.step("warm-up"):
            self.document["prefilled"] = warm.try_prefilled()
            warm.together(TOGETHER, "code", 24)
        self.failed += warm.asked.failed
        load = Load(client, self.asked, extra=warm.extra)
        time.sleep(1.0)
        before = counters(page_of(server))
        with Monitor(server.address, hertz=2.0, record=self.out / "monitor.jsonl") as monitor:
            if not monitor.reached(10.0):
                raise WorkbenchError(f"no page of metrics: {monitor.error}")
            try:
                self._ask(client, load)
            finally:
                with suppress(Exception):  # the last requests' counts come with the next page
                    monitor.wait(monitor.seen + 3, timeout=4.0)
                with self.step("metrics at the end"):
                    page = page_of(server)
                    write_whole(self.out / "metrics_end.txt", page.encode())
                    now = counters(page)
                    added = {name: now[name] - before.get(name, 0) for name in now}
                    self.document["counters"] = {
                        "before": before, "counts": added, "total": now
                    }  # fmt: skip

    def _ask(self, client: Any, load: Load) -> None:
        facts = self.document["versions"]
        engine = facts.get("vllm") or facts.get("vllm-cpu")
        gpus = self.document["hardware"]["gpus"]
        drafting = "n-gram speculation" if self.given.cpu else "DFlash2, adaptive verification"
        where = gpus[0] if gpus and not self.given.cpu else self.document["hardware"]["cpu"]
        note = f"vLLM {engine}, {where}, beam-tiny, {drafting}"
        self.document["note"] = note
        with self.step("conversations"):
            self.document["chats"] = chats(client, self.asked, self.out, note)
        with self.step("load"):
            self.document["phases"] = run_load(load, self.given.load_seconds, self.given.new_tokens)

    def finish(self) -> None:
        """What the files say, once the server has ended."""
        self.document["client"] = {
            "requests": self.asked.requests, "uncounted": self.asked.uncounted,
            "counts": self.asked.counts(),
        }  # fmt: skip
        if (self.out / "monitor.jsonl").exists():
            with self.step("the monitor's recording"):
                self.document["monitor"] = monitored(self.out / "monitor.jsonl")
        if self.probe_file.exists():
            with self.step("the probe's recording"):
                self.document["probe"] = probed(self.probe_file)
                self.document["probe"]["lines_kept"] = keep(
                    self.probe_file, self.out / "probe.jsonl"
                )
        elif not self.given.cpu:
            self.failed.append("the probe recorded nothing; its line in the server's log says why")
        self.document["compared"] = compared(self.document)
        self.failed += [without_folders(text, self.names) for text in self.asked.failed]

    def write(self) -> None:
        """``session.json``, and the log's end where something failed."""
        self.document["failed"] = self.failed
        self.document["seconds"] = round(time.monotonic() - BEGAN, 1)
        text = json.dumps(self.document, indent=1) + "\n"
        write_whole(self.out / "session.json", text.encode())
        if self.failed and self.log.exists():
            tail = self.log.read_bytes()[-60_000:].decode("utf-8", "replace")
            write_whole(self.out / "server_tail.txt", without_folders(tail, self.names).encode())

    def run(self) -> bool:
        """All of it; whether nothing failed."""
        server: Server | None = None
        try:
            server = self.start()
            self.talk(server)
        except EngineEndedError as error:
            self.fail("start", error)
        except OutOfTimeError:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.failed.append(f"the time was over after {time.monotonic() - BEGAN:.0f} s")
        except (Exception, KeyboardInterrupt) as error:
            self.fail("session", error)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            began = time.monotonic()
            if server is not None:
                with self.step("stop"):
                    server.stop()
            time.sleep(1.0)  # the probe's writer ends after the engine
            group = None if server is None else server.state.guard.pid
            left = left_over(f"{MARK}={os.environ[MARK]}", group)
            self.document["stop"] = {
                "seconds": round(time.monotonic() - began - 1.0, 1), "processes_left": len(left)
            }  # fmt: skip
            if left:
                self.failed.append(f"{len(left)} processes were left and were killed")
                for pid in left:
                    with suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
            with self.step("figures"):
                self.finish()
            self.write()
        return not self.failed


def free_port() -> int:
    """A port of loopback that nobody has."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


def out_of_time(number: int, frame: FrameType | None) -> None:
    """A handler."""
    raise OutOfTimeError


def main() -> int:
    """Record a session; exit with 1 where something of it failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--site", type=Path, action="append", default=[])
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--engine", type=Path, help="the vllm program of a CPU build")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--load-seconds", type=float, default=40.0)
    parser.add_argument("--new-tokens", type=int, default=None)
    given = parser.parse_args()
    given.site = [site.resolve() for site in given.site]
    given.engine = given.engine and given.engine.absolute()
    given.port = given.port or free_port()
    given.new_tokens = given.new_tokens or (48 if given.cpu else 192)
    sys.path += map(str, given.site)  # behind what this Python has
    given.out.mkdir(parents=True, exist_ok=True)
    for old in ("monitor.jsonl", "probe.jsonl"):  # neither is written over
        (given.out / old).unlink(missing_ok=True)
    os.environ[MARK] = f"{os.getpid()}-{time.time_ns()}"
    handle: Callable[[int, FrameType | None], None] = out_of_time
    signal.signal(signal.SIGALRM, handle)
    signal.signal(signal.SIGTERM, handle)
    signal.setitimer(signal.ITIMER_REAL, max(30.0, given.seconds - RESERVE), 5.0)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # Servers are noted in the cache; nobody else need find this one.
        os.environ["BEAM_WORKBENCH_CACHE"] = str(Path(folder) / "workbench-cache")
        session = Session(given, Path(folder))
        good = session.run()
    say(json.dumps(session.document.get("compared")))
    for text in session.failed:
        say(f"failed: {text}")
    say("done" if good else "something failed; see session.json and server_tail.txt")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
