// The device's memory, counted by device, and pinned memory of the host. Neither begins as zeros.
#pragma once

#include "capture.h"

namespace accelerator {

inline std::atomic<int64_t> allocated[kMostDevices], peak[kMostDevices];

inline void count_bytes(DeviceIndex device, int64_t nbytes) {
  const auto now = allocated[device] += nbytes;
  auto most = peak[device].load();
  while (now > most && !peak[device].compare_exchange_weak(most, now)) {
  }
}

// Behind each c10::DataPtr of the device.
struct Held {
  c10::DataPtr memory;   // either the memory itself
  c10::Storage storage;  // or a storage that holds it
  int64_t nbytes;        // as counted for the device
  DeviceIndex device;
  const void* noted;  // the block's address, if its accesses are noted
};

inline void release_held(void* context) {
  auto* held = static_cast<Held*>(context);
  if (held->noted) note_freed(held->noted);
  count_bytes(held->device, -held->nbytes);
  delete held;
}

struct Pooled {
  std::shared_ptr<Pool> pool;
  char* memory;
  int64_t nbytes;
  DeviceIndex device;
};

inline void release_pooled(void* context) {
  auto* pooled = static_cast<Pooled*>(context);
  count_bytes(pooled->device, -pooled->nbytes);
  pooled->pool->give(pooled->memory);
  delete pooled;
}

inline c10::DataPtr allocate_on(DeviceIndex device, size_t size) {
  const auto nbytes = static_cast<int64_t>(size);
  use(device);
  count_bytes(device, nbytes);
  if (is_capturing(device)) {
    auto* memory = capture->pool->take(size);
    auto* pooled = new Pooled{capture->pool, memory, nbytes, device};
    return {memory, pooled, &release_pooled, device_of(device)};
  }
  auto held = c10::GetCPUAllocator()->allocate(size);
  auto* memory = held.get();
  if (size) std::memset(memory, kPoison, size);
  note_allocated(memory, stream_here(device));
  auto* context = new Held{std::move(held), {}, nbytes, device, memory};
  return {memory, context, &release_held, device_of(device)};
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override { return allocate_on(current_device, nbytes); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& memory, Stream stream) override {
    note_recorded(memory.get(), key_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* some :
         {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      auto& all = (*some)[0];  // large and small pool together
      all.current = allocated[device];
      all.peak = peak[device];
    }
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { peak[device] = allocated[device].load(); }
};
inline Allocator allocator;

// ---- Pinned memory

inline std::mutex pinned_lock;
inline std::map<const char*, size_t> pinned;

inline void release_pinned(void* context) {
  auto* memory = static_cast<c10::DataPtr*>(context);
  {
    std::lock_guard guard(pinned_lock);
    pinned.erase(static_cast<const char*>(memory->get()));
  }
  delete memory;
}

inline bool is_pinned(const void* memory) {
  std::lock_guard guard(pinned_lock);
  const auto* at = static_cast<const char*>(memory);
  auto found = pinned.upper_bound(at);
  if (found == pinned.begin()) return false;
  --found;
  return at < found->first + found->second;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    refuse_in_capture(current_device, "pinned memory");
    auto* held = new c10::DataPtr(c10::GetCPUAllocator()->allocate(nbytes));
    auto* memory = held->get();
    if (nbytes) std::memset(memory, kPoison, nbytes);
    std::lock_guard guard(pinned_lock);
    pinned[static_cast<const char*>(memory)] = nbytes;
    return {memory, held, &release_pinned, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};
inline PinnedAllocator pinned_allocator;

}  // namespace accelerator
