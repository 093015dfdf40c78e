"""What telemetry costs: the time of a sampled step over that of a plain one, and its share.

    python scripts/bench_telemetry.py [--json FILE] [--pairs 7]

Steps of the quickstart (+recipe=llama_fp8), one process with one thread, which waits for no other
where the machine has more to do. The ratio is the median over pairs of a
sampled and a plain step, one after the other; the share is what it adds to the mean step at the
default interval, (ratio - 1) / precision.telemetry.every.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from fp8train.config import Config, TelemetryConfig, from_container
from fp8train.data.dataset import prepare
from fp8train.environment import write_record
from fp8train.parallel import runtime
from fp8train.parallel.parallelize import parallelize
from fp8train.parallel.runtime import Ranks
from fp8train.training.checkpoint.manifest import Progress
from fp8train.training.learner import Learner

RECIPE = "llama_fp8"
PRECISIONS = ("fp8_current", "fp8_delayed", "fp8_block")


def configured(precision: str) -> Config:
    """The quickstart's configuration under a precision."""
    ConfigStore.instance().store(name="train_schema", node=Config)
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        composed = compose("train", [f"+recipe={RECIPE}", f"precision={precision}"])
    container = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(container, dict)
    return from_container({str(key): value for key, value in container.items()})


def measure(precision: str, pairs: int, device: torch.device) -> dict[str, Any]:
    """One row of the table."""
    config = configured(precision)
    data = prepare(config.data, config.trainer.sequence_length)
    parallel = parallelize(config, device)
    learner = Learner(config, device, data, Progress(), parallel)

    def seconds(every: int) -> float:
        learner.telemetry.every = every
        began = time.perf_counter()
        learner.step()
        return time.perf_counter() - began

    seconds(1), seconds(0)  # neither counts
    found = [(seconds(1), seconds(0)) for _ in range(pairs)]
    ratios = [sampled / plain for sampled, plain in found]
    ratio, every = statistics.median(ratios), TelemetryConfig().every
    return {
        "recipe": precision,
        "plain_seconds": statistics.median(plain for _, plain in found),
        "sampled_over_plain": ratio,
        "least": min(ratios),
        "most": max(ratios),
        "every": every,
        "share": (ratio - 1) / every,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the rows, with hardware and versions")
    parser.add_argument("--pairs", type=int, default=7)
    arguments = parser.parse_args()
    ranks = Ranks.from_environment()
    device = runtime.choose_device("auto", ranks)
    runtime.start(ranks, device)
    torch.set_num_threads(1)
    rows = [measure(precision, arguments.pairs, device) for precision in PRECISIONS]
    runtime.stop()
    table = Table("recipe", "plain step", "sampled / plain", "least to most", "every", "share")
    for row in rows:
        table.add_row(
            row["recipe"],
            f"{row['plain_seconds']:.3f} s",
            f"{row['sampled_over_plain']:.2f}",
            f"{row['least']:.2f} to {row['most']:.2f}",
            str(row["every"]),
            f"{row['share']:.2%}",
        )
    Console().print(table)
    if arguments.json:
        config = {"recipe": RECIPE, "pairs": arguments.pairs, "threads": 1, "device": device.type}
        write_record(arguments.json, "bench_telemetry", config, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
