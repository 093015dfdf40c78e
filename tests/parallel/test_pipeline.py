"""Pipeline schedules change when things are computed, and not one bit of what."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
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
from fp8train.training.checkpoint.manifest import Progress
from fp8train.training.clip import TIED
from fp8train.training.learner import Learner
from tests.parallel.test_layouts import data_of, small
from tests.ranks import on_ranks

CPU = torch.device("cpu")
MICRO_BATCHES = 3  # more than ranks: the order is not that of the first few alone


def config_of(precision: str, stochastic: list[str] | None = None, **overrides: Any) -> Config:
    """One sample a micro batch, one block a stage."""
    blocks = 2 * overrides.get("virtual_stages", 1)
    sizes = {"pipeline": 2, "shard": 1, "num_layers": blocks, "sequence_length": 8}
    sizes |= {"micro_batch_size": 1, "global_batch_size": MICRO_BATCHES}
    config = small(precision, **(sizes | overrides))
    config.trainer.clip_grad_norm = 0.0  # gradients as they are
    config.precision.stochastic_rounding = stochastic
    return config


def everywhere(function: Callable[[Any], Any], what: Config | list[Config]) -> list[Any]:
    """What every rank of a layout returns."""
    parallel = (what[0] if isinstance(what, list) else what).parallel
    return on_ranks(parallel.pipeline * parallel.tensor * parallel.context, function, what)


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
                quantizers: dict[str, Quantizer] = {
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
    for names, counts in everywhere(passes, config):
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
    assert len(found) == 2 * virtual_stages * 7 + 1  # the blocks' linears and the LM head


# --- the same bits --------------------------------------------------------------------------


@dataclass
class Trained:
    """Of one rank, each step's loss and norm, gradients and parameters at last, by name."""

    steps: list[tuple[float, float]]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    kept: dict[str, Tensor]


def train(config: Config) -> Trained:
    learner = learner_of(config)
    done = []
    # Delayed scaling's first scales are 1.
    for _ in range(2 if config.precision.recipe == "fp8_delayed" else 1):
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
@pytest.mark.parametrize(
    ("precision", "sizes"),
    [
        ("bf16", {}),
        ("fp8_current", {}),
        ("fp8_delayed", {}),
        ("nvfp4", {}),
        ("fp8_current", {"tie_embeddings": True}),
        ("fp8_current", {"tensor": 2}),  # column-wise copies are gathered in the W pass
    ],
)
def test_zero_bubble_leaves_the_gradients_of_1f1b(precision: str, sizes: dict[str, Any]) -> None:
    """Micro batches' gradients are added up in FP32, in their order, in both."""
    schedules = ("1f1b", "zero_bubble")
    configs = [config_of(precision, pipeline_schedule=name, **sizes) for name in schedules]
    for plain, split in everywhere(train_all, configs):
        assert same(split, plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "roles", "sizes"),
    [
        ("fp8_current", [*ROLES], {}),
        ("fp8_delayed", [*ROLES], {}),
        ("fp8_current", [*ROLES], {"pipeline_schedule": "zero_bubble"}),
        # Inputs that are gathered in bytes.
        ("fp8_rowwise", ["weight", "grad_output"], {"tensor": 2}),
        ("fp8_current", ["grad_output"], {"tensor": 2, "pipeline_schedule": "zero_bubble"}),
    ],
)
def test_recomputation_draws_the_bits_of_its_micro_batch(
    precision: str, roles: list[str], sizes: dict[str, Any]
) -> None:
    """On the first stage another micro batch's forward has come in between."""
    configs = [
        config_of(precision, roles, activation_checkpoint=mode, **sizes)
        for mode in ("none", "full", "selective")
    ]
    for plain, *recomputed in everywhere(train_all, configs):
        assert all(same(each, plain) for each in recomputed)


# --- tied embeddings ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"tensor": 2}], ids=["PP2", "TP2 x PP2"])
def test_both_copies_of_a_tied_embedding_stay_equal(sizes: dict[str, Any]) -> None:
    """And the norm counts them once."""
    config = config_of("fp8_current", tie_embeddings=True, **sizes)
    ranks = everywhere(train, config)
    first, last = ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :]
    for ours, theirs in zip(first, last, strict=True):
        for what in ("gradients", "parameters"):
            (mine,) = (x for name, x in getattr(ours, what).items() if name in TIED)
            (other,) = (x for name, x in getattr(theirs, what).items() if name in TIED)
            assert torch.equal(mine, other)
            assert mine.any()
    square = 0.0
    for stage in (first, last):
        for index, rank in enumerate(stage):
            for name, gradient in rank.gradients.items():
                copied = name in TIED and stage is last
                whole = "norm" in name and index > 0  # every tensor rank has norms' weights
                if not copied and not whole:
                    square += float(gradient.double().square().sum())
    for rank in ranks:
        assert rank.steps == ranks[0].steps
        assert rank.steps[-1][1] == pytest.approx(math.sqrt(square), rel=1e-5)
