// SPDX-License-Identifier: Apache-2.0
// Chooses the kernels for the machine that the program runs on, once.
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <fmt/format.h>

#include <cstdlib>
#include <vector>

#include "kernels/kernels.h"
#include "lodestone/error.h"

namespace lode {

extern const KernelTable kScalarKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
const KernelTable& avx512vnni_kernels();  // only on a machine that has their instructions
const KernelTable& avx512bf16_kernels();  // the same
const KernelTable& amx_kernels();         // only on a machine for which has_amx() holds
#endif

namespace {

#if defined(__x86_64__)
bool has_avx2() {
  unsigned a = 0, b = 0, c = 0, d = 0;  // clang 14 does not know "f16c"
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
         (c & bit_F16C) != 0;
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512vnni() {
  return has_avx512() && __builtin_cpu_supports("avx512vnni");
}
bool has_avx512bf16() {
  return has_avx512vnni() && __builtin_cpu_supports("avx512bf16");
}
/// Tiles of bf16, the bf16 vectors that go with them, and the system's leave to use the tiles' 8 KiB of
/// registers.
bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!has_avx512bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if ((d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

std::vector<const KernelTable*> find_supported() {
  std::vector<const KernelTable*> tables = {&kScalarKernels};
#if defined(__x86_64__)
  if (has_avx2()) tables.push_back(&kAvx2Kernels);
  if (has_avx512()) tables.push_back(&kAvx512Kernels);
  if (has_avx512vnni()) tables.push_back(&avx512vnni_kernels());
  if (has_avx512bf16()) tables.push_back(&avx512bf16_kernels());
  if (has_amx()) tables.push_back(&amx_kernels());
#endif
  return tables;
}

const KernelTable& choose() {
  const std::span<const KernelTable* const> tables = supported_kernels();
  const char* wanted = std::getenv("LODESTONE_ISA");
  if (!wanted || !*wanted) return *tables.back();
  std::string names;
  for (const KernelTable* table : tables) {
    if (table->name == wanted) return *table;
    names += names.empty() ? std::string(table->name) : fmt::format(", {}", table->name);
  }
  throw InputError(fmt::format("LODESTONE_ISA is \"{}\"; this machine can run: {}", wanted, names));
}

}  // namespace

std::span<const KernelTable* const> supported_kernels() {
  static const std::vector<const KernelTable*> tables = find_supported();
  return tables;
}

const KernelTable& kernels() {
  static const KernelTable& table = choose();
  return table;
}

}  // namespace lode
