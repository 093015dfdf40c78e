"""FP8 training of Llama models: numerics, eight-bit collectives, and a verdict against BF16."""

__version__ = "0.1.0"
