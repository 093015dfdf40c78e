"""Where a run goes on from: `resume=none`, `auto`, the newest whole checkpoint of its folder, or
the folder of a checkpoint, its own or another run's."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from fp8train.config import Config, ConfigError, written
from fp8train.training.checkpoint import manifest
from fp8train.training.checkpoint.checksums import listed_as_it_is
from fp8train.training.checkpoint.folders import newest_first, step_of
from fp8train.training.checkpoint.load import first_verified
from fp8train.training.checkpoint.manifest import Progress, progress_of
from fp8train.training.run_folder import RunFolder


def candidates(config: Config, folder: RunFolder) -> list[Path]:
    """The checkpoints that may be gone on from, the best first.

    Raises:
        ConfigError: one of the run's own is asked for, and there are newer ones.
    """
    if config.resume == "none":
        return []
    own = newest_first(folder.checkpoints)
    if config.resume == "auto":
        if not own and (origin := folder.branched_off()) is not None:
            raise ConfigError(
                f"run.dir={folder.path} branched off {origin} and has no checkpoint of its own "
                f"yet: start it again with resume={origin} run.overwrite=true"
            )
        return own
    chosen = Path(config.resume)
    step = ((manifest.read(chosen) or {}).get("progress") or {}).get("step", 0)
    if folder.owns(chosen) and own and (step_of(own[0]) or 0) > step:
        raise ConfigError(
            f"resume={chosen} has {own[0]} after it, which a later resume=auto would take: delete "
            f"what is newer, or branch off with another run.name="
        )
    return [chosen]


def foresee(
    found: list[Path], config: Config, fingerprint: str, folder: RunFolder
) -> Progress | None:
    """The progress of the best one, whose files are not yet verified; None without. Says before
    processes meet what can be known then.

    Raises:
        ConfigError: it is of another model, precision or data, or has nothing left to train.
    """
    if not found or not listed_as_it_is(found[0], manifest.MANIFEST):
        return None
    progress, steps = progress_of(found[0], config, fingerprint), config.trainer.steps
    if progress.step >= steps and not folder.owns(found[0]):
        raise ConfigError(
            f"resume={found[0]} is of step {progress.step}, and trainer.steps={written(steps)} "
            f"leaves nothing to train: raise trainer.steps"
        )
    return progress


def choose(
    found: list[Path], config: Config, fingerprint: str, folder: RunFolder
) -> tuple[Progress, Path | None]:
    """Where to begin, and the checkpoint to load, the first whose files are as they were written;
    every rank calls it.

    Raises:
        ConfigError: none is whole, or ranks find different ones.
    """
    check_agreement(found, folder)
    chosen = first_verified(found)
    if chosen is None:
        return Progress(), None
    progress = progress_of(chosen, config, fingerprint)
    if not folder.owns(chosen):
        progress.wandb_id = None  # a branch is a run of its own
    return progress, chosen


def check_agreement(found: list[Path], folder: RunFolder) -> None:
    """All ranks must see the same checkpoints.

    Raises:
        ConfigError: they don't, as on nodes that don't share the run's folder.
    """
    mine = [path.name for path in found]
    seen = [mine] * dist.get_world_size()
    dist.all_gather_object(seen, mine)
    other = next((rank for rank, theirs in enumerate(seen) if theirs != seen[0]), None)
    if other is not None:
        one, two = (", ".join(names) or "none" for names in (seen[0], seen[other]))
        raise ConfigError(
            f"the ranks find different checkpoints in run.dir={folder.path} (rank 0: {one}; rank "
            f"{other}: {two}): put it where all nodes see it"
        )
