"""What each scaling keeps of five kinds of tensors: signal to noise, error, and what is flushed.

    python scripts/snr_table.py [--json FILE] [--picture [FILE]]

FP32 [1024, 4096] each. Signal to noise is that of the whole tensor, so its largest values decide
it; the median relative error is that of an ordinary value; flushed is the share of values that
become zero. The three are read together. A picture goes to docs/images/snr.png if no other file
is named.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from fp8train.analysis.report import markdown_table
from fp8train.environment import write_record
from fp8train.precision.formats import E2M1, E4M3, E5M2, Format
from fp8train.precision.nvfp4 import quantize_nvfp4
from fp8train.precision.quantize import Payload, quantize
from fp8train.precision.scaling import ScaleRule
from fp8train.precision.tensor import ROW, TENSOR, Granularity, QuantizedTensor

SEEDS = (0, 1)
SHAPE = (1024, 4096)
PAYLOAD = Payload(torch.float32)
FP32, POWER_OF_TWO, E8M0 = (ScaleRule(kind) for kind in ("fp32", "power_of_two", "e8m0"))

Quantize = Callable[[Tensor], QuantizedTensor]


def scaled(fmt: Format, granularity: Granularity, rule: ScaleRule) -> Quantize:
    return partial(quantize, fmt=fmt, granularity=granularity, rule=rule, payload=PAYLOAD)


# Name → how it quantises; a line break where a picture's label has one.
SCALINGS: dict[str, Quantize] = {
    "per tensor\nE4M3": scaled(E4M3, TENSOR, FP32),
    "per tensor\nE5M2": scaled(E5M2, TENSOR, FP32),
    "row-wise\nE4M3, 2^k": scaled(E4M3, ROW, POWER_OF_TWO),
    "1×128\nE4M3, FP32": scaled(E4M3, Granularity(1, 128), FP32),
    "1×128\nE4M3, 2^k": scaled(E4M3, Granularity(1, 128), POWER_OF_TWO),
    "128×128\nE4M3, FP32": scaled(E4M3, Granularity(128, 128), FP32),
    "128×128\nE4M3, 2^k": scaled(E4M3, Granularity(128, 128), POWER_OF_TWO),
    "MXFP8\n1×32 E4M3": scaled(E4M3, Granularity(1, 32), E8M0),
    "NVFP4\n1×16": partial(quantize_nvfp4, granularity=Granularity(1, 16), payload=PAYLOAD),
    "MXFP4\n1×32": scaled(E2M1, Granularity(1, 32), E8M0),
}

# Okabe and Ito's palette, as in fp8train/analysis/plot.py.
COLOURS = ("#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#F0E442")


def distributions() -> dict[str, Tensor]:
    """FP32 tensors by what they are."""
    gaussian, other = (
        torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) for seed in SEEDS
    )
    torch.manual_seed(SEEDS[0])
    student = torch.distributions.StudentT(3.0).sample(SHAPE)
    channels, gate, up = gaussian.clone(), gaussian.clone(), other
    channels[:, ::1024] *= 100
    gate[:, ::1024] *= 16
    up[:, ::1024] = gate[:, ::1024]
    octaves = 2.0 ** -(torch.arange(SHAPE[0]) % 21)[:, None]
    return {
        "Gaussian": gaussian,
        "Student-t, 3 dof": student,
        "4 channels × 100": channels,
        "row i × 2^-(i mod 21)": gaussian * octaves,
        # Where gate and up weights of a channel have aligned, silu(a)·b grows as a²: the outliers
        # of Fishman et al. 2024, "Scaling FP8 training to trillion-token LLMs".
        "SwiGLU, 4 channels aligned": F.silu(gate) * up,
    }


def signal_to_noise(x: Tensor, quantized: Tensor) -> float:
    """Σx² over Σ(x − q)², in dB."""
    power, noise = (part.square().sum(dtype=torch.float64) for part in (x, x - quantized))
    return 10 * math.log10(float(power / noise))


@dataclass(frozen=True)
class Loss:
    """What quantisation did to a tensor.

    Attributes:
        snr_db: see `signal_to_noise`.
        median_relative_error: the median of |x − q| / |x| over values that are not 0.
        flushed_fraction: the share of these that became 0.
    """

    snr_db: float
    median_relative_error: float
    flushed_fraction: float

    @classmethod
    def of(cls, x: Tensor, quantized: Tensor) -> Loss:
        nonzero = x != 0
        return cls(
            signal_to_noise(x, quantized),
            float(((x - quantized) / x).abs()[nonzero].median()),
            float((quantized[nonzero] == 0).float().mean()),
        )


def measure() -> list[dict[str, Any]]:
    """One row a distribution and scaling."""
    rows = []
    for name, x in distributions().items():
        for scaling, apply in SCALINGS.items():
            loss = Loss.of(x, apply(x).dequantize())
            rows.append({"tensor": name, "scaling": scaling.replace("\n", " "), **vars(loss)})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Scalings down, tensors across, in Markdown."""
    cells: dict[str, list[str]] = {}
    for row in rows:
        cells.setdefault(row["scaling"], []).append(
            f"{row['snr_db']:.1f} dB, {row['median_relative_error']:.1%}, "
            f"{row['flushed_fraction']:.1%}"
        )
    tensors = list(dict.fromkeys(row["tensor"] for row in rows))
    return markdown_table(["scaling", *tensors], [[name, *found] for name, found in cells.items()])


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Signal to noise above, the flushed fraction below; PNG, 1800 x 1050 pixels."""
    figure = Figure(figsize=(12, 7), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[5, 4])
    figure.suptitle("What quantisation keeps, by scaling and tensor", x=0.01, ha="left")
    _bars(above, rows, "snr_db")
    above.set_ylabel("signal to noise (dB)")
    above.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=5,
        frameon=False,
        fontsize=9,
        borderaxespad=0.2,
    )
    _bars(below, rows, "flushed_fraction")
    below.set_ylabel("flushed to zero")
    below.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    below.set_xticks(range(len(SCALINGS)), [name.replace("2^k", "$2^k$") for name in SCALINGS])
    figure.align_ylabels()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _bars(axes: Axes, rows: list[dict[str, Any]], key: str) -> None:
    """A group of bars for each scaling, one for each tensor."""
    tensors = list(dict.fromkeys(row["tensor"] for row in rows))
    width = 0.8 / len(tensors)
    for index, (tensor, colour) in enumerate(zip(tensors, COLOURS, strict=True)):
        heights = [row[key] for row in rows if row["tensor"] == tensor]
        left = (index - (len(tensors) - 1) / 2) * width
        axes.bar(
            [position + left for position in range(len(heights))],
            heights,
            width,
            color=colour,
            edgecolor="black",
            linewidth=0.4,
            label=tensor.replace("2^-(i mod 21)", r"$2^{-(i\,\mathrm{mod}\,21)}$"),
        )
    axes.margins(x=0.01)
    axes.tick_params(axis="x", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the rows, with hardware and versions")
    parser.add_argument(
        "--picture",
        type=Path,
        nargs="?",
        const=ROOT / "docs" / "images" / "snr.png",
        help="also draw them, as PNG",
    )
    arguments = parser.parse_args()
    rows = measure()
    print("signal to noise, median relative error, share flushed to zero\n")
    print(table(rows))
    if arguments.picture:
        plot(rows, arguments.picture)
    if arguments.json:
        config = {"shape": SHAPE, "seeds": SEEDS}
        write_record(arguments.json, "snr_table", config, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
