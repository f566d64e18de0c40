// The kernels for the processor that runs this, under names that ctypes finds.

#include <new>

#include "kernels.h"

namespace {

const diglot::Kernels& best() {
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return __builtin_cpu_supports("avx512bf16") ? diglot::avx512bf16 : diglot::avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return diglot::avx2;
#endif
  return diglot::baseline;
}

const diglot::Kernels& kernels = best();

}  // namespace

// 0, or 1 where memory ran out.
template <typename Argument>
int call(void (*kernel)(const Argument&), const Argument* argument) {
  try {
    kernel(*argument);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

#define EXPORT extern "C" __attribute__((visibility("default"))) int

EXPORT diglot_add_norm(const diglot::AddNorm* a) { return call(kernels.add_norm, a); }
EXPORT diglot_add_norm_backward(const diglot::AddNormBackward* a) { return call(kernels.add_norm_backward, a); }
EXPORT diglot_activation(const diglot::Activation* a) { return call(kernels.activation, a); }
EXPORT diglot_column_sums(const diglot::ColumnSums* a) { return call(kernels.column_sums, a); }
EXPORT diglot_attend(const diglot::Attention* a) { return call(kernels.attend, a); }
EXPORT diglot_attend_backward(const diglot::Attention* a) { return call(kernels.attend_backward, a); }
EXPORT diglot_embed(const diglot::Embed* a) { return call(kernels.embed, a); }
EXPORT diglot_embed_backward(const diglot::Embed* a) { return call(kernels.embed_backward, a); }
EXPORT diglot_loss(const diglot::Loss* a) { return call(kernels.loss, a); }
