// Elements, formats, scales and random bits: what the C++ kernels share.
//
// Numbers are held to formats.py, scaling.py, nvfp4.py and philox.py of fp8train/precision bit for
// bit. That needs IEEE arithmetic: no -ffast-math, no contraction of a multiply and an add.
#pragma once
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

// ---- What Python hands over; cpu_kernels.py has the same fields.

struct Format {
  float max;
  int32_t mantissa_bits, min_exponent, signed_zero;
};

struct Rule {
  int32_t kind;  // index into with_rule
  float first, second;
};

struct Draw {
  uint64_t key, tick;
  int64_t row_offset, column_offset;
  const int64_t* rows;  // the number of each row; null for 0, 1, …

  int64_t number(int64_t row) const { return row_offset + (rows ? rows[row] : row); }
};

// ---- Elements

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
inline float load(float x) { return x; }
inline float load(bf16 x) { return from_bits(uint32_t(x.bits) << 16); }

// To nearest even, or, where the caller knows that x is exact or a quiet NaN, by cutting it off.
template <bool exact>
inline void store(float& to, float x) {
  to = x;
}
template <bool exact>
inline void store(bf16& to, float x) {
  const uint32_t u = bits_of(x);
  const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  const bool is_nan = (u & 0x7FFFFFFFu) > 0x7F800000u;
  to.bits = uint16_t(exact ? u >> 16 : is_nan ? (u >> 16) | 0x40u : rounded);
}

// |x| as an integer that orders like the number; NaN counts as zero. Of integers: themselves.
inline uint32_t magnitude(float x) {
  const uint32_t m = bits_of(x) & 0x7FFFFFFFu;
  return m > 0x7F800000u ? 0u : m;
}
inline uint16_t magnitude(bf16 x) {
  const uint16_t m = x.bits & 0x7FFFu;
  return m > 0x7F80u ? uint16_t(0) : m;
}
inline uint32_t magnitude(uint32_t m) { return m; }
inline uint16_t magnitude(uint16_t m) { return m; }
inline float value(uint32_t m) { return from_bits(m); }
inline float value(uint16_t m) { return from_bits(uint32_t(m) << 16); }
template <class T>
using Word = decltype(magnitude(T{}));

// ---- Rounding to a format's grid; see formats.round_to_grid.

struct Grid {
  float max;
  uint32_t mantissa_bits;
  uint32_t least;  // the smallest normal exponent, in place
  float plus;      // added to the result: −0 changes nothing, +0 makes −0 a +0

  explicit Grid(const Format& f)
      : max(f.max), mantissa_bits(f.mantissa_bits), least(uint32_t(f.min_exponent + 127) << 23),
        plus(f.signed_zero ? -0.0f : 0.0f) {}

  float clamped(float y) const {
    const float a = std::fabs(y);
    return a > max ? max : a;  // NaN stays
  }
  uint32_t exponent(float a) const { return std::max(bits_of(a) & 0x7F800000u, least); }
  float finish(float a, float sign_of) const {
    return from_bits(bits_of(a) | (bits_of(sign_of) & 0x80000000u)) + plus;
  }

  float nearest(float y) const {
    const float a = clamped(y);
    const float magic = from_bits(exponent(a) + ((23 - mantissa_bits) << 23 | 0x400000u));
    return finish((a + magic) - magic, y);
  }
  float stochastic(float y, int32_t noise) const {
    const float a = clamped(y);
    const uint32_t e = exponent(a), m = mantissa_bits << 23;
    const float t = a * from_bits((254u << 23) + m - e), whole = std::floor(t);
    const float rest = t - whole, part = rest >= 0 ? rest : 0.0f;  // NaN must not become an int
    const int32_t threshold = int32_t(std::ceil(part * 0x1p25f));
    return finish((whole + (2 * noise + 1 < threshold ? 1.0f : 0.0f)) * from_bits(e - m), y);
  }
};

// ---- Scales: one functor a rule, amax → (scale, scale_inv); see scaling.py and nvfp4.py.

struct Scale {
  float up, down;
};

struct Fp32 {
  float target, overflow;
  float scale(float amax) const {
    const float s = target / amax;
    const float held = s > FLT_MAX ? overflow : s < FLT_MIN ? FLT_MIN : s;
    return amax == 0 || amax > FLT_MAX ? 1.0f : held;
  }
  Scale operator()(float amax) const { return {scale(amax), 1.0f / scale(amax)}; }
};

struct PowerOfTwo {
  Fp32 exact;
  Scale operator()(float amax) const {
    const float s = from_bits(bits_of(exact.scale(amax)) & 0x7F800000u);
    return {s, 1.0f / s};
  }
};

struct E8M0 {
  float gain, inverse_max;
  static float decode(int32_t e) { return from_bits(e == 0 ? 0x400000u : uint32_t(e) << 23); }
  Scale operator()(float amax) const {
    const int32_t bits = int32_t(bits_of(amax * gain * inverse_max));
    const int32_t exponent = bits >> 23, mantissa = bits & 0x7FFFFF;
    const int32_t bound = exponent == 0 ? 0x400000 : 0;  // 2^-127 is no normal number
    const int32_t e = std::min(exponent + int32_t(mantissa > bound), 254);
    return {decode(254 - e), decode(e)};
  }
};

struct NVFP4 {
  float encode_sixth, decode;
  Scale operator()(float amax) const {
    const float d = Grid({448.0f, 3, -6, 1}).nearest(amax * encode_sixth);
    const float s = 1.0f / (d * decode);
    return {s > FLT_MAX ? FLT_MAX : s, d};
  }
};

template <class F>
void with_rule(const Rule& rule, F run) {
  if (rule.kind == 0) run(Fp32{rule.first, rule.second});
  if (rule.kind == 1) run(PowerOfTwo{{rule.first, rule.second}});
  if (rule.kind == 2) run(E8M0{rule.first, rule.second});
  if (rule.kind == 3) run(NVFP4{rule.first, rule.second});
}

// ---- Philox4x32-10; see philox.py.

constexpr int LANES = 16;

// The noise of n elements of a row from `column` on; `buffer` has room for n + 4 · (LANES + 1).
const int32_t* draw_row(const Draw& draw, int64_t row, int64_t column, int64_t n, int32_t* buffer) {
  const int64_t start = draw.column_offset + column, first = start / 4;
  const uint32_t number = uint32_t(draw.number(row));
  for (int64_t block = first; 4 * block < start + n; block += LANES) {
    uint32_t x0[LANES], x1[LANES], x2[LANES], x3[LANES];
    for (int l = 0; l < LANES; ++l) {
      x0[l] = uint32_t(block + l), x1[l] = number;
      x2[l] = uint32_t(draw.tick), x3[l] = uint32_t(draw.tick >> 32);
    }
    for (uint32_t i = 0; i < 10; ++i) {
      const uint32_t k0 = uint32_t(draw.key) + i * 0x9E3779B9u;
      const uint32_t k1 = uint32_t(draw.key >> 32) + i * 0xBB67AE85u;
#pragma omp simd
      for (int l = 0; l < LANES; ++l) {
        const uint64_t low = uint64_t(x0[l]) * 0xD2511F53u, high = uint64_t(x2[l]) * 0xCD9E8D57u;
        x0[l] = uint32_t(high >> 32) ^ x1[l] ^ k0, x1[l] = uint32_t(high);
        x2[l] = uint32_t(low >> 32) ^ x3[l] ^ k1, x3[l] = uint32_t(low);
      }
    }
    int32_t* to = buffer + 4 * (block - first);
    for (int l = 0; l < LANES; ++l) {
      to[4 * l] = int32_t(x0[l] >> 8), to[4 * l + 1] = int32_t(x1[l] >> 8);
      to[4 * l + 2] = int32_t(x2[l] >> 8), to[4 * l + 3] = int32_t(x3[l] >> 8);
    }
  }
  return buffer + (start - 4 * first);
}

}  // namespace
