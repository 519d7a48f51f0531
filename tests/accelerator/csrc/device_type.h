// Which device this process has: CUDA, or PrivateUse1 under a name of its own.
//
// The name comes from the environment when the library is loaded, so that one build serves both.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace accelerator {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::DispatchKey;
using c10::IValue;
using c10::Stream;
using Operands = torch::jit::Stack;

constexpr int kMostDevices = 16;
constexpr int kPoison = 0x7F;  // in each byte: NaN as bfloat16, a huge number as float32 or integer

inline std::string setting(const char* name, const char* otherwise) {
  const char* found = std::getenv(name);
  return found ? found : otherwise;
}

// In error texts CUDA's words are used, whatever the device is called.
const std::string kName = setting("ZBPP_TEST_DEVICE", "cuda");
const bool kIsCuda = kName == "cuda";
const DeviceType kType = kIsCuda ? DeviceType::CUDA : DeviceType::PrivateUse1;
const DispatchKey kKey = kIsCuda ? DispatchKey::CUDA : DispatchKey::PrivateUse1;
const int kNumDevices = std::stoi(setting("ZBPP_TEST_NUM_DEVICES", "4"));

inline bool is_ours(const Device& device) { return device.type() == kType; }
inline bool is_ours(const Tensor& tensor) { return tensor.defined() && is_ours(tensor.device()); }
inline Device device_of(DeviceIndex index) { return Device(kType, index); }

}  // namespace accelerator
