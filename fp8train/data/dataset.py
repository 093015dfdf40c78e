"""Prepare the token arrays of a run: tokenise once, cache on disk, memory-map ever after."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from fp8train.config import ConfigError, DataConfig
from fp8train.data import packing, tokenizer
from fp8train.data.source import Source, open_source

logger = logging.getLogger(__name__)

FORMAT = 1  # raise it when the same sources would give other tokens or other files


@dataclass(frozen=True)
class PreparedData:
    """The tokens of a run, memory-mapped and read-only."""

    train: npt.NDArray[Any]  # [tokens] uint16 or uint32
    validation: npt.NDArray[Any]  # [tokens] uint16 or uint32
    tokenizer_name: str  # data.tokenizer
    vocab_size: int  # largest id + 1
    eos_id: int
    content_hash: str  # sha256 over both arrays
    train_documents: int
    validation_documents: int
    folder: Path  # holds tokenizer.json too, unless the tokens are bytes

    @property
    def train_tokens(self) -> int:
        return len(self.train)

    @property
    def validation_tokens(self) -> int:
        return len(self.validation)


def prepare(data: DataConfig, sequence_length: int) -> PreparedData:
    """Tokens of the configured text, from the cache or by making them.

    Any number of processes of a node may call this at once: one does the work, the others wait
    for it on a file lock. No process group is used or needed.

    Args:
        sequence_length: tokens a sample; each split must hold at least one sample.
    Raises:
        ConfigError: the source, the tokenizer or the cache folder can't be used, or the text is
            shorter than one sample.
    """
    source = open_source(data)
    decides = {
        "format": FORMAT,
        "source": source.identity,
        "tokenizer": tokenizer.identity(data),
        "validation_fraction": data.validation_fraction,
    }
    key = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:24]
    cache = Path(os.path.expanduser(data.cache_dir))
    folder = cache / key
    prepared = _load(folder, data)
    if prepared is None:
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with FileLock(cache / f"{key}.lock"):
                prepared = _load(folder, data)  # another process may have been first
                if prepared is None:
                    _build(folder, source, data, sequence_length)
                    prepared = _load(folder, data)
        except OSError as error:
            raise ConfigError(
                f"data.cache_dir={data.cache_dir} can't be used ({error.strerror or error}): "
                "choose a folder that can be written and has room"
            ) from error
        assert prepared is not None
    _check_lengths(
        source.label, data, prepared.train_tokens, prepared.validation_tokens, sequence_length
    )
    return prepared


def _load(folder: Path, data: DataConfig) -> PreparedData | None:
    """What the folder holds; None where there is nothing, or nothing whole.

    A truncated array is noticed too: numpy does not map a file shorter than its header says.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text())
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in packing.SPLITS}
        return PreparedData(
            train=arrays["train"],
            validation=arrays["validation"],
            tokenizer_name=data.tokenizer,
            vocab_size=meta["vocab_size"],
            eos_id=meta["eos_id"],
            content_hash=meta["content_hash"],
            train_documents=meta["train_documents"],
            validation_documents=meta["validation_documents"],
            folder=folder,
        )
    except (OSError, ValueError, KeyError):
        return None


def _build(folder: Path, source: Source, data: DataConfig, sequence_length: int) -> None:
    """Make the folder; it appears under its name only when it is complete."""
    started = time.monotonic()
    logger.info("data: tokenising %s (tokenizer %s)", source.label, data.tokenizer)
    partial = folder.with_name(f"{folder.name}.partial")  # one left by a killed run goes first
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        training_texts = (
            text
            for name, text in packing.split(source.documents(), data.validation_fraction)
            if name == "train"
        )
        encoder = tokenizer.load(data, training_texts)
        parts = packing.split(source.documents(), data.validation_fraction)
        files = packing.pack(parts, encoder, partial)
        train, validation = files["train"], files["validation"]
        _check_lengths(source.label, data, train.tokens, validation.tokens, sequence_length)
        encoder.save(partial)
        digests = [train.dtype.str, train.digest.hexdigest(), validation.digest.hexdigest()]
        meta = {
            "source": source.label,
            "tokenizer": data.tokenizer,
            "vocab_size": encoder.vocab_size,
            "eos_id": encoder.eos_id,
            "content_hash": hashlib.sha256(" ".join(digests).encode()).hexdigest(),
            "train_tokens": train.tokens,
            "train_documents": train.documents,
            "validation_tokens": validation.tokens,
            "validation_documents": validation.documents,
        }
        (partial / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        shutil.rmtree(folder, ignore_errors=True)  # a damaged one, or `_load` had found it
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    logger.info(
        "data: %d training and %d validation tokens in %.1f s, cached in %s",
        train.tokens,
        validation.tokens,
        time.monotonic() - started,
        folder,
    )


def _check_lengths(
    label: str, data: DataConfig, train: int, validation: int, sequence_length: int
) -> None:
    """Each split must hold one sample: sequence_length tokens and the target of the last."""
    if train + validation == 0:
        raise ConfigError(f"{label} holds no text: give a source with text in it")
    needed = sequence_length + 1
    if train < needed:
        raise ConfigError(
            f"{label} gives {train} training tokens, but one sample of "
            f"trainer.sequence_length={sequence_length} needs {needed}: "
            "give more text or lower trainer.sequence_length"
        )
    if validation < needed:
        raise ConfigError(
            f"{label} gives {validation} validation tokens, but one sample of "
            f"trainer.sequence_length={sequence_length} needs {needed}: give more text, raise "
            f"data.validation_fraction={data.validation_fraction:g}, or lower "
            "trainer.sequence_length"
        )
