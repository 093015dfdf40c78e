"""Tensors on disk by torch.distributed.checkpoint, without a pickle to load.

DCP pickles its metadata, and reading a pickle runs what it says. Here the metadata are JSON, held
to a schema, and there is nothing but tensors, whose bytes are read with `weights_only=True`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,  # what `FileSystemReader.read_data` takes
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

METADATA = "tensors.json"


class Damaged(Exception):
    """A checkpoint that is not what was written; one line says where."""


def write_tensors(
    folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Write tensors, or this rank's pieces of them, and have them on disk. Every rank of the group
    calls it, with names of its own for what only it has.

    Raises:
        CheckpointException: on every rank, if one of them fails.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(dict(tensors), storage_writer=Writer(folder), planner=planner, process_group=group)


def read_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors, or this rank's pieces of them, from a folder, in any layout. Every rank calls
    it.

    Raises:
        CheckpointException: a name is not there, has another size, or can't be read.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    dcp.load(dict(tensors), storage_reader=Reader(folder), planner=planner)


def shapes(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Global size and type of each tensor in a folder, by name.

    Raises:
        Damaged: the metadata are not there or make no sense.
    """
    found = {}
    for name, entry in Reader(folder).read_metadata().state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        found[name] = entry.size, entry.properties.dtype
    return found


def files(folder: Path) -> set[str]:
    """Names of the files that tensors are in, and of the metadata.

    Raises:
        Damaged: the metadata are not there or make no sense.
    """
    places = Reader(folder).read_metadata().storage_data
    return {METADATA, *(place.relative_path for place in places.values())}


class Writer(FileSystemWriter):
    """DCP's writer, with metadata as JSON."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, on the coordinator alone, after all ranks' files."""
        places = {result.index: result.storage_data for part in results for result in part}
        tensors = {}
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise TypeError(f"{name} is not a tensor, and a checkpoint keeps nothing else")
            tensors[name] = {
                "dtype": str(entry.properties.dtype).removeprefix("torch."),
                "size": list(entry.size),
                "chunks": [_chunk(name, chunk, places) for chunk in entry.chunks],
            }
        with (Path(self.path) / METADATA).open("w", encoding="utf-8") as file:
            json.dump(tensors, file)
            file.flush()
            os.fsync(file.fileno())


def _chunk(
    name: str, chunk: ChunkStorageMetadata, places: dict[MetadataIndex, _StorageInfo]
) -> dict[str, Any]:
    place = places[MetadataIndex(name, chunk.offsets)]
    return {
        "offsets": list(chunk.offsets),
        "sizes": list(chunk.sizes),
        "file": place.relative_path,
        "position": place.offset,
        "length": place.length,
    }


class Reader(FileSystemReader):
    """DCP's reader of what `Writer` has written."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata.

        Raises:
            Damaged: they are not there or make no sense.
        """
        path = Path(self.path) / METADATA
        try:
            written = json.loads(path.read_text(encoding="utf-8"))
            tensors, places = _parse(written)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise Damaged(f"{path.name} can't be read: {reason}") from error
        return Metadata(tensors, storage_data=places, storage_meta=StorageMeta())


def _parse(
    written: dict[str, Any],
) -> tuple[dict[str, Any], dict[MetadataIndex, _StorageInfo]]:
    tensors: dict[str, Any] = {}
    places = {}
    for name, entry in written.items():
        dtype = getattr(torch, entry["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name} has no type {entry['dtype']}")
        chunks = []
        for chunk in entry["chunks"]:
            file = chunk["file"]
            if Path(file).name != file or file == "..":
                raise ValueError(f"{name} is in {file}, which is outside of the folder")
            chunks.append(
                ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"]))
            )
            index = MetadataIndex(name, chunk["offsets"])
            places[index] = _StorageInfo(file, chunk["position"], chunk["length"])
        size = torch.Size(entry["size"])
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)
    return tensors, places
