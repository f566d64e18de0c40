// What the kernels are given. kernels.py has the same structures, field by field.
//
// Rows of one sentence are packed below those of the one before. `keys` and `places` tell for each row the key of its
// sample's dropout and its position in the sentence.

#pragma once

#include <cstdint>

namespace diglot {

struct Drop {
  int64_t threshold;  // of 16 random bits, read with their sign: below it a place is dropped
  int64_t salt;       // added to the keys: it tells one dropout of the network from the others
  float scale;        // of what is kept; 1 where nothing is dropped
};

// s = x + dropout(o), which takes the place of o; y = gain * (s - mean) / deviation + bias.
// Without o, s is x; without a gain there is no norm, and no y.
struct AddNorm {
  int64_t num, width, is_bf16;
  const void* x;
  void* o;
  void* y;
  const float *gain, *bias;
  float* stats;  // (num, 2): mean and 1 / deviation
  const int64_t *keys, *places;
  Drop drop;
  float epsilon;
};

// From the gradient of y that of s, to which `more` is added, and that of o. Without a gain, dy is that of s.
struct AddNormBackward {
  int64_t num, width, is_bf16;
  const void *dy, *s, *more;
  void *ds, *d_o;
  const float* gain;
  const float* stats;
  float *d_gain, *d_bias;
  const int64_t *keys, *places;
  Drop drop;
};

enum Kind { RELU, SWISH, GELU };

// y = dropout(f(x)); with dy, y is the gradient of x instead.
struct Activation {
  int64_t num, width, is_bf16, kind;
  const void* x;
  void* y;
  const void* dy;
  const int64_t *keys, *places;
  Drop drop;
};

// The sum of each column, which is the gradient of a bias.
struct ColumnSums {
  int64_t num, width, is_bf16;
  const void* x;
  float* sums;
};

// Of every sentence, whose rows are between its start and the next one's, and of every head.
struct Attention {
  int64_t num, is_bf16, is_causal, num_heads, key_width, value_width, q_stride, k_stride, v_stride;
  const int64_t *q_starts, *k_starts;  // (num + 1)
  const void *q, *k, *v;
  void* out;
  const void* d_out;
  void *dq, *dk, *dv;   // with the strides of q, k and v
  const int64_t* keys;  // (num)
  Drop drop;
};

// y = dropout(scale * table[piece] + positions[place]); a negative piece stands for the zero vector.
struct Embed {
  int64_t num, width, is_bf16;
  const int64_t* pieces;
  const float *table, *positions;
  void* y;
  const void* dy;
  float *d_table, *d_positions;
  const int64_t *keys, *places;
  Drop drop;
  float scale;
};

struct Loss {
  int64_t num, width, is_bf16;
  void* logits;  // their gradient takes their place
  const int64_t* targets;
  double* losses;  // (num, 2): smoothed, plain
  float smoothing;
};

struct Kernels {
  void (*add_norm)(const AddNorm&);
  void (*add_norm_backward)(const AddNormBackward&);
  void (*activation)(const Activation&);
  void (*column_sums)(const ColumnSums&);
  void (*attend)(const Attention&);
  void (*attend_backward)(const Attention&);
  void (*embed)(const Embed&);
  void (*embed_backward)(const Embed&);
  void (*loss)(const Loss&);
};

extern thread_local int num_threads;  // of the call that runs

extern const Kernels baseline, avx2, avx512, avx512bf16;

}  // namespace diglot
