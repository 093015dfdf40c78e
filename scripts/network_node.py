"""What runs on a node of bench_network.py: it trains by every method in turns and times itself.

network_node.py RESULT RATE... STEPS        under RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fp8train.cli import leave
from fp8train.config import Config, ModelConfig, PrecisionConfig
from fp8train.data.dataset import prepare
from fp8train.models.llama import Llama
from fp8train.parallel import parallelize as layouts
from fp8train.parallel import runtime
from fp8train.parallel.mesh import Mesh
from fp8train.parallel.parameter_gather import ParameterGather
from fp8train.parallel.reduction import GradientReduction
from fp8train.precision.wire import EightBit, Plain, codec
from fp8train.rules import check
from fp8train.training.checkpoint.manifest import Progress
from fp8train.training.learner import Learner
from scripts.namespaces import bytes_sent, limit

CPU = torch.device("cpu")
FSDP2, BASELINE, OURS = "FSDP2", "BF16", "E5M2, FP8 weights"
METHODS: dict[str, dict[str, Any]] = {  # keys of gradients.*, and parameters.gather
    FSDP2: {"reduce": "bf16"},
    "FP32": {"reduce": "fp32"},
    BASELINE: {"reduce": "bf16"},
    "E5M2 ring": {"reduce": "e5m2", "algorithm": "ring"},
    "E5M2": {"reduce": "e5m2"},
    OURS: {"reduce": "e5m2", "gather": "fp8"},
    "E5M2, FP8 weights, error feedback": {
        "reduce": "e5m2",
        "gather": "fp8",
        "error_feedback": True,
    },
}
COLLECTIVES = (  # that FSDP2 and we call
    "all_to_all_single",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "reduce_scatter_single",
    "batch_isend_irecv",
)
CASTS = [
    *((kind, name) for kind in (EightBit, Plain) for name in ("encode", "decode", "add")),
    (ParameterGather, "prepare"),
]


def configuration(method: str, ranks: int) -> Config:
    """The run of a method; its model is mostly FP8 linears, as a large one is."""
    config = Config()
    config.model = ModelConfig(
        name="network",
        vocab_size=257,
        hidden_size=512,
        intermediate_size=1536,
        num_layers=4,
        num_heads=8,
        num_kv_heads=8,
    )
    config.precision = PrecisionConfig(recipe="fp8_current")
    config.precision.telemetry.every = 0
    config.parameters.reshard_after_forward = False
    trainer = config.trainer
    trainer.steps, trainer.sequence_length = 1000, 64
    trainer.global_batch_size, trainer.micro_batch_size = ranks, 1
    for key, value in METHODS[method].items():
        setattr(config.parameters if key == "gather" else config.gradients, key, value)
    check(config, ranks)
    return config


def plain_fsdp2(
    model: Llama, config: Config, mesh: Mesh, reduction: GradientReduction, stage: int
) -> None:
    """In the place of `parallelize.shard`: FSDP2 as it comes, gradients in BF16."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, cast_forward_inputs=False)
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=False)


def make_learner(method: str, ranks: int) -> Learner:
    config = configuration(method, ranks)
    data = prepare(config.data, config.trainer.sequence_length)
    with patch.object(layouts, "shard", plain_fsdp2 if method == FSDP2 else layouts.shard):
        parallel = layouts.parallelize(config, CPU)
    return Learner(config, CPU, data, Progress(), parallel)


class Clock:
    """Seconds of collectives, and CPU seconds of casts without the collectives among them."""

    def __init__(self) -> None:
        self.wire = self.casts = 0.0
        self.depth, self.on_wire = 0, False

    def collective(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same, complete when it returns, and begun by all ranks together."""

        def timed(*arguments: Any, **options: Any) -> Any:
            if self.on_wire:  # one of torch's collectives calls another one
                return function(*arguments, **options)
            before, self.on_wire = time.thread_time(), True
            dist.barrier()
            began = time.perf_counter()
            result = function(*arguments, **options)
            several = isinstance(result, list)
            for work in result if several else [result]:
                if work is not None:
                    work.wait()
            self.wire += time.perf_counter() - began
            self.on_wire = False
            if self.depth:
                self.casts -= time.thread_time() - before
            return [] if several else result  # a send must not be waited for again: gloo hangs

        return timed

    def cast(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same, its outermost call counted."""

        def timed(*arguments: Any, **options: Any) -> Any:
            self.depth += 1
            began = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                self.depth -= 1
                if not self.depth:
                    self.casts += time.thread_time() - began

        return timed

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what happens inside."""
        with ExitStack() as stack:
            for name in COLLECTIVES:
                stack.enter_context(patch.object(dist, name, self.collective(getattr(dist, name))))
            for kind, name in CASTS:
                stack.enter_context(patch.object(kind, name, self.cast(getattr(kind, name))))
            yield


def apart(learner: Learner) -> tuple[float, float]:
    """Seconds of a step's collectives and of its casts, nothing at the same time."""
    clock, reduction = Clock(), learner.parallel.reduction
    reduction.deferred = False
    train = learner.parallel.train

    def counted(*arguments: Any, **options: Any) -> Any:
        with clock.running():
            return train(*arguments, **options)

    with patch.object(learner.parallel, "train", counted):
        learner.step()
    reduction.deferred = True
    return clock.wire, clock.casts


def together(learner: Learner) -> tuple[float, int]:
    """Seconds of a step as a run has it, and the bytes that this node sent."""
    dist.barrier()
    sent, began = bytes_sent(), time.perf_counter()
    learner.step()
    seconds = time.perf_counter() - began
    return seconds, bytes_sent() - sent


def sizes(learner: Learner) -> tuple[int, int]:
    """Parameters of the model, and those of its FP8 linears."""
    found = {
        name.removesuffix(".weight"): parameter.numel()
        for name, parameter in learner.parallel.model.named_parameters()
    }
    linears = sum(found[name] for name in learner.parallel.numerics())
    return sum(found.values()), linears


def others_bytes(learner: Learner) -> float:
    """What a node sends for the parameters that are in no FP8 linear, in this method's formats."""
    gradients, ranks = learner.config.gradients, dist.get_world_size()
    total, linears = sizes(learner)
    wire = codec(gradients.reduce, "none" if gradients.algorithm == "ring" else gradients.scaling)
    width = wire.width(total - linears) + 2 * (total - linears)  # weights are gathered in BF16
    return width * (ranks - 1) / ranks


def work(rates: list[str], steps: int, result: Path) -> None:
    """One node: every rate, and every method in turns; node 0 writes the rows."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    learners = {method: make_learner(method, ranks) for method in METHODS}
    for learner in learners.values():
        learner.step()  # buffers and kernels are there after it
    rows = []
    for rate in rates:
        limit(rate)
        seen: dict[str, list[tuple[float, float, float, int]]] = {name: [] for name in METHODS}
        for _ in range(steps):
            for method, learner in learners.items():
                seen[method].append((*apart(learner), *together(learner)))
        for method, found in seen.items():
            mine = [statistics.median(column) for column in zip(*found, strict=True)]
            all_ranks: list[list[float]] = [[] for _ in range(ranks)]
            dist.all_gather_object(all_ranks, mine)
            mean = [statistics.mean(column) for column in zip(*all_ranks, strict=True)]
            rows.append(row(method, ranks, rate, learners[method], mean))
        if rank == 0:
            print(f"{ranks} nodes, {rate}", file=sys.stderr, flush=True)
    if rank == 0:
        result.write_text(json.dumps(rows))
    dist.barrier()
    del learners, learner
    runtime.stop()
    leave(0)


def row(method: str, ranks: int, rate: str, learner: Learner, mean: list[float]) -> dict[str, Any]:
    """Of one method at one rate; the ratios come later."""
    wire, casts, step, sent = mean
    total, linears = sizes(learner)
    return {
        "method": method,
        "nodes": ranks,
        "bandwidth": rate,
        "bytes_per_parameter": sent / total,
        "bytes_per_linear_parameter": (sent - others_bytes(learner)) / linears,
        "wire_seconds": wire,
        "quantise_seconds": casts,
        "step_seconds": step,
    }


if __name__ == "__main__":
    result, *rates, steps = sys.argv[1:]
    work(rates, int(steps), Path(result))
