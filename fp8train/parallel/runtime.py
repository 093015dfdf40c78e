"""The processes of a run: who this one is, its device and threads, meeting and parting."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fp8train.config import ConfigError


@dataclass(frozen=True)
class Ranks:
    """What torchrun says of this process; a plain `python` run is one rank of one."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> Ranks:
        """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE."""
        names = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        return cls(*(int(os.environ.get(name, default)) for name, default in names.items()))

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def choose_device(wanted: str, ranks: Ranks) -> torch.device:
    """The device of `trainer.device`: this rank's GPU, or the CPU.

    Raises:
        ConfigError: a GPU is asked for and there is none for this rank.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if ranks.local_rank >= count:
        raise ConfigError(
            f"trainer.device={wanted}: {ranks.local_world_size} processes on this machine and "
            f"{count} GPUs: start one process a GPU, or use trainer.device=cpu"
        )
    return torch.device("cuda", ranks.local_rank)


def start(ranks: Ranks, device: torch.device) -> None:
    """Set this process's threads and device, and meet the others in the default group."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:  # torchrun sets one thread a process, which leaves cores idle
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // ranks.local_world_size))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def stop() -> None:
    """Part from the others. Call it after the last use of model, optimizer and meshes.

    gloo's groups outlive `destroy_process_group` while anything holds them, hence the collection.
    """
    if not dist.is_initialized():
        return
    gc.collect()
    dist.destroy_process_group()
