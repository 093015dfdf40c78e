"""Every layout trains the model that one process trains."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fp8train.config import Config, ModelConfig, PrecisionConfig
from fp8train.data.dataset import PreparedData
from fp8train.parallel.parallelize import parallelize
from fp8train.rules import check
from fp8train.training.checkpoint import Progress
from fp8train.training.learner import Learner

CPU = torch.device("cpu")
STEPS = 10


def small(precision: str = "fp32", **parallel: Any) -> Config:
    """A configuration that every layout in this file divides."""
    config = Config()
    config.model = ModelConfig(
        name="small",
        vocab_size=115,
        hidden_size=32,
        intermediate_size=64,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
    )
    config.precision = PrecisionConfig(recipe=precision)
    config.data.tokenizer = "none"
    config.trainer.sequence_length, config.trainer.global_batch_size = 16, 16
    config.trainer.micro_batch_size, config.trainer.validation_samples = 2, 6
    config.trainer.steps = STEPS
    config.schedule.warmup_steps = 2
    config.optimizer.lr = 3e-3
    for key, value in parallel.items():
        group = config.trainer if hasattr(config.trainer, key) else config.model
        setattr(config.parallel if hasattr(config.parallel, key) else group, key, value)
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
