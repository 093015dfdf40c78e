"""The device code of triton_wire.py: messages made of gradients, and added up.

A program has GROUP blocks of BLOCK elements, of one message or of a place in all of them. Bytes are
made and read by integer arithmetic, so that no cast's own ideas of overflow come in: an eight-bit
format's exponent and mantissa are the upper ones of FP32, with another bias.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8train.precision.kernels.triton_kernels import form_scales, power_of_two, to_format

INFINITY = tl.constexpr(0x7F800000)  # bits of FP32; above are NaNs
NAN_SCALE = tl.constexpr(255)  # of E8M0


@triton.jit
def place(
    size: tl.tensor, GROUP: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """This program's blocks [GROUP] and elements [GROUP, BLOCK], and which of them there are."""
    block = tl.program_id(0).to(tl.int64) * GROUP + tl.arange(0, GROUP)
    element = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    return block, element, block * BLOCK < size, element < size


@triton.jit
def to_byte(
    values: tl.tensor, MAX: tl.constexpr, MANTISSA_BITS: tl.constexpr, MIN_EXPONENT: tl.constexpr
) -> tl.tensor:
    """`formats.cast` of FP32 without NaN, as the byte that is stored, in int32."""
    made = to_format(values, tl.float32, MAX, MANTISSA_BITS, MIN_EXPONENT)
    bits = made.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # A bias of 1 − MIN_EXPONENT in the place of FP32's 127.
    normal = (magnitude >> (23 - MANTISSA_BITS)) - ((126 + MIN_EXPONENT) << MANTISSA_BITS)
    steps = magnitude.to(tl.float32, bitcast=True) * 2.0 ** (MANTISSA_BITS - MIN_EXPONENT)
    subnormal = steps.to(tl.int32)
    code = tl.where(magnitude < ((MIN_EXPONENT + 127) << 23), subnormal, normal)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def from_byte(
    byte: tl.tensor,
    LARGEST: tl.constexpr,
    HAS_INFINITY: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
) -> tl.tensor:
    """`formats.decode` of bytes in int32, FP32.

    Args:
        LARGEST: the code of the largest finite magnitude.
    """
    code = byte & 0x7F
    normal = (code << (23 - MANTISSA_BITS)) + ((126 + MIN_EXPONENT) << 23)
    subnormal = code.to(tl.float32) * 2.0 ** (MIN_EXPONENT - MANTISSA_BITS)
    magnitude = tl.where(
        code < (1 << MANTISSA_BITS), subnormal, normal.to(tl.float32, bitcast=True)
    )
    magnitude = tl.where(code > LARGEST, float("nan"), magnitude)
    if HAS_INFINITY:
        magnitude = tl.where(code == LARGEST + 1, float("inf"), magnitude)
    signed = magnitude.to(tl.int32, bitcast=True) | ((byte & 0x80) << 24)
    return signed.to(tl.float32, bitcast=True)


@triton.jit
def encode_blocks(
    x: tl.tensor,
    size: tl.tensor,
    width: tl.tensor,
    out: tl.tensor,
    MAX: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Some blocks of one message.

    Args:
        x: FP32 [N, size].
        out: uint8 [N, width], payload and E8M0 scales.
    """
    row = tl.program_id(1).to(tl.int64)
    block, element, exists, inside = place(size, GROUP, BLOCK)
    values = tl.load(x + row * size + element, mask=inside, other=0.0)
    amax = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)  # NaN is the largest
    finite = amax < INFINITY
    amax = tl.where(finite, amax, INFINITY)
    scale, _ = form_scales(amax, MAX, 2.0**127, "power_of_two")
    scaled = tl.where(finite[:, None], values * scale[:, None], 0.0)
    payload = to_byte(scaled, MAX, MANTISSA_BITS, MIN_EXPONENT)
    tl.store(out + row * width + element, payload.to(tl.uint8), mask=inside)
    inverse = 254 - (scale.to(tl.int32, bitcast=True) >> 23)  # the scale is a power of two
    stored = tl.where(finite, inverse, NAN_SCALE)
    tl.store(out + row * width + size + block, stored.to(tl.uint8), mask=exists)


@triton.jit
def add_blocks(
    total: tl.tensor,
    size: tl.tensor,
    messages: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    LARGEST: tl.constexpr,
    HAS_INFINITY: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add some blocks of all messages to total, in the messages' order.

    Each product of a payload and a power of two is exact, so a fused addition rounds alike.

    Args:
        total: FP32 [size].
        messages: uint8 [count, width].
    """
    block, element, exists, inside = place(size, GROUP, BLOCK)
    found = tl.load(total + element, mask=inside, other=0.0)
    message = messages
    for _ in range(count):
        byte = tl.load(message + element, mask=inside, other=0).to(tl.int32)
        stored = tl.load(message + size + block, mask=exists, other=0).to(tl.int32)
        scale = tl.where(stored == NAN_SCALE, float("nan"), power_of_two(stored))
        values = from_byte(byte, LARGEST, HAS_INFINITY, MANTISSA_BITS, MIN_EXPONENT)
        found += values * scale[:, None]
        message += width
    tl.store(total + element, found, mask=inside)
