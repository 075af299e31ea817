// SPDX-License-Identifier: Apache-2.0
// Addresses and pages of device memory, apart (the driver's virtual memory): what KvRange is made of.
#pragma once

#include "kernels/cuda/device/device.h"

namespace lode::cuda {

/// Pages are mapped in multiples of this many bytes.
std::int64_t page_bytes();
/// Addresses without memory, in whole pages; free_addresses gives them back once nothing is mapped there.
char* reserve_addresses(std::int64_t bytes);
void free_addresses(char* at, std::int64_t bytes) noexcept;
/// Puts zeroed memory at some of them; 0 when the GPU has not so much, RunError for any other failure. The
/// result is for unmap_pages, which takes exactly what was mapped.
unsigned long long map_pages(char* at, std::int64_t bytes);
void unmap_pages(char* at, std::int64_t bytes, unsigned long long handle) noexcept;
/// Shows memory that is mapped elsewhere at other addresses, too; unmap_again takes them back before unmap_pages.
void map_again(char* at, std::int64_t bytes, unsigned long long handle);
void unmap_again(char* at, std::int64_t bytes) noexcept;
/// Enqueues a copy of `rows` pieces of `width` bytes, so many bytes apart on either side.
void copy_apart(void* to, std::int64_t to_stride, const void* from, std::int64_t from_stride,
                std::int64_t width, std::int64_t rows, StreamHandle stream);
/// Waits for everything on the device; free and total bytes of its memory.
void synchronize_device();
struct DeviceMemory {
  std::int64_t free = 0, total = 0;
};
DeviceMemory device_memory();

}  // namespace lode::cuda
