// SPDX-License-Identifier: Apache-2.0
//
// The threads of a block as fibers: quick, and the same on every run. One runs until it has to wait for others
// (__syncthreads, a warp's shuffles), then another one goes on, in an order that is drawn anew each round. One warp at
// a time, drawn as well, lags behind and only runs when no other can: what depends on who is first comes out
// differently, as with a missing __syncthreads. Blocks run one after another, in an order that is drawn as well. What
// happens between two waits is never interrupted, so a missing atomic changes nothing here: threads.h shows that.
#pragma once

#include <ucontext.h>

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

constexpr size_t kStackBytes = 256 * 1024;

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
  Block(unsigned threads, size_t shared_bytes, const std::function<void()>& what)
      : body(what), shared(shared_bytes), fibers(threads), warps(threads / kLanes) {
    barrier.members = threads;
    for (Warp& warp : warps) {
      warp.barrier.members = kLanes;
    }
  }
  const std::function<void()>& body;
  SharedMemory shared;
  ucontext_t scheduler;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barrier;
  unsigned current = 0;
  bool has_moved = false;
};
inline Block* block = nullptr;
inline std::vector<std::unique_ptr<char[]>> stacks;  // of the threads of a block; kept for the next one

inline SharedMemory& shared_memory() { return block->shared; }

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

inline void wait_for_block() { wait(block->barrier); }

inline unsigned exchange_in_warp(uint64_t own, uint64_t* values) {
  Warp& warp = block->warps[block->current / kLanes];
  if (warp.has_lost_lanes) {
    stop("a shuffle that not all lanes of the warp take part in");
  }
  const unsigned lane = block->current % kLanes;
  warp.values[lane] = own;
  wait(warp.barrier);
  std::memcpy(values, warp.values, sizeof(warp.values));
  wait(warp.barrier);
  return lane;
}

inline void run_threads() {
  const auto threads = static_cast<unsigned>(block->fibers.size());
  unsigned slow_warp = random_order() % block->warps.size();
  for (unsigned alive = threads; alive > 0;) {
    const std::vector<unsigned> order = in_random_order(threads);
    block->has_moved = false;
    const auto run = [&](bool slow) {
      for (const unsigned t : order) {
        if (!block->fibers[t].is_done && (t / kLanes == slow_warp) == slow) {
          block->current = t;
          threadIdx.x = t;
          swapcontext(&block->scheduler, &block->fibers[t].context);
          alive -= block->fibers[t].is_done;
        }
      }
    };
    run(false);
    if (!block->has_moved) {
      run(true);
      if (!block->has_moved) {
        stop("all threads of a block wait: some of them left out a __syncthreads");
      }
      // As long as it has its shuffles to do, the same one: it must not catch up before the others have gone on.
      if (random_order() % 16 == 0) {
        slow_warp = random_order() % block->warps.size();
      }
    }
  }
}

inline void run_blocks(unsigned blocks, unsigned threads, size_t shared_bytes, const std::function<void()>& body) {
  blockDim.x = threads;
  gridDim.x = blocks;
  while (stacks.size() < threads) {
    stacks.emplace_back(new char[kStackBytes]);
  }
  for (const unsigned b : in_random_order(blocks)) {
    blockIdx.x = b;
    Block state(threads, shared_bytes, body);
    block = &state;
    for (unsigned t = 0; t < threads; ++t) {
      ucontext_t& context = state.fibers[t].context;
      getcontext(&context);
      context.uc_stack.ss_sp = stacks[t].get();
      context.uc_stack.ss_size = kStackBytes;
      context.uc_link = nullptr;
      makecontext(&context, run_fiber, 0);
    }
    run_threads();
  }
}

}  // namespace emulation
