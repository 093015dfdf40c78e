"""Saves while training goes on: they are of their own step, and a failure costs nothing else."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fp8train.training.checkpoint import checksums, folders
from fp8train.training.checkpoint.load import first_verified, load
from fp8train.training.checkpoint.manifest import Progress
from fp8train.training.checkpoint.save import Saver
from fp8train.training.learner import Learner
from scripts.bench_checkpoint import measure
from tests.ranks import on_ranks
from tests.training.test_learner import learner_of, small_config


class Late(Saver):
    """Begins to write when it is told to."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.now = threading.Event()

    def _begin(self) -> None:
        self.now.wait(60)
        super()._begin()


def contents(learner: Learner) -> list[torch.Tensor]:
    """Masters, moments and amax histories of this rank, copied."""
    state = [*learner.parallel.model.parameters()]
    state += [value for each in learner.optimizer.state.values() for value in each.values()]
    local = [value.to_local() if hasattr(value, "to_local") else value for value in state]
    return [
        value.detach().clone() for value in (*local, *learner.parallel.delayed_state().values())
    ]


def save_and_go_on(folder: Path) -> dict[str, Any]:
    config = small_config()
    config.precision.recipe = "fp8_delayed"
    config.gradients.error_feedback = True
    one = learner_of(config, Progress())
    saver = Late(folder, one.parallel, config, "data")
    seen: dict[str, Any] = {"there": []}
    states = []
    for _ in range(2):
        saver.now.clear()
        one.step()
        states.append(contents(one))
        saver.save(one.optimizer, one.progress)
        following = [one.step().loss for _ in range(2)]
        seen["there"].append(folders.newest_first(folder)[:1])
        saver.now.set()
        saver.wait()
    assert saver.close() == []
    for step, state in zip((1, 4), states, strict=True):
        other = learner_of(config, Progress(step, step * config.trainer.global_batch_size))
        load(folder / folders.folder_name(step), other.parallel, other.optimizer, config)
        seen[step] = all(map(torch.equal, contents(other), state))
    seen["losses"] = [other.step().loss for _ in range(2)] == following
    return seen


def test_a_save_is_of_its_own_step(tmp_path: Path) -> None:
    for seen in on_ranks(2, save_and_go_on, tmp_path / "checkpoints"):
        assert seen["there"] == [
            [],
            [tmp_path / "checkpoints/step_00000001"],
        ]  # it was written late
        assert seen[1] and seen[4] and seen["losses"]


class Stale(Saver):
    """Rank 1's folder does not show a file of rank 0's yet, and then it fails in its own way."""

    fails = False

    def _checksum(self, written: Path) -> None:
        if dist.get_rank() == 1:
            names = checksums.names
            checksums.names = lambda folder: [*names(folder)][1:]
            try:
                super()._checksum(written)
            finally:
                checksums.names = names
        else:
            super()._checksum(written)

    def _describe(self, written: Path, progress: Progress) -> None:
        if self.fails and dist.get_rank() == 1:
            raise ValueError("rank 1 alone")
        super()._describe(written, progress)


def save_stale(folder: Path) -> tuple[list[str], list[str], str]:
    config = small_config()
    one = learner_of(config, Progress())
    saver = Stale(folder, one.parallel, config, "data")
    one.step()
    saver.save(one.optimizer, one.progress)
    saver.wait()
    first = saver.poll()
    saver.fails = True
    one.step()
    saver.save(one.optimizer, one.progress)
    second = saver.close()
    whole = first_verified(folders.newest_first(folder))
    assert whole is not None
    return first, second, whole.name


def test_ranks_that_see_or_do_differently_agree(tmp_path: Path) -> None:
    for first, second, whole in on_ranks(2, save_stale, tmp_path / "checkpoints"):
        assert first == [] and whole == "step_00000001"
        assert second == ["the checkpoint of step 2 was not saved: rank 1 alone"]


def mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Any:
    """A small disk: a tmpfs."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        mount("-t", "tmpfs", "-o", "size=16m", "none", folder)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a tmpfs can't be mounted: {error}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill_the_disk(disk: Path) -> dict[str, Any]:
    config = small_config()
    one = learner_of(config, Progress())
    checkpoints = disk / "run/checkpoints"
    saver = Saver(checkpoints, one.parallel, config, "data")
    first = dist.get_rank() == 0
    seen: dict[str, Any] = {}

    def attempt(name: str) -> None:
        one.step()
        saver.save(one.optimizer, one.progress)
        saver.wait()
        dist.barrier()  # rank 0 cleans up
        seen[name] = saver.poll()
        seen[f"{name} leaves"] = sorted(path.name for path in checkpoints.iterdir())
        seen[f"{name} has"] = first_verified(folders.newest_first(checkpoints))
        dist.barrier()

    attempt("room")
    if first:
        used = sum(file.stat().st_size for file in checkpoints.rglob("*"))
        mount("-o", f"remount,size={int(1.7 * used)}", disk)
    dist.barrier()
    attempt("full")
    if first:
        mount("-o", "remount,size=16m", disk)
    dist.barrier()
    attempt("room again")
    if first:
        mount("-o", "remount,ro", disk)
    dist.barrier()
    attempt("read-only")
    if first:
        mount("-o", "remount,rw", disk)
        (disk / "run").rename(disk / "elsewhere")
        (disk / "run").touch()
    dist.barrier()
    one.step()
    saver.save(one.optimizer, one.progress)
    seen["vanished"] = saver.close()
    seen["loss"] = one.step().loss
    return seen


def test_a_disk_that_fails_costs_one_checkpoint(disk: Path) -> None:
    for seen in on_ranks(2, fill_the_disk, disk):
        assert seen["room"] == [] and seen["room again"] == []
        (full,) = seen["full"]
        assert full.startswith("the checkpoint of step 2 was not saved: No space left on device")
        assert seen["full has"] == disk / "run/checkpoints/step_00000001"
        assert seen["full leaves"] == ["latest", "step_00000001"]
        assert seen["room again has"].name == "step_00000003"
        (read_only,) = seen["read-only"]
        assert "step 4 was not saved: Read-only file system" in read_only
        assert seen["read-only has"].name == "step_00000003"
        (vanished,) = seen["vanished"]
        assert "step 5 was not saved: Not a directory" in vanished
        assert seen["loss"] > 0


def bench(folder: Path) -> dict[str, Any]:
    config = small_config()
    one = learner_of(config, Progress())
    return measure(one, Saver(folder, one.parallel, config, "data"), pairs=1)


def test_the_bench_sees_a_shorter_wait(tmp_path: Path) -> None:
    (row,) = on_ranks(1, bench, tmp_path / "checkpoints")
    assert row["least"] <= row["stall_over_synchronous"] <= row["most"]
    assert 0 < row["stall_seconds"] <= row["written_seconds"]
    assert folders.newest_first(tmp_path / "checkpoints")[0].name == "step_00000003"
