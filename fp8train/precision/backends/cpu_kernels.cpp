// The quantisers of the emulated backend in one pass over memory. Plain C++ without torch's
// headers, so that it compiles in a second; cpu_kernels.py builds and loads it.
//
// Numbers are held to fp8train/precision/formats.py and scaling.py bit for bit. That needs IEEE
// arithmetic: no -ffast-math, no contraction of a multiply and an add.
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct bf16 {
  uint16_t bits;
};

inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline float from_bits(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
inline float load(const float* p) { return *p; }
inline float load(const bf16* p) { return from_bits(uint32_t(p->bits) << 16); }
inline void store(float* p, float x) { *p = x; }
// To nearest even. Grid values are exact; one times a scale may not be, below 2^-126.
inline void store(bf16* p, float x) {
  const uint32_t u = bits_of(x);
  const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  const bool is_nan = (u & 0x7FFFFFFFu) > 0x7F800000u;
  p->bits = uint16_t(is_nan ? (u >> 16) | 0x40u : rounded);
}

struct Grid {
  float max;
  uint32_t shift;         // 23 - mantissa bits
  uint32_t min_exponent;  // biased

  // Multiply, saturate, round to nearest even; see formats.round_to_grid.
  inline float operator()(float x, float scale) const {
    float y = x * scale;
    y = y > max ? max : y;
    y = y < -max ? -max : y;
    const uint32_t u = bits_of(y);
    uint32_t e = (u >> 23) & 0xFF;
    e = e < min_exponent ? min_exponent : e;
    const float magic = from_bits(((e + shift) << 23) | 0x400000u);
    const float r = (y + magic) - magic;
    return from_bits((bits_of(r) & 0x7FFFFFFFu) | (u & 0x80000000u));
  }
};

// |x| as an integer that orders like the float; NaN counts as zero.
inline uint32_t magnitude(float x) {
  const uint32_t u = bits_of(x) & 0x7FFFFFFFu;
  return u > 0x7F800000u ? 0u : u;
}

struct Scaling {
  float numerator;  // max * 2^-margin
  float overflow;
  int power_of_two;

  inline float operator()(uint32_t amax_bits) const {
    const float amax = from_bits(amax_bits);
    if (amax == 0.0f || amax_bits == 0x7F800000u) return 1.0f;
    float scale = numerator / amax;
    if (std::isinf(scale)) scale = overflow;
    if (scale < FLT_MIN) scale = FLT_MIN;  // a large margin
    return power_of_two ? from_bits(bits_of(scale) & 0x7F800000u) : scale;
  }
};

template <typename In>
float amax(const In* x, int64_t n) {
  uint32_t result = 0;
#pragma omp parallel for simd reduction(max : result) schedule(static) if (parallel : n > 65536)
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t m = magnitude(load(x + i));
    result = m > result ? m : result;
  }
  return from_bits(result);
}

template <typename In, typename Out>
void quantize(const In* x, Out* out, int64_t n, float scale, Grid grid) {
#pragma omp parallel for simd schedule(static) if (parallel : n > 65536)
  for (int64_t i = 0; i < n; ++i) store(out + i, grid(load(x + i), scale));
}

// Blocks of block_rows x block_cols. A strip of block_rows rows at a time: the amax of each
// column, the maximum over each group of columns, one scale a group, then the strip's elements.
template <typename In, typename Out>
void quantize_blocks(const In* x, Out* out, float* scale_inv, int64_t rows, int64_t cols,
                     int64_t block_rows, int64_t block_cols, Grid grid, Scaling scaling,
                     int dequantize) {
  const int64_t strips = (rows + block_rows - 1) / block_rows;
  const int64_t groups = (cols + block_cols - 1) / block_cols;
#pragma omp parallel if (rows * cols > 65536)
  {
    std::vector<uint32_t> column_amax(cols);
    std::vector<float> scale(cols), back(cols);
#pragma omp for schedule(static)
    for (int64_t s = 0; s < strips; ++s) {
      const int64_t first = s * block_rows;
      const int64_t last = first + block_rows < rows ? first + block_rows : rows;
      std::memset(column_amax.data(), 0, cols * sizeof(uint32_t));
      uint32_t* const a = column_amax.data();
      for (int64_t r = first; r < last; ++r) {
        const In* row = x + r * cols;
#pragma omp simd
        for (int64_t c = 0; c < cols; ++c) {
          const uint32_t m = magnitude(load(row + c));
          a[c] = m > a[c] ? m : a[c];
        }
      }
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t begin = g * block_cols;
        const int64_t end = begin + block_cols < cols ? begin + block_cols : cols;
        uint32_t m = 0;
#pragma omp simd reduction(max : m)
        for (int64_t c = begin; c < end; ++c) m = a[c] > m ? a[c] : m;
        const float up = scaling(m), down = 1.0f / up;
        scale_inv[s * groups + g] = down;
        for (int64_t c = begin; c < end; ++c) scale[c] = up, back[c] = dequantize ? down : 1.0f;
      }
      for (int64_t r = first; r < last; ++r) {
        const In* row = x + r * cols;
        Out* to = out + r * cols;
        const float *up = scale.data(), *down = back.data();
#pragma omp simd
        for (int64_t c = 0; c < cols; ++c) store(to + c, grid(load(row + c), up[c]) * down[c]);
      }
    }
  }
}

}  // namespace

#define KERNELS(NAME_IN, IN)                                                                    \
  extern "C" float amax_##NAME_IN(const void* x, int64_t n) {                                   \
    return amax(static_cast<const IN*>(x), n);                                                  \
  }                                                                                             \
  QUANTIZERS(NAME_IN, IN, bf16, bf16)                                                           \
  QUANTIZERS(NAME_IN, IN, f32, float)

#define QUANTIZERS(NAME_IN, IN, NAME_OUT, OUT)                                                  \
  extern "C" void quantize_##NAME_IN##_##NAME_OUT(const void* x, void* out, int64_t n,          \
                                                  float scale, float max, int mantissa,         \
                                                  int min_exponent) {                           \
    quantize(static_cast<const IN*>(x), static_cast<OUT*>(out), n, scale,                       \
             Grid{max, uint32_t(23 - mantissa), uint32_t(min_exponent + 127)});                 \
  }                                                                                             \
  extern "C" void quantize_blocks_##NAME_IN##_##NAME_OUT(                                       \
      const void* x, void* out, float* scale_inv, int64_t rows, int64_t cols,                   \
      int64_t block_rows, int64_t block_cols, float max, int mantissa, int min_exponent,        \
      float numerator, float overflow, int power_of_two, int dequantize) {                      \
    quantize_blocks(static_cast<const IN*>(x), static_cast<OUT*>(out), scale_inv, rows, cols,   \
                    block_rows, block_cols,                                                     \
                    Grid{max, uint32_t(23 - mantissa), uint32_t(min_exponent + 127)},           \
                    Scaling{numerator, overflow, power_of_two}, dequantize);                    \
  }

KERNELS(bf16, bf16)
KERNELS(f32, float)
