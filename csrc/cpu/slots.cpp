// SPDX-License-Identifier: Apache-2.0
//
// From scores to slots on the CPU: the k best experts of every token, a slot for each choice, and the counts.
//
//   top_k_slots: scores [S, E] -> experts [K, S], slots [K, S], counts [E]
//   take_slots:  experts [K, S] -> slots [K, S], counts [E], for gates that choose in another way
//
// Who goes first when an expert has fewer slots than tokens that want it is the priority:
//   "choice"  all first choices in the order of the tokens, then all second choices, and so on
//   "token"   by token, whichever of its choices it is
//   "score"   the highest scores stay, of equal ones the earlier token; those that stay lie in the order of the tokens
// Of equal scores of one token, the expert with the smaller number is the better one. NaN is above everything, -0 is 0.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kScoresPerThread = 16 * 1024;
// Up to here the best k are kept sorted while the scores go by; above, sorting all of them is quicker.
constexpr int64_t kInsertUpTo = 16;

enum class Priority { kChoice, kToken, kScore };

Priority priority_of(const char* op, c10::string_view name) {
  if (name == "choice") return Priority::kChoice;
  if (name == "token") return Priority::kToken;
  if (name == "score") return Priority::kScore;
  TORCH_CHECK(false, op, ": priority = '", name, "': must be one of 'choice', 'token', 'score'");
}

template <typename Score>
struct KeyOf;
template <>
struct KeyOf<float> {
  using type = uint32_t;
};
template <>
struct KeyOf<double> {
  using type = uint64_t;
};

// An unsigned integer that is larger for a larger score; equal for 0 and -0, the largest for NaN.
template <typename Score>
typename KeyOf<Score>::type key_of(Score score) {
  using Key = typename KeyOf<Score>::type;
  constexpr Key kSign = Key(1) << (8 * sizeof(Key) - 1);
  const Score normal = score + Score(0);  // -0 becomes 0
  Key bits;
  std::memcpy(&bits, &normal, sizeof(bits));
  const Key ordered = (bits & kSign) ? ~bits : (bits | kSign);
  return score != score ? ~Key(0) : ordered;
}

// ---- which experts

template <typename Score>
void choose(const Score* scores, int64_t num_tokens, int64_t num_experts, int64_t k, int64_t* experts) {
  using Key = typename KeyOf<Score>::type;
  at::parallel_for(
      0, num_tokens, std::max<int64_t>(1, kScoresPerThread / num_experts), [&](int64_t begin, int64_t end) {
        std::vector<Key> keys(num_experts);
        std::vector<std::pair<Key, int64_t>> best(k <= kInsertUpTo ? k : num_experts);
        for (int64_t s = begin; s < end; ++s) {
          for (int64_t e = 0; e < num_experts; ++e) {
            keys[e] = key_of(scores[s * num_experts + e]);
          }
          if (k <= kInsertUpTo) {
            int64_t filled = 0;
            for (int64_t e = 0; e < num_experts; ++e) {
              if (filled == k && keys[e] <= best[k - 1].first) {
                continue;
              }
              int64_t place = filled < k ? filled++ : k - 1;
              for (; place > 0 && best[place - 1].first < keys[e]; --place) {
                best[place] = best[place - 1];
              }
              best[place] = {keys[e], e};
            }
          } else {
            for (int64_t e = 0; e < num_experts; ++e) {
              best[e] = {keys[e], e};
            }
            std::partial_sort(best.begin(), best.begin() + k, best.end(), [](const auto& one, const auto& other) {
              return one.first != other.first ? one.first > other.first : one.second < other.second;
            });
          }
          for (int64_t j = 0; j < k; ++j) {
            experts[j * num_tokens + s] = best[j].second;
          }
        }
      });
}

// ---- which slots

struct Choices {
  const int64_t* experts;  // [K, S]
  const bool* used;        // [S] or null: all are
  int64_t num_choices, num_tokens, num_experts;

  // The expert of a choice, or -1 if it takes no part.
  int64_t expert(int64_t k, int64_t s) const {
    const int64_t e = experts[k * num_tokens + s];
    const bool takes_part = static_cast<uint64_t>(e) < static_cast<uint64_t>(num_experts) && (!used || used[s]);
    return takes_part ? e : -1;
  }
};

void queue_by_position(const Choices& choices, bool choices_first, int64_t capacity, int64_t* slots, int64_t* counts) {
  const int64_t outer_size = choices_first ? choices.num_choices : choices.num_tokens;
  const int64_t inner_size = choices_first ? choices.num_tokens : choices.num_choices;
  for (int64_t outer = 0; outer < outer_size; ++outer) {
    for (int64_t inner = 0; inner < inner_size; ++inner) {
      const int64_t k = choices_first ? outer : inner, s = choices_first ? inner : outer;
      const int64_t e = choices.expert(k, s);
      if (e >= 0) {
        const int64_t position = counts[e]++;
        if (position < capacity) {
          slots[k * choices.num_tokens + s] = e * capacity + position;
        }
      }
    }
  }
}

// score_at(k, s, e) is the score of one choice.
template <typename Score, typename ScoreAt>
void queue_by_score(const Choices& choices, const ScoreAt& score_at, int64_t capacity, int64_t* slots,
                    int64_t* counts) {
  using Key = typename KeyOf<Score>::type;
  struct Entry {
    Key key;
    int64_t place;  // in the order of the tokens
    int64_t choice;
  };
  std::vector<std::vector<Entry>> queues(choices.num_experts);
  for (int64_t s = 0; s < choices.num_tokens; ++s) {
    for (int64_t k = 0; k < choices.num_choices; ++k) {
      const int64_t e = choices.expert(k, s);
      if (e >= 0) {
        auto& queue = queues[e];
        queue.push_back(
            {key_of<Score>(score_at(k, s, e)), static_cast<int64_t>(queue.size()), k * choices.num_tokens + s});
      }
    }
  }
  const auto goes_first = [](const Entry& one, const Entry& other) {
    return one.key != other.key ? one.key > other.key : one.place < other.place;
  };
  const auto is_earlier = [](const Entry& one, const Entry& other) { return one.place < other.place; };
  for (int64_t e = 0; e < choices.num_experts; ++e) {
    auto& queue = queues[e];
    counts[e] = static_cast<int64_t>(queue.size());
    if (counts[e] > capacity) {
      std::nth_element(queue.begin(), queue.begin() + capacity, queue.end(), goes_first);
      queue.resize(capacity);
      std::sort(queue.begin(), queue.end(), is_earlier);
    }
    for (size_t position = 0; position < queue.size(); ++position) {
      slots[queue[position].choice] = e * capacity + static_cast<int64_t>(position);
    }
  }
}

// Where the score of choice k of token s for expert e lies.
struct Strides {
  int64_t k, s, e;
};

std::tuple<at::Tensor, at::Tensor> take_slots_from(const at::Tensor& experts, int64_t num_experts, int64_t capacity,
                                                   const std::optional<at::Tensor>& used, Priority priority,
                                                   const at::Tensor& scores, Strides strides) {
  at::Tensor slots = at::empty(experts.sizes(), experts.options());
  at::Tensor counts = at::zeros({num_experts}, experts.options());
  auto* slot = slots.mutable_data_ptr<int64_t>();
  auto* count = counts.mutable_data_ptr<int64_t>();
  std::fill_n(slot, slots.numel(), num_experts * capacity);
  const at::Tensor used_dense = used.has_value() ? used->contiguous() : at::Tensor();
  const Choices choices{experts.const_data_ptr<int64_t>(),
                        used_dense.defined() ? used_dense.const_data_ptr<bool>() : nullptr, experts.size(0),
                        experts.size(1), num_experts};
  if (priority != Priority::kScore) {
    queue_by_position(choices, priority == Priority::kChoice, capacity, slot, count);
    return {slots, counts};
  }
  const auto queue = [&](const auto* data) {
    using Score = std::remove_cv_t<std::remove_pointer_t<decltype(data)>>;
    const auto score_at = [&](int64_t k, int64_t s, int64_t e) {
      return data[k * strides.k + s * strides.s + e * strides.e];
    };
    queue_by_score<Score>(choices, score_at, capacity, slot, count);
  };
  if (scores.scalar_type() == at::kDouble) {
    queue(scores.const_data_ptr<double>());
  } else {
    queue(scores.const_data_ptr<float>());
  }
  return {slots, counts};
}

void check_scores(const char* op, const at::Tensor& scores) {
  TORCH_CHECK(scores.scalar_type() == at::kFloat || scores.scalar_type() == at::kDouble, op,
              ": scores must be float32 or float64, got ", scores.scalar_type());
}

void check_common(const char* op, int64_t capacity, const std::optional<at::Tensor>& used, int64_t num_tokens) {
  TORCH_CHECK(capacity >= 0, op, ": capacity must not be negative, got ", capacity);
  if (used.has_value()) {
    TORCH_CHECK(used->scalar_type() == at::kBool && used->dim() == 1 && used->size(0) == num_tokens, op,
                ": used must be bool and [", num_tokens, "], got ", used->scalar_type(), " of shape ", used->sizes());
  }
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> top_k_slots(const at::Tensor& scores, int64_t k, int64_t capacity,
                                                           const std::optional<at::Tensor>& used,
                                                           c10::string_view priority) {
  const char* op = "fsmoe::top_k_slots";
  TORCH_CHECK(scores.dim() == 2, op, ": scores must be [S, E], got shape ", scores.sizes());
  check_scores(op, scores);
  const int64_t num_tokens = scores.size(0), num_experts = scores.size(1);
  TORCH_CHECK(1 <= k && k <= num_experts, op, ": k = ", k, ": must be between 1 and the number of experts (",
              num_experts, ")");
  check_common(op, capacity, used, num_tokens);
  const Priority order = priority_of(op, priority);
  const at::Tensor scores_dense = scores.contiguous();
  at::Tensor experts = at::empty({k, num_tokens}, scores.options().dtype(at::kLong));
  if (scores.scalar_type() == at::kDouble) {
    choose(scores_dense.const_data_ptr<double>(), num_tokens, num_experts, k, experts.mutable_data_ptr<int64_t>());
  } else {
    choose(scores_dense.const_data_ptr<float>(), num_tokens, num_experts, k, experts.mutable_data_ptr<int64_t>());
  }
  auto [slots, counts] =
      take_slots_from(experts, num_experts, capacity, used, order, scores_dense, Strides{0, num_experts, 1});
  return {experts, slots, counts};
}

std::tuple<at::Tensor, at::Tensor> take_slots(const at::Tensor& experts, int64_t num_experts, int64_t capacity,
                                              const std::optional<at::Tensor>& used, c10::string_view priority,
                                              const std::optional<at::Tensor>& scores) {
  const char* op = "fsmoe::take_slots";
  TORCH_CHECK(experts.dim() == 2, op, ": experts must be [K, S], got shape ", experts.sizes());
  TORCH_CHECK(experts.scalar_type() == at::kLong, op, ": experts must be int64, got ", experts.scalar_type());
  TORCH_CHECK(num_experts >= 1, op, ": num_experts must be at least 1, got ", num_experts);
  check_common(op, capacity, used, experts.size(1));
  const Priority order = priority_of(op, priority);
  at::Tensor scores_dense;
  if (order == Priority::kScore) {
    TORCH_CHECK(scores.has_value(), op, ": priority 'score' needs scores [K, S]");
    check_scores(op, *scores);
    TORCH_CHECK(scores->sizes() == experts.sizes(), op, ": scores must have the shape of experts ", experts.sizes(),
                ", got ", scores->sizes());
    scores_dense = scores->contiguous();
  }
  return take_slots_from(experts.contiguous(), num_experts, capacity, used, order, scores_dense,
                         Strides{experts.size(1), 1, 0});
}

}  // namespace

// The schemas are in ds_fsmoe/ops/compiled.py: libraries of several device types share them.
TORCH_LIBRARY_IMPL(fsmoe, CPU, library) {
  library.impl("top_k_slots", TORCH_FN(top_k_slots));
  library.impl("take_slots", TORCH_FN(take_slots));
}
