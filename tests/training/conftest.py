"""Real runs of launch/train.py on a small model and a small text."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPO

SMALL = [
    *("model.hidden_size=64", "model.intermediate_size=128", "model.num_layers=2"),
    *("trainer.sequence_length=32", "trainer.global_batch_size=8", "trainer.micro_batch_size=2"),
    *("trainer.steps=6", "trainer.validation_samples=10", "trainer.validate_every=3"),
    *("schedule.warmup_steps=2", "optimizer.lr=0.003"),
]


@dataclass
class Finished:
    """A finished process and, if it trained, what it left."""

    code: int
    out: str
    err: str
    folder: Path

    def lines(self, key: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that carry a key."""
        text = (self.folder / "metrics.jsonl").read_text()
        return [line for line in map(json.loads, text.splitlines()) if key in line]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())


class Launcher:
    """Starts launch/train.py in a working folder of its own, with its own caches."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.text = root / "text.txt"
        words = ["the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "another", "one"]
        self.text.write_text(" ".join(words[i * i % 11] for i in range(6000)))
        self.environment = {
            key: value for key, value in os.environ.items() if not key.startswith("WANDB")
        }
        self.environment["WANDB_CONFIG_DIR"] = str(root / "wandb-config")

    def train(self, name: str, *overrides: str, processes: int = 0, small: bool = True) -> Finished:
        """processes 0: plain python; else that many under torchrun."""
        start = [sys.executable]
        if processes:
            start += ["-m", "torch.distributed.run", "--standalone"]
            start += ["--nproc-per-node", str(processes)]
        defaults = [f"run.name={name}", "logging.wandb.mode=disabled"]
        if small:
            defaults += [*SMALL, f"data.path={self.text}", f"data.cache_dir={self.root}/cache"]
        command = [*start, str(REPO / "launch/train.py"), *defaults, *overrides]
        done = subprocess.run(
            command,
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        return Finished(done.returncode, done.stdout, done.stderr, self.root / "outputs" / name)


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    return Launcher(tmp_path_factory.mktemp("runs"))
