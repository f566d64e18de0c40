// What a training step on a CPU does between its matrix products, each in one pass over its rows.
//
// Rows are packed: those of one sentence lie one below the other, sentence after sentence, without padding between them.
// Elements are float or bfloat16; every sum is kept in float. This file is compiled once for each level of the
// processor's vector instructions (VARIANT names the level); dispatch.cpp takes the best that is there. The code knows
// vectors of 16 floats only, and the compiler makes of them what the level has.
//
// Work is divided among threads by its place alone, so with as many threads the same numbers come out each time.

#include <omp.h>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "kernels.h"

namespace diglot {
namespace {

constexpr int W = 16;  // floats in a vector
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint64_t Longs __attribute__((vector_size(64)));
typedef int64_t SignedLongs __attribute__((vector_size(64)));
typedef int16_t Shorts __attribute__((vector_size(64)));
typedef int16_t HalfShorts __attribute__((vector_size(32)));

struct bfloat16 {
  uint16_t bits;
};

inline int64_t round_up(int64_t n) { return (n + W - 1) / W * W; }

inline Floats all(float x) { return Floats{} + x; }

inline Floats load(const float* from) {
  Floats x;
  memcpy(&x, from, sizeof x);
  return x;
}

inline Floats load(const bfloat16* from) {
  Halves bits;
  memcpy(&bits, from, sizeof bits);
  return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

inline void store(float* to, Floats x) { memcpy(to, &x, sizeof x); }

// To the nearest, ties to even; what is no number stays none. Where the processor does it, what is below 1e-38 is 0.
inline void store(bfloat16* to, Floats x) {
#ifdef __AVX512BF16__
  const __m256bh half = _mm512_cvtneps_pbh((__m512)x);
#else
  const Words bits = (Words)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words chosen = (x == x) ? rounded : (bits >> 16) | 0x40;
  const Halves half = __builtin_convertvector(chosen, Halves);
#endif
  memcpy(to, &half, sizeof half);
}

// The same for the last n < 16 of a row.
template <typename T>
inline Floats load_some(const T* from, int n) {
  T buffer[W] = {};
  memcpy(buffer, from, n * sizeof(T));
  return load(buffer);
}

template <typename T>
inline void store_some(T* to, Floats x, int n) {
  T buffer[W];
  store(buffer, x);
  memcpy(to, buffer, n * sizeof(T));
}

// A vector of elements of a and b, which are numbered one after the other; `from` tells which comes to a place.
template <typename From, int... places>
inline Floats picked(Floats a, Floats b, std::integer_sequence<int, places...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, From::place(places)...);
#else
  return __builtin_shuffle(a, b, Ints{From::place(places)...});
#endif
}

template <int by>
struct Rotated {
  static constexpr int place(int i) { return (i + by) % W; }
};

template <int by>
inline Floats rotated(Floats x) {
  return picked<Rotated<by>>(x, x, std::make_integer_sequence<int, W>());
}

inline float sum(Floats x) {  // by halves: a chain of 16 additions takes four times as long
  x += rotated<8>(x);
  x += rotated<4>(x);
  x += rotated<2>(x);
  x += rotated<1>(x);
  return x[0];
}

inline Floats larger(Floats x, Floats y) { return (x > y) ? x : y; }

inline float largest(Floats x) {
  x = larger(x, rotated<8>(x));
  x = larger(x, rotated<4>(x));
  x = larger(x, rotated<2>(x));
  x = larger(x, rotated<1>(x));
  return x[0];
}

// e^x, to two units of the last place; 0 below -87, without end above 88.
inline Floats exponential(Floats x) {
  const Floats least = all(-87.0f), most = all(88.0f);
  Floats inside = (x > least) ? x : least;
  inside = (inside < most) ? inside : most;
  const Floats magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const Floats shifted = inside * 1.44269504f + magic;
  const Floats n = shifted - magic;
  const Floats r = inside - n * 0.693359375f + n * 2.12194440e-4f;
  Floats p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Ints power = ((Ints)shifted - (Ints)magic + 127) << 23;
  const Floats result = p * (Floats)power;
  const Floats small = (x <= least) ? all(0.0f) : result, endless = all(std::numeric_limits<float>::infinity());
  return (x > most) ? endless : (x == x) ? small : x;
}

// ------------------------------------------------------------------- dropout

constexpr uint64_t ODD[3] = {0x9E3779B97F4A7C15ull, 0xBF58476D1CE4E5B9ull, 0x94D049BB133111EBull};

// What a row of n places is multiplied by, 0 or 1 / (1 - p): 16 bits a place from a hash of the sample's key and the
// place (model.random_bits). `row` numbers the row within its sample, heads included; n - first places are written, from
// `first`, a multiple of 32, on, and up to 31 more.
void keep(float* to, int64_t n, uint64_t key, uint64_t row, const Drop& drop, int64_t first = 0) {
  const Shorts threshold = Shorts{} + static_cast<int16_t>(drop.threshold);
  const Ints scale = (Ints)all(drop.scale);
  Longs place = Longs{0, 1, 2, 3, 4, 5, 6, 7} * ODD[0] + (key + drop.salt + ((row << 20) + first / 4) * ODD[0]);
  for (int64_t start = first; start < n; start += 32, place += 8 * ODD[0]) {
    Longs hash = (place ^ (Longs)((SignedLongs)place >> 32)) * ODD[1];  // with its sign, as model.py shifts
    hash = (hash ^ (Longs)((SignedLongs)hash >> 29)) * ODD[2];
    HalfShorts kept[2];  // all ones, or zero
    const Shorts both = (Shorts)hash >= threshold;
    memcpy(kept, &both, sizeof both);
    store(to + start, (Floats)(__builtin_convertvector(kept[0], Ints) & scale));
    store(to + start + W, (Floats)(__builtin_convertvector(kept[1], Ints) & scale));
  }
}

// ------------------------------------------------------------------- memory and threads

// Floats. Not a std::vector, whose code would be compiled once a variant, and linked once for all of them.
class Memory {
 public:
  Memory() = default;
  explicit Memory(int64_t size) : size_(size) {  // zeros
    data_ = static_cast<float*>(calloc(size, sizeof(float)));
    if (!data_ && size) throw std::bad_alloc();
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { free(data_); }

  float* data() const { return data_; }
  float* room_for(int64_t size) {
    if (size > size_) {
      release();
      data_ = static_cast<float*>(malloc(size * sizeof(float)));
      if (!data_) throw std::bad_alloc();
      size_ = size;
    }
    return data_;
  }
  void release_much() {  // what one long sentence has asked for
    if (size_ > 1 << 22) release();
  }

 private:
  void release() {
    free(data_);
    data_ = nullptr;
    size_ = 0;
  }
  float* data_ = nullptr;
  int64_t size_ = 0;
};

thread_local Memory memory;

float* scratch(int64_t size) { return memory.room_for(size); }

// What a thread has no memory for ends the call, not the process.
template <typename Work>
void on_all_threads(Work work) {  // work(thread, threads)
  std::atomic<bool> is_full{false};
#pragma omp parallel num_threads(num_threads)
  try {
    work(omp_get_thread_num(), omp_get_num_threads());
    memory.release_much();
  } catch (const std::bad_alloc&) {
    is_full = true;
  }
  if (is_full) throw std::bad_alloc();
}

template <typename Work>
void in_parallel(int64_t num, Work work) {  // work(from, to, thread), a stretch a thread
  on_all_threads([&](int64_t thread, int64_t threads) {
    work(num * thread / threads, num * (thread + 1) / threads, thread);
  });
}

template <typename Work>
void in_turns(int64_t num, Work work) {  // work(item): sentences come sorted by length, and so each thread gets of all
  on_all_threads([&](int64_t thread, int64_t threads) {
    for (int64_t item = thread; item < num; item += threads) work(item);
  });
}

// ------------------------------------------------------------------- residual, dropout, norm

template <typename T>
void add_norm(const AddNorm& a) {
  const T* x = static_cast<const T*>(a.x);
  T* o = static_cast<T*>(a.o);
  T* y = static_cast<T*>(a.y);
  const int64_t D = a.width;
  in_parallel(a.num, [&](int64_t from, int64_t to, int64_t) {
    float* s = scratch(2 * D + 64);
    float* kept = s + D + W;
    for (int64_t row = from; row < to; row++) {
      if (o && a.drop.scale != 1.0f) keep(kept, D, a.keys[row], a.places[row], a.drop);
      Floats total = all(0);
      for (int64_t d = 0; d < D; d += W) {
        Floats v = load(x + row * D + d);
        if (o) {
          Floats u = load(o + row * D + d);
          if (a.drop.scale != 1.0f) u *= load(kept + d);
          v += u;
          store(o + row * D + d, v);
        }
        store(s + d, v);
        total += v;
      }
      if (!a.gain) continue;
      const float mean = sum(total) / D;
      Floats squares = all(0);
      for (int64_t d = 0; d < D; d += W) {
        const Floats v = load(s + d) - mean;
        squares += v * v;
      }
      const float rstd = 1.0f / std::sqrt(sum(squares) / D + a.epsilon);
      a.stats[2 * row] = mean;
      a.stats[2 * row + 1] = rstd;
      for (int64_t d = 0; d < D; d += W)
        store(y + row * D + d, (load(s + d) - mean) * rstd * load(a.gain + d) + load(a.bias + d));
    }
  });
}

template <typename T>
void add_norm_backward(const AddNormBackward& a) {
  const T* dy = static_cast<const T*>(a.dy);
  const T* s = static_cast<const T*>(a.s);
  const T* more = static_cast<const T*>(a.more);
  T* ds = static_cast<T*>(a.ds);
  T* d_o = static_cast<T*>(a.d_o);
  const int64_t D = a.width, threads = num_threads;
  const Memory sums(a.gain ? threads * 2 * D : 0);
  in_parallel(a.num, [&](int64_t from, int64_t to, int64_t thread) {
    float* g = scratch(2 * D + 64);
    float* kept = g + D + W;
    float* d_gain = sums.data() + thread * 2 * D;
    float* d_bias = d_gain + D;
    for (int64_t row = from; row < to; row++) {
      const int64_t at = row * D;
      float mean = 0, rstd = 0, first = 0, second = 0;
      if (a.gain) {
        mean = a.stats[2 * row];
        rstd = a.stats[2 * row + 1];
        Floats firsts = all(0), seconds = all(0);
        for (int64_t d = 0; d < D; d += W) {
          const Floats v = load(dy + at + d), hat = (load(s + at + d) - mean) * rstd, u = v * load(a.gain + d);
          store(d_gain + d, load(d_gain + d) + v * hat);
          store(d_bias + d, load(d_bias + d) + v);
          store(g + d, u);
          firsts += u;
          seconds += u * hat;
        }
        first = sum(firsts) / D;
        second = sum(seconds) / D;
      }
      if (d_o && a.drop.scale != 1.0f) keep(kept, D, a.keys[row], a.places[row], a.drop);
      for (int64_t d = 0; d < D; d += W) {
        Floats v;
        if (a.gain)
          v = (load(g + d) - first - (load(s + at + d) - mean) * rstd * second) * rstd;
        else
          v = load(dy + at + d);
        if (more) v += load(more + at + d);
        if (ds) store(ds + at + d, v);
        if (d_o) store(d_o + at + d, a.drop.scale != 1.0f ? v * load(kept + d) : v);
      }
    }
  });
  if (!a.gain) return;
  for (int64_t d = 0; d < D; d++) {
    float gain = 0, bias = 0;
    for (int64_t thread = 0; thread < threads; thread++) {
      gain += sums.data()[thread * 2 * D + d];
      bias += sums.data()[thread * 2 * D + D + d];
    }
    a.d_gain[d] = gain;
    a.d_bias[d] = bias;
  }
}

// ------------------------------------------------------------------- the activation of the feed-forward network

inline Floats logistic(Floats x) { return 1.0f / (1.0f + exponential(-x)); }

// The function and its derivative. gelu is x * Phi(x), Phi by its error function, number by number: few use it.
template <int kind>
inline void activate(Floats x, Floats& y, Floats& slope) {
  if constexpr (kind == RELU) {
    y = (x <= 0.0f) ? all(0.0f) : x;
    slope = (x <= 0.0f) ? all(0.0f) : all(1.0f);
  } else if constexpr (kind == SWISH) {
    const Floats s = logistic(x);
    y = x * s;
    slope = s + y * (1.0f - s);
  } else {
    Floats phi;
    for (int i = 0; i < W; i++) phi[i] = 0.5f * (1.0f + std::erf(x[i] * 0.70710678f));
    y = x * phi;
    slope = phi + x * 0.39894228f * exponential(-0.5f * x * x);
  }
}

template <typename T, int kind>
void activation(const Activation& a) {
  const T* x = static_cast<const T*>(a.x);
  T* to = static_cast<T*>(a.y);
  const T* dy = static_cast<const T*>(a.dy);
  const int64_t D = a.width;
  in_parallel(a.num, [&](int64_t from, int64_t until, int64_t) {
    float* kept = scratch(D + 64);
    for (int64_t row = from; row < until; row++) {
      if (a.drop.scale != 1.0f) keep(kept, D, a.keys[row], a.places[row], a.drop);
      for (int64_t d = 0; d < D; d += W) {
        Floats y, slope;
        activate<kind>(load(x + row * D + d), y, slope);
        if (dy) y = load(dy + row * D + d) * slope;
        if (a.drop.scale != 1.0f) y *= load(kept + d);
        store(to + row * D + d, y);
      }
    }
  });
}

template <typename T>
void activation_of_kind(const Activation& a) {
  if (a.kind == RELU) return activation<T, RELU>(a);
  if (a.kind == SWISH) return activation<T, SWISH>(a);
  activation<T, GELU>(a);
}

template <typename T>
void column_sums(const ColumnSums& a) {
  const T* x = static_cast<const T*>(a.x);
  const int64_t D = a.width, threads = num_threads;
  const Memory sums(threads * D);
  in_parallel(a.num, [&](int64_t first, int64_t last, int64_t thread) {
    float* own = sums.data() + thread * D;
    for (int64_t row = first; row < last; row++) {
      int64_t d = 0;
      for (; d + W <= D; d += W) store(own + d, load(own + d) + load(x + row * D + d));
      if (d < D) store_some(own + d, load_some(own + d, D - d) + load_some(x + row * D + d, D - d), D - d);
    }
  });
  for (int64_t d = 0; d < D; d++) {
    float total = 0;
    for (int64_t thread = 0; thread < threads; thread++) total += sums.data()[thread * D + d];
    a.sums[d] = total;
  }
}

// ------------------------------------------------------------------- attention

// C (M x N) = A (M x K) B (K x N), N a multiple of 16; A is reached by two strides, so it may lie on its side.
template <int rows, int vectors>
inline void block(const float* a, int64_t a_row, int64_t a_col, const float* b, int64_t ldb, float* c, int64_t ldc,
                  int64_t K) {
  Floats acc[rows][vectors];
  for (int i = 0; i < rows; i++)
    for (int v = 0; v < vectors; v++) acc[i][v] = all(0);
  for (int64_t k = 0; k < K; k++) {
    Floats right[vectors];
    for (int v = 0; v < vectors; v++) right[v] = load(b + k * ldb + v * W);
    for (int i = 0; i < rows; i++) {
      const Floats left = all(a[i * a_row + k * a_col]);
      for (int v = 0; v < vectors; v++) acc[i][v] += left * right[v];
    }
  }
  for (int i = 0; i < rows; i++)
    for (int v = 0; v < vectors; v++) store(c + i * ldc + v * W, acc[i][v]);
}

template <int vectors>
inline void column_of_blocks(int64_t M, int64_t K, const float* a, int64_t a_row, int64_t a_col, const float* b,
                             int64_t ldb, float* c, int64_t ldc) {
  int64_t i = 0;
  for (; i + 6 <= M; i += 6) block<6, vectors>(a + i * a_row, a_row, a_col, b, ldb, c + i * ldc, ldc, K);
  for (; i + 2 <= M; i += 2) block<2, vectors>(a + i * a_row, a_row, a_col, b, ldb, c + i * ldc, ldc, K);
  for (; i < M; i++) block<1, vectors>(a + i * a_row, a_row, a_col, b, ldb, c + i * ldc, ldc, K);
}

void multiply(int64_t M, int64_t N, int64_t K, const float* a, int64_t a_row, int64_t a_col, const float* b,
              int64_t ldb, float* c, int64_t ldc) {
  int64_t j = 0;
  for (; j + 3 * W <= N; j += 3 * W) column_of_blocks<3>(M, K, a, a_row, a_col, b + j, ldb, c + j, ldc);
  if (N - j == 2 * W) column_of_blocks<2>(M, K, a, a_row, a_col, b + j, ldb, c + j, ldc);
  if (N - j == W) column_of_blocks<1>(M, K, a, a_row, a_col, b + j, ldb, c + j, ldc);
}

// One head of one sentence as floats, rows filled up with zeros to a multiple of 16.
template <typename T>
void fetch(float* to, const T* from, int64_t stride, int64_t num, int64_t width, float scale = 1.0f) {
  const int64_t padded = round_up(width);
  for (int64_t i = 0; i < num; i++) {
    int64_t d = 0;
    for (; d + W <= width; d += W) store(to + i * padded + d, load(from + i * stride + d) * scale);
    if (d < width) store(to + i * padded + d, load_some(from + i * stride + d, width - d) * scale);
  }
}

template <typename T>
void put(T* to, int64_t stride, const float* from, int64_t num, int64_t width, float scale = 1.0f) {
  const int64_t padded = round_up(width);
  for (int64_t i = 0; i < num; i++) {
    int64_t d = 0;
    for (; d + W <= width; d += W) store(to + i * stride + d, load(from + i * padded + d) * scale);
    if (d < width) store_some(to + i * stride + d, load(from + i * padded + d) * scale, width - d);
  }
}

// Of two vectors, the blocks of `size` elements that come to the first (0) or the second (1) when every other block of
// the one changes places with its neighbour in the other.
template <int size, int which>
struct Swapped {
  static constexpr int place(int i) {
    if (which == 0) return i & size ? W + i - size : i;
    return i & size ? W + i : i + size;
  }
};

// With blocks of 1, 2, 4, then 8, that lays a square of 16 x 16 on its side.
template <int size>
inline void swap_blocks(Floats* square) {
  const auto all_places = std::make_integer_sequence<int, W>();
  for (int i = 0; i < W; i++) {
    if (i & size) continue;
    const Floats a = square[i], b = square[i + size];
    square[i] = picked<Swapped<size, 0>>(a, b, all_places);
    square[i + size] = picked<Swapped<size, 1>>(a, b, all_places);
  }
}

void turn(float* to, const float* from, int64_t num, int64_t width) {  // num x width to width x num, both padded
  const int64_t rows = round_up(num), columns = round_up(width);
  for (int64_t j = 0; j < rows; j += W)
    for (int64_t d = 0; d < columns; d += W) {
      Floats square[W];
      for (int i = 0; i < W; i++) square[i] = j + i < num ? load(from + (j + i) * columns + d) : all(0);
      swap_blocks<1>(square);
      swap_blocks<2>(square);
      swap_blocks<4>(square);
      swap_blocks<8>(square);
      for (int i = 0; i < W; i++) store(to + (d + i) * rows + j, square[i]);
    }
}

// Scores lie on their side: a row for each place that is looked at, sixteen places that look in a vector. So nothing is
// ever summed within a vector. `room` is their number, filled up.

// The softmax over the S rows, where a causal one lets place i see the rows up to its own.
void softmax(float* scores, int64_t S, int64_t room, bool is_causal) {
  const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Floats nothing = all(-std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < room; i += W) {
    float* column = scores + i;
    const int64_t seen = is_causal ? std::min(S, i + W) : S;
    Floats most = nothing;
    for (int64_t j = 0; j < seen; j++) {
      Floats x = load(column + j * room);
      if (is_causal && j > i) {
        x = (lanes + static_cast<int32_t>(i) >= static_cast<int32_t>(j)) ? x : nothing;
        store(column + j * room, x);
      }
      most = larger(x, most);
    }
    Floats total = all(0);
    for (int64_t j = 0; j < seen; j++) {
      const Floats e = exponential(load(column + j * room) - most);
      store(column + j * room, e);
      total += e;
    }
    const Floats inverse = 1.0f / total;
    for (int64_t j = 0; j < seen; j++) store(column + j * room, load(column + j * room) * inverse);
    for (int64_t j = seen; j < S; j++) store(column + j * room, all(0));
  }
}

// What the dropout multiplies the weights of a head by, as they lie: S x room.
// `to` has room for as much again.
void keep_weights(float* to, int64_t L, int64_t S, uint64_t key, int64_t h, const Drop& drop) {
  const int64_t width = round_up(S);
  float* rows = to + width * round_up(L);
  for (int64_t i = 0; i < L; i++) keep(rows + i * width, S, key, (static_cast<uint64_t>(h) << 20) + i, drop);
  turn(to, rows, L, S);
}

// A head of a sentence.
template <typename T>
struct Head {
  const Attention& a;
  int64_t h, L, S, room, K, V, Kp, Vp, at_q, at_k;
  float scale;

  Head(const Attention& a, int64_t b, int64_t h) : a(a), h(h), K(a.key_width), V(a.value_width) {
    at_q = a.q_starts[b];
    at_k = a.k_starts[b];
    L = a.q_starts[b + 1] - at_q;
    S = a.k_starts[b + 1] - at_k;
    room = round_up(L);
    Kp = round_up(K);
    Vp = round_up(V);
    scale = 1.0f / std::sqrt(static_cast<float>(K));
  }

  int64_t of_q() const { return at_q * a.q_stride + h * K; }
  int64_t of_k() const { return at_k * a.k_stride + h * K; }
  int64_t of_v() const { return at_k * a.v_stride + h * V; }
  int64_t of_out() const { return (at_q * a.num_heads + h) * V; }

  // The weights of each place (S x room), from queries on their side and keys.
  void weigh(float* weights, const float* k, const float* qt) const {
    multiply(S, room, K, k, Kp, 1, qt, room, weights, room);
    softmax(weights, S, room, a.is_causal);
  }
};

inline void multiply_all(float* to, const float* by, int64_t num) {
  for (int64_t i = 0; i < num; i += W) store(to + i, load(to + i) * load(by + i));
}

template <typename T>
void attend(const Attention& a) {
  const bool drops = a.drop.scale != 1.0f;
  in_turns(a.num * a.num_heads, [&](int64_t item) {
    const int64_t b = item % a.num, h = item / a.num;
    const Head<T> head(a, b, h);
    const int64_t L = head.L, S = head.S, room = head.room, K = head.K, V = head.V, Kp = head.Kp, Vp = head.Vp;
    float* q = scratch(room * (2 * Kp + Vp + S) + S * (Kp + Vp) + (drops ? 2 * room * round_up(S) + 64 : 0));
    float *qt = q + room * Kp, *out = qt + room * Kp, *weights = out + room * Vp, *k = weights + S * room,
          *v = k + S * Kp, *kept = v + S * Vp;
    fetch(q, static_cast<const T*>(a.q) + head.of_q(), a.q_stride, L, K, head.scale);
    fetch(k, static_cast<const T*>(a.k) + head.of_k(), a.k_stride, S, K);
    fetch(v, static_cast<const T*>(a.v) + head.of_v(), a.v_stride, S, V);
    turn(qt, q, L, K);
    head.weigh(weights, k, qt);
    if (drops) {
      keep_weights(kept, L, S, a.keys[b], h, a.drop);
      multiply_all(weights, kept, S * room);
    }
    multiply(L, Vp, S, weights, 1, room, v, Vp, out, Vp);
    put(static_cast<T*>(a.out) + head.of_out(), a.num_heads * V, out, L, V);
  });
}

template <typename T>
void attend_backward(const Attention& a) {
  const bool drops = a.drop.scale != 1.0f;
  in_turns(a.num * a.num_heads, [&](int64_t item) {
    const int64_t b = item % a.num, h = item / a.num;
    const Head<T> head(a, b, h);
    const int64_t L = head.L, S = head.S, room = head.room, K = head.K, V = head.V, Kp = head.Kp, Vp = head.Vp;
    float* q = scratch(room * (3 * Kp + 2 * Vp + 2 * S) + S * 2 * (Kp + Vp) + (drops ? 2 * room * round_up(S) + 64 : 0));
    float *qt = q + room * Kp, *dq = qt + room * Kp, *d_out = dq + room * Kp, *dt = d_out + room * Vp,
          *weights = dt + room * Vp, *slopes = weights + S * room, *k = slopes + S * room, *dk = k + S * Kp,
          *v = dk + S * Kp, *dv = v + S * Vp, *kept = dv + S * Vp;
    fetch(q, static_cast<const T*>(a.q) + head.of_q(), a.q_stride, L, K, head.scale);
    fetch(k, static_cast<const T*>(a.k) + head.of_k(), a.k_stride, S, K);
    fetch(v, static_cast<const T*>(a.v) + head.of_v(), a.v_stride, S, V);
    fetch(d_out, static_cast<const T*>(a.d_out) + head.of_out(), a.num_heads * V, L, V);
    turn(qt, q, L, K);
    turn(dt, d_out, L, V);
    head.weigh(weights, k, qt);
    multiply(S, room, V, v, Vp, 1, dt, room, slopes, room);  // of the weights as they were used
    if (drops) {
      keep_weights(kept, L, S, a.keys[b], h, a.drop);
      multiply_all(slopes, kept, S * room);
    }
    for (int64_t i = 0; i < room; i += W) {  // of the scores
      Floats mean = all(0);
      for (int64_t at = i; at < S * room; at += room) mean += load(slopes + at) * load(weights + at);
      for (int64_t at = i; at < S * room; at += room)
        store(slopes + at, load(weights + at) * (load(slopes + at) - mean));
    }
    if (drops) multiply_all(weights, kept, S * room);
    multiply(S, Vp, L, weights, room, 1, d_out, Vp, dv, Vp);
    multiply(L, Kp, S, slopes, 1, room, k, Kp, dq, Kp);
    multiply(S, Kp, L, slopes, room, 1, q, Kp, dk, Kp);  // q is scaled already
    put(static_cast<T*>(a.dq) + head.of_q(), a.q_stride, dq, L, K, head.scale);
    put(static_cast<T*>(a.dk) + head.of_k(), a.k_stride, dk, S, K);
    put(static_cast<T*>(a.dv) + head.of_v(), a.v_stride, dv, S, V);
  });
}

// ------------------------------------------------------------------- embedding and loss

template <typename T>
void embed(const Embed& a) {
  T* to = static_cast<T*>(a.y);
  const int64_t D = a.width;
  in_parallel(a.num, [&](int64_t from, int64_t until, int64_t) {
    float* kept = scratch(D + 64);
    for (int64_t row = from; row < until; row++) {
      const float* piece = a.pieces[row] < 0 ? nullptr : a.table + a.pieces[row] * D;
      const float* position = a.positions + a.places[row] * D;
      if (a.drop.scale != 1.0f) keep(kept, D, a.keys[row], a.places[row], a.drop);
      for (int64_t d = 0; d < D; d += W) {
        Floats x = load(position + d);
        if (piece) x += load(piece + d) * a.scale;
        if (a.drop.scale != 1.0f) x *= load(kept + d);
        store(to + row * D + d, x);
      }
    }
  });
}

// Adds to the gradients of the table, and of the positions if they are learnt. A thread has columns of its own, so that
// rows of the same piece are added up in their order.
template <typename T>
void embed_backward(const Embed& a) {
  const T* dy = static_cast<const T*>(a.dy);
  const int64_t D = a.width, vectors = D / W;
  in_parallel(vectors, [&](int64_t from, int64_t until, int64_t) {
    float* kept = scratch(D + 64);
    for (int64_t row = 0; row < a.num && from < until; row++) {
      if (a.drop.scale != 1.0f) keep(kept, until * W, a.keys[row], a.places[row], a.drop, from * W / 32 * 32);
      float* piece = a.pieces[row] < 0 ? nullptr : a.d_table + a.pieces[row] * D;
      float* position = a.d_positions ? a.d_positions + a.places[row] * D : nullptr;
      for (int64_t d = from * W; d < until * W; d += W) {
        Floats x = load(dy + row * D + d);
        if (a.drop.scale != 1.0f) x *= load(kept + d);
        if (piece) store(piece + d, load(piece + d) + x * a.scale);
        if (position) store(position + d, load(position + d) + x);
      }
    }
  });
}

// Of each row of logits: the loss against (1 - eps) one-hot + eps / V, the negative log-likelihood, and the gradient in
// place of the logits. A row whose target is negative counts for nothing.
template <typename T>
void loss(const Loss& a) {
  T* logits = static_cast<T*>(a.logits);
  const int64_t V = a.width;
  in_parallel(a.num, [&](int64_t from, int64_t until, int64_t) {
    float* e = scratch(round_up(V));
    for (int64_t row = from; row < until; row++) {
      T* x = logits + row * V;
      const int64_t target = a.targets[row];
      a.losses[2 * row] = a.losses[2 * row + 1] = 0;
      if (target < 0) {
        memset(x, 0, V * sizeof(T));
        continue;
      }
      const Floats nothing = all(-std::numeric_limits<float>::infinity());
      const int64_t full = V / W * W;
      const int rest = static_cast<int>(V - full);
      Floats most = nothing, last = nothing;
      for (int64_t v = 0; v < full; v += W) most = larger(load(x + v), most);
      if (rest) {
        const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        last = (lanes < rest) ? load_some(x + full, rest) : nothing;
        most = larger(last, most);
      }
      const float top = largest(most);
      const float wanted = load_some(x + target, 1)[0] - top;
      Floats totals = all(0), sums = all(0);  // of e^(x - top), and of x - top
      for (int64_t v = 0; v < full; v += W) {
        const Floats z = load(x + v) - top, power = exponential(z);
        store(e + v, power);
        totals += power;
        sums += z;
      }
      float below = sum(sums);
      if (rest) {
        const Floats z = last - top, power = exponential(z);
        store(e + full, power);
        totals += power;
        for (int i = 0; i < rest; i++) below += z[i];
      }
      const float total = sum(totals), log_total = std::log(total), each = a.smoothing / V;
      const double nll = static_cast<double>(log_total) - wanted;
      a.losses[2 * row + 1] = nll;
      a.losses[2 * row] = (1.0 - a.smoothing) * nll;
      if (a.smoothing > 0) a.losses[2 * row] += each * (static_cast<double>(V) * log_total - below);
      const float inverse = 1.0f / total;
      e[target] -= (1.0f - a.smoothing) * total;  // which the next line divides by the same
      for (int64_t v = 0; v < full; v += W) store(x + v, load(e + v) * inverse - each);
      if (rest) store_some(x + full, load(e + full) * inverse - each, rest);
    }
  });
}

}  // namespace

extern const Kernels VARIANT = {
    [](const AddNorm& a) { a.is_bf16 ? add_norm<bfloat16>(a) : add_norm<float>(a); },
    [](const AddNormBackward& a) { a.is_bf16 ? add_norm_backward<bfloat16>(a) : add_norm_backward<float>(a); },
    [](const Activation& a) { a.is_bf16 ? activation_of_kind<bfloat16>(a) : activation_of_kind<float>(a); },
    [](const ColumnSums& a) { a.is_bf16 ? column_sums<bfloat16>(a) : column_sums<float>(a); },
    [](const Attention& a) { a.is_bf16 ? attend<bfloat16>(a) : attend<float>(a); },
    [](const Attention& a) { a.is_bf16 ? attend_backward<bfloat16>(a) : attend_backward<float>(a); },
    [](const Embed& a) { a.is_bf16 ? embed<bfloat16>(a) : embed<float>(a); },
    [](const Embed& a) { a.is_bf16 ? embed_backward<bfloat16>(a) : embed_backward<float>(a); },
    [](const Loss& a) { a.is_bf16 ? loss<bfloat16>(a) : loss<float>(a); },
};

}  // namespace diglot
