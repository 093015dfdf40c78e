"""What runs where: recipe × backend, by device, compute capability and package versions.

The table is data, and a machine is data too, so the refusals for any GPU can be asked anywhere.
What it says of GPUs is from the sources below; none of it has been run there yet.
Sources: torch `aten/src/ATen/native/cuda/ScaledBlas.cpp` and `RowwiseScaledMM.cu`; TE
`pytorch/quantization.py`; CUDA's release notes for cuBLAS.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata

import torch

from fp8train.config import RECIPES, ConfigError
from fp8train.precision.backends.transformer_engine import Engine, unavailable

BACKENDS = ("emulated", "torch", "transformer_engine")
Version = tuple[int, int]
TORCH: Version = (2, 11)  # pyproject.toml's
TRANSFORMER_ENGINE: Version = (2, 11)  # likewise


@dataclass(frozen=True)
class Machine:
    """Where a run computes.

    Attributes:
        device: "cpu" or "cuda".
        capability: of the GPU.
        torch_version: as torch says it.
        cuda_version: what torch is built for; None without.
        te_version: None where Transformer Engine doesn't import or was not looked for.
        import_error: why it doesn't.
        refused: recipe → reason, of recipes that TE itself says it can't run on this GPU.
    """

    device: str
    capability: Version | None = None
    torch_version: str = torch.__version__
    cuda_version: str | None = torch.version.cuda
    te_version: str | None = None
    import_error: str | None = None
    refused: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def here(cls, device: torch.device, *, with_transformer_engine: bool) -> Machine:
        """This machine; TE's import takes seconds, so it is asked for."""
        capability = None
        if device.type == "cuda":
            capability = torch.cuda.get_device_capability(device)
        if not with_transformer_engine or device.type != "cuda":
            return cls(device.type, capability)
        engine = Engine.found()
        if isinstance(engine, str):
            return cls(device.type, capability, import_error=engine)
        found = metadata.version("transformer_engine")
        return cls(device.type, capability, te_version=found, refused=unavailable(engine))

    @classmethod
    def imagined(cls, capability: Version) -> Machine:
        """A GPU with everything installed in the least version that serves all recipes."""
        return cls("cuda", capability, "2.13", "12.9", "2.11")


@dataclass(frozen=True)
class Need:
    """What a recipe needs on a backend.

    Attributes:
        least: compute capability.
        below: the first capability that doesn't do any more; None for no end.
        cuda: the least version torch is built for.
        cpu: torch's least version on a CPU; None: it needs a GPU.
    """

    least: Version = (8, 9)
    below: Version | None = None
    cuda: Version = (12, 1)
    cpu: Version | None = None

    def capabilities(self) -> str:
        if self.below == (self.least[0] + 1, 0):
            return f"compute capability {self.least[0]}.x"
        end = "" if self.below is None else f" and below {dotted(self.below)}"
        return f"compute capability {dotted(self.least)} or above{end}"


TENSORWISE = Need(cpu=(2, 11))
ROWWISE = Need(cpu=(2, 13))
TABLE: dict[str, dict[str, Need]] = {
    "torch": {
        "fp8_delayed": TENSORWISE,
        "fp8_current": TENSORWISE,
        "fp8_rowwise": ROWWISE,
        "fp8_rowwise_bf16_wgrad": ROWWISE,
        "fp8_block": Need((9, 0), below=(10, 0), cuda=(12, 9)),
        "mxfp8": Need((10, 0), cuda=(12, 8)),
        "nvfp4": Need((10, 0), cuda=(12, 8)),
    },
    "transformer_engine": {
        "fp8_delayed": Need(),
        "fp8_current": Need(),
        "fp8_block": Need((9, 0), cuda=(12, 9)),
        "mxfp8": Need((10, 0), below=(12, 0), cuda=(12, 8)),
        "nvfp4": Need((10, 0), cuda=(12, 8)),
    },
}


def why_not(backend: str, recipe: str, machine: Machine) -> str | None:
    """Why a backend does not run a recipe on a machine; None if it does.

    Args:
        recipe: a value of `precision.recipe` that quantises.
    """
    if backend == "emulated":
        return None
    need = TABLE[backend].get(recipe)
    if need is None:
        return f"{backend} has no {recipe}"
    if version(machine.torch_version) < TORCH:
        return f"{backend} needs torch {dotted(TORCH)}; this is {machine.torch_version}"
    if machine.device == "cpu":
        return _why_not_on_cpu(recipe, need, machine)
    assert machine.capability is not None
    if machine.cuda_version is None:
        return f"{recipe} needs CUDA {dotted(need.cuda)}; this torch is built without it"
    if machine.capability < need.least or (need.below and machine.capability >= need.below):
        return f"{recipe} needs {need.capabilities()}; this GPU is {dotted(machine.capability)}"
    if version(machine.cuda_version) < need.cuda:
        return f"{recipe} needs CUDA {dotted(need.cuda)}; torch's is {machine.cuda_version}"
    if backend == "transformer_engine":
        return _why_not_in_te(recipe, machine)
    return None


def _why_not_on_cpu(recipe: str, need: Need, machine: Machine) -> str | None:
    if need.cpu is None:
        return f"{recipe} needs a CUDA GPU; this is a CPU"
    if version(machine.torch_version) < need.cpu:
        return f"{recipe} needs torch {dotted(need.cpu)} on a CPU; this is {machine.torch_version}"
    return None


def _why_not_in_te(recipe: str, machine: Machine) -> str | None:
    if machine.te_version is None:
        return machine.import_error or "Transformer Engine is not installed"
    if version(machine.te_version) < TRANSFORMER_ENGINE:
        needed, found = dotted(TRANSFORMER_ENGINE), machine.te_version
        return f"{recipe} needs Transformer Engine {needed}; this is {found}"
    reason = machine.refused.get(recipe)
    return f"Transformer Engine refuses {recipe} here: {reason}" if reason else None


def refuse(backend: str, recipe: str, machine: Machine) -> None:
    """Pass if a backend runs a recipe on a machine.

    Raises:
        ConfigError: what the recipe needs, what is here, and what runs here.
    """
    reason = why_not(backend, recipe, machine)
    if reason is None:
        return
    others = [name for name in RECIPES if why_not(backend, name, machine) is None]
    instead = f"here {backend} runs {', '.join(others)}; " if others else ""
    raise ConfigError(
        f"precision.backend={backend}: {reason.rstrip('.')}; {instead}"
        f"use {'another precision, or ' if others else ''}precision.backend=emulated"
    )


def version(text: str) -> Version:
    """The first two numbers of a version: 2.11.0a0+nv26.3 → (2, 11).

    Raises:
        ValueError: it has none.
    """
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"{text} is no version")
    return int(match[1]), int(match[2])


def dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
