// SPDX-License-Identifier: Apache-2.0
// The few calls of cuBLASLt that are used, by name, with the values of its enumerations as NVIDIA documents
// them (they are part of the library's binary interface and equal in versions 11 to 13).
#include <dlfcn.h>

#include <compare>
#include <cstdlib>
#include <map>
#include <vector>

#include "kernels/cuda/device/check.cuh"
#include "kernels/cuda/device/launch_chain.h"
#include "kernels/cuda/linear/linear_cublaslt.h"

namespace lode::cuda {

namespace {

constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;
constexpr int kCompute32F = 68, kCompute32FastTf32 = 77, kReal32F = 0, kReal16F = 2, kReal16Bf = 14;
constexpr int kDescTransposeA = 3, kDescTransposeB = 4, kPreferenceMaxWorkspace = 1, kTranspose = 1;

struct Algorithm {
  std::uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  std::size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

/// The library's functions; every one returns 0 for success.
struct Api {
  int (*create)(void**);
  int (*destroy)(void*);
  int (*desc_create)(void**, int compute, int scale);
  int (*desc_set)(void*, int attribute, const void*, std::size_t);
  int (*desc_destroy)(void*);
  int (*layout_create)(void**, int type, std::uint64_t rows, std::uint64_t cols, std::int64_t ld);
  int (*layout_destroy)(void*);
  int (*preference_create)(void**);
  int (*preference_set)(void*, int attribute, const void*, std::size_t);
  int (*preference_destroy)(void*);
  int (*heuristic)(void*, void*, void*, void*, void*, void*, void*, int, Heuristic*, int*);
  int (*matmul)(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*,
                void*, void*, void*, const Algorithm*, void*, std::size_t, StreamHandle);
};

template <class F>
bool resolve(void* library, const char* name, F& to) {
  to = reinterpret_cast<F>(dlsym(library, name));
  return to != nullptr;
}

bool resolve_all(void* library, Api& api) {
  return resolve(library, "cublasLtCreate", api.create) && resolve(library, "cublasLtDestroy", api.destroy) &&
         resolve(library, "cublasLtMatmulDescCreate", api.desc_create) &&
         resolve(library, "cublasLtMatmulDescSetAttribute", api.desc_set) &&
         resolve(library, "cublasLtMatmulDescDestroy", api.desc_destroy) &&
         resolve(library, "cublasLtMatrixLayoutCreate", api.layout_create) &&
         resolve(library, "cublasLtMatrixLayoutDestroy", api.layout_destroy) &&
         resolve(library, "cublasLtMatmulPreferenceCreate", api.preference_create) &&
         resolve(library, "cublasLtMatmulPreferenceSetAttribute", api.preference_set) &&
         resolve(library, "cublasLtMatmulPreferenceDestroy", api.preference_destroy) &&
         resolve(library, "cublasLtMatmulAlgoGetHeuristic", api.heuristic) &&
         resolve(library, "cublasLtMatmul", api.matmul);
}

/// Where the loader looks first (LD_LIBRARY_PATH, ld.so.conf), then the toolkit's own folders.
std::vector<std::string> candidates() {
  const std::string names[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
  std::vector<std::string> all(std::begin(names), std::end(names));
  std::vector<std::string> folders;
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH"}) {
    if (const char* value = std::getenv(variable)) folders.push_back(std::string(value) + "/lib64/");
  }
  folders.emplace_back("/usr/local/cuda/lib64/");
  for (const std::string& folder : folders) {
    for (const std::string& name : names) all.push_back(folder + name);
  }
  return all;
}

void succeed(int status, const char* call) {
  if (status != 0) {
    throw RunError(std::string("the GPU failed: cuBLASLt's ") + call + " returned status " +
                   std::to_string(status));
  }
}

int cuda_type(DType type) {
  return type == DType::f32 ? kReal32F : type == DType::f16 ? kReal16F : kReal16Bf;
}

/// The library's view of a product c[m, n] = op(a) op(b): it is column-major, so that c^T [n, m] = op(b)^T
/// op(a)^T.
struct Shape {
  std::int64_t m = 0, n = 0, k = 0;
  DType type = DType::f32;
  bool a_transposed = false, b_transposed = false;
  std::int64_t stride = 0;  ///< from a row of c to the next
  auto operator<=>(const Shape&) const = default;
};

/// A product of one shape: descriptors and the algorithm that the library thinks best.
struct Plan {
  void *desc = nullptr, *a = nullptr, *b = nullptr, *c = nullptr;
  Heuristic best{};
  bool found = false;
};

}  // namespace

struct CublasLt::Impl {
  Api api{};
  void* handle = nullptr;
  Buffer workspace;
  std::map<Shape, Plan> plans;

  ~Impl() {
    const BesideNoCapture turn;
    for (auto& [shape, plan] : plans) {
      api.desc_destroy(plan.desc);
      for (void* layout : {plan.a, plan.b, plan.c}) api.layout_destroy(layout);
    }
    if (handle != nullptr) api.destroy(handle);
  }

  const Plan& plan(const Shape& shape) {
    const auto [at, fresh] = plans.try_emplace(shape);
    Plan& p = at->second;
    if (!fresh) return p;
    const int compute = shape.type == DType::f32 ? kCompute32FastTf32 : kCompute32F;
    succeed(api.desc_create(&p.desc, compute, kReal32F), "MatmulDescCreate");
    const auto transpose = [&](int which) {
      succeed(api.desc_set(p.desc, which, &kTranspose, sizeof kTranspose), "MatmulDescSetAttribute");
    };
    if (shape.b_transposed) transpose(kDescTransposeA);
    if (shape.a_transposed) transpose(kDescTransposeB);
    const auto layout = [&](void** to, int type, std::int64_t rows, std::int64_t cols, std::int64_t stride) {
      succeed(api.layout_create(to, type, static_cast<std::uint64_t>(cols), static_cast<std::uint64_t>(rows),
                                stride),
              "MatrixLayoutCreate");
    };
    const auto stored = [&](void** to, std::int64_t rows, std::int64_t cols, bool transposed) {
      const std::int64_t width = transposed ? rows : cols;
      layout(to, cuda_type(shape.type), transposed ? cols : rows, width, width);
    };
    stored(&p.a, shape.m, shape.k, shape.a_transposed);
    stored(&p.b, shape.k, shape.n, shape.b_transposed);
    layout(&p.c, kReal32F, shape.m, shape.n, shape.stride);
    void* preference = nullptr;
    succeed(api.preference_create(&preference), "MatmulPreferenceCreate");
    api.preference_set(preference, kPreferenceMaxWorkspace, &kWorkspaceBytes, sizeof kWorkspaceBytes);
    int count = 0;
    const int status = api.heuristic(handle, p.desc, p.b, p.a, p.c, p.c, preference, 1, &p.best, &count);
    api.preference_destroy(preference);
    p.found = status == 0 && count > 0 && p.best.state == 0;
    return p;
  }

  bool multiply(const Shape& shape, const void* a, const void* b, bool add, float* c, StreamHandle stream) {
    for (const void* p : {a, b, static_cast<const void*>(c)}) {
      if (reinterpret_cast<std::uintptr_t>(p) % 16 != 0) return false;
    }
    flush_launches();
    const BesideNoCapture turn;  // the first product of a shape loads a kernel
    const Plan& p = plan(shape);
    if (!p.found) return false;
    const float one = 1.0f, beta = add ? 1.0f : 0.0f;
    succeed(api.matmul(handle, p.desc, &one, b, p.b, a, p.a, &beta, c, p.c, c, p.c, &p.best.algorithm,
                       workspace.as<void>(), kWorkspaceBytes, stream),
            "Matmul");
    return true;
  }
};

CublasLt::CublasLt(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CublasLt::~CublasLt() = default;

std::unique_ptr<CublasLt> CublasLt::open(std::string& found) {
  auto impl = std::make_unique<Impl>();
  const BesideNoCapture turn;
  std::string tried;
  for (const std::string& name : candidates()) {
    void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr && resolve_all(library, impl->api) && impl->api.create(&impl->handle) == 0) {
      found = name;
      impl->workspace = Buffer(static_cast<std::int64_t>(kWorkspaceBytes), "cuBLASLt's workspace");
      return std::unique_ptr<CublasLt>(new CublasLt(std::move(impl)));
    }
    if (library != nullptr) dlclose(library);
    impl->handle = nullptr;
    tried += (tried.empty() ? "" : ", ") + name;
  }
  found = "not found (tried " + tried + ")";
  return nullptr;
}

bool CublasLt::multiply(const Operand& x, const Operand& w, bool add, float* y, StreamHandle stream,
                        std::int64_t stride) {
  return impl_->multiply({.m = x.rows,
                          .n = w.rows,
                          .k = w.cols,
                          .type = w.type,
                          .a_transposed = false,
                          .b_transposed = true,
                          .stride = stride > 0 ? stride : w.rows},
                         x.data, w.data, add, y, stream);
}

bool CublasLt::multiply(const Product& p, StreamHandle stream) {
  return impl_->multiply({.m = p.m,
                          .n = p.n,
                          .k = p.k,
                          .type = DType::f32,
                          .a_transposed = p.a_transposed,
                          .b_transposed = p.b_transposed,
                          .stride = p.n},
                         p.a, p.b, p.add, p.c, stream);
}

}  // namespace lode::cuda
