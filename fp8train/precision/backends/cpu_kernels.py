"""Build and call cpu_kernels.cpp: the emulated backend's quantisers, one pass over memory.

The C++ file is compiled once at first use (about two seconds) into the user's cache. Without a
compiler `library()` is None and callers take the plain torch functions, which give the same bits.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from fp8train.precision.formats import Format

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp"),
    *("-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno"),
)
NAMES = {torch.bfloat16: "bf16", torch.float32: "f32"}
log = logging.getLogger(__name__)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they can't be built (said once in the log)."""
    compiler = shlex.split(
        os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or ""
    )
    if not compiler:
        log.warning("no C++ compiler: emulation runs on plain torch, several times slower")
        return None
    try:
        return ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        log.warning(
            "emulation runs on plain torch, several times slower: %s could not build its kernels "
            "(%s)",
            compiler[0],
            detail.strip().splitlines()[0] if detail.strip() else "no message",
        )
        return None


def _build(compiler: list[str]) -> Path:
    """Path of the shared library, compiled unless this machine's cache holds it."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True)
    cpu = Path("/proc/cpuinfo")  # -march=native: another CPU's file could not run here
    flags = [
        line for line in (cpu.read_text().splitlines() if cpu.exists() else []) if "flags" in line
    ]
    key = (SOURCE.read_text(), FLAGS, version.stdout, flags[:1], platform.machine())
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "fp8train/kernels"
    target = cache / f"cpu_kernels-{digest}.so"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        built = Path(folder) / target.name
        command = [*compiler, *FLAGS, str(SOURCE), "-o", str(built)]
        subprocess.run(command, capture_output=True, text=True, check=True)
        os.replace(built, target)  # whole or not at all, whoever else builds it
    return target


def usable(x: Tensor) -> bool:
    """Whether the kernels take this tensor: BF16 or FP32, contiguous, in the CPU's memory (a
    DTensor or FakeTensor says so too, and has none to point at)."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.device.type == "cpu"
        and x.dtype in NAMES
        and x.is_contiguous()
        and library() is not None
    )


def amax(x: Tensor) -> float:
    """max |x|; NaN does not enter. x: usable, any shape."""
    function = _function(f"amax_{NAMES[x.dtype]}", ctypes.c_float)
    return float(function(_pointer(x), ctypes.c_int64(x.numel())))


def quantize(x: Tensor, scale: float, fmt: Format, dtype: torch.dtype) -> Tensor:
    """Values of cast(x · scale, fmt) in dtype (BF16 or FP32). x: usable, any shape."""
    out = torch.empty_like(x, dtype=dtype)
    function = _function(f"quantize_{NAMES[x.dtype]}_{NAMES[dtype]}", None)
    function(
        _pointer(x), _pointer(out), ctypes.c_int64(x.numel()), ctypes.c_float(scale), *_grid(fmt)
    )
    return out


def quantize_blocks(
    x: Tensor,
    fmt: Format,
    block: tuple[int, int],
    dtype: torch.dtype,
    *,
    numerator: float,
    overflow: float,
    power_of_two: bool,
    dequantize: bool,
) -> tuple[Tensor, Tensor]:
    """Payload (times scale_inv, if dequantize) in dtype, and scale_inv, of x [rows, columns]."""
    rows, columns = x.shape
    out = torch.empty_like(x, dtype=dtype)
    scale_inv = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    function = _function(f"quantize_blocks_{NAMES[x.dtype]}_{NAMES[dtype]}", None)
    function(
        *(_pointer(tensor) for tensor in (x, out, scale_inv)),
        *(ctypes.c_int64(size) for size in (rows, columns, *block)),
        *_grid(fmt),
        ctypes.c_float(numerator),
        ctypes.c_float(overflow),
        ctypes.c_int(power_of_two),
        ctypes.c_int(dequantize),
    )
    return out, scale_inv


def _function(name: str, returns: type | None) -> ctypes._NamedFuncPointer:
    loaded = library()
    assert loaded is not None, "ask usable() first"
    function = getattr(loaded, name)
    function.restype = returns
    return function


def _pointer(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def _grid(fmt: Format) -> tuple[ctypes.c_float, ctypes.c_int, ctypes.c_int]:
    return ctypes.c_float(fmt.max), ctypes.c_int(fmt.mantissa_bits), ctypes.c_int(fmt.min_exponent)
