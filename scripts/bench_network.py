"""What gradients and weights cost on a slow network, by method: bytes, and seconds on real sockets.

    python scripts/bench_network.py [--json FILE] [--plot FILE] [--nodes 2 4]
                                    [--rates 1gbit 100mbit] [--steps 5]

Nodes are network namespaces of this machine, one process and one thread on each, and a rate limit
by tc on what each of them sends; that takes root and iproute2. All methods train the same FP8 model
in turns, with weights gathered once a step.

- bytes/parameter: that a node sends in a step, counted by its network device, headers included;
  of the FP8 linears alone it is that without what embedding, head and norms send in these formats.
- wire: seconds of a step's collectives, each begun by all nodes together.
- quantise: CPU seconds of casts, scales, sums and, for BF16, conversions.
- step: seconds of a whole step, where bytes travel while backward goes on.

Ratios are to BF16 sent by the same all-to-all and all-gather. "FSDP2" is its own reduce-scatter in
BF16, which gloo sends as an all-reduce, so it is no yardstick.

Exit code: 0, 1 when E5M2 with FP8 weights misses a target (2.1·(N−1)/N bytes a parameter of the FP8
linears; 0.55 of BF16's wire time; at 100 Mbit/s 0.6 of wire and quantise together), 77 when this
machine permits no namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fp8train.cli import leave
from fp8train.config import Config, ModelConfig, PrecisionConfig
from fp8train.data.dataset import prepare
from fp8train.environment import write_record
from fp8train.models.llama import Llama
from fp8train.parallel import parallelize as layouts
from fp8train.parallel import runtime
from fp8train.parallel.mesh import Mesh
from fp8train.parallel.parameter_gather import ParameterGather
from fp8train.parallel.reduction import GradientReduction
from fp8train.precision.wire import EightBit, Plain, codec
from fp8train.rules import check
from fp8train.training.checkpoint import Progress
from fp8train.training.learner import Learner
from scripts.namespaces import INTERFACE, NotPermitted, bytes_sent, limit, nodes

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
MOST_BYTES, MOST_WIRE, MOST_TOTAL = 2.1, 0.55, 0.6  # times (N − 1)/N; of BF16's seconds
SLOW = "100mbit"
SKIPPED = 77


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


def measure(count: int, rates: list[str], steps: int) -> list[dict[str, Any]]:
    """All rows of so many nodes."""
    script = [sys.executable, str(Path(__file__).resolve())]
    with nodes(count) as made, tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "rows.json"
        options = ["--worker", str(result), "--rates", *rates, "--steps", str(steps)]
        meeting = {
            "MASTER_ADDR": made.address(0),
            "MASTER_PORT": "29500",
            "WORLD_SIZE": str(count),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        children = [
            subprocess.Popen(
                made.command(node, *script, *options),
                env=os.environ | meeting | {"RANK": str(node)},
            )
            for node in range(count)
        ]
        codes = [child.wait() for child in children]
        if any(codes):
            raise SystemExit(f"bench_network: nodes ended with exit codes {codes}")
        rows: list[dict[str, Any]] = json.loads(result.read_text())
    add_ratios(rows)
    return rows


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """To BF16 at the same rate."""
    for rate in {row["bandwidth"] for row in rows}:
        some = [row for row in rows if row["bandwidth"] == rate]
        (base,) = [row for row in some if row["method"] == BASELINE]
        whole = base["wire_seconds"] + base["quantise_seconds"]
        for row in some:
            total = row["wire_seconds"] + row["quantise_seconds"]
            row["wire_ratio_to_bf16"] = row["wire_seconds"] / base["wire_seconds"]
            row["total_ratio_to_bf16"] = total / whole


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """The targets that E5M2 with FP8 weights misses."""
    found = []
    for row in rows:
        if row["method"] != OURS:
            continue
        where = f"{row['nodes']} nodes, {row['bandwidth']}"
        most = {
            "bytes_per_linear_parameter": MOST_BYTES * (row["nodes"] - 1) / row["nodes"],
            "wire_ratio_to_bf16": MOST_WIRE,
        }
        if row["bandwidth"] == SLOW:
            most["total_ratio_to_bf16"] = MOST_TOTAL
        for key, limit_ in most.items():
            if row[key] > limit_:
                found.append(f"{where}: {key} {row[key]:.3f}, at most {limit_:.3f}")
    return found


def network(count: int, rate: str) -> str:
    """As people write it: 2 nodes, 1 Gbit/s."""
    for unit, name in (("gbit", "Gbit/s"), ("mbit", "Mbit/s")):
        rate = rate.replace(unit, f" {name}")
    return f"{count} nodes, {rate}"


def show(rows: list[dict[str, Any]]) -> None:
    columns = ("bytes/parameter", "of linears", "wire s", "quantise s", "step s", "wire", "total")
    for count, rate in dict.fromkeys((row["nodes"], row["bandwidth"]) for row in rows):
        table = Table("method", *columns, title=f"{network(count, rate)}; ratios to BF16")
        for row in rows:
            if (row["nodes"], row["bandwidth"]) == (count, rate):
                table.add_row(
                    row["method"],
                    f"{row['bytes_per_parameter']:.2f}",
                    f"{row['bytes_per_linear_parameter']:.2f}",
                    *(f"{row[f'{key}_seconds']:.3f}" for key in ("wire", "quantise", "step")),
                    *(f"{row[f'{key}_ratio_to_bf16']:.2f}" for key in ("wire", "total")),
                )
        Console(width=120).print(table)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Wire and quantisation by method, a panel for each network."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    networks = list(dict.fromkeys((row["nodes"], row["bandwidth"]) for row in rows))
    figure, panels = pyplot.subplots(
        1, len(networks), figsize=(3 * len(networks) + 2, 3.5), layout="constrained", squeeze=False
    )
    for axes, (count, rate) in zip(panels[0], networks, strict=True):
        some = [row for row in rows if (row["nodes"], row["bandwidth"]) == (count, rate)][::-1]
        names = [row["method"] for row in some]
        wire = [row["wire_seconds"] for row in some]
        axes.barh(names, wire, label="wire")
        casts = [row["quantise_seconds"] for row in some]
        axes.barh(names, casts, left=wire, label="quantise")
        most = max(map(sum, zip(wire, casts, strict=True)))
        axes.set(title=network(count, rate), xlabel="seconds a step", xlim=(0, 1.05 * most))
        axes.tick_params("y", labelleft=axes is panels[0][0])
    panels[0][-1].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the rows, with hardware and versions")
    parser.add_argument("--plot", type=Path, help="also draw wire and quantise seconds")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["1gbit", SLOW], help="as tc writes them")
    parser.add_argument("--steps", type=int, default=5, help="of each method and rate")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.rates, arguments.steps, arguments.worker)
    first = configuration(BASELINE, arguments.nodes[0])
    prepare(first.data, first.trainer.sequence_length)  # once, before nodes ask for it
    rows = []
    try:
        for count in arguments.nodes:
            rows += measure(count, arguments.rates, arguments.steps)
    except NotPermitted as reason:
        print(f"bench_network: skipped, network namespaces are not permitted: {reason}")
        return SKIPPED
    show(rows)
    if arguments.plot:
        plot(rows, arguments.plot)
    if arguments.json:
        config = {"steps": arguments.steps, "model": asdict(first.model)}
        write_record(arguments.json, "bench_network", config, rows)
    for target in missed(rows):
        print(f"bench_network: missed: {target}", file=sys.stderr)
    return 1 if missed(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
