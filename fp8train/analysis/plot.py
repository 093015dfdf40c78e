"""The picture of a comparison: both loss curves above, their relative gap below."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from fp8train.analysis.compare import Comparison, gap_course, smooth, validation_losses

# Okabe and Ito's palette: told apart with any kind of colour vision, and in grey by lightness.
CANDIDATE, BASELINE, GAP, GATE = "#D55E00", "#56B4E9", "#009E73", "#555555"
LONGEST_NAME = 36  # characters of a run's name that fit into half of the legend


def plot_losses(comparison: Comparison, path: Path) -> None:
    """Write the picture as PNG, 1350 x 1050 pixels."""
    figure = Figure(figsize=(9, 7), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[5, 3])
    figure.suptitle(_title(comparison), x=0.01, ha="left", fontsize=12)
    _plot_curves(above, comparison)
    _plot_gap(below, comparison)
    figure.align_ylabels()
    figure.savefig(path)


def _plot_curves(axes: Axes, comparison: Comparison) -> None:
    # The baseline lies beneath, wider and lighter, so that it shows where the curves coincide.
    for run, colour, width, marker, size in (
        (comparison.baseline, BASELINE, 4.5, "s", 9),
        (comparison.candidate, CANDIDATE, 1.5, "o", 5),
    ):
        losses, smoothed, points = run.losses, smooth(run.losses), validation_losses(run)
        name = _short(run.name)
        above = 3 if run is comparison.candidate else 2
        axes.plot(
            list(losses),
            list(losses.values()),
            color=colour,
            alpha=0.35,
            linewidth=0.8,
            zorder=1,
        )
        axes.plot(
            list(smoothed),
            list(smoothed.values()),
            color=colour,
            linewidth=width,
            zorder=above,
            label=f"{name}, training (thin: raw)",
        )
        axes.plot(
            list(points),
            list(points.values()),
            marker,
            color=colour,
            markersize=size,
            markeredgecolor="black",
            markeredgewidth=0.7,
            clip_on=False,
            zorder=above + 2,
            label=f"{name}, validation",
        )
    axes.set_ylabel("loss (nats per token)")
    axes.margins(x=0.02)
    _legend_above(axes)
    _tidy(axes)


def _plot_gap(axes: Axes, comparison: Comparison) -> None:
    candidate, baseline = comparison.candidate, comparison.baseline
    limit = 100 * comparison.gates[0].limit
    training = gap_course(smooth(candidate.losses), smooth(baseline.losses))
    validation = comparison.validation
    axes.axhspan(-limit, limit, color=GATE, alpha=0.08, linewidth=0)
    axes.axhline(limit, color=GATE, linewidth=1, linestyle="--", label=f"gate, ±{limit:g}%")
    axes.axhline(-limit, color=GATE, linewidth=1, linestyle="--")
    axes.axhline(0, color=GATE, linewidth=0.8)
    axes.plot(
        [point.step for point in training],
        [100 * point.gap for point in training],
        color=GAP,
        linewidth=1.3,
        label="gap of the training loss",
    )
    axes.plot(
        [point.step for point in validation],
        [100 * point.gap for point in validation],
        "D",
        color=CANDIDATE,
        markersize=6,
        markeredgecolor="black",
        markeredgewidth=0.7,
        clip_on=False,
        zorder=4,
        label="gap of the validation loss",
    )
    axes.set_ylim(*_gap_range([point.gap for point in [*training, *validation]], limit))
    axes.set_ylabel("relative gap (%)")
    axes.set_xlabel("optimizer step (training losses: exponential moving average, decay 0.9)")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}" if value else "0"))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend_above(axes)
    _tidy(axes)


def _gap_range(gaps: Sequence[float], limit: float) -> tuple[float, float]:
    """Limits in percent that show every gap and both gate lines."""
    finite = [100 * gap for gap in gaps if math.isfinite(gap)]
    low, high = min([-limit, *finite]), max([limit, *finite])
    room = 0.12 * (high - low)
    return low - room, high + room


def _title(comparison: Comparison) -> str:
    gap = comparison.validation_gap
    size = f"{100 * gap:+.2f}%" if math.isfinite(gap) else "not measurable"
    verdict = "gate passed" if comparison.passed else "gate FAILED"
    return f"Gap of the final validation loss: {size} ({verdict})"


def _short(name: str) -> str:
    """A long name without its middle."""
    if len(name) <= LONGEST_NAME:
        return name
    half = LONGEST_NAME // 2
    return f"{name[:half]}…{name[-half + 1 :]}"


def _legend_above(axes: Axes) -> None:
    """The legend stands outside of the axes, where no curve can run into it."""
    columns = 2 if len(axes.get_legend_handles_labels()[0]) == 4 else 3
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        frameon=False,
        fontsize=9,
        borderaxespad=0.2,
        handlelength=1.8,
    )


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
