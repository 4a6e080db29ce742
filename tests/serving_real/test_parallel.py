"""Two tensor-parallel ranks compute what one does: every slice of every weight is in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import workbench
from serving_real.asking import complete
from serving_real.server import FOLDER, PARSERS, RealServer
from serving_real.test_beam import CLOSE


def test_two_ranks(serving_python: str, tmp_path: Path, beam: Any, text_ids: list[int]) -> None:
    ids = text_ids[:700]
    with torch.inference_mode():
        ours = beam.sequence_logits(torch.tensor(ids)).double().log_softmax(-1)
    wanted = ours[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    new = list(workbench.generate(beam, ids, max_new_tokens=30, stop_at_eos=False).token_ids)
    arguments = (*PARSERS, "--tensor-parallel-size=2")
    with RealServer(serving_python, FOLDER, tmp_path / "log.txt", arguments) as server:
        answer = complete(server.url, ids, max_tokens=30, ignore_eos=True, prompt_logprobs=0)
    choice = answer["choices"][0]
    rows = zip(choice["prompt_logprobs"][1:], ids[1:], strict=True)
    got = torch.tensor([row[str(i)]["logprob"] for row, i in rows], dtype=torch.float64)
    assert float((got - wanted).abs().max()) < CLOSE
    assert choice["token_ids"] == new
    assert server.members() == []
