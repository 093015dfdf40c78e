"""Random integers: the published vectors, shards, and what they are uniform over."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8train.precision.philox import draws, key_of, philox4x32


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(
    "counter, key, expected",
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers_of_random123(counter: str, key: str, expected: str) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in words(counter))
    low, high = words(key)
    block = philox4x32((c0, c1, c2, c3), low | high << 32)
    assert [word.item() for word in block] == words(expected)


def test_where_an_element_finds_its_word() -> None:
    """Counter (column // 4, row, tick low, tick high), word column mod 4, the top 24 bits."""
    key, tick = 0x299F31D0A4093822, 0x0370734413198A2E
    zero = draws(0, 0, 1, 4)
    assert zero.tolist() == [[word >> 8 for word in words("6627e8d5 e169c58d bc57ac4c 9b00dbd8")]]
    pi = draws(key, tick, 1, 2, row_offset=0x85A308D3, column_offset=4 * 0x243F6A88 + 1)
    assert pi.tolist() == [[0x94FDCCEB >> 8, 0x5001E420 >> 8]]


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 20), st.integers(0, 20))
def test_a_shard_draws_what_the_whole_tensor_draws_there(
    row: int, column: int, rows: int, columns: int
) -> None:
    whole = draws(7, 3, 60, 60)
    shard = draws(7, 3, rows, columns, row_offset=row, column_offset=column)
    assert shard.is_contiguous()
    assert torch.equal(shard, whole[row : row + rows, column : column + columns])


@given(st.lists(st.integers(0, 49), max_size=20), st.integers(0, 10), st.integers(0, 40))
def test_rows_draw_by_their_numbers(numbers: list[int], row: int, column: int) -> None:
    whole = draws(7, 3, 60, 60)
    rows = torch.tensor(numbers, dtype=torch.int64)
    shard = draws(7, 3, rows, 20, row_offset=row, column_offset=column)
    assert torch.equal(shard, whole[rows + row, column : column + 20])


def test_rows_beyond_one_chunk() -> None:
    whole = draws(7, 3, 100, 4096)
    rows = [draws(7, 3, 1, 4096, row_offset=row) for row in range(100)]
    assert torch.equal(whole, torch.cat(rows))


def test_uniform_and_independent() -> None:
    x = draws(key_of(1234, "wgrad"), 0, 1024, 1024)
    assert x.dtype == torch.int32
    assert x.min() >= 0 and x.max() < 2**24
    counts = torch.bincount(x.view(-1) >> 16, minlength=256).double()
    assert ((counts - 4096) ** 2 / 4096).sum() < 255 + 5 * (2 * 255) ** 0.5  # chi-squared, 5 sigma
    bits = torch.stack([x >> bit & 1 for bit in range(24)]).double().mean(dim=(1, 2))
    assert (bits - 0.5).abs().max() < 5 * 0.5 / 1024
    others = [x.roll(1, 0), x.roll(1, 1), draws(key_of(1234, "wgrad"), 1, 1024, 1024)]
    others += [
        draws(key_of(seed, name), 0, 1024, 1024) for seed, name in ((1234, "x"), (1, "wgrad"))
    ]
    for other in others:
        pair = torch.stack((x, other)).view(2, -1).double()
        assert torch.corrcoef(pair)[0, 1].abs() < 5 / 1024


def test_draws_depend_on_all_of_tick_and_key() -> None:
    variants = [(0, 0), (1, 0), (2**32, 0), (2**63, 0), (0, 1), (0, 2**32), (0, 2**63)]
    seen = {tuple(draws(key, tick, 1, 8).view(-1).tolist()) for key, tick in variants}
    assert len(seen) == len(variants)


def test_keys() -> None:
    keys = [(1, "a", "b"), (1, "ab"), (1, "b", "a"), (1, "a, b"), (1,), (2, "a", "b"), (12,)]
    values = [key_of(*key) for key in keys]
    assert len(set(values)) == len(keys)
    assert all(0 <= value < 2**64 for value in values)
    # sha256 of '[0]' and of '[1234, "layers.0", "grad"]': the same in every release.
    assert key_of(0) == 0x378162F811A1BCD0
    assert key_of(1234, "layers.0", "grad") == 0xFE5552F950A17876
