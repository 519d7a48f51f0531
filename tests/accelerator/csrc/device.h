// What torch asks of a device: random numbers, a guard with streams and events, hooks.
#pragma once

#include "transfers.h"

namespace accelerator {

// A generator of the CPU's under the device's name.
struct Generator final : c10::GeneratorImpl {
  at::Generator cpu = at::detail::createCPUGenerator();

  explicit Generator(DeviceIndex device) : GeneratorImpl(device_of(device), c10::DispatchKeySet(kKey)) {}

  static void refuse_in_capture(const char* what) {
    TORCH_CHECK(!is_capturing_here(), "Cannot call CUDAGeneratorImpl::", what, " during CUDA graph capture");
  }
  void set_current_seed(uint64_t seed) override {
    refuse_in_capture("set_current_seed");
    cpu.set_current_seed(seed);
  }
  uint64_t current_seed() const override {
    refuse_in_capture("current_seed");
    return cpu.current_seed();
  }
  uint64_t seed() override {
    refuse_in_capture("seed");
    return cpu.seed();
  }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override {
    refuse_in_capture("set_state");
    cpu.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    refuse_in_capture("current_seed");
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->cpu = cpu.clone();
    return copy;
  }
};

inline std::vector<at::Generator>& generators() {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int device = 0; device < kNumDevices; ++device)
      made.push_back(at::make_generator<Generator>(device));
    return made;
  }();
  return all;
}

inline at::Generator& cpu_of(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->cpu;
}

inline void wait_for_device(DeviceIndex device) {
  refuse_in_capture(device, "synchronize");
  use(device);
  host_waits("device synchronize");
  host_learns(clock_of_device(device));
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kType; }
  DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  Device exchangeDevice(Device device) const override { return device_of(exchange_device(device.index())); }
  Device getDevice() const override { return device_of(current_device); }
  void setDevice(Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    current_device = device.index();  // makes no context
  }

  // Streams
  Stream getStream(Device device) const override {
    return Stream(Stream::UNSAFE, whole(device), current_stream(whole(device).index()));
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::UNSAFE, whole(device), 0); }
  Stream getNewStream(Device device, int) const override {
    use(whole(device).index());
    return Stream(Stream::UNSAFE, whole(device), next_stream++);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    const auto before = getStream(stream.device());
    current_stream(stream.device_index()) = stream.id();
    return before;
  }
  // Not marked as overriding, like isStreamCapturing below: older versions of torch don't ask for it.
  void* getStreamNativeHandle(const Stream stream) const {
    return reinterpret_cast<void*>(stream.id());
  }
  bool queryStream(const Stream& stream) const override {
    host_learns(clock_of_stream(key_of(stream)));
    return true;
  }
  bool isStreamCapturing(const Stream& stream) const {
    return capture && capture->stream == key_of(stream);
  }
  void synchronizeStream(const Stream& stream) const override {
    refuse_in_capture(stream.device_index(), "a stream's synchronize");
    use(stream.device_index());
    host_waits("stream.synchronize");
    host_learns(clock_of_stream(key_of(stream)));
  }
  void synchronizeDevice(const DeviceIndex device) const override { wait_for_device(device); }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const Stream& stream) const override {
    note_recorded(memory.get(), key_of(stream));
  }

  // Events
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new EventState;
    auto* state = static_cast<EventState*>(*event);
    std::lock_guard guard(order_lock);
    auto& clock = clocks[key_of(stream)];
    join(clock, host_clock);
    *state = {clock, std::chrono::steady_clock::now()};
  }
  void block(void* event, const Stream& stream) const override {
    if (!event) return;
    std::lock_guard guard(order_lock);
    join(clocks[key_of(stream)], static_cast<EventState*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    if (event) host_learns(static_cast<EventState*>(event)->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    accelerator::refuse_in_capture(current_device, "an event's synchronize");
    use(current_device);
    host_waits("event.synchronize");
    if (event) host_learns(static_cast<EventState*>(event)->clock);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    TORCH_CHECK(begin && end, "Both events must be recorded before calculating elapsed time.");
    const auto passed = static_cast<EventState*>(end)->time - static_cast<EventState*>(begin)->time;
    return std::chrono::duration<double, std::milli>(passed).count();
  }

 private:
  static Device whole(Device device) { return device.has_index() ? device : device_of(current_device); }
};

// What both interfaces of torch's hooks ask for.
template <class Interface>
struct Hooks : Interface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex device) const override { return has_context[device]; }
  DeviceIndex deviceCount() const override { return kNumDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { exchange_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return exchange_device(device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Device getDeviceFromPtr(void*) const override { return device_of(current_device); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return generators()[device < 0 ? current_device : device];
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device : device);
  }
};

struct CudaHooks final : Hooks<at::CUDAHooksInterface> {
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return kNumDevices; }
  DeviceIndex current_device() const override { return accelerator::current_device; }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  void deviceSynchronize(DeviceIndex device) const override { wait_for_device(device); }
  std::string showConfig() const override { return "CUDA on the CPU"; }
};

inline void resize_storage(const c10::Storage& storage, size_t nbytes) {
  if (nbytes == storage.nbytes()) return;
  auto memory = allocate_on(storage.device().index(), nbytes);
  if (const auto kept = std::min(nbytes, storage.nbytes())) std::memcpy(memory.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(nbytes);
}

struct PrivateUse1Hooks final : Hooks<at::PrivateUse1HooksInterface> {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage, nbytes);
  }
};

}  // namespace accelerator
