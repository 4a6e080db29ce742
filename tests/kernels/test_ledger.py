"""The last verdict on a variant: kept while the variant is what was judged."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from workbench.kernels import ledger, registry
from workbench.kernels.check import Finding, Verdict, check
from workbench.kernels.reference import softcap
from workbench.kernels.registry import register
from workbench.kernels.shapes import Shapes


def mine() -> Any:
    @register("softcap", "mine")
    def variant(logits: Any, cap: float) -> Any:
        return softcap(logits, cap)

    return variant


def judged(status: str = "passed", variant: str = "mine", op: str = "softcap") -> Verdict:
    return Verdict(op=op, variant=variant, status=status)


def test_nothing_is_known_of_what_was_not_judged() -> None:
    mine()
    assert ledger.verdict("softcap", "mine") is None
    assert ledger.verdict("softcap", "nobody") is None


def test_the_last_verdict_counts() -> None:
    mine()
    for verdict in (judged(), judged("refused"), judged("crashed")):
        ledger.note(verdict)
        assert ledger.verdict("softcap", "mine") is verdict


def test_a_verdict_on_a_real_check(tiny: Shapes) -> None:
    mine()
    verdict = check("softcap", "mine", tiny, tokens=(1,))
    ledger.note(verdict)
    kept = ledger.verdict("softcap", "mine")
    assert kept is verdict
    assert kept.passed


def test_registering_anew_forgets() -> None:
    first = mine()
    ledger.note(judged())
    mine()
    assert ledger.verdict("softcap", "mine") is None
    register("softcap", "mine")(first)
    assert ledger.verdict("softcap", "mine") is not None, "the very function that was judged"


def test_unregistering_forgets() -> None:
    mine()
    ledger.note(judged())
    registry.unregister("softcap", "mine")
    assert ledger.verdict("softcap", "mine") is None
    mine()
    assert ledger.verdict("softcap", "mine") is None


def test_a_verdict_on_a_function_that_was_replaced_meanwhile() -> None:
    first = mine()
    mine()
    ledger.note(judged(), first)
    assert ledger.verdict("softcap", "mine") is None


def test_nothing_registered_is_nothing_judged() -> None:
    """A verdict without a function is not one on whatever is registered under the name later."""
    ledger.note(judged(variant="ghost"))
    register("softcap", "ghost")(softcap)
    assert ledger.verdict("softcap", "ghost") is None


def test_verdicts_are_told_apart_by_operation_and_name() -> None:
    mine()
    register("softcap", "other")(softcap)
    register("rms_norm", "mine")(softcap)
    ledger.note(judged("passed"))
    ledger.note(judged("refused", variant="other"))
    ledger.note(judged("crashed", op="rms_norm"))
    found = [
        ledger.verdict(*key).status  # type: ignore[union-attr]
        for key in (("softcap", "mine"), ("softcap", "other"), ("rms_norm", "mine"))
    ]
    assert found == ["passed", "refused", "crashed"]


def test_other_threads_see_it() -> None:
    mine()
    thread = threading.Thread(target=ledger.note, args=(judged(),))
    thread.start()
    thread.join()
    assert ledger.verdict("softcap", "mine") == judged()


def test_a_verdict_read_back_is_the_verdict() -> None:
    finding = Finding(
        case="1 token", output="y", gate="finite", found=3.0, limit=0.0, passed=False, note="3 of 8"
    )
    for one in (judged(), replace(judged("refused"), findings=(finding,), cases=2, max_error=0.5)):
        assert ledger.read(one.to_dict(), "softcap", "mine") == one
        assert ledger.read(one.to_dict(), "softcap", "yours") is None
        assert ledger.read(one.to_dict(), "router", "mine") is None
    lone = judged().to_dict() | {"reason": "\udc80 bad"}
    kept = ledger.read(lone, "softcap", "mine")
    assert kept is not None
    assert kept.reason.encode() == b"? bad"
