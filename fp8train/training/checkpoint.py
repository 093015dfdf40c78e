"""Checkpoints by torch.distributed.checkpoint: complete or not there.

A checkpoint is written to a folder with a name of its own and renamed once every rank's shard and
the manifest are on disk, so a folder called step_00000100 is a whole one. It loads on any number
of ranks.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from fp8train.config import Config, ConfigError, flattened, written
from fp8train.layout import Layout, micro_batches
from fp8train.parallel.parallelize import ParallelModel
from fp8train.rules import gradient_reduction, loss_scaling

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
# One entry a parameter instead of a list of them, which would be another list in each stage.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

GRADIENTS = ("scaling", "rounding", "error_feedback", "algorithm")  # what decides their values
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


@dataclass
class Progress:
    """Where a run stands; with the tensors, all that a resume needs."""

    step: int = 0
    consumed_samples: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    loss_scale: float | None = None  # of the next step, where the scale is dynamic
    growth_tracker: int = 0  # good steps since that scale last changed or a step was skipped
    wandb_id: str | None = None


def folder_name(step: int) -> str:
    return f"step_{step:08d}"


def newest(checkpoints: Path) -> Path | None:
    """The newest complete checkpoint; None if there is none."""
    complete = [path for path in checkpoints.glob("step_*") if _manifest(path) is not None]
    return max(complete, key=lambda path: path.name, default=None)


def _manifest(checkpoint: Path) -> dict[str, Any] | None:
    """The checkpoint's manifest; None if there is no whole one."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    wanted = {"progress", "data_fingerprint", "model", "precision", "gradients"}
    return manifest if isinstance(manifest, dict) and wanted <= manifest.keys() else None


def held(config: Config) -> dict[str, Any]:
    """What a resume must have in common with the run: another value would train another model."""
    model, precision = asdict(config.model), asdict(config.precision)
    # How it is computed and watched, not what.
    for free in ("backend", "emulation", "cache_weights", "telemetry"):
        del precision[free]
    del model["name"]
    return {
        "model": model,
        "precision": precision,
        "gradients": {
            "reduce": gradient_reduction(config),
            **{key: getattr(config.gradients, key) for key in GRADIENTS},
        },
        "data": {"eod_mask_loss": config.data.eod_mask_loss},
    }


def read_manifest(checkpoint: Path, config: Config, fingerprint: str) -> Progress:
    """The checkpoint's progress, after holding it to the configuration.

    Raises:
        ConfigError: it is incomplete, or of another model, precision or data.
    """
    manifest = _manifest(checkpoint)
    if manifest is None:
        raise ConfigError(f"{checkpoint} is not a complete checkpoint: resume from another")
    theirs = flattened(manifest)
    for key, value in flattened(held(config)).items():
        if theirs.get(key) != value:
            group = key.partition(".")[0].replace("gradients", "gradient reduction")
            raise ConfigError(
                f"{checkpoint} is a checkpoint of another {group}: {key} is "
                f"{written(theirs.get(key))} there and {written(value)} here; use its "
                f"configuration, or another run.name="
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
    # Without gradients torch fills in optimizer states that no step has made yet.
    optimizer.zero_grad(set_to_none=True)
    if first:
        for interrupted in checkpoints.glob(".step_*.partial"):
            shutil.rmtree(interrupted)
        checkpoints.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dcp.save(_state(parallel, optimizer), checkpoint_id=partial)
    if first:
        manifest = {
            "progress": asdict(progress),
            "data_fingerprint": fingerprint,
            "layout": str(parallel.mesh.layout),
            "gradient_unit": gradient_unit(config, parallel.mesh.layout),
            **held(config),
        }
        with (partial / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        _sync(checkpoints)  # before older ones go, so that there is always one to load
        for old in sorted(checkpoints.glob("step_*"))[: -config.checkpoint.keep]:
            shutil.rmtree(old)
    dist.barrier()
    return target


def _sync(folder: Path) -> None:
    """Have the folder's entries on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def gradient_unit(config: Config, layout: Layout) -> float:
    """What gradients are multiplied by while they are reduced, so the unit of what error feedback
    keeps: a static loss scale, for each micro batch of a step."""
    static = loss_scaling(config) == "static"
    scale = config.trainer.loss_scale.value if static else 1.0
    return scale * micro_batches(config, layout)


def load(
    checkpoint: Path, parallel: ParallelModel, optimizer: torch.optim.Optimizer, config: Config
) -> None:
    """Fill model, optimizer, recipe state and what error feedback keeps from a checkpoint; every
    rank calls it.

    The optimizer's settings (decay, betas, eps) stay those of the configuration. What error
    feedback keeps is a rank's own: another layout starts anew, and a line says so.

    Raises:
        ConfigError: it can't be read.
    """
    settings = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    state = _state(parallel, optimizer)
    try:
        state["residuals"] = _room_for_residuals(checkpoint, parallel)
        dcp.load(state, checkpoint_id=checkpoint)  # fills the tensors in place
    except (Exception, CheckpointException) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise ConfigError(
            f"{checkpoint} can't be loaded ({reason}): delete it, and resume=auto takes the one "
            f"before"
        ) from error
    if parallel.tied:
        _to_own_names(state, parallel)
    mine = _of_rank()
    unit = gradient_unit(config, parallel.mesh.layout)
    theirs = (_manifest(checkpoint) or {}).get("gradient_unit", unit)
    parallel.reduction.restore(
        {key.removeprefix(mine): kept for key, kept in state["residuals"].items()}, unit / theirs
    )
    set_model_state_dict(parallel.model, state["model"])
    set_optimizer_state_dict(parallel.model, optimizer, state["optimizer"], options=FLAT)
    for group, configured in zip(optimizer.param_groups, settings, strict=True):
        group.update(configured)


def _state(parallel: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state: dict[str, Any] = {
        "model": get_model_state_dict(parallel.model),
        "optimizer": get_optimizer_state_dict(parallel.model, optimizer, options=FLAT),
    }
    if parallel.tied:
        _to_one_name(state)
    if delayed := parallel.delayed_state():
        state["delayed_scaling"] = delayed
    if residuals := parallel.reduction.residuals():
        state["residuals"] = {_of_rank() + key: kept for key, kept in residuals.items()}
    return state


def _of_rank() -> str:
    """What this rank's own entries begin with."""
    return f"rank {dist.get_rank()}: "


def _room_for_residuals(checkpoint: Path, parallel: ParallelModel) -> dict[str, Tensor]:
    """Empty tensors for what a checkpoint has kept for this rank's error feedback."""
    prefix = "residuals."
    entries = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    kept = {key: value for key, value in entries.items() if key.startswith(prefix)}
    there, here = (_manifest(checkpoint) or {}).get("layout"), str(parallel.mesh.layout)
    if kept and there != here:
        log.info(
            "error feedback starts anew: %s was saved as %s, and this run is %s",
            checkpoint,
            there,
            here,
        )
        return {}
    device = parallel.mesh.fsdp.device_type
    return {
        key.removeprefix(prefix): torch.empty(
            value.size, dtype=value.properties.dtype, device=device
        )
        for key, value in kept.items()
        if key.startswith(prefix + _of_rank()) and isinstance(value, TensorStorageMetadata)
    }


def _to_one_name(state: dict[str, Any]) -> None:
    """Call a tied parameter by the embedding's name alone, on every stage that has it."""
    for group in ("model", "optimizer"):
        values: dict[str, Any] = state[group]
        if any(EMBEDDING in key for key in values):
            state[group] = {key: value for key, value in values.items() if HEAD not in key}
        else:
            state[group] = {key.replace(HEAD, EMBEDDING): value for key, value in values.items()}


def _to_own_names(state: dict[str, Any], parallel: ParallelModel) -> None:
    """The reverse: by the names that this rank's modules have for it."""
    here = dict(parallel.model.named_parameters(remove_duplicate=False))
    if EMBEDDING not in here:
        for group in ("model", "optimizer"):
            values: dict[str, Any] = state[group]
            state[group] = {key.replace(EMBEDDING, HEAD): value for key, value in values.items()}
    elif HEAD in here:
        state["model"][HEAD] = state["model"][EMBEDDING]
