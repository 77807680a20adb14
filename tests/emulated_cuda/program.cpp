// SPDX-License-Identifier: Apache-2.0
//
// The launchers of one .cu file (FSMOE_KERNELS) on emulated CUDA, as a program, so that sanitizers need no Python.
//
// It reads calls from its input: "call <name>", an argument per line, "end". An argument is "number <value>", "null",
// "address <value>" of nothing, or "bytes <count> <offset>" with that many bytes after it, which are laid into memory
// of their own that begins so far behind a multiple of 16. For each call it writes the result, 8 bytes, and then what
// has become of the bytes of all arguments.

#include "cuda_runtime_api.h"

#include FSMOE_KERNELS

#include <iostream>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>

namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr size_t kMarginBytes = 0;  // the sanitizer keeps watch at both ends, over reads as well
#else
constexpr size_t kMarginBytes = 256;
#endif
constexpr char kMargin = static_cast<char>(0xa5);

class Memory {
 public:
  Memory(size_t bytes, size_t offset)
      : bytes_(bytes),
        before_(kMarginBytes + offset),
        all_(static_cast<char*>(std::malloc(before_ + bytes + kMarginBytes))) {
    std::memset(all_.get(), kMargin, before_);
    std::memset(all_.get() + before_ + bytes, kMargin, kMarginBytes);
  }
  char* data() const { return all_.get() + before_; }
  size_t bytes() const { return bytes_; }
  void check() const {
    for (size_t i = 0; i < before_ + bytes_ + kMarginBytes; ++i) {
      if ((i < before_ || i >= before_ + bytes_) && all_.get()[i] != kMargin) {
        emulation::stop("written outside of an argument");
      }
    }
  }

 private:
  struct Free {
    void operator()(char* at) const { std::free(at); }
  };
  size_t bytes_, before_;
  std::unique_ptr<char, Free> all_;
};

class Arguments {
 public:
  bool read() {
    for (std::string kind; std::cin >> kind && kind != "end";) {
      int64_t value = 0;
      if (kind == "bytes") {
        size_t bytes = 0, offset = 0;
        std::cin >> bytes >> offset;
        std::cin.get();
        memory_.emplace_back(bytes, offset);
        std::cin.read(memory_.back().data(), static_cast<std::streamsize>(bytes));
        value = reinterpret_cast<int64_t>(memory_.back().data());
      } else if (kind != "null") {
        std::cin >> value;
      }
      values_.push_back(value);
    }
    return static_cast<bool>(std::cin);
  }
  template <typename T>
  T next() {
    if constexpr (std::is_same_v<T, cudaStream_t>) {
      return nullptr;
    } else if constexpr (std::is_pointer_v<T>) {
      return reinterpret_cast<T>(number());
    } else if constexpr (std::is_class_v<T>) {  // of whole numbers only
      T of_numbers;
      for (size_t i = 0; i < sizeof(T) / sizeof(int64_t); ++i) {
        reinterpret_cast<int64_t*>(&of_numbers)[i] = number();
      }
      return of_numbers;
    } else if constexpr (std::is_floating_point_v<T>) {  // the bits of a double
      const int64_t bits = number();
      double value = 0;
      std::memcpy(&value, &bits, sizeof(value));
      return static_cast<T>(value);
    } else {
      return static_cast<T>(number());
    }
  }
  void write(int64_t result) const {
    std::cout.write(reinterpret_cast<const char*>(&result), sizeof(result));
    for (const Memory& each : memory_) {
      each.check();
      std::cout.write(each.data(), static_cast<std::streamsize>(each.bytes()));
    }
  }

 private:
  int64_t number() {
    if (at_ == values_.size()) {
      emulation::stop("a call with too few arguments");
    }
    return values_[at_++];
  }
  std::vector<int64_t> values_;
  std::vector<Memory> memory_;
  size_t at_ = 0;
};

template <typename Result, typename... Given>
int64_t run(Result (*launcher)(Given...), Arguments& arguments) {
  return static_cast<int64_t>(std::apply(launcher, std::tuple<Given...>{arguments.next<Given>()...}));
}

int64_t run(std::string_view name, Arguments& arguments) {
#define FSMOE_CALLED(launcher)              \
  if (name == #launcher) {                  \
    return run(fsmoe::launcher, arguments); \
  }
#ifdef FSMOE_OF_GATED
  FSMOE_CALLED(launch_gated)
#endif
#ifdef FSMOE_OF_ROWS
  FSMOE_CALLED(launch_arrange)
  FSMOE_CALLED(launch_restore)
  FSMOE_CALLED(launch_restore_backward)
#endif
#ifdef FSMOE_OF_SLOTS
  FSMOE_CALLED(launch_choose)
  FSMOE_CALLED(take_slots_workspace)
  FSMOE_CALLED(launch_take_slots)
  FSMOE_CALLED(number_rows_workspace)
  FSMOE_CALLED(launch_number_rows)
#endif
  emulation::stop("a call of something that is not in this file");
}

}  // namespace

int main(int count, char** options) {
  for (int i = 1; i + 1 < count; i += 2) {
    const std::string_view name = options[i];
    const int value = std::atoi(options[i + 1]);
    if (name == "seed") {
      emulation::random_order.seed(static_cast<unsigned>(value));
    } else if (name == "leave_out") {
      emulation::line_left_out = value;
    } else if (name == "only_list") {
      emulation::only_lists = value != 0;
    } else {
      emulation::stop("an unknown option");
    }
  }
  for (std::string word, name; std::cin >> word >> name;) {
    Arguments arguments;
    if (word != "call" || !arguments.read()) {
      emulation::stop("input that cannot be read");
    }
    arguments.write(run(name, arguments));
  }
  if (emulation::line_left_out != 0 && emulation::times_left_out == 0) {
    emulation::stop("nothing to leave out was met in that line");
  }
  return 0;
}
