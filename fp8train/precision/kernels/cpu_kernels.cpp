// The quantisers of the emulated backend in as few passes over memory as they need. Plain C++
// without torch's headers, so that it compiles in seconds; cpu_kernels.py builds and loads it.
#include <numeric>
#include <vector>

#include "numbers.h"

namespace {

// ---- What Python hands over; cpu_kernels.py has the same fields.

struct Matrix {
  void* data;
  int64_t rows, columns;
  int32_t is_bf16;  // or float
};

struct Copy {
  Matrix out;
  float *scale, *scale_inv;  // one a block; scale may be null where it is computed
  int64_t block_rows, block_columns;
  int32_t fold;  // multiply values by scale_inv

  int64_t across() const { return (out.columns + block_columns - 1) / block_columns; }
};

void scales_of(const Rule& rule, const float* amax, int64_t n, float* up, float* down) {
  with_rule(rule, [&](auto scaling) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const Scale s = scaling(amax[i]);
      up[i] = s.up, down[i] = s.down;
    }
  });
}

// ---- Amaxes

template <class T>
void max_into(const T* x, int64_t n, Word<T>* most) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const Word<T> m = magnitude(x[i]), old = most[i];  // std::max's references keep it scalar
    most[i] = m > old ? m : old;
  }
}

template <class T>
inline Word<T> span_max(const T* x, int64_t n) {
  Word<T> most = 0;
#pragma omp simd reduction(max : most)
  for (int64_t i = 0; i < n; ++i) most = std::max(most, magnitude(x[i]));
  return most;
}

// The largest magnitude in each group of `size`, the last may be short.
template <class T>
void group_max(const T* x, int64_t n, int64_t size, float* most) {
  if (size == 1) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) most[i] = value(magnitude(x[i]));
    return;
  }
  for (int64_t i = 0; i < n; i += size, ++most) {
    const T* from = x + i;
    const int64_t length = std::min(size, n - i);
    *most = value(length == 16 ? span_max(from, 16)  // a constant length makes a better loop
                  : length == 32 ? span_max(from, 32)
                  : length == 128 ? span_max(from, 128)
                                  : span_max(from, length));
  }
}

// ---- Casts

constexpr int64_t WIDTH = 1024;  // columns cast at a time

struct Region {
  int64_t row, rows, column, columns;
};

// The scales of a region's blocks, whose first block begins where the region does.
struct Scales {
  const float *up, *down;
  int64_t stride;
};

// What one thread works with.
template <class T>
struct Scratch {
  std::vector<Word<T>> words;
  std::vector<float> amax, up, down;
  float ones[WIDTH], wide_up[WIDTH], wide_down[WIDTH];
  int32_t noise[WIDTH + 4 * (LANES + 1)];
  Scratch() { std::fill(ones, ones + WIDTH, 1.0f); }
};

// One value a group → one an element, for the n elements from `first` on.
void widen(const float* per_group, int64_t size, int64_t first, int64_t n, float* wide) {
  for (int64_t i = 0, g = first / size; i < n; ++g) {
    const int64_t end = std::min(n, (g + 1) * size - first);
    const float v = per_group[g];
    for (; i + 16 <= end; i += 16) {
      for (int j = 0; j < 16; ++j) wide[i + j] = v;
    }
    for (; i < end; ++i) wide[i] = v;
  }
}

// EXACT is NEAREST where the output type holds every result, so that storing needs no rounding.
enum class Rounding { EXACT, NEAREST, STOCHASTIC };

template <Rounding rounding, class In, class Out>
void cast_row(const In* x, Out* out, int64_t n, const float* up, const float* down,
              const int32_t* noise, Grid grid) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float y = load(x[i]) * up[i];
    float q;
    if constexpr (rounding == Rounding::STOCHASTIC) {
      q = grid.stochastic(y, noise[i]);
    } else {
      q = grid.nearest(y);
    }
    store<rounding == Rounding::EXACT>(out[i], q * down[i]);
  }
}

template <Rounding rounding, class In, class Out>
void cast_rows(const Matrix& x, const Copy& copy, const Region& at, Scales scales, const Grid& grid,
               const Draw* draw, Scratch<In>& scratch) {
  for (int64_t c = 0; c < at.columns; c += WIDTH) {
    const int64_t n = std::min(WIDTH, at.columns - c), begin = at.column + c;
    const float *up = nullptr, *down = nullptr;
    for (int64_t row = at.row; row < at.row + at.rows; ++row) {
      if (row == at.row || row % copy.block_rows == 0) {
        const int64_t first = (row / copy.block_rows - at.row / copy.block_rows) * scales.stride;
        up = scales.up + first + c, down = scales.down + first + c;
        if (copy.block_columns > 1) {
          widen(scales.up + first, copy.block_columns, c, n, scratch.wide_up);
          if (copy.fold) widen(scales.down + first, copy.block_columns, c, n, scratch.wide_down);
          up = scratch.wide_up, down = scratch.wide_down;
        }
        if (!copy.fold) down = scratch.ones;
      }
      const int64_t from = row * x.columns + begin;
      const int32_t* noise = nullptr;
      if (rounding == Rounding::STOCHASTIC) noise = draw_row(*draw, row, begin, n, scratch.noise);
      cast_row<rounding>(static_cast<const In*>(x.data) + from,
                         static_cast<Out*>(copy.out.data) + from, n, up, down, noise, grid);
    }
  }
}

// Whether BF16 holds any grid value times any of these scales: at most four bits times four, and
// its last bit not below BF16's.
bool products_exact(const float* down, int64_t n, const Format& format) {
  const float least = 0x1p-133f / std::ldexp(1.0f, format.min_exponent - format.mantissa_bits);
  uint32_t bad = 0;
#pragma omp simd reduction(| : bad)
  for (int64_t i = 0; i < n; ++i) {
    bad |= uint32_t((bits_of(down[i]) & 0xFFFFFu) != 0 || (down[i] < least && down[i] != 0));
  }
  return bad == 0;
}

template <class In, class Out>
void cast_region(const Matrix& x, const Copy& copy, const Region& at, Scales scales, bool exact,
                 const Format& format, const Draw* draw, Scratch<In>& scratch) {
  const Grid grid(format);
  if (draw) {
    cast_rows<Rounding::STOCHASTIC, In, Out>(x, copy, at, scales, grid, draw, scratch);
  } else if (exact || sizeof(Out) == 4) {
    cast_rows<Rounding::EXACT, In, Out>(x, copy, at, scales, grid, draw, scratch);
  } else {
    cast_rows<Rounding::NEAREST, In, Out>(x, copy, at, scales, grid, draw, scratch);
  }
}

bool is_large(const Matrix& x) { return x.rows * x.columns > 65536; }

// All of x with the scales that the copy holds.
template <class In, class Out>
void cast_all(const Matrix& x, const Copy& copy, const Format& format, const Draw* draw) {
  constexpr int64_t height = 16;
  const int64_t across = copy.across(), down = (x.rows + copy.block_rows - 1) / copy.block_rows;
  const bool exact = !copy.fold || products_exact(copy.scale_inv, across * down, format);
  const int64_t strips = (x.rows + height - 1) / height;
#pragma omp parallel if (is_large(x))
  {
    Scratch<In> scratch;
#pragma omp for schedule(static)
    for (int64_t s = 0; s < strips; ++s) {
      const int64_t row = s * height, first = row / copy.block_rows * across;
      const Region at{row, std::min(height, x.rows - row), 0, x.columns};
      cast_region<In, Out>(x, copy, at, {copy.scale + first, copy.scale_inv + first, across}, exact,
                           format, draw, scratch);
    }
  }
}

// Amaxes, scales and values of a region that begins at a block's corner.
template <class In, class Out>
void quantize_region(const Matrix& x, const Copy& copy, const Region& at, const Rule& rule,
                     const Format& format, const Draw* draw, Scratch<In>& scratch) {
  const int64_t groups = (at.columns + copy.block_columns - 1) / copy.block_columns;
  const int64_t blocks = (at.rows + copy.block_rows - 1) / copy.block_rows, n = blocks * groups;
  scratch.amax.resize(n), scratch.up.resize(n), scratch.down.resize(n);
  const In* data = static_cast<const In*>(x.data) + at.row * x.columns + at.column;
  for (int64_t b = 0; b < blocks; ++b) {
    float* const amax = scratch.amax.data() + b * groups;
    const int64_t first = b * copy.block_rows, last = std::min(first + copy.block_rows, at.rows);
    if (last - first == 1) {
      group_max(data + first * x.columns, at.columns, copy.block_columns, amax);
      continue;
    }
    scratch.words.assign(at.columns, 0);
    for (int64_t r = first; r < last; ++r) {
      max_into(data + r * x.columns, at.columns, scratch.words.data());
    }
    group_max(scratch.words.data(), at.columns, copy.block_columns, amax);
  }
  float *const up = scratch.up.data(), *const down = scratch.down.data();
  scales_of(rule, scratch.amax.data(), n, up, down);
  for (int64_t b = 0; b < blocks; ++b) {
    std::copy_n(down + b * groups, groups,
                copy.scale_inv + (at.row / copy.block_rows + b) * copy.across() +
                    at.column / copy.block_columns);
  }
  const bool exact = !copy.fold || products_exact(down, n, format);
  cast_region<In, Out>(x, copy, at, {up, down, groups}, exact, format, draw, scratch);
}

constexpr int64_t TILE = 65536;  // bytes of x that one thread reads again and again
constexpr int64_t TALL = 256;    // rows: a block with more of them is no part of a tile

// All copies of x. A tile is a few blocks, read from memory once for all of them; a copy with one
// scale a column of all rows gets its amaxes from that pass and its values from another one.
template <class In, class Out>
void quantize(const Matrix& x, const Copy* copies, int count, const Rule& rule,
              const Format& format, const Draw* draw) {
  const Copy* tall = nullptr;
  int64_t height = 1, width = 1;
  for (const Copy* copy = copies; copy < copies + count; ++copy) {
    if (!tall && copy->block_rows >= x.rows && copy->block_rows > TALL) {
      tall = copy;
    } else {
      height = std::lcm(height, copy->block_rows), width = std::lcm(width, copy->block_columns);
    }
  }
  height *= std::max<int64_t>(1, 16 / height);
  width *= std::max<int64_t>(1, TILE / int64_t(sizeof(In)) / (height * width));
  const int64_t down = (x.rows + height - 1) / height, across = (x.columns + width - 1) / width;
  std::vector<Word<In>> most(tall ? x.columns : 0);
#pragma omp parallel if (is_large(x))
  {
    Scratch<In> scratch;
    std::vector<Word<In>> mine(most.size());
#pragma omp for collapse(2) schedule(static) nowait
    for (int64_t i = 0; i < down; ++i) {
      for (int64_t j = 0; j < across; ++j) {
        const Region at{i * height, std::min(height, x.rows - i * height), j * width,
                        std::min(width, x.columns - j * width)};
        for (const Copy* copy = copies; copy < copies + count; ++copy) {
          if (copy != tall) quantize_region<In, Out>(x, *copy, at, rule, format, draw, scratch);
        }
        for (int64_t row = at.row; tall && row < at.row + at.rows; ++row) {
          max_into(static_cast<const In*>(x.data) + row * x.columns + at.column, at.columns,
                   mine.data() + at.column);
        }
      }
    }
    if (tall) {
#pragma omp critical
      max_into(mine.data(), x.columns, most.data());
    }
  }
  if (tall) {
    std::vector<float> amax(tall->across()), up(tall->across());
    group_max(most.data(), x.columns, tall->block_columns, amax.data());
    scales_of(rule, amax.data(), tall->across(), up.data(), tall->scale_inv);
    Copy known = *tall;
    known.scale = up.data();
    cast_all<In, Out>(x, known, format, draw);
  }
}

template <class In>
float amax(const Matrix& x) {
  const In* data = static_cast<const In*>(x.data);
  Word<In> most = 0;
#pragma omp parallel for simd reduction(max : most) schedule(static) if (parallel : is_large(x))
  for (int64_t i = 0; i < x.rows * x.columns; ++i) most = std::max(most, magnitude(data[i]));
  return value(most);
}

// The random Hadamard transform of each 16 rows; see nvfp4.hadamard.
template <class T>
void hadamard(const Matrix& x, const Matrix& out, const float* signs) {
  constexpr int SIZE = 16, LANE = 64;
  const T* from = static_cast<const T*>(x.data);
  T* to = static_cast<T*>(out.data);
#pragma omp parallel for collapse(2) schedule(static) if (is_large(x))
  for (int64_t row = 0; row < x.rows; row += SIZE) {
    for (int64_t column = 0; column < x.columns; column += LANE) {
      const int64_t rows = std::min<int64_t>(SIZE, x.rows - row);
      const int64_t n = std::min<int64_t>(LANE, x.columns - column);
      float v[SIZE][LANE] = {};
      for (int64_t r = 0; r < SIZE; ++r) {
        const T* line = from + (row + r) * x.columns + column;
        for (int64_t c = 0; r < rows && c < n; ++c) v[r][c] = load(line[c]);
        for (int c = 0; c < LANE; ++c) v[r][c] *= signs[r];
      }
      for (int span = 1; span < SIZE; span *= 2) {
        for (int r = 0; r < SIZE; ++r) {
          if (r & span) continue;
          for (int c = 0; c < LANE; ++c) {
            const float first = v[r][c], second = v[r + span][c];
            v[r][c] = first + second, v[r + span][c] = first - second;
          }
        }
      }
      for (int r = 0; r < SIZE; ++r) {
        T* line = to + (row + r) * x.columns + column;
        for (int64_t c = 0; c < n; ++c) store<false>(line[c], v[r][c] * 0.25f);
      }
    }
  }
}

// run(In{}, Out{}) for the element types of two matrices.
template <class F>
void with_types(const Matrix& x, const Matrix& out, F run) {
  if (x.is_bf16 && out.is_bf16) run(bf16{}, bf16{});
  if (x.is_bf16 && !out.is_bf16) run(bf16{}, float{});
  if (!x.is_bf16 && out.is_bf16) run(float{}, bf16{});
  if (!x.is_bf16 && !out.is_bf16) run(float{}, float{});
}

}  // namespace

extern "C" float fp8_amax(const Matrix* x) { return x->is_bf16 ? amax<bf16>(*x) : amax<float>(*x); }

// Each of the copies with scales of its own, to nearest or, with a draw, stochastically.
extern "C" void fp8_quantize(const Matrix* x, const Copy* copies, int count, const Rule* rule,
                             const Format* format, const Draw* draw) {
  with_types(*x, copies[0].out, [&](auto in, auto out) {
    quantize<decltype(in), decltype(out)>(*x, copies, count, *rule, *format, draw);
  });
}

// The copy's values from the scales it holds.
extern "C" void fp8_cast(const Matrix* x, const Copy* copy, const Format* format,
                         const Draw* draw) {
  with_types(*x, copy->out, [&](auto in, auto out) {
    cast_all<decltype(in), decltype(out)>(*x, *copy, *format, draw);
  });
}

// x and out of one type; out has x's rows, made up to a multiple of 16.
extern "C" void fp8_hadamard(const Matrix* x, const Matrix* out, const float* signs) {
  x->is_bf16 ? hadamard<bf16>(*x, *out, signs) : hadamard<float>(*x, *out, signs);
}
