"""Time of an emulated linear, forward and backward, over that of a BF16 one, and torchao's over it.

    python scripts/bench_emulation.py [--json FILE] [--pairs 7] [--recipes NAME ...]

Each figure is the median over pairs measured one after the other, weights quantised each time.
The last rows are the quickstart's model on a micro batch of [8, 128] tokens, forward and backward.

The BF16 baseline is the one that training uses here: torch's `nn.Linear` where the CPU has fast
BF16 GEMMs; elsewhere, where torch's takes up to a hundred times as long, ours through FP32 GEMMs.
For the same reason torchao, which computes some GEMMs in the type of its input, gets FP32 there. It
emulates no delayed scaling, no 128×128 blocks and no NVFP4 without a GPU, and no recipe of ours
that quantises weights alone.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
for talks_while_imported in ("torchao", "torch.utils._pytree"):  # of kernels for other machines
    logging.getLogger(talks_while_imported).setLevel(logging.ERROR)

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from torchao.prototype.moe_training.mxfp8_linear import mx_mm
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from fp8train.analysis.report import markdown_table, times
from fp8train.config import RECIPES, Config, ModelConfig, PrecisionConfig
from fp8train.environment import write_record
from fp8train.parallel.parallelize import initialize, precise_model
from fp8train.precision.backends.emulated import has_fast_bf16
from fp8train.precision.convert import convert

SHAPES = ((2048, 1024, 4096), (2048, 4096, 4096))  # rows, in features, out features
MODEL = "llama_tiny"
TOKENS = (8, 128)
TORCHAO_PAIRS = 3  # torchao takes several times as long
CPU = torch.device("cpu")
HEADER = ("recipe", "shape", "ratio to BF16", "least to most", "speed-up over torchao")
PEERS = {  # recipe → torchao's name of it
    "fp8_current": "tensorwise",
    "fp8_rowwise": "rowwise",
    "fp8_rowwise_bf16_wgrad": "rowwise_with_gw_hp",
}

Run = Callable[[], float]  # seconds


class TorchaoMX(nn.Linear):
    """torchao's MXFP8 matmul by its torch kernels; its own layer asks for a GPU's in backward."""

    def forward(self, x: Tensor) -> Tensor:
        """[M, K] → [M, N]."""
        y: Tensor = mx_mm.apply(
            x,
            self.weight,
            *[torch.float8_e4m3fn] * 3,
            32,
            KernelPreference.EMULATED,
            MXFP8Dim0CastKernelChoice.TORCH,
            MXFP8Dim1CastKernelChoice.TORCH,
            ScaleCalculationMode.RCEIL,
            False,
        )
        return y


def ours(recipe: str, k: int, n: int) -> nn.Module:
    """A linear K → N under a recipe, in training mode."""
    model = nn.Sequential(nn.Linear(k, n, bias=False).bfloat16())
    convert(model, PrecisionConfig(recipe=recipe, include=["*"]), CPU)
    return model


def torchaos(recipe: str, k: int, n: int) -> nn.Module | None:
    """The same by torchao; None where it has none."""
    if recipe == "mxfp8":
        return TorchaoMX(k, n, bias=False)
    if recipe not in PEERS:
        return None
    config = replace(Float8LinearConfig.from_recipe_name(PEERS[recipe]), emulate=True)
    layer: nn.Module = Float8Linear.from_float(nn.Linear(k, n, bias=False), config)
    return layer


def run_linear(layer: nn.Module, shape: tuple[int, int, int], dtype: torch.dtype) -> Run:
    """One forward and backward, input and weight gradients included."""
    rows, k, n = shape
    x, grad = torch.randn(rows, k, dtype=dtype), torch.randn(rows, n, dtype=dtype)
    layer.to(dtype)

    def run() -> float:
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        began = time.perf_counter()
        layer(leaf).backward(grad)
        return time.perf_counter() - began

    return run


def run_model(recipe: str) -> Run:
    """One forward and backward of the quickstart's model."""
    sizes = OmegaConf.load(ROOT / "configs" / "model" / f"{MODEL}.yaml")
    model_config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), sizes))
    assert isinstance(model_config, ModelConfig)
    config = Config(model=model_config, precision=PrecisionConfig(recipe=recipe))
    model, _ = precise_model(config, CPU)
    model.to_empty(device=CPU)
    initialize(model, model_config, seed=0)
    model.bfloat16()  # as FSDP2 gathers the weights
    tokens = torch.randint(model_config.vocab_size, (TOKENS[0], TOKENS[1] + 1))

    def run() -> float:
        model.zero_grad()
        began = time.perf_counter()
        logits = model(tokens[:, :-1]).float()
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        return time.perf_counter() - began

    return run


def pairs_of(first: Run, second: Run, pairs: int) -> list[tuple[float, float]]:
    """Seconds of alternating runs, after one of each that doesn't count."""
    first(), second()
    return [(first(), second()) for _ in range(pairs)]


def compare(
    recipe: str, shape: str, candidate: Run, baseline: Run, peer: Run | None, pairs: int
) -> dict[str, Any]:
    """A row of the table."""
    found = pairs_of(candidate, baseline, pairs)
    ratios = [mine / bf16 for mine, bf16 in found]
    speedup = None
    if peer is not None:
        beside = pairs_of(peer, candidate, min(pairs, TORCHAO_PAIRS))
        speedup = statistics.median(other / mine for other, mine in beside)
    row = {
        "recipe": recipe,
        "shape": shape,
        "ratio_to_bf16": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "speedup_over_torchao": speedup,
        "bf16_seconds": statistics.median(bf16 for _, bf16 in found),
    }
    print(*text(row), file=sys.stderr, flush=True)  # the whole takes a quarter of an hour
    return row


def measure_linear(
    shape: tuple[int, int, int], recipes: list[str], pairs: int
) -> list[dict[str, Any]]:
    rows, k, n = shape
    peer_dtype = torch.bfloat16 if has_fast_bf16(CPU) else torch.float32
    baseline = run_linear(ours("bf16", k, n), shape, torch.bfloat16)
    measured = []
    for recipe in recipes:
        candidate = run_linear(ours(recipe, k, n), shape, torch.bfloat16)
        layer = torchaos(recipe, k, n)
        peer = None if layer is None else run_linear(layer, shape, peer_dtype)
        name = f"{rows}x{k}->{n}"
        measured.append(compare(recipe, name, candidate, baseline, peer, pairs))
    return measured


def measure_model(recipes: list[str], pairs: int) -> list[dict[str, Any]]:
    baseline, name = run_model("bf16"), f"{MODEL} {list(TOKENS)}"
    return [compare(recipe, name, run_model(recipe), baseline, None, pairs) for recipe in recipes]


def text(row: dict[str, Any]) -> tuple[str, ...]:
    """The row as it is printed."""
    return (
        row["recipe"],
        row["shape"],
        times(row["ratio_to_bf16"]),
        f"{row['least']:.2f} to {row['most']:.2f}",
        "—" if row["speedup_over_torchao"] is None else times(row["speedup_over_torchao"]),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the rows, with hardware and versions")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=RECIPES, metavar="NAME")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    recipes, pairs = list(arguments.recipes), arguments.pairs
    rows = [row for shape in SHAPES for row in measure_linear(shape, recipes, pairs)]
    rows += measure_model(recipes, pairs)
    print(markdown_table(HEADER, [text(row) for row in rows]))
    if not has_fast_bf16(CPU):
        print(
            "\nNo fast BF16 GEMMs here: BF16 and ours go through FP32 ones; torchao is given FP32."
        )
    if arguments.json:
        config = {
            "pairs": pairs,
            "torchao_pairs": min(pairs, TORCHAO_PAIRS),
            "threads": torch.get_num_threads(),
            "fast_bf16": has_fast_bf16(CPU),
        }
        versions = {"torchao": version("torchao")}
        write_record(arguments.json, "bench_emulation", config, rows, versions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
