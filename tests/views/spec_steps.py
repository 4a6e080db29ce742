"""Steps as a decode loop would give them, made up from a seed: for tests of views only."""

from __future__ import annotations

import random

from workbench.spec.step import Kind, RequestStep, Step

VOCABULARY = 4096


def block(
    rng: random.Random,
    request: int,
    position: int,
    *,
    drafted: int = 7,
    admitted: int | None = None,
    accepted: int | None = None,
    chance: float = 0.75,
    detail: bool = False,
    keep: int | None = None,
) -> RequestStep:
    """One request's part of a step with drafts; ``keep`` cuts it as a stop token would."""
    admitted = drafted if admitted is None else admitted
    if accepted is None:
        accepted = next((i for i in range(admitted) if rng.random() > chance), admitted)
    ids = tuple(rng.randrange(300, VOCABULARY) for _ in range(drafted))
    kinds: list[Kind] = ["accepted"] * accepted
    kinds.append("bonus" if accepted == admitted else "corrected")
    tokens = (*ids[:accepted], rng.randrange(300, VOCABULARY))
    candidates, unary, scores = [], [], []
    for token in ids if detail else ():
        others = [i for i in rng.sample(range(300, VOCABULARY), 17) if i != token][:15]
        candidates.append((token, *others))
        unary.append(tuple(sorted((rng.uniform(-4, 9) for _ in range(16)), reverse=True)))
        scores.append(tuple(u + rng.uniform(-2, 2) for u in unary[-1]))
    return RequestStep(
        request=request,
        position=position,
        drafted=ids,
        confidences=tuple(
            min(1.0, max(0.01, rng.gauss(0.9 if i < accepted else 0.55, 0.15)))
            for i in range(drafted)
        ),
        admitted=admitted,
        accepted=accepted,
        token_ids=tokens[:keep],
        kinds=tuple(kinds[:keep]),
        finished=None if keep is None else "eos",
        candidates=tuple(candidates),
        unary=tuple(unary),
        scores=tuple(scores),
    )


def run(
    count: int,
    *,
    requests: int = 1,
    drafted: int = 7,
    chance: float = 0.75,
    trim: bool = False,
    detail: bool = False,
    seed: int = 0,
) -> list[Step]:
    """A prefill for each request, then ``count`` steps; every ninth step drafts nothing."""
    rng = random.Random(seed)
    position = [20 + 3 * r for r in range(requests)]
    steps = []
    for r in range(requests):
        part = RequestStep(
            request=r, position=position[r], token_ids=(rng.randrange(300, VOCABULARY),),
            kinds=("first",),
        )  # fmt: skip
        position[r] += 1
        steps.append(Step(index=r, phase="prefill", rows=20, seconds=0.01, requests=(part,)))
    for n in range(count):
        some = []
        for r in range(requests):
            if n % 9 == 8 or drafted == 0:
                part = RequestStep(
                    request=r, position=position[r], token_ids=(rng.randrange(300, VOCABULARY),),
                    kinds=("plain",),
                )  # fmt: skip
            else:
                part = block(
                    rng, r, position[r], drafted=drafted, chance=chance, detail=detail,
                    admitted=rng.randrange(drafted + 1) if trim and n % 3 == 0 else None,
                )  # fmt: skip
            position[r] += len(part.token_ids)
            some.append(part)
        steps.append(
            Step(
                index=requests + n,
                rows=sum(1 + p.admitted for p in some),
                draft_seconds=0.002 if some[0].drafted else 0.0,
                verify_seconds=0.006,
                seconds=0.0085,
                requests=tuple(some),
            )
        )
    return steps
