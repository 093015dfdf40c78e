"""NVIDIA's own packages: used where they import, and named in the log where they don't.

PyPI's package called `apex` is an old Pyramid toolkit; NVIDIA's is told from it by its
`normalization` module.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch
from torch import nn


def fused_rms_norm() -> type[nn.Module] | None:
    """apex's fused RMSNorm, made as (size, eps=...); None where NVIDIA's apex is not installed."""
    try:
        module = importlib.import_module("apex.normalization")
    except ImportError:
        return None
    return getattr(module, "FusedRMSNorm", None)


def notices() -> list[str]:
    """One line for each package that is not used, with what is used in its place."""
    lines = []
    if fused_rms_norm() is None:
        found = importlib.util.find_spec("apex") is not None
        state = "the installed one is not NVIDIA's" if found else "not installed"
        lines.append(f"apex: {state}; norms are torch's own")
    if importlib.util.find_spec("transformer_engine") is None:
        lines.append("transformer_engine: not installed; FP8 runs on the emulated backend")
    else:
        lines.append("transformer_engine: used with precision.backend=transformer_engine")
    return lines


def fuse_norms(model: nn.Module, device: torch.device) -> int:
    """On a GPU, put apex's fused RMSNorm in the place of torch's; both share the weight.

    Returns:
        The number of norms replaced.
    """
    fused = fused_rms_norm() if device.type == "cuda" else None
    if fused is None:
        return 0
    count = 0
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if isinstance(norm, nn.RMSNorm):
                replacement = fused(norm.normalized_shape, eps=norm.eps)
                replacement.weight = norm.weight
                setattr(parent, name, replacement)
                count += 1
    return count
