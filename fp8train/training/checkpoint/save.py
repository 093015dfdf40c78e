"""Write checkpoints: complete or not there, and while training goes on.

The tensors are copied first, into buffers of their own that are kept for the next time, so that
what is written is of one step; then a thread writes them, over a process group of its own, and
training goes on. What goes wrong there, as on a full disk, stops no training: it is told later, and
the checkpoint before stays as it was.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from fp8train.config import Config
from fp8train.parallel.parallelize import ParallelModel
from fp8train.training.checkpoint import checksums, folders
from fp8train.training.checkpoint.manifest import MANIFEST, Progress, describe
from fp8train.training.checkpoint.state import tensors_of
from fp8train.training.checkpoint.storage import files, write_tensors


class Saver:
    """Saves one run's checkpoints, one at a time; every rank calls each method.

    Attributes:
        checkpoints: the folder of their folders.
        failures: of saves that `wait` or `poll` has not told yet, a line each.
    """

    def __init__(
        self, checkpoints: Path, parallel: ParallelModel, config: Config, fingerprint: str
    ) -> None:
        self.checkpoints, self.parallel, self.config = checkpoints, parallel, config
        self.fingerprint, self.failures = fingerprint, list[str]()
        # Its collectives must not meet those of a step that goes on meanwhile.
        self.group = dist.new_group(backend="gloo")
        on_gpu = parallel.mesh.fsdp.device_type == "cuda"
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=on_gpu,
            )
        )
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.pending: Future[str | None] | None = None
        if dist.get_rank() == 0 and checkpoints.is_dir():
            folders.clear(checkpoints)

    def save(self, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
        """Save this step, after the save before is done; returns once its values are copied."""
        self.wait()
        tensors = self.stager.stage(tensors_of(self.parallel, optimizer))
        assert isinstance(tensors, dict)  # and not a future, without asynchronous staging
        self.pending = self.thread.submit(self._write, tensors, replace(progress))
        if not self.config.checkpoint.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Until the save under way, if any, is on disk or has failed."""
        if self.pending is not None:
            if (failure := self.pending.result()) is not None:
                self.failures.append(failure)
            self.pending = None

    def poll(self) -> list[str]:
        """What has failed since the last call, without waiting: a line each."""
        if self.pending is not None and self.pending.done():
            self.wait()
        told, self.failures = self.failures, []
        return told

    def close(self) -> list[str]:
        """Finish, and tell what has failed."""
        self.wait()
        self.thread.shutdown()
        self.stager.close()
        return self.poll()

    def _write(self, tensors: dict[str, Tensor], progress: Progress) -> str | None:
        """What went wrong; None: the checkpoint is there. All ranks find the same."""
        step = progress.step
        written = folders.partial(self.checkpoints, step)
        stages: tuple[Callable[[], None], ...] = (
            lambda: self._begin(),
            lambda: write_tensors(written, tensors, self.group),
            lambda: self._describe(written, progress),
            lambda: self._checksum(written),
            lambda: folders.publish(written, step) if dist.get_rank() == 0 else None,
        )
        for stage in stages:
            failure = self._agreed(stage)
            if failure is not None:
                if dist.get_rank() == 0:
                    shutil.rmtree(written, ignore_errors=True)
                return f"the checkpoint of step {step} was not saved: {failure}"
        failure = self._agreed(lambda: self._tidy(self.checkpoints / folders.folder_name(step)))
        return failure and f"the checkpoint of step {step} is there, but not tidied up: {failure}"

    def _agreed(self, stage: Callable[[], None]) -> str | None:
        """Run a stage; what the first rank that failed in it says, on all ranks."""
        failure = None
        try:
            stage()
        except (Exception, CheckpointException) as error:  # another rank waits for this one
            failure = reason(error)
        failures = [failure] * self.group.size()
        dist.all_gather_object(failures, failure, group=self.group)
        return next((failure for failure in failures if failure is not None), None)

    def _begin(self) -> None:
        if dist.get_rank() == 0:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            folders.clear(self.checkpoints)

    def _describe(self, written: Path, progress: Progress) -> None:
        if dist.get_rank() == 0:
            layout = self.parallel.mesh.layout
            manifest = describe(progress, self.config, layout, self.fingerprint)
            with (written / MANIFEST).open("w", encoding="utf-8") as file:
                json.dump(manifest, file, indent=2)
                file.flush()
                os.fsync(file.fileno())

    def _checksum(self, written: Path) -> None:
        found = shared_digests(written, self.group)
        if dist.get_rank() == 0:
            expected = {MANIFEST, *files(written)}
            for name in sorted(expected ^ found.keys()):
                raise OSError(f"{name} is {'not ' if name in expected else ''}there")
            for name, digest in found.items():
                if digest.startswith(checksums.UNREADABLE):
                    raise OSError(f"{name} is {digest}")
            checksums.write(written, found)
            folders.sync(written)

    def _tidy(self, newest: Path) -> None:
        if dist.get_rank() == 0:
            settings = self.config.checkpoint
            folders.point_to(newest)
            folders.prune(self.checkpoints, newest, settings.keep, settings.keep_every)


def save(
    checkpoints: Path,
    parallel: ParallelModel,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    config: Config,
    fingerprint: str,
) -> Path:
    """Write a checkpoint of this step and wait for it; every rank calls it. Returns its folder.

    Raises:
        OSError: it could not be written.
    """
    saver = Saver(checkpoints, parallel, config, fingerprint)
    saver.save(optimizer, progress)
    for failure in saver.close():
        raise OSError(failure)
    return checkpoints / folders.folder_name(progress.step)


def shared_digests(folder: Path, group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Digests of a folder's files, of which every rank of the group reads a part. What is there is
    rank 0's to say: on a shared file system another may not see it yet."""
    parts: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    listing = [checksums.names(folder) if dist.get_rank() == 0 else []]
    dist.broadcast_object_list(listing, src=0, group=group)
    mine = checksums.digests(folder, listing[0][dist.get_rank(group) :: len(parts)])
    dist.all_gather_object(parts, mine, group=group)
    return {name: digest for part in parts for name, digest in part.items()}


def reason(error: BaseException) -> str:
    """An error in a few words."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
