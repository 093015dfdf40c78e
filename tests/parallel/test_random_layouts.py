"""Layouts drawn at random: each is refused before processes meet, or trains the same model."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from fp8train.config import Config, ConfigError
from fp8train.layout import SIZES
from fp8train.rules import check
from tests.parallel.test_layouts import losses, small
from tests.ranks import on_ranks

STEPS = 2


@dataclass(frozen=True)
class Draw:
    """Processes and configuration, wrong ones among them."""

    ranks: int
    precision: str
    overrides: tuple[tuple[str, Any], ...]

    def config(self, **others: Any) -> Config:
        return small(self.precision, **dict(self.overrides), **others)


def parallel_sizes(ranks: int) -> st.SearchStrategy[dict[str, int]]:
    """Sizes that multiply to the number of ranks; sometimes one is changed, or is the rest."""

    @st.composite
    def drawn(draw: st.DrawFn) -> dict[str, int]:
        sizes, left = dict.fromkeys(SIZES, 1), ranks
        for prime in (2, 2, 2, 3, 5, 7):
            if left % prime == 0:
                sizes[draw(st.sampled_from(SIZES))] *= prime
                left //= prime
        change = draw(st.sampled_from(["none", "none", "none", "free", "wrong"]))
        if change == "free":
            sizes[draw(st.sampled_from(["replicate", "shard"]))] = -1
        elif change == "wrong":
            sizes[draw(st.sampled_from(SIZES))] = draw(st.integers(1, 5))
        return sizes

    return drawn()


@st.composite
def draws(draw: st.DrawFn) -> Draw:
    ranks = draw(st.sampled_from([8, 4, 2, 6, 3, 1, 5, 7]))
    schedules = {"1f1b": [1, 1, 2], "interleaved": [2, 2, 1], "zero_bubble": [1, 2]}
    schedule = draw(st.sampled_from(list(schedules)))
    overrides: dict[str, Any] = {
        **draw(parallel_sizes(ranks)),
        "sequence": draw(st.booleans()),
        "pipeline_schedule": schedule,
        "virtual_stages": draw(st.sampled_from(schedules[schedule])),
        "activation_checkpoint": draw(st.sampled_from(["none", "none", "selective", "full"])),
        "micro_batch_size": draw(st.sampled_from([2, 1, 4])),
        "global_batch_size": draw(st.sampled_from([8, 12, 6])),
        "sequence_length": draw(st.sampled_from([16, 24, 20])),
        "num_layers": draw(st.sampled_from([2, 4, 3])),
        "num_kv_heads": draw(st.sampled_from([4, 2])),
        "tie_embeddings": draw(st.booleans()),
    }
    if overrides["pipeline"] == 1:
        overrides["virtual_stages"] = draw(st.sampled_from([1, 1, 1, 2]))
    precision = draw(st.sampled_from(["fp32", "fp32", "bf16", "fp8_current"]))
    return Draw(ranks, precision, tuple(overrides.items()))


def refused(drawn: Draw) -> bool:
    """Whether `check` refuses, which starts no process; its line must be one."""
    try:
        check(drawn.config(), drawn.ranks)
    except ConfigError as error:
        assert "\n" not in str(error)
        return True
    return False


@functools.cache
def alone(drawn: Draw) -> list[tuple[float, float]]:
    """What one process trains."""
    sizes = dict.fromkeys(SIZES, 1)
    plain = {"pipeline_schedule": "1f1b", "virtual_stages": 1, "activation_checkpoint": "none"}
    overrides = tuple((dict(drawn.overrides) | sizes | plain).items())
    found = on_ranks(1, losses, Draw(1, drawn.precision, overrides).config(), 1, STEPS)
    result: list[tuple[float, float]] = found[0]
    return result


@settings(max_examples=100, derandomize=True, deadline=None)
@given(draws())
def test_the_draws_are_a_mix(drawn: Draw) -> None:
    """Each is taken or refused in one line. A layout is never taken whose sizes don't multiply."""
    sizes = [dict(drawn.overrides)[name] for name in SIZES]
    known = math.prod(size for size in sizes if size != -1)
    possible = drawn.ranks % known == 0 if -1 in sizes else drawn.ranks == known
    assert possible or refused(drawn)


@pytest.mark.slow
@settings(
    max_examples=12,
    derandomize=True,  # the same layouts in every run of CI
    deadline=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(draws())
def test_what_is_taken_trains(drawn: Draw) -> None:
    """Two steps on real ranks, with one loss on all of them, which is the single process's."""
    if refused(drawn) or drawn.ranks == 1:
        reject()
    ranks = on_ranks(drawn.ranks, losses, drawn.config(), drawn.ranks, STEPS)
    assert np.isfinite(ranks).all()
    assert all(rank == ranks[0] for rank in ranks)
    if drawn.precision == "fp32":
        np.testing.assert_allclose(ranks[0], alone(drawn), rtol=1e-5)
