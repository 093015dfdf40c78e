"""Train with gradients reduced in FP32, in E5M2, and in E5M2 as nobody should; print the gaps.

    python scripts/reduction_gap.py [--json FILE] [--seeds N,...] [key=value ...]

`+recipe=llama_fp8` for 300 steps on four processes, from each seed. The last way is a ring that
sums in E5M2 without a scale, where small gradients are flushed and every rank rounds the sum again:
a check that the gate can fail. With `resume=auto` finished runs are not trained again. Exit code: 0
when E5M2's final validation loss is within 0.25% of FP32's for every seed and the ring's for none,
1 when not, 2 for a mistake or a failed run.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fp8train.analysis.compare import compare
from fp8train.analysis.pair import key_of, plan, train, training_overrides
from fp8train.analysis.report import markdown_table, percent, quantity
from fp8train.analysis.runs import load_run
from fp8train.cli import run_app
from fp8train.config import CompareConfig, Config, ConfigError
from fp8train.environment import write_record

TRAIN = ROOT / "launch" / "train.py"
MAX_GAP = 0.0025
DEFAULTS = {
    "+recipe": "llama_fp8",
    "trainer.steps": "300",
    "trainer.micro_batch_size": "4",
    "compare.processes": "4",
}
CONTROL = "ring-unscaled"
WAYS = {
    "fp32": ["gradients.reduce=fp32"],
    "e5m2": ["gradients.reduce=e5m2"],
    CONTROL: [
        "gradients.reduce=e5m2",
        "gradients.algorithm=ring",
        "gradients.scaling=none",
    ],
}
HEADER = ("seed", "reduction", "validation loss", "gap to FP32")


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
        "--seeds",
        type=lambda text: [int(seed) for seed in text.split(",")],
        default=[1234, 1235, 1236],
        metavar="N,...",
        help="default 1234,1235,1236",
    )
    arguments, overrides = parser.parse_known_args()
    given = {key_of(item) for item in overrides}
    defaults = [f"{key}={value}" for key, value in DEFAULTS.items() if key_of(key) not in given]

    def task(config: Config, overrides: list[str]) -> int:
        assert isinstance(config, CompareConfig)
        return make_table(config, overrides, arguments.seeds, arguments.json)

    sys.argv[1:] = [*defaults, *overrides]
    return run_app(task, "compare", CompareConfig, fault_code=2)


def make_table(
    config: CompareConfig, overrides: list[str], seeds: list[int], path: Path | None
) -> int:
    """Train every way from every seed, print the table, and return the exit code."""
    for item in overrides:
        if key_of(item).split(".")[0] in ("gradients", "baseline") or key_of(item) in (
            "trainer.seed",
            "compare.dir",
            "run.dir",
        ):
            raise ConfigError(f"{item} has no effect on this table: leave it out")
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"--json {path}: the folder {path.parent} does not exist: make it first")
    mine = [item for item in training_overrides(overrides) if key_of(item) != "run.name"]
    variants = [
        (
            f"{way}, seed {seed}",
            way,
            [*mine, *keys, f"trainer.seed={seed}", f"run.name={config.run.name}-{way}-{seed}"],
        )
        for seed in seeds
        for way, keys in WAYS.items()
    ]
    runs = plan(variants, config.compare.processes)
    loaded = {}
    for planned in runs:
        train(planned, config.compare.processes, TRAIN)
        loaded[planned.role] = load_run(planned.config.run.dir)
    rows: list[dict[str, Any]] = []
    for seed in seeds:
        baseline = loaded[f"fp32, seed {seed}"]
        for way in WAYS:
            run = loaded[f"{way}, seed {seed}"]
            gap = None if run is baseline else compare(run, baseline, MAX_GAP).validation_gap
            loss = run.final_validation_loss
            rows.append({"seed": seed, "reduction": way, "validation_loss": loss, "gap": gap})
    print(markdown_table(HEADER, [text(row) for row in rows]))
    if path is not None:
        write_record(path, "reduction_gap", {"overrides": overrides}, rows)
    as_expected = all(
        row["gap"] is None or (abs(row["gap"]) <= MAX_GAP) == (row["reduction"] != CONTROL)
        for row in rows
    )
    if not as_expected:
        print(
            f"Not as it should be: E5M2 within {percent(MAX_GAP)} of FP32 for every seed, "
            f"{CONTROL} beyond for every seed",
            file=sys.stderr,
        )
    return 0 if as_expected else 1


def text(row: dict[str, Any]) -> tuple[str, ...]:
    """The row as it is printed."""
    name = f"{row['reduction']} (must fail)" if row["reduction"] == CONTROL else row["reduction"]
    gap = "" if row["gap"] is None else percent(row["gap"], sign=True)
    return str(row["seed"]), name, quantity(row["validation_loss"]), gap


if __name__ == "__main__":
    sys.exit(main())
