"""The tensors of a run, by name: FP32 masters, optimizer states, scales and amax histories, and
what belongs to a rank alone, residuals of error feedback and generators of random numbers."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from fp8train.config import Config
from fp8train.parallel.parallelize import ParallelModel
from fp8train.training.checkpoint import manifest
from fp8train.training.checkpoint.storage import read_tensors, shapes

log = logging.getLogger(__name__)
# One entry a parameter instead of a list of them, which would be another list in each stage.
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"

Groups = dict[str, dict[str, Any]]  # of entries by name: model, optimizer, delayed_scaling


def tensors_of(parallel: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All that a resume needs in tensors, or this rank's pieces of it."""
    # Without gradients torch fills in optimizer states that no step has made yet.
    optimizer.zero_grad(set_to_none=True)
    mine = {
        f"residuals.{key}": kept for key, kept in parallel.reduction.residuals().items()
    } | _generators(parallel)
    return flat(_groups(parallel, optimizer)) | {
        _of_rank(key): value for key, value in mine.items()
    }


def fill(
    checkpoint: Path, parallel: ParallelModel, optimizer: torch.optim.Optimizer, config: Config
) -> None:
    """Fill model, optimizer, recipe state, random numbers and what error feedback keeps from a
    checkpoint; every rank calls it.

    The optimizer's settings (decay, betas, eps) stay those of the configuration. What belongs to a
    rank alone is for the same layout: another one starts anew, and a line says so.

    Raises:
        CheckpointException, Damaged: it can't be read.
    """
    settings = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    optimizer.zero_grad(set_to_none=True)
    groups = _groups(parallel, optimizer)
    mine = _room_for_mine(checkpoint, parallel)
    read_tensors(checkpoint, flat(groups) | mine)  # in place
    if parallel.tied:
        _to_own_names(groups, parallel)
    set_model_state_dict(parallel.model, groups["model"])
    set_optimizer_state_dict(parallel.model, optimizer, groups["optimizer"], options=FLAT)
    for group, configured in zip(optimizer.param_groups, settings, strict=True):
        group.update(configured)
    unit = manifest.gradient_unit(config, parallel.mesh.layout)
    theirs = (manifest.read(checkpoint) or {}).get("gradient_unit", unit)
    start = _of_rank("residuals.")
    parallel.reduction.restore(
        {key.removeprefix(start): kept for key, kept in mine.items() if key.startswith(start)},
        unit / theirs,
    )
    _seed(mine, parallel)


def flat(groups: Groups) -> dict[str, Tensor]:
    """The tensors among the entries, as GROUP.NAME. The rest is the configuration's."""
    return {
        f"{group}.{name}": value
        for group, entries in groups.items()
        for name, value in entries.items()
        if isinstance(value, Tensor)
    }


def _groups(parallel: ParallelModel, optimizer: torch.optim.Optimizer) -> Groups:
    groups: Groups = {
        "model": get_model_state_dict(parallel.model),
        "optimizer": get_optimizer_state_dict(parallel.model, optimizer, options=FLAT),
        "delayed_scaling": parallel.delayed_state(),
    }
    if parallel.tied:
        _to_one_name(groups)
    return groups


def _of_rank(name: str) -> str:
    """The name of what only this rank has."""
    return f"rank {dist.get_rank()}.{name}"


def _generators(parallel: ParallelModel) -> dict[str, Tensor]:
    """The states of this rank's random number generators, uint8."""
    states = {"random.cpu": torch.get_rng_state()}
    if parallel.mesh.fsdp.device_type == "cuda":
        states["random.cuda"] = torch.cuda.get_rng_state()
    return states


def _seed(mine: dict[str, Tensor], parallel: ParallelModel) -> None:
    if (state := mine.get(_of_rank("random.cpu"))) is not None:
        torch.set_rng_state(state)
    state = mine.get(_of_rank("random.cuda"))
    if state is not None and parallel.mesh.fsdp.device_type == "cuda":
        torch.cuda.set_rng_state(state)


def _room_for_mine(checkpoint: Path, parallel: ParallelModel) -> dict[str, Tensor]:
    """Empty tensors for what a checkpoint has of this rank alone."""
    kept = shapes(checkpoint)
    there = (manifest.read(checkpoint) or {}).get("layout")
    here = str(parallel.mesh.layout)
    if there != here:
        if any(".residuals." in name for name in kept):
            log.info(
                "error feedback starts anew: %s was saved as %s, and this run is %s",
                checkpoint,
                there,
                here,
            )
        return {}
    device = parallel.mesh.fsdp.device_type
    return {
        name: torch.empty(size, dtype=dtype, device="cpu" if ".random." in name else device)
        for name, (size, dtype) in kept.items()
        if name.startswith(_of_rank(""))
    }


def _to_one_name(state: Groups) -> None:
    """Call a tied parameter by the embedding's name alone, on every stage that has it."""
    for group in ("model", "optimizer"):
        values: dict[str, Any] = state[group]
        if any(EMBEDDING in key for key in values):
            state[group] = {key: value for key, value in values.items() if HEAD not in key}
        else:
            state[group] = {key.replace(HEAD, EMBEDDING): value for key, value in values.items()}


def _to_own_names(state: Groups, parallel: ParallelModel) -> None:
    """The reverse: by the names that this rank's modules have for it."""
    here = dict(parallel.model.named_parameters(remove_duplicate=False))
    if EMBEDDING not in here:
        for group in ("model", "optimizer"):
            values: dict[str, Any] = state[group]
            state[group] = {key.replace(EMBEDDING, HEAD): value for key, value in values.items()}
    elif HEAD in here:
        state["model"][HEAD] = state["model"][EMBEDDING]
