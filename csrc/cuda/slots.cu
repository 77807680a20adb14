// SPDX-License-Identifier: Apache-2.0
//
// From scores to slots on the GPU, and from choices to numbered rows; what is computed is written at the top of
// csrc/cpu/slots.cpp and csrc/cpu/number_rows.cpp.
//
// Places in the queues of the experts are counted in three steps: every tile of tokens counts how many of it want each
// expert, a scan over tiles says how many came before, and every tile then places its own. Inside a tile a token's rank
// follows from bit masks, one per warp and expert. A tile ends where a segment of the tokens ends, so that it needs one
// mask per expert, however many queues there are; more experts than shared memory has room for take several rounds.
// Whole numbers only, and no result depends on which thread is first.

#include "launch.cuh"
#include "launchers.h"

namespace fsmoe {
namespace {

constexpr int kThreads = static_cast<int>(kTokensPerTile);  // one token each
constexpr int kWarps = kThreads / kWarp;
constexpr int kDigits = 256;              // of a key, 8 bits at a time
constexpr int64_t kExpertsAtOnce = 1024;  // as many as have their share of shared memory
constexpr int kBlocksAtOnce = 4;          // on a multiprocessor, as far as registers go
static_assert(kThreads == kDigits, "the threads of a block count one digit each");

// A larger number for a larger score; equal for 0 and -0, the largest for NaN.
__device__ __forceinline__ uint32_t key_of(float score) {
  if (score != score) {
    return 0xffffffffu;
  }
  const uint32_t bits = __float_as_uint(score + 0.0f);  // -0 becomes 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ int64_t smaller(int64_t one, int64_t other) { return one < other ? one : other; }

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

// What a tile holds: choices of its tokens, all in queues queue + expert * step.
struct Tile {
  int64_t first_token, end_token, first_choice, end_choice, queue, step;

  __device__ int64_t token() const { return first_token + threadIdx.x; }
};

// The choices as tiles. With Priority::kChoice a tile holds one choice of its tokens, and all tiles of first choices
// come before those of second ones; otherwise it holds all choices of its tokens. With segments, of which every tile is
// in one, a tile behind the last may be asked for, and is empty.
struct Tiles {
  Choices choices;
  const bool* used;  // [S] or null: all are
  bool choices_first;

  __device__ Tile tile(int64_t index) const {
    if (choices.segments == nullptr) {
      const int64_t per_choice = ceil_divide(choices.num_tokens, kTokensPerTile);
      const int64_t token = index % per_choice * kTokensPerTile, k = choices_first ? index / per_choice : 0;
      return {token, smaller(token + kTokensPerTile, choices.num_tokens),
              k,     choices_first ? k + 1 : choices.num_choices,
              0,     1};
    }
    int64_t begin = 0;
    for (int64_t t = 0; t < choices.num_segments; ++t) {
      const int64_t end = choices.segments[t], token = begin + index * kTokensPerTile;
      if (token < end) {
        return {token,          smaller(token + kTokensPerTile, end), 0, choices.num_choices, choices.first_queue(t),
                choices.step(t)};
      }
      index -= ceil_divide(end - begin, kTokensPerTile);
      begin = end;
    }
    return {0, 0, 0, 0, 0, 1};
  }

  // The tiles of a segment, from the first to behind the last.
  __device__ void of_segment(int64_t segment, int64_t num_tiles, int64_t* first, int64_t* end) const {
    *first = 0;
    *end = num_tiles;
    int64_t begin = 0;
    for (int64_t t = 0; choices.segments != nullptr && t <= segment; ++t) {
      *first = t == 0 ? 0 : *end;
      *end = *first + ceil_divide(choices.segments[t] - begin, kTokensPerTile);
      begin = choices.segments[t];
    }
  }

  // The expert of a choice, or -1 if it takes no part.
  __device__ int64_t expert(int64_t k, int64_t s) const {
    if (used != nullptr && !used[s]) {
      return -1;
    }
    const int64_t value = choices.at(k, s);
    return choices.is_one(value) ? value / choices.capacity : -1;
  }

  // How many choices of an expert stand in the tile before choice k of token s, one by one.
  __device__ uint32_t num_before(const Tile& tile, int64_t k, int64_t s, int64_t e) const {
    uint32_t found = 0;
    for (int64_t other = tile.first_token; other <= s; ++other) {
      for (int64_t j = tile.first_choice; j < (other == s ? k : tile.end_choice); ++j) {
        found += expert(j, other) == e;
      }
    }
    return found;
  }
};

// Also whether a tile has a choice that is out of range, in faults [tiles], which may be null.
__global__ void count_kernel(Tiles tiles, uint32_t* __restrict__ tile_counts, uint32_t* __restrict__ faults) {
  FSMOE_DYNAMIC_SHARED(uint32_t, counts);  // [experts of a round]
  FSMOE_SHARED(uint32_t, some_out);
  const int64_t index = blockIdx.x, num_experts = tiles.choices.num_experts;
  const Tile tile = tiles.tile(index);
  const int64_t token = tile.token();
  for (int64_t first = 0; first < num_experts; first += kExpertsAtOnce) {
    const int64_t here = smaller(kExpertsAtOnce, num_experts - first);
    for (int64_t e = threadIdx.x; e < here; e += kThreads) {
      counts[e] = 0;
    }
    if (threadIdx.x == 0) {
      some_out = 0;
    }
    __syncthreads();
    for (int64_t k = tile.first_choice; k < tile.end_choice && token < tile.end_token; ++k) {
      const int64_t e = tiles.expert(k, token) - first;
      if (0 <= e && e < here) {
        atomicAdd(&counts[e], 1u);
      }
      if (faults != nullptr && tiles.choices.is_out(tiles.choices.at(k, token))) {
        atomicOr(&some_out, 1u);
      }
    }
    __syncthreads();
    for (int64_t e = threadIdx.x; e < here; e += kThreads) {
      tile_counts[index * num_experts + first + e] = counts[e];
    }
    if (faults != nullptr && threadIdx.x == 0) {
      faults[index] = some_out;
    }
  }
}

// One warp per expert and segment: the count of every tile becomes the sum of those before it.
__global__ void scan_kernel(Tiles tiles, uint32_t* __restrict__ tile_counts, int64_t num_tiles,
                            int64_t* __restrict__ counts) {
  const int64_t queue = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  const int64_t num_experts = tiles.choices.num_experts, e = queue % num_experts, segment = queue / num_experts;
  const int lane = threadIdx.x % kWarp;
  if (segment >= tiles.choices.num_segments) {
    return;
  }
  int64_t begin = 0, end = 0;
  tiles.of_segment(segment, num_tiles, &begin, &end);
  uint32_t before = 0;
  for (int64_t first = begin; first < end; first += kWarp) {
    const int64_t tile = first + lane;
    const uint32_t count = tile < end ? tile_counts[tile * num_experts + e] : 0;
    const uint32_t up_to = inclusive_scan(count, lane);
    if (tile < end) {
      tile_counts[tile * num_experts + e] = before + up_to - count;
    }
    before += __shfl_sync(kAllLanes, up_to, kWarp - 1);
  }
  if (lane == 0) {
    counts[tiles.choices.first_queue(segment) + e * tiles.choices.step(segment)] = before;
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

// What becomes of a choice that has a place in its queue: a slot; an entry, to be selected by its score; or a number
// among all rows, queue by queue.
enum class Into { kSlots, kQueues, kRows };

template <Into kInto>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce)
    place_kernel(Tiles tiles, const uint32_t* __restrict__ tile_counts, int64_t capacity, Queues queues,
                 const int64_t* __restrict__ counts, const int32_t* __restrict__ ends, int64_t* __restrict__ slots) {
  FSMOE_DYNAMIC_SHARED(uint32_t, masks);  // [warps, experts of a round]: which lanes want the expert
  FSMOE_SHARED(uint32_t, some_twice);     // whether a token wants one more than once: masks cannot tell
  const int64_t index = blockIdx.x, num_experts = tiles.choices.num_experts, num_tokens = tiles.choices.num_tokens;
  const Tile tile = tiles.tile(index);
  const int64_t token = tile.token();
  const bool is_token = token < tile.end_token;
  const int64_t none = kInto == Into::kRows ? num_tokens * tiles.choices.num_choices : num_experts * capacity;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int64_t first = 0; first < num_experts; first += kExpertsAtOnce) {
    const int64_t here = smaller(kExpertsAtOnce, num_experts - first);
    for (int64_t i = threadIdx.x; i < kWarps * here; i += kThreads) {
      masks[i] = 0;
    }
    if (threadIdx.x == 0) {
      some_twice = 0;
    }
    __syncthreads();
    for (int64_t k = tile.first_choice; k < tile.end_choice && is_token; ++k) {
      const int64_t e = tiles.expert(k, token) - first;
      if (0 <= e && e < here) {
        const uint32_t lanes = atomicOr(&masks[warp * here + e], 1u << lane);
        if (lanes >> lane & 1) {
          atomicOr(&some_twice, 1u);
        }
      }
    }
    __syncthreads();
    for (int64_t k = tile.first_choice; k < tile.end_choice && is_token; ++k) {
      const int64_t expert = tiles.expert(k, token), e = expert - first, choice = k * num_tokens + token;
      if (first == 0) {
        slots[choice] = none;
      }
      if (e < 0 || e >= here) {
        continue;
      }
      uint32_t place = tile_counts[index * num_experts + expert];
      if (some_twice) {
        place += tiles.num_before(tile, k, token, expert);
      } else {
        for (int w = 0; w < warp; ++w) {
          place += __popc(masks[w * here + e]);
        }
        place += __popc(masks[warp * here + e] & ((1u << lane) - 1));
      }
      if (kInto == Into::kQueues) {
        const uint32_t at = queues.starts[expert] + place;
        const ScoreStrides& by = queues.strides;
        queues.keys[at] = key_of(queues.scores[k * by.k + token * by.s + expert * by.e]);
        queues.choices[at] = static_cast<uint32_t>(choice);
      } else if (kInto == Into::kRows) {
        const int64_t queue = tile.queue + expert * tile.step;
        slots[choice] = ends[queue] - counts[queue] + place;
      } else if (place < capacity) {
        slots[choice] = expert * capacity + place;
      }
    }
    __syncthreads();  // before the next round
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

// One block: where the queues end, and whether any tile or expert is at fault.
__global__ void ends_kernel(Choices choices, const int64_t* __restrict__ counts, const int64_t* __restrict__ limits,
                            const uint32_t* __restrict__ faults, int64_t num_tiles, int32_t* __restrict__ ends,
                            int64_t* __restrict__ fault) {
  FSMOE_SHARED(uint32_t[kWarps], warp_sums);
  FSMOE_SHARED(uint32_t, found);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t num_queues = choices.num_experts * choices.num_segments;
  // As many queues in a row for each thread.
  const int64_t per_thread = ceil_divide(num_queues, kThreads);
  const int64_t first = smaller(threadIdx.x * per_thread, num_queues), last = smaller(first + per_thread, num_queues);
  uint32_t own = 0;
  for (int64_t queue = first; queue < last; ++queue) {
    own += static_cast<uint32_t>(counts[queue]);
  }
  const uint32_t up_to = inclusive_scan(own, lane);
  if (lane == kWarp - 1) {
    warp_sums[warp] = up_to;
  }
  if (threadIdx.x == 0) {
    found = 0;
  }
  __syncthreads();
  uint32_t sum = up_to - own;
  for (int w = 0; w < warp; ++w) {
    sum += warp_sums[w];
  }
  for (int64_t queue = first; queue < last; ++queue) {
    sum += static_cast<uint32_t>(counts[queue]);
    ends[queue] = static_cast<int32_t>(sum);
  }
  for (int64_t tile = threadIdx.x; tile < num_tiles; tile += kThreads) {
    if (faults[tile]) {
      atomicOr(&found, kOutOfRange);
    }
  }
  for (int64_t e = threadIdx.x; e < choices.num_experts && limits != nullptr; e += kThreads) {
    int64_t rows = 0;
    for (int64_t t = 0; t < choices.num_segments; ++t) {
      rows += counts[choices.first_queue(t) + e * choices.step(t)];
    }
    if (limits[e] < rows) {
      atomicOr(&found, kAboveLimit);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    *fault = found;
  }
}

int64_t num_tiles_of(int64_t num_tokens, int64_t num_choices, Priority priority) {
  return ceil_divide(num_tokens, kTokensPerTile) * (priority == Priority::kChoice ? num_choices : 1);
}

// Enough for any lengths of the segments: each may end within a tile.
int64_t num_tiles_of(const Choices& choices) {
  return ceil_divide(choices.num_tokens, kTokensPerTile) + choices.num_segments - 1;
}

size_t shared_bytes(int64_t num_experts) {
  return static_cast<size_t>(num_experts < kExpertsAtOnce ? num_experts : kExpertsAtOnce) * sizeof(uint32_t);
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
  const Choices choices{experts, num_tokens, 1, num_tokens, num_choices, num_experts, 1, nullptr, 1};
  const Tiles tiles{choices, used, priority == Priority::kChoice};
  uint32_t* tile_counts = workspace;
  const size_t bytes = shared_bytes(num_experts);
  FSMOE_LAUNCH(count_kernel, num_tiles, kThreads, bytes, stream, tiles, tile_counts, nullptr);
  FSMOE_LAUNCH(scan_kernel, ceil_divide(num_experts, kWarps), kThreads, 0, stream, tiles, tile_counts, num_tiles,
               counts);
  if (priority != Priority::kScore) {
    FSMOE_LAUNCH(place_kernel<Into::kSlots>, num_tiles, kThreads, kWarps * bytes, stream, tiles, tile_counts, capacity,
                 Queues{}, nullptr, nullptr, slots);
    return cudaGetLastError();
  }
  uint32_t* keys = tile_counts + num_tiles * num_experts;
  uint32_t* selected = keys + num_tokens * num_choices;
  uint32_t* starts = selected + num_tokens * num_choices;
  const Queues queues{keys, selected, starts, scores, strides};
  FSMOE_LAUNCH(starts_kernel, 1, kWarp, 0, stream, counts, num_experts, starts);
  FSMOE_LAUNCH(place_kernel<Into::kQueues>, num_tiles, kThreads, kWarps * bytes, stream, tiles, tile_counts, capacity,
               queues, nullptr, nullptr, slots);
  FSMOE_LAUNCH(select_kernel, num_experts, kThreads, 0, stream, queues, counts, capacity, slots);
  return cudaGetLastError();
}

int64_t number_rows_workspace(Choices choices) { return num_tiles_of(choices) * (choices.num_experts + 1); }

cudaError_t launch_number_rows(Choices choices, const int64_t* limits, int64_t* rows, int64_t* counts, int32_t* ends,
                               int64_t* fault, uint32_t* workspace, cudaStream_t stream) {
  const int64_t num_tiles = num_tiles_of(choices), num_queues = choices.num_experts * choices.num_segments;
  const Tiles tiles{choices, nullptr, false};
  uint32_t* faults = workspace + num_tiles * choices.num_experts;
  const size_t bytes = shared_bytes(choices.num_experts);
  if (num_tiles > 0) {
    FSMOE_LAUNCH(count_kernel, num_tiles, kThreads, bytes, stream, tiles, workspace, faults);
  }
  FSMOE_LAUNCH(scan_kernel, ceil_divide(num_queues, kWarps), kThreads, 0, stream, tiles, workspace, num_tiles, counts);
  FSMOE_LAUNCH(ends_kernel, 1, kThreads, 0, stream, choices, counts, limits, faults, num_tiles, ends, fault);
  if (num_tiles > 0) {
    FSMOE_LAUNCH(place_kernel<Into::kRows>, num_tiles, kThreads, kWarps * bytes, stream, tiles, workspace, int64_t{0},
                 Queues{}, counts, ends, rows);
  }
  return cudaGetLastError();
}

}  // namespace fsmoe
