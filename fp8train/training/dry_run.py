"""Lay a run out at any size on one process, and say what it takes.

The model is built as a run builds it, on the meta device under PyTorch's fake process group, for
one rank of each kind; what the formulas say of its parameters is held against that.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fp8train.config import Config
from fp8train.layout import Layout
from fp8train.layout_rules import warnings
from fp8train.parallel import runtime
from fp8train.parallel.mesh import Mesh
from fp8train.parallel.parallelize import gradient_reduction, sharded_parts
from fp8train.planning.memory import memory
from fp8train.planning.report import merged, report

CPU = torch.device("cpu")
WIDTH = 200  # columns of a file or pipe: room for all tables


def dry_run(config: Config, world_size: int) -> int:
    """Print memory, communication and bubble of a configuration that the rules have accepted.

    Returns:
        the exit code: 1 if what was built is not what the formulas say.
    """
    layout, began = Layout.of(config.parallel, world_size), time.monotonic()
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(width=WIDTH, highlight=False)
    ranks = f"{world_size:,} rank{'s' if world_size > 1 else ''}"
    shape = layout.described(config.parallel.pipeline_schedule)
    shape = f" ({shape})" if world_size > 1 else ""
    console.print(f"{config.model.name} in {config.precision.recipe} on {ranks}{shape}")
    for line in warnings(config, layout, local_world_size=None):
        console.print(line)
    report(config, layout, console)
    memories = [memory(config, layout, place) for place in range(layout.pipeline)]
    differ = []
    for planned, places in merged(memories):
        built = build(config, layout, places[0])
        if built != planned.sharded_parameters:
            differ.append(f"{built:,} on rank {places[0]}, {planned.sharded_parameters:,} computed")
    if differ:
        console.print(f"built on the meta device: {'; '.join(differ)} parameters")
        return 1
    seconds = time.monotonic() - began
    console.print(f"built on the meta device: a rank of each kind, as above ({seconds:.0f} s)")
    return 0


def build(config: Config, layout: Layout, pipeline: int) -> int:
    """Parameters on a rank of a pipeline coordinate, after building its part on the meta device."""
    rank = pipeline * layout.ranks_a_stage
    dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    try:
        mesh = Mesh.of(layout, CPU)
        reduction = gradient_reduction(config, mesh)
        parts = sharded_parts(config, mesh, CPU, "emulated", reduction)
        parameters = [p for part in parts for p in part.model.parameters()]
        return sum(p.to_local().numel() for p in parameters if isinstance(p, DTensor))
    finally:
        runtime.stop()
