"""What a save costs training: how long the loop stands still, asynchronous over synchronous.

    python scripts/bench_checkpoint.py [--json FILE] [--pairs 5] [--folder FOLDER]

A Llama of 100 M parameters under fp8_current, one process; masters and moments are 1.2 GB. Pairs of
a synchronous and an asynchronous save, one after the other, with a step before each; the ratio is
the median over pairs. While an asynchronous save is written steps go on, and their time is set
against that of steps without one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from fp8train.config import Config, from_container
from fp8train.data.dataset import prepare
from fp8train.environment import write_record
from fp8train.parallel import runtime
from fp8train.parallel.parallelize import parallelize
from fp8train.parallel.runtime import Ranks
from fp8train.planning.flops import parameter_count
from fp8train.training.checkpoint.manifest import Progress
from fp8train.training.checkpoint.save import Saver
from fp8train.training.learner import Learner

OVERRIDES = [
    *("+recipe=llama_fp8", "model.hidden_size=768", "model.intermediate_size=2048"),
    *("model.num_layers=12", "model.num_heads=12", "model.num_kv_heads=12"),
    *("model.vocab_size=9600", "trainer.sequence_length=64", "trainer.global_batch_size=2"),
    *("trainer.micro_batch_size=2", "checkpoint.keep=1", "precision.telemetry.every=0"),
]


def configured() -> Config:
    """The quickstart's configuration with a larger model and smaller steps."""
    ConfigStore.instance().store(name="train_schema", node=Config)
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        composed = compose("train", OVERRIDES)
    container = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(container, dict)
    return from_container({str(key): value for key, value in container.items()})


def measure(learner: Learner, saver: Saver, pairs: int) -> dict[str, Any]:
    """The table's row."""

    def step() -> float:
        began = time.perf_counter()
        learner.step()
        return time.perf_counter() - began

    def save(asynchronous: bool) -> float:
        learner.config.checkpoint.asynchronous = asynchronous
        began = time.perf_counter()
        saver.save(learner.optimizer, learner.progress)
        return time.perf_counter() - began

    step(), save(False)  # makes the buffers; does not count
    synchronous, stall, written, plain, beside = [], [], [], [], []
    for _ in range(pairs):
        plain.append(step())
        synchronous.append(save(False))
        plain.append(step())
        began = time.perf_counter()
        stall.append(save(True))
        while saver.pending is not None and not saver.pending.done():
            beside.append(step())
        written.append(time.perf_counter() - began)
        failures = saver.poll()
        if failures:
            raise OSError(failures[0])
    ratios = [one / other for one, other in zip(stall, synchronous, strict=True)]
    return {
        "parameters": parameter_count(learner.config.model),
        "synchronous_seconds": statistics.median(synchronous),
        "stall_seconds": statistics.median(stall),
        "stall_over_synchronous": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "written_seconds": statistics.median(written),
        "step_seconds": statistics.median(plain),
        "step_seconds_beside": statistics.median(beside),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the row, with hardware and versions")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to save, default a temporary folder")
    arguments = parser.parse_args()
    ranks = Ranks.from_environment()
    device = runtime.choose_device("auto", ranks)
    runtime.start(ranks, device)
    config = configured()
    data = prepare(config.data, config.trainer.sequence_length)
    learner = Learner(config, device, data, Progress(), parallelize(config, device))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        saver = Saver(Path(folder), learner.parallel, config, "data")
        row = measure(learner, saver, arguments.pairs)
        saver.close()
    del learner, saver
    runtime.stop()
    table = Table("parameters", "waiting", "stall", "ratio", "written in", "step", "beside it")
    table.add_row(
        f"{row['parameters'] / 1e6:.0f} M",
        f"{row['synchronous_seconds']:.2f} s",
        f"{row['stall_seconds']:.2f} s",
        f"{row['stall_over_synchronous']:.1%} ({row['least']:.1%} to {row['most']:.1%})",
        f"{row['written_seconds']:.2f} s",
        f"{row['step_seconds']:.2f} s",
        f"{row['step_seconds_beside']:.2f} s",
    )
    Console().print(table)
    if arguments.json:
        record = {"overrides": OVERRIDES, "pairs": arguments.pairs, "device": device.type}
        write_record(arguments.json, "bench_checkpoint", record, [row])
    return 0


if __name__ == "__main__":
    sys.exit(main())
