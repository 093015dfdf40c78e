"""Embedding and loss of a divided vocabulary against torch's own in FP64 and the single process."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor.debug import CommDebugMode

from fp8train.parallel.vocabulary import IGNORE, cross_entropy, embed_part
from tests.ranks import on_ranks

SHAPE = (3, 5)
VOCABULARIES = (  # without padding and with
    (32, 32),
    (37, 40),  # the last rank has a little of it
    (7, 16),  # of 2 ranks one, of 4 ranks two have nothing else
)
FACTORS = (1.0, 1e4)  # standard deviation of the logits
DTYPES = (torch.float32, torch.bfloat16)
CASES = list(product(DTYPES, VOCABULARIES, FACTORS))

# In FP32, x − max is off by 2^-24 of itself, so that exp(x − max) is off by x·exp(x)·2^-24 at most.
LOSS = {"rtol": 1e-6, "atol": 1e-6}
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1.01 * 2.0**-8}  # relative, of a gradient


def inputs(
    dtype: torch.dtype, vocabulary: tuple[int, int], factor: float, shape: tuple[int, ...] = SHAPE
) -> tuple[Tensor, Tensor, Tensor]:
    """Whole logits, with a trap in the padding; targets, some ignored; gradient of the losses."""
    size, padded = vocabulary
    generator = torch.Generator().manual_seed(size)
    logits = factor * torch.randn(*shape, padded, generator=generator)
    logits[..., size:] = 1e30
    targets = torch.randint(size, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < 0.3] = IGNORE
    return logits.to(dtype), targets, torch.randn(shape, generator=generator)


def run(logits: Tensor, targets: Tensor, upstream: Tensor, *where: Any) -> tuple[Tensor, Tensor]:
    """Losses and the gradient of the logits."""
    leaf = logits.detach().requires_grad_()
    losses = cross_entropy(leaf, targets, *where)
    return losses.detach(), *torch.autograd.grad(losses, leaf, upstream)


def exact(logits: Tensor, targets: Tensor, upstream: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """In FP64 by torch."""
    leaf = logits.double().requires_grad_()
    losses = F.cross_entropy(leaf[..., :size].flatten(0, -2), targets.flatten(), reduction="none")
    losses = losses.view(targets.shape)
    return losses.detach(), *torch.autograd.grad(losses, leaf, upstream.double())


def check(
    got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], dtype: torch.dtype, size: int
) -> None:
    losses, grad = got
    assert losses.dtype == torch.float32 and grad.dtype == dtype
    torch.testing.assert_close(losses.double(), wanted[0].double(), **LOSS)
    rtol = ROUNDING[dtype] * (2 if wanted[1].dtype == dtype else 1)  # wanted may be rounded too
    torch.testing.assert_close(grad.double(), wanted[1].double(), rtol=rtol, atol=1e-6)
    assert not grad[..., size:].any()


def broken(name: str) -> Tensor:
    """Logits [2, 4, 40] of which token (1, 2) has something that is not finite."""
    logits = inputs(torch.float32, (37, 40), 1.0, (2, 4))[0]
    if name == "all -inf":
        logits[1, 2] = -torch.inf
    else:
        logits[1, 2, 5] = float(name)
    return logits


BROKEN = ("nan", "inf", "all -inf")
TARGETS = torch.arange(8).view(2, 4)  # that of (1, 2) is 6


def divided_vocabulary() -> dict[Any, Any]:
    """Everything that is tested on ranks, from one start of them."""
    group = dist.group.WORLD
    assert group is not None
    rank, size = group.rank(), group.size()

    def part(logits: Tensor) -> tuple[Tensor, int]:
        width = logits.shape[-1] // size
        return logits[..., rank * width : (rank + 1) * width], rank * width

    results: dict[Any, Any] = {}
    for case in CASES:
        logits, targets, upstream = inputs(*case)
        own, first = part(logits)
        with CommDebugMode() as traffic:
            leaf = own.detach().requires_grad_()
            losses = cross_entropy(leaf, targets, case[1][0], group, first)
        results["forward traffic"] = {str(op): n for op, n in traffic.get_comm_counts().items()}
        with CommDebugMode() as traffic:
            (grad,) = torch.autograd.grad(losses, leaf, upstream)
        results["backward traffic"] = traffic.get_total_counts()
        results[case] = losses.detach(), grad
    for name in BROKEN:
        own, first = part(broken(name))
        results[name] = run(own, TARGETS, torch.ones(2, 4), 37, group, first)
    logits, targets, upstream = inputs(torch.float32, (37, 40), 1.0)
    own, first = part(logits)
    results["ignored"] = run(own, torch.full_like(targets, IGNORE), upstream, 37, group, first)
    results["empty"] = run(own[:0], targets[:0], upstream[:0], 37, group, first)
    outside = targets.clone()
    outside[0, 0], outside[1, 1], outside[2, 2] = 37, -1, 40
    results["outside"] = run(own, outside, upstream, 37, group, first)
    alone = [dist.new_group([other]) for other in range(size)][rank]
    results["alone"] = run(logits, targets, upstream, 37, alone)
    return results


@pytest.fixture(scope="module", params=[2, 4])
def by_rank(request: pytest.FixtureRequest) -> list[dict[Any, Any]]:
    return on_ranks(request.param, divided_vocabulary)


def whole(by_rank: list[dict[Any, Any]], key: Any) -> tuple[Tensor, Tensor]:
    """The losses, which must be the same on all ranks, and the gradient of all columns."""
    losses = by_rank[0][key][0]
    for results in by_rank:
        torch.testing.assert_close(results[key][0], losses, rtol=0, atol=0, equal_nan=True)
    return losses, torch.cat([results[key][1] for results in by_rank], -1)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_agree_with_fp64_and_one_process(by_rank: list[dict[Any, Any]], case: Any) -> None:
    dtype, (size, _), _ = case
    got = whole(by_rank, case)
    check(got, exact(*inputs(*case), size), dtype, size)
    check(got, run(*inputs(*case), size), dtype, size)


@pytest.mark.slow
def test_two_all_reduces_forward_and_nothing_backward(by_rank: list[dict[Any, Any]]) -> None:
    for results in by_rank:
        assert results["forward traffic"] == {"c10d.allreduce_": 2}
        assert results["backward traffic"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_ranks_do_not_hide_a_broken_logit(by_rank: list[dict[Any, Any]], name: str) -> None:
    for losses, grad in (whole(by_rank, name), run(broken(name), TARGETS, torch.ones(2, 4), 37)):
        bad = torch.zeros(2, 4, dtype=torch.bool)
        bad[1, 2] = True
        assert torch.equal(losses.isnan(), bad)
        assert torch.equal(grad.isnan().any(-1), bad)
        assert not grad[..., 37:].any()


@pytest.mark.slow
def test_ranks_with_nothing_to_predict(by_rank: list[dict[Any, Any]]) -> None:
    losses, grad = whole(by_rank, "ignored")
    assert losses.shape == SHAPE and not losses.any()
    assert grad.shape == (*SHAPE, 40) and not grad.any()
    losses, grad = whole(by_rank, "empty")
    assert losses.shape == (0, 5) and grad.shape == (0, 5, 40)


@pytest.mark.slow
def test_ranks_make_a_target_outside_nan(by_rank: list[dict[Any, Any]]) -> None:
    losses, _ = whole(by_rank, "outside")
    assert losses.isnan().nonzero().tolist() == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.slow
def test_a_group_of_one_is_the_single_process(by_rank: list[dict[Any, Any]]) -> None:
    single = run(*inputs(torch.float32, (37, 40), 1.0), 37)
    for results in by_rank:
        assert all(map(torch.equal, results["alone"], single))


@settings(deadline=None, max_examples=50)
@given(
    shape=st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple),
    size=st.integers(1, 40),
    padding=st.integers(0, 9),
    factor=st.sampled_from(FACTORS),
    dtype=st.sampled_from(DTYPES),
)
def test_one_process_agrees_with_fp64(
    shape: tuple[int, ...], size: int, padding: int, factor: float, dtype: torch.dtype
) -> None:
    given_ = inputs(dtype, (size, size + padding), factor, shape)
    before = given_[0].clone()
    got = run(*given_, size)
    assert torch.equal(given_[0], before)
    check(got, exact(*given_, size), dtype, size)
    ignored = given_[1] == IGNORE
    assert not got[0][ignored].any() and not got[1][ignored].any()


def test_a_target_that_cannot_be_has_an_infinite_loss() -> None:
    logits = torch.zeros(2, 8)
    logits[0, 3] = -torch.inf
    losses, grad = run(logits, torch.tensor([3, 3]), torch.ones(2), 8)
    assert losses[0] == torch.inf and losses[1].isfinite() and grad.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_large_tensor_is_kept_and_backward_can_run_twice(dtype: torch.dtype) -> None:
    logits, targets, upstream = inputs(dtype, (1000, 1024), 1.0)
    leaf = logits.requires_grad_()
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        losses = cross_entropy(leaf, targets, 1000)
    large = [x for x in kept if x.numel() >= logits.numel()]
    assert [(x.dtype, x.shape) for x in large] == [(torch.float32, logits.shape)]
    assert sum(x.nbytes for x in kept) < 1.01 * large[0].nbytes
    first, second = (
        torch.autograd.grad(losses, leaf, upstream, retain_graph=True)[0] for _ in "12"
    )
    assert torch.equal(first, second)


@settings(deadline=None, max_examples=50)
@given(
    shape=st.tuples(st.integers(0, 3), st.integers(1, 9)),
    rows=st.integers(1, 7),
    ranks=st.sampled_from((1, 2, 4)),
    dtype=st.sampled_from(DTYPES),
)
def test_parts_of_the_embedding_add_up_to_it(
    shape: tuple[int, int], rows: int, ranks: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows)
    embedding = nn.Embedding(rows * ranks, 6, dtype=dtype)
    tokens = torch.randint(rows * ranks, shape, generator=generator)
    upstream = torch.randn(*shape, 6, generator=generator).to(dtype)
    wanted = embedding(tokens)
    (gradient,) = torch.autograd.grad(wanted, embedding.weight, upstream)
    parts = []
    for rank, weight in enumerate(embedding.weight.detach().chunk(ranks)):
        weight.requires_grad_()
        part = embed_part(tokens, weight, rank * rows)
        parts.append(part.detach())
        (own,) = torch.autograd.grad(part, weight, upstream)
        assert part.dtype == dtype
        assert torch.equal(own, gradient[rank * rows : (rank + 1) * rows])
    assert torch.equal(sum(parts), wanted)
    # A token has its row on one rank, and exact zeros come from the others.
    assert torch.equal(sum((part != 0).int() for part in parts), (wanted != 0).int())


def test_other_ranks_tokens_bring_nothing_even_if_it_is_nan() -> None:
    weight = torch.full((2, 3), torch.nan)
    weight[1] = 1.0
    weight.requires_grad_()
    part = embed_part(torch.tensor([[7, 5]]), weight, 4)
    upstream = torch.tensor([torch.nan, 2.0])[None, :, None].expand(1, 2, 3)
    (grad,) = torch.autograd.grad(part, weight, upstream)
    assert part.tolist() == [[[0.0] * 3, [1.0] * 3]]
    assert grad.tolist() == [[0.0] * 3, [2.0] * 3]
