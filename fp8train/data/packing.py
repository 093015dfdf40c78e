"""Documents to two flat token arrays on disk, one for training and one for validation."""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from fp8train.data.tokenizer import Tokenizer, Tokens

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation")
FEW_DOCUMENTS = 20
BATCH_CHARACTERS = 4_000_000
SECONDS_BETWEEN_LINES = 30.0


def held_out(text: str, fraction: float) -> bool:
    """Whether a document belongs to validation: a pure function of its text."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def split(documents: Iterable[str], fraction: float) -> Iterator[tuple[str, str]]:
    """Assign documents to "train" or "validation", in order.

    Each document goes where `held_out` says. Of fewer than 20 documents a hash would hold out
    nothing or half, so there the last `fraction` of the text is held out, cutting one document.

    Yields:
        (split, text)
    """
    documents = iter(documents)
    first = list(itertools.islice(documents, FEW_DOCUMENTS))
    if len(first) == FEW_DOCUMENTS:
        for text in itertools.chain(first, documents):
            yield ("validation" if held_out(text, fraction) else "train"), text
        return
    left = round(sum(map(len, first)) * (1 - fraction))  # characters still to train on
    for text in first:
        for name, part in zip(SPLITS, (text[:left], text[left:]), strict=True):
            if part:
                yield name, part
        left = max(0, left - len(text))


class TokenFile:
    """A one-dimensional .npy file written piece by piece, with the hash of its tokens."""

    def __init__(self, path: Path, dtype: npt.DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self.tokens = 0
        self.documents = 0
        self.digest = hashlib.sha256()
        self._file = path.open("wb")
        self._write_header()

    def append(self, tokens: Tokens) -> None:
        """Add one document's tokens [n] of the file's dtype."""
        content = tokens.tobytes()
        self._file.write(content)
        self.digest.update(content)
        self.tokens += len(tokens)
        self.documents += 1

    def _write_header(self) -> None:
        # numpy pads the header for the longest length, so it can be written again in place.
        header = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": (self.tokens,),
        }
        self._file.seek(0)
        np.lib.format.write_array_header_1_0(self._file, header)

    def __enter__(self) -> TokenFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._file:
            self._write_header()


def pack(
    parts: Iterable[tuple[str, str]], tokenizer: Tokenizer, folder: Path
) -> dict[str, TokenFile]:
    """Tokenise (split, text) pairs into `train.npy` and `validation.npy`.

    Every document ends with the tokenizer's EOS. uint16 where the vocabulary fits, else uint32.

    Returns:
        the two closed files by split, with their counts and hashes.
    """
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    last_line = time.monotonic()
    with (
        TokenFile(folder / "train.npy", dtype) as train,
        TokenFile(folder / "validation.npy", dtype) as validation,
    ):
        files = {"train": train, "validation": validation}
        for batch in _batches(parts):
            encoded = tokenizer.encode([text for _, text in batch], dtype)
            for (name, _), tokens in zip(batch, encoded, strict=True):
                files[name].append(tokens)
            if time.monotonic() - last_line > SECONDS_BETWEEN_LINES:
                last_line = time.monotonic()
                logger.info("data: %.0f M tokens", (train.tokens + validation.tokens) / 1e6)
    return files


def _batches(parts: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Consecutive parts, gathered until a batch holds enough text."""
    batch: list[tuple[str, str]] = []
    characters = 0
    for part in parts:
        batch.append(part)
        characters += len(part[1])
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
