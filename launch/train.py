"""Train a model: `torchrun --nproc-per-node 2 launch/train.py +recipe=llama_fp8 [key=value]`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fp8train.cli import leave, run_app
from fp8train.config import Config


def task(config: Config, overrides: list[str]) -> int:
    from fp8train.training.trainer import train  # imports torch: only once the config stands

    return train(config)


if __name__ == "__main__":
    leave(run_app(task, "train"))
