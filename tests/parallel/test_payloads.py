"""Ranks that share a layer's matrices quantise them as one process does, bit for bit.

Real ranks run the linears of a block on parts of given tensors, with the collectives around them.
What goes into each GEMM, values and scales, must be what the same GEMM of one process is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8train.config import RECIPES, ROLES, Config, PrecisionConfig
from fp8train.layout import Layout, Place
from fp8train.layout_rules import BLOCK_SIZES
from fp8train.parallel.context import take
from fp8train.parallel.parallelize import ParallelModel, parallelize
from fp8train.parallel.quantized_gather import SIBLINGS
from fp8train.parallel.tensor import COLUMN_PARALLEL
from fp8train.precision.linear import Gemms
from fp8train.precision.quantizers import Operand
from fp8train.precision.recipes import OPERANDS
from fp8train.precision.telemetry import Statistics, Telemetry
from fp8train.precision.tensor import QuantizedTensor
from fp8train.rules import check
from fp8train.training.checkpoint.manifest import Progress
from fp8train.training.learner import Learner
from tests.parallel.test_layouts import data_of, small
from tests.ranks import on_ranks

CPU = torch.device("cpu")
BATCH = 2
LAST = {"self_attn": "o_proj", "mlp": "down_proj"}  # of a branch; its input is given as well
CASES: dict[str, dict[str, Any]] = {
    **{name: {"recipe": name} for name in RECIPES},
    "every role stochastic": {"recipe": "fp8_current", "stochastic_rounding": [*ROLES]},
    "stochastic, gathered in bytes": {
        "recipe": "mxfp8",
        "stochastic_rounding": ["weight", "grad_output"],
    },
    "FP32 scales": {"recipe": "fp8_rowwise", "power_of_two_scales": False},
    "smooth": {"recipe": "fp8_current", "smooth_swiglu": True},
    "as TE groups amaxes": {"recipe": "fp8_current", "amax_groups": "te"},
    "bf16": {"recipe": "bf16"},
}
QUANTIZED = [case for case in CASES if case != "bf16"]
EQUAL = [case for case in QUANTIZED if "amax_groups" not in CASES[case]]
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP2": (2, {"tensor": 2}),
    "TP2 without sequence parallelism": (2, {"tensor": 2, "sequence": False}),
    "CP2": (2, {"context": 2}),
    "TP2 x CP2": (4, {"tensor": 2, "context": 2}),
    "DP2": (2, {}),
}
SHARED = [layout for layout in LAYOUTS if layout != "DP2"]  # whose ranks share micro batches
UNWATCHED = "TP2 x CP2"  # no telemetry there, which is to change nothing


def configuration(case: str, layout: str | None = None) -> Config:
    """One block; a quarter of its sequence and half of its matrices are a recipe's block at least.

    Args:
        layout: None for one process.
    """
    ranks, sizes = LAYOUTS[layout] if layout else (1, {})
    config = small(num_layers=1, num_kv_heads=2, micro_batch_size=BATCH, **sizes)
    config.precision = PrecisionConfig(amax_history_length=2, **CASES[case])
    block = BLOCK_SIZES.get(config.precision.recipe, 16)
    config.model.hidden_size, config.model.intermediate_size = 4 * block, 2 * block
    config.trainer.sequence_length = 4 * block
    check(config, ranks)
    return config


@dataclass
class Recorder:
    """A layer's GEMMs, and the operands that they are given."""

    gemms: Gemms
    seen: dict[str, tuple[Operand, Operand]] = field(default_factory=dict)

    def gemm(self, kind: str, a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
        assert kind not in self.seen
        self.seen[kind] = a, b
        return self.gemms.gemm(kind, a, b, dtype)


@dataclass
class Sent:
    """What this rank puts into one collective."""

    when: str  # BRANCH.forward, BRANCH.backward, LINEAR.forward, LINEAR.backward
    collective: str
    dtype: torch.dtype
    values: int


class Wire(TorchDispatchMode):
    """Writes down every collective."""

    def __init__(self, when: str, sent: list[Sent]) -> None:
        super().__init__()
        self.when, self.sent = when, sent

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "c10d":
            # Output before input, where they are two.
            tensor = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)][-1]
            name = op._schema.name.removeprefix("c10d::")
            self.sent.append(Sent(self.when, name, tensor.dtype, tensor.numel()))
        return op(*args, **(kwargs or {}))


@dataclass
class Part:
    """What a rank has of tensors [B, T, ...] and of matrices."""

    layout: Layout
    place: Place

    def tokens(self, x: Tensor) -> Tensor:
        """[B, T, ...] → [B, T/c, ...]."""
        return take(x, 1, self.layout.context, self.place.context)

    def stream(self, x: Tensor) -> Tensor:
        """Of the residual stream [B, T, D]."""
        x = self.tokens(x)
        return x.chunk(self.layout.tensor, 1)[self.place.tensor] if self.layout.sequence else x

    def divide(self, x: Tensor, dim: int) -> Tensor:
        return x.chunk(self.layout.tensor, dim)[self.place.tensor]

    def of(self, layer: str, role: str, matrix: Tensor) -> Tensor:
        """Of the matrix of a linear's role, all tokens as rows."""
        columns = layer.rpartition(".")[2] in COLUMN_PARALLEL
        if role == "weight":
            return self.divide(matrix, 0 if columns else 1)
        rows = self.tokens(matrix.view(BATCH, -1, matrix.shape[1])).flatten(0, 1)
        return self.divide(rows, 1) if (role == "grad_output") == columns else rows


def tensors(config: Config, seed: int) -> dict[str, Tensor]:
    """What goes into branches and their last linears, and each linear's output gradient: BF16
    [B, T, ...], rows of all sizes and one large value somewhere."""
    model, length = config.model, config.trainer.sequence_length
    hidden, inner = model.hidden_size, model.intermediate_size
    kv_size = hidden // model.num_heads * model.num_kv_heads
    sizes = {"self_attn": hidden, "mlp": hidden, "o_proj": hidden, "down_proj": inner}
    sizes |= {"q_proj.grad": hidden, "k_proj.grad": kv_size, "v_proj.grad": kv_size}
    sizes |= {"gate_proj.grad": inner, "up_proj.grad": inner}
    sizes |= {"o_proj.grad": hidden, "down_proj.grad": hidden}
    generator, made = torch.Generator().manual_seed(seed), {}
    for name, size in sizes.items():
        x = torch.randn(BATCH, length, size, generator=generator)
        x *= 2.0 ** torch.randint(-4, 4, (BATCH, length, 1), generator=generator)
        place = torch.randint(x.numel(), (1,), generator=generator)
        x.view(-1)[place] = -1000.0 * (seed + 1)
        made[name] = x.to(torch.bfloat16)
    return made


@dataclass
class Record:
    """One micro batch of a rank.

    Attributes:
        operands: by (linear, role, GEMM).
        results: outputs and gradients of inputs, by name.
        sent: what went over the wire.
    """

    operands: dict[tuple[str, str, str], Operand]
    results: dict[str, Tensor]
    sent: list[Sent]


@dataclass
class Run:
    """What a rank leaves.

    Attributes:
        records: by (step, micro batch).
        delayed: histories and scales of delayed scaling at the end.
        statistics: telemetry's of the first step; None where it is off.
    """

    records: dict[tuple[int, int], Record]
    delayed: dict[str, Tensor]
    statistics: dict[str, Statistics] | None


def run(config: Config, watched: bool) -> Run:
    """Forward and backward of a block's linears on this rank's part of given tensors."""
    parallel = parallelize(config, CPU)
    (model_part,) = parallel.parts
    conversion, layout, place = model_part.conversion, parallel.mesh.layout, parallel.mesh.place
    block: Any = model_part.model.layers["0"]
    block.unshard()  # its linears are called one by one, without FSDP's hooks
    delayed = conversion.delayed is not None
    part, length = Part(layout, place), config.trainer.sequence_length
    numbers = part.tokens(torch.arange(BATCH * length).view(BATCH, length))
    records, statistics = {}, []
    telemetry = Telemetry(parallel.numerics(), int(watched), CPU)
    steps, micro_batches = (3, 2) if delayed else (1, 1)
    for step in range(steps):
        telemetry.begin_step(step + 1)
        for number in range(place.data, micro_batches, layout.data):
            conversion.begin_micro_batch(step, number * BATCH, numbers)
            given = tensors(config, step * micro_batches + number)
            records[step, number] = micro_batch(parallel, block, part, given)
        statistics.append(telemetry.end_step(parallel.mesh.stage))
        conversion.end_step(parallel.mesh.stage)
    kept = {name: x.clone() for name, x in parallel.delayed_state().items()}
    return Run(records, kept, statistics[0])


def micro_batch(
    parallel: ParallelModel, block: nn.Module, part: Part, given: dict[str, Tensor]
) -> Record:
    recorders = {}
    for name, numerics in parallel.numerics().items():
        recorders[name] = numerics.gemms = Recorder(numerics.gemms)
    record = Record({}, {}, [])
    for branch_name, siblings in SIBLINGS.items():
        branch, last = block.get_submodule(branch_name), LAST[branch_name]
        x = part.stream(given[branch_name]).requires_grad_()
        grads = [part.divide(part.tokens(given[f"{name}.grad"]), -1) for name in siblings]
        outputs = call(siblings_only(branch, siblings), branch_name, x, grads, record.sent)
        record.results |= dict(zip(siblings, outputs, strict=True))
        record.results[f"{branch_name}.grad"] = gradient(x)
        x = part.divide(part.tokens(given[last]), -1).contiguous().requires_grad_()
        linear, grads = branch.get_submodule(last), [part.stream(given[f"{last}.grad"])]
        (record.results[last],) = call(linear, last, x, grads, record.sent)
        record.results[f"{last}.grad"] = gradient(x)
    for name, recorder in recorders.items():
        for kind, pair in recorder.seen.items():
            for (role, _), operand in zip(OPERANDS[kind], pair, strict=True):
                record.operands[name, role, kind] = operand
        parallel.numerics()[name].gemms = recorder.gemms
    return record


def siblings_only(branch: nn.Module, siblings: tuple[str, ...]) -> Callable[[Tensor], Any]:
    """A branch with its hooks, that gives what the linears at its entry give."""
    branch.forward = lambda x: [branch.get_submodule(name)(x) for name in siblings]
    return branch


def call(
    function: Callable[[Tensor], Any], name: str, x: Tensor, grads: list[Tensor], sent: list[Sent]
) -> list[Tensor]:
    """The outputs, after a backward; what travels in both is entered in `sent`."""
    with Wire(f"{name}.forward", sent):
        outputs = function(x)
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs
    with Wire(f"{name}.backward", sent):
        torch.autograd.backward(outputs, grads)
    return [output.detach() for output in outputs]


def gradient(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def bits(operand: Operand, cut: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Values, each value's scale, and the tensor's, as integers."""
    if isinstance(operand, Tensor):
        return [cut(operand.view(torch.int16))]
    scales = operand.expanded_scale_inv().expand(operand.payload.shape)
    both = [cut(x).contiguous() for x in (operand.grid_values(), scales)]
    if operand.tensor_scale_inv is not None:
        both.append(operand.tensor_scale_inv)
    return [x.view(torch.int32) for x in both]


def equal(ours: Operand, whole: Operand, cut: Callable[[Tensor], Tensor]) -> bool:
    """Whether an operand is that part of the whole, bit for bit."""
    pairs = zip(bits(ours, lambda x: x), bits(whole, cut), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def references(path: Path) -> None:
    """Every case in one process, written to a file."""
    torch.save({case: run(configuration(case), watched=True) for case in CASES}, path)


@dataclass
class Found:
    """How a rank's run stands to the one of one process.

    Attributes:
        different: operands of which a bit is another, as "linear role GEMM".
        compared: their number with those that are equal.
        error: the largest relative difference of outputs and gradients.
        has_amax: operands of which this rank has the largest value.
        delayed: whether histories and scales are the same, and how many there are.
        statistics: telemetry's, beside those of one process.
        sent: of the first micro batch.
    """

    different: list[str]
    compared: int
    error: float
    has_amax: set[str]
    delayed: tuple[bool, int]
    statistics: tuple[dict[str, Statistics] | None, dict[str, Statistics] | None]
    sent: list[Sent]


def compare(layout: str, path: Path) -> dict[str, Found]:
    """Every case on this rank."""
    wholes: dict[str, Run] = torch.load(path, weights_only=False, mmap=True)
    # Data parallelism shares nothing but what delayed scaling keeps.
    cases = CASES if layout in SHARED else ["fp8_delayed"]
    return {case: compare_one(case, layout, wholes[case]) for case in cases}


def compare_one(case: str, layout: str, whole: Run) -> Found:
    config = configuration(case, layout)
    sizes = Layout.of(config.parallel, torch.distributed.get_world_size())
    part = Part(sizes, sizes.place(torch.distributed.get_rank()))
    ours = run(config, watched=layout != UNWATCHED)
    different, has_amax, compared, error = [], set(), 0, 0.0
    for when, record in ours.records.items():
        expected = whole.records[when]
        assert record.operands.keys() == expected.operands.keys()
        for key, operand in record.operands.items():
            layer, role, kind = key

            def cut(x: Tensor, layer: str = layer, role: str = role) -> Tensor:
                return part.of(layer, role, x)

            name = f"{layer.rpartition('.')[2]} {role} {kind}"
            theirs = expected.operands[key]
            compared += 1
            if not equal(operand, theirs, cut):
                different.append(name)
            if isinstance(theirs, QuantizedTensor):
                values = theirs.dequantize().abs()
                if cut(values).max() == values.max():
                    has_amax.add(name)
        for name, result in record.results.items():
            error = max(error, relative(result, own_result(part, name, expected.results[name])))
    same = [torch.equal(x, whole.delayed[name]) for name, x in ours.delayed.items()]
    sent = next(iter(ours.records.values())).sent
    return Found(
        different,
        compared,
        error,
        has_amax,
        (all(same), len(same)),
        (ours.statistics, whole.statistics),
        sent,
    )


def own_result(part: Part, name: str, whole: Tensor) -> Tensor:
    """A rank's part of a linear's output, or of a gradient of an input."""
    in_stream = name in LAST.values() or name.removesuffix(".grad") in SIBLINGS
    return part.stream(whole) if in_stream else part.divide(part.tokens(whole), -1)


def relative(x: Tensor, expected: Tensor) -> float:
    return float((x.float() - expected.float()).norm() / expected.float().norm())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Found]]]:
    """By layout and rank."""
    path = tmp_path_factory.mktemp("payloads") / "one_process.pt"
    on_ranks(1, references, path)
    return {layout: on_ranks(LAYOUTS[layout][0], compare, layout, path) for layout in LAYOUTS}


Everything = dict[str, list[dict[str, Found]]]


@pytest.mark.slow
@pytest.mark.parametrize("case", EQUAL)
@pytest.mark.parametrize("layout", SHARED)
def test_operands_are_those_of_one_process(found: Everything, layout: str, case: str) -> None:
    for results in found[layout]:
        assert results[case].different == []
        # Seven linears, three GEMMs, two operands.
        assert results[case].compared == 42 * (6 if case == "fp8_delayed" else 1)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*EQUAL, "bf16"])
@pytest.mark.parametrize("layout", SHARED)
def test_so_results_differ_by_rounding_alone(found: Everything, layout: str, case: str) -> None:
    """Partial sums are rounded to BF16, by 2^-9 at most, and added."""
    for results in found[layout]:
        assert results[case].error < 4 * 2.0**-9


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_keep_the_same_history(found: Everything, layout: str) -> None:
    for results in found[layout]:
        assert results["fp8_delayed"].different == []
        same, count = results["fp8_delayed"].delayed
        assert same and count == 7 * 3 * 2  # linears, roles; a history and a scale


@pytest.mark.slow
@pytest.mark.parametrize("case", EQUAL)
@pytest.mark.parametrize("layout", [layout for layout in SHARED if layout != UNWATCHED])
def test_telemetry_sees_the_whole(found: Everything, layout: str, case: str) -> None:
    for results in found[layout]:
        ours, whole = results[case].statistics
        assert ours is not None and whole is not None and len(ours) == 7 * 3
        for name, expected in whole.items():
            close = pytest.approx(numbers(expected), rel=1e-4, nan_ok=True)
            assert numbers(ours[name]) == close, name


def numbers(statistics: Statistics) -> list[float]:
    return [float("nan") if value is None else value for value in statistics.values()]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["TP2", "TP2 without sequence parallelism"])
def test_te_leaves_out_some_groups(found: Everything, layout: str) -> None:
    """A row-parallel input has a scale of its own on the rank without the largest value, and so has
    a column-parallel output gradient. What every rank has, or gathers, does not."""
    for linear in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "o_proj", "down_proj"):
        divided, whole = ("input", "grad_output")
        if linear in COLUMN_PARALLEL:
            divided, whole = whole, divided
        kinds = {"input": ("fprop", "wgrad"), "grad_output": ("dgrad", "wgrad")}
        for kind in kinds[divided]:
            name = f"{linear} {divided} {kind}"
            results = [rank["as TE groups amaxes"] for rank in found[layout]]
            assert sum(name in result.has_amax for result in results) == 1
            for result in results:
                assert (name in result.different) != (name in result.has_amax)
        for kind in kinds[whole]:
            for rank in found[layout]:
                assert f"{linear} {whole} {kind}" not in rank["as TE groups amaxes"].different


# What a branch's input is gathered in for fprop, and once more for wgrad, where it is not bytes.
IN_BF16 = {case: (torch.bfloat16, None) for case in ("mxfp4", "every role stochastic", "bf16")}
GATHERED = dict.fromkeys(CASES, (torch.uint8, torch.uint8)) | IN_BF16
GATHERED["fp8_rowwise_bf16_wgrad"] = torch.uint8, torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", SHARED)
def test_what_travels(found: Everything, layout: str, case: str) -> None:
    """Inputs of branches as bytes where the recipe allows it, once for all linears that take them;
    partial sums in BF16 or FP32, always."""
    config = configuration(case, layout)
    sizes = Layout.of(config.parallel, LAYOUTS[layout][0])
    hidden = BATCH * config.trainer.sequence_length // sizes.context * config.model.hidden_size
    for results in found[layout]:
        sent = results[case].sent
        gathers = [each for each in sent if "gather" in each.collective]
        sums = [each for each in sent if "gather" not in each.collective]
        assert {each.dtype for each in sums} <= {torch.bfloat16, torch.float32}
        for branch, last in LAST.items():
            partial = [(each.when, each.values) for each in sums if each.dtype == torch.bfloat16]
            ours = [each for each in partial if each[0].startswith((branch, last))]
            if sizes.tensor == 1:
                assert ours == []
                continue
            assert ours == [(f"{branch}.backward", hidden), (f"{last}.forward", hidden)]
            for pass_, dtype in zip(("forward", "backward"), GATHERED[case], strict=True):
                here = [each for each in gathers if each.when == f"{branch}.{pass_}"]
                values = hidden // sizes.tensor // (2 if case == "nvfp4" else 1)
                payloads = [(each.dtype, each.values) for each in here if each.values >= values]
                assert payloads == ([(dtype, values)] if sizes.sequence and dtype else [])
            again = [each for each in gathers if each.when == f"{last}.backward"]
            expected = [(torch.bfloat16, hidden // sizes.tensor)] if sizes.sequence else []
            assert [(each.dtype, each.values) for each in again] == expected
            assert not [each for each in gathers if each.when == f"{last}.forward"]


# --- as training tells it --------------------------------------------------------------------

FIRST = "layers.0.self_attn.q_proj"
SAMPLES = 4
DIVIDED: dict[str, tuple[int, dict[str, Any]]] = {
    "DP2": (2, {}),
    "CP2": (2, {"context": 2}),
    "TP2": (2, {"tensor": 2}),
    "CP2 x DP2": (4, {"context": 2}),
}


def first_input(sizes: dict[str, Any], samples: int) -> tuple[Place, Operand, Operand]:
    """The operands of the first linear's fprop in a step of training; no rounding comes before.

    Block scales, so that a sample's don't depend on which others are beside it.
    """
    config = small(num_layers=1, hidden_size=128, **sizes)
    config.precision = PrecisionConfig(recipe="mxfp8", stochastic_rounding=[*ROLES])
    config.trainer.sequence_length = 128
    config.trainer.micro_batch_size, config.trainer.global_batch_size = samples, SAMPLES
    check(config, torch.distributed.get_world_size())
    parallel = parallelize(config, CPU)
    recorder = Recorder(parallel.numerics()[FIRST].gemms)
    parallel.numerics()[FIRST].gemms = recorder
    learner = Learner(config, CPU, data_of(config), Progress(), parallel)
    learner.step()
    return parallel.mesh.place, *recorder.seen["fprop"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", DIVIDED)
def test_training_draws_the_bits_of_one_process(layout: str) -> None:
    """Each rank is told which rows of the global micro batch it has."""
    ranks, sizes = DIVIDED[layout]
    [(_, input, weight)] = on_ranks(1, first_input, {}, SAMPLES)
    config = small(**sizes)
    divided = Layout.of(config.parallel, ranks)
    for place, our_input, our_weight in on_ranks(
        ranks, first_input, sizes, SAMPLES // divided.data
    ):
        part = Part(divided, place)

        def rows(x: Tensor, part: Part = part) -> Tensor:
            samples = x.view(SAMPLES, -1, x.shape[1])
            return part.tokens(samples.chunk(part.layout.data)[part.place.data]).flatten(0, 1)

        def columns(x: Tensor, part: Part = part) -> Tensor:
            return part.of(FIRST, "weight", x)

        assert equal(our_input, input, rows)
        assert equal(our_weight, weight, columns)
