"""A sentence for the failure nobody notices: a drafter whose drafts are hardly ever right."""

from __future__ import annotations

from workbench.spec.rates import Acceptance

_BLOCKS_TO_JUDGE = 16
_HARDLY_ANY = 0.05  # of the first drafts of blocks; a token guessed at random is accepted less


def doubt(acceptance: Acceptance, temperature: float) -> str | None:
    """What to say where next to nothing is accepted: output is right then, and nothing is gained.

    Above temperature 1 the target itself may be hard to guess, so nothing is said; nor of drafts
    that a policy left unverified.
    """
    if sum(acceptance.admitted_at[:1]) < _BLOCKS_TO_JUDGE or temperature > 1:
        return None
    first = acceptance.conditional[0]
    if first is None or first >= _HARDLY_ANY:
        return None
    return (
        f"the target accepted {acceptance.accepted:,} of {acceptance.admitted:,} drafts: is the "
        "drafter trained for this target, with these target_layer_ids and this mask_token_id? "
        "Decoding without it is faster"
    )
