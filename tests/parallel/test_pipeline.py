"""Pipeline schedules change when things are computed, and not one bit of what."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fp8train.config import ROLES, Config
from fp8train.parallel.execution import Pipelined
from fp8train.parallel.parallelize import parallelize
from fp8train.precision.linear import Gemms, QuantizedLinear
from fp8train.precision.quantizers import Operand, Position, Quantizer
from fp8train.rules import check
from fp8train.training.checkpoint import Progress
from fp8train.training.clip import TIED
from fp8train.training.learner import Learner
from tests.parallel.test_layouts import data_of, small
from tests.ranks import on_ranks

CPU = torch.device("cpu")
MICRO_BATCHES = 4


def config_of(precision: str, stochastic: bool = False, **overrides: Any) -> Config:
    config = small(precision, **{"pipeline": 2, "global_batch_size": 8, **overrides})
    config.trainer.clip_grad_norm = 0.0  # gradients as they are
    if stochastic:
        config.precision.stochastic_rounding = [*ROLES]
    return config


def learner_of(config: Config) -> Learner:
    check(config, torch.distributed.get_world_size())
    return Learner(config, CPU, data_of(config), Progress(), parallelize(config, CPU))


# --- zero bubble: which pass does what --------------------------------------------------------


@dataclass
class Log:
    """What ran: (pass, micro batch, what) → how often, and in which pass we are."""

    now: tuple[str, int] = ("", -1)
    counts: Counter[tuple[str, int, str]] = field(default_factory=Counter)

    def note(self, what: str) -> None:
        self.counts[*self.now, what] += 1


@dataclass
class CountedGemms:
    gemms: Gemms
    layer: str
    log: Log

    def gemm(self, kind: str, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        self.log.note(f"{self.layer} {kind}")
        return self.gemms.gemm(kind, a, b, dtype)


@dataclass
class CountedQuantizer:
    quantizer: Quantizer
    name: str
    log: Log

    def __call__(
        self, x: Tensor, *, rowwise: bool, columnwise: bool, training: bool, position: Position
    ) -> tuple[Operand | None, Operand | None]:
        self.log.note(self.name)
        return self.quantizer(
            x, rowwise=rowwise, columnwise=columnwise, training=training, position=position
        )

    def note(self, x: Tensor) -> None:
        self.quantizer.note(x)


PASSES = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}


def passes(config: Config) -> tuple[list[str], Counter[tuple[str, int, str]]]:
    """One step; this rank's linears, and what ran in which pass."""
    learner, log = learner_of(config), Log()
    execution = learner.parallel.execution
    assert isinstance(execution, Pipelined)
    names = []
    for part, stage in zip(learner.parallel.parts, execution.stages, strict=True):
        for method, name in PASSES.items():
            setattr(stage, method, Watched(getattr(stage, method), name, log))
        for layer, module in part.model.named_modules():
            if isinstance(module, QuantizedLinear):
                names.append(layer)
                quantizers = {
                    role: CountedQuantizer(quantizer, f"{layer} {role}", log)
                    for role, quantizer in module.numerics.quantizers.items()
                }
                gemms = CountedGemms(module.numerics.gemms, layer, log)
                module.numerics = replace(module.numerics, quantizers=quantizers, gemms=gemms)
    learner.step()
    return names, log.counts


@dataclass
class Watched:
    """A stage's method, which tells the log its pass and micro batch."""

    method: Any
    name: str
    log: Log

    def __call__(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        before, self.log.now = self.log.now, (self.name, chunk)
        try:
            return self.method(chunk, *args, **kwargs)
        finally:
            self.log.now = before


@pytest.mark.slow
@pytest.mark.parametrize("virtual_stages", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp8_current", "nvfp4"])
def test_zero_bubble_splits_the_backward(precision: str, virtual_stages: int) -> None:
    """dgrad in the B pass, wgrad in the W pass, once a micro batch; the output gradient is
    quantised once for both, where a second time would draw other bits."""
    config = config_of(precision, pipeline_schedule="zero_bubble", virtual_stages=virtual_stages)
    found = set()
    for names, counts in on_ranks(2, passes, config):
        expected = Counter(
            {
                (pass_, micro_batch, f"{name} {what}"): 1
                for name in names
                for micro_batch in range(MICRO_BATCHES)
                for pass_, what in (
                    ("F", "input"),
                    ("F", "weight"),
                    ("F", "fprop"),
                    ("B", "grad_output"),
                    ("B", "dgrad"),
                    ("W", "wgrad"),
                )
            }
        )
        assert counts == expected
        found |= set(names)
    assert len(found) == 4 * 7 + 1  # four blocks' linears and the LM head


# --- the same bits --------------------------------------------------------------------------


@dataclass
class Trained:
    """Of one rank, each step's loss and norm, gradients and parameters at last, by name."""

    steps: list[tuple[float, float]]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    kept: dict[str, Tensor]


def train(config: Config, steps: int = 2) -> Trained:
    learner = learner_of(config)
    done = []
    for _ in range(steps):
        result = learner.step()
        done.append((result.loss, result.grad_norm))
    named = dict(learner.parallel.model.named_parameters())
    return Trained(
        done,
        {name: local(parameter.grad) for name, parameter in named.items()},
        {name: local(parameter) for name, parameter in named.items()},
        {name: value.clone() for name, value in learner.parallel.delayed_state().items()},
    )


def local(tensor: Tensor | None) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach().clone()


def train_all(configs: list[Config]) -> list[Trained]:
    return [train(config) for config in configs]


def same(ours: Trained, theirs: Trained) -> bool:
    assert ours.steps == theirs.steps
    for what in ("gradients", "parameters", "kept"):
        first, second = getattr(ours, what), getattr(theirs, what)
        assert first.keys() == second.keys()
        different = [name for name, x in first.items() if not torch.equal(x, second[name])]
        assert different == []
        assert all(x.isfinite().all() for x in first.values())
    return any(x.any() for x in ours.gradients.values())


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp8_current", "fp8_delayed", "nvfp4"])
def test_zero_bubble_leaves_the_gradients_of_1f1b(precision: str) -> None:
    """Micro batches' gradients are added up in FP32, in their order, in both."""
    schedules = ("1f1b", "zero_bubble")
    configs = [config_of(precision, pipeline_schedule=name) for name in schedules]
    for plain, split in on_ranks(2, train_all, configs):
        assert same(split, plain)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("precision", ["fp8_current", "fp8_delayed"])
def test_recomputation_draws_the_bits_of_its_micro_batch(precision: str, schedule: str) -> None:
    """Another micro batch's forward has come in between."""
    modes = ("none", "full", "selective")
    configs = [
        config_of(precision, True, activation_checkpoint=mode, pipeline_schedule=schedule)
        for mode in modes
    ]
    for plain, *recomputed in on_ranks(2, train_all, configs):
        assert all(same(each, plain) for each in recomputed)


# --- tied embeddings ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}], ids=["PP2", "TP2 x PP2"])
def test_both_copies_of_a_tied_embedding_stay_equal(sizes: dict[str, int]) -> None:
    """And the norm counts them once."""
    config = config_of("fp8_current", tie_embeddings=True, **sizes)
    config.parallel.shard = 1
    tensor = sizes.get("tensor", 1)
    ranks = on_ranks(2 * tensor, train, config)
    first, last = ranks[:tensor], ranks[tensor:]
    for ours, theirs in zip(first, last, strict=True):
        for what in ("gradients", "parameters"):
            (mine,) = (x for name, x in getattr(ours, what).items() if name in TIED)
            (other,) = (x for name, x in getattr(theirs, what).items() if name in TIED)
            assert torch.equal(mine, other)
            assert mine.any()
    counted = [x for rank in first for name, x in rank.gradients.items() if divided(name)]
    counted += [
        x for rank in last for name, x in rank.gradients.items() if divided(name, last=True)
    ]
    # Norms' weights are whole on every tensor rank.
    counted += [
        x for rank in (first[0], last[0]) for name, x in rank.gradients.items() if "norm" in name
    ]
    norm = math.sqrt(sum(float(x.double().square().sum()) for x in counted))
    for rank in ranks:
        assert rank.steps == ranks[0].steps
        assert rank.steps[-1][1] == pytest.approx(norm, rel=1e-5)


def divided(name: str, last: bool = False) -> bool:
    """Whether a gradient is a part, and counts on this stage."""
    return "norm" not in name and not (last and name in TIED)
