"""Which documents are held out, and the token files."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8train.data import packing
from fp8train.data.tokenizer import ByteTokenizer

texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=60)


@settings(deadline=None)
@given(documents=texts, fraction=st.floats(0.01, 0.99))
def test_split_keeps_every_character_in_order(documents: list[str], fraction: float) -> None:
    parts = list(packing.split(documents, fraction))
    assert "".join(sorted("".join(documents))) == "".join(sorted("".join(t for _, t in parts)))
    if len(documents) >= packing.FEW_DOCUMENTS:
        assert [text for _, text in parts] == documents
    else:
        assert "".join(text for _, text in parts) == "".join(documents)
        held = sum(len(text) for name, text in parts if name == "validation")
        assert abs(held - fraction * len("".join(documents))) <= 0.5 + 1e-9


@settings(deadline=None)
@given(documents=st.lists(st.text("abc", min_size=1), min_size=20), data=st.data())
def test_where_a_document_goes_depends_on_its_text_alone(
    documents: list[str], data: st.DataObject
) -> None:
    where = {text: name for name, text in packing.split(documents, 0.5)}
    shuffled = data.draw(st.permutations(documents))
    again = list(packing.split([*shuffled, *documents], 0.5))
    assert all(where[text] == name for name, text in again)  # so the splits share no document


def test_the_held_out_fraction_is_the_one_asked_for(documents: list[str]) -> None:
    many = [f"{text} {i}" for text in documents for i in range(100)]
    for fraction in (0.01, 0.05, 0.5):
        held = sum(name == "validation" for name, _ in packing.split(many, fraction))
        assert held == pytest.approx(fraction * len(many), rel=0.2)
    smaller = {text for text in many if packing.held_out(text, 0.05)}
    assert smaller < {text for text in many if packing.held_out(text, 0.5)}


@settings(deadline=None)
@given(documents=texts, batch=st.integers(1, 50))
def test_round_trip(documents: list[str], batch: int) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BATCH_CHARACTERS", batch)
        folder = Path(name)
        parts = list(packing.split(documents, 0.3))
        files = packing.pack(parts, ByteTokenizer(), folder)
        for split in packing.SPLITS:
            tokens = np.load(folder / f"{split}.npy")
            expected = [text for name, text in parts if name == split]
            assert tokens.dtype == np.uint16
            ends = np.flatnonzero(tokens == 256)
            starts = [0, *(ends[:-1] + 1)] if len(ends) else []
            read = [
                tokens[a:b].astype(np.uint8).tobytes().decode()
                for a, b in zip(starts, ends, strict=True)
            ]
            assert read == expected
            assert files[split].tokens == len(tokens)
            assert files[split].documents == len(expected)
            assert files[split].digest.digest() == hashlib.sha256(tokens.tobytes()).digest()


def test_a_large_vocabulary_is_stored_in_32_bits(tmp_path: Path) -> None:
    parts = [("train", "abc"), ("validation", "d")]
    packing.pack(parts, ByteTokenizer(vocab_size=70_001, eos_id=70_000), tmp_path)
    tokens = np.load(tmp_path / "train.npy", mmap_mode="r")
    assert tokens.dtype == np.uint32
    assert tokens.tolist() == [97, 98, 99, 70_000]
