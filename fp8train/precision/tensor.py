"""A quantized tensor: values on a format's grid, and the scales that bring them back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fp8train.config import ConfigError
from fp8train.precision.formats import BY_NAME, Format, cast, decode


@dataclass(frozen=True)
class Granularity:
    """The shape that shares one scale: rows × columns, None for all of them."""

    rows: int | None
    columns: int | None

    def __str__(self) -> str:
        named = {(None, None): "tensor", (1, None): "row", (None, 1): "column"}
        return named.get((self.rows, self.columns), f"{self.rows}x{self.columns}")

    @property
    def is_whole(self) -> bool:
        """One scale for all of it."""
        return self.rows is None and self.columns is None

    @property
    def is_block(self) -> bool:
        """Blocks of fixed size in both directions."""
        return self.rows is not None and self.columns is not None

    def block(self, rows: int, columns: int) -> tuple[int, int]:
        """Its size within a matrix of rows × columns; at least 1×1."""
        return self.rows or max(rows, 1), self.columns or max(columns, 1)

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the scales of a matrix of rows × columns."""
        r, c = self.block(rows, columns)
        return max(1, -(-rows // r)), max(1, -(-columns // c))


TENSOR = Granularity(None, None)
ROW = Granularity(1, None)
COLUMN = Granularity(None, 1)


@dataclass
class QuantizedTensor:
    """payload · scale_inv (· tensor_scale_inv) stands for the original matrix.

    Attributes:
        payload: [rows, columns], values of the format, held in BF16 or FP32, where they are exact,
            or in the format's own dtype.
        scale_inv: FP32, one for each block: `granularity.grid(rows, columns)`.
        fmt: the format of the payload.
        granularity: the shape of a block.
        tensor_scale_inv: FP32 scalar over all blocks (NVFP4's second level); None for 1.
        folded: the payload is multiplied by scale_inv already, ready for a plain GEMM.
    """

    payload: Tensor
    scale_inv: Tensor
    fmt: Format
    granularity: Granularity
    tensor_scale_inv: Tensor | None = None
    folded: bool = False

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values it stands for, [rows, columns], multiplied in FP32 and rounded to dtype."""
        values = self.payload.float()
        if not self.folded:
            values = values * self.expanded_scale_inv()
        if self.tensor_scale_inv is not None:
            values = values * self.tensor_scale_inv
        return values.to(dtype)

    def expanded_scale_inv(self) -> Tensor:
        """scale_inv in a shape that multiplies the payload."""
        return spread(self.scale_inv, self.granularity, *self.payload.shape)

    def grid_values(self) -> Tensor:
        """The payload on the format's grid in FP32, without any scale."""
        if not self.folded:
            return self.payload.float()
        scale_inv = self.expanded_scale_inv()
        return torch.where(scale_inv == 0, 0.0, self.payload.float() / scale_inv)

    def save(self, path: Path) -> None:
        """Write a safetensors file: the payload in its real bytes, the scales in FP32."""
        codes_a_byte = 8 // self.fmt.bits
        whole_bytes = F.pad(self.grid_values(), (0, -self.payload.shape[1] % codes_a_byte))
        tensors = {"payload": cast(whole_bytes, self.fmt), "scale_inv": self.scale_inv}
        if tensors["payload"].dtype not in SAFETENSORS:
            tensors["payload"] = tensors["payload"].view(torch.uint8)
        if self.tensor_scale_inv is not None:
            tensors["tensor_scale_inv"] = self.tensor_scale_inv
        about = {
            "format": self.fmt.name.lower(),
            "granularity": [self.granularity.rows, self.granularity.columns],
            "shape": list(self.payload.shape),
        }
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            path,
            {"quantized_tensor": json.dumps(about)},
        )

    @classmethod
    def load(cls, path: Path) -> QuantizedTensor:
        """Read what `save` wrote; the payload is in FP32.

        Raises:
            ConfigError: the file holds something else.
        """
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {}).get("quantized_tensor", "null"))
            if about is None:
                raise ConfigError(
                    f"{path} holds no quantized tensor: give a file that `save` wrote"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        fmt = BY_NAME[about["format"]]
        stored = tensors["payload"]
        if fmt.dtype is not None:
            stored = stored.view(fmt.dtype)
        return cls(
            decode(stored, fmt)[:, : about["shape"][1]].contiguous(),
            tensors["scale_inv"],
            fmt,
            Granularity(*about["granularity"]),
            tensors.get("tensor_scale_inv"),
        )


# What safetensors has a name for; the rest travels as plain bytes.
SAFETENSORS = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


def spread(per_block: Tensor, granularity: Granularity, rows: int, columns: int) -> Tensor:
    """One value a block → one that multiplies a matrix of rows × columns.

    A dimension with one block stays of size 1, for broadcasting.
    """
    for dim, (size, block) in enumerate(
        zip((rows, columns), granularity.block(rows, columns), strict=True)
    ):
        if per_block.shape[dim] > 1:
            per_block = per_block.repeat_interleave(block, dim).narrow(dim, 0, size)
    return per_block
