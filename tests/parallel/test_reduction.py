"""The all-to-all reduction on real processes against the same sum in one process."""

import pytest
import torch
import torch.distributed as dist

from fp8train.parallel.reduction import AllToAllReduceScatter
from fp8train.precision.wire import CODECS
from tests.ranks import on_ranks

RANKS = 3
SIZES = (1, 127, 128, 1000)


def gradients(rank: int, size: int) -> torch.Tensor:
    return torch.randn(RANKS * size, generator=torch.Generator().manual_seed(1000 * rank + size))


def reduce_all() -> dict[tuple[str, int, str], tuple[torch.Tensor, int]]:
    """Every codec, size and op on this rank: the shard, and the bytes sent for it."""
    results = {}
    for name, codec in CODECS.items():
        for size in SIZES:
            for op in ("SUM", "AVG"):
                reduction = AllToAllReduceScatter(codec)
                shard = reduction.allocate((size,), dtype=torch.float32, device=torch.device("cpu"))
                given = gradients(dist.get_rank(), size)
                reduction(shard, given, dist.group.WORLD, getattr(dist.ReduceOp, op))
                results[name, size, op] = shard, reduction.take_bytes()
                assert reduction.take_bytes() == 0
    bad = gradients(dist.get_rank(), 300)
    if dist.get_rank() == 1:
        bad[450] = torch.inf  # rank 1's share for rank 1
    shard = torch.empty(300)
    AllToAllReduceScatter(CODECS["e5m2"])(shard, bad, dist.group.WORLD, dist.ReduceOp.AVG)
    results["inf", 300, "AVG"] = shard, 0
    try:
        reduction(shard, bad, dist.group.WORLD, dist.ReduceOp.MAX)
    except ValueError as error:
        results["refused", 0, str(error)] = shard, 0
    return results


@pytest.fixture(scope="module")
def by_rank():
    return on_ranks(RANKS, reduce_all)


def simulate(name: str, size: int, op: str, owner: int) -> torch.Tensor:
    """Each rank's share for the owner, there and back through the codec, summed in rank order."""
    codec = CODECS[name]
    total = torch.zeros(size)
    for rank in range(RANKS):
        message = codec.encode(gradients(rank, size).view(RANKS, size))[owner]
        total += codec.decode(message, size)
    return total / RANKS if op == "AVG" else total


@pytest.mark.parametrize("name", CODECS)
def test_bit_equal_to_the_simulation(by_rank, name: str) -> None:
    for rank, results in enumerate(by_rank):
        for size in SIZES:
            for op in ("SUM", "AVG"):
                assert torch.equal(results[name, size, op][0], simulate(name, size, op, rank))


def test_error_against_fp64(by_rank) -> None:
    exact = sum(gradients(rank, 1000).double() for rank in range(RANKS)).view(RANKS, -1) / RANKS
    for name, limit in (("fp32", 1e-6), ("bf16", 3e-3), ("e5m2", 0.06)):
        got = torch.stack([results[name, 1000, "AVG"][0] for results in by_rank])
        error = ((got - exact).norm() / exact.norm()).item()
        assert error < limit, name
        assert error > limit / 100, name


def test_bytes_on_the_wire(by_rank) -> None:
    for results in by_rank:
        assert results["fp32", 1000, "SUM"][1] == 2 * 4000
        assert results["bf16", 1000, "SUM"][1] == 2 * 2000
        assert results["e5m2", 1000, "SUM"][1] == 2 * (1024 + 8)


def test_inf_reaches_its_owner_as_nan(by_rank) -> None:
    shard = by_rank[1]["inf", 300, "AVG"][0]
    assert shard[128:256].isnan().all() and shard[:128].isfinite().all()
    assert by_rank[0]["inf", 300, "AVG"][0].isfinite().all()


def test_other_ops_are_refused(by_rank) -> None:
    assert any(key[0] == "refused" and "only SUM and AVG" in key[2] for key in by_rank[0])
