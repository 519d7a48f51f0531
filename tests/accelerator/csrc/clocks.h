// Which work comes after which.
//
// All work is done at once, by the CPU. But streams and the host have vector clocks, which events join: so
// an operation is known to come after another one only if the program made it so, as on a GPU. Two accesses
// to the same memory, one of them a write, that no event orders are a fault. So is memory that is freed
// while another stream may still use it, once its own stream's allocator may give it out again.
//
// The host has one clock for all threads: how threads hand on what they know (locks, futures) is not seen.
#pragma once

#include "current.h"

namespace accelerator {

using StreamKey = std::pair<int, int64_t>;   // device, stream
using Clock = std::map<StreamKey, int64_t>;  // how many operations of each stream are known to have ended

inline std::recursive_mutex order_lock;  // of all that follows
inline std::map<StreamKey, Clock> clocks;
inline Clock host_clock;

inline const bool checks_order = setting("ZBPP_TEST_ORDER", "1") != "0";

inline void join(Clock& clock, const Clock& other) {
  for (const auto& [stream, number] : other) {
    auto& known = clock[stream];
    known = std::max(known, number);
  }
}

inline bool knows(const Clock& clock, StreamKey stream, int64_t number) {
  const auto found = clock.find(stream);
  return found != clock.end() && found->second >= number;
}

inline StreamKey stream_here(DeviceIndex device) { return {device, current_stream(device)}; }
inline StreamKey key_of(const Stream& stream) { return {stream.device_index(), stream.id()}; }

inline std::string text_of(StreamKey stream) {
  return kName + ":" + std::to_string(stream.first) + " stream " + std::to_string(stream.second);
}

// A new operation on the stream. It comes after all that the host has waited for.
inline int64_t begin_operation(StreamKey stream) {
  std::lock_guard guard(order_lock);
  auto& clock = clocks[stream];
  join(clock, host_clock);
  return ++clock[stream];
}

inline Clock clock_of_stream(StreamKey stream) {
  std::lock_guard guard(order_lock);
  return clocks[stream];
}

inline Clock clock_of_device(DeviceIndex device) {
  std::lock_guard guard(order_lock);
  Clock all;
  for (const auto& [stream, clock] : clocks)
    if (stream.first == device) join(all, clock);
  return all;
}

struct EventState {
  Clock clock;
  std::chrono::steady_clock::time_point time;
};

// ---- Accesses to the device's memory

struct Access {
  int64_t number;  // of the operation, on its stream
  std::string name;
};

struct Block {
  StreamKey owner;  // the stream on which it was allocated
  std::map<StreamKey, Access> reads, writes;
  std::set<StreamKey> recorded;  // by Tensor.record_stream: the allocator waits for them
};

struct LateAccess {
  StreamKey stream;
  Access access;
};

inline std::map<const void*, Block> blocks;
inline std::map<StreamKey, std::vector<LateAccess>> freed;  // by owner: who may still use what it gives out

inline void check_accesses(const std::map<StreamKey, Access>& others, const char* kind, const Clock& clock,
                           StreamKey stream, const std::string& name) {
  for (const auto& [other, access] : others)
    if (other != stream && !knows(clock, other, access.number))
      fault("no event orders " + name + " on " + text_of(stream) + " behind " + access.name + " (" + kind +
            ") on " + text_of(other));
}

inline void note_access(const void* memory, StreamKey stream, bool is_write, const std::string& name) {
  if (!checks_order || !memory) return;
  TellFaults tell;
  std::lock_guard guard(order_lock);
  const auto found = blocks.find(memory);
  if (found == blocks.end()) return;
  auto& block = found->second;
  auto& clock = clocks[stream];
  join(clock, host_clock);
  check_accesses(block.writes, "writes", clock, stream, name);
  if (is_write) check_accesses(block.reads, "reads", clock, stream, name);
  (is_write ? block.writes : block.reads)[stream] = {clock[stream], name};
}

inline void note_allocated(const void* memory, StreamKey owner) {
  if (!checks_order || !memory) return;
  TellFaults tell;
  std::lock_guard guard(order_lock);
  blocks[memory] = {owner};
  const auto found = freed.find(owner);
  if (found == freed.end()) return;
  auto clock = clocks[owner];
  join(clock, host_clock);
  for (const auto& [stream, access] : found->second)
    if (!knows(clock, stream, access.number))
      fault("freed memory of " + text_of(owner) + " may be given out again while " + access.name + " on " +
            text_of(stream) + " still uses it");
  freed.erase(found);
}

inline void note_freed(const void* memory) {
  if (!checks_order || !memory) return;
  std::lock_guard guard(order_lock);
  const auto found = blocks.find(memory);
  if (found == blocks.end()) return;
  const auto block = std::move(found->second);
  blocks.erase(found);
  auto clock = clocks[block.owner];
  join(clock, host_clock);
  for (const auto* accesses : {&block.reads, &block.writes})
    for (const auto& [stream, access] : *accesses)
      if (stream != block.owner && !block.recorded.count(stream) && !knows(clock, stream, access.number))
        freed[block.owner].push_back({stream, access});
}

inline void note_recorded(const void* memory, StreamKey stream) {
  std::lock_guard guard(order_lock);
  const auto found = blocks.find(memory);
  if (found != blocks.end()) found->second.recorded.insert(stream);
}

inline bool is_allocated(const void* memory) {
  std::lock_guard guard(order_lock);
  return blocks.count(memory);
}

}  // namespace accelerator
