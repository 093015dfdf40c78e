"""Every layout trains the model that one process trains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fp8train.config import Config, ModelConfig, PrecisionConfig
from fp8train.data.dataset import PreparedData
from fp8train.parallel.parallelize import parallelize
from fp8train.rules import check
from fp8train.training.checkpoint.manifest import Progress
from fp8train.training.learner import Learner
from tests.ranks import on_ranks

CPU = torch.device("cpu")
STEPS = 10


def small(precision: str = "fp32", **overrides: Any) -> Config:
    """A configuration that every layout in this file divides."""
    config = Config()
    config.model = ModelConfig(
        name="small",
        vocab_size=115,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
    )
    config.precision = PrecisionConfig(recipe=precision)
    config.data.tokenizer = "none"
    config.trainer.sequence_length, config.trainer.global_batch_size = 16, 8
    config.trainer.micro_batch_size, config.trainer.validation_samples = 2, 6
    config.trainer.steps = STEPS
    config.schedule.warmup_steps = 2
    config.optimizer.lr = 3e-3
    groups = (config.parallel, config.trainer, config.model, config.data)
    for key, value in overrides.items():
        setattr(next(group for group in groups if hasattr(group, key)), key, value)
    return config


def data_of(config: Config) -> PreparedData:
    """Tokens that can be learned: a walk with short steps."""
    generator = np.random.default_rng(0)
    tokens = np.cumsum(generator.integers(0, 4, 6000)) % config.model.vocab_size
    data = PreparedData.__new__(PreparedData)  # what a learner reads of it
    object.__setattr__(data, "train", tokens.astype(np.uint16))
    object.__setattr__(data, "validation", tokens[:200].astype(np.uint16))
    object.__setattr__(data, "eos_id", 7)
    return data


def losses(config: Config, world_size: int = 1, steps: int = STEPS) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step; the last pair's first is the validation loss."""
    check(config, world_size)
    parallel = parallelize(config, CPU)
    learner = Learner(config, CPU, data_of(config), Progress(), parallel)
    found = []
    for _ in range(steps):
        result = learner.step()
        found.append((result.loss, result.grad_norm))
    return [*found, (learner.validate(), 0.0)]


PIPELINES = {
    "1f1b": {"pipeline": 2},
    "interleaved": {
        "pipeline": 2,
        "num_layers": 4,
        "pipeline_schedule": "interleaved",
        "virtual_stages": 2,
    },
    "zero bubble": {"pipeline": 2, "pipeline_schedule": "zero_bubble"},
    "zero bubble, two stages a rank": {
        "pipeline": 2,
        "num_layers": 4,
        "pipeline_schedule": "zero_bubble",
        "virtual_stages": 2,
    },
}
DEEP = {"pipeline": 4, "num_layers": 4}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "DP2": (2, {}),
    "HSDP 2x2": (4, {"replicate": 2, "shard": 2}),
    "TP2": (2, {"tensor": 2, "micro_batch_size": 4}),
    "TP2 without sequence parallelism": (
        2,
        {"tensor": 2, "sequence": False, "micro_batch_size": 4},
    ),
    "TP4": (4, {"tensor": 4, "micro_batch_size": 4}),
    "CP2": (2, {"context": 2}),
    "CP2 x DP2": (4, {"context": 2}),
    **{f"PP2 {name}": (2, sizes) for name, sizes in PIPELINES.items()},
    "PP4": (4, DEEP),
    "PP4 interleaved": (4, DEEP | PIPELINES["interleaved"] | DEEP | {"num_layers": 8}),
    "PP4 zero bubble": (4, DEEP | {"pipeline_schedule": "zero_bubble"}),
    "uneven PP2": (2, {"pipeline": 2, "num_layers": 3}),
    "TP2 x PP2": (4, {"tensor": 2, "pipeline": 2, "micro_batch_size": 4}),
    "TP2 x CP2": (4, {"tensor": 2, "context": 2, "micro_batch_size": 4}),
    "CP2 x PP2": (4, {"context": 2, "pipeline": 2}),
    "TP2 x PP2 x DP2": (8, {"tensor": 2, "pipeline": 2}),
    "TP2 x CP2 x PP2": (
        8,
        {"tensor": 2, "context": 2, "pipeline": 2, "micro_batch_size": 4},
    ),
    "one micro batch a step": (2, {"tensor": 2, "micro_batch_size": 8}),
    "TP2 tied": (2, {"tensor": 2, "tie_embeddings": True, "micro_batch_size": 4}),
    "PP2 tied": (2, {"pipeline": 2, "tie_embeddings": True}),
    "TP2 x PP2 tied": (
        4,
        {"tensor": 2, "pipeline": 2, "tie_embeddings": True, "micro_batch_size": 4},
    ),
    "documents' first tokens ignored, DP2 x PP2": (4, {"pipeline": 2, "eod_mask_loss": True}),
    "documents' first tokens ignored, CP2": (2, {"context": 2, "eod_mask_loss": True}),
    "checkpointed zero bubble": (
        2,
        {"pipeline": 2, "pipeline_schedule": "zero_bubble", "activation_checkpoint": "full"},
    ),
}
MODEL_KEYS = ("num_layers", "tie_embeddings", "eod_mask_loss")  # another reference


@pytest.fixture(scope="module")
def reference() -> dict[Any, list[tuple[float, float]]]:
    """What one process trains, by the keys that make another model of it."""
    found = {}
    for _, overrides in LAYOUTS.values():
        changed = {key: overrides[key] for key in MODEL_KEYS if key in overrides}
        if (key := str(changed)) not in found:
            found[key] = on_ranks(1, losses, small(micro_batch_size=8, **changed))[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_fp32_agrees_with_one_process(name: str, reference: dict[Any, Any]) -> None:
    """Sums in another order: 1e-5 is a hundred times what is seen."""
    ranks, overrides = LAYOUTS[name]
    expected = reference[str({key: overrides[key] for key in MODEL_KEYS if key in overrides})]
    for found in on_ranks(ranks, losses, small(**overrides), ranks):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def sampled(config: Config) -> list[str]:
    """The layers and roles that telemetry shows of a first step."""
    learner = Learner(config, CPU, data_of(config), Progress(), parallelize(config, CPU))
    return list(learner.step().telemetry or {})


@pytest.mark.slow
@pytest.mark.parametrize("virtual", [1, 2])
def test_telemetry_of_stages_without_quantised_layers(virtual: int) -> None:
    """All ranks take part in a sample, and each sees the layers of all, in the model's order."""
    schedule = "1f1b" if virtual == 1 else "interleaved"
    config = small(
        "fp8_current", pipeline=2, virtual_stages=virtual, pipeline_schedule=schedule, num_layers=4
    )
    config.precision.bf16_first_blocks = 2
    linears = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    linears += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    roles = ("input", "weight", "grad_output")
    names = [f"layers.{n}.{name}.{role}" for n in (2, 3) for name in linears for role in roles]
    assert on_ranks(2, sampled, config) == [names, names]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{}, {"pipeline": 2}, {"replicate": 2}])
def test_delayed_scales_do_not_depend_on_the_number_of_ranks(sizes: dict[str, Any]) -> None:
    """The first output gradients are cast with a scale of 1, where their size decides what is
    flushed: it must be that of a micro batch, whatever happens elsewhere."""
    config = small("fp8_delayed", **sizes)
    config.parallel.shard = 1 if "replicate" in sizes else -1
    config.gradients.reduce = "fp32"
    alone = small("fp8_delayed")
    alone.gradients.reduce = "fp32"
    expected = on_ranks(1, losses, alone, 1, 3)[0]
    for found in on_ranks(2, losses, config, 2, 3):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
