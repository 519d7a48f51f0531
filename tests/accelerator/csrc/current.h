// The current device and the current streams of each thread, and which devices have a context.
#pragma once

#include "reports.h"

namespace accelerator {

inline thread_local DeviceIndex current_device = 0;
inline thread_local std::vector<int64_t> current_streams;
inline std::atomic<int64_t> next_stream{1};
inline std::atomic<bool> has_context[kMostDevices];

inline int64_t& current_stream(DeviceIndex device) {
  if (int(current_streams.size()) <= device) current_streams.resize(device + 1, 0);
  return current_streams[device];
}

inline void check_ordinal(int device) {
  TORCH_CHECK(device >= 0 && device < kNumDevices, "CUDA error: invalid device ordinal");
}

// The first use of a device by a process makes a context, which takes memory of that device.
inline void use(DeviceIndex device) {
  if (device >= 0 && device < kMostDevices && !has_context[device].exchange(true))
    on_context(std::to_string(device));
}

inline DeviceIndex exchange_device(DeviceIndex device) {
  const auto before = current_device;
  if (device != before) {
    check_ordinal(device);
    current_device = device;
    use(device);
  }
  return before;
}

}  // namespace accelerator
