"""Philox4x32-10: random integers as a pure function of key, tick and position.

A tensor's element draws the same number on every device, in every layout and whatever was drawn
before, so a shard that knows its offsets draws what the whole tensor draws there.

Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # the golden ratio and √3 − 1: what each round adds to the key
MASK = 0xFFFFFFFF
CHUNK = 2**15  # blocks at a time on a CPU, so that ten rounds of one stay in its cache

Block = tuple[Tensor, Tensor, Tensor, Tensor]


def key_of(seed: int, *names: str) -> int:
    """A 64-bit key for the stream that the names name: sha256 of seed and names."""
    digest = hashlib.sha256(json.dumps([seed, *names]).encode()).digest()
    return int.from_bytes(digest[:8], "little")


def draws(
    key: int,
    tick: int,
    rows: int | Tensor,
    columns: int,
    *,
    row_offset: int = 0,
    column_offset: int = 0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Uniform integers in [0, 2^24): the noise of `round_to_grid`.

    Element (i, j) of the whole tensor is word j mod 4 of the block at the counter (j // 4, i,
    low and high half of tick) under key (low half, high half), without its low eight bits.

    Args:
        key: 64 bits, as of `key_of`.
        tick: 64 bits that count the draws of one key (a step, a micro batch).
        rows: how many, or int64 on the device: the number of each.
        row_offset, column_offset: added to the numbers of rows and columns; any integers ≥ 0.
    Returns:
        int32 [rows, columns], contiguous.
    """
    first, last = column_offset // 4, -(-(column_offset + columns) // 4)
    column = torch.arange(first, last, device=device)[None, :]
    numbers = torch.arange(rows, device=device) if isinstance(rows, int) else rows
    row = (numbers + row_offset)[:, None]
    low, high = (torch.full((1, 1), tick >> shift & MASK, device=device) for shift in (0, 32))
    out = torch.empty(len(row), last - first, 4, dtype=torch.int32, device=device)
    step = max(1, CHUNK // max(1, last - first)) if out.device.type == "cpu" else max(1, len(row))
    for start in range(0, len(row), step):
        part = slice(start, start + step)
        for word, value in enumerate(philox4x32((column, row[part], low, high), key)):
            out[part, :, word] = value >> 8
    skip = column_offset - 4 * first
    return out.view(len(row), 4 * (last - first))[:, skip : skip + columns].contiguous()


def philox4x32(counter: Block, key: int) -> Block:
    """The block of four words for a counter of four words and a 64-bit key.

    Words are int64 tensors that hold 32 unsigned bits; their shapes broadcast against each other.
    """
    # A product wraps modulo 2^64, which keeps all its 64 bits. Its low word travels unmasked, as
    # the product itself: it is only ever XORed into a word that is masked then.
    x0, x1, x2, x3 = counter
    for i in range(ROUNDS):
        k0, k1 = (((key >> 32 * half) + i * WEYL[half]) & MASK for half in (0, 1))
        low, high = x0 * MULTIPLIERS[0], x2 * MULTIPLIERS[1]
        x0 = ((high >> 32) ^ (x1 ^ k0)).bitwise_and_(MASK)
        x2 = ((low >> 32) ^ (x3 ^ k1)).bitwise_and_(MASK)
        x1, x3 = high, low
    return x0, x1 & MASK, x2, x3 & MASK
