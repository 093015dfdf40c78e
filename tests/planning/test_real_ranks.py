"""Real processes train a step: their parameters and what they send are what was planned."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp8train.config import Config
from fp8train.layout import micro_batches
from fp8train.parallel.execution import MicroBatch
from fp8train.parallel.parallelize import parallelize
from fp8train.planning.communication import communication
from fp8train.planning.memory import memory
from tests.planning.conftest import compose
from tests.ranks import on_ranks

# Operator → what the plan calls it. On a CPU a reduce-scatter goes as an all-to-all.
OPERATORS = {
    "_allgather_base_": "all-gather",
    "alltoall_base_": "all-to-all",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "send": "send",
}
GRADIENTS = {"gradients", "mean gradients"}
PAIRS = {
    "tensor, sequence": ("parallel.tensor=2", "precision=fp8_current"),
    "blocks": ("parallel.tensor=2", "precision=fp8_block", "trainer.sequence_length=256"),
    "plain, recomputed": (
        *("parallel.tensor=2", "precision=bf16", "parallel.activation_checkpoint=full"),
        "parallel.sequence=false",
    ),
    "context": ("parallel.context=2", "precision=fp8_current"),
    "shard": ("parallel.shard=2", "precision=fp8_current"),
    "ring": ("parallel.shard=2", "gradients.algorithm=ring"),
    "sharded sums": ("parallel.shard=2", "gradients.accumulate=sharded"),
    "weights as bytes": ("parallel.shard=2", "precision=fp8_block", "parameters.gather=fp8"),
    "kept for a step": ("parallel.shard=2", "parameters.reshard_after_forward=false"),
    "replicate": ("parallel.replicate=2", "precision=bf16"),
    "1f1b, tied": ("parallel.pipeline=2", "precision=bf16", "model.tie_embeddings=true"),
    "zero bubble": (
        *("parallel.pipeline=2", "parallel.pipeline_schedule=zero_bubble"),
        "precision=fp8_block",
    ),
}
FOURS = {
    "tensor, weights as bytes": (
        *("parallel.tensor=2", "parallel.shard=2", "precision=fp8_current"),
        "parameters.gather=fp8",
    ),
    "replicas of shards": (
        *("parallel.replicate=2", "parallel.shard=2", "precision=fp8_current"),
        "trainer.global_batch_size=4",
    ),
    "tensor, context": (
        *("parallel.tensor=2", "parallel.context=2", "precision=fp8_rowwise"),
        *("parallel.activation_checkpoint=selective", "precision.smooth_swiglu=true"),
    ),
    "tensor, interleaved": (
        *("parallel.tensor=2", "parallel.pipeline=2", "parallel.virtual_stages=2"),
        *("parallel.pipeline_schedule=interleaved", "precision=fp8_current", "model.num_layers=4"),
    ),
}


class Sent(TorchDispatchMode):
    """Collectives that ran, and the bytes of what each moved, by the plan's names."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.size: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.__name__.partition(".")[0]
        if "c10d" in op.namespace and name in OPERATORS:
            moved = args[0] if isinstance(args[0], Tensor) else args[0][0]
            self.count[OPERATORS[name]] += 1
            self.size[OPERATORS[name]] += moved.numel() * moved.element_size()
        return op(*args, **(kwargs or {}))


def measure(configs: dict[str, Config]) -> dict[str, tuple[Any, ...]]:
    """Of each configuration: pipeline coordinate, elements of parameters, and what a step sent."""
    results = {}
    for name, config in configs.items():
        parallel = parallelize(config, torch.device("cpu"))
        layout, trainer = parallel.mesh.layout, config.trainer
        shape = trainer.micro_batch_size, trainer.sequence_length // layout.context
        batches = [
            MicroBatch(torch.randint(320, shape), torch.randint(320, shape), number)
            for number in range(micro_batches(config, layout))
        ]
        for _ in range(2):  # in the first one a pipeline's stages make acquaintance
            with Sent() as sent:
                parallel.train(batches, 1.0, lambda batch: None)
        elements = 0
        for parameter in parallel.model.parameters():
            assert isinstance(parameter, DTensor)
            elements += parameter.to_local().numel()
        place = parallel.mesh.place.pipeline
        reduced = parallel.reduction.take_bytes() // 2
        results[name] = layout, place, elements, reduced, dict(sent.count), dict(sent.size)
    return results


def check(world_size: int, cases: dict[str, tuple[str, ...]]) -> None:
    small = ("model.num_layers=2", "trainer.micro_batch_size=1", "trainer.global_batch_size=2")
    configs = {name: compose(*small, *given) for name, given in cases.items()}
    for results in on_ranks(world_size, measure, configs):
        for name, (layout, place, elements, reduced, count, size) in results.items():
            config = configs[name]
            assert elements == memory(config, layout, place).sharded_parameters, name
            rows = communication(config, layout, place)
            rows = [row for row in rows if "tied" not in row.what]  # comes after the last backward
            planned: Counter[str] = Counter()
            for row in rows:
                planned[row.collective.replace("reduce-scatter", "all-to-all")] += row.count
            assert planned == count, name
            gradients = [row for row in rows if row.what in GRADIENTS]
            assert sum(row.bytes for row in gradients) == reduced, name
            if world_size == 2:  # where all groups are pairs, half of what is gathered is sent
                sent = (
                    sum(size.values()) - (size.get("all-gather", 0) + size.get("all-to-all", 0)) / 2
                )
                assert sum(row.bytes for row in rows) == sent, name


@pytest.mark.slow
def test_pairs_send_what_is_planned() -> None:
    check(2, PAIRS)


@pytest.mark.slow
def test_fours_send_what_is_planned() -> None:
    check(4, FOURS)
