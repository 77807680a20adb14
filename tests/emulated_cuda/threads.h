// SPDX-License-Identifier: Apache-2.0
//
// The threads of a block as threads of the host, two blocks at once, for ThreadSanitizer: it reports two accesses of
// which one is a write unless both are atomic or a __syncthreads lies between. As on a GPU, shuffles and ballots order
// nothing but the values that they pass, and blocks of a launch are ordered by nothing at all, not even those of which
// one has ended before the other begins.
#pragma once

#include <barrier>
#include <thread>

#ifdef __SANITIZE_THREAD__
extern "C" void AnnotateIgnoreSyncBegin(const char* file, int line);
extern "C" void AnnotateIgnoreSyncEnd(const char* file, int line);
#else
inline void AnnotateIgnoreSyncBegin(const char*, int) {}
inline void AnnotateIgnoreSyncEnd(const char*, int) {}
#endif

inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

constexpr unsigned kBlocksAtOnce = 2;

// While one exists, waiting for others is no excuse for a race.
struct WithoutOrder {
  WithoutOrder() { AnnotateIgnoreSyncBegin(__FILE__, __LINE__); }
  ~WithoutOrder() { AnnotateIgnoreSyncEnd(__FILE__, __LINE__); }
};

// A warp's barrier is of atomics alone, since std::barrier relies on the order that it makes.
struct Warp {
  std::atomic<unsigned> arrived{0}, round{0};
  std::atomic<uint64_t> values[kLanes] = {};
  std::atomic<bool> has_lost_lanes{false};
};

inline void wait_for_warp(Warp& warp) {
  const unsigned now = warp.round;
  if (++warp.arrived == kLanes) {
    warp.arrived = 0;
    ++warp.round;
    warp.round.notify_all();
  }
  warp.round.wait(now);
}

struct Block {
  Block(unsigned threads, size_t shared_bytes) : barrier(threads), warps(threads / kLanes), shared(shared_bytes) {}
  std::barrier<> barrier;
  std::vector<Warp> warps;
  SharedMemory shared;
};
inline thread_local Block* block = nullptr;

inline SharedMemory& shared_memory() { return block->shared; }

inline void wait_for_block() { block->barrier.arrive_and_wait(); }

inline unsigned exchange_in_warp(uint64_t own, uint64_t* values) {
  const WithoutOrder none;
  Warp& warp = block->warps[threadIdx.x / kLanes];
  if (warp.has_lost_lanes) {
    stop("a shuffle that not all lanes of the warp take part in");
  }
  const unsigned lane = threadIdx.x % kLanes;
  warp.values[lane].store(own, std::memory_order_relaxed);
  wait_for_warp(warp);
  for (unsigned i = 0; i < kLanes; ++i) {
    values[i] = warp.values[i].load(std::memory_order_relaxed);
  }
  wait_for_warp(warp);
  return lane;
}

// What blocks have touched is kept to the end of the launch, and so are their threads: a later block that got their
// memory or their names would hide a race with them.
inline void run_blocks(unsigned blocks, unsigned threads, size_t shared_bytes, const std::function<void()>& body) {
  std::vector<std::unique_ptr<Block>> states;
  std::vector<std::thread> all;
  std::atomic<unsigned> running{0};
  const std::vector<unsigned> order = in_random_order(blocks);
  for (unsigned i = 0; i < blocks; ++i) {
    states.push_back(std::make_unique<Block>(threads, shared_bytes));
  }
  for (unsigned i = 0; i < blocks; ++i) {
    Block* const mine = states[i].get();
    running.fetch_add(threads, std::memory_order_relaxed);
    for (unsigned t = 0; t < threads; ++t) {
      all.emplace_back([=, &body, &running, &order] {
        threadIdx.x = t;
        blockIdx.x = order[i];
        blockDim.x = threads;
        gridDim.x = blocks;
        block = mine;
        body();
        mine->warps[t / kLanes].has_lost_lanes = true;
        mine->barrier.arrive_and_drop();
        const WithoutOrder none;
        running.fetch_sub(1, std::memory_order_relaxed);
        running.notify_all();
      });
    }
    const WithoutOrder none;
    for (unsigned now = running; now > (kBlocksAtOnce - 1) * threads; now = running) {
      running.wait(now);
    }
  }
  for (std::thread& each : all) {
    each.join();
  }
}

}  // namespace emulation
