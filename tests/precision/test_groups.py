"""A matrix that ranks share gets, part by part, the scales and values that it has whole, bit for
bit; and so do its stochastic draws."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8train.config import RECIPES, ROLES, PrecisionConfig
from fp8train.precision.convert import Conversion, convert
from fp8train.precision.kernels import cpu_kernels
from fp8train.precision.linear import QuantizedLinear
from fp8train.precision.quantizers import Operand
from fp8train.precision.split import WHOLE, Split
from fp8train.precision.tensor import COLUMN, ROW, TENSOR, Granularity, QuantizedTensor
from tests.ranks import on_ranks

BLOCKS = {"fp8_block": 128, "nvfp4": 16}  # of the other recipes at most 32
OUTLIER = -1000.0
FORMS = {"kernels": nullcontext(), "plain": mock.patch.object(cpu_kernels, "library", lambda: None)}


@dataclass
class Part:
    """What one rank has of a matrix.

    Attributes:
        split: as the quantisers are told.
        numbers: [B, T] of its tokens, as `Position` is told.
        rows, columns: which of the whole's it has.
    """

    split: Split
    numbers: Tensor
    rows: Tensor
    columns: slice

    def of(self, x: Tensor) -> Tensor:
        return x[self.rows, self.columns].contiguous()


def groups_of_two() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Of four ranks (first, second) as 2×2: those with this rank's first, those with its second."""
    first, second = divmod(dist.get_rank(), 2)
    same_first = [dist.new_group([0, 1]), dist.new_group([2, 3])][first]
    same_second = [dist.new_group([0, 2]), dist.new_group([1, 3])][second]
    return same_first, same_second


def ways_to_divide(
    block: int, same_first: dist.ProcessGroup, same_second: dist.ProcessGroup
) -> dict[str, Part]:
    """What this rank, of four, has of a matrix [2 · 4 · block, 2 · block], two samples."""
    rank, world = dist.get_rank(), dist.group.WORLD
    first, second = divmod(rank, 2)
    tokens = torch.arange(2 * 4 * block).view(2, 4 * block)
    every, all_columns = tokens.flatten(), slice(None)
    columns = slice(second * block, (second + 1) * block)
    quarter, half, chunks = every.chunk(4)[rank], every.chunk(2)[first], tokens.chunk(4, dim=1)
    context = torch.cat((chunks[first], chunks[3 - first]), dim=1)
    sequence = context.chunk(2, dim=1)[second].flatten()
    splits = {
        "rows": Split(rows=world, row_offset=int(quarter[0])),
        "columns": Split(columns=same_first, column_offset=columns.start),
        "both": Split(same_second, same_first, world, int(half[0]), columns.start),
        "context": Split(rows=same_second),
        "sequence": Split(rows=world, sequence_part=(second, 2)),
    }
    return {
        "rows": Part(splits["rows"], quarter[None], quarter, all_columns),
        "columns": Part(splits["columns"], tokens, every, columns),
        "both": Part(splits["both"], half[None], half, columns),
        "context": Part(splits["context"], context, context.flatten(), all_columns),
        "sequence": Part(splits["sequence"], context, sequence, all_columns),
    }


def values(block: int) -> Tensor:
    """Rows of all sizes, and one large value that some ranks have."""
    torch.manual_seed(0)
    x = torch.randn(8 * block, 2 * block) * 2.0 ** torch.randint(-4, 4, (8 * block, 1))
    x[7 * block + 1, block + 1] = OUTLIER
    return x


def recipe(name: str, **options: Any) -> PrecisionConfig:
    return PrecisionConfig(recipe=name, include=["*"], **options)


def converted(
    precision: PrecisionConfig, role: str, split: Split
) -> tuple[QuantizedLinear, Conversion]:
    mlp = nn.ModuleDict({"down_proj": nn.Linear(8, 8, bias=False)})
    model, splits = nn.ModuleDict({"mlp": mlp}), {"mlp.down_proj": {role: split}}
    conversion = convert(model, precision, torch.device("cpu"), seed=7, splits=splits)
    layer = mlp["down_proj"]
    assert isinstance(layer, QuantizedLinear)
    return layer, conversion


def operands(
    precision: PrecisionConfig, role: str, x: Tensor, split: Split, numbers: Tensor | None
) -> tuple[Operand | None, Operand | None]:
    """Both copies; under delayed scaling those of the second step, with the first's amaxes."""
    layer, conversion = converted(precision, role, split)
    for step in range(2 if conversion.delayed else 1):
        conversion.begin_micro_batch(step, 5 + step, numbers)
        copies = layer.numerics.quantize(
            role, x, rowwise=True, columnwise=True, training=True, position=conversion.position
        )
        conversion.end_step(split.both)
    return copies


def levels(x: Tensor, split: Split) -> Tensor:
    layer, _ = converted(recipe("fp8_current", smooth_swiglu=True), "input", split)
    assert layer.smooth is not None
    return layer.smooth.levels(x)


def same(ours: Operand | None, whole: Operand | None, part: Part) -> bool:
    if isinstance(ours, Tensor) and isinstance(whole, Tensor):
        return torch.equal(ours, part.of(whole))
    assert isinstance(ours, QuantizedTensor) and isinstance(whole, QuantizedTensor)
    assert ours.folded == whole.folded
    equal = torch.equal(ours.payload, part.of(whole.payload))
    equal &= torch.equal(scales(ours), part.of(scales(whole)))
    if whole.tensor_scale_inv is not None:
        assert ours.tensor_scale_inv is not None
        equal &= torch.equal(ours.tensor_scale_inv, whole.tensor_scale_inv)
    return equal


def scales(operand: QuantizedTensor) -> Tensor:
    """One for each value."""
    return operand.expanded_scale_inv().expand(operand.payload.shape)


def cases() -> Iterator[tuple[str, str, PrecisionConfig]]:
    """Every recipe with nearest and with stochastic rounding, and every role."""
    for name in RECIPES:
        for rounding, roles in (("nearest", []), ("stochastic", list(ROLES))):
            for role in ROLES:
                yield f"{name} {rounding}", role, recipe(name, stochastic_rounding=roles)


def compare() -> dict[str, bool]:
    """Whether this rank's part equals the whole's, for every case, way to divide and form."""
    found, groups = {}, groups_of_two()
    for case, role, precision in cases():
        block = BLOCKS.get(precision.recipe, 32)
        x = values(block)
        whole = operands(precision, role, x, WHOLE, None)
        for way, part in ways_to_divide(block, *groups).items():
            if role == "weight" and way in ("context", "sequence"):  # those divide tokens
                continue
            for form, chosen in FORMS.items():
                with chosen:
                    parts = operands(precision, role, part.of(x), part.split, part.numbers)
                for copy in (0, 1):
                    found[f"{case} {role} {way} {form} {copy}"] = same(
                        parts[copy], whole[copy], part
                    )
    x = values(32)
    for way, part in ways_to_divide(32, *groups).items():
        own, level = part.of(x), levels(x, WHOLE)
        found[f"levels {way}"] = torch.equal(levels(own, part.split), level[part.columns])
        # With a scale of its own a part is another matrix, unless it has the largest value.
        case = recipe("fp8_current"), "input"
        apart = operands(*case, own, part.split.without_groups(), part.numbers)[0]
        equal = same(apart, operands(*case, x, WHOLE, None)[0], part)
        found[f"apart {way}"] = equal == bool((own == OUTLIER).any())
    return found


@pytest.mark.slow
def test_parts_equal_the_whole(tmp_path: Path) -> None:
    for found in on_ranks(4, compare):
        assert len(found) > 800
        assert [name for name, equal in found.items() if not equal] == []


def test_who_shares_a_scale() -> None:
    rows, columns, both = (mock.create_autospec(dist.ProcessGroup) for _ in range(3))
    for granularity, expected in (
        (TENSOR, (rows, columns, both)),
        (COLUMN, (rows, None, rows)),
        (ROW, (None, columns, columns)),
        (Granularity(16, 16), (None, None, None)),
    ):
        splits = Split(rows=rows), Split(columns=columns), Split(rows, columns, both)
        for split, group in zip(splits, expected, strict=True):
            assert split.sharing(granularity) is group
            assert split.without_groups().sharing(granularity) is None
    with pytest.raises(ValueError, match="needs the group `both`"):
        Split(rows, columns)
