// SPDX-License-Identifier: Apache-2.0
// Keys and values of the host's store on their way to the GPU.
#include <algorithm>

#include "base/cancel.h"
#include "base/timed_parts.h"
#include "gpu/context.h"
#include "gpu/pinned_upload.h"
#include "lodestone/error.h"

namespace lode {

void CudaContext::upload(const KvStore& store) {
  // Of fewer bytes the driver's copy takes less time than pinning memory does.
  constexpr std::int64_t kWorthPinning = std::int64_t{16} << 20;
  const std::int64_t begin = tokens_, end = store.tokens();
  if (begin >= end) return;
  if (tier_ != nullptr) {  // steps look for them there
    tokens_ = end;
    return;
  }
  const TimedPart timed("keys to the GPU");
  const std::int64_t first = held_.count(begin), last = held_.count(end);
  range_.back(last);
  const std::vector<HostRows> pieces = pieces_to_upload(first, last);
  std::int64_t bytes = 0;
  for (const HostRows& piece : pieces)
    bytes += (piece.end - piece.begin) * range_.layout(piece.layer).row_bytes();
  if (bytes >= kWorthPinning) {
    stream_.synchronize();  // a step that was cut off may still write rows; the pieces go by other streams
    upload_pinned(store, pieces);
  } else {
    for (const HostRows& piece : pieces) {
      check_cancel();
      send(piece, rows_of(store, piece).data(), stream_.get());
    }
    stream_.synchronize();
  }
  tokens_ = end;
  restore_states(store.recurrent());
  stream_.synchronize();
}

/// Rows [begin, end) of all layers and heads, as many at a time as PinnedUpload takes; a piece ends with one of the
/// GPU's blocks, so that it is one copy.
std::vector<CudaContext::HostRows> CudaContext::pieces_to_upload(std::int64_t begin, std::int64_t end) const {
  std::vector<HostRows> pieces;
  for (int layer = 0; layer < config_.layers; ++layer) {
    const cuda::KvLayout layout = range_.layout(layer);
    const std::int64_t most =
        PinnedUpload::kPieceBytes / (cuda::kBlockTokens * layout.row_bytes()) * cuda::kBlockTokens;
    LODE_ASSERT(most > 0);
    for (int head = 0; head < layout.kv_heads && range_.has_rows(layer); ++head)
      for (const auto part : {cuda::KvRange::Part::k, cuda::KvRange::Part::v})
        for (std::int64_t at = begin, next = 0; at < end && range_.holds(layer, head, part); at = next) {
          next = std::min(end, at - at % cuda::kBlockTokens + most);
          pieces.push_back({layer, head, part, at, next});
        }
  }
  return pieces;
}

std::span<const std::byte> CudaContext::rows_of(const KvStore& store, const HostRows& piece) const {
  const auto part = piece.part == cuda::KvRange::Part::v ? KvStore::Part::v : KvStore::Part::k;
  const auto row = static_cast<std::size_t>(range_.layout(piece.layer).row_bytes());
  return store.rows(piece.layer, share_.first_kv_head + piece.head, part)
      .subspan(static_cast<std::size_t>(held_.begin + piece.begin) * row,
               static_cast<std::size_t>(piece.end - piece.begin) * row);
}

void CudaContext::send(const HostRows& piece, const std::byte* rows, cuda::StreamHandle stream) {
  range_.to_device(piece.layer, piece.head, piece.part, piece.begin, piece.end, rows, stream);
}

void CudaContext::upload_pinned(const KvStore& store, std::span<const HostRows> pieces) {
  PinnedUpload upload(share_.alone() ? options_.pool : nullptr);
  upload.run(
      std::ssize(pieces),
      [&](std::int64_t i, std::byte* to) {
        std::ranges::copy(rows_of(store, pieces[static_cast<std::size_t>(i)]), to);
      },
      [&](std::int64_t i, const std::byte* from, PinnedUpload::Lane& lane) {
        send(pieces[static_cast<std::size_t>(i)], from, lane.stream());
      });
}

}  // namespace lode
