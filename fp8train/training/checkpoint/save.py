"""Write a checkpoint: complete or not there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from fp8train.config import Config
from fp8train.parallel.parallelize import ParallelModel
from fp8train.training.checkpoint import checksums, folders
from fp8train.training.checkpoint.manifest import MANIFEST, Progress, describe
from fp8train.training.checkpoint.state import tensors_of
from fp8train.training.checkpoint.storage import write_tensors


def save(
    checkpoints: Path,
    parallel: ParallelModel,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    config: Config,
    fingerprint: str,
) -> Path:
    """Write a checkpoint of this step; every rank calls it. Returns its folder."""
    written, first = folders.partial(checkpoints, progress.step), dist.get_rank() == 0
    if first:
        checkpoints.mkdir(parents=True, exist_ok=True)
        folders.clear(checkpoints)
    dist.barrier()
    write_tensors(written, tensors_of(parallel, optimizer))
    if first:
        manifest = describe(progress, config, parallel.mesh.layout, fingerprint)
        with (written / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
    dist.barrier()
    found = shared_digests(written)
    if first:
        checksums.write(written, found)
        folders.sync(written)
        folders.publish(written, progress.step)  # before older ones go: there is always one
        folders.prune(checkpoints, config.checkpoint.keep, config.checkpoint.keep_every)
    dist.barrier()
    return checkpoints / folders.folder_name(progress.step)


def shared_digests(folder: Path) -> dict[str, str]:
    """Digests of a folder's files, of which every rank reads a part."""
    parts: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    mine = checksums.digests(folder, dist.get_rank(), len(parts))
    dist.all_gather_object(parts, mine)
    return {name: digest for part in parts for name, digest in part.items()}
