"""Shows a comparison: a table on the console, comparison.json, report.md and loss.png."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fp8train.analysis.compare import Comparison, GapPoint, relative_gap
from fp8train.analysis.runs import Run, number
from fp8train.config import ConfigError

Row = tuple[str, str, str, str]  # metric, candidate, baseline, difference
HEADER: Row = ("metric", "candidate", "baseline", "difference")


def percent(value: float, digits: int = 2, sign: bool = False) -> str:
    """A fraction in percent; a dash where it is not a number."""
    if not math.isfinite(value):
        return "-"
    rounded = round(100 * value, digits) + 0.0  # no negative zero
    return f"{rounded:{'+' if sign else ''}.{digits}f}%"


def quantity(value: float, digits: int = 4) -> str:
    """A number with a fixed count of decimals; a dash where it is not a number."""
    return f"{value:,.{digits}f}" if math.isfinite(value) else "-"


def times(value: float) -> str:
    """A ratio, such as 1.25x."""
    return f"{value:.2f}x" if math.isfinite(value) else "-"


def validation_fall(run: Run) -> float:
    """By which fraction the validation loss fell from step 0 to the end."""
    return -relative_gap(run.final_validation_loss, run.initial_validation_loss)


def table_rows(comparison: Comparison) -> list[Row]:
    """The comparison as text, a row a metric."""
    candidate, baseline = comparison.candidate, comparison.baseline

    def row(metric: str, cell: Callable[[Run], str], difference: str = "") -> Row:
        return metric, cell(candidate), cell(baseline), difference

    def entry(key: str) -> Callable[[Run], str]:
        return lambda run: str(run.summary.get(key, "-"))

    def measure(key: str, digits: int) -> Callable[[Run], str]:
        return lambda run: quantity(number(run.summary.get(key)), digits)

    def ratio(key: str) -> str:
        ours, theirs = number(candidate.summary.get(key)), number(baseline.summary.get(key))
        return times(ours / theirs) if theirs > 0 else "-"

    start_gap = relative_gap(candidate.initial_validation_loss, baseline.initial_validation_loss)
    return [
        row(
            "final validation loss",
            lambda run: quantity(run.final_validation_loss),
            percent(comparison.validation_gap, sign=True),
        ),
        row(
            "validation loss at step 0",
            lambda run: quantity(run.initial_validation_loss),
            percent(start_gap, sign=True),
        ),
        row("fall since step 0", lambda run: percent(validation_fall(run), 1)),
        *(
            (
                f"training loss, EMA, step {point.step}",
                quantity(point.candidate),
                quantity(point.baseline),
                percent(point.gap, sign=True),
            )
            for point in comparison.training
        ),
        row(
            "seconds a step, median",
            lambda run: quantity(run.step_seconds),
            times(comparison.time_ratio),
        ),
        row(
            "tokens a second, median",
            measure("median_tokens_per_second", 0),
            ratio("median_tokens_per_second"),
        ),
        row("precision", entry("precision")),
        row("backend", entry("backend")),
        row("layout", entry("layout")),
        row("gradient reduction", entry("gradient_reduction")),
        row(
            "bytes reduced a step",
            measure("bytes_reduced_per_step", 0),
            ratio("bytes_reduced_per_step"),
        ),
        row(
            "block GEMM FLOPs in FP8",
            lambda run: percent(number(run.summary.get("fp8_flop_fraction")), 1),
        ),
        row("skipped steps", entry("skipped_steps")),
    ]


def print_table(comparison: Comparison, console: Console) -> None:
    """Print names, table, verdict and notes."""
    table = Table(caption_justify="left")
    for title in HEADER:
        table.add_column(title, justify="left" if title == "metric" else "right", no_wrap=True)
    for index, cells in enumerate(table_rows(comparison)):
        table.add_row(*cells, style="bold" if index == 0 else None)
    console.print(f"candidate  {comparison.candidate.name}", highlight=False)
    console.print(f"baseline   {comparison.baseline.name}", highlight=False)
    console.print(table)
    for gate in comparison.gates:
        colour, word = ("green", "PASS") if gate.passed else ("red", "FAIL")
        console.print(f"[bold {colour}]{word}[/]  {gate.name}: {gate.reason}", highlight=False)
    for note in comparison.notes:
        console.print(f"note: {note}", style="dim", highlight=False)


def write_report(
    comparison: Comparison, folder: Path, commands: Sequence[tuple[str, str]] = ()
) -> None:
    """Write comparison.json, report.md and loss.png into the folder, made where it is missing.

    Args:
        commands: what made the result, each with a word on what it did.
    Raises:
        ConfigError: the folder can't be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"compare.dir={folder} can't be made ({error.strerror}): give another folder"
        ) from error
    from fp8train.analysis.plot import plot_losses  # matplotlib takes half a second to import

    plot_losses(comparison, folder / "loss.png")
    result = json.dumps(finite_or_null(as_json(comparison)), indent=2, allow_nan=False)
    (folder / "comparison.json").write_text(result + "\n", encoding="utf-8")
    (folder / "report.md").write_text(markdown(comparison, folder, commands), encoding="utf-8")


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The comparison as plain data; losses in nats a token, gaps and fractions as such."""

    def side(run: Run) -> dict[str, Any]:
        return {
            "name": run.name,
            "folder": str(run.folder),
            "validation_fall": validation_fall(run),
            "median_step_seconds": run.step_seconds,
            "environment": run.environment,
            **{key: value for key, value in run.summary.items() if key not in ("name", "status")},
        }

    return {
        "passed": comparison.passed,
        "validation_gap": comparison.validation_gap,
        "gates": [asdict(gate) for gate in comparison.gates],
        "candidate": side(comparison.candidate),
        "baseline": side(comparison.baseline),
        "step_time_ratio": comparison.time_ratio,
        "validation": [asdict(point) for point in comparison.validation],
        "smoothed_training": [asdict(point) for point in comparison.training],
        "config_differences": [asdict(item) for item in comparison.differences],
        "notes": comparison.notes,
    }


def finite_or_null(value: Any) -> Any:
    """The same with null for numbers that JSON doesn't know (NaN and infinities)."""
    if isinstance(value, dict):
        return {key: finite_or_null(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite_or_null(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown whose source is aligned too: first column left, the others right."""
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]
    lines = []
    for row in cells:
        padded = [
            text.rjust(width) if column else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(f"| {' | '.join(padded)} |")
    rule = [
        "-" * width if column == 0 else "-" * (width - 1) + ":"
        for column, width in enumerate(widths)
    ]
    return "\n".join([lines[0], f"| {' | '.join(rule)} |", *lines[1:]])


def markdown(comparison: Comparison, folder: Path, commands: Sequence[tuple[str, str]]) -> str:
    """The report in Markdown, the picture linked beside it."""
    candidate, baseline = comparison.candidate, comparison.baseline
    parts = [
        f"# {candidate.name} against {baseline.name}",
        *(
            f"**{'Pass' if gate.passed else 'Fail'}** ({gate.name}): {gate.reason}."
            for gate in comparison.gates
        ),
        "![Training and validation loss of both runs, and their relative gap](loss.png)",
        markdown_table(HEADER, table_rows(comparison)),
        "Gap: (candidate - baseline) / baseline. Losses in nats a token; "
        "EMA: exponential moving average with a decay of 0.9.",
        "## Validation loss over the run",
        _course(comparison.validation),
        "## Configuration differences",
        _differences(comparison),
        "## Commands",
        _commands(comparison, folder, commands),
        "## What this does not show",
        "\n".join(f"- {note}" for note in comparison.notes),
    ]
    return "\n\n".join(parts) + "\n"


def _course(points: Sequence[GapPoint]) -> str:
    if not points:
        return "The runs have no validation step in common."
    rows = [
        (
            str(item.step),
            quantity(item.candidate),
            quantity(item.baseline),
            percent(item.gap, sign=True),
        )
        for item in points
    ]
    return markdown_table(("step", "candidate", "baseline", "gap"), rows)


def _differences(comparison: Comparison) -> str:
    if not comparison.differences:
        return "None besides the names of the runs."
    rows = [
        (f"`{item.key}`", str(item.candidate), str(item.baseline))
        for item in comparison.differences
    ]
    return markdown_table(("key", "candidate", "baseline"), rows)


def _commands(comparison: Comparison, folder: Path, commands: Sequence[tuple[str, str]]) -> str:
    again = (
        f"python launch/compare.py {comparison.candidate.folder} {comparison.baseline.folder} "
        f"compare.dir={folder}"
    )
    lines = [f"# {label}\n{command}" for label, command in [*commands, ("compare again", again)]]
    return "```bash\n" + "\n".join(lines) + "\n```"
