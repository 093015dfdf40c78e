"""The pool of processes that other tests run on: what a job gets, and what it leaves."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fp8train.layout import micro_batches
from fp8train.parallel.execution import MicroBatch
from fp8train.parallel.parallelize import parallelize
from tests.planning.conftest import compose
from tests.ranks import native_threads, on_ranks


def who(word: str) -> tuple[str, int, int, str, float]:
    total = torch.ones(1)
    dist.all_reduce(total)
    return word, dist.get_rank(), os.getpid(), os.environ["RANK"], total.item()


def test_results_come_in_order_and_the_processes_stay() -> None:
    three = on_ranks(3, who, "first")
    assert [(word, rank, name, total) for word, rank, _, name, total in three] == [
        ("first", rank, str(rank), 3.0) for rank in range(3)
    ]
    for size in (1, 2):  # a new group of another size each time
        again = on_ranks(size, who, "again")
        assert [(result[1], result[4]) for result in again] == [(r, size) for r in range(size)]
        assert {result[2] for result in again} <= {result[2] for result in three}


def surroundings() -> tuple[str | None, str, list[str], int]:
    return os.environ.get("MARK"), os.getcwd(), sorted(os.listdir()), torch.get_num_threads()


def test_a_job_sees_the_session_as_it_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert on_ranks(1, surroundings)[0][0] is None
    (tmp_path / "late_module.py").write_text("def answer(x): return x + 1\n")
    with monkeypatch.context() as patch:
        patch.setenv("MARK", "here")
        patch.chdir(tmp_path)
        patch.syspath_prepend(tmp_path)
        seen = on_ranks(1, surroundings)
        assert seen == [("here", str(tmp_path), ["late_module.py"], 1)]
        from late_module import answer

        assert on_ranks(2, answer, 41) == [42, 42]
    assert on_ranks(1, surroundings)[0][0] is None


def disturb() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.manual_seed(5)
    torch.randn(3, device="cpu")
    init_device_mesh("cpu", (2,), mesh_dim_names=("left",)).__enter__()
    os.environ["LEFT"] = "over"


def look() -> dict[str, Any]:
    return {
        "draw": torch.rand(1).item(),
        "tensor": (torch.empty(1).dtype, torch.empty(1).device.type),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "mesh": len(torch.distributed.device_mesh._mesh_resources.mesh_stack),
        "environment": os.environ.get("LEFT"),
    }


def test_what_a_job_sets_is_gone_in_the_next() -> None:
    before = on_ranks(2, look)
    on_ranks(2, disturb)
    assert on_ranks(2, look) == before
    assert before[0]["tensor"] == (torch.float32, "cpu")


def gather_on_a_mesh(groups_before: int) -> tuple[bool, torch.Tensor, int]:
    """Whether an operator's result lives on this job's mesh; the result; the native threads."""
    for _ in range(groups_before):  # so that the mesh's groups have other names than before
        dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    y = (x + x).redistribute(placements=[Replicate()]) * 2
    return y.device_mesh is mesh, y.to_local(), native_threads()


def test_a_mesh_and_its_threads_end_with_the_job() -> None:
    threads = []
    for groups_before in (0, 2, 0, 1, 0):
        results = on_ranks(2, gather_on_a_mesh, groups_before)
        for on_this_mesh, y, _ in results:
            assert on_this_mesh
            assert torch.equal(y, torch.arange(4.0) * 4)
        if groups_before == 0:
            threads.append([count for _, _, count in results])
    assert threads[1] == threads[2]


def train_a_model(overrides: list[str]) -> None:
    small = ("model.num_layers=2", "trainer.micro_batch_size=1", "trainer.global_batch_size=2")
    config = compose(*small, *overrides)
    parallel = parallelize(config, torch.device("cpu"))
    tokens = torch.randint(320, (1, config.trainer.sequence_length))
    rounds = micro_batches(config, parallel.mesh.layout)
    batches = [MicroBatch(tokens, tokens, number) for number in range(rounds)]
    parallel.train(batches, 1.0, lambda batch: None)


def test_a_model_and_its_threads_end_with_the_job() -> None:
    before = on_ranks(2, native_threads)
    for overrides in (["parallel.tensor=2"], ["parallel.pipeline=2"], ["parallel.shard=2"]):
        on_ranks(2, train_a_model, overrides)
        assert on_ranks(2, native_threads) == before, overrides


def fail(how: Callable[[], None], who_fails: list[int]) -> None:
    if dist.get_rank() in who_fails:
        how()
    dist.all_reduce(torch.ones(1))


def divide() -> None:
    print(1 / 0)


def die() -> None:
    os._exit(3)


def sleep() -> None:
    time.sleep(60)


def unpicklable() -> Callable[[], None]:
    return lambda: None


@pytest.mark.parametrize(
    ("how", "who_fails", "message"),
    [
        (divide, [0], r"^rank 0 failed:\n(.*\n)*ZeroDivisionError"),
        (divide, [2], r"^rank 2 failed:\n(.*\n)*ZeroDivisionError"),
        (divide, [1, 2], r"^rank 1 failed:\n(.*\n)*ZeroDivisionError"),
        (die, [1], r"^rank 1 failed:\nthe process ended with exit code 3$"),
    ],
)
def test_the_rank_that_failed_is_named(
    how: Callable[[], None], who_fails: list[int], message: str
) -> None:
    with pytest.raises(AssertionError, match=message) as caught:
        on_ranks(3, fail, how, who_fails)
    assert str(caught.value).count("failed:") == 1
    assert len(on_ranks(3, who, "after")) == 3


def test_a_result_that_can_not_travel_is_a_failure() -> None:
    with pytest.raises(AssertionError, match=r"rank 0 failed:\n(.*\n)*.*pickle"):
        on_ranks(1, unpicklable)


@pytest.mark.slow
def test_hung_ranks_are_named_with_the_place_where_they_are() -> None:
    on_ranks(2, who, "before")  # so that the time below is the job's alone
    began = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        on_ranks(2, fail, sleep, [1], timeout=5)
    assert time.monotonic() - began < 30
    waiting, hung = str(caught.value).split("rank 1 failed:")
    assert waiting.startswith("rank 0 failed:") and "all_reduce" in waiting
    assert "in sleep" in hung and "all_reduce" not in hung
