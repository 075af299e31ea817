// SPDX-License-Identifier: Apache-2.0
// Speed of the scorers that read something of every key, and of what turns scores into lists: one layer,
// bf16, d 128, one query token, over layers that rotate beyond the caches. usage: bench_scores
#include <cmath>

#include "bench.h"
#include "kernels/cuda/baselines/pq_encode.h"
#include "kernels/cuda/baselines/label_keys.h"
#include "kernels/cuda/device/random.h"

namespace lode::cuda::bench {
namespace {

constexpr int kDim = 128, kKvHeads = 8, kHeads = 32, kChannels = 16;
constexpr std::int64_t kRotated = std::int64_t{2} << 30, kSink = 128, kWindow = 128;

void run(std::int64_t tokens, std::int32_t k) {
  Stream stream;
  const KvLayout layout = {kKvHeads, kDim, DType::bf16, 0};
  const std::int64_t each = layout.layer_bytes(tokens), places = std::max<std::int64_t>(2, kRotated / each);
  const Buffer memory(places * each, "keys and values"),
      q = random_floats(kHeads * kDim, 1.0f, 2), scores(kHeads * tokens * 4, "scores"),
      shared(kKvHeads * tokens * 4, "shared scores"),
      sums(kHeads * sums_of_keys(tokens) * std::int64_t{sizeof(ExponentialSum)}, "sums");
  fill_uniform(memory.as<void>(), DType::bf16, memory.bytes() / 2, 0, 1.7f, 1, stream.get());
  const std::vector<const char*> bases = {memory.as<char>()};
  const std::vector<QueryToken> token = {{0, static_cast<std::int32_t>(tokens - 1)}};
  const Buffer bases_device(8, "bases"), token_device(8, "tokens");
  copy(bases_device.as<void>(), bases.data(), 8, stream.get());
  copy(token_device.as<void>(), token.data(), 8, stream.get());
  const auto queries = [&](int i) {
    return Queries{.tokens = token_device.as<QueryToken>(),
                   .bases = bases_device.as<const char*>(),
                   .layer_offset = i % places * each,
                   .layout = layout,
                   .count = 1,
                   .query_heads = kHeads,
                   .scale = 1.0f / std::sqrt(static_cast<float>(kDim)),
                   .q = q.as<float>()};
  };
  KeyLabels labels = {.capacity = tokens, .count = kChannels, .bits = 4};
  KeyCodes codes = {.capacity = tokens, .parts = 2, .width = kDim / 2, .bits = 6};
  constexpr int kCopies = 64;  // of what an index holds, so that reads of it miss the caches, too
  const Buffer label_memory(kCopies * labels.layer_bytes(kKvHeads), "labels"),
      code_memory(kCopies * codes.layer_bytes(kKvHeads), "codes"),
      levels = random_floats(kKvHeads * 2 * kChannels, 1.0f, 4),
      centroids = random_floats(kKvHeads * codes.centroids_of_head(), 1.0f, 5),
      tables(code_tables_bytes(1, kHeads, kKvHeads, codes), "tables");
  std::vector<std::int32_t> channels;
  for (int i = 0; i < kKvHeads * kChannels; ++i) channels.push_back(i % kChannels * kDim / kChannels);
  const Buffer channels_device(std::ssize(channels) * 4, "channels");
  copy(channels_device.as<void>(), channels.data(), channels_device.bytes(), stream.get());
  fill(label_memory.as<void>(), 0x5a, label_memory.bytes(), stream.get());
  labels.labels = label_memory.as<char>(), labels.levels = levels.as<float>();
  labels.channels = channels_device.as<std::int32_t>(), codes.centroids = centroids.as<float>();
  for (int i = 0; i < kCopies; ++i) {
    codes.codes = code_memory.as<std::uint8_t>() + i * codes.layer_bytes(kKvHeads);
    code_keys(memory.as<char>(), layout, 1, 0, tokens, codes, stream.get());
  }
  stream.synchronize();
  const auto print = [&](const char* what, const std::function<void(int)>& call) {
    std::printf("%5lldk %-34s %8.2f us\n", static_cast<long long>(tokens >> 10), what, time_of(stream, call));
    std::fflush(stdout);
  };
  for (const bool summed : {false, true}) {
    auto* const to = summed ? sums.as<ExponentialSum>() : nullptr;
    print(summed ? "keys, with sums" : "keys", [&](int i) {
      score_keys(queries(i), kSink, kWindow, tokens, scores.as<float>(), to, stream.get());
    });
    print(summed ? "labels, with sums" : "labels", [&](int i) {
      KeyLabels some = labels;
      some.labels += i % kCopies * labels.layer_bytes(kKvHeads);
      score_labels(queries(i), some, kSink, kWindow, tokens, scores.as<float>(), to, stream.get());
    });
    print(summed ? "codes, with sums" : "codes", [&](int i) {
      KeyCodes some = codes;
      some.codes = code_memory.as<std::uint8_t>() + i % kCopies * codes.layer_bytes(kKvHeads);
      score_codes(queries(i), some, kSink, kWindow, tokens, tables.as<void>(), scores.as<float>(), to,
                  stream.get());
    });
  }
  print("share", [&](int i) {
    share_scores(scores.as<float>(), sums.as<ExponentialSum>(), queries(i), kSink, kWindow, tokens,
                 shared.as<float>(), stream.get());
  });
  const Buffer rows(kHeads * k * 4, "rows"), counts(kHeads * 4, "counts"), wanted(2 * kHeads * 4, "wanted");
  std::vector<std::int32_t> asked(kHeads, k);
  asked.resize(2 * kHeads, static_cast<std::int32_t>(tokens - kWindow));
  copy(wanted.as<void>(), asked.data(), wanted.bytes(), stream.get());
  const auto best = [&](const Buffer& of, int lists) {
    top_k(of.as<float>(), lists, tokens, wanted.as<std::int32_t>() + kHeads, wanted.as<std::int32_t>(),
          rows.as<std::int32_t>(), k, counts.as<std::int32_t>(), nullptr, stream.get());
  };
  print("best of 32 lists", [&](int) { best(scores, kHeads); });
  print("best of 8 lists", [&](int) { best(shared, kKvHeads); });
}

}  // namespace
}  // namespace lode::cuda::bench

int main() {
  lode::cuda::bench::run(16 << 10, 1024);
  lode::cuda::bench::run(128 << 10, 1024);
  lode::cuda::bench::run(512 << 10, 1024);
}
