"""Bytes, a BPE trained here, and tokenizers from files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from fp8train.config import ConfigError, DataConfig
from fp8train.data import tokenizer

Make = Callable[..., DataConfig]


def save_words(folder: Path, eos: str) -> Path:
    """A word-level tokenizer.json with a template, truncation and padding switched on."""
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, eos: 70_000}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([eos])
    words.post_processor = processors.TemplateProcessing("$A " + eos, special_tokens=[(eos, 70000)])
    words.enable_truncation(2)
    words.enable_padding(length=8)
    folder.mkdir(exist_ok=True)
    words.save(str(folder / "tokenizer.json"))
    return folder


def test_bytes() -> None:
    encoder = tokenizer.load(DataConfig(tokenizer="bytes"), [])
    (tokens,) = encoder.encode(["é"], np.uint16)
    assert tokens.tolist() == [0xC3, 0xA9, 256]
    assert tokens.dtype == np.uint16
    assert (encoder.vocab_size, encoder.eos_id) == (257, 256)


def test_bpe_gives_back_any_text(documents: list[str]) -> None:
    encoder = tokenizer.load(DataConfig(tokenizer="bpe", bpe_vocab_size=300), documents)
    assert encoder.vocab_size == 300
    text = "  tabs\tand 日本 \r\n <|end_of_text|> \x00"
    known, unknown = encoder.encode([documents[3], text], np.uint16)
    assert len(known) < len(documents[3].encode())
    assert known[-1] == unknown[-1] == encoder.eos_id
    assert encoder.eos_id not in unknown[:-1]  # a literal one in a text is text
    assert isinstance(encoder, tokenizer.SubwordTokenizer)
    assert encoder._tokenizer.decode(unknown[:-1].tolist()) == text


def test_bpe_is_the_same_each_time(documents: list[str], tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        tokenizer.load(DataConfig(tokenizer="bpe"), documents).save(tmp_path / name)
    first, second = (tmp_path / name / "tokenizer.json" for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()


def test_long_texts_are_encoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"line {i}\n" for i in range(300)) + "x" * 500
    encoder = tokenizer.load(DataConfig(tokenizer="bpe"), [text])
    (whole,) = encoder.encode([text], np.uint16)
    monkeypatch.setattr(tokenizer, "PIECE_CHARACTERS", 100)
    pieces = list(tokenizer._pieces(text))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) == 100
    (cut, short) = encoder.encode([text, "line 1\n"], np.uint16)
    assert (cut == encoder.eos_id).sum() == 1
    # The x's have no line end to cut after and may fall apart otherwise; the lines do not.
    assert cut[:900].tolist() == whole[:900].tolist()
    assert encoder._tokenizer.decode(cut[:-1].tolist()) == text  # type: ignore[attr-defined]
    assert encoder._tokenizer.decode(short[:-1].tolist()) == "line 1\n"  # type: ignore[attr-defined]


def test_bpe_training_stops_at_its_limit() -> None:
    assert list(tokenizer._first_characters(["ab", "cd", "ef"], 3)) == ["ab", "cd"]


@pytest.mark.parametrize("eos", tokenizer.EOS_TOKENS)
def test_a_tokenizer_file_is_taken_as_it_is_but_for_its_templates(tmp_path: Path, eos: str) -> None:
    folder = save_words(tmp_path / "words", eos)
    for path in (folder, folder / "tokenizer.json"):
        encoder = tokenizer.load(DataConfig(tokenizer=str(path)), [])
        assert (encoder.vocab_size, encoder.eos_id) == (70_001, 70_000)
        long, short = encoder.encode(["a b a b", "b"], np.uint32)
        assert long.tolist() == [1, 2, 1, 2, 70_000]
        assert short.tolist() == [2, 70_000]


def test_identity_follows_the_content_of_the_file(tmp_path: Path) -> None:
    one = save_words(tmp_path / "one", "</s>")
    two = save_words(tmp_path / "two", "</s>")
    first = tokenizer.identity(DataConfig(tokenizer=str(one)))
    assert tokenizer.identity(DataConfig(tokenizer=str(two / "tokenizer.json"))) == first
    save_words(one, "<eos>")
    assert tokenizer.identity(DataConfig(tokenizer=str(one))) != first
    assert tokenizer.identity(DataConfig(tokenizer="org/name")) == ["hub", "org/name"]


def test_bad_tokenizers_are_one_line(tmp_path: Path) -> None:
    def refused(name: str) -> str:
        with pytest.raises(ConfigError) as caught:
            data = DataConfig(tokenizer=name)
            tokenizer.identity(data)
            tokenizer.load(data, [])
        message = str(caught.value)
        assert "\n" not in message
        assert message.startswith(f"data.tokenizer={name}")
        return message

    assert "does not exist" in refused(str(tmp_path / "gone"))
    assert "does not exist" in refused("gone/tokenizer.json")
    assert "is a folder without tokenizer.json" in refused(str(tmp_path))
    (tmp_path / "broken.json").write_text("{")
    assert "can't be loaded" in refused(str(tmp_path / "broken.json"))
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    assert "can't be loaded" in refused(str(tmp_path / "binary.json"))
    folder = save_words(tmp_path / "words", "[SEP]")
    assert "no end-of-text token" in refused(str(folder))
