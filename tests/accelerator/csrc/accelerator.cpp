// A CUDA device, or one of another name, that computes on the CPU. See the package's docstring.
//
// device_type.h   which device                     device.h     generators, guard, hooks
// reports.h       what Python is told              alias.h      tensors of the device as the CPU's
// current.h       current device and streams       fallback.h   every operation
// clocks.h        which work comes after which     kernels.h    those that need to know the device
// capture.h       CUDA graphs
// memory.h        memory of the device, pinned memory
// transfers.h     copies that the host does not wait for
#include <ATen/autocast_mode.h>

#include "kernels.h"

using namespace accelerator;

namespace {

// As torch.cuda.CUDAGraph.
class Graph {
 public:
  void begin(std::shared_ptr<Pool> pool) {
    TORCH_CHECK(!capture, "a capture is under way");
    const auto stream = stream_here(current_device);
    TORCH_CHECK(stream.second != 0, "CUDA graphs must be captured on a non-default stream.");
    auto begun = std::make_shared<Capture>();
    begun->stream = stream;
    begun->pool = std::move(pool);
    for (const auto& generator : generators())
      begun->generator_states.push_back(cpu_of(generator).get_state());
    capture = begun;
  }

  void end() {
    TORCH_CHECK(capture, "no capture is under way");
    const auto ended = std::exchange(capture, nullptr);
    ended->undo();
    for (size_t i = 0; i < generators().size(); ++i)
      cpu_of(generators()[i]).set_state(ended->generator_states[i]);
    ended->pool->poison();
    TORCH_CHECK(!ended->is_broken, "CUDA error: operation failed due to a previous error during capture");
    if (ended->operations.empty())
      TORCH_WARN(
          "The CUDA Graph is empty. This usually means that the graph was attempted to be captured on wrong "
          "device or stream.");
    captured_ = ended;
  }

  void replay() {
    TORCH_CHECK(captured_, "Called CUDAGraph::replay without a preceding successful capture.");
    TORCH_CHECK(!is_capturing_here(), "a replay inside a capture");
    OnlyMemory only;
    begin_operation(stream_here(current_device));
    for (const auto& operation : captured_->operations) operation();
  }

  void reset() { captured_ = nullptr; }

 private:
  std::shared_ptr<Capture> captured_;
};

// As C10_REGISTER_GUARD_IMPL, REGISTER_CUDA_HOOKS and TORCH_LIBRARY_IMPL, for a device that is known now.
void register_device() {
  static Guard guard;
  static c10::impl::DeviceGuardImplRegistrar registrar(kType, &guard);
  if (kIsCuda) {
    at::CUDAHooksRegistry()->Register("CUDAHooks",
                                      [](at::CUDAHooksArgs) -> std::unique_ptr<at::CUDAHooksInterface> {
                                        return std::make_unique<CudaHooks>();
                                      });
  } else {
    static PrivateUse1Hooks hooks;
    c10::register_privateuse1_backend(kName);
    at::RegisterPrivateUse1HooksInterface(&hooks);
  }
  c10::SetAllocator(kType, &allocator);
}

void register_operations() {
  static std::vector<torch::Library> libraries;
  const auto library = [](const char* name_space) -> torch::Library& {
    libraries.emplace_back(torch::Library::IMPL, name_space, kKey, __FILE__, __LINE__);
    return libraries.back();
  };
  library("_").fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  register_kernels(library("aten"));
  register_collectives(library("c10d"));
}

// What torch has for CUDA: which operations autocast runs in the lower dtype, which in float32.
void register_autocast() {
  static torch::Library any(torch::Library::IMPL, "_", DispatchKey::AutocastPrivateUse1, __FILE__, __LINE__);
  static torch::Library m(torch::Library::IMPL, "aten", DispatchKey::AutocastPrivateUse1, __FILE__, __LINE__);
  any.fallback(torch::CppFunction::makeFallthrough());
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define HIGHER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(HIGHER)
}

std::vector<int> contexts() {
  std::vector<int> found;
  for (int device = 0; device < kNumDevices; ++device)
    if (has_context[device]) found.push_back(device);
  return found;
}

int maybe_exchange_device(int device) {
  return device < 0 ? -1 : std::exchange(current_device, static_cast<DeviceIndex>(device));
}

void set_stream(int device, int64_t stream) {
  exchange_device(device);
  current_stream(device) = stream;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  register_device();
  register_operations();
  if (!kIsCuda) register_autocast();

  m.attr("name") = kName;
  m.attr("device_count") = kNumDevices;
  m.def("current_device", [] { return int(current_device); });
  m.def("exchange_device", [](int device) { return device < 0 ? -1 : int(exchange_device(device)); });
  m.def("maybe_exchange_device", &maybe_exchange_device);
  m.def("contexts", &contexts);
  m.def("default_generator", [](int device) { return generators().at(device); });
  m.def("forked", [](bool is) { torch::utils::set_requires_device_init(kType, is); });

  m.def("current_stream", [](int device) { return current_stream(device); });
  m.def("set_stream", &set_stream);
  m.def("synchronize", [](int device) { wait_for_device(device); }, py::call_guard<py::gil_scoped_release>());

  m.def("allocated", [](int device) { return allocated[device].load(); });
  m.def("peak", [](int device) { return peak[device].load(); });
  m.def("reset_peak", [](int device) { peak[device] = allocated[device].load(); });
  m.def("cpu_alias", &on_cpu);
  m.def("resize_storage",  // of a tensor over the storage
        [](const Tensor& holder, size_t nbytes) { resize_storage(holder.storage(), nbytes); });

  m.def("on_wait", [](py::object function) { on_wait.set(std::move(function)); });
  m.def("on_fault", [](py::object function) { on_fault.set(std::move(function)); });
  m.def("on_context", [](py::object function) { on_context.set(std::move(function)); });
  m.def("num_waits", [] { return num_waits.load(); });
  m.def("num_faults", [] { return num_faults.load(); });

  py::class_<Pool, std::shared_ptr<Pool>>(m, "Pool").def(py::init<>());
  py::class_<Graph>(m, "Graph")
      .def(py::init<>())
      .def("begin", &Graph::begin)
      .def("end", &Graph::end)
      .def("replay", &Graph::replay, py::call_guard<py::gil_scoped_release>())
      .def("reset", &Graph::reset);
  m.def("is_capturing", [] { return is_capturing_here(); });
}
