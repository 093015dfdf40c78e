"""A matrix split over ranks gets the scales and payloads that it has whole, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fp8train.config import FP8_RECIPES, PrecisionConfig
from fp8train.precision.quantize import Payload
from fp8train.precision.quantizers import Position, Rounding, Scaled
from fp8train.precision.recipes import ROLES, DelayedScaling, recipe_of
from fp8train.precision.tensor import QuantizedTensor
from tests.ranks import on_ranks

ROWS, COLUMNS = 256, 512  # a half of either is a multiple of every block
RECIPES = [name for name in FP8_RECIPES if name != "fp8_delayed"]  # its group is roll's


def split(x: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    return x.chunk(2, dim)[rank].contiguous()


def compare() -> dict[str, bool]:
    """For every recipe, role and way to split: whether the parts equal the whole's."""
    torch.manual_seed(0)
    rank, group = dist.get_rank(), dist.group.WORLD
    x = torch.randn(ROWS, COLUMNS) * 2.0 ** torch.randint(-4, 4, (ROWS, 1))
    x[3, 5], x[200, 500] = 77.0, -1000.0  # the amax lies on rank 1, whichever way it is split
    found = {}
    for name in RECIPES:
        recipe = recipe_of(PrecisionConfig(recipe=name))
        assert recipe is not None and not isinstance(recipe, DelayedScaling)
        for role in ROLES:
            rounding = Rounding(role in recipe.stochastic, "layer", role, 7)
            args = (recipe, role, Payload(torch.float32), rounding)
            options: dict[str, Any] = {"rowwise": True, "columnwise": True, "training": True}
            whole = Scaled(*args)(x, **options, position=Position())
            for dim in (0, 1):
                offset = rank * ROWS // 2 if dim == 0 else 0
                if dim == 1 and rounding.stochastic:
                    continue  # the draws of a column shard are for who splits columns
                position = Position(row_offset=offset)
                # A copy's blocks that span the split dimension are shared with the other rank.
                shared = [spans(g, dim) or name == "nvfp4" for g in recipe.granularity(role)]
                groups = tuple(group if s else None for s in shared)
                parts = Scaled(*args, groups=groups)(
                    split(x, dim, rank), **options, position=position
                )
                for copy, (ours, theirs) in enumerate(zip(parts, whole, strict=True)):
                    found[f"{name} {role} {dim} {copy}"] = same(ours, theirs, dim, rank)
    return found


def spans(granularity: Any, dim: int) -> bool:
    return (granularity.rows, granularity.columns)[dim] is None


def same(ours: Any, theirs: Any, dim: int, rank: int) -> bool:
    if not isinstance(ours, QuantizedTensor):
        return torch.equal(ours, split(theirs, dim, rank))
    equal = torch.equal(ours.payload, split(theirs.payload, dim, rank))
    scales = theirs.scale_inv
    if scales.shape[dim] > 1:
        scales = split(scales, dim, rank)
    if theirs.tensor_scale_inv is not None:
        equal &= torch.equal(ours.tensor_scale_inv, theirs.tensor_scale_inv)
    return equal and torch.equal(ours.scale_inv, scales)


@pytest.mark.slow
def test_parts_equal_the_whole(tmp_path: Path) -> None:
    for found in on_ranks(2, tmp_path, compare):
        assert found
        assert [name for name, equal in found.items() if not equal] == []
