// A capture of a CUDA graph: a list of operations on memory of the capture's own pool.
//
// As on CUDA a capture has no effect: what it changed gets its values back, and so do the generators. A
// replay computes into the memory of the capture, by addresses: a graph keeps no tensor alive. After a
// capture the pool is poison, since what the capture made was never computed.
#pragma once

#include "clocks.h"

namespace accelerator {

// The memory of captured graphs. A block that was freed is given out again.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  char* take(size_t nbytes) {
    std::lock_guard guard(lock_);
    nbytes = (std::max<size_t>(nbytes, 1) + 511) / 512 * 512;
    const auto found = free_.lower_bound(nbytes);
    if (found != free_.end() && found->first <= 2 * nbytes) {
      auto* memory = found->second;
      free_.erase(found);
      return memory;
    }
    all_.push_back(c10::GetCPUAllocator()->allocate(nbytes));
    auto* memory = static_cast<char*>(all_.back().get());
    sizes_[memory] = nbytes;
    std::memset(memory, kPoison, nbytes);
    return memory;
  }

  void give(char* memory) {
    std::lock_guard guard(lock_);
    free_.emplace(sizes_[memory], memory);
  }

  bool has(const void* memory) {
    std::lock_guard guard(lock_);
    auto* at = static_cast<char*>(const_cast<void*>(memory));
    auto found = sizes_.upper_bound(at);
    if (found == sizes_.begin()) return false;
    --found;
    return at < found->first + found->second;
  }

  void poison() {
    std::lock_guard guard(lock_);
    for (const auto& [memory, nbytes] : sizes_) std::memset(memory, kPoison, nbytes);
  }

 private:
  std::mutex lock_;
  std::multimap<size_t, char*> free_;
  std::vector<c10::DataPtr> all_;
  std::map<char*, size_t> sizes_;
};

struct Capture {
  StreamKey stream;
  std::shared_ptr<Pool> pool;
  std::vector<std::function<void()>> operations;
  std::map<char*, std::vector<char>> before;  // what the capture has changed outside of its pool, as it was
  std::vector<Tensor> generator_states;
  bool is_broken = false;

  // To be called before an operation changes this memory.
  void keep(const c10::Storage& storage) {
    auto* memory = static_cast<char*>(storage.mutable_data());
    if (memory && !pool->has(memory) && !before.count(memory))
      before[memory] = std::vector<char>(memory, memory + storage.nbytes());
  }

  void undo() {
    for (const auto& [memory, bytes] : before) std::memcpy(memory, bytes.data(), bytes.size());
    before.clear();
  }
};

inline std::shared_ptr<Capture> capture;  // one at a time in a process

inline bool is_capturing(DeviceIndex device) { return capture && capture->stream == stream_here(device); }
inline bool is_capturing_here() { return is_capturing(current_device); }

inline void refuse_in_capture(DeviceIndex device, const std::string& what) {
  if (!is_capturing(device)) return;
  capture->is_broken = true;
  TORCH_CHECK(false, "CUDA error: operation not permitted when stream is capturing (", what, ")");
}

}  // namespace accelerator
