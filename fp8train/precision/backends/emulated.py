"""The emulated backend: the recipe's numbers on any device, without FP8 hardware.

A GEMM's products are exact, sums are FP32, scales are applied in FP32, and the result is rounded
once to the output type (a BF16 GEMM on a CPU may round before the scale too: one ulp). FP8 values
are exact in BF16, so one BF16 GEMM does it where the CPU has fast ones (AVX-512 BF16, AMX);
elsewhere the same values go through an FP32 GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8train.precision.quantizers import Operand


def has_fast_bf16(device: torch.device) -> bool:
    """Whether the device multiplies BF16 matrices in hardware.

    Without it torch's CPU kernels for BF16 take up to a hundred times as long as those for FP32.
    """
    if device.type != "cpu":
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@dataclass(frozen=True)
class Emulated:
    """GEMMs over operands in `compute_dtype`: BF16 or FP32."""

    compute_dtype: torch.dtype

    @classmethod
    def on(cls, device: torch.device, emulation: str) -> Emulated:
        """The fast choice for the device; `exact` takes FP32 GEMMs in any case."""
        fast = emulation == "fast" and has_fast_bf16(device)
        return cls(torch.bfloat16 if fast else torch.float32)

    def gemm(
        self,
        a: Operand,
        b: Operand,
        dtype: torch.dtype,
        *,
        transpose_a: bool = False,
        transpose_b: bool = False,
    ) -> Tensor:
        """a · b in dtype, with the scales of both applied to the FP32 sum."""
        left = a.values.t() if transpose_a else a.values
        right = b.values.t() if transpose_b else b.values
        scale = a.scale_inv if b.scale_inv is None else b.scale_inv
        if a.scale_inv is not None and b.scale_inv is not None:
            scale = a.scale_inv * b.scale_inv
        on_cpu = left.device.type == "cpu"
        if self.compute_dtype == torch.float32 or (on_cpu and dtype != torch.bfloat16):
            product = left.float() @ right.float()  # torch's BF16 GEMM has no FP32 output there
        elif on_cpu:
            # torch applies alpha to the FP32 accumulator, before its rounding to BF16.
            alpha = 1.0 if scale is None else scale.item()
            unused = left.new_zeros(1)
            return torch.addmm(unused, left, right, beta=0, alpha=alpha).to(dtype)
        else:
            product = torch.mm(left, right, out_dtype=torch.float32)
        return (product if scale is None else product.mul_(scale)).to(dtype)


class WideAttentionCore(nn.Module):
    """Causal attention computed in FP32 and rounded once, for CPUs without fast BF16."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, H, T, K], k and v [B, G, T, K] → [B, H, T, K]."""
        out = F.scaled_dot_product_attention(
            q.float(), k.float(), v.float(), is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.to(q.dtype)
