"""What a forward pass keeps for its backward pass, tensor by tensor.

The count of Korthikanti et al. 2022 (arXiv 2205.05198, section 4), made for Llama: no biases, no
dropout, no T×T matrix since the attention core recomputes it, three matrices in the MLP, and FP8
copies in place of the inputs of quantised linears. It is for a GPU, where norms and attention are
fused; a CPU's norms keep FP32 copies.

Of a rank's rows, B·T/context tokens of a micro batch, the residual stream and the norms see all,
or under sequence parallelism their part of `rows / tensor`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8train.config import Config
from fp8train.layout import Layout, padded_vocabulary, stage_blocks
from fp8train.planning.parameters import compute_bytes, linear_shapes
from fp8train.precision.formats import Format
from fp8train.precision.plan import LayerPlan
from fp8train.precision.tensor import Granularity

# Whether a column-parallel linear keeps its input's own part under sequence parallelism and gathers
# it once more in backward, instead of keeping what was gathered.
GATHERS_AGAIN = True

# Linears of a block that have an input in common.
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


@dataclass(frozen=True)
class Kept:
    """One tensor that is kept: its elements, and the bits of each."""

    name: str
    elements: int
    bits: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.elements * self.bits // 8


@dataclass(frozen=True)
class Activations:
    """Counts for one rank and micro batch of a configuration.

    Attributes:
        plans: the quantised linears of the model, by full name.
    """

    config: Config
    layout: Layout
    plans: dict[str, LayerPlan]

    @property
    def samples(self) -> int:
        return self.config.trainer.micro_batch_size

    @property
    def rows(self) -> int:
        """Tokens of a micro batch on this rank's context coordinate."""
        return self.samples * self.config.trainer.sequence_length // self.layout.context

    @property
    def residual_rows(self) -> int:
        """Tokens of the residual stream on this rank."""
        return self.rows // self.layout.tensor if self.layout.sequence else self.rows

    @property
    def column_input_rows(self) -> int:
        """Tokens of a column-parallel linear's input that are kept."""
        return self.residual_rows if GATHERS_AGAIN else self.rows

    @property
    def bits(self) -> int:
        """Of an element that is not quantised."""
        return 8 * compute_bytes(self.config)

    @property
    def hidden(self) -> Kept:
        """Hidden states, as blocks and stages hand them on."""
        size = self.residual_rows * self.config.model.hidden_size
        return Kept("hidden states", size, self.bits)

    def block(self, number: int) -> list[Kept]:
        """What a block keeps without activation checkpointing, weights aside."""
        model, rows, bits = self.config.model, self.rows, self.bits
        shapes = linear_shapes(model, self.layout)
        heads, keys = shapes["self_attn.q_proj"][0], shapes["self_attn.k_proj"][0]
        inner = shapes["mlp.up_proj"][0]
        key_rows = rows * self.layout.context  # gathered over the context ranks
        query_heads = model.num_heads // self.layout.tensor
        return [
            *self._norm("input_layernorm"),
            *self._inputs(number, QKV, self.column_input_rows, model.hidden_size),
            Kept("q", rows * heads, bits),
            Kept("k and v", 2 * key_rows * keys, bits),
            Kept("attention output", rows * heads, bits),
            Kept("logsumexp", rows * query_heads, 32),
            *self._inputs(number, ("self_attn.o_proj",), rows, heads),
            *self._norm("post_attention_layernorm"),
            *self._inputs(number, GATE_UP, self.column_input_rows, model.hidden_size),
            *(Kept(name, rows * inner, bits) for name in ("gate", "silu(gate)", "up")),
            *self._inputs(number, ("mlp.down_proj",), rows, inner),
        ]

    def results(self) -> list[Kept]:
        """What selective checkpointing keeps of a block: its input, and the results of its GEMMs
        and of the attention core. Row-parallel linears give partial sums of all rows."""
        rows, bits = self.rows, self.bits
        shapes = linear_shapes(self.config.model, self.layout)
        heads = shapes["self_attn.q_proj"][0]
        query_heads = self.config.model.num_heads // self.layout.tensor
        return [
            self.hidden,
            *(Kept(f"result of {name}", rows * shape[0], bits) for name, shape in shapes.items()),
            Kept("attention output", rows * heads, bits),
            Kept("logsumexp", rows * query_heads, 32),
        ]

    def kept_of_block(self, number: int) -> list[Kept]:
        """What a block keeps under the configured activation checkpointing, weights aside."""
        mode = self.config.parallel.activation_checkpoint
        if mode == "none":
            return self.block(number)
        return self.results() if mode == "selective" else [self.hidden]

    def weight_copies(self, number: int) -> list[Kept]:
        """The quantised weights that a block keeps from forward to backward."""
        copies = []
        for name, shape in linear_shapes(self.config.model, self.layout).items():
            found = self.plans.get(f"layers.{number}.{name}")
            if found is not None:
                copies += _copies(found, "weight", name, shape, (1,))
        return copies

    def cached_weights(self, number: int) -> list[Kept]:
        """The quantised weights that a block keeps from the first micro batch of a step on."""
        copies = []
        for name, shape in linear_shapes(self.config.model, self.layout).items():
            found = self.plans.get(f"layers.{number}.{name}")
            if found is not None and not found.recipe.smooth:
                both = (1,) if found.recipe.shares_copies("weight") else (0, 1)
                copies += _copies(found, "weight", name, shape, both)
        return copies

    def wgrad_operands(self, number: int) -> list[Kept]:
        """What a block keeps between the two halves of zero bubble's backward: both operands of
        each weight gradient that is put off, those of the quantised linears."""
        kept = []
        for name, (outputs, inputs) in linear_shapes(self.config.model, self.layout).items():
            found = self.plans.get(f"layers.{number}.{name}")
            if found is None:
                continue
            for role, columns in (("input", inputs), ("grad_output", outputs)):
                shape = self.rows, columns
                copy = _copies(found, role, name, shape, (1,))
                kept += copy or [Kept(f"{role} of {name}", self.rows * columns, self.bits)]
        return kept

    def ends(self, stage: int) -> list[Kept]:
        """What a stage keeps besides its blocks: rotary tables, ids, and what it hands on or the
        head and the loss. Logits count thrice: as they come, in FP32, and as softmax."""
        model, layout = self.config.model, self.layout
        head_size = model.hidden_size // model.num_heads
        positions = self.config.trainer.sequence_length // layout.context
        kept = [Kept("rotary tables", positions * head_size, 32)]
        if stage == 0:
            kept.append(Kept("token ids", self.rows, 64))
        if stage < layout.stages - 1:
            return [*kept, self.hidden]
        shape = padded_vocabulary(model) // layout.tensor, model.hidden_size
        found = self.plans.get("lm_head")
        return [
            *kept,
            *self._norm("norm"),
            *self._input_copies({"lm_head": found}, self.column_input_rows, model.hidden_size),
            *(_copies(found, "weight", "lm_head", shape, (1,)) if found else []),
            Kept("logits", self.rows * shape[0], self.bits),
            Kept("logits in FP32", self.rows * shape[0], 32),
            Kept("softmax", self.rows * shape[0], 32),
        ]

    def stage_blocks(self, stage: int) -> range:
        """The numbers of a stage's blocks."""
        return stage_blocks(self.config.model, self.layout.stages)[stage]

    def _norm(self, name: str) -> list[Kept]:
        """A norm's input and the reciprocal root of its mean square."""
        size = self.residual_rows * self.config.model.hidden_size
        return [
            Kept(f"input of {name}", size, self.bits),
            Kept(f"rstd of {name}", self.residual_rows, 32),
        ]

    def _inputs(self, number: int, names: tuple[str, ...], rows: int, columns: int) -> list[Kept]:
        return self._input_copies(
            {name: self.plans.get(f"layers.{number}.{name}") for name in names}, rows, columns
        )

    def _input_copies(
        self, layers: dict[str, LayerPlan | None], rows: int, columns: int
    ) -> list[Kept]:
        """The input that some linears have in common: a copy for wgrad for each one that quantises
        it, and itself, once, if one doesn't."""
        kept: list[Kept] = []
        plain = False
        for name, found in layers.items():
            copies = [] if found is None else _copies(found, "input", name, (rows, columns), (1,))
            kept += copies
            plain |= not copies
        if plain:
            kept.append(Kept(f"input of {', '.join(layers)}", rows * columns, self.bits))
        return kept


def _copies(
    layer: LayerPlan, role: str, name: str, shape: tuple[int, int], which: tuple[int, ...]
) -> list[Kept]:
    """Row-wise (0) and column-wise (1) copies of a role's tensor, and their scales; nothing for
    one that stays in high precision."""
    recipe = layer.recipe
    kept = []
    for copy in which:
        fmt = recipe.formats.of(role)[copy]
        if fmt is not None:
            granularity = recipe.granularity(role)[copy]
            kept += quantized(f"{role} of {name}", shape, fmt, granularity)
    return kept


def quantized(
    name: str, shape: tuple[int, int], fmt: Format, granularity: Granularity
) -> list[Kept]:
    """A quantised matrix: values in the bits of their format, and a scale in FP32 a block."""
    rows, columns = shape
    scale_rows, scale_columns = granularity.grid(rows, columns)
    return [
        Kept(f"FP8 {name}", rows * columns, fmt.bits),
        Kept(f"scales of {name}", scale_rows * scale_columns, 32),
    ]


def total(kept: list[Kept]) -> int:
    """Bytes of all."""
    return sum(tensor.size for tensor in kept)
