"""Hold a run against its baseline: table, comparison.json, report.md, loss.png.

    python launch/compare.py outputs/CANDIDATE outputs/BASELINE [compare.max_gap=0.01]
    python launch/compare.py +recipe=llama_fp8 baseline=bf16 [compare.processes=2] [key=value ...]

The first form compares two finished runs, the second trains both first, with the same seed and
data order. Exit code: 0 the gates pass, 1 one fails, 2 no verdict (a mistake or a failed run).
"""

import os
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rich.console import Console

from fp8train.analysis.compare import compare
from fp8train.analysis.pair import key_of, plan, train, training_overrides, with_precision
from fp8train.analysis.report import print_table, write_report
from fp8train.analysis.runs import load_run
from fp8train.cli import report_error, run_app
from fp8train.config import RECIPES, CompareConfig, Config, ConfigError

TRAIN = ROOT / "launch" / "train.py"
# Hydra's options whose value is an argument of its own: `--cfg job` names no run folder.
OPTIONS_WITH_VALUE = {
    *("--cfg", "-c", "--package", "-p", "--info", "-i", "--experimental-rerun"),
    *("--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
}


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Part the run folders from what Hydra reads: overrides, and options with their values."""
    folders: list[str] = []
    others: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        plain = "=" not in argument and not argument.startswith(("-", "+", "~"))
        is_folder = plain and before not in OPTIONS_WITH_VALUE
        (folders if is_folder else others).append(argument)
    return folders, others


def main() -> int:
    """Compare the runs that the command line names or describes."""
    folders, others = split_arguments(sys.argv[1:])
    try:
        if len(folders) not in (0, 2):
            raise ConfigError(
                f"{len(folders)} run folders given ({', '.join(folders)}): give two, candidate and "
                f"baseline, or none to train both"
            )
        stray = [item for item in others if not key_of(item).startswith(("compare.", "-"))]
        if folders and stray:
            raise ConfigError(
                f"{stray[0]} has no effect on finished runs: with run folders only compare.* "
                f"can be given"
            )
    except ConfigError as error:
        return report_error(error)

    def task(config: Config, overrides: list[str]) -> int:
        assert isinstance(config, CompareConfig)
        if not config.compare.max_gap > 0:
            raise ConfigError(f"compare.max_gap={config.compare.max_gap}: must be above 0")
        if folders:
            return show(config, folders[0], folders[1], [])
        return train_and_show(config, overrides)

    sys.argv[1:] = others
    return run_app(task, "compare", CompareConfig, fault_code=2)


def train_and_show(config: CompareConfig, overrides: list[str]) -> int:
    """Train candidate and baseline, one after the other, and compare them."""
    baseline, recipes = config.baseline, ("bf16", "fp32", *RECIPES)
    if baseline not in recipes:
        raise ConfigError(f"baseline={baseline}: choose one of {', '.join(recipes)}")
    if baseline == config.precision.recipe:
        raise ConfigError(
            f"baseline={baseline} is the candidate's precision too: change baseline= or precision="
        )
    mine = training_overrides(overrides)
    variants = [
        ("candidate", config.precision.recipe, mine),
        ("baseline", baseline, with_precision(mine, baseline)),
    ]
    processes = config.compare.processes
    runs = plan(variants, processes)
    for run in runs:
        train(run, processes, TRAIN)
    torchrun = f"torchrun --standalone --nproc-per-node {processes} launch/train.py"
    commands = [
        (f"train the {run.role}", shlex.join([*torchrun.split(), *run.overrides])) for run in runs
    ]
    return show(config, runs[0].config.run.dir, runs[1].config.run.dir, commands)


def show(
    config: CompareConfig, candidate: str, baseline: str, commands: list[tuple[str, str]]
) -> int:
    """Print and write the comparison of two finished runs; 0 when its gates pass, else 1."""
    result = compare(load_run(candidate), load_run(baseline), config.compare.max_gap)
    names = (run.folder.resolve().name for run in (result.candidate, result.baseline))
    name = "-".join(["compare", *names])
    folder = Path(config.compare.dir or os.path.join("outputs", name))
    write_report(result, folder, commands)
    console = Console()
    print_table(result, console)
    console.print(f"report: {folder}/report.md, {folder}/loss.png", highlight=False, soft_wrap=True)
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
