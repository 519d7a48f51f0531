// A tensor of the device seen as one of the CPU, and the other way round: both over the same memory.
#pragma once

#include "device.h"

namespace accelerator {

inline c10::DispatchKeySet keys_like(const Tensor& tensor, DispatchKey key) {
  auto keys = c10::DispatchKeySet(key);
  for (const auto each : {DispatchKey::Conjugate, DispatchKey::Negative})
    if (tensor.key_set().has(each)) keys = keys.add(each);
  return keys;
}

inline Tensor over(c10::Storage storage, const Tensor& like, DispatchKey key) {
  auto made =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys_like(like, key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

inline c10::Storage storage_over(c10::DataPtr memory, size_t nbytes) {
  auto* from = memory.device().is_cpu() ? c10::GetCPUAllocator() : static_cast<c10::Allocator*>(&allocator);
  return c10::Storage(c10::Storage::use_byte_size_t(), nbytes, std::move(memory), from, true);
}

inline Tensor on_cpu(const Tensor& tensor) {
  const auto storage = tensor.storage();
  auto* held = new Held{{}, storage, 0, tensor.device().index(), nullptr};
  c10::DataPtr memory{storage.mutable_data(), held, &release_held, Device(DeviceType::CPU)};
  return over(storage_over(std::move(memory), storage.nbytes()), tensor, DispatchKey::CPU);
}

// A fresh result of the CPU's becomes the device's: counted, and its accesses are noted.
inline Tensor on_device(const Tensor& tensor, DeviceIndex device) {
  const auto storage = tensor.storage();
  const auto nbytes = static_cast<int64_t>(storage.nbytes());
  const void* noted = nbytes ? storage.data() : nullptr;
  count_bytes(device, nbytes);
  note_allocated(noted, stream_here(device));
  c10::DataPtr memory{storage.mutable_data(), new Held{{}, storage, nbytes, device, noted}, &release_held,
                      device_of(device)};
  return over(storage_over(std::move(memory), nbytes), tensor, kKey);
}

// A CPU tensor that does not keep the memory.
inline Tensor by_address(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  const auto storage = tensor.storage();
  c10::DataPtr memory{storage.mutable_data(), Device(DeviceType::CPU)};
  return over(storage_over(std::move(memory), storage.nbytes()), tensor, DispatchKey::CPU);
}

// A fresh result inside a capture, in the memory of its pool.
inline Tensor in_pool(const Tensor& tensor, DeviceIndex device) {
  const auto nbytes = tensor.storage().nbytes();
  auto memory = allocate_on(device, nbytes);
  if (nbytes) std::memcpy(memory.get(), tensor.storage().data(), nbytes);
  return over(storage_over(std::move(memory), nbytes), tensor, kKey);
}

// Give a tensor of the device the size and memory that its alias was given, as an `out` that was resized.
// True if the memory is another one.
inline bool take_back(const Tensor& tensor, const Tensor& alias) {
  const bool has_moved = alias.storage().data() != tensor.storage().data();
  const auto device = tensor.device().index();
  auto* impl = tensor.unsafeGetTensorImpl();
  if (has_moved) {
    const auto fresh = is_capturing(device) ? in_pool(alias, device) : on_device(alias, device);
    impl->set_storage_keep_dtype(fresh.storage());
  }
  if (alias.sizes() != tensor.sizes() || alias.strides() != tensor.strides())
    impl->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
  return has_moved;
}

}  // namespace accelerator
