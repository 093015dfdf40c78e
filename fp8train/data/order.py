"""Which tokens come in which step: a pure function of the seed and the samples consumed.

A sample is T + 1 consecutive tokens, inputs `[:-1]` and targets `[1:]`; samples start at the
multiples of T, so every token but the first is a target once an epoch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fp8train.config import TrainerConfig
from fp8train.data.dataset import PreparedData

ORDER = 1  # raise it when the same seed would give another order


def fingerprint(prepared: PreparedData, trainer: TrainerConfig) -> str:
    """12 hexadecimal digits; equal ones mean the same tokens in the same step."""
    decides = [
        ORDER,
        prepared.content_hash,
        trainer.sequence_length,
        trainer.seed,
        trainer.global_batch_size,
    ]
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:12]


def permutation(seed: int, epoch: int, size: int) -> npt.NDArray[np.int64]:
    """The order of the samples 0 … size - 1 in an epoch, [size] int64."""
    # numpy promises the raw stream of a bit generator for ever, but not what `permutation` makes
    # of it, and an upgrade in the middle of a run must not change the order.
    generator = np.random.Philox(key=np.array([seed, epoch], np.uint64))
    return np.argsort(generator.random_raw(size), kind="stable")


class TrainSamples:
    """The endless stream of training samples.

    Sample k is `permutation(seed, k // n)[k % n]` with n samples an epoch. It does not depend on
    how the stream is cut into batches or dealt to ranks, so a resume needs one integer.
    """

    def __init__(self, tokens: npt.NDArray[Any], sequence_length: int, seed: int) -> None:
        self._tokens = tokens
        self._sequence_length = sequence_length
        self._seed = seed
        self._size = sample_count(tokens, sequence_length)
        self._epoch = 0
        self._order = permutation(seed, 0, self._size)

    def __len__(self) -> int:
        """Samples an epoch."""
        return self._size

    def batch(self, consumed: int, count: int) -> torch.Tensor:
        """Samples consumed … consumed + count - 1 of the stream, [count, T + 1] int64."""
        positions = [self._position(index) for index in range(consumed, consumed + count)]
        return _gather(self._tokens, positions, self._sequence_length)

    def _position(self, index: int) -> int:
        epoch, within = divmod(index, self._size)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, permutation(self._seed, epoch, self._size)
        return int(self._order[within])


def validation_samples(tokens: npt.NDArray[Any], sequence_length: int, count: int) -> torch.Tensor:
    """The first `count` samples in order, or all where there are fewer, [N, T + 1] int64."""
    available = sample_count(tokens, sequence_length)
    return _gather(tokens, range(min(count, available)), sequence_length)


def sample_count(tokens: npt.NDArray[Any], sequence_length: int) -> int:
    """Samples of T + 1 tokens in an array [tokens].

    Raises:
        ValueError: there isn't one.
    """
    size = (len(tokens) - 1) // sequence_length
    if size < 1:
        raise ValueError(f"{len(tokens)} tokens hold no sample of {sequence_length} + 1")
    return size


def _gather(
    tokens: npt.NDArray[Any], positions: Iterable[int], sequence_length: int
) -> torch.Tensor:
    starts = [position * sequence_length for position in positions]
    samples = torch.empty(len(starts), sequence_length + 1, dtype=torch.int64)
    for row, start in zip(samples.numpy(), starts, strict=True):
        row[:] = tokens[start : start + sequence_length + 1]
    return samples
