"""The training run, from a configuration to a finished folder."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from fp8train.config import Config, ConfigError
from fp8train.data.dataset import PreparedData, prepare
from fp8train.data.order import fingerprint
from fp8train.layout import Layout
from fp8train.layout_rules import warnings
from fp8train.parallel import runtime
from fp8train.parallel.parallelize import parallelize, precise_model
from fp8train.parallel.runtime import Ranks
from fp8train.precision.backends.nvidia import notices
from fp8train.precision.backends.select import choose_backend
from fp8train.rules import check
from fp8train.training.checkpoint.folders import newest_first
from fp8train.training.checkpoint.load import load, newest_verified
from fp8train.training.checkpoint.manifest import Progress, progress_of, read
from fp8train.training.checkpoint.save import save
from fp8train.training.dry_run import dry_run
from fp8train.training.learner import Learner
from fp8train.training.reporter import Reporter
from fp8train.training.run_folder import RunFolder

log = logging.getLogger("fp8train")


def train(config: Config) -> int:
    """Train as configured; every rank of the run calls it. Returns the exit code.

    Raises:
        ConfigError: a mistake in the configuration, found before any process group exists.
    """
    ranks = Ranks.from_environment()
    logging.basicConfig(format="%(message)s")
    log.setLevel(logging.INFO if ranks.is_first else logging.ERROR)
    world_size = ranks.world_size if config.world_size is None else config.world_size
    check(config, world_size)
    if config.dry_run:
        return dry_run(config, world_size) if ranks.is_first else 0
    layout = Layout.of(config.parallel, world_size)
    for line in warnings(config, layout, ranks.local_world_size):
        log.warning(line)
    check_wandb_mode()
    device = runtime.choose_device(config.trainer.device, ranks)
    backend = choose_backend(config.precision, device)
    folder = RunFolder(config)
    folder.check()
    _, conversion = precise_model(config, device, backend)
    data = prepare(config.data, config.trainer.sequence_length)
    check_vocabulary(config, data)
    data_id = fingerprint(data, config.trainer)
    found = newest_first(folder.checkpoints) if config.resume == "auto" else []
    if found and read(found[0]) is not None:  # mistakes are said before processes meet
        progress = progress_of(found[0], config, data_id)
        if progress.step >= config.trainer.steps and folder.finished_steps() == progress.step:
            log.info("%s is complete at step %d: nothing to do", folder.path, progress.step)
            return 0
    for line in notices():
        log.info(line)
    runtime.start(ranks, device)
    try:
        check_agreement(found, folder)
        progress, resume_from = Progress(), None
        if found:
            resume_from = newest_verified(folder.checkpoints)
        if resume_from is not None:
            progress = progress_of(resume_from, config, data_id)
        parallel = parallelize(config, device, backend)
        learner = Learner(config, device, data, progress, parallel)
        reporter = Reporter(config, ranks, folder, learner, conversion, backend, data_id)
        run(config, learner, reporter, resume_from)
        del learner, reporter, parallel  # before the groups that their meshes hold
        dist.barrier()
    finally:
        runtime.stop()
    return 0


def check_agreement(found: list[Path], folder: RunFolder) -> None:
    """All ranks must see the same checkpoints.

    Raises:
        ConfigError: they don't, as on nodes that don't share the run's folder.
    """
    mine = (found[0].name if found else "none", len(found))
    seen = [mine] * dist.get_world_size()
    dist.all_gather_object(seen, mine)
    other = next((rank for rank, theirs in enumerate(seen) if theirs != seen[0]), None)
    if other is not None:
        (newest, count), (theirs, their_count) = seen[0], seen[other]
        raise ConfigError(
            f"the ranks find different checkpoints in run.dir={folder.path} (the newest of {count} "
            f"is {newest} for rank 0, of {their_count} it is {theirs} for rank {other}): put it "
            f"where all nodes see it"
        )


def check_wandb_mode() -> None:
    """Refuse a WANDB_MODE that W&B would raise for, after the run's folder is written.

    Raises:
        ConfigError: naming the modes there are.
    """
    modes = ("online", "offline", "disabled", "shared", "dryrun", "run")
    mode = os.environ.get("WANDB_MODE", "online")
    if mode not in modes:
        raise ConfigError(f"WANDB_MODE={mode} in the environment: choose one of {', '.join(modes)}")


def check_vocabulary(config: Config, data: PreparedData) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for.

    Raises:
        ConfigError: naming both sizes.
    """
    if data.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is below the {data.vocab_size} ids of "
            f"data.tokenizer={config.data.tokenizer}: raise it, or use data.tokenizer=bytes"
        )


def run(config: Config, learner: Learner, reporter: Reporter, resume_from: Path | None) -> None:
    """Train to the last step, validating and saving when due."""
    trainer, progress = config.trainer, learner.progress
    if resume_from is not None:
        load(resume_from, learner.parallel, learner.optimizer, config)

    def due(every: int) -> bool:
        return every > 0 and progress.step % every == 0

    with reporter.open(resuming=resume_from is not None):
        if progress.step == 0:
            reporter.validated(learner.validate())
        while progress.step < trainer.steps:
            began = time.monotonic()
            result = learner.step()
            reporter.stepped(result, time.monotonic() - began)
            last = progress.step == trainer.steps
            if due(trainer.validate_every) or last:
                reporter.validated(learner.validate())
            if due(config.checkpoint.every) or (last and config.checkpoint.at_end):
                save(
                    reporter.folder.checkpoints,
                    learner.parallel,
                    learner.optimizer,
                    progress,
                    config,
                    reporter.data_id,
                )
    reporter.finish()
    if learner.device.type == "cuda":
        torch.cuda.synchronize(learner.device)
