"""Time of an emulated FP8 linear, forward and backward, over that of a BF16 one.

    python scripts/bench_emulation.py [--json FILE] [--pairs 7]

Each ratio is the median over pairs measured one after the other, weights quantised each time. The
baseline is the BF16 linear that training uses here: torch's `nn.Linear` where the CPU has fast BF16
GEMMs; elsewhere, where torch's takes up to a hundred times as long, ours through FP32 GEMMs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fp8train.config import FP8_RECIPES, PrecisionConfig
from fp8train.environment import environment
from fp8train.precision.convert import convert

SHAPES = ((2048, 1024, 4096), (2048, 4096, 4096))  # rows, in features, out features
FORMATS = {"fp8_block": "e4m3"}
CPU = torch.device("cpu")


def layer(recipe: str, k: int, n: int) -> nn.Module:
    """A linear K → N under a recipe, in training mode."""
    model = nn.Sequential(nn.Linear(k, n, bias=False).bfloat16())
    precision = PrecisionConfig(
        recipe=recipe,
        format=FORMATS.get(recipe, "hybrid"),
        power_of_two_scales=recipe == "fp8_block",
    )
    precision.include = ["*"]
    convert(model, precision, CPU)
    return model


def seconds(model: nn.Module, x: Tensor, grad: Tensor) -> float:
    """One forward and backward, input and weight gradients included."""
    began = time.perf_counter()
    model(x).backward(grad)
    return time.perf_counter() - began


def ratios(
    candidate: Callable[[], float], baseline: Callable[[], float], pairs: int
) -> list[float]:
    """candidate / baseline of alternating runs, after one of each that doesn't count."""
    candidate(), baseline()
    return [candidate() / baseline() for _ in range(pairs)]


def measure(shape: tuple[int, int, int], pairs: int) -> list[dict[str, Any]]:
    rows, k, n = shape
    x = torch.randn(rows, k).bfloat16().requires_grad_()
    grad = torch.randn(rows, n).bfloat16()
    baseline = layer("bf16", k, n)
    measured = []
    for recipe in FP8_RECIPES:
        model = layer(recipe, k, n)
        found = ratios(partial(seconds, model, x, grad), partial(seconds, baseline, x, grad), pairs)
        measured.append(
            {
                "recipe": recipe,
                "shape": f"{rows}x{k}->{n}",
                "ratio_to_bf16": statistics.median(found),
                "least": min(found),
                "most": max(found),
                "bf16_seconds": statistics.median(seconds(baseline, x, grad) for _ in range(3)),
            }
        )
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the rows, with hardware and versions")
    parser.add_argument("--pairs", type=int, default=7)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = [row for shape in SHAPES for row in measure(shape, arguments.pairs)]
    table = Table("recipe", "shape", "ratio to BF16", "least to most", "BF16 seconds")
    for row in rows:
        spread = f"{row['least']:.2f} to {row['most']:.2f}"
        table.add_row(
            row["recipe"],
            row["shape"],
            f"{row['ratio_to_bf16']:.2f}x",
            spread,
            f"{row['bf16_seconds']:.3f}",
        )
    Console().print(table)
    if arguments.json:
        found = environment()
        config = {"pairs": arguments.pairs, "threads": torch.get_num_threads()}
        record = {
            "name": "bench_emulation",
            "hardware": found["hardware"],
            "versions": found["versions"],
            "config": config,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
