"""Train a recipe in BF16, in every FP8 precision and with a broken scale; print the gaps.

    python scripts/gap_table.py [--json FILE] [--recipes NAME,...] [key=value ...]

The broken scale takes an amax 64 times too small: a check that the gate can fail. Without a
`+recipe=` it is `+recipe=llama_fp8`. Each run takes `compare.processes=2` processes; with
`resume=auto` finished runs are not trained again. Exit code: 0 when every precision passes the
gate and the broken scale fails it, 1 when not, 2 for a mistake or a failed run.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fp8train.analysis.compare import Comparison, compare
from fp8train.analysis.pair import key_of, plan, train, training_overrides, with_precision
from fp8train.analysis.report import (
    finite_or_null,
    markdown_table,
    percent,
    quantity,
    times,
    validation_fall,
)
from fp8train.analysis.runs import Run, load_run, number
from fp8train.cli import run_app
from fp8train.config import FP8_RECIPES, CompareConfig, Config, ConfigError

TRAIN = ROOT / "launch" / "train.py"
BROKEN = "broken-scale"
HEADER = (
    "recipe",
    "validation loss",
    "gap to BF16",
    "fall since step 0",
    "FLOPs in FP8",
    "gradient reduction",
    "step time / BF16",
)


def main() -> int:
    """Train, print the table, and write it as JSON where asked."""
    description, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description,
        epilog=rest,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table here as JSON")
    parser.add_argument(
        "--recipes",
        type=lambda names: tuple(names.split(",")),
        default=FP8_RECIPES,
        metavar="NAME,...",
        help=f"only these; default {','.join(FP8_RECIPES)}",
    )
    arguments, overrides = parser.parse_known_args()
    if not any(key_of(item) == "recipe" for item in overrides):
        overrides = ["+recipe=llama_fp8", *overrides]

    def task(config: Config, overrides: list[str]) -> int:
        assert isinstance(config, CompareConfig)
        return make_table(config, overrides, arguments.recipes, arguments.json)

    sys.argv[1:] = overrides
    return run_app(task, "compare", CompareConfig, fault_code=2)


def make_table(
    config: CompareConfig, overrides: list[str], recipes: tuple[str, ...], path: Path | None
) -> int:
    """Train every variant, print the table, and return the exit code."""
    for recipe in recipes:
        if recipe not in FP8_RECIPES:
            raise ConfigError(
                f"--recipes: {recipe or 'a name is empty'}: choose from {', '.join(FP8_RECIPES)}"
            )
    if len(set(recipes)) < len(recipes):
        raise ConfigError(f"--recipes {','.join(recipes)}: name each one once")
    for item in overrides:
        if key_of(item).split(".")[0] in ("precision", "baseline") or key_of(item) == "compare.dir":
            raise ConfigError(f"{item} has no effect on the table of all precisions: leave it out")
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"--json {path}: the folder {path.parent} does not exist: make it first")
    mine = training_overrides(overrides)
    variants = [(recipe, recipe, with_precision(mine, recipe)) for recipe in ("bf16", *recipes)]
    broken = with_precision(mine, "fp8_current", "precision.margin=-6")
    variants.append((BROKEN, BROKEN, broken))
    runs = plan(variants, config.compare.processes)
    for run in runs:
        train(run, config.compare.processes, TRAIN)
    baseline, *others = [load_run(run.config.run.dir) for run in runs]
    results = {
        run.role: compare(other, baseline, config.compare.max_gap)
        for run, other in zip(runs[1:], others, strict=True)
    }
    rows = [row("bf16", baseline, None)]
    rows += [row(role, result.candidate, result) for role, result in results.items()]
    print(markdown_table(HEADER, [text(item) for item in rows]))
    if path is not None:
        path.write_text(json.dumps(finite_or_null(document(baseline, rows)), indent=2) + "\n")
    as_expected = all(result.passed == (role != BROKEN) for role, result in results.items())
    if not as_expected:
        print(
            f"Not as it should be: each recipe within {percent(config.compare.max_gap)} of BF16, "
            f"{BROKEN} beyond",
            file=sys.stderr,
        )
    return 0 if as_expected else 1


def row(role: str, run: Run, result: Comparison | None) -> dict[str, Any]:
    """A row of the table; fractions as such, the gap null for the baseline itself."""
    return {
        "recipe": role,
        "run": run.name,
        "final_validation_loss": run.final_validation_loss,
        "gap": result.validation_gap if result else None,
        "validation_fall": validation_fall(run),
        "fp8_flop_fraction": number(run.summary.get("fp8_flop_fraction")),
        "gradient_reduction": run.summary.get("gradient_reduction"),
        "step_time_ratio": result.time_ratio if result else 1.0,
        "median_step_seconds": run.step_seconds,
        "passed": result.passed if result else None,
    }


def text(item: dict[str, Any]) -> tuple[str, ...]:
    """The row as it is printed."""
    broken = item["recipe"] == BROKEN
    return (
        "fp8_current, amax / 64 (must fail)" if broken else item["recipe"],
        quantity(item["final_validation_loss"]),
        percent(number(item["gap"]), sign=True),
        percent(item["validation_fall"], 1),
        percent(item["fp8_flop_fraction"], 1),
        str(item["gradient_reduction"]),
        times(item["step_time_ratio"]),
    )


def document(baseline: Run, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The table with what it was measured on; the configuration is the baseline's."""
    return {
        "name": "gap_table",
        "hardware": baseline.environment.get("hardware"),
        "versions": baseline.environment.get("versions"),
        "config": baseline.config,
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
