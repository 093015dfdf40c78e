"""How far each layout's losses are from one process's, under each recipe.

    python scripts/layout_table.py [--json FILE] [--recipes NAME ...] [--layouts NAME ...]

A small Llama is trained from one seed on one data order by every layout, in real processes over
gloo. A figure is the largest relative difference of a step's loss to the single process's.

The row `noise` says what to hold it against: single processes whose attention and MLP outputs, and
the gradients there, are off by up to one ulp of the compute type, as sums over ranks are that
travel in it. It is the largest difference over three such runs. A layout that trains the same model
stays within four times that; the exit code is 1 if one does not. A layout that a recipe refuses
has a dash.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from fp8train.cli import leave
from fp8train.config import RECIPES, Config, ConfigError, ModelConfig, PrecisionConfig
from fp8train.data.dataset import PreparedData, prepare
from fp8train.environment import write_record
from fp8train.parallel import runtime
from fp8train.parallel.parallelize import compute_dtype, parallelize
from fp8train.rules import check
from fp8train.training.checkpoint.manifest import Progress
from fp8train.training.learner import Learner

CPU = torch.device("cpu")
ALLOWED = 4.0  # times the noise
NOISE_RUNS = 3
ZERO_BUBBLE = {"pipeline": 2, "pipeline_schedule": "zero_bubble"}
INTERLEAVED = {"pipeline": 2, "pipeline_schedule": "interleaved", "virtual_stages": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "DP2": (2, {}),
    "HSDP 2×2": (4, {"replicate": 2, "shard": 2}),
    "TP2": (2, {"tensor": 2}),
    "TP2, no sequence parallelism": (2, {"tensor": 2, "sequence": False}),
    "CP2": (2, {"context": 2}),
    "PP2": (2, {"pipeline": 2}),
    "PP2 interleaved": (2, INTERLEAVED),
    "PP2 zero bubble": (2, ZERO_BUBBLE),
    "TP2 × CP2": (4, {"tensor": 2, "context": 2}),
    "TP2 × PP2": (4, {"tensor": 2, "pipeline": 2}),
    "TP2 × PP2 × DP2": (8, {"tensor": 2, "pipeline": 2}),
}
Losses = list[float]


def configuration(recipe: str, steps: int, layout: dict[str, Any]) -> Config:
    """The run; its sizes are what blocks of 128 need on two tensor and two context ranks."""
    config = Config()
    config.model = ModelConfig(
        name="layouts",
        vocab_size=257,
        hidden_size=256,
        intermediate_size=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=4,
    )
    config.precision = PrecisionConfig(recipe=recipe)
    config.precision.telemetry.every = 0
    config.gradients.reduce = "fp32"  # what travels between data ranks is another matter
    trainer = config.trainer
    trainer.steps, trainer.sequence_length = steps, 512
    trainer.global_batch_size, trainer.micro_batch_size = 4, 1
    config.schedule.warmup_steps, config.optimizer.lr = 1, 1e-3
    for key, value in layout.items():
        setattr(config.parallel, key, value)
    return config


class Blur(torch.autograd.Function):
    """x · (1 + ε·u) in forward and for the gradient, u uniform in [−1, 1]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, epsilon: float, generator: torch.Generator) -> Tensor:
        ctx.noise = epsilon, generator
        return Blur.blurred(x, epsilon, generator)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return Blur.blurred(grad, *ctx.noise), None, None

    @staticmethod
    def blurred(x: Tensor, epsilon: float, generator: torch.Generator) -> Tensor:
        u = 2 * torch.rand(x.shape, generator=generator) - 1
        return (x.float() * (1 + epsilon * u)).to(x.dtype)


def add_noise(model: nn.Module, dtype: torch.dtype, seed: int) -> None:
    """Blur what leaves attention and MLP, and the gradient that comes back there."""
    epsilon, generator = torch.finfo(dtype).eps, torch.Generator().manual_seed(seed)

    def blur_output(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        blurred: Tensor = Blur.apply(output, epsilon, generator)
        return blurred

    for name, module in model.named_modules():
        if name.endswith(("self_attn", "mlp")):
            module.register_forward_hook(blur_output)


def train(config: Config, data: PreparedData, noise: int | None = None) -> Losses:
    """Each step's loss, on every rank."""
    parallel = parallelize(config, CPU)
    if noise is not None:
        add_noise(parallel.model, compute_dtype(config), noise)
    learner = Learner(config, CPU, data, Progress(), parallel)
    return [learner.step().loss for _ in range(config.trainer.steps)]


def work(rank: int, world_size: int, folder: Path, steps: int, jobs: list[tuple[str, str]]) -> None:
    """One process: all layouts of this many ranks, one after the other."""
    store = torch.distributed.FileStore(str(folder / f"store{world_size}"), world_size)
    torch.set_num_threads(max(1, 2 // world_size))
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    first = configuration("bf16", steps, {})
    data, results = prepare(first.data, first.trainer.sequence_length), {}
    for name, recipe in jobs:
        layout = {} if world_size == 1 else LAYOUTS[name][1]
        noise = int(name) if world_size == 1 and name else None
        results[name, recipe] = train(configuration(recipe, steps, layout), data, noise)
        if rank == 0:
            print(f"{name or 'one process'} {recipe}", file=sys.stderr, flush=True)
    if rank == 0:
        torch.save(results, folder / f"results{world_size}")
    torch.distributed.barrier()
    runtime.stop()
    leave(0)


def difference(found: Losses, expected: Losses) -> float:
    """Largest relative difference of a step's loss."""
    return max(
        abs(ours - theirs) / abs(theirs) for ours, theirs in zip(found, expected, strict=True)
    )


def refused(name: str, recipe: str, steps: int) -> bool:
    ranks, layout = LAYOUTS[name]
    try:
        check(configuration(recipe, steps, layout), ranks)
    except ConfigError:
        return True
    return False


def measure(recipes: Sequence[str], layouts: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """The table's rows: a layout, or the noise, and a figure for each recipe."""
    config = configuration("bf16", steps, {})
    prepare(config.data, config.trainer.sequence_length)  # once, before processes ask for it
    jobs: dict[int, list[tuple[str, str]]] = {
        1: [(name, recipe) for recipe in recipes for name in ("", *map(str, range(NOISE_RUNS)))]
    }
    for name in layouts:
        for recipe in recipes:
            if not refused(name, recipe, steps):
                jobs.setdefault(LAYOUTS[name][0], []).append((name, recipe))
    found: dict[tuple[str, str], Losses] = {}
    with tempfile.TemporaryDirectory() as folder:
        for world_size, some in sorted(jobs.items()):
            arguments = (world_size, Path(folder), steps, some)
            mp.spawn(work, arguments, nprocs=world_size)
            found |= torch.load(Path(folder) / f"results{world_size}", weights_only=True)
    alone = {recipe: found["", recipe] for recipe in recipes}
    noise = {
        recipe: max(difference(found[str(run), recipe], alone[recipe]) for run in range(NOISE_RUNS))
        for recipe in recipes
    }
    rows: list[dict[str, Any]] = [{"layout": "noise", "differences": noise}]
    for name in layouts:
        row = {
            recipe: difference(found[name, recipe], alone[recipe])
            if (name, recipe) in found
            else None
            for recipe in recipes
        }
        rows.append({"layout": name, "differences": row})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    recipes = ("fp32", "bf16", *RECIPES)
    parser.add_argument("--json", type=Path, help="also write the rows, with hardware and versions")
    parser.add_argument("--recipes", nargs="+", choices=recipes, default=recipes, metavar="NAME")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=tuple(LAYOUTS))
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    rows = measure(arguments.recipes, arguments.layouts, arguments.steps)
    table = Table("layout", *arguments.recipes)
    for row in rows:
        figures = ["—" if x is None else f"{x:.1e}" for x in row["differences"].values()]
        table.add_row(row["layout"], *figures)
    Console(width=160).print(table)
    if arguments.json:
        sizes = configuration("bf16", arguments.steps, {})
        config = {"steps": arguments.steps, "model": vars(sizes.model), "allowed": ALLOWED}
        config["model"] = {k: v for k, v in vars(sizes.model).items() if k != "rope_scaling"}
        write_record(arguments.json, "layout_table", config, rows)
    noise = rows[0]["differences"]
    beyond = [
        f"{row['layout']} {recipe}"
        for row in rows[1:]
        for recipe, found in row["differences"].items()
        if found is not None and found > ALLOWED * noise[recipe]
    ]
    if beyond:
        print(f"Beyond {ALLOWED} times the noise: {', '.join(beyond)}", file=sys.stderr)
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
