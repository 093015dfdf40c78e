"""FLOPs of a Llama, counted as 2 a multiply-add."""

from __future__ import annotations

from fp8train.config import ModelConfig


def linear_sizes(model: ModelConfig) -> dict[str, int]:
    """Elements of each linear of one block, by its name in the block."""
    kv_size = model.hidden_size // model.num_heads * model.num_kv_heads
    return {
        "self_attn.q_proj": model.hidden_size * model.hidden_size,
        "self_attn.k_proj": model.hidden_size * kv_size,
        "self_attn.v_proj": model.hidden_size * kv_size,
        "self_attn.o_proj": model.hidden_size * model.hidden_size,
        "mlp.gate_proj": model.hidden_size * model.intermediate_size,
        "mlp.up_proj": model.hidden_size * model.intermediate_size,
        "mlp.down_proj": model.intermediate_size * model.hidden_size,
    }


def parameter_count(model: ModelConfig) -> int:
    """Parameters of the whole model, the padding of its vocabulary left out."""
    table = model.vocab_size * model.hidden_size
    block = sum(linear_sizes(model).values()) + 2 * model.hidden_size
    tables = table if model.tie_embeddings else 2 * table
    return tables + model.num_layers * block + model.hidden_size


def attention_core_flops(model: ModelConfig, sequence_length: int) -> float:
    """Forward FLOPs a token and block of q·kᵀ and its product with v, causal: half of full."""
    return 2 * 2 * sequence_length * model.hidden_size / 2


def model_flops(model: ModelConfig, sequence_length: int) -> float:
    """Forward and backward FLOPs a token: three times forward; nothing is recomputed."""
    block = 2 * sum(linear_sizes(model).values()) + attention_core_flops(model, sequence_length)
    head = 2 * model.hidden_size * model.vocab_size
    return 3 * (model.num_layers * block + head)


def fp8_fraction(
    model: ModelConfig, sequence_length: int, quantized_share: dict[str, float]
) -> float:
    """Share of the blocks' GEMM FLOPs that run in FP8, attention core included in the whole.

    Args:
        quantized_share: of each FP8 linear's three GEMMs, by full name, `layers.0.mlp.up_proj`.
    """
    sizes = linear_sizes(model)
    block = 2 * sum(sizes.values()) + attention_core_flops(model, sequence_length)
    in_fp8 = sum(
        2 * share * sizes.get(name.split(".", 2)[-1], 0) for name, share in quantized_share.items()
    )
    return in_fp8 / (model.num_layers * block)
