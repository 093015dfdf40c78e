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
from fp8train.training.checkpoint.load import load
from fp8train.training.checkpoint.save import Saver
from fp8train.training.dry_run import dry_run
from fp8train.training.learner import Learner
from fp8train.training.reporter import Reporter
from fp8train.training.resume import candidates, choose, foresee
from fp8train.training.run_folder import RunFolder

log = logging.getLogger("fp8train")


def train(config: Config) -> int:
    """Train as configured; every rank of the run calls it. Returns the exit code.

    Raises:
        ConfigError: a mistake in the configuration, found before any process group exists.
    """
    os.umask(os.umask(0o002) | 0o002)  # nothing that a run writes is writable for everybody
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
    found = candidates(config, folder)
    _, conversion = precise_model(config, device, backend)
    data = prepare(config.data, config.trainer.sequence_length)
    check_vocabulary(config, data)
    data_id = fingerprint(data, config.trainer)
    foreseen = foresee(found, config, data_id, folder)
    if foreseen is not None and foreseen.step >= config.trainer.steps == folder.finished_steps():
        log.info("%s is complete at step %d: nothing to do", folder.path, foreseen.step)
        return 0
    for line in notices():
        log.info(line)
    runtime.start(ranks, device)
    try:
        progress, resume_from = choose(found, config, data_id, folder)
        parallel = parallelize(config, device, backend)
        learner = Learner(config, device, data, progress, parallel)
        reporter = Reporter(config, ranks, folder, learner, conversion, backend, data_id)
        run(config, learner, reporter, resume_from)
        del learner, reporter, parallel  # before the groups that their meshes hold
        dist.barrier()
    finally:
        runtime.stop()
    return 0


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

    saver = Saver(reporter.folder.checkpoints, learner.parallel, config, reporter.data_id)
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
                saver.save(learner.optimizer, progress)
            reporter.not_saved(saver.poll())
        reporter.not_saved(saver.close())
    reporter.finish()
    if learner.device.type == "cuda":
        torch.cuda.synchronize(learner.device)
