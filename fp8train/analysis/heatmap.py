"""The picture of a run's telemetry: what quantisation lost in each layer, over the steps."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Colormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray

from fp8train.config import ConfigError

PICTURE = "telemetry.png"
ROLES = {"input": "input", "weight": "weight", "grad_output": "output gradient"}
NO_NUMBER, ZERO = "#dcdcdc", "#ffffff"
NAMED_ROWS = 36  # up to so many rows a role each has its name; beyond, blocks are numbered
ROW_HEIGHT, MOST_HEIGHT = 0.135, 5.0  # inches, of a row and of one role's rows
DECADES = 6  # of a share's colours


@dataclass(frozen=True)
class Samples:
    """A run's telemetry.

    Attributes:
        run: its name.
        steps: that were sampled, in order.
        names: LAYER.ROLE, in model order.
        values: of each step and name, the statistics; see `precision/telemetry.py`.
    """

    run: str
    steps: list[int]
    names: list[str]
    values: dict[int, dict[str, dict[str, float | None]]]

    def layers(self, role: str) -> list[str]:
        """The layers that have this role, in model order."""
        split = (name.rpartition(".") for name in self.names)
        return [layer for layer, _, theirs in split if theirs == role]

    def table(self, role: str, statistic: str) -> NDArray[np.float64]:
        """One statistic, [layers, steps]; NaN where there is no number."""
        rows = [
            [self._value(step, f"{layer}.{role}", statistic) for step in self.steps]
            for layer in self.layers(role)
        ]
        return np.array(rows, dtype=np.float64).reshape(len(rows), len(self.steps))

    def _value(self, step: int, name: str, statistic: str) -> float:
        value = self.values[step].get(name, {}).get(statistic)
        return math.nan if value is None else value


def read_samples(folder: Path) -> Samples | None:
    """The telemetry in a run's folder, finished or not; None if there is none.

    Raises:
        ConfigError: the folder has no metrics.jsonl.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError(
            f"{folder} is not a run (it has no metrics.jsonl): give the folder of a run, such as "
            f"outputs/NAME"
        )
    values = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue  # the last line of a run that is writing it
        if "telemetry" in line:
            values[int(line["step"])] = line["telemetry"]
    if not values:
        return None
    names = list(values[max(values)])
    return Samples(folder.resolve().name, sorted(values), names, values)


@dataclass(frozen=True)
class Panel:
    """One column of the picture.

    Attributes:
        statistic: its name in the telemetry.
        title: above the column.
        colours: of the values.
        norm: from values to colours.
        unit: beside the colour bar.
    """

    statistic: str
    title: str
    colours: Colormap
    norm: Normalize
    unit: str


def plot_samples(samples: Samples, path: Path) -> None:
    """Write the picture as PNG: a column a statistic, a band a role, a row a layer."""
    roles = [role for role in ROLES if samples.layers(role)]
    panels = _panels(samples, roles)
    heights = [min(MOST_HEIGHT, ROW_HEIGHT * len(samples.layers(role))) for role in roles]
    heights = [max(height, 0.8) for height in heights]
    figure = Figure(figsize=(12.5, sum(heights) + 1.9), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(
        len(roles), len(panels), sharex=True, squeeze=False, height_ratios=heights
    )
    figure.suptitle(
        f"What quantisation does to each layer: {samples.run}", x=0.01, ha="left", fontsize=12
    )
    for column, panel in enumerate(panels):
        grid[0, column].set_title(panel.title, loc="left", fontsize=10)
        for band, role in enumerate(roles):
            axes = grid[band, column]
            image = _draw(axes, samples, role, panel)
            if column == 0:
                _name_rows(axes, samples.layers(role))
                axes.set_ylabel(ROLES[role], fontsize=10)
            else:
                axes.set_yticks([])
        _number_steps(grid[-1, column], samples.steps)
        bar = figure.colorbar(
            image, ax=list(grid[:, column]), location="bottom", aspect=35, pad=0.02, extend="both"
        )
        bar.set_label(panel.unit, fontsize=9)
        bar.ax.tick_params(labelsize=8)
        if isinstance(panel.norm, LogNorm):
            bar.ax.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:g}%"))
            bar.ax.minorticks_off()
    figure.savefig(path)


def _panels(samples: Samples, roles: list[str]) -> list[Panel]:
    snr = Panel(
        "snr_db",
        "signal-to-noise ratio",
        _colours("viridis", None),
        _linear([samples.table(role, "snr_db") for role in roles]),
        "dB (grey: no number, as in high precision)",
    )
    shares = [("saturated", "saturated elements"), ("flushed", "elements flushed to zero")]
    return [snr] + [
        Panel(
            statistic,
            title,
            _colours("YlOrRd", ZERO),
            _logarithmic([samples.table(role, statistic) for role in roles]),
            "share, logarithmic (white: none)",
        )
        for statistic, title in shares
    ]


def _colours(name: str, zero: str | None) -> Colormap:
    return matplotlib.colormaps[name].with_extremes(bad=NO_NUMBER, under=zero)


def _linear(tables: list[NDArray[np.float64]]) -> Normalize:
    """From the smallest value to the largest, without one in a hundred at either end."""
    values = np.concatenate([table.ravel() for table in tables])
    values = values[np.isfinite(values)]
    least, most = np.quantile(values, (0.01, 0.99)) if values.size else (0.0, 1.0)
    return Normalize(math.floor(least), max(math.ceil(most), math.floor(least) + 1))


def _logarithmic(tables: list[NDArray[np.float64]]) -> LogNorm:
    """Whole decades, up to the largest share; 0 lies below all."""
    values = np.concatenate([table.ravel() for table in tables])
    values = values[np.isfinite(values) & (values > 0)]
    most = math.ceil(math.log10(values.max())) if values.size else -2
    least = math.floor(math.log10(values.min())) if values.size else most - 4
    return LogNorm(10.0 ** max(min(least, most - 1), most - DECADES), 10.0**most)


def _draw(axes: Axes, samples: Samples, role: str, panel: Panel) -> AxesImage:
    table = samples.table(role, panel.statistic)
    if isinstance(panel.norm, LogNorm):  # only a 0 is below all colours
        least = panel.norm.vmin or 0.0
        table = np.where(table == 0, least / 10, np.maximum(table, least))
    image = axes.imshow(
        np.ma.masked_invalid(table),
        aspect="auto",
        interpolation="nearest",
        cmap=panel.colours,
        norm=panel.norm,
    )
    if len(table) <= NAMED_ROWS:
        for row in _block_starts(samples.layers(role))[1:]:
            axes.axhline(row - 0.5, color="#888888", linewidth=0.5)
    axes.spines[:].set_color("#888888")
    axes.tick_params(length=2, labelsize=8, color="#888888")
    return image


def _name_rows(axes: Axes, layers: list[str]) -> None:
    """Each layer's block and last name; where they would not fit, numbers of blocks."""
    if len(layers) <= NAMED_ROWS:
        names = [f"{_block(layer)}  {layer.rpartition('.')[2]}".strip() for layer in layers]
        axes.set_yticks(range(len(layers)), names, fontsize=6.5)
        return
    starts = _block_starts(layers)
    every = _round_stride(len(starts), 20)
    chosen = starts[::every]
    axes.set_yticks(chosen, [f"block {_block(layers[row])}" for row in chosen], fontsize=8)


def _number_steps(axes: Axes, steps: list[int]) -> None:
    every = _round_stride(len(steps), 8)
    chosen = list(range(len(steps)))[::every]
    axes.set_xticks(chosen, [str(steps[column]) for column in chosen])
    axes.set_xlabel("optimizer step", fontsize=9)


def _round_stride(count: int, most: int) -> int:
    """The smallest of 1, 2, 5, 10, 20, … that leaves at most so many of `count`."""
    strides = (digit * 10**power for power in range(9) for digit in (1, 2, 5))
    return next(stride for stride in strides if count <= stride * most)


def _block(layer: str) -> str:
    """The number in a layer's name; empty without one."""
    return next((part for part in layer.split(".") if part.isdigit()), "")


def _block_starts(layers: list[str]) -> list[int]:
    """The first row of each block."""
    blocks = [_block(layer) for layer in layers]
    return [row for row, block in enumerate(blocks) if row == 0 or block != blocks[row - 1]]
