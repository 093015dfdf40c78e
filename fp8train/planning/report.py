"""A layout's memory, communication and pipeline bubble, to read and as plain rows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from fp8train.config import Config
from fp8train.layout import Layout, micro_batches
from fp8train.planning.communication import Traffic, communication
from fp8train.planning.memory import GIB, Memory, memory
from fp8train.planning.pipeline import bubble

COUNTS = {"parameters": "parameters", "sharded_parameters": "parameters, sharded"}
PARTS = {
    "masters": "masters",
    "optimizer": "optimizer",
    "gradients": "gradients, sharded",
    "unsharded_gradients": "gradients, whole",
    "residuals": "error feedback",
    "weights": "weights",
    "quantized_weights": "weights, quantised",
    "activations": "activations",
    "total": "total",
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
    rounds, trainer = micro_batches(config, layout), config.trainer
    coordinates = range(layout.pipeline)
    memories = merged([memory(config, layout, place) for place in coordinates])
    traffic = merged([tuple(communication(config, layout, place)) for place in coordinates])
    idle = bubble(layout, config.parallel.pipeline_schedule, rounds)
    tokens = trainer.global_batch_size * trainer.sequence_length
    console.print(
        f"a step: {trainer.global_batch_size:,} samples of {trainer.sequence_length:,} tokens, "
        f"{tokens:,} tokens; of a rank {rounds:,} micro batch{'es' if rounds > 1 else ''} of "
        f"{trainer.micro_batch_size}",
        f"activation checkpointing: {config.parallel.activation_checkpoint}",
        sep="\n",
    )
    _print_memory(console, layout, memories)
    _print_traffic(console, layout, traffic)
    if layout.pipeline > 1:
        console.print(
            f"pipeline bubble {idle:.1%}: {config.parallel.pipeline_schedule}, {layout.stages} "
            f"stages, {rounds:,} micro batches"
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
    if least == most:
        return most
    number, _, unit = least.partition(" ")
    return f"{number if most.endswith(f' {unit}') else least}–{most}"


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
    """A line for each part of the memory, and a column for each kind of rank."""
    # Ranks that differ in micro batches in flight alone share a column.
    kinds: dict[Memory, list[tuple[Memory, list[int]]]] = {}
    for held, ranks in memories:
        alike = replace(held, activations=0, quantized_weights=0, in_flight=0)
        kinds.setdefault(alike, []).append((held, ranks))
    table = _table(
        "memory of a rank",
        layout,
        [""],
        [sorted(rank for _, ranks in kind for rank in ranks) for kind in kinds.values()],
    )
    for name, title in COUNTS.items():
        counts = [getattr(alike, name) for alike in kinds]
        table.add_row(title, *(f"{count / 1e6:,.1f} M" for count in counts))
    for name, title in PARTS.items():
        sizes = [[getattr(held, name) for held, _ in kind] for kind in kinds.values()]
        if not any(map(any, sizes)):
            continue
        style = "bold" if name == "total" else None
        table.add_row(title, *map(span, sizes), style=style)
    console.print(table)


def _print_traffic(
    console: Console, layout: Layout, traffic: list[tuple[tuple[Traffic, ...], list[int]]]
) -> None:
    """What each group's collectives send by type, then each kind where the lines have room."""
    if not any(rows for rows, _ in traffic):
        console.print("one rank: nothing to send")
        return
    columns = [ranks for _, ranks in traffic]
    sums = _table("sent by a rank in a step", layout, ["group", "collective", "type"], columns)
    for group, lines in _lines(traffic, "group", "collective", "dtype").items():
        for key, cells in lines.items():
            sums.add_row(*key, *(amount(sum(row.bytes for row in cell)) for cell in cells))
        if len(lines) > 1:
            columns_of_group = zip(*lines.values(), strict=True)
            every = [sum(row.bytes for cell in cells for row in cell) for cells in columns_of_group]
            sums.add_row(group, "all", "", *map(amount, every), style="bold")
        sums.add_section()
    console.print(sums)
    names = ["group", "what", "collective", "type"]
    table = _table("one by one", layout, names, columns)
    for lines in _lines(traffic, "group", "what", "collective", "dtype").values():
        for key, cells in lines.items():
            table.add_row(*key, *(_cell(cell) for cell in cells))
        table.add_section()
    wanted = Measurement.get(console, console.options.update(max_width=1000), table).maximum
    if wanted <= console.width:
        console.print(table)
    else:
        console.print(f"(one by one in a terminal of {wanted} columns, or in a file)")


def _table(title: str, layout: Layout, names: list[str], kinds: list[list[int]]) -> Table:
    """An empty table with columns that name a line, and one for each kind of rank."""
    table = Table(title=title, title_justify="left", box=None, title_style="bold")
    for name in names:
        table.add_column(name, no_wrap=True)
    for ranks in kinds:
        # The word above the numbers: a column is as narrow as its cells.
        table.add_column(named(layout, ranks).replace(" ", "\n", 1), justify="right", no_wrap=True)
    return table


def _lines(
    traffic: list[tuple[tuple[Traffic, ...], list[int]]], *by: str
) -> dict[str, dict[tuple[str, ...], list[list[Traffic]]]]:
    """Traffic that is alike, by group: for each kind of rank, its rows of equal values."""
    found: dict[str, dict[tuple[str, ...], list[list[Traffic]]]] = {}
    for column, (rows, _) in enumerate(traffic):
        for row in rows:
            key = tuple(getattr(row, name) for name in by)
            cells = found.setdefault(row.group, {}).setdefault(key, [[] for _ in traffic])
            cells[column].append(row)
    return found


def _cell(rows: list[Traffic]) -> str:
    return "".join(f"{row.count:,} × {amount(row.bytes // row.count)}" for row in rows)
