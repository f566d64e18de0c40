// The kernels for the processor that runs this, under names that ctypes finds.

#include <new>

#include "kernels.h"

thread_local int diglot::num_threads = 1;

namespace {

// From the plainest to the best; what this processor has not got is null.
const diglot::Kernels* level(int number) {
  if (number == 0) return &diglot::baseline;
#ifdef __x86_64__
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (number == 1 && has_avx2) return &diglot::avx2;
  if (number == 2 && has_avx512) return &diglot::avx512;
#ifdef HAS_AVX512BF16
  if (number == 3 && has_avx512 && __builtin_cpu_supports("avx512bf16")) return &diglot::avx512bf16;
#endif
#endif
  return nullptr;
}

const diglot::Kernels* best() {
  for (int number = 3; number > 0; number--)
    if (level(number)) return level(number);
  return level(0);
}

const diglot::Kernels* kernels = best();

// 0, or 1 where memory ran out.
template <typename Argument>
int call(void (*kernel)(const Argument&), const Argument* argument, int threads) {
  diglot::num_threads = threads;
  try {
    kernel(*argument);
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))
#define KERNEL(name, Argument) \
  EXPORT int diglot_##name(const diglot::Argument* a, int threads) { return call(kernels->name, a, threads); }

KERNEL(add_norm, AddNorm)
KERNEL(add_norm_backward, AddNormBackward)
KERNEL(activation, Activation)
KERNEL(column_sums, ColumnSums)
KERNEL(attend, Attention)
KERNEL(attend_backward, Attention)
KERNEL(embed, Embed)
KERNEL(embed_backward, Embed)
KERNEL(loss, Loss)

// The sizes of the structures, by which kernels.py knows that it speaks of the same.
EXPORT void diglot_sizes(int64_t* sizes) {
  const int64_t all[] = {sizeof(diglot::AddNorm), sizeof(diglot::AddNormBackward), sizeof(diglot::Activation),
                         sizeof(diglot::ColumnSums), sizeof(diglot::Attention), sizeof(diglot::Embed),
                         sizeof(diglot::Loss)};
  for (int64_t size : all) *sizes++ = size;
}

// Take another level than the best, for a test; 0 where the processor has not got it.
EXPORT int diglot_use(int number) {
  const diglot::Kernels* found = number < 0 ? best() : level(number);
  if (found) kernels = found;
  return found != nullptr;
}
