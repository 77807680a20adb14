// SPDX-License-Identifier: Apache-2.0
//
// As much of CUDA as the kernels in csrc/cuda use, on a CPU: to check what they compute where there is no GPU. It says
// nothing about speed. What the threads of a block are is for one of two back-ends: fibers.h and threads.h.
//
// A barrier or an atomic of a kernel can be left out, by the number of its line, to see whether that is noticed. Where
// launches are only listed, nothing runs and no pointer is read, so that sizes may be as large as one likes.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct CUstream_st;
using cudaStream_t = CUstream_st*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

namespace emulation {

constexpr unsigned kLanes = 32;
constexpr int64_t kMaxBlocks = 0x7fffffff, kMaxThreads = 1024, kMaxSharedBytes = 48 * 1024;

inline bool only_lists = false;
inline int line_left_out = 0;
inline std::atomic<int64_t> times_left_out{0};
inline std::mt19937 random_order{1};

[[noreturn]] inline void stop(const char* message) {
  std::fprintf(stderr, "emulated CUDA: %s\n", message);
  std::fflush(nullptr);
  std::_Exit(3);
}

inline bool is_left_out(int line) {
  if (line != line_left_out) {
    return false;
  }
  times_left_out.fetch_add(1, std::memory_order_relaxed);
  return true;
}

// The shared memory of one block: each array in a piece of its own, full of what others have left there.
class SharedMemory {
 public:
  explicit SharedMemory(size_t dynamic_bytes) : left_behind_(static_cast<unsigned char>(random_order())) {
    dynamic_ = piece(dynamic_bytes);
  }
  void* dynamic() { return dynamic_.get(); }
  void* at(int line, size_t bytes) {
    const std::lock_guard<std::mutex> guard(lock_);
    auto& found = pieces_[line];
    if (found == nullptr) {
      found = piece(bytes);
    }
    return found.get();
  }

 private:
  using Piece = std::unique_ptr<void, decltype(&std::free)>;
  Piece piece(size_t bytes) const {
    void* memory = std::malloc(bytes);
    std::memset(memory, left_behind_, bytes);
    return Piece(memory, &std::free);
  }
  unsigned char left_behind_;
  Piece dynamic_{nullptr, &std::free};
  std::map<int, std::shared_ptr<void>> pieces_;
  std::mutex lock_;
};

template <typename T>
T unpack(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <typename T>
uint64_t packed(T value) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "too wide to shuffle");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

inline std::vector<unsigned> in_random_order(unsigned count) {
  std::vector<unsigned> order(count);
  std::iota(order.begin(), order.end(), 0u);
  for (unsigned i = count; i > 1; --i) {
    std::swap(order[i - 1], order[random_order() % i]);
  }
  return order;
}

}  // namespace emulation

#ifdef FSMOE_EMULATED_THREADS
#include "threads.h"
#else
#include "fibers.h"
#endif

namespace emulation {

inline void launch(const char* kernel, const char* where, int64_t blocks, int64_t threads, size_t shared_bytes,
                   const std::function<void()>& body) {
  std::fprintf(stderr, "launch: %s in %s: %lld blocks of %lld threads, %zu bytes shared\n", kernel, where,
               static_cast<long long>(blocks), static_cast<long long>(threads), shared_bytes);
  if (blocks < 1 || blocks > kMaxBlocks || threads < 1 || threads > kMaxThreads || threads % kLanes != 0 ||
      shared_bytes > kMaxSharedBytes) {
    stop("a launch that a GPU would refuse, or with a part of a warp");
  }
  if (!only_lists) {
    run_blocks(static_cast<unsigned>(blocks), static_cast<unsigned>(threads), shared_bytes, body);
  }
}

inline void synchronize(int line) {
  if (!is_left_out(line)) {
    wait_for_block();
  }
}

template <typename T, typename Value, typename Change>
__attribute__((always_inline)) inline T update(T* at, Value value, const Change& change, int line) {
  if (is_left_out(line)) {
    const T old = *at;
    *at = change(old, static_cast<T>(value));
    return old;
  }
  T old, changed;
  __atomic_load(at, &old, __ATOMIC_RELAXED);
  do {
    changed = change(old, static_cast<T>(value));
  } while (!__atomic_compare_exchange(at, &old, &changed, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}

// Every lane of the warp gives a value and may then read those of the others.
template <typename T, typename Read>
auto exchange(unsigned mask, T value, const Read& read) {
  if (mask != 0xffffffffu) {
    stop("a shuffle that not all lanes of the warp take part in");
  }
  uint64_t values[kLanes];
  const unsigned lane = exchange_in_warp(packed(value), values);
  return read(values, lane);
}

}  // namespace emulation

#define FSMOE_LAUNCH(kernel, blocks, threads, shared_bytes, stream, ...) \
  emulation::launch(#kernel, __PRETTY_FUNCTION__, blocks, threads, shared_bytes, [&] { (kernel)(__VA_ARGS__); })
#define FSMOE_SHARED(type, name) \
  auto& name = *static_cast<fsmoe::Itself<type>*>(emulation::shared_memory().at(__LINE__, sizeof(fsmoe::Itself<type>)))
#define FSMOE_DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(emulation::shared_memory().dynamic())

#define __syncthreads() emulation::synchronize(__LINE__)
#define atomicAdd(at, value) emulation::update(at, value, std::plus<>(), __LINE__)
#define atomicOr(at, value) emulation::update(at, value, std::bit_or<>(), __LINE__)

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int offset) {
  return emulation::exchange(
      mask, value, [&](const uint64_t* all, unsigned lane) { return emulation::unpack<T>(all[lane ^ offset]); });
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned offset) {
  return emulation::exchange(mask, value, [&](const uint64_t* all, unsigned lane) {
    return emulation::unpack<T>(all[lane >= offset ? lane - offset : lane]);
  });
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int from) {
  return emulation::exchange(mask, value,
                             [&](const uint64_t* all, unsigned) { return emulation::unpack<T>(all[from]); });
}
inline unsigned __ballot_sync(unsigned mask, bool yes) {
  return emulation::exchange(mask, yes, [](const uint64_t* all, unsigned) {
    unsigned lanes = 0;
    for (unsigned lane = 0; lane < emulation::kLanes; ++lane) {
      lanes |= static_cast<unsigned>(all[lane] != 0) << lane;
    }
    return lanes;
  });
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}
inline cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t) {
  if (bytes == 0) {
    emulation::stop("a memset of nothing, of which CUDA's manual does not say how it ends");
  }
  if (emulation::only_lists) {
    std::fprintf(stderr, "memset: %zu bytes\n", bytes);
  } else {
    std::memset(at, value, bytes);
  }
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
