"""Gradient reductions on real processes, bit for bit what one process simulates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fp8train.parallel.audit import Audit
from fp8train.parallel.reduction import GradientReduction, Method
from fp8train.precision.philox import key_of
from fp8train.precision.quantize import Draw
from fp8train.precision.wire import Codec, codec
from scripts.reduction_table import all_to_all, common_scale, ring
from tests.ranks import on_ranks

SIZES = (1, 127, 128, 1000)
PLAIN = {name: Method(codec(name), codec(name)) for name in ("fp32", "bf16", "fp16")}
EIGHT = {
    f"{name} {scaling}": Method(codec(name, scaling), codec(name, scaling))
    for name in ("e5m2", "e4m3")
    for scaling in ("block", "tensor")
}
STOCHASTIC = Method(codec("e5m2"), codec("e5m2"), stochastic=True, seed=5)
RINGS = {
    "ring e5m2": Method(codec("e5m2", "none"), codec("e5m2"), ring=True),
    "ring e4m3": Method(codec("e4m3", "none"), codec("e5m2"), ring=True),
    "ring e5m2 unscaled": Method(
        codec("e5m2", "none"), codec("e5m2"), ring=True, ring_scaled=False
    ),
    "ring bf16": Method(codec("bf16"), codec("bf16"), ring=True),
}
METHODS = {**PLAIN, **EIGHT, "stochastic": STOCHASTIC, **RINGS}


def gradient(rank: int, size: int, ranks: int) -> Tensor:
    """What a rank has for the owners: [N · S]."""
    generator = torch.Generator().manual_seed(1000 * rank + size)
    return torch.randn(ranks * size, generator=generator) * 1e-3


def reduced(
    reduction: GradientReduction, x: Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.AVG
) -> Tensor:
    module = reduction.of_module("blocks.0")
    size = len(x) // group.size()
    shard = module.allocate((size,), dtype=torch.float32, device=torch.device("cpu"))
    module(shard, x.clone(), group, op)
    reduction.finish()
    return shard


def reduce_all() -> dict[tuple[str, int, str], tuple[Tensor, int]]:
    """Every method, size and op on this rank: its shard, and the bytes sent for it."""
    results, ranks, world = {}, dist.get_world_size(), dist.group.WORLD
    assert world is not None
    ops = {
        "SUM": dist.ReduceOp.SUM,
        "AVG": dist.ReduceOp.AVG,
        "PREMUL": dist._make_nccl_premul_sum(0.25),
    }
    for name, method in METHODS.items():
        for size in SIZES:
            for op in ops:
                reduction = GradientReduction(method)
                reduction.begin_step(3)
                x = gradient(dist.get_rank(), size, ranks)
                shard = reduced(reduction, x, world, ops[op])
                results[name, size, op] = shard, reduction.take_bytes()
                assert reduction.take_bytes() == 0
    return results


@pytest.fixture(scope="module", params=[2, 3, 8])
def by_rank(request: pytest.FixtureRequest) -> list[Any]:
    return on_ranks(request.param, reduce_all)


def simulate(name: str, size: int, ranks: int, owner: int) -> Tensor:
    """The mean of each rank's share for the owner."""
    method, wire = METHODS[name], METHODS[name].shard
    whole = [gradient(rank, size, ranks).view(ranks, size) for rank in range(ranks)]
    parts = [x[owner] for x in whole]
    if method.ring:
        amax = max(float(x.abs().max()) for x in whole)
        eight = wire.name in ("e5m2", "e4m3") and method.ring_scaled
        scale = common_scale(wire, amax, ranks) if eight else 1 / ranks
        turns = [parts[(owner + 1 + turn) % ranks] for turn in range(ranks)]
        return ring(wire, turns, scale) / ranks
    if not method.stochastic:
        return all_to_all(wire, parts)
    total, key = torch.zeros(size), key_of(5, "gradients", "blocks.0", "shard")
    for rank, x in enumerate(whole):
        messages = wire.encode(x, Draw(key, 3 << 32 | 1, row_offset=rank * ranks))
        wire.add(total, messages[owner : owner + 1])
    return total / ranks


@pytest.mark.parametrize("name", METHODS)
def test_bit_equal_to_the_simulation(by_rank: list[Any], name: str) -> None:
    ranks = len(by_rank)
    for rank, results in enumerate(by_rank):
        for size in SIZES:
            mean = simulate(name, size, ranks, rank)
            assert torch.equal(results[name, size, "AVG"][0], mean), size
            total = results[name, size, "SUM"][0]
            torch.testing.assert_close(total, mean * ranks, rtol=3e-7, atol=0)
            assert torch.equal(results[name, size, "PREMUL"][0], total / 4)


def test_bytes_on_the_wire(by_rank: list[Any]) -> None:
    others = len(by_rank) - 1
    widths = {"fp32": 4000, "bf16": 2000, "e5m2 block": 1008, "e5m2 tensor": 1001}
    rings = {"ring bf16": 2000, "ring e5m2 unscaled": 1000, "ring e5m2": 1000}
    for results in by_rank:
        for name, width in (widths | rings).items():
            assert results[name, 1000, "AVG"][1] == others * width


def test_ones() -> None:
    """A ring of ones stalls at 8; the sum in FP32 does not."""
    ones = [torch.ones(4)] * 32
    assert ring(codec("e5m2", "none"), ones, 1.0).tolist() == [8.0] * 4
    assert all_to_all(codec("e5m2"), ones).tolist() == [1.0] * 4


# --- replicas -----------------------------------------------------------------------------------

REPLICAS = {
    "e5m2": Method(codec("bf16"), codec("e5m2")),
    "e4m3 tensor": Method(codec("fp32"), codec("e4m3", "tensor")),
    "fp32": Method(codec("fp32"), codec("fp32")),
}


def reduce_in_replicas(shards: int) -> dict[tuple[str, int], tuple[Tensor, int]]:
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("replicate", "shard")
    )
    results = {}
    for name, method in REPLICAS.items():
        for size in SIZES:
            reduction = GradientReduction(method, mesh["replicate"].get_group())
            x = gradient(dist.get_rank(), size, shards)
            if shards > 1:
                shard = reduced(reduction, x, mesh["shard"].get_group())
            else:
                shard = x.clone()
                reduction.of_module("").between_replicas(shard)
                reduction.finish()
            results[name, size] = shard, reduction.take_bytes()
    return results


@pytest.mark.parametrize(("replicas", "shards"), [(2, 2), (3, 2), (2, 1), (3, 1), (2, 4)])
def test_replicas_get_one_mean(replicas: int, shards: int) -> None:
    by_rank = on_ranks(replicas * shards, reduce_in_replicas, shards)
    for name, method in REPLICAS.items():
        for size in SIZES:
            for owner in range(shards):
                means = []
                for replica in range(replicas):
                    ranks = range(replica * shards, (replica + 1) * shards)
                    whole = [gradient(r, size, shards).view(shards, size)[owner] for r in ranks]
                    means.append(all_to_all(method.shard, whole) if shards > 1 else whole[0])
                part = -(-size // replicas)
                padded = [nn.functional.pad(m, (0, part * replicas - size)) for m in means]
                expected = torch.cat(
                    [
                        there_and_back(
                            method.replicate, [p.view(replicas, part)[i] for p in padded]
                        )
                        for i in range(replicas)
                    ]
                )[:size]
                for replica in range(replicas):
                    shard, sent = by_rank[replica * shards + owner][name, size]
                    assert torch.equal(shard, expected), (name, size)
                    inside = (shards - 1) * method.shard.width(size)
                    assert sent == inside + 2 * (replicas - 1) * method.replicate.width(part)


def share_one_gradient() -> Tensor:
    """The mean of the same gradient in two replicas, less the gradient, rounded stochastically."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fp32 = codec("fp32")
    one, two = (Method(STOCHASTIC.shard, fp32, stochastic=True, seed=5), Method(fp32, fp32))
    x = gradient(0, 4096, 2)
    means = [
        reduced(
            GradientReduction(method, mesh["replicate"].get_group()), x, mesh["shard"].get_group()
        )
        for method in (one, two)
    ]
    return means[0] - means[1]


def test_replicas_draw_bits_of_their_own() -> None:
    """The variance of what is drawn goes down with every rank that draws: 4 here, 2 by shards."""
    error = torch.stack(on_ranks(4, share_one_gradient)).square().mean()
    x = gradient(0, 4096, 2).view(2, 4096)
    alone = []
    for key in range(4):
        messages = STOCHASTIC.shard.encode(x, Draw(key_of(key, "alone"), 0))
        arrived = torch.stack([STOCHASTIC.shard.decode(m, 4096) for m in messages])
        alone.append((arrived - x).square().mean())
    assert error / torch.stack(alone).mean() == pytest.approx(1 / 4, rel=0.1)


def there_and_back(wire: Codec, parts: list[Tensor]) -> Tensor:
    mean = all_to_all(wire, parts)
    return wire.decode(wire.encode(mean[None])[0], len(mean))


# --- what is not finite, deferred, or kept ------------------------------------------------------


def reduce_with(bad: float, name: str) -> Tensor:
    world = dist.group.WORLD
    assert world is not None
    x = gradient(dist.get_rank(), 300, 3)
    if dist.get_rank() == 1:
        x[450] = bad  # rank 1's share for itself
    return reduced(GradientReduction(METHODS[name]), x, world)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_arrives(bad: float) -> None:
    for name in ("e5m2 block", "e4m3 tensor", "stochastic", "ring e5m2", "ring e5m2 unscaled"):
        shards = on_ranks(3, reduce_with, bad, name)
        assert not shards[1][150].isfinite(), name
        if name in ("e5m2 block", "stochastic"):
            assert shards[0].isfinite().all() and shards[1][128:256].isnan().all()
            assert shards[1][:128].isfinite().all() and shards[1][256:].isfinite().all()


def refused_op() -> str:
    world = dist.group.WORLD
    assert world is not None
    with pytest.raises(ValueError, match="only SUM, AVG and PREMUL_SUM") as error:
        reduced(GradientReduction(PLAIN["fp32"]), torch.ones(4), world, dist.ReduceOp.MAX)
    return str(error.value)


def test_other_ops_are_refused() -> None:
    assert "MAX" in on_ranks(2, refused_op)[0]


@dataclass
class Trained:
    """Gradients of an FSDP model's parameters, by name."""

    gradients: dict[str, Tensor]
    in_flight: int


class Noted(GradientReduction):
    """Counts reductions that were under way when another one was launched."""

    most = 0

    def launch(self, steps: Any) -> None:
        self.most = max(self.most, len(self._pending))
        super().launch(steps)


def train_with_fsdp(method: Method, deferred: bool) -> Trained:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(24, 24, bias=number % 2 == 0) for number in range(6)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    reduction = Noted(method, deferred=deferred)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for name, module in [*model.named_children(), ("", model)]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
        module.set_custom_reduce_scatter(reduction.of_module(name))
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, upstream = torch.randn(2, 5, 24, generator=generator)
    model(x).backward(upstream)
    reduction.finish()
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return Trained(gradients, reduction.most)


@pytest.mark.parametrize("name", ["fp32", "e5m2 block", "ring e5m2"])
def test_what_is_put_off_is_the_same(name: str) -> None:
    """The next module does not wait for the bytes of the last one, and no bit depends on it."""
    later, now = (on_ranks(3, train_with_fsdp, METHODS[name], deferred) for deferred in (1, 0))
    # A ring is over when it is launched.
    assert [trained.in_flight for trained in later] == [0 if name == "ring e5m2" else 2] * 3
    assert [trained.in_flight for trained in now] == [0] * 3
    for one, other in zip(later, now, strict=True):
        assert len(one.gradients) == 9
        for key, value in one.gradients.items():
            assert torch.equal(value, other.gradients[key]) and value.norm() > 0


def feed_back(residual: torch.dtype, skip: int, replicate: bool) -> dict[str, Any]:
    """Reduce one gradient ten times, one of the steps skipped; all that arrived, and the rest."""
    world = dist.group.WORLD
    assert world is not None
    wire = codec("e5m2")
    method = Method(codec("fp32") if replicate else wire, wire, residual=residual)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    group = mesh["shard"].get_group() if replicate else world
    reduction = GradientReduction(method, mesh["replicate"].get_group() if replicate else None)
    module = reduction.of_module("a")
    x, arrived = gradient(dist.get_rank(), 1000, group.size()), torch.zeros(1000)
    for step in range(10):
        reduction.begin_step(step)
        shard = torch.empty(1000)
        module(shard, x.clone() + (math.inf if step == skip else 0), group, dist.ReduceOp.AVG)
        reduction.finish()
        reduction.end_step(skipped=step == skip)
        arrived += 0 if step == skip else shard
    return {"x": x, "arrived": arrived, "kept": reduction.residuals()}


@pytest.mark.parametrize("residual", [torch.float32, torch.bfloat16])
def test_error_feedback_loses_nothing(residual: torch.dtype) -> None:
    by_rank = on_ranks(4, feed_back, residual, 4, False)
    x = torch.stack([result["x"] for result in by_rank]).double().view(4, 4, 1000)
    for rank, result in enumerate(by_rank):
        kept = torch.stack([other["kept"]["a:shard"][rank].double() for other in by_rank]).mean(0)
        expected = 9 * x[:, rank].mean(0)
        bound = 1e-6 if residual == torch.float32 else 1e-4
        error = (result["arrived"] + kept - expected).norm() / expected.norm()
        assert error < bound
        assert (result["arrived"] - expected).norm() / expected.norm() > 3 * bound
        assert result["kept"]["a:shard"].dtype == residual


def test_error_feedback_between_replicas() -> None:
    for rank, result in enumerate(by_rank := on_ranks(4, feed_back, torch.float32, 4, True)):
        owner = rank % 2
        x = torch.stack([r["x"] for r in by_rank]).double().view(4, 2, 1000)[:, owner].mean(0)
        kept = torch.zeros(1000, dtype=torch.float64)
        for replica in (0, 1):
            residuals = by_rank[2 * replica + owner]["kept"]
            kept += residuals["a:replicate"].double().view(-1) / 2
            kept.view(2, 500)[replica] += residuals["a:mean"][0].double()
        assert (result["arrived"] + kept - 9 * x).norm() / (9 * x).norm() < 1e-6
        assert (result["arrived"] - 9 * x).norm() / (9 * x).norm() > 1e-3


def audit_one(name: str, replicas: bool) -> dict[str, float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    method = (REPLICAS if replicas else METHODS)[name]
    reduction = GradientReduction(method, mesh["replicate"].get_group() if replicas else None)
    audit = Audit(torch.device("cpu"))
    reduction.begin_step(0, audit)
    reduced(reduction, gradient(dist.get_rank(), 4000, 2), mesh["shard"].get_group())
    return audit.report()


@pytest.mark.parametrize(
    ("name", "replicas", "error"),
    [
        ("fp32", False, 0),
        ("e5m2 block", False, 0.053),
        ("e4m3 block", False, 0.026),
        ("e5m2", True, 0.079),
    ],
)
def test_the_audit_knows_the_error(name: str, replicas: bool, error: float) -> None:
    reports = on_ranks(4, audit_one, name, replicas)
    assert all(report == reports[0] for report in reports)
    found = reports[0]
    assert found["relative_error"] == pytest.approx(error, rel=0.1, abs=1e-7)
    assert found["cosine"] == pytest.approx(1 - error**2 / 2, abs=1e-3)
    if name == "fp32":
        assert found.keys() == {"relative_error", "cosine"}
    else:
        assert found["saturated"] == 0 and found["flushed"] == 0
