"""What the accumulator costs: the error of an FP8 GEMM's sum with FP32's and with Hopper's.

    python scripts/accumulation_table.py [--json FILE] [--size 64]

Standard normal matrices [size, K] and [K, size] are quantised to E4M3 with one scale each. The
error is that of the sum alone, against FP64 sums of the same quantised values: the Frobenius norm
of the difference over that of the result.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fp8train.environment import write_record
from fp8train.precision.formats import E4M3, round_to_grid
from fp8train.precision.kernels import hopper

DEPTHS = (512, 1024, 2048, 4096)
SEED = 0


def quantized(rows: int, columns: int) -> Tensor:
    """A standard normal matrix scaled to E4M3's range and rounded; FP32 [rows, columns]."""
    x = torch.randn(rows, columns)
    return round_to_grid(x * (E4M3.max / x.abs().max()), E4M3)


def measure(k: int, size: int) -> list[dict[str, Any]]:
    """One row for each kind of accumulation over K terms."""
    a, b = quantized(size, k), quantized(k, size)
    formats = (E4M3, E4M3)
    exact = a.double() @ b.double()
    sums = {
        "FP32": a @ b,
        "Hopper, fast": hopper.gemm(a, b, formats, promote=None),
        f"Hopper, promoted every {hopper.PROMOTE}": hopper.gemm(
            a, b, formats, promote=hopper.PROMOTE
        ),
    }
    return [
        {
            "accumulation": name,
            "k": k,
            "relative_error": float((found - exact).norm() / exact.norm()),
        }
        for name, found in sums.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the rows, with hardware and versions")
    parser.add_argument("--size", type=int, default=64, help="rows and columns of the result")
    arguments = parser.parse_args()
    torch.manual_seed(SEED)
    rows = [row for k in DEPTHS for row in measure(k, arguments.size)]
    rows.sort(key=lambda row: str(row["accumulation"]))
    table = Table("accumulation", "K", "relative error", title="Sums of E4M3 products against FP64")
    for row in rows:
        table.add_row(row["accumulation"], str(row["k"]), f"{row['relative_error']:.1e}")
    Console().print(table)
    if arguments.json:
        config = {"size": arguments.size, "format": E4M3.name, "seed": SEED}
        write_record(arguments.json, "accumulation_table", config, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
