// SPDX-License-Identifier: Apache-2.0
//
// As much of CUDA as the kernels in csrc/cuda use, on a CPU: to check what they compute where there is no GPU. It says
// nothing about speed, nor about memory models; blocks run one after another.
//
// The threads of a block are fibers. One runs until it has to wait for others (__syncthreads, a warp's shuffles), then
// another one goes on, in an order that is drawn anew each round. One warp at a time, drawn as well, lags behind and only
// runs when no other can: what depends on who is first comes out differently, as with a missing __syncthreads.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

constexpr unsigned kLanes = 32;
constexpr size_t kStackBytes = 64 * 1024;

struct Barrier {
  unsigned arrived = 0, members = 0, round = 0;
  void release_if_full() {
    if (members > 0 && arrived == members) {
      arrived = 0;
      ++round;
    }
  }
};

struct Fiber {
  ucontext_t context;
  bool is_done = false;
};

struct Warp {
  Barrier barrier;
  uint64_t values[kLanes] = {};
  bool has_lost_lanes = false;
};

struct Block {
  ucontext_t scheduler;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barrier;
  unsigned current = 0;
  bool has_moved = false;
  std::function<void()> body;
};
inline Block* block = nullptr;
inline std::vector<std::unique_ptr<char[]>> stacks;  // of the threads of a block; kept for the next one
inline std::vector<uint64_t> dynamic_shared;
inline std::mt19937 random_order{1};

inline void stop(const char* message) {
  std::fprintf(stderr, "emulated CUDA: %s\n", message);
  std::abort();
}

inline void run_fiber() {
  block->body();
  Fiber& self = block->fibers[block->current];
  Warp& warp = block->warps[block->current / kLanes];
  self.is_done = true;
  block->has_moved = true;
  warp.has_lost_lanes = true;
  --block->barrier.members;
  --warp.barrier.members;
  block->barrier.release_if_full();
  warp.barrier.release_if_full();
  swapcontext(&self.context, &block->scheduler);
}

inline void wait(Barrier& barrier) {
  const unsigned round = barrier.round;
  ++barrier.arrived;
  block->has_moved = true;
  barrier.release_if_full();
  while (barrier.round == round) {
    swapcontext(&block->fibers[block->current].context, &block->scheduler);
  }
}

// Every lane of the warp gives a value and may then read those of the others.
template <typename T, typename Read>
auto exchange(unsigned mask, T value, const Read& read) {
  Warp& warp = block->warps[block->current / kLanes];
  if (mask != 0xffffffffu || warp.has_lost_lanes) {
    stop("a shuffle that not all lanes of the warp take part in");
  }
  static_assert(sizeof(T) <= sizeof(uint64_t), "too wide to shuffle");
  uint64_t& own = warp.values[block->current % kLanes];
  own = 0;
  std::memcpy(&own, &value, sizeof(T));
  wait(warp.barrier);
  const auto found = read(warp.values, block->current % kLanes);
  wait(warp.barrier);
  return found;
}

template <typename T>
T unpack(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

inline void launch(unsigned blocks, unsigned threads, size_t shared_bytes, const std::function<void()>& body) {
  if (blocks == 0 || threads == 0 || threads > 1024 || threads % kLanes != 0 || shared_bytes > 48 * 1024) {
    stop("a launch that a GPU would refuse, or with a part of a warp");
  }
  blockDim.x = threads;
  gridDim.x = blocks;
  for (unsigned b = 0; b < blocks; ++b) {
    blockIdx.x = b;
    dynamic_shared.assign(shared_bytes / sizeof(uint64_t) + 1, 0xcdcdcdcdcdcdcdcdull);  // as found, not as wished
    Block state;
    state.body = body;
    state.fibers.resize(threads);
    state.warps.resize(threads / kLanes);
    state.barrier.members = threads;
    block = &state;
    while (stacks.size() < threads) {
      stacks.emplace_back(new char[kStackBytes]);
    }
    for (unsigned t = 0; t < threads; ++t) {
      Fiber& fiber = state.fibers[t];
      state.warps[t / kLanes].barrier.members += 1;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = stacks[t].get();
      fiber.context.uc_stack.ss_size = kStackBytes;
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, run_fiber, 0);
    }
    std::vector<unsigned> order(threads);
    for (unsigned t = 0; t < threads; ++t) {
      order[t] = t;
    }
    unsigned slow_warp = random_order() % state.warps.size();
    for (unsigned alive = threads; alive > 0;) {
      for (unsigned t = threads - 1; t > 0; --t) {
        std::swap(order[t], order[random_order() % (t + 1)]);
      }
      state.has_moved = false;
      const auto run = [&](bool slow) {
        for (const unsigned t : order) {
          if (!state.fibers[t].is_done && (t / kLanes == slow_warp) == slow) {
            state.current = t;
            threadIdx.x = t;
            swapcontext(&state.scheduler, &state.fibers[t].context);
            alive -= state.fibers[t].is_done;
          }
        }
      };
      run(false);
      if (!state.has_moved) {
        run(true);
        if (!state.has_moved) {
          stop("all threads of a block wait: some of them left out a __syncthreads");
        }
        // As long as it has its shuffles to do, the same one: it must not catch up before the others have gone on.
        if (random_order() % 16 == 0) {
          slow_warp = random_order() % state.warps.size();
        }
      }
    }
  }
}

}  // namespace emulation

#define FSMOE_LAUNCH(kernel, blocks, threads, shared_bytes, stream, ...) \
  emulation::launch(static_cast<unsigned>(blocks), static_cast<unsigned>(threads), shared_bytes, \
                    [&] { (kernel)(__VA_ARGS__); })
#define FSMOE_DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(emulation::dynamic_shared.data())

inline void __syncthreads() { emulation::wait(emulation::block->barrier); }

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int offset) {
  return emulation::exchange(mask, value,
                             [&](const uint64_t* all, unsigned lane) { return emulation::unpack<T>(all[lane ^ offset]); });
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
inline unsigned atomicAdd(unsigned* at, unsigned value) {
  const unsigned old = *at;
  *at += value;
  return old;
}
inline unsigned atomicOr(unsigned* at, unsigned value) {
  const unsigned old = *at;
  *at |= value;
  return old;
}
inline cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t) {
  std::memset(at, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
