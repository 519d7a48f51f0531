// Operations that need to know the device: new memory, views, copies, numbers for the host.
#pragma once

#include "fallback.h"

namespace accelerator {

inline Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>) {
  const auto index = device && device->has_index() ? device->index() : current_device;
  check_ordinal(index);
  const auto type = dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
  const auto nbytes = at::detail::computeStorageNbytes(size, stride, c10::elementSize(type));
  auto made =
      at::detail::make_tensor<c10::TensorImpl>(storage_over(allocate_on(index, nbytes), nbytes),
                                               c10::DispatchKeySet(kKey), c10::scalarTypeToTypeMeta(type));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return made;
}

inline Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                    std::optional<c10::Layout> layout, std::optional<Device> device, std::optional<bool> pin,
                    std::optional<at::MemoryFormat> format) {
  auto made = empty_strided(size, c10::contiguous_strides(size), dtype, layout, device, pin);
  if (format && *format != at::MemoryFormat::Contiguous && *format != at::MemoryFormat::Preserve)
    made.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return made;
}

inline void record_copy(const Tensor& to, const Tensor& from, bool is_to_host, bool is_from_host,
                        bool non_blocking) {
  if (is_to_host || is_from_host) {
    const auto* memory = (is_to_host ? to : from).storage().data();
    TORCH_CHECK(
        non_blocking && is_pinned(memory),
        "CUDA error: operation not permitted when stream is capturing (a copy between host and device)");
  }
  capture->keep(to.storage());
  to.copy_(from);
  capture->operations.push_back([to = by_address(to), from = by_address(from)] { to.copy_(from); });
}

inline Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  const bool is_to_host = !is_ours(self), is_from_host = !is_ours(source);
  const auto to = is_to_host ? self : on_cpu(self), from = is_from_host ? source : on_cpu(source);
  const auto device = (is_to_host ? source : self).device().index();
  use(device);
  if (!is_to_host && !is_from_host) use(source.device().index());
  if (self.numel() == 0) return to.copy_(from), self;
  if (is_capturing(device)) return record_copy(to, from, is_to_host, is_from_host, non_blocking), self;

  const auto stream = stream_here(device);
  const auto number = begin_operation(stream);
  if (!is_to_host) note_access(self.storage().data(), stream, true, "a copy");
  if (!is_from_host) note_access(source.storage().data(), stream, false, "a copy");
  const bool is_by_host = is_to_host || is_from_host;
  const bool is_unpinned = is_by_host && !is_pinned((is_to_host ? self : source).storage().data());
  if (is_by_host && non_blocking && !is_unpinned && checks_order) {
    if (is_to_host) return start_to_host(stream, number, to, from), self;
    start_from_host(stream, number, from);
  } else if (is_to_host && non_blocking && !is_unpinned) {
    host_waits("copy to the host");
  } else if (is_to_host || (is_from_host && !non_blocking)) {
    host_waits(is_from_host   ? "blocking copy from the host"
               : non_blocking ? "copy to pageable memory of the host"
                              : "blocking copy to the host");
    host_learns(clock_of_stream(stream));
  }
  to.copy_(from);
  return self;
}

inline at::Scalar local_scalar(const Tensor& self) {
  const auto device = self.device().index();
  refuse_in_capture(device, "item()");
  host_waits("item");
  host_learns(clock_of_stream(stream_here(device)));
  note_access(self.storage().data(), stream_here(device), false, "item");
  return on_cpu(self).item();
}

inline const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  const auto nbytes =
      at::detail::computeStorageNbytesContiguous(size, self.element_size(), self.storage_offset());
  if (nbytes > self.storage().nbytes()) resize_storage(self.storage(), nbytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

// ---- Views

inline Tensor strided_view(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                           std::optional<int64_t> offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()),
                                                       self.key_set(), self.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(self.storage_offset()));
  return made;
}

inline Tensor view(const Tensor& self, at::IntArrayRef size) {
  const auto viewed = on_cpu(self).view(size);
  return strided_view(self, viewed.sizes(), viewed.strides(), viewed.storage_offset());
}

inline Tensor reshape_alias(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return strided_view(self, size, stride, self.storage_offset());
}

// ---- set_

inline Tensor& set_storage(Tensor& self, c10::Storage storage, int64_t offset, at::IntArrayRef size,
                           at::IntArrayRef stride) {
  TORCH_CHECK(storage.device() == self.device(), "Attempted to set the storage of a tensor on device ",
              self.device(), " to a storage on different device ", storage.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.empty() && !size.empty())
    impl->set_sizes_and_strides(size, c10::contiguous_strides(size), offset);
  else
    impl->set_sizes_and_strides(size, stride, offset);
  return self;
}

inline Tensor& set_to_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, c10::Storage(source.storage()), source.storage_offset(), source.sizes(),
                     source.strides());
}

inline Tensor& set_to_storage(Tensor& self, c10::Storage storage) {
  const int64_t numel = storage.nbytes() / self.element_size();
  return set_storage(self, std::move(storage), 0, {numel}, {1});
}

inline Tensor& set_to_nothing(Tensor& self) {
  return set_storage(self, storage_over(allocate_on(self.device().index(), 0), 0), 0, {0}, {1});
}

inline void record_stream(Tensor& tensor, Stream stream) {
  note_recorded(tensor.storage().data(), key_of(stream));
}

// ---- Products with another dtype of the result, which torch has on GPUs alone: sums in float32, rounded
// once

inline Tensor mm_dtype(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  return at::mm(a.to(at::kFloat), b.to(at::kFloat)).to(dtype);
}

inline Tensor& mm_dtype_out(const Tensor& a, const Tensor& b, at::ScalarType dtype, Tensor& out) {
  return out.copy_(mm_dtype(a, b, dtype));
}

inline Tensor bmm_dtype(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
  return at::bmm(a.to(at::kFloat), b.to(at::kFloat)).to(dtype);
}

inline Tensor addmm_dtype(const Tensor& c, const Tensor& a, const Tensor& b, at::ScalarType dtype,
                          const at::Scalar& beta, const at::Scalar& alpha) {
  return at::addmm(c.to(at::kFloat), a.to(at::kFloat), b.to(at::kFloat), beta, alpha).to(dtype);
}

inline Tensor& addmm_dtype_out(const Tensor& c, const Tensor& a, const Tensor& b, at::ScalarType dtype,
                               const at::Scalar& beta, const at::Scalar& alpha, Tensor& out) {
  return out.copy_(addmm_dtype(c, a, b, dtype, beta, alpha));
}

inline Tensor baddbmm_dtype(const Tensor& c, const Tensor& a, const Tensor& b, at::ScalarType dtype,
                            const at::Scalar& beta, const at::Scalar& alpha) {
  return at::baddbmm(c.to(at::kFloat), a.to(at::kFloat), b.to(at::kFloat), beta, alpha).to(dtype);
}

inline Tensor& baddbmm_dtype_out(const Tensor& c, const Tensor& a, const Tensor& b, at::ScalarType dtype,
                                 const at::Scalar& beta, const at::Scalar& alpha, Tensor& out) {
  return out.copy_(baddbmm_dtype(c, a, b, dtype, beta, alpha));
}

// ---- Registration

inline void register_kernels(torch::Library& aten) {
  aten.impl("empty.memory_format", empty);
  aten.impl("empty_strided", empty_strided);
  aten.impl("copy_", copy_);
  aten.impl("_local_scalar_dense", local_scalar);
  aten.impl("resize_", resize_);
  aten.impl("as_strided", strided_view);
  aten.impl("view", view);
  aten.impl("_reshape_alias", reshape_alias);
  aten.impl("set_.source_Storage_storage_offset", set_storage);
  aten.impl("set_.source_Tensor", set_to_tensor);
  aten.impl("set_.source_Storage", set_to_storage);
  aten.impl("set_", set_to_nothing);
  aten.impl("record_stream", record_stream);
  aten.impl("mm.dtype", mm_dtype);
  aten.impl("mm.dtype_out", mm_dtype_out);
  aten.impl("bmm.dtype", bmm_dtype);
  aten.impl("addmm.dtype", addmm_dtype);
  aten.impl("addmm.dtype_out", addmm_dtype_out);
  aten.impl("baddbmm.dtype", baddbmm_dtype);
  aten.impl("baddbmm.dtype_out", baddbmm_dtype_out);
}

inline void register_collectives(torch::Library& c10d) {
  for (const auto* name : {"allreduce_", "allreduce_coalesced_", "reduce_scatter_", "_reduce_scatter_base_",
                           "reduce_scatter_tensor_coalesced_"})
    c10d.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  for (const auto* name : {"send", "recv_", "recv_any_source_"})
    c10d.impl(name, torch::CppFunction::makeFromBoxedFunction<&no_device_memory>());
}

}  // namespace accelerator
