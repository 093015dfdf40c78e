"""Sample order is a pure function of the seed and the samples consumed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8train.config import TrainerConfig
from fp8train.data.dataset import PreparedData
from fp8train.data.order import TrainSamples, fingerprint, permutation, validation_samples

TOKENS = np.arange(1000, dtype=np.uint16)
T = 16


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**63),
    start=st.integers(0, 300),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=8),
)
def test_any_cut_into_batches_gives_the_same_samples(
    seed: int, start: int, cuts: list[int]
) -> None:
    whole = TrainSamples(TOKENS, T, seed).batch(start, sum(cuts))
    samples, parts, consumed = TrainSamples(TOKENS, T, seed), [], start
    for count in cuts:
        parts.append(samples.batch(consumed, count))
        consumed += count
    assert torch.equal(torch.cat(parts), whole)


@settings(deadline=None)
@given(
    ranks=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]),
    step=st.integers(0, 20),
    micro=st.sampled_from([1, 2, 3]),
)
def test_any_number_of_ranks_sees_the_same_step(ranks: int, step: int, micro: int) -> None:
    size = 24
    whole = TrainSamples(TOKENS, T, 7).batch(step * size, size)
    share = size // ranks
    parts = []
    for rank in range(ranks):
        samples = TrainSamples(TOKENS, T, 7)  # each rank has its own, without the others' history
        first, last = step * size + rank * share, step * size + (rank + 1) * share
        parts += [samples.batch(at, min(micro, last - at)) for at in range(first, last, micro)]
    assert torch.equal(torch.cat(parts), whole)


@settings(deadline=None)
@given(seed=st.integers(0, 2**63), epoch=st.integers(0, 5))
def test_each_epoch_is_a_permutation(seed: int, epoch: int) -> None:
    samples = TrainSamples(TOKENS, T, seed)
    n = len(samples)
    assert n == 62  # (1000 - 1) // 16
    batch = samples.batch(epoch * n, n)
    assert sorted(batch[:, 0].tolist()) == list(range(0, n * T, T))
    assert torch.equal(batch, batch[:, :1] + torch.arange(T + 1))


def test_a_sample_has_its_targets_and_the_right_type() -> None:
    batch = TrainSamples(TOKENS, T, 0).batch(0, 3)
    assert batch.shape == (3, T + 1)
    assert batch.dtype == torch.int64
    assert torch.equal(batch[:, 1:], batch[:, :-1] + 1)
    assert TrainSamples(TOKENS, T, 0).batch(5, 0).shape == (0, T + 1)


def test_seeds_and_epochs_differ() -> None:
    orders = [permutation(seed, epoch, 100).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert list(range(100)) not in orders


def test_the_order_stays_what_it_was() -> None:
    """A run that goes on after an upgrade must find its samples where it left them."""
    assert permutation(1234, 0, 8).tolist() == [7, 3, 0, 1, 4, 2, 5, 6]
    assert permutation(1234, 1, 8).tolist() == [0, 5, 6, 4, 2, 1, 7, 3]


def test_validation_samples_come_in_order() -> None:
    batch = validation_samples(TOKENS, T, 4)
    assert batch.dtype == torch.int64
    assert torch.equal(batch, torch.arange(4)[:, None] * T + torch.arange(T + 1))
    assert len(validation_samples(TOKENS, T, 1000)) == 62
    assert len(validation_samples(TOKENS[: T + 1], T, 64)) == 1


def test_less_than_one_sample_is_refused() -> None:
    with pytest.raises(ValueError, match="16 tokens"):
        TrainSamples(TOKENS[:T], T, 0)
    with pytest.raises(ValueError, match="0 tokens"):
        validation_samples(TOKENS[:0], T, 1)


def _prepared(content_hash: str, tokenizer: str = "bytes", folder: str = "a") -> PreparedData:
    return PreparedData(
        TOKENS, TOKENS, tokenizer, 257, 256, content_hash, 1, 1, folder=Path(folder)
    )


def test_fingerprint_changes_when_the_tokens_of_a_step_do_and_only_then() -> None:
    trainer = TrainerConfig()
    base = fingerprint(_prepared("abc"), trainer)
    assert len(base) == 12
    assert int(base, 16) >= 0
    same = [
        fingerprint(_prepared("abc", folder="b", tokenizer="tokenizer.json"), trainer),
        fingerprint(_prepared("abc"), TrainerConfig(steps=7, micro_batch_size=1, device="cpu")),
    ]
    assert set(same) == {base}
    other = [
        fingerprint(_prepared("abd"), trainer),
        fingerprint(_prepared("abc"), TrainerConfig(seed=1)),
        fingerprint(_prepared("abc"), TrainerConfig(sequence_length=64)),
        fingerprint(_prepared("abc"), TrainerConfig(global_batch_size=32)),
    ]
    assert len({base, *other}) == 5
