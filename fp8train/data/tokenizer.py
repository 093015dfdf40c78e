"""Text to token ids: bytes, a byte-level BPE of one's own, or an existing tokenizer.json."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from fp8train.config import ConfigError, DataConfig
from fp8train.data.hub import first_line, use_cache_if_unreachable

EOS_TOKENS = ("<|end_of_text|>", "</s>", "<|endoftext|>", "<eos>")
BPE_TRAINING_CHARACTERS = 200_000_000  # more text changes few merges and costs memory
PIECE_CHARACTERS = 1_000_000

Tokens = npt.NDArray[np.uint32] | npt.NDArray[np.uint16]


class Tokenizer(Protocol):
    """What packing needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Largest id + 1."""
        ...

    @property
    def eos_id(self) -> int:
        """The id that ends every document."""
        ...

    def encode(self, texts: list[str], dtype: npt.DTypeLike) -> Iterator[Tokens]:
        """Token ids of each text, EOS included, as one array [tokens] a text."""
        ...

    def save(self, folder: Path) -> None:
        """Write what is needed to decode the tokens again."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a document."""

    vocab_size: int = 257
    eos_id: int = 256

    def encode(self, texts: list[str], dtype: npt.DTypeLike) -> Iterator[Tokens]:
        for text in texts:
            content = text.encode()
            tokens = np.empty(len(content) + 1, dtype)
            tokens[:-1] = np.frombuffer(content, np.uint8)
            tokens[-1] = self.eos_id
            yield tokens

    def save(self, folder: Path) -> None:
        """Nothing to write: the ids are the bytes."""


class SubwordTokenizer:
    """A tokenizer of the `tokenizers` library.

    Text is text: a literal `</s>` inside a document does not become the special token, and
    no template adds tokens of its own.
    """

    def __init__(self, tokenizer: Any, label: str) -> None:
        eos_ids = [tokenizer.token_to_id(token) for token in EOS_TOKENS]
        eos_id = next((token for token in eos_ids if token is not None), None)
        if eos_id is None:
            raise ConfigError(
                f"{label} has no end-of-text token: its vocabulary needs one of "
                f"{', '.join(EOS_TOKENS)}"
            )
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self.eos_id: int = eos_id
        self.vocab_size: int = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, texts: list[str], dtype: npt.DTypeLike) -> Iterator[Tokens]:
        pieces = [list(_pieces(text)) for text in texts]
        flat = [piece for text in pieces for piece in text]
        encodings = iter(self._tokenizer.encode_batch_fast(flat, add_special_tokens=False))
        for text in pieces:
            parts = [np.array(next(encodings).ids, dtype) for _ in text]
            yield np.concatenate([*parts, np.array([self.eos_id], dtype)])

    def save(self, folder: Path) -> None:
        self._tokenizer.save(str(folder / "tokenizer.json"))


def identity(data: DataConfig) -> list[Any]:
    """Everything that decides the tokenizer, given the training text; JSON.

    Raises:
        ConfigError: `data.tokenizer` is a path without a readable tokenizer.json.
    """
    if data.tokenizer == "bytes":
        return ["bytes"]
    if data.tokenizer == "bpe":
        return ["bpe", data.bpe_vocab_size]
    path = _file(data)
    if path is None:
        return ["hub", data.tokenizer]
    try:
        return ["file", hashlib.sha256(path.read_bytes()).hexdigest()]
    except OSError as error:
        raise ConfigError(
            f"data.tokenizer={data.tokenizer} can't be read ({error.strerror}): "
            "give a tokenizer.json or a folder that holds one"
        ) from error


def load(data: DataConfig, training_texts: Iterable[str]) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names.

    Args:
        training_texts: what a BPE is trained on; read for `data.tokenizer=bpe` only.
    Raises:
        ConfigError: it can't be found or read, or has no end-of-text token.
    """
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    label = f"data.tokenizer={data.tokenizer}"
    # Said aloud, it keeps the library quiet in processes that fork later.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if data.tokenizer == "bpe":
        return SubwordTokenizer(_train_bpe(training_texts, data.bpe_vocab_size), label)
    path = _file(data)
    if path is None:
        use_cache_if_unreachable()
    import tokenizers

    try:
        if path is None:
            tokenizer = tokenizers.Tokenizer.from_pretrained(data.tokenizer)
        else:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        where = "no such path here, and not to be had from the hub" if path is None else str(path)
        raise ConfigError(
            f"{label} can't be loaded: {where} ({first_line(error)}); "
            "use bytes, bpe, or the path of a tokenizer.json"
        ) from error
    return SubwordTokenizer(tokenizer, label)


def _file(data: DataConfig) -> Path | None:
    """The tokenizer.json that `data.tokenizer` points at; None: it is a name of the hub."""
    path = Path(os.path.expanduser(data.tokenizer))
    if os.path.isdir(path):
        path = path / "tokenizer.json"
        if not os.path.isfile(path):
            raise ConfigError(
                f"data.tokenizer={data.tokenizer} is a folder without tokenizer.json: "
                "put one there, or use bytes or bpe"
            )
    elif not os.path.exists(path):
        if not data.tokenizer.startswith(("/", "./", "../", "~")) and path.suffix != ".json":
            return None
        raise ConfigError(
            f"data.tokenizer={data.tokenizer} does not exist: "
            "use bytes, bpe, a hub name, or the path of a tokenizer.json"
        )
    return path


def _train_bpe(texts: Iterable[str], vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKENS[0]],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_characters(texts, BPE_TRAINING_CHARACTERS), trainer)
    return tokenizer


def _first_characters(texts: Iterable[str], limit: int) -> Iterator[str]:
    for text in texts:
        for piece in _pieces(text):
            yield piece
            limit -= len(piece)
            if limit <= 0:
                return


def _pieces(text: str) -> Iterator[str]:
    """A long text in parts cut after line ends: encoding takes many bytes a character."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end = text.rfind("\n", start, start + PIECE_CHARACTERS) + 1 or start + PIECE_CHARACTERS
        yield text[start:end]
        start = end
    yield text[start:]
