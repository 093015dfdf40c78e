"""Checkpoints by torch.distributed.checkpoint: complete or not there.

A checkpoint is written to a folder with a name of its own and renamed once every rank's shard and
the manifest are on disk, so a folder called step_00000100 is a whole one. It loads on any number
of ranks.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from fp8train.config import Config, ConfigError
from fp8train.parallel.parallelize import ParallelModel

MANIFEST = "manifest.json"


@dataclass
class Progress:
    """Where a run stands; with the tensors, all that a resume needs."""

    step: int = 0
    consumed_samples: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    wandb_id: str | None = None


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def newest(checkpoints: Path) -> Path | None:
    """The newest complete checkpoint; None if there is none."""
    complete = [path for path in checkpoints.glob("step_*") if (path / MANIFEST).exists()]
    return max(complete, key=lambda path: path.name, default=None)


def read_manifest(checkpoint: Path, config: Config, fingerprint: str) -> Progress:
    """The checkpoint's progress, after holding it to the configuration.

    Raises:
        ConfigError: it is of another model, precision or data.
    """
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    theirs = manifest["model"] | {"precision": manifest["precision"]}
    ours = asdict(config.model) | {"precision": config.precision.recipe}
    for key, value in ours.items():
        if theirs.get(key) != value and key != "name":
            raise ConfigError(
                f"{checkpoint} is a checkpoint of another model: {key} is {theirs.get(key)} there "
                f"and {value} here; use its configuration, or another run.name="
            )
    if manifest["data_fingerprint"] != fingerprint:
        raise ConfigError(
            f"{checkpoint} was trained on other data: fingerprint {manifest['data_fingerprint']} "
            f"there and {fingerprint} here; restore data, seed, sequence length and global batch "
            f"size, or use another run.name="
        )
    return Progress(**manifest["progress"])


def save(
    checkpoints: Path,
    parallel: ParallelModel,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    config: Config,
    fingerprint: str,
) -> Path:
    """Write a checkpoint of this step; every rank calls it. Returns its folder."""
    target = checkpoints / folder_name(progress.step)
    partial = checkpoints / f".{target.name}.partial"
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        checkpoints.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dcp.save(_state(parallel, optimizer), checkpoint_id=partial)
    if first:
        manifest = {
            "progress": asdict(progress),
            "model": asdict(config.model),
            "precision": config.precision.recipe,
            "data_fingerprint": fingerprint,
        }
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        for old in sorted(checkpoints.glob("step_*"))[: -config.checkpoint.keep]:
            shutil.rmtree(old)
    dist.barrier()
    return target


def load(checkpoint: Path, parallel: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
    """Fill model, optimizer and recipe state from a checkpoint; every rank calls it."""
    state = _state(parallel, optimizer)
    dcp.load(state, checkpoint_id=checkpoint)  # the delayed-scaling tensors are filled in place
    set_model_state_dict(parallel.model, state["model"])
    set_optimizer_state_dict(parallel.model, optimizer, state["optimizer"])


def _state(parallel: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state: dict[str, Any] = {
        "model": get_model_state_dict(parallel.model),
        "optimizer": get_optimizer_state_dict(parallel.model, optimizer),
    }
    if parallel.conversion.delayed is not None:
        state["delayed_scaling"] = parallel.conversion.delayed.state_dict()
    return state
