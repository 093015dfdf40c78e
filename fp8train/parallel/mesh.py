"""The ranks as a mesh: who shares what with whom."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fp8train.layout import SIZES, Layout, Place


@dataclass(frozen=True)
class Mesh:
    """This rank's meshes and groups; of size 1 where a dimension is not used.

    Attributes:
        layout: the sizes.
        place: this rank's coordinates.
        fsdp: [shard · context] ranks that parameters are divided over.
        replicas: ranks that hold copies of this rank's shards.
        tensor: ranks that share each matrix.
        pipeline: ranks of the other stages, in order.
        context: ranks that share a sequence.
        rows: context and tensor ranks together: those that share a micro batch's tokens.
        stage: ranks that hold pieces of the same blocks.
    """

    layout: Layout
    place: Place
    fsdp: DeviceMesh
    replicas: dist.ProcessGroup
    tensor: DeviceMesh
    pipeline: dist.ProcessGroup
    context: dist.ProcessGroup
    rows: dist.ProcessGroup
    stage: dist.ProcessGroup

    @classmethod
    def of(cls, layout: Layout, device: torch.device) -> Mesh:
        """Divide the default process group; every rank calls it."""
        sizes = tuple(getattr(layout, name) for name in SIZES)
        ranks = init_device_mesh(device.type, sizes, mesh_dim_names=SIZES)
        stage = ranks["replicate", "shard", "context", "tensor"]._flatten("stage")
        return cls(
            layout,
            layout.place(dist.get_rank()),
            ranks["shard", "context"]._flatten("shard_context"),
            ranks["replicate"].get_group(),
            ranks["tensor"],
            ranks["pipeline"].get_group(),
            ranks["context"].get_group(),
            ranks["context", "tensor"]._flatten("rows").get_group(),
            stage.get_group(),
        )
