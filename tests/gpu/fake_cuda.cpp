// CUDA devices for a torch that was built without CUDA: enough of them that fake tensors can be traced, autograd included.
//
// Nothing is computed and no memory exists. There is one device, whose streams and events are always done.
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <utility>

namespace {

const c10::Device kDevice(c10::DeviceType::CUDA, 0);
thread_local c10::StreamId current_stream = 0;
int last_stream = 0;

c10::Stream as_stream(c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, kDevice, id);
}

int stream_waits = 0;  // of one stream for another
void (*on_wait)(const char*) = nullptr;

void host_waits_for(const char* what) {
  if (on_wait != nullptr) {
    on_wait(what);
  }
}

// What torch asks about devices, streams and events.
struct DeviceGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Stream getStream(c10::Device) const noexcept override { return as_stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return as_stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return as_stream(++last_stream); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    return as_stream(std::exchange(current_stream, stream.id()));
  }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = const_cast<DeviceGuard*>(this);
  }
  void block(void*, const c10::Stream&) const override { ++stream_waits; }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { host_waits_for("event"); }
  void synchronizeStream(const c10::Stream&) const override { host_waits_for("stream"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { host_waits_for("device"); }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
};

}  // namespace

namespace at {
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks)
}

// The linker prefers these to torch's own, because this library is loaded first.
namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
}

extern "C" int lmworks_stream_waits() { return stream_waits; }

extern "C" void lmworks_report_waits(void (*report)(const char*)) { on_wait = report; }

extern "C" void lmworks_install_fake_cuda() {
  static DeviceGuard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
}
