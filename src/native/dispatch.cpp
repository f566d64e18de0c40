// The kernels for the processor that runs this, under names that ctypes finds.

#include "kernels.h"

namespace {

const diglot::Kernels& best() {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return diglot::avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return diglot::avx2;
#endif
  return diglot::baseline;
}

const diglot::Kernels& kernels = best();

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void diglot_add_norm(const diglot::AddNorm* a) { kernels.add_norm(*a); }
EXPORT void diglot_add_norm_backward(const diglot::AddNormBackward* a) { kernels.add_norm_backward(*a); }
EXPORT void diglot_activation(const diglot::Activation* a) { kernels.activation(*a); }
EXPORT void diglot_attend(const diglot::Attention* a) { kernels.attend(*a); }
EXPORT void diglot_attend_backward(const diglot::Attention* a) { kernels.attend_backward(*a); }
EXPORT void diglot_embed(const diglot::Embed* a) { kernels.embed(*a); }
EXPORT void diglot_embed_backward(const diglot::Embed* a) { kernels.embed_backward(*a); }
EXPORT void diglot_loss(const diglot::Loss* a) { kernels.loss(*a); }
EXPORT void diglot_column_sums(const void* x, float* to, int64_t num, int64_t width, int is_bf16) {
  kernels.column_sums(x, to, num, width, is_bf16);
}
