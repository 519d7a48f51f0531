// Copies between the device and pinned memory, which the host does not wait for.
//
// What such a copy brings to the host is poison until the host has waited for it. What it takes from the
// host must not change until then.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

#include "memory.h"

namespace accelerator {

// Tensors of the host: a copy from the device to `pinned`, whose values arrive later.
struct Arriving {
  StreamKey stream;
  int64_t number;
  Tensor pinned, value;
};

// A copy from `pinned` to the device, which was given `value`.
struct Leaving {
  StreamKey stream;
  int64_t number;
  Tensor pinned, value;
};

inline std::vector<Arriving> arriving;  // guarded by order_lock
inline std::vector<Leaving> leaving;

// What is over is destroyed when no lock is held: a tensor's end may need Python.
struct Ended {
  std::vector<Arriving> arrived;
  std::vector<Leaving> left;
};

// Inside, tensors are plain memory of the CPU: no autograd, no subclass.
struct OnlyMemory {
  c10::impl::ExcludeDispatchKeyGuard autograd{c10::autograd_dispatch_keyset};
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard python{c10::DispatchKey::Python};
};

inline std::pair<const char*, const char*> span_of(const Tensor& tensor) {
  const auto* begin = static_cast<const char*>(tensor.data_ptr());
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {begin, begin + (last + 1) * tensor.element_size()};
}

inline bool overlap(const Tensor& one, const Tensor& other) {
  const auto [a, b] = span_of(one);
  const auto [c, d] = span_of(other);
  return a < d && c < b;
}

inline bool same_bytes(const Tensor& one, const Tensor& other) {
  const auto a = one.contiguous(), b = other.contiguous();
  return std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0;
}

inline void deliver_arriving(const Clock& clock, Ended& ended) {
  std::vector<Arriving> rest;
  for (auto& each : arriving) {
    if (knows(clock, each.stream, each.number)) {
      each.pinned.copy_(each.value);
      ended.arrived.push_back(std::move(each));
    } else {
      rest.push_back(std::move(each));
    }
  }
  arriving.swap(rest);
}

inline void check_leaving(const Clock& clock, Ended& ended) {
  std::vector<Leaving> rest;
  for (auto& each : leaving) {
    const bool is_same = same_bytes(each.pinned, each.value);
    if (!is_same) fault("pinned memory was changed by the host while a copy to the device may read it");
    const bool is_over = !is_same || knows(clock, each.stream, each.number);
    (is_over ? ended.left : rest).push_back(std::move(each));
  }
  leaving.swap(rest);
}

// The host has waited for all that the clock knows.
inline void host_learns(const Clock& clock) {
  OnlyMemory only;
  TellFaults tell;
  Ended ended;
  std::lock_guard guard(order_lock);
  join(host_clock, clock);
  deliver_arriving(host_clock, ended);
  check_leaving(host_clock, ended);
}

// Take those out of `some` whose pinned memory overlaps the tensor. Each should be known to have ended.
template <class Transfer>
std::vector<Transfer> taken_out(std::vector<Transfer>& some, const Tensor& tensor, StreamKey stream,
                                const std::string& what, const std::string& behind) {
  std::vector<Transfer> rest, found;
  for (auto& each : some) {
    if (!overlap(each.pinned, tensor)) {
      rest.push_back(std::move(each));
      continue;
    }
    if (!knows(clocks[stream], each.stream, each.number))
      fault("no event orders " + what + " on " + text_of(stream) + " behind " + behind + " on " +
            text_of(each.stream));
    found.push_back(std::move(each));
  }
  some.swap(rest);
  return found;
}

// The device begins to copy `value` to `pinned`; both are CPU tensors.
inline void start_to_host(StreamKey stream, int64_t number, const Tensor& pinned_memory,
                          const Tensor& value) {
  TellFaults tell;
  Ended ended;
  std::lock_guard guard(order_lock);
  const std::string what = "a copy to pinned memory";
  ended.left = taken_out(leaving, pinned_memory, stream, what, "the copy from it");
  ended.arrived = taken_out(arriving, pinned_memory, stream, what, "another copy to it");
  auto kept = at::empty_like(value, pinned_memory.suggest_memory_format());
  kept.copy_(value);
  arriving.push_back({stream, number, pinned_memory, kept});
  if (pinned_memory.is_contiguous())
    std::memset(pinned_memory.mutable_data_ptr(), kPoison, pinned_memory.nbytes());
  else
    pinned_memory.fill_(kPoison);
}

// The device begins to copy from `pinned`, a CPU tensor.
inline void start_from_host(StreamKey stream, int64_t number, const Tensor& pinned_memory) {
  TellFaults tell;
  Ended ended;
  std::lock_guard guard(order_lock);
  ended.arrived = taken_out(arriving, pinned_memory, stream, "a copy from pinned memory", "the copy to it");
  for (auto& each : ended.arrived) {
    // The stream sees the values; the host does not, until it has waited.
    each.pinned.copy_(each.value);
  }
  leaving.push_back({stream, number, pinned_memory, pinned_memory.contiguous().clone()});
}

}  // namespace accelerator
