"""Plain C++ files compiled at first use and called through ctypes.

A file takes a second or two to compile and is kept in the user's cache. Where it can't be built
`compiled` gives None, and callers take plain torch functions that give the same bits.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from torch import Tensor, nn

FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp"),
    *("-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno"),
)
log = logging.getLogger(__name__)


def compiled(source: Path) -> ctypes.CDLL | None:
    """The library made of one C++ file, or None where it can't be built, which the log says.

    Callers keep the answer: each call looks at the compiler and the cache again.
    """
    compiler = shlex.split(
        os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or ""
    )
    if not compiler:
        log.warning(
            "no C++ compiler for %s: emulation runs on plain torch, several times slower",
            source.name,
        )
        return None
    try:
        return ctypes.CDLL(str(_build(source, compiler)))
    except (OSError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        log.warning(
            "emulation runs on plain torch, several times slower: %s could not build %s (%s)",
            compiler[0],
            source.name,
            detail.strip().splitlines()[0] if detail.strip() else "no message",
        )
        return None


def _build(source: Path, compiler: list[str]) -> Path:
    """Path of the shared library, compiled unless this machine's cache holds it."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True)
    cpu = Path("/proc/cpuinfo")  # -march=native: another CPU's file could not run here
    flags = [
        line for line in (cpu.read_text().splitlines() if cpu.exists() else []) if "flags" in line
    ]
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    key = (texts, FLAGS, version.stdout, flags[:1], platform.machine())
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "fp8train/kernels"
    target = cache / f"{source.stem}-{digest}.so"
    if target.exists():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        built = Path(folder) / target.name
        command = [*compiler, *FLAGS, str(source), "-o", str(built)]
        subprocess.run(command, capture_output=True, text=True, check=True)
        os.replace(built, target)  # whole or not at all, whoever else builds it
    return target


def addressable(x: Tensor) -> bool:
    """Whether C++ can read this tensor as one array: contiguous, in the CPU's memory (a DTensor or
    FakeTensor says so too, and has none to point at)."""
    return type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" and x.is_contiguous()


def pointer(x: Tensor) -> ctypes.c_void_p:
    """Where an addressable tensor's elements begin."""
    return ctypes.c_void_p(x.data_ptr())
