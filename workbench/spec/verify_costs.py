"""A cost table of a measured verification: what ``simulate`` and adaptive drafting read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.errors import KernelError
from workbench.spec.cost_table import CostTable

# Up to here sizes lie close together and a pass is padded to the next one, as to a captured graph;
# beyond, where few are timed, costs between them are straight lines.
PADDED = 64


def verify_table(
    verify: Mapping[int, Sequence[float] | None],
    draft: Mapping[str, Any],
    *,
    label: str,
    date: str,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The document of a cost table (``CostTable.to_dict`` with origins, date, source and notes).

    Sizes up to ``PADDED`` rows are steps. ``verify``: milliseconds of single passes by how many
    token rows they had, None where a size was not timed. ``draft``: another table's document, whose
    draft curve and its origin are taken over, as no drafter runs beside a verification.

    Raises:
        KernelError: there are no sizes, or one was not timed.
    """
    missing = [rows for rows, samples in verify.items() if not samples]
    if missing or not verify:
        raise KernelError(
            f"{missing} tokens were not timed, so there is no cost table: an interpreted step has "
            "no speed, and a wrong one none that counts"
        )
    table = CostTable.from_curves(
        {size: [ms] for size, ms in draft["draft"]},
        {rows: list(samples or ()) for rows, samples in verify.items()},
        captured=max((rows for rows in verify if rows <= PADDED), default=0),
        label=label,
    )
    origin = draft.get("origins", {}).get("draft", "recorded")
    return table.to_dict() | {
        "origins": {"draft": origin, "verify": "measured"},
        "date": date,
        "source": "workbench bench verify",
        "notes": [
            *notes,
            f"Drafting is taken over ({origin}) from: {draft.get('label', 'another table')}.",
        ],
    }
