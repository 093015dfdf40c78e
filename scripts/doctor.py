"""What this machine has, and which recipe runs on which backend here.

    python scripts/doctor.py [--capability 9.0] [--json FILE]

The table is the one that a run's refusals come from. For GPUs it is what the sources of torch and
Transformer Engine say: none has run it yet.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch
from rich.console import Console
from rich.table import Table

from fp8train.config import RECIPES
from fp8train.environment import environment, write_record
from fp8train.precision.backends.nvidia import fused_rms_norm
from fp8train.precision.backends.support import BACKENDS, Machine, dotted, version, why_not
from fp8train.precision.kernels import cpu_kernels, hopper

AUTO = """precision.backend=auto takes emulated, on a GPU too: no other has been measured yet.
For GPUs the table is what the sources of torch and Transformer Engine say."""


def this_machine() -> Machine:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Machine.here(device, with_transformer_engine=True)


def packages() -> dict[str, str]:
    """NVIDIA's packages and the compiled CPU kernels, each in a few words."""
    return {
        "cuda": torch.version.cuda or "none: this torch is built for CPUs",
        "transformer_engine": transformer_engine(),
        "apex": apex(),
        "compiler": os.environ.get("CXX")
        or shutil.which("g++")
        or shutil.which("clang++")
        or "none",
        "cpu_kernels": built(cpu_kernels.library()),
        "hopper_accumulation": built(hopper.library()),
    }


def built(library: object) -> str:
    return "not built: plain torch, same bits, slower" if library is None else "built"


def transformer_engine() -> str:
    try:
        return metadata.version("transformer_engine")
    except metadata.PackageNotFoundError:
        return "not installed"


def apex() -> str:
    if importlib.util.find_spec("apex") is None:
        return "not installed; norms are torch's own"
    if fused_rms_norm() is None:
        return "not NVIDIA's; norms are torch's own"
    return "NVIDIA's: fused norms on a GPU"


def support(machine: Machine) -> list[dict[str, Any]]:
    """A row for each recipe and backend."""
    rows = []
    for recipe in RECIPES:
        for backend in BACKENDS:
            reason = why_not(backend, recipe, machine)
            row = {"recipe": recipe, "backend": backend, "runs": reason is None, "why_not": reason}
            rows.append(row)
    return rows


def name_of(machine: Machine, imagined: bool) -> str:
    if imagined:
        assert machine.capability is not None
        return (
            f"a GPU of compute capability {dotted(machine.capability)}, with torch "
            f"{machine.torch_version}, CUDA {machine.cuda_version} and Transformer Engine "
            f"{machine.te_version}"
        )
    if machine.capability is None:
        return "this CPU"
    return f"this GPU, of compute capability {dotted(machine.capability)}"


def facts(title: str, values: dict[str, Any]) -> Table:
    table = Table("", "", title=title, show_header=False, title_justify="left")
    for name, value in values.items():
        table.add_row(name, str(value))
    return table


def support_table(rows: list[dict[str, Any]], where: str) -> Table:
    table = Table(title=f"What runs on {where}", title_justify="left")
    for column in ("recipe", *BACKENDS):
        table.add_column(column, no_wrap=column == "recipe")
    for recipe in RECIPES:
        cells = [
            (row["why_not"] or "runs").removeprefix(f"{recipe} ").removeprefix(f"{row['backend']} ")
            for row in rows
            if row["recipe"] == recipe
        ]
        table.add_row(recipe, *cells)
    return table


def capability(text: str) -> tuple[int, int]:
    try:
        return version(text)
    except ValueError:
        message = f"{text}: give a compute capability, as 9.0"
        raise argparse.ArgumentTypeError(message) from None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--capability", type=capability, help="of a GPU that is not here, as 9.0")
    parser.add_argument("--json", type=Path, help="also write it all to a file")
    arguments = parser.parse_args()
    asked: tuple[int, int] | None = arguments.capability
    machine = this_machine() if asked is None else Machine.imagined(asked)
    where, rows, found = name_of(machine, asked is not None), support(machine), environment()
    extra = packages()
    versions = found["versions"] | extra
    console = Console()
    console.print(facts("Hardware", found["hardware"]), facts("Versions", versions))
    console.print(support_table(rows, where))
    console.print(AUTO)
    if arguments.json:
        config = {"capability": dotted(asked) if asked else None, "auto": "emulated"}
        write_record(arguments.json, "doctor", config, rows, extra)
    return 0


if __name__ == "__main__":
    sys.exit(main())
