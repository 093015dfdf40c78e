// Gradients as eight-bit messages and back, in one pass over memory. wire.py has the torch form
// with the same bits; wire_kernels.py builds and loads this. Plain C++ without torch's headers.
//
// A message of `size` elements is a byte an element and then an E8M0 byte a block, or without
// blocks (block = 0) the elements alone.
#include "numbers.h"

namespace {

constexpr int64_t WIDTH = 1024;  // elements cast at a time

bool is_large(int64_t elements) { return elements > 65536; }

// The largest |x|, with NaN above infinity.
inline uint32_t largest(const float* x, int64_t n) {
  uint32_t most = 0;
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t m = bits_of(x[i]) & 0x7FFFFFFFu;
    most = m > most ? m : most;
  }
  return most;
}

struct BlockScale {
  float up;
  uint8_t stored;  // E8M0 of 1 / up; its NaN where a value is not finite
  bool finite;
};

inline BlockScale scale_of(uint32_t most, const Format& format) {
  if (most >= 0x7F800000u) return {1.0f, 255, false};
  const Scale s = PowerOfTwo{{format.max, FLT_MAX}}(from_bits(most));
  return {s.up, uint8_t(bits_of(s.down) >> 23), true};
}

// The byte of a grid value: the exponent counted from the format's own least.
inline uint8_t byte_of(float q, uint32_t mantissa_bits, uint32_t bias, float least_normal) {
  const float a = std::fabs(q);
  const bool subnormal = a < least_normal;
  const float t = subnormal ? a + least_normal : a;
  const uint32_t field = bias + (subnormal ? 1u : 0u);
  const uint32_t code = (bits_of(t) >> (23 - mantissa_bits)) - (field << mantissa_bits);
  return uint8_t(code | (bits_of(q) >> 24 & 0x80u));
}

template <bool stochastic>
void cast_span(const float* x, uint8_t* out, int64_t n, float up, const int32_t* noise,
               const Format& format) {
  const Grid grid(format);
  const uint32_t mantissa_bits = format.mantissa_bits, bias = format.min_exponent + 126;
  const float least_normal = from_bits(uint32_t(format.min_exponent + 127) << 23);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float y = x[i] * up;
    float q;
    if constexpr (stochastic) {
      q = grid.stochastic(y, noise[i]);
    } else {
      q = grid.nearest(y);
    }
    out[i] = byte_of(q, mantissa_bits, bias, least_normal);
  }
}

struct Encoder {
  const float* x;
  int64_t rows, size, block;
  Format format;  // by value: its constants stay in registers
  const Draw* draw;
  uint8_t* out;

  int64_t blocks() const { return block ? (size + block - 1) / block : 0; }
  const float* from(int64_t row) const { return x + row * size; }
  uint8_t* to(int64_t row) const { return out + row * (size + blocks()); }

  void cast(int64_t row, int64_t first, int64_t n, float up) const {
    int32_t noise[WIDTH + 4 * (LANES + 1)];
    for (int64_t i = first; i < first + n; i += WIDTH) {
      const int64_t count = std::min(WIDTH, first + n - i);
      if (draw) {
        const int32_t* drawn = draw_row(*draw, row, i, count, noise);
        cast_span<true>(from(row) + i, to(row) + i, count, up, drawn, format);
      } else {
        cast_span<false>(from(row) + i, to(row) + i, count, up, nullptr, format);
      }
    }
  }

  void fill(int64_t row, int64_t b, const BlockScale& scale) const {
    const int64_t first = b * block, n = std::min(block, size - first);
    to(row)[size + b] = scale.stored;
    if (scale.finite) {
      cast(row, first, n, scale.up);
    } else {
      std::memset(to(row) + first, 0, n);
    }
  }

  void short_blocks() const {
    const int64_t count = blocks();
#pragma omp parallel for collapse(2) schedule(static) if (is_large(rows * size))
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t b = 0; b < count; ++b) {
        const int64_t first = b * block, n = std::min(block, size - first);
        // A constant length makes a better loop.
        const float* values = from(row) + first;
        const uint32_t most = n == 128 ? largest(values, 128) : largest(values, n);
        fill(row, b, scale_of(most, format));
      }
    }
  }

  void long_blocks() const {
#pragma omp parallel for schedule(static) if (is_large(rows * size))
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t b = 0; b < blocks(); ++b) {
        const int64_t first = b * block, n = std::min(block, size - first);
        fill(row, b, scale_of(largest(from(row) + first, n), format));
      }
    }
  }

  void plain() const {
#pragma omp parallel for schedule(static) if (is_large(rows * size))
    for (int64_t row = 0; row < rows; ++row) {
      cast(row, 0, size, 1.0f);
      for (int64_t i = 0; i < size; ++i) {
        if ((bits_of(from(row)[i]) & 0x7FFFFFFFu) >= 0x7F800000u) to(row)[i] = 0x7F;
      }
    }
  }
};

template <bool adds>
void decode_into(float* out, const uint8_t* message, int64_t size, int64_t block,
                 const float* values) {
  const uint8_t* scales = message + size;
  const int64_t step = block ? block : size, count = (size + step - 1) / step;
#pragma omp parallel for schedule(static) if (is_large(size))
  for (int64_t b = 0; b < count; ++b) {
    const int64_t end = std::min(size, (b + 1) * step);
    const float down = !block             ? 1.0f
                       : scales[b] == 255 ? from_bits(0x7FC00000u)
                                          : E8M0::decode(scales[b]);
#pragma omp simd
    for (int64_t i = b * step; i < end; ++i) {
      const float v = values[message[i]] * down;
      out[i] = adds ? out[i] + v : v;
    }
  }
}

}  // namespace

// rows messages of size elements each, to nearest or, with a draw, stochastically.
extern "C" void wire_encode(const float* x, int64_t rows, int64_t size, int64_t block,
                            const Format* format, const Draw* draw, uint8_t* out) {
  const Encoder encoder{x, rows, size, block, *format, draw, out};
  if (block == 0) return encoder.plain();
  block <= WIDTH ? encoder.short_blocks() : encoder.long_blocks();
}

// A message's elements, in place of what out holds or added to it; values: of the 256 bytes.
extern "C" void wire_decode(float* out, const uint8_t* message, int64_t size, int64_t block,
                            const float* values, int32_t adds) {
  adds ? decode_into<true>(out, message, size, block, values)
       : decode_into<false>(out, message, size, block, values);
}
