"""What eight-bit gradient reductions lose, by the number of ranks and over many steps, simulated in
this process by the code that a run's ranks execute.

    python scripts/reduction_table.py [--json FILE] [--size 16384] [--plot FILE]

Every rank has independent standard normal gradients. The error is that of the mean over the ranks,
against FP64: the 2-norm of the difference over that of the mean. The second table is of 100 steps
with one and the same gradient: the error of what has arrived in all, which is what a slowly moving
gradient meets.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fp8train.environment import write_record
from fp8train.parallel.ring import LARGEST, added
from fp8train.precision.quantize import Draw
from fp8train.precision.scaling import scale_from_amax
from fp8train.precision.wire import Codec, codec

RANKS = (2, 8, 32, 128, 1024)
STEPS = 100
SEED = 0


def all_to_all(wire: Codec, parts: Iterable[Tensor]) -> Tensor:
    """Each rank's message for one owner, summed in FP32 in rank order, divided by N."""
    total, count = None, 0
    for part in parts:
        total = torch.zeros(len(part)) if total is None else total
        wire.add(total, wire.encode(part[None]))
        count += 1
    assert total is not None
    return total.div_(count)


def gathered(wire: Codec, parts: Iterable[Tensor]) -> Tensor:
    """The same, then sent to all ranks in the same format: the all-reduce between replicas."""
    mean = all_to_all(wire, parts)
    return wire.decode(wire.encode(mean[None])[0], len(mean))


def ring(wire: Codec, parts: Iterable[Tensor], scale: float) -> Tensor:
    """The sum that travels from rank to rank, in the ranks' order, rounded at each; FP32, unscaled.

    Args:
        scale: of every rank's values, before the first cast.
    """
    message: Tensor | None = None
    for part in parts:
        own, size = wire.encode((part * scale)[None])[0], len(part)
        message = own if message is None else added(wire, message, own, size)
    assert message is not None
    return wire.decode(message, size) / scale


def common_scale(wire: Codec, amax: float, ranks: int) -> float:
    """The ring's scale for a largest magnitude over all ranks."""
    return float(scale_from_amax(torch.tensor(amax * ranks), LARGEST[wire.name], power_of_two=True))


Method = Callable[[Iterable[Tensor], int], Tensor]  # parts, N → the mean
METHODS: dict[str, Method] = {
    "ring, E5M2, scaled by 1/N": lambda parts, n: ring(codec("e5m2", "none"), parts, 1 / n) / n,
    "ring, BF16": lambda parts, n: ring(codec("bf16"), parts, 1 / n) / n,
    "all-to-all, E5M2": lambda parts, n: all_to_all(codec("e5m2"), parts),
    "all-to-all, E5M2, then all-gather": lambda parts, n: gathered(codec("e5m2"), parts),
    "all-to-all, E4M3": lambda parts, n: all_to_all(codec("e4m3"), parts),
}


def gradients(ranks: int, size: int) -> Iterator[Tensor]:
    for rank in range(ranks):
        yield torch.randn(size, generator=torch.Generator().manual_seed(SEED + rank))


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def by_ranks(size: int) -> list[dict[str, Any]]:
    """A row for each method and number of ranks."""
    rows = []
    for ranks in RANKS:
        exact = torch.zeros(size, dtype=torch.float64)
        for part in gradients(ranks, size):
            exact += part
        for name, method in METHODS.items():
            error = relative_error(method(gradients(ranks, size), ranks), exact / ranks)
            rows.append({"method": name, "ranks": ranks, "relative_error": error})
    return rows


def by_steps(size: int) -> list[dict[str, Any]]:
    """A row for each way to round, of the sum of STEPS messages of one gradient."""
    (x,) = gradients(1, size)
    wire, rows = codec("e5m2"), []
    sums = {name: torch.zeros(size) for name in ("nearest", "stochastic", "error feedback")}
    residual = torch.zeros(size)
    for step in range(STEPS):
        messages = {
            "nearest": wire.encode(x[None])[0],
            "stochastic": wire.encode(x[None], Draw(SEED, step))[0],
            "error feedback": wire.encode((x + residual)[None])[0],
        }
        residual = x + residual - wire.decode(messages["error feedback"], size)
        for name, message in messages.items():
            wire.add(sums[name], message[None])
    for name, total in sums.items():
        error = relative_error(total, STEPS * x.double())
        rows.append({"rounding": name, "steps": STEPS, "relative_error": error})
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """The error of each method against the number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name in METHODS:
        line = [row for row in rows if row["method"] == name]
        errors = [100 * row["relative_error"] for row in line]
        style = "o--" if name.startswith("ring") else "o-"
        axes.plot([row["ranks"] for row in line], errors, style, label=name, markersize=4)
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="relative error of the mean (%)")
    axes.set_xticks(RANKS, [str(ranks) for ranks in RANKS])
    axes.minorticks_off()
    axes.set_yticks([0.3, 1, 3, 10, 30, 100], ["0.3", "1", "3", "10", "30", "100"])
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def percent(error: float) -> str:
    """Two significant digits: 5.3, 0.40, 0.054, 43."""
    digits = 0 if error >= 0.1 else 1 if error >= 0.01 else 2 if error >= 0.001 else 3
    return f"{100 * error:.{digits}f}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the rows, with hardware and versions")
    parser.add_argument("--plot", type=Path, help="also draw the first table")
    parser.add_argument("--size", type=int, default=16384, help="elements of a rank's gradient")
    arguments = parser.parse_args()
    ranks, steps = by_ranks(arguments.size), by_steps(arguments.size)
    console = Console()
    table = Table("method", *(f"N={n}" for n in RANKS), title="Relative error of the mean (%)")
    for name in METHODS:
        table.add_row(name, *(percent(r["relative_error"]) for r in ranks if r["method"] == name))
    console.print(table)
    table = Table("rounding to E5M2", "error (%)", title=f"{STEPS} steps with one gradient")
    for row in steps:
        table.add_row(row["rounding"], percent(row["relative_error"]))
    console.print(table)
    if arguments.plot:
        plot(ranks, arguments.plot)
    if arguments.json:
        config = {"size": arguments.size, "seed": SEED}
        write_record(arguments.json, "reduction_table", config, [*ranks, *steps])
    return 0


if __name__ == "__main__":
    sys.exit(main())
