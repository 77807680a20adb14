// SPDX-License-Identifier: Apache-2.0
//
// From scores to slots on the GPU; what is computed is written at the top of csrc/cpu/slots.cpp.
//
// Places in the queues of the experts are counted in three steps: every tile of tokens counts how many of it want each
// expert, a scan over tiles says how many came before, and every tile then places its own. Inside a tile a token's rank
// follows from bit masks, one per warp and expert. Whole numbers only, and no result depends on which thread is first.

#include "launch.cuh"
#include "launchers.h"

namespace fsmoe {
namespace {

constexpr int kThreads = static_cast<int>(kTokensPerTile);  // one token each
constexpr int kWarps = kThreads / kWarp;
constexpr int kDigits = 256;  // of a key, 8 bits at a time
static_assert(kThreads == kDigits, "the threads of a block count one digit each");

// A larger number for a larger score; equal for 0 and -0, the largest for NaN.
__device__ __forceinline__ uint32_t key_of(float score) {
  if (score != score) {
    return 0xffffffffu;
  }
  const uint32_t bits = __float_as_uint(score + 0.0f);  // -0 becomes 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ uint32_t inclusive_scan(uint32_t value, int lane) {
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const uint32_t before = __shfl_up_sync(kAllLanes, value, offset);
    if (lane >= offset) {
      value += before;
    }
  }
  return value;
}

// ---- which experts

// One warp per token. Scores and expert numbers are packed into one number that orders them: the best is the largest,
// and the next best is the largest below it.
__global__ void choose_kernel(const float* __restrict__ scores, int64_t num_tokens, int64_t num_experts,
                              int64_t num_choices, int64_t* __restrict__ experts) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (token >= num_tokens) {
    return;
  }
  constexpr uint32_t kLast = 0xfffffffeu;  // minus the expert: the smaller number wins, and no code is all ones
  unsigned long long last = ~0ull;
  for (int64_t k = 0; k < num_choices; ++k) {
    unsigned long long best = 0;
    for (int64_t e = lane; e < num_experts; e += kWarp) {
      const unsigned long long key = key_of(scores[token * num_experts + e]);
      const unsigned long long code = key << 32 | (kLast - static_cast<uint32_t>(e));
      if (code < last && code > best) {
        best = code;
      }
    }
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      const unsigned long long other = __shfl_xor_sync(kAllLanes, best, offset);
      best = other > best ? other : best;
    }
    last = best;
    if (lane == 0) {
      experts[k * num_tokens + token] = kLast - static_cast<uint32_t>(best);
    }
  }
}

// ---- which slots

// The choices of a queue's tile. With Priority::kChoice a tile holds one choice of its tokens, and all tiles of first
// choices come before those of second ones; otherwise it holds all choices of its tokens.
struct Tiles {
  const int64_t* experts;  // [K, S]
  const bool* used;        // [S] or null: all are
  int64_t num_tokens, num_choices, num_experts, tiles_per_choice;
  bool choices_first;

  __device__ int64_t token(int64_t tile) const { return tile % tiles_per_choice * kTokensPerTile + threadIdx.x; }
  __device__ int64_t first_choice(int64_t tile) const { return choices_first ? tile / tiles_per_choice : 0; }
  __device__ int64_t end_choice(int64_t tile) const { return choices_first ? first_choice(tile) + 1 : num_choices; }

  // The expert of a choice, or -1 if it takes no part.
  __device__ int64_t expert(int64_t k, int64_t s) const {
    if (s >= num_tokens || (used != nullptr && !used[s])) {
      return -1;
    }
    const int64_t e = experts[k * num_tokens + s];
    return static_cast<uint64_t>(e) < static_cast<uint64_t>(num_experts) ? e : -1;
  }

  // How many choices of an expert stand in the tile before choice k of token s, one by one.
  __device__ uint32_t num_before(int64_t tile, int64_t k, int64_t s, int64_t e) const {
    uint32_t found = 0;
    for (int64_t other = tile % tiles_per_choice * kTokensPerTile; other <= s; ++other) {
      for (int64_t j = first_choice(tile); j < (other == s ? k : end_choice(tile)); ++j) {
        found += expert(j, other) == e;
      }
    }
    return found;
  }
};

__global__ void count_kernel(Tiles tiles, uint32_t* __restrict__ tile_counts) {
  FSMOE_DYNAMIC_SHARED(uint32_t, counts);  // [E]
  const int64_t tile = blockIdx.x, token = tiles.token(tile);
  for (int64_t e = threadIdx.x; e < tiles.num_experts; e += kThreads) {
    counts[e] = 0;
  }
  __syncthreads();
  for (int64_t k = tiles.first_choice(tile); k < tiles.end_choice(tile); ++k) {
    const int64_t e = tiles.expert(k, token);
    if (e >= 0) {
      atomicAdd(&counts[e], 1u);
    }
  }
  __syncthreads();
  for (int64_t e = threadIdx.x; e < tiles.num_experts; e += kThreads) {
    tile_counts[tile * tiles.num_experts + e] = counts[e];
  }
}

// One warp per expert: the count of every tile becomes the sum of those before it.
__global__ void scan_kernel(uint32_t* __restrict__ tile_counts, int64_t num_tiles, int64_t num_experts,
                            int64_t* __restrict__ counts) {
  const int64_t e = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (e >= num_experts) {
    return;
  }
  uint32_t before = 0;
  for (int64_t first = 0; first < num_tiles; first += kWarp) {
    const int64_t tile = first + lane;
    const uint32_t count = tile < num_tiles ? tile_counts[tile * num_experts + e] : 0;
    const uint32_t up_to = inclusive_scan(count, lane);
    if (tile < num_tiles) {
      tile_counts[tile * num_experts + e] = before + up_to - count;
    }
    before += __shfl_sync(kAllLanes, up_to, kWarp - 1);
  }
  if (lane == 0) {
    counts[e] = before;
  }
}

// One warp: where the queue of every expert begins, if they lie one after another.
__global__ void starts_kernel(const int64_t* __restrict__ counts, int64_t num_experts, uint32_t* __restrict__ starts) {
  const int lane = threadIdx.x;
  uint32_t before = 0;
  for (int64_t first = 0; first < num_experts; first += kWarp) {
    const int64_t e = first + lane;
    const uint32_t count = e < num_experts ? static_cast<uint32_t>(counts[e]) : 0;
    const uint32_t up_to = inclusive_scan(count, lane);
    if (e < num_experts) {
      starts[e] = before + up_to - count;
    }
    before += __shfl_sync(kAllLanes, up_to, kWarp - 1);
  }
}

// The queues of all experts, one after another, for the choice of those with the highest scores.
struct Queues {
  uint32_t* keys;          // [K * S]
  uint32_t* choices;       // [K * S], k * S + s
  const uint32_t* starts;  // [E]
  const float* scores;
  ScoreStrides strides;
};

template <bool kIntoQueues>
__global__ void place_kernel(Tiles tiles, const uint32_t* __restrict__ tile_counts, int64_t capacity, Queues queues,
                             int64_t* __restrict__ slots) {
  FSMOE_DYNAMIC_SHARED(uint32_t, masks);  // [warps, E]: which lanes want the expert
  FSMOE_SHARED(uint32_t, some_twice);     // whether a token wants one more than once: masks cannot tell
  const int64_t tile = blockIdx.x, token = tiles.token(tile), num_experts = tiles.num_experts;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int64_t i = threadIdx.x; i < kWarps * num_experts; i += kThreads) {
    masks[i] = 0;
  }
  if (threadIdx.x == 0) {
    some_twice = 0;
  }
  __syncthreads();
  for (int64_t k = tiles.first_choice(tile); k < tiles.end_choice(tile); ++k) {
    const int64_t e = tiles.expert(k, token);
    if (e >= 0) {
      const uint32_t lanes = atomicOr(&masks[warp * num_experts + e], 1u << lane);
      if (lanes >> lane & 1) {
        atomicOr(&some_twice, 1u);
      }
    }
  }
  __syncthreads();
  if (token >= tiles.num_tokens) {
    return;
  }
  for (int64_t k = tiles.first_choice(tile); k < tiles.end_choice(tile); ++k) {
    const int64_t e = tiles.expert(k, token), choice = k * tiles.num_tokens + token;
    slots[choice] = num_experts * capacity;
    if (e < 0) {
      continue;
    }
    uint32_t place = tile_counts[tile * num_experts + e];
    if (some_twice) {
      place += tiles.num_before(tile, k, token, e);
    } else {
      for (int w = 0; w < warp; ++w) {
        place += __popc(masks[w * num_experts + e]);
      }
      place += __popc(masks[warp * num_experts + e] & ((1u << lane) - 1));
    }
    if (kIntoQueues) {
      const uint32_t at = queues.starts[e] + place;
      const ScoreStrides& by = queues.strides;
      queues.keys[at] = key_of(queues.scores[k * by.k + token * by.s + e * by.e]);
      queues.choices[at] = static_cast<uint32_t>(choice);
    } else if (place < capacity) {
      slots[choice] = e * capacity + place;
    }
  }
}

// How many threads before this one say yes, and how many in all. For all threads of a block together.
__device__ __forceinline__ uint32_t count_before(bool yes, uint32_t* warp_counts, uint32_t* total) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const uint32_t lanes = __ballot_sync(kAllLanes, yes);
  __syncthreads();  // whoever still reads warp_counts
  if (lane == 0) {
    warp_counts[warp] = __popc(lanes);
  }
  __syncthreads();
  uint32_t before = __popc(lanes & ((1u << lane) - 1));
  *total = 0;
  for (int w = 0; w < kWarps; ++w) {
    before += w < warp ? warp_counts[w] : 0;
    *total += warp_counts[w];
  }
  return before;
}

// One block per expert: those with the highest keys stay, and lie in the order in which they stood in the queue.
__global__ void select_kernel(Queues queues, const int64_t* __restrict__ counts, int64_t capacity,
                              int64_t* __restrict__ slots) {
  FSMOE_SHARED(uint32_t[kDigits], digits);
  FSMOE_SHARED(uint32_t[kWarps], warp_counts);
  FSMOE_SHARED(uint32_t, chosen_digit);
  FSMOE_SHARED(uint32_t, still_wanted);
  const int64_t e = blockIdx.x, length = counts[e];
  const uint32_t* keys = queues.keys + queues.starts[e];
  const uint32_t* choices = queues.choices + queues.starts[e];
  if (capacity == 0) {
    return;
  }
  // The lowest key that stays, digit by digit, and how many of those with that very key do.
  uint32_t lowest = 0, wanted = static_cast<uint32_t>(capacity < length ? capacity : length);
  const bool all_stay = length <= capacity;
  for (int shift = 24; shift >= 0 && !all_stay; shift -= 8) {
    digits[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < length; i += kThreads) {
      const bool is_candidate = shift == 24 || keys[i] >> (shift + 8) == lowest >> (shift + 8);
      if (is_candidate) {
        atomicAdd(&digits[keys[i] >> shift & (kDigits - 1)], 1u);
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      uint32_t left = wanted, digit = kDigits - 1;
      while (digits[digit] < left) {
        left -= digits[digit--];
      }
      chosen_digit = digit;
      still_wanted = left;
    }
    __syncthreads();
    lowest |= chosen_digit << shift;
    wanted = still_wanted;  // not written again before all have passed two barriers
  }
  uint32_t equals = 0, placed = 0;
  for (int64_t first = 0; first < length; first += kThreads) {
    const int64_t i = first + threadIdx.x;
    const uint32_t key = i < length ? keys[i] : 0;
    uint32_t total = 0;
    const bool is_equal = i < length && !all_stay && key == lowest;
    const uint32_t equals_before = equals + count_before(is_equal, warp_counts, &total);
    equals += total;
    const bool stays = i < length && (all_stay || key > lowest || (is_equal && equals_before < wanted));
    const uint32_t position = placed + count_before(stays, warp_counts, &total);
    placed += total;
    if (stays) {
      slots[choices[i]] = e * capacity + position;
    }
  }
}

int64_t num_tiles_of(int64_t num_tokens, int64_t num_choices, Priority priority) {
  return ceil_divide(num_tokens, kTokensPerTile) * (priority == Priority::kChoice ? num_choices : 1);
}

}  // namespace

cudaError_t launch_choose(const float* scores, int64_t num_tokens, int64_t num_experts, int64_t num_choices,
                          int64_t* experts, cudaStream_t stream) {
  if (num_tokens == 0) {
    return cudaSuccess;
  }
  FSMOE_LAUNCH(choose_kernel, ceil_divide(num_tokens, kWarps), kThreads, 0, stream, scores, num_tokens, num_experts,
               num_choices, experts);
  return cudaGetLastError();
}

int64_t take_slots_workspace(int64_t num_tokens, int64_t num_choices, int64_t num_experts, Priority priority) {
  const int64_t tiles = num_tiles_of(num_tokens, num_choices, priority) * num_experts;
  return priority == Priority::kScore ? tiles + 2 * num_tokens * num_choices + num_experts : tiles;
}

cudaError_t launch_take_slots(const int64_t* experts, const bool* used, Priority priority, const float* scores,
                              ScoreStrides strides, int64_t num_tokens, int64_t num_choices, int64_t num_experts,
                              int64_t capacity, int64_t* slots, int64_t* counts, uint32_t* workspace,
                              cudaStream_t stream) {
  if (num_tokens == 0 || num_choices == 0) {
    return cudaMemsetAsync(counts, 0, static_cast<size_t>(num_experts) * sizeof(int64_t), stream);
  }
  const int64_t num_tiles = num_tiles_of(num_tokens, num_choices, priority);
  const Tiles tiles{experts,
                    used,
                    num_tokens,
                    num_choices,
                    num_experts,
                    ceil_divide(num_tokens, kTokensPerTile),
                    priority == Priority::kChoice};
  uint32_t* tile_counts = workspace;
  const size_t counts_bytes = static_cast<size_t>(num_experts) * sizeof(uint32_t);
  FSMOE_LAUNCH(count_kernel, num_tiles, kThreads, counts_bytes, stream, tiles, tile_counts);
  FSMOE_LAUNCH(scan_kernel, ceil_divide(num_experts, kWarps), kThreads, 0, stream, tile_counts, num_tiles, num_experts,
               counts);
  if (priority != Priority::kScore) {
    FSMOE_LAUNCH(place_kernel<false>, num_tiles, kThreads, kWarps * counts_bytes, stream, tiles, tile_counts, capacity,
                 Queues{}, slots);
    return cudaGetLastError();
  }
  uint32_t* keys = tile_counts + num_tiles * num_experts;
  uint32_t* choices = keys + num_tokens * num_choices;
  uint32_t* starts = choices + num_tokens * num_choices;
  const Queues queues{keys, choices, starts, scores, strides};
  FSMOE_LAUNCH(starts_kernel, 1, kWarp, 0, stream, counts, num_experts, starts);
  FSMOE_LAUNCH(place_kernel<true>, num_tiles, kThreads, kWarps * counts_bytes, stream, tiles, tile_counts, capacity,
               queues, slots);
  FSMOE_LAUNCH(select_kernel, num_experts, kThreads, 0, stream, queues, counts, capacity, slots);
  return cudaGetLastError();
}

}  // namespace fsmoe
