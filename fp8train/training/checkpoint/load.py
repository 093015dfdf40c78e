"""Find a checkpoint that is as it was written, and go on from it."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException

from fp8train.config import Config, ConfigError
from fp8train.parallel.parallelize import ParallelModel
from fp8train.training.checkpoint import checksums, folders, manifest
from fp8train.training.checkpoint.save import shared_digests
from fp8train.training.checkpoint.state import fill
from fp8train.training.checkpoint.storage import Damaged

log = logging.getLogger(__name__)


def newest_verified(checkpoints: Path) -> Path | None:
    """The newest checkpoint whose files are as they were written; None where there are none at
    all. One that is damaged is named and passed over. Every rank calls it, and reads a part of the
    files.

    Raises:
        ConfigError: all are damaged. A run that began anew would bury them.
    """
    found = folders.newest_first(checkpoints)
    for folder in found:
        wrong = checksums.damage(folder, shared_digests(folder))
        if wrong is None and manifest.read(folder) is None:
            wrong = f"{manifest.MANIFEST} is of another version"
        if wrong is None:
            return folder
        log.warning("%s is damaged and passed over: %s", folder, wrong)
    if found:
        raise ConfigError(
            f"no checkpoint in {checkpoints} is as it was written ({found[0].name}: {wrong}): "
            f"restore one, or delete them to begin anew"
        )
    return None


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
            f"{checkpoint} can't be loaded ({reason}): delete it, and resume=auto takes the one "
            f"before"
        ) from error
