"""A layout's memory, communication and pipeline bubble, to read and as plain rows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from fp8train.config import Config
from fp8train.layout import Layout, micro_batches
from fp8train.planning.communication import Traffic, communication
from fp8train.planning.memory import GIB, Memory, memory
from fp8train.planning.pipeline import bubble

PARTS = {
    "masters": "masters",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "unsharded_gradients": "unsharded gradients",
    "weights": "weights",
    "quantized_weights": "FP8 weights",
    "activations": "activations",
}
T = TypeVar("T", bound=Hashable)


def report(config: Config, layout: Layout, console: Console) -> dict[str, Any]:
    """Print what a layout takes, for every kind of rank.

    Returns:
        the same in plain values: `memory` and `communication`, a list of rows each with the
        pipeline coordinates `ranks` that they hold for, in bytes; `bubble`, a fraction; and the
        sizes of the layout.
    Raises:
        ConfigError: a pipeline schedule that has no order for these numbers.
    """
    rounds = micro_batches(config, layout)
    coordinates = range(layout.pipeline)
    memories = merged([memory(config, layout, place) for place in coordinates])
    traffic = merged([tuple(communication(config, layout, place)) for place in coordinates])
    idle = bubble(layout, config.parallel.pipeline_schedule, rounds)
    _print_memory(console, layout, memories)
    _print_traffic(console, layout, traffic)
    if layout.pipeline > 1:
        console.print(
            f"pipeline bubble {idle:.1%}: {config.parallel.pipeline_schedule}, {layout.stages} "
            f"stages, {rounds} micro batches"
        )
    return {
        "layout": asdict(layout),
        "world_size": layout.world_size,
        "micro_batches": rounds,
        "memory": [
            {"ranks": list(ranks), **asdict(held), "total": held.total} for held, ranks in memories
        ],
        "communication": [
            {"ranks": list(ranks), **asdict(row)} for rows, ranks in traffic for row in rows
        ],
        "bubble": idle,
    }


def merged(values: Sequence[T]) -> list[tuple[T, list[int]]]:
    """Each different value, and where it is found, in order of the first place."""
    places: dict[T, list[int]] = {}
    for place, value in enumerate(values):
        places.setdefault(value, []).append(place)
    return list(places.items())


def named(layout: Layout, ranks: list[int]) -> str:
    """Pipeline coordinates in words: `all ranks`, `pipeline 0`, `pipeline 1 to 14, 16`."""
    if len(ranks) == layout.pipeline:
        return "all ranks"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"pipeline {', '.join(words)}"


def span(sizes: Sequence[int]) -> str:
    """The least and the most of some numbers of bytes."""
    least, most = amount(min(sizes)), amount(max(sizes))
    return most if least == most else f"{least} to {most}"


def amount(size: int) -> str:
    """Bytes as a person reads them: 3.21 GiB, 402 MiB, 12 KiB, 0."""
    if size == 0:
        return "0"
    for unit, name in ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            number = size / unit
            return f"{number:,.{2 if number < 10 else 1 if number < 100 else 0}f} {name}"
    return f"{size} B"


def _print_memory(
    console: Console, layout: Layout, memories: list[tuple[Memory, list[int]]]
) -> None:
    table = Table(title="memory of a rank", title_justify="left", box=None)
    table.add_column("ranks", no_wrap=True)
    for name in ("parameters", "of them sharded", *PARTS.values(), "total"):
        table.add_column(name, justify="right")
    # Ranks that differ in micro batches in flight alone share a line.
    lines: dict[Memory, list[tuple[Memory, list[int]]]] = {}
    for held, ranks in memories:
        alike = replace(held, activations=0, quantized_weights=0, in_flight=0)
        lines.setdefault(alike, []).append((held, ranks))
    for kinds in lines.values():
        first = kinds[0][0]
        table.add_row(
            named(layout, sorted(rank for _, ranks in kinds for rank in ranks)),
            f"{first.parameters / 1e6:,.1f} M",
            f"{first.sharded_parameters / 1e6:,.1f} M",
            *(span([getattr(held, part) for held, _ in kinds]) for part in (*PARTS, "total")),
        )
    console.print(table)


def _print_traffic(
    console: Console, layout: Layout, traffic: list[tuple[tuple[Traffic, ...], list[int]]]
) -> None:
    """One line for each kind of collective, and a column for each kind of rank."""
    lines: dict[tuple[str, str, str, str], list[Traffic | None]] = {}
    for column, (rows, _) in enumerate(traffic):
        for row in rows:
            key = row.group, row.what, row.collective, row.dtype
            lines.setdefault(key, [None] * len(traffic))[column] = row
    if not lines:
        console.print("one rank: nothing to send")
        return
    table = Table(title="sent by a rank in a step", title_justify="left", box=None)
    for name in ("group", "what", "collective", "type"):
        table.add_column(name, no_wrap=name == "group")
    for _, ranks in traffic:
        table.add_column(named(layout, ranks), justify="right")
    for group in dict.fromkeys(key[0] for key in lines):
        of_group = {key: cells for key, cells in lines.items() if key[0] == group}
        for key, cells in of_group.items():
            table.add_row(*key, *(_cell(row) for row in cells))
        sums = [
            sum(cell.bytes for cells in of_group.values() if (cell := cells[column]) is not None)
            for column in range(len(traffic))
        ]
        table.add_row(group, "all", "", "", *map(amount, sums), style="bold", end_section=True)
    console.print(table)


def _cell(row: Traffic | None) -> str:
    return "" if row is None else f"{row.count:,} × {amount(row.bytes // row.count)}"
