"""The parameters that one rank holds, as sizes: which blocks, and what part of each matrix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8train.config import Config, ModelConfig
from fp8train.layout import Layout, padded_vocabulary, stage_blocks
from fp8train.planning.flops import linear_sizes
from fp8train.precision.plan import LayerPlan, plan

ROW_PARALLEL = ("self_attn.o_proj", "mlp.down_proj")  # columns of the weight are divided
ROOT = "root"  # FSDP's unit of embedding, last norm and head


@dataclass(frozen=True)
class Weight:
    """One parameter on a rank, before FSDP divides its rows.

    Attributes:
        name: of the module, `layers.3.mlp.up_proj`.
        rows, columns: of this rank's part of the matrix; a norm has one column.
        unit: what FSDP gathers together with it: a block, `layers.3`, or `ROOT`.
        divided: tensor ranks hold different parts of it; a norm is on all of them.
    """

    name: str
    rows: int
    columns: int
    unit: str
    divided: bool

    @property
    def size(self) -> int:
        """Elements."""
        return self.rows * self.columns

    def shard(self, ranks: int) -> int:
        """Elements of the largest shard: FSDP2 divides the rows, and the last ranks may have less,
        which their messages are padded for."""
        return -(-self.rows // ranks) * self.columns


def linear_shapes(model: ModelConfig, layout: Layout) -> dict[str, tuple[int, int]]:
    """Rows and columns of a rank's part of each linear of a block, by its name in the block."""
    shapes = {}
    for name, size in linear_sizes(model).items():
        columns = model.intermediate_size if name == "mlp.down_proj" else model.hidden_size
        rows = size // columns
        if name in ROW_PARALLEL:
            shapes[name] = rows, columns // layout.tensor
        else:
            shapes[name] = rows // layout.tensor, columns
    return shapes


def block_weights(model: ModelConfig, layout: Layout, number: int) -> list[Weight]:
    """The parameters of one block on a rank."""
    unit = f"layers.{number}"
    norms = ("input_layernorm", "post_attention_layernorm")
    return [
        *(Weight(f"{unit}.{name}", model.hidden_size, 1, unit, False) for name in norms),
        *(
            Weight(f"{unit}.{name}", rows, columns, unit, True)
            for name, (rows, columns) in linear_shapes(model, layout).items()
        ),
    ]


def stage_weights(model: ModelConfig, layout: Layout, stage: int) -> list[Weight]:
    """The parameters of one pipeline stage on a rank."""
    vocabulary = padded_vocabulary(model) // layout.tensor
    weights = []
    if stage == 0:
        weights.append(Weight("embed_tokens", vocabulary, model.hidden_size, ROOT, True))
    for number in stage_blocks(model, layout.stages)[stage]:
        weights += block_weights(model, layout, number)
    if stage == layout.stages - 1:
        weights.append(Weight("norm", model.hidden_size, 1, ROOT, False))
        if not (model.tie_embeddings and stage == 0):  # across stages each end has a copy
            weights.append(Weight("lm_head", vocabulary, model.hidden_size, ROOT, True))
    return weights


def rank_weights(model: ModelConfig, layout: Layout, pipeline: int) -> list[Weight]:
    """The parameters of all stages of a rank, by its pipeline coordinate."""
    return [
        weight
        for stage in layout.stages_of(pipeline)
        for weight in stage_weights(model, layout, stage)
    ]


def units(weights: Iterable[Weight]) -> dict[str, list[Weight]]:
    """The parameters that FSDP gathers and reduces together, by unit."""
    found: dict[str, list[Weight]] = {}
    for weight in weights:
        found.setdefault(weight.unit, []).append(weight)
    return found


def fsdp_ranks(layout: Layout) -> int:
    """Ranks that parameters are divided over: those of a context group hold the same ones."""
    return layout.shard * layout.context


def plans(config: Config) -> dict[str, LayerPlan]:
    """The quantised linears of the whole model, by full name."""
    names = [
        f"layers.{number}.{name}"
        for number in range(config.model.num_layers)
        for name in linear_sizes(config.model)
    ]
    return plan([*names, "lm_head"], config.precision)


def compute_bytes(config: Config) -> int:
    """Bytes of an element of gathered weights and activations: BF16's, or FP32's under fp32."""
    return 4 if config.precision.recipe == "fp32" else 2


def bytes_gathered(config: Config, ranks: int) -> set[str]:
    """Names of the linears whose weights are gathered as bytes over so many ranks."""
    if config.parameters.gather == "bf16" or ranks == 1:
        return set()
    return {name for name, p in plans(config).items() if p.recipe.weight_travels_as_bytes}
