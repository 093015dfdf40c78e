"""AdamW on the FP32 masters."""

from __future__ import annotations

import torch
from torch import nn

from fp8train.config import OptimizerConfig


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Fused AdamW. Matrices decay; norms, which are vectors, don't."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    beta1, beta2 = config.betas
    return torch.optim.AdamW(groups, lr=config.lr, betas=(beta1, beta2), eps=config.eps, fused=True)
