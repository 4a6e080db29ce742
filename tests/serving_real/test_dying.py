"""A server that is killed while it streams, and one that comes after it."""

from __future__ import annotations

import http.client
from pathlib import Path

from serving_real.asking import complete, page, stream
from serving_real.server import FOLDER, PARSERS, RealServer
from serving_real.test_beam import counters


def test_killed_while_streaming_then_started_again(
    serving_python: str, tmp_path: Path, text_ids: list[int]
) -> None:
    with RealServer(serving_python, FOLDER, tmp_path / "first.txt", PARSERS) as server:
        body = {
            "model": "beam-tiny",
            "prompt": text_ids[:50],
            "max_tokens": 1500,
            "ignore_eos": True,
            "temperature": 0,
        }
        text, broken = "", False
        try:
            for number, chunk in enumerate(stream(server.url, "/v1/completions", body)):
                text += chunk["choices"][0]["text"]
                if number == 10:
                    server.kill()
        except (OSError, http.client.HTTPException):
            broken = True
        assert broken
        assert text
        assert not server.ready()
    assert server.members() == []

    with RealServer(serving_python, FOLDER, tmp_path / "second.txt", PARSERS) as server:
        first = counters(page(server.url))
        assert first["vllm:generation_tokens_total"] == 0
        complete(server.url, text_ids[:9], max_tokens=4, ignore_eos=True)
        second = counters(page(server.url))
        assert second["vllm:generation_tokens_total"] == 4
        assert second["vllm:prompt_tokens_total"] == 9
    assert server.members() == []
