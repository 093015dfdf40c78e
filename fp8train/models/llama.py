"""The Llama 3 architecture: plain modules on one device, knowing neither FP8 nor ranks.

Shapes: B batch, T sequence, D hidden, F intermediate, H query heads, G key/value heads,
K head size, V vocabulary. Module names are Hugging Face's, so that weights map one to one.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes


def rope_frequencies(
    head_size: int,
    theta: float,
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max_position: float = 8192,
    device: torch.device | None = None,
) -> Tensor:
    """Rotation per position of each pair of channels, in radians, FP32 [K/2].

    With a factor above 1 the long wavelengths are stretched as in Llama 3.1: those longer than
    `original_max_position / low_freq_factor` by the whole factor, those shorter than
    `original_max_position / high_freq_factor` not at all, with a linear blend between.
    """
    exponent = torch.arange(0, head_size, 2, dtype=torch.float32, device=device) / head_size
    frequencies = 1.0 / theta**exponent
    if factor == 1.0:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    smooth = (original_max_position / wavelengths - low_freq_factor) / (
        high_freq_factor - low_freq_factor
    )
    smooth = smooth.clamp(0.0, 1.0)  # 0: stretched whole, 1: untouched
    return frequencies * (smooth + (1 - smooth) / factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, H, T, K] by cos and sin [T, K/2], computed in FP32.

    Channel i is paired with i + K/2, Hugging Face's order of the weights.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Rope(nn.Module):
    """The tables of the rotary embedding; computed in each forward, so there is no buffer to lose.

    A module, so that another can take its place where positions are not 0 … T − 1.
    """

    def __init__(self, head_size: int, theta: float, scaling: dict[str, float]) -> None:
        super().__init__()
        self.head_size, self.theta, self.scaling = head_size, theta, scaling

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, K/2], FP32, for x [B, T, ...]."""
        return self.tables(torch.arange(x.shape[1], device=x.device))

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, K/2], FP32, of positions [T]."""
        frequencies = rope_frequencies(
            self.head_size, self.theta, **self.scaling, device=positions.device
        )
        angles = torch.outer(positions.float(), frequencies)
        return angles.cos(), angles.sin()


class AttentionCore(nn.Module):
    """softmax(q kᵀ / √K) v, causal. A module, so that another core can take its place."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, H, Tq, K], k and v [B, G, Tk, K] → [B, H, Tq, K].

        The queries are the last Tq of the Tk positions. Where they are fewer, torch's
        `causal_lower_right` is the mask: flash attention on a GPU, where it takes the type and
        head size, else a kernel that reads the mask from a tensor [Tq, Tk].
        """
        mask = None
        if q.shape[2] != k.shape[2]:
            # torch can't make this subclass under a dispatch mode, which checkpointing runs in.
            with _disable_current_modes():
                mask = causal_lower_right(q.shape[2], k.shape[2])
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )


class Attention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.head_size = hidden_size // num_heads
        kv_size = num_kv_heads * self.head_size
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, kv_size, bias=False)
        self.core = AttentionCore()
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [B, T, D]
        q, k, v = (
            proj(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = self.core(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D]
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_heads: int,
        num_kv_heads: int,
        norm_eps: float,
    ) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden_size, norm_eps)
        self.self_attn = Attention(hidden_size, num_heads, num_kv_heads)
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, norm_eps)
        self.mlp = MLP(hidden_size, intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [B, T, D]
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Llama 3. Keyword arguments are the published sizes; `rope_scaling` those of Llama 3.1.

    `embed_tokens`, or `norm` and `lm_head`, may be None, and `layers` some of the blocks: forward
    then begins or ends with hidden states [B, T, D].
    """

    embed_tokens: nn.Embedding | None
    norm: nn.Module | None
    lm_head: nn.Module | None

    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int,
        intermediate_size: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        rope_theta: float = 500000.0,
        rope_scaling: dict[str, float] | None = None,
        norm_eps: float = 1e-5,
        tie_embeddings: bool = False,
    ) -> None:
        super().__init__()
        self.rope = Rope(hidden_size // num_heads, rope_theta, rope_scaling or {})
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleDict(  # by number, which a block keeps where others are missing
            {
                str(number): Block(
                    hidden_size, intermediate_size, num_heads, num_kv_heads, norm_eps
                )
                for number in range(num_layers)
            }
        )
        self.norm = nn.RMSNorm(hidden_size, norm_eps)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        if tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """Token ids [B, T] → logits [B, T, V]."""
        cos, sin = self.rope(x)
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        if self.norm is None or self.lm_head is None:
            return x
        return self.lm_head(self.norm(x))


def initial_std(name: str, num_layers: int, std: float) -> float | None:
    """Standard deviation of a parameter's initial values; None for a norm, which starts at one.

    Projections that write to the residual stream are damped by 1/√(2·layers), as in GPT-2, so
    that its variance does not grow with depth.
    """
    if name.endswith(("layernorm.weight", "norm.weight")):
        return None
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return std / math.sqrt(2 * num_layers)
    return std
