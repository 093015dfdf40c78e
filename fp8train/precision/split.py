"""How ranks share one matrix of a linear, so that each quantises its part as the whole would be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch.distributed as dist

from fp8train.precision.tensor import Granularity


@dataclass(frozen=True)
class Split:
    """This rank's part of a matrix [rows, columns] whose rows and columns ranks divide.

    Blocks of fixed size must not straddle parts: each extent is a multiple of the block.

    Attributes:
        rows: the ranks that hold the other rows of these columns; None where all rows are here.
        columns: the ranks that hold the other columns of these rows; None where all are here.
        both: the ranks that hold any part; left out, it is the one of the above that is given.
        row_offset, column_offset: where the part begins. The row offset is a weight's: rows of
            input and grad_output have the numbers that `Position` gives.
        sequence_part: (index, count): of those numbers [B, T] this rank has that one of `count`
            equal parts of T, as under sequence parallelism.
    Raises:
        ValueError: rows and columns are both divided and `both` is missing.
    """

    rows: dist.ProcessGroup | None = None
    columns: dist.ProcessGroup | None = None
    both: dist.ProcessGroup | None = None
    row_offset: int = 0
    column_offset: int = 0
    sequence_part: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        if self.both is None:
            if self.rows is not None and self.columns is not None:
                raise ValueError("a matrix divided both ways needs the group `both` of all parts")
            object.__setattr__(self, "both", self.columns if self.rows is None else self.rows)

    def sharing(self, granularity: Granularity) -> dist.ProcessGroup | None:
        """The ranks whose parts share this rank's scales; None for this rank alone."""
        if granularity.is_whole:
            return self.both
        if granularity.rows is None:
            return self.rows
        return self.columns if granularity.columns is None else None

    def without_groups(self) -> Split:
        """Scales of this rank's part alone; stochastic rounding still draws as the whole does."""
        return replace(self, rows=None, columns=None, both=None)


WHOLE = Split()
Splits = Mapping[str, Mapping[str, Split]]  # layer → role → split; what is missing is whole
