"""Find a checkpoint that is as it was written, and go on from it."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fp8train.config import Config, ConfigError
from fp8train.parallel.parallelize import ParallelModel
from fp8train.training.checkpoint import checksums, manifest
from fp8train.training.checkpoint.save import shared_digests
from fp8train.training.checkpoint.state import fill
from fp8train.training.checkpoint.storage import Damaged

log = logging.getLogger(__name__)


def first_verified(found: list[Path]) -> Path | None:
    """The first of these checkpoints whose files are as they were written; None of none. One that
    is damaged is named and passed over. Every rank calls it, and reads a part of the files.

    Raises:
        ConfigError: all are damaged. A run that began anew would bury them.
    """
    reasons = []
    for folder in found:
        wrong = _what_is_wrong(folder)
        if wrong is None:
            return folder
        reasons.append(f"{folder}: {wrong}")
        if len(found) > 1:
            log.warning("%s is damaged and passed over: %s", folder, wrong)
    if reasons:
        raise ConfigError(
            f"no checkpoint to resume from is as it was written ({reasons[0]}): restore one, or "
            f"begin anew with another run.name="
        )
    return None


def _what_is_wrong(folder: Path) -> str | None:
    """As rank 0 judges, for all."""
    found = shared_digests(folder)
    verdict = [checksums.damage(folder, found) if dist.get_rank() == 0 else None]
    if dist.get_rank() == 0 and verdict[0] is None and manifest.read(folder) is None:
        verdict = [f"{manifest.MANIFEST} is of another version"]
    dist.broadcast_object_list(verdict, src=0)
    return verdict[0]


def load(
    checkpoint: Path, parallel: ParallelModel, optimizer: torch.optim.Optimizer, config: Config
) -> None:
    """Fill a run's state from a checkpoint, as `fill` does; every rank calls it.

    Raises:
        ConfigError: it can't be read.
    """
    try:
        fill(checkpoint, parallel, optimizer, config)
    except (CheckpointException, Damaged) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise ConfigError(
            f"{checkpoint} can't be loaded ({reason}): use resume= with one before it"
        ) from error
