"""``workbench simulate``: what policies of verification give at a concurrency, by a cost table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli_options import Json, Seed, answer, progress_bar

if TYPE_CHECKING:
    from workbench.spec.recording import Recording
    from workbench.spec.simulate import NamedTable
    from workbench.spec.simulation_result import SimulationResult

_FIGURES = ("tokens_per_second", "tpot_p50_ms", "tpot_p99_ms", "acceptance_length")
_COUNTS = ("steps", "drafted", "admitted", "accepted", "wasted", "missed")


def simulate(
    concurrency: Annotated[
        int, typer.Option(help="Sequences decoded together, 1 to 512.", metavar="C")
    ],
    cost_table: Annotated[
        str,
        typer.Option(
            "--cost-table",
            help="A recorded table's name, or a JSON file of your own.",
            metavar="NAME|FILE",
        ),
    ] = "h200-rank",
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            help="Acceptance from a trace, best an every-position one. Default: modelled from the "
            "bundled drafter's model card.",
            metavar="FILE",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(help="How many. Default: 16 for each place, at least 256.", metavar="N"),
    ] = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Plain, fixed, adaptive and oracle verification, simulated under continuous batching."""
    from workbench.spec import simulate as simulation
    from workbench.spec.published import published
    from workbench.spec.replay import check_number

    check_number("concurrency", concurrency, 1, simulation.MOST_CONCURRENCY)
    if requests is None:
        requests = simulation.default_requests(concurrency)
    check_number("requests", requests)
    check_number("seed", seed, 0)
    named = simulation.cost_table(cost_table)
    source, told = _source(trace)
    with progress_bar("simulating", 4) as bar:
        results = simulation.compare(
            source,
            named.table,
            concurrency=concurrency,
            requests=requests,
            estimator="fresh" if source.features is not None else None,
            seed=seed,
            progress=lambda done, of: bar.update(bar.task_ids[0], completed=done, total=of),
        )
    if json:
        answer(
            {
                "concurrency": concurrency,
                "requests": requests,
                "seed": seed,
                "policies": {name: _row(result) for name, result in results.items()},
                "origins": _origins(source, named),
                "cost_table": {"name": named.name, "label": named.table.label}
                | {"notes": list(named.notes)},
                "source": source.label,
                "estimated": {n: r.estimated_how for n, r in results.items() if r.estimated},
                "failed": {n: _failed(r) for n, r in results.items() if r.failed_steps},
                "notes": told,
                "published": published().to_dict(),
            }
        )
        return
    _page(results, source, named, told, concurrency, requests, seed)


def _source(trace: Path | None) -> tuple[Recording, list[str]]:
    """Acceptance to draw from, and what is to be said about it."""
    from workbench.spec.recording import Recording
    from workbench.spec.simulate import card_source

    if trace is None:
        return card_source(), []
    from workbench.spec.trace import Trace

    source = Recording.of(Trace.read(trace))
    if source.features is None and source.confidences is not None:
        return source, [
            "the trace has no scores, so confidences are the drafter's own, not calibrated"
        ]
    return source, []


def _row(result: SimulationResult) -> dict[str, Any]:
    return {name: getattr(result, name) for name in (*_FIGURES, *_COUNTS, "estimated")}


def _failed(result: SimulationResult) -> str:
    """In how many steps its decision could not be used, and why."""
    why = "; ".join(result.failures)
    return f"fixed verification in {result.failed_steps:,} of {result.steps:,} steps: {why}"


def _origins(source: Recording, named: NamedTable) -> dict[str, str]:
    """What each kind of figure is."""
    acceptance = source.label.partition(":")[0]
    return {
        "tokens_per_second": "modelled",
        "tpot": "modelled",
        "acceptance": acceptance if source.exact else f"{acceptance}, in part estimated",
        "draft_ms": named.draft,
        "verify_ms": named.verify,
    }


def _page(
    results: dict[str, SimulationResult],
    source: Recording,
    named: NamedTable,
    told: list[str],
    concurrency: int,
    requests: int,
    seed: int,
) -> None:
    from rich.table import Table
    from rich.text import Text

    from workbench.spec.published import published
    from workbench.terminal import out, printable

    def dim(line: str) -> None:
        console.print(Text(printable(line), "dim"))

    console = out()
    together = "sequence" if concurrency == 1 else "sequences"
    head = f"{concurrency} {together} together, {requests:,} requests drawn with seed {seed}"
    console.print(Text(head, "bold"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("policy")
    titles = ("tokens/s", "of fixed", "TPOT p50 ms", "p99 ms", "of fixed", "length", "wasted")
    for title in (*titles, "missed"):
        table.add_column(title, justify="right")
    fixed = results["fixed"]
    for name, r in results.items():
        table.add_row(
            name,
            f"{r.tokens_per_second:,.0f}",
            f"{r.tokens_per_second / fixed.tokens_per_second - 1:+.1%}",
            f"{r.tpot_p50_ms:.2f}",
            f"{r.tpot_p99_ms:.2f}",
            f"{r.tpot_p99_ms / fixed.tpot_p99_ms - 1:+.1%}",
            f"{r.acceptance_length:.2f}",
            f"{r.wasted:,}",
            f"{r.missed:,}",
        )
    console.print(table)
    origins = _origins(source, named)
    console.print(
        "tokens/s and TPOT: modelled, decode steps alone; length, wasted (verified, not accepted) "
        f"and missed (trimmed, would be accepted): by acceptance that is {origins['acceptance']}"
    )
    p = published()
    console.print(
        f"published for the engine at concurrency {p.concurrency}, another machine and drafter: "
        f"fixed {p.fixed_tokens_per_second:,}, adaptive {p.adaptive_tokens_per_second:,} "
        f"tokens/s ({p.tokens_per_second_change:+.1%}), p99 TPOT {p.tpot_p99_change:+.0%}"
    )
    dim(f"acceptance {source.label}")
    for name, r in results.items():
        if r.estimated:
            dim(f"{name}, estimated: {r.estimated_how}")
    for name, r in results.items():
        if r.failed_steps:
            dim(f"{name}: {_failed(r)}")
    for line in told:
        dim(line)
    dim(f"cost table {named.name}: {named.table.label}")
    dim(f"verification {named.verify}, drafting {named.draft}")
    for line in named.notes:
        dim(line)
