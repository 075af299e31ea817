// SPDX-License-Identifier: Apache-2.0
// One layer of a long made-up text over ranks, each of which makes its own share of it: their choices, attention and
// messages beside one machine's. LODESTONE_LONG_STORE=4194304 makes the text that long (2 GiB of keys and values, 10
// minutes of processor time) and prints a line a method and number of ranks.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "attend/attend.h"
#include "base/rng.h"
#include "base/threads.h"
#include "cluster/local_ranks.h"
#include "cluster/shard_attention.h"
#include "kernels/kernels.h"
#include "lodestone/spec.h"
#include "model/llama.h"
#include "select/rank_choice.h"
#include "support/compare.h"
#include "support/hash_file.h"
#include "support/rank_choice.h"
#include "support/saap.h"

namespace lode::test {
namespace {

constexpr int kKvHeads = 2, kGroup = 4, kQueryHeads = kKvHeads * kGroup, kD = 64, kLayer = 3;
constexpr std::int64_t kRowBytes = kD * 2;                    // bf16
constexpr std::int64_t kShort = 28672, kTail = 8;             // tokens
constexpr std::int64_t kPassage = 256, kPassagesOfTopic = 8;  // a passage is about one topic
constexpr std::int64_t kBlock = 4096;                         // tokens made by one thread at a time
constexpr LocalWindow kLocal = {.sink = 1, .window = 2047};
/// Of outputs: values are in [-1, 1), and some kernels round attention's weights to bf16.
constexpr float kRounding = 4e-3f;
constexpr std::chrono::minutes kPatience{30};  // where ranks outnumber the cores

/// Long texts take methods whose budgets are small beside them, and fewer clusters than the method would make: all
/// keys are compared with all centroids, on every number of ranks.
const std::array kSpecs = {"full",
                           "topk:k=1000",
                           "topk:k=300,by=value",
                           "hash:budget=1/256",
                           "hash:budget=1/1024,per=query-head,index=on",
                           "hyperplanes:bits=128,budget=1/256",
                           "kmeans:clusters=512,probes=8",
                           "kmeans:clusters=256,probes=4,rope=on",
                           "ivf:nlist=256,nprobe=16,k=1000",
                           "saap:probes=2"};

std::int64_t document_tokens() {
  const char* const given = std::getenv("LODESTONE_LONG_STORE");
  return given == nullptr ? kShort : std::strtoll(given, nullptr, 10);
}

std::int64_t topics() {
  return document_tokens() / (kPassage * kPassagesOfTopic);
}

/// Half of a head's pairs turn, so that a topic is still known by its keys millions of tokens later.
const Rope& rope() {
  static const Rope turning({.head_dim = kD, .rotary_dim = kD / 2, .theta = 1e7}, document_tokens() + kTail);
  return turning;
}

LayerGeometry geometry_with(ThreadPool& pool) {
  return {.layer = kLayer,
          .query_heads = kQueryHeads,
          .kv_heads = kKvHeads,
          .head_dim = kD,
          .scale = 1.0f / std::sqrt(static_cast<float>(kD)),
          .dense = kLocal,
          .rope = &rope(),
          .pool = &pool,
          .seed = 7};
}

/// Numbers in [-1, 1), eight of one word.
void add_noise(std::uint64_t seed, float scale, std::span<float> x) {
  Rng rng(seed);
  for (std::size_t i = 0; i < x.size(); i += 8) {
    std::uint64_t word = rng.next();
    for (std::size_t j = i; j < i + 8; ++j, word >>= 8)
      x[j] += scale * (static_cast<float>(word & 0xff) / 128.0f - 1.0f);
  }
}

std::vector<float> topic_key(std::int64_t which, int head) {
  return random_floats(kD, hash_seed(21, which, head), 1.0);
}

/// Address space for rows [tokens, d], of which only those that are made can be touched: whoever reads another's dies.
class Rows {
 public:
  explicit Rows(std::int64_t tokens) : bytes_(static_cast<std::size_t>(tokens * kRowBytes)) {
    void* const at = mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    EXPECT_NE(at, MAP_FAILED);
    data_ = static_cast<std::byte*>(at);
  }
  ~Rows() { munmap(data_, bytes_); }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;

  void open(const Share& tokens) {
    EXPECT_EQ(mprotect(row(tokens.begin), static_cast<std::size_t>(tokens.count() * kRowBytes),
                       PROT_READ | PROT_WRITE),
              0);
  }
  std::byte* row(std::int64_t token) { return data_ + token * kRowBytes; }

 private:
  std::size_t bytes_;
  std::byte* data_ = nullptr;
};

/// A share of the layer's keys and values, and those of the tokens behind the document: functions of the position.
class Layer {
 public:
  Layer(std::int64_t document, const Share& own, ThreadPool& pool) : document_(document) {
    std::vector<std::vector<float>> keys;  // [topics * Hkv][d]
    for (std::int64_t topic = 0; topic < topics(); ++topic)
      for (int head = 0; head < kKvHeads; ++head) keys.push_back(topic_key(topic, head));
    for (int part = 0; part < 2 * kKvHeads; ++part)
      parts_.push_back(std::make_unique<Rows>(document + kTail));
    for (const Share& share : {own, Share{document, document + kTail}}) {
      for (const auto& part : parts_) part->open(share);
      const std::int64_t blocks = (share.count() + kBlock - 1) / kBlock;
      pool.for_each(blocks, [&](std::int64_t block, int) {
        const std::int64_t begin = share.begin + block * kBlock;
        for (std::int64_t p = begin; p < std::min(begin + kBlock, share.end); ++p) write(p, keys);
      });
    }
  }

  std::vector<KvRows> heads(std::int64_t first, std::int64_t count) const {
    std::vector<KvRows> rows;
    for (std::size_t head = 0; head < kKvHeads; ++head)
      rows.push_back({.type = DType::bf16,
                      .k = parts_[2 * head]->row(first),
                      .v = parts_[2 * head + 1]->row(first),
                      .rows = count,
                      .d = kD});
    return rows;
  }
  std::int64_t document() const { return document_; }

 private:
  void write(std::int64_t p, const std::vector<std::vector<float>>& keys) {
    const std::uint64_t topic = Rng(hash_seed(22, p / kPassage)).below(static_cast<std::uint64_t>(topics()));
    for (int head = 0; head < kKvHeads; ++head) {
      std::vector<float> key = keys[topic * kKvHeads + static_cast<std::size_t>(head)], value(kD, 0.0f);
      add_noise(hash_seed(23, p, head), 0.5f, key);
      rope().rotate(key, static_cast<Position>(p));
      add_noise(hash_seed(24, p, head), 1.0f, value);
      kernels().narrow(key.data(), kD, DType::bf16, parts_[static_cast<std::size_t>(2 * head)]->row(p));
      kernels().narrow(value.data(), kD, DType::bf16, parts_[static_cast<std::size_t>(2 * head + 1)]->row(p));
    }
  }

  std::int64_t document_;
  std::vector<std::unique_ptr<Rows>> parts_;  // [Hkv][k, v]
};

/// Tokens behind the document, and what they ask.
struct Question {
  Phase phase = Phase::question;
  std::int64_t tokens = 0;
  std::vector<float> q, q_unrotated;  // [T, Hq, d]
};

/// About one topic, or with numbers that are about none.
Question question(std::int64_t document, std::uint64_t seed, Phase phase, std::int64_t tokens,
                  bool about_topics) {
  Question made = {.phase = phase, .tokens = tokens, .q = {}, .q_unrotated = {}};
  for (std::int64_t t = 0; t < tokens; ++t) {
    const auto topic =
        static_cast<std::int64_t>(Rng(hash_seed(seed, 31, t)).below(static_cast<std::uint64_t>(topics())));
    for (int h = 0; h < kQueryHeads; ++h) {
      std::vector<float> q = random_floats(kD, hash_seed(seed, 32, t, h), about_topics ? 0.5 : 2.0);
      if (about_topics) {
        const std::vector<float> key = topic_key(topic, h / kGroup);
        for (std::size_t i = 0; i < q.size(); ++i) q[i] += 3.0f * key[i];
      }
      made.q_unrotated.insert(made.q_unrotated.end(), q.begin(), q.end());
      rope().rotate(q, static_cast<Position>(document + t));
      made.q.insert(made.q.end(), q.begin(), q.end());
    }
  }
  return made;
}

std::vector<Question> questions(std::int64_t document) {
  return {question(document, 1, Phase::question, 4, true), question(document, 2, Phase::generation, 1, true),
          question(document, 3, Phase::question, 3, false),
          question(document, 4, Phase::question, kTail, true)};
}

/// A question beside the rows that it attends to.
struct Asked {
  std::vector<KvRows> rows, tail_rows;
  QueryBlock block;
  TailRows tail;

  Asked(const Layer& layer, const Question& question)
      : rows(layer.heads(0, layer.document())), tail_rows(layer.heads(layer.document(), question.tokens)) {
    const auto seam = static_cast<Position>(layer.document());
    block = {.sequence = 0,
             .phase = question.phase,
             .begin = seam,
             .tokens = question.tokens,
             .q = question.q,
             .q_unrotated = question.q_unrotated,
             .kv = {.heads = rows, .tokens = layer.document()},
             .far_begin = static_cast<Position>(kLocal.sink),
             .far_limit = seam};
    tail = {.kv = {.heads = tail_rows, .tokens = question.tokens}, .seam = seam};
  }
  Asked(const Asked&) = delete;
  Asked& operator=(const Asked&) = delete;
};

/// With an artefact made for the layer, where the method needs one; null: full attention.
std::unique_ptr<Selector> make_selector(const std::string& text, const LayerGeometry& geometry) {
  if (text == "full") return nullptr;
  Spec spec = parse_spec(text);
  static const std::string functions =
      write_hash_file(geometry, {.values = HashScheme::Values::norm}).string();
  if (spec.name == "hash") spec.given["weights"] = functions;
  if (spec.name == "saap") spec.given["weights"] = SaapFiles::of({.clusters = 256});
  return find_method(spec.name).make(spec, geometry, "model");
}

void index(Selector& selector, const Layer& layer, std::int64_t end) {
  const std::vector<KvRows> rows = layer.heads(0, end);
  selector.build(0, {.heads = rows, .tokens = end});
  selector.append(0, {.heads = rows, .tokens = end}, static_cast<Position>(end));
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// To one question.
struct Answer {
  std::vector<FarSet> choice;  // [T * Hq]; none: full attention
  std::vector<float> output;   // [T, Hq, d]
  std::vector<float> lse;      // [T, Hq], of one machine
  std::int64_t far_keys = 0;   ///< attended, over heads and tokens
  Traffic states, selection;
};
/// Of one method.
struct Answers {
  std::vector<Answer> of;  // [questions]
  double build_seconds = 0;
};

Answers answers_alone(const std::string& spec, const Layer& layer, ThreadPool& pool) {
  const LayerGeometry geometry = geometry_with(pool);
  Answers all;
  const auto selector = make_selector(spec, geometry);
  const auto begin = std::chrono::steady_clock::now();
  if (selector) index(*selector, layer, layer.document());
  all.build_seconds = seconds_since(begin);
  for (const Question& question : questions(layer.document())) {
    const Asked asked(layer, question);
    Answer& answer = all.of.emplace_back();
    answer.output.resize(question.q.size());
    answer.lse.resize(question.q.size() / kD);
    std::vector<Selection> chosen;
    if (selector) {
      answer.choice = choice_of(*selector, asked.block, geometry);
      selector->select({&asked.block, 1}, chosen.emplace_back());
    }
    float* const output = answer.output.data();
    float* const lse = answer.lse.data();
    AttendWork work;
    attend_branches({.blocks = {&asked.block, 1},
                     .tails = {&asked.tail, 1},
                     .outputs = {&output, 1},
                     .selections = chosen,
                     .work = {&work, 1},
                     .lse = {&lse, 1}},
                    geometry);
    answer.far_keys = work.far_keys;
  }
  return all;
}

/// A rank's part.
Answers answers_of_rank(const std::string& spec, const Layer& layer, Communicator& ranks, ThreadPool& pool) {
  const LayerGeometry geometry = geometry_with(pool);
  const std::int64_t document = layer.document();
  const Share own = token_share(document, ranks.rank(), ranks.size());
  ModelConfig config;
  config.layers = kLayer + 1;
  ShardAttention attention(ranks, document, config);
  Answers all;
  const auto selector = make_selector(spec, geometry);
  const auto begin = std::chrono::steady_clock::now();
  if (selector) {
    EXPECT_TRUE(divide_keys(selector.get(), {&ranks, document, own})) << spec;
    index(*selector, layer, own.end);
  }
  all.build_seconds = seconds_since(begin);
  for (const Question& question : questions(document)) {
    const Asked asked(layer, question);
    Answer& answer = all.of.emplace_back();
    if (selector) answer.choice = choice_of(*selector, asked.block, geometry);
    for (int time = 0; time < 2; ++time) {
      std::vector<float> output(question.q.size());
      float* const to = output.data();
      std::vector<QueryBlock> blocks = {asked.block};
      ForwardWork work;
      const Step step = {.sequences = {}, .work = {&work, 1}};
      const Traffic sent = ranks.sent(), chosen = attention.selection_sent();
      attention.attend({.step = step,
                        .selector = selector.get(),
                        .geometry = geometry,
                        .tails = {asked.tail},
                        .blocks = blocks,
                        .outputs = {&to, 1},
                        .lse = {}});
      answer.selection = attention.selection_sent() - chosen;
      answer.states = (ranks.sent() - sent) - answer.selection;
      answer.far_keys = work.attend.far_keys;
      if (time > 0) {
        EXPECT_EQ(output, answer.output) << spec << ": the same bits each time";
      }
      answer.output = std::move(output);
    }
  }
  return all;
}

class LongStore : public testing::TestWithParam<int> {
 protected:
  static void SetUpTestSuite() {
    ThreadPool pool;
    const std::int64_t document = document_tokens();
    const Layer layer(document, {0, document}, pool);
    for (const char* spec : kSpecs) {
      alone_[spec] = answers_alone(spec, layer, pool);
      if (document > kShort)
        std::fputs(fmt::format("alone, {}: index {:.1f} s\n", spec, alone_[spec].build_seconds).c_str(),
                   stderr);
    }
  }
  static void TearDownTestSuite() { alone_.clear(); }

  static void compare(const std::string& spec, std::span<const Answers> ranks);
  static std::map<std::string, Answers> alone_;  // by spec
};
std::map<std::string, Answers> LongStore::alone_;

/// `ranks` holds what each of them has found.
void LongStore::compare(const std::string& spec, std::span<const Answers> ranks) {
  const auto size = std::ssize(ranks);
  const Answers& alone = alone_.at(spec);
  float worst = 0;
  double mass = 0, slowest = 0;
  std::int64_t tokens = 0, chosen = 0, rows = 0;
  Traffic states, selection;  // of all ranks
  for (std::size_t i = 0; i < alone.of.size(); ++i) {
    SCOPED_TRACE(i);
    const Answer& wanted = alone.of[i];
    const std::int64_t asked = std::ssize(wanted.lse) / kQueryHeads;
    std::vector<std::vector<FarSet>> parts;
    Traffic own;
    for (const Answers& rank : ranks) {
      const Answer& found = rank.of[i];
      parts.push_back(found.choice);
      EXPECT_EQ(found.output, ranks[0].of[i].output);
      EXPECT_EQ(found.far_keys, wanted.far_keys);
      EXPECT_LE(found.states.messages, 2 * (size - 1));
      own += found.states;
      selection += found.selection;
    }
    EXPECT_LE(own.bytes, size * asked * 2 * kQueryHeads * (kD + 1) * 4);
    states += own;
    expect_union(parts, wanted.choice, document_tokens());
    worst = std::max(worst, worst_difference(ranks[0].of[i].output, wanted.output));
    for (std::size_t row = 0; row < wanted.lse.size(); ++row)
      mass += std::exp(wanted.lse[row] - alone_.at("full").of[i].lse[row]);
    rows += std::ssize(wanted.lse);
    tokens += asked;
    chosen += wanted.far_keys;
  }
  EXPECT_LT(worst, kRounding);
  if (document_tokens() == kShort) return;
  for (const Answers& rank : ranks) slowest = std::max(slowest, rank.build_seconds);
  const auto of_token = [&](std::int64_t number) {
    return static_cast<double>(number) / static_cast<double>(tokens);
  };
  const auto of_rank = [&](std::int64_t number) { return of_token(number) / static_cast<double>(size); };
  std::fputs(
      fmt::format("| {} | `{}` | {:.0f} | {:.1f} % | {:.1e} | {:.0f} | {:.0f} in {:.1f} | {:.1f} s |\n", size,
                  spec, of_token(chosen) / kKvHeads, 100 * mass / static_cast<double>(rows), worst,
                  of_rank(states.bytes), of_rank(selection.bytes), of_rank(selection.messages), slowest)
          .c_str(),
      stderr);
}

TEST_P(LongStore, RanksChooseAndAttendAsOneMachine) {
  const int size = GetParam();
  const std::int64_t document = document_tokens();
  std::vector<std::unique_ptr<Layer>> layers(static_cast<std::size_t>(size));
  run_local_ranks(size, [&](Communicator& ranks) {
    ThreadPool pool(1);
    layers[static_cast<std::size_t>(ranks.rank())] =
        std::make_unique<Layer>(document, token_share(document, ranks.rank(), size), pool);
  });
  for (const char* spec : kSpecs) {
    SCOPED_TRACE(spec);
    std::vector<Answers> found(layers.size());
    const auto answer = [&](Communicator& ranks) {
      const auto rank = static_cast<std::size_t>(ranks.rank());
      ThreadPool pool(1);
      found[rank] = answers_of_rank(spec, *layers[rank], ranks, pool);
    };
    run_local_ranks(size, answer, kPatience);
    compare(spec, found);
  }
}

/// The short form is there to keep the long one alive: rank_choice_test.cc has all numbers of ranks.
std::vector<int> sizes() {
  return document_tokens() == kShort ? std::vector{3} : std::vector{1, 2, 3, 4, 7};
}

INSTANTIATE_TEST_SUITE_P(Ranks, LongStore, testing::ValuesIn(sizes()), testing::PrintToStringParamName());

}  // namespace
}  // namespace lode::test
