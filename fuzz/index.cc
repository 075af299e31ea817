// SPDX-License-Identifier: Apache-2.0
// The saved index of an attention spec (the first line), altered as the rest says (support/forged_index.h),
// with checksums that are right: refused, or an index that serves.
#include "fuzz/target.h"
#include "lodestone/spec.h"
#include "support/forged_index.h"
#include "support/world.h"

namespace {

using namespace lode;

constexpr std::int64_t kContext = 120, kQuestion = 4;

/// A method on a small text, with what it saves there.
struct Subject {
  explicit Subject(const Spec& spec)
      : pool(1),
        world({.kv_heads = 2, .group = 2, .d = 16, .dense = spec.dense}),
        geometry(world.geometry(pool)) {
    const MethodInfo& method = find_method(spec.name);
    if (!method.make) return;
    world.write(kContext);
    selector = method.make(spec, geometry, "model");
    selector->build(0, world.store().layer(0));
    world.write(kQuestion);
    sections = test::saved_sections(*selector);
  }
  ThreadPool pool;
  test::World world;
  LayerGeometry geometry;
  std::unique_ptr<Selector> selector;
  test::IndexSections sections;
};

void serve(Subject& s) {
  const QueryBlock block = s.world.block(kContext, kQuestion);
  Selection out;
  s.selector->append(0, block.kv, block.far_end(kQuestion - 1, s.geometry.dense));
  s.selector->select({&block, 1}, out);
  std::vector<std::string> problems;
  test::far_sets(out, block, s.geometry, &problems);
  LODE_ASSERT(problems.empty());
}

}  // namespace

LODE_FUZZ_TARGET(index) {
  const std::size_t end = std::min(input.find('\n'), input.size());
  const Spec spec = parse_spec(input.substr(0, end));
  if (spec.dense.sink > kContext || spec.given.contains("weights")) return;
  Subject subject(spec);
  if (subject.sections.empty()) return;
  test::IndexSections forged = subject.sections;
  input.remove_prefix(std::min(end + 1, input.size()));
  for (; input.size() >= test::Forgery::kBytes; input.remove_prefix(test::Forgery::kBytes))
    test::Forgery::parse(input).apply(forged);
  test::load_sections(*subject.selector, forged, subject.world.store().layer(0));
  serve(subject);
}
