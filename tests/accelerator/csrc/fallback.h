// Every operation of the device that has no kernel of its own: the CPU's kernel on the same memory.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include "alias.h"

namespace accelerator {

// Operations of a GPU that wait for the device inside: the host needs the size of the result.
inline const std::set<std::string> kWaiting{
    "aten::nonzero",    "aten::masked_select",      "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive",
    "aten::equal",      "aten::bincount",           "aten::repeat_interleave.Tensor",
    "aten::_ctc_loss",  "aten::linalg_inv_ex",      "aten::histogram",
};

// Operations whose integers are indices.
inline const std::vector<std::string> kIndexing{"embedding", "index", "gather",        "scatter",
                                                "nll_loss",  "take",  "cross_entropy", "one_hot"};

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline bool starts_with(const std::string& text, const std::string& part) { return text.rfind(part, 0) == 0; }

inline std::string full_name(const c10::FunctionSchema& schema) {
  return schema.overload_name().empty() ? schema.name() : schema.name() + "." + schema.overload_name();
}

template <class Function>
IValue map_tensors(const IValue& value, Function function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTensorList()) {
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) tensor = function(tensor);
    return tensors;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
      made.push_back(tensor ? std::optional<Tensor>(function(*tensor)) : std::nullopt);
    return made;
  }
  if (value.isList() && value.toList().elementType()->isSubtypeOf(*c10::ListType::ofTensors())) {
    const auto values = value.toList();
    c10::impl::GenericList made(values.elementType());
    for (const IValue& each : values) made.push_back(map_tensors(each, function));
    return made;
  }
  return value;
}

template <class Function>
void each_tensor(const IValue& value, Function function) {
  map_tensors(value, [&](const Tensor& tensor) {
    if (tensor.defined()) function(tensor);
    return tensor;
  });
}

// Call the CPU's kernel. One that draws without a generator argument draws from the device's generator.
inline void run_on_cpu(const c10::OperatorHandle& op, Operands* operands, DeviceIndex device, bool draws) {
  if (!draws) {
    op.callBoxed(operands);
    return;
  }
  static std::mutex one_at_a_time;
  std::lock_guard guard(one_at_a_time);
  auto hosts = at::detail::getDefaultCPUGenerator();
  auto& own = cpu_of(generators()[device]);
  const auto before = hosts.get_state();
  hosts.set_state(own.get_state());
  op.callBoxed(operands);
  own.set_state(hosts.get_state());
  hosts.set_state(before);
}

// One call of an operation.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Operands* operands)
      : op_(op),
        operands_(operands),
        schema_(op.schema()),
        name_(schema_.name()),
        num_arguments_(schema_.arguments().size()),
        first_(operands->size() - num_arguments_),
        is_communication_(starts_with(name_, "c10d::")) {}

  void run() {
    find_device();
    check_tensors_of_the_host();
    replace_arguments();
    use(device_);
    wait_if_it_waits();
    if (captures_ || !is_view()) note_arguments();
    const auto recorded = captures_ ? recorded_arguments() : Operands{};
    if (captures_) make_indices_harmless();
    run_on_cpu(op_, operands_, device_, draws());
    for (const auto& [tensor, alias] : aliases_)
      if (take_back(tensor, alias)) moved_.insert(tensor.unsafeGetTensorImpl());
    replace_results();
    if (captures_) record(recorded);
  }

 private:
  const c10::Argument& argument(size_t i) const { return schema_.arguments()[i]; }
  IValue& operand(size_t i) { return (*operands_)[first_ + i]; }
  bool is_written(size_t i) const {
    return is_communication_ || (argument(i).alias_info() && argument(i).alias_info()->isWrite());
  }
  bool is_view() const {
    if (schema_.returns().size() != 1) return false;
    const auto* alias = schema_.returns()[0].alias_info();
    return alias && !alias->isWrite();
  }
  // Its schema does not say that it changes the running statistics.
  bool is_batch_norm() const { return contains(name_, "batch_norm"); }
  bool draws() const {
    for (const auto& each : schema_.arguments())
      if (each.name() == "generator") return false;
    return op_.hasTag(at::Tag::nondeterministic_seeded);
  }

  // The device of the tensors; without any the device that is named; else the current one.
  void find_device() {
    std::optional<Device> found, named;
    for (size_t i = 0; i < num_arguments_; ++i) {
      each_tensor(operand(i), [&](const Tensor& tensor) {
        if (!is_ours(tensor)) return;
        TORCH_CHECK(!found || *found == tensor.device(), two_devices(found, tensor.device()));
        found = tensor.device();
      });
      if (operand(i).isDevice() && is_ours(operand(i).toDevice())) named = operand(i).toDevice();
    }
    has_tensors_ = found.has_value();
    const auto device = found ? found : named;
    device_ = device && device->has_index() ? device->index() : current_device;
    captures_ = is_capturing(device_);
  }

  std::string two_devices(std::optional<Device> one, Device other) const {
    return "Expected all tensors to be on the same device, but found at least two devices, " + one->str() +
           " and " + other.str() + "! (in " + name_ + ")";
  }

  // A number, which a kernel takes by value, may be the host's; and so may an index, which is copied.
  void check_tensors_of_the_host() {
    const bool indexes = starts_with(name_, "aten::index") || starts_with(name_, "aten::_index");
    for (size_t i = 0; i < num_arguments_ && has_tensors_ && !is_communication_; ++i)
      each_tensor(operand(i), [&](const Tensor& tensor) {
        if (!tensor.is_cpu() || (tensor.dim() == 0 && !is_written(i))) return;
        TORCH_CHECK(indexes && !is_written(i), two_devices(device_of(device_), tensor.device()));
        host_waits("index by a tensor of the host");
      });
  }

  void replace_arguments() {
    for (size_t i = 0; i < num_arguments_; ++i) {
      auto& value = operand(i);
      if (value.isTensor() || value.isList())
        value = map_tensors(value, [&](const Tensor& tensor) { return alias_of(tensor, is_written(i)); });
      else if (value.isDevice() && is_ours(value.toDevice()))
        value = Device(DeviceType::CPU);
      else if (value.isGenerator())
        value = cpu_generator(value.toGenerator());
      else if (value.isNone() && argument(i).name() == "generator")
        value = cpu_of(generators()[device_]);
    }
  }

  at::Generator cpu_generator(const at::Generator& given) const {
    TORCH_CHECK(is_ours(given.device()), "Expected a '", kName,
                "' device type for generator but found 'cpu' (in ", name_, ")");
    return cpu_of(given);
  }

  Tensor alias_of(const Tensor& tensor, bool is_written) {
    if (!is_ours(tensor)) return tensor;
    aliases_.emplace_back(tensor, on_cpu(tensor));
    written_.push_back(is_written);
    return aliases_.back().second;
  }

  void wait_if_it_waits() {
    if (!assigns_by_mask() && !kWaiting.count(name_) && !kWaiting.count(full_name(schema_))) return;
    refuse_in_capture(device_, name_);
    host_waits(full_name(schema_));
    host_learns(clock_of_stream(stream_here(device_)));
  }

  // An assignment to x[mask] counts the mask's entries, unless the value is a number of the host.
  bool assigns_by_mask() {
    bool found = false;
    if (name_ == "aten::_index_put_impl_" && is_alias(operand(2).toTensor()))
      each_tensor(operand(1), [&](const Tensor& tensor) {
        found |= tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
      });
    return found;
  }

  void note_arguments() {
    if (!captures_) begin_operation(stream_here(device_));
    for (size_t i = 0; i < aliases_.size(); ++i) {
      const auto& tensor = aliases_[i].first;
      if (captures_ && (written_[i] || is_batch_norm())) capture->keep(tensor.storage());
      if (!captures_ && tensor.numel())
        note_access(tensor.storage().data(), stream_here(device_), written_[i] && !is_communication_,
                    full_name(schema_));
    }
  }

  // What a replay gives the kernel: memory of the device by its address, a number of the host by its value.
  Operands recorded_arguments() {
    Operands recorded;
    for (size_t i = 0; i < num_arguments_; ++i)
      recorded.push_back(map_tensors(operand(i), [&](const Tensor& tensor) {
        if (!tensor.defined() || is_alias(tensor)) return by_address(tensor);
        auto value = tensor.clone();
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
          value.unsafeGetTensorImpl()->set_wrapped_number(true);
        return value;
      }));
    return recorded;
  }

  bool is_alias(const Tensor& tensor) const {
    for (const auto& [_, alias] : aliases_)
      if (alias.is_same(tensor)) return true;
    return false;
  }

  // A capture computes nothing on a GPU. Here it does, on memory that may hold anything, indices too.
  void make_indices_harmless() {
    const bool indexes = std::any_of(kIndexing.begin(), kIndexing.end(),
                                     [&](const std::string& part) { return contains(name_, part); });
    for (size_t i = 0; i < num_arguments_ && indexes; ++i) {
      if (is_written(i) || !(operand(i).isTensor() || operand(i).isList())) continue;
      operand(i) = map_tensors(operand(i), [](const Tensor& tensor) {
        const bool is_index = tensor.defined() && c10::isIntegralType(tensor.scalar_type(), false);
        return is_index && tensor.numel() ? at::zeros_like(tensor) : tensor;
      });
    }
  }

  void replace_results() {
    const auto num_results = schema_.returns().size();
    for (size_t i = operands_->size() - num_results; i < operands_->size(); ++i) {
      auto& value = (*operands_)[i];
      if (value.isTensor() || value.isList())
        value = map_tensors(value, [&](const Tensor& tensor) { return result(tensor, num_seen_++); });
    }
  }

  // An argument itself, a view of one, or new memory.
  Tensor result(const Tensor& tensor, int place) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (const auto& [argument, alias] : aliases_) {
      if (!alias.is_same(tensor)) continue;
      if (captures_ && moved_.count(argument.unsafeGetTensorImpl()))
        fresh_.emplace_back(place, by_address(argument));
      return argument;
    }
    for (const auto& [argument, alias] : aliases_)
      if (tensor.storage().nbytes() && alias.storage().data() == tensor.storage().data())
        return over(c10::Storage(argument.storage()), tensor, kKey);
    if (captures_) {
      auto made = in_pool(tensor, device_);
      fresh_.emplace_back(place, by_address(made));
      return made;
    }
    auto made = on_device(tensor, device_);
    note_access(made.storage().data(), stream_here(device_), true, full_name(schema_));
    return made;
  }

  void record(const Operands& recorded) {
    if (!schema_.is_mutable() && fresh_.empty() && !is_batch_norm()) return;
    std::vector<const void*> outside;  // memory that the graph does not own
    for (const auto& [tensor, _] : aliases_) {
      const auto* memory = tensor.storage().data();
      if (tensor.numel() && !capture->pool->has(memory)) outside.push_back(memory);
    }
    capture->operations.push_back(
        [op = op_, recorded, device = device_, draws = draws(), fresh = fresh_, outside] {
          check_outside(op, outside);
          Operands operands = recorded;
          run_on_cpu(op, &operands, device, draws);
          std::vector<Tensor> results;
          for (auto i = operands.size() - op.schema().returns().size(); i < operands.size(); ++i)
            map_tensors(operands[i], [&](const Tensor& tensor) {
              results.push_back(tensor);
              return tensor;
            });
          for (const auto& [place, where] : fresh)
            if (where.numel()) where.copy_(results[place]);
        });
  }

  static void check_outside(const c10::OperatorHandle& op, const std::vector<const void*>& outside) {
    if (!checks_order) return;
    TellFaults tell;
    for (const auto* memory : outside)
      if (!is_allocated(memory))
        fault("a graph's " + full_name(op.schema()) + " uses memory that was freed since the capture");
  }

  const c10::OperatorHandle op_;
  Operands* operands_;
  const c10::FunctionSchema& schema_;
  const std::string name_;
  const size_t num_arguments_, first_;
  const bool is_communication_;
  DeviceIndex device_ = 0;
  bool has_tensors_ = false, captures_ = false;
  std::vector<std::pair<Tensor, Tensor>> aliases_;  // the device's tensor, the same as the CPU's
  std::vector<bool> written_;                       // for each of these
  std::set<const c10::TensorImpl*> moved_;          // of these: given other memory
  std::vector<std::pair<int, Tensor>> fresh_;       // of a capture: place among the results, memory
  int num_seen_ = 0;
};

inline void fallback(const c10::OperatorHandle& op, Operands* operands) { Call(op, operands).run(); }

// gloo of a build with CUDA reduces tensors of a device by host memory; it can't send from one.
inline void no_device_memory(const c10::OperatorHandle& op, Operands*) {
  TORCH_CHECK(false, "[gloo] ", op.schema().name(), ": Bad address (memory of a device)");
}

}  // namespace accelerator
