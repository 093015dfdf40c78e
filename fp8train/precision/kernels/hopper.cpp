// The sum of a Hopper FP8 tensor core, step by step. hopper.py says what it computes and why, and
// holds a torch form with the same bits. Plain C++ without torch's headers; compiled.py builds it.
//
// Everything here is exact but the two truncations: products of FP8 values, multiplications by
// powers of two and sums of integers below 2^22. Eight to sixteen columns go through one vector.
#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int STEP = 32;             // k of one instruction
constexpr int LANES = 32;            // columns of a tile
constexpr int64_t ROWS = 64;         // rows of a tile
constexpr float UP = 0x1p13f;        // fraction bits kept below the largest exponent
constexpr float LEAST = 0x1p-64f;    // below every term: keeps 1 / top finite when all are zero
constexpr uint32_t KEPT = ~0x3FFu;   // of an FP32's bits: sign, exponent, 13 fraction bits

inline float masked(float x, uint32_t mask) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  u &= mask;
  std::memcpy(&x, &u, 4);
  return x;
}

// STEP rows of a tile of B, values and powers of two, zero beyond the matrix.
struct Tile {
  float value[STEP][LANES], power[STEP][LANES];
};

// total += a · tile for one row of A, as one instruction does it.
inline void step(const float* a, const float* a_power, const Tile& tile, int depth, float* total) {
  float top[LANES], up[LANES];
  int32_t sum[LANES];
  for (int l = 0; l < LANES; ++l) top[l] = std::max(LEAST, masked(total[l], 0x7F800000u));
  for (int k = 0; k < depth; ++k) {
    for (int l = 0; l < LANES; ++l) {
      const float power = a_power[k] * tile.power[k][l];
      top[l] = top[l] < power ? power : top[l];
    }
  }
  for (int l = 0; l < LANES; ++l) {
    up[l] = UP / top[l];
    sum[l] = int32_t(total[l] * up[l]);
  }
  for (int k = 0; k < depth; ++k) {
    for (int l = 0; l < LANES; ++l) sum[l] += int32_t(a[k] * tile.value[k][l] * up[l]);
  }
  for (int l = 0; l < LANES; ++l) total[l] = masked(float(sum[l]), KEPT) * (top[l] / UP);
}

}  // namespace

// out [m, n] = a [m, k] · b [k, n], all FP32, contiguous and finite; a_power and b_power hold
// 2^exponent of each value, 0 for 0.
extern "C" void hopper_chain(const float* a, const float* a_power, const float* b,
                             const float* b_power, float* out, int64_t m, int64_t n, int64_t k) {
  const int64_t row_tiles = (m + ROWS - 1) / ROWS, column_tiles = (n + LANES - 1) / LANES;
#pragma omp parallel for collapse(2) schedule(dynamic) if (m * n * k > 65536)
  for (int64_t i = 0; i < row_tiles; ++i) {
    for (int64_t j = 0; j < column_tiles; ++j) {
      const int64_t row = i * ROWS, rows = std::min(ROWS, m - row);
      const int64_t column = j * LANES, columns = std::min<int64_t>(LANES, n - column);
      float total[ROWS][LANES] = {};
      Tile tile = {};
      for (int64_t first = 0; first < k; first += STEP) {
        const int depth = int(std::min<int64_t>(STEP, k - first));
        for (int d = 0; d < depth; ++d) {
          const int64_t at = (first + d) * n + column;
          std::copy_n(b + at, columns, tile.value[d]);
          std::copy_n(b_power + at, columns, tile.power[d]);
        }
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t at = (row + r) * k + first;
          step(a + at, a_power + at, tile, depth, total[r]);
        }
      }
      for (int64_t r = 0; r < rows; ++r) std::copy_n(total[r], columns, out + (row + r) * n + column);
    }
  }
}
