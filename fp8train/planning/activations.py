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
from functools import cached_property

from fp8train.config import Config
from fp8train.layout import Layout, padded_vocabulary, stage_blocks
from fp8train.parallel.quantized_gather import SIBLINGS, quantized_gathers
from fp8train.planning.parameters import (
    bytes_gathered,
    compute_bytes,
    fsdp_ranks,
    linear_shapes,
)
from fp8train.precision.formats import Format
from fp8train.precision.plan import LayerPlan
from fp8train.precision.tensor import Granularity

# The linears that a block's two branches begin with, and the one that each ends with.
INPUTS = {branch: tuple(f"{branch}.{name}" for name in names) for branch, names in SIBLINGS.items()}
OUTPUTS = {"self_attn": "self_attn.o_proj", "mlp": "mlp.down_proj"}


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
    def bits(self) -> int:
        """Of an element that is not quantised."""
        return 8 * compute_bytes(self.config)

    @property
    def hidden(self) -> Kept:
        """Hidden states, as blocks and stages hand them on."""
        size = self.residual_rows * self.config.model.hidden_size
        return Kept("hidden states", size, self.bits)

    def gathered_as(self, number: int, branch: str) -> LayerPlan | None:
        """How the input of a block's branch is quantised before tensor ranks gather it; None where
        it isn't, and each linear quantises what it gets."""
        name, length = f"layers.{number}.{branch}", self.config.trainer.sequence_length
        ours = self.plans if self.config.precision.backend != "transformer_engine" else {}
        if not quantized_gathers([name], ours, self.layout, length):
            return None
        return self.plans[f"layers.{number}.{INPUTS[branch][0]}"]

    def block(self, number: int) -> list[Kept]:
        """What a block keeps without activation checkpointing, weights aside."""
        model, rows, bits = self.config.model, self.rows, self.bits
        shapes, inputs = linear_shapes(model, self.layout), self.inputs(number)
        heads, keys = shapes["self_attn.q_proj"][0], shapes["self_attn.k_proj"][0]
        inner = shapes["mlp.up_proj"][0]
        key_rows = rows * self.layout.context  # gathered over the context ranks
        query_heads = model.num_heads // self.layout.tensor
        return [
            *self._norm("input_layernorm"),
            *inputs["self_attn"],
            Kept("q", rows * heads, bits),
            Kept("k and v", 2 * key_rows * keys, bits),
            Kept("attention output", rows * heads, bits),
            Kept("logsumexp", rows * query_heads, 32),
            *inputs["self_attn.o_proj"],
            *self._norm("post_attention_layernorm"),
            *inputs["mlp"],
            *(Kept(name, rows * inner, bits) for name in ("gate", "silu(gate)", "up")),
            *inputs["mlp.down_proj"],
        ]

    def inputs(self, number: int) -> dict[str, list[Kept]]:
        """What a block keeps of the inputs of its linears: of each branch, and of what ends it.

        Of what is gathered in eight bits a rank keeps its own part, once; else all of it is kept,
        by each linear that quantises it.
        """
        found = {}
        shapes = linear_shapes(self.config.model, self.layout)
        size = self.config.model.hidden_size
        for branch, names in INPUTS.items():
            gathered = self.gathered_as(number, branch)
            if gathered is None:
                found[branch] = self._inputs(number, names, self.rows, size)
            else:
                part = self._input_copies({branch: gathered}, self.residual_rows, size)
                found[branch] = part
            end = OUTPUTS[branch]
            found[end] = self._inputs(number, (end,), self.rows, shapes[end][1])
        return found

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

    @cached_property
    def as_bytes(self) -> set[str]:
        """The linears whose weights arrive quantised."""
        return bytes_gathered(self.config, fsdp_ranks(self.layout))

    def weight_copies(self, number: int) -> list[Kept]:
        """The quantised weights that a block keeps from forward to backward."""
        copies = []
        for name, shape in linear_shapes(self.config.model, self.layout).items():
            copies += self._weight(f"layers.{number}.{name}", shape, (1,))
        return copies

    def cached_weights(self, number: int) -> list[Kept]:
        """The quantised weights that a block keeps from the first micro batch of a step on."""
        copies = []
        for name, shape in linear_shapes(self.config.model, self.layout).items():
            name = f"layers.{number}.{name}"
            found = self.plans.get(name)
            if found is not None and not found.recipe.smooth:
                both = (1,) if found.recipe.shares_copies("weight") else (0, 1)
                copies += self._weight(name, shape, both)
        return copies

    def wgrad_operands(self, number: int) -> list[Kept]:
        """What a block keeps between the two halves of zero bubble's backward: both operands of
        its weight gradients."""
        kept = [tensor for tensors in self.inputs(number).values() for tensor in tensors]
        for name, (outputs, _) in linear_shapes(self.config.model, self.layout).items():
            kept += self._grad(f"layers.{number}.{name}", outputs)
        return kept

    def head_wgrad_operands(self) -> list[Kept]:
        """The same of the LM head."""
        rows = padded_vocabulary(self.config.model) // self.layout.tensor
        return [*self._head_input(), *self._grad("lm_head", rows)]

    def ends(self, stage: int) -> list[Kept]:
        """What a stage keeps besides its blocks: rotary tables, ids, and what it hands on or the
        head and the loss. Logits count thrice: as they come, in FP32, and their gradient."""
        model, layout = self.config.model, self.layout
        head_size = model.hidden_size // model.num_heads
        positions = self.config.trainer.sequence_length // layout.context
        kept = [Kept("rotary tables", positions * head_size, 32)]
        if stage == 0:
            kept.append(Kept("token ids", self.rows, 64))
        if stage < layout.stages - 1:
            return [*kept, self.hidden]
        shape = padded_vocabulary(model) // layout.tensor, model.hidden_size
        return [
            *kept,
            *self._norm("norm"),
            *self._head_input(),
            *self._weight("lm_head", shape, (1,)),
            Kept("logits", self.rows * shape[0], self.bits),
            Kept("exponentials of logits", self.rows * shape[0], 32),
            Kept("gradient of logits", self.rows * shape[0], self.bits),
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

    def _head_input(self) -> list[Kept]:
        layers = {"lm_head": self.plans.get("lm_head")}
        return self._input_copies(layers, self.rows, self.config.model.hidden_size)

    def _weight(self, name: str, shape: tuple[int, int], which: tuple[int, ...]) -> list[Kept]:
        """A weight's quantised copies; none where it was gathered as one, which FSDP frees."""
        found = self.plans.get(name)
        if found is None or name in self.as_bytes:
            return []
        return _copies(found, "weight", name, shape, which)

    def _grad(self, name: str, columns: int) -> list[Kept]:
        """A linear's output gradient, as its weight gradient takes it."""
        found = self.plans.get(name)
        copies = _copies(found, "grad_output", name, (self.rows, columns), (1,)) if found else []
        return copies or [Kept(f"grad_output of {name}", self.rows * columns, self.bits)]

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
