// An absent GPU for a torch that was built with CUDA: enough of a driver and of a device that fake tensors can be traced and compiled.
//
// It is loaded before torch (LD_PRELOAD) under the name of the driver's library, so that torch finds the driver here and, in place of its
// own count of devices, one device. Nothing is computed and no memory exists.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::cuda {
c10::DeviceIndex device_count() noexcept { return 1; }
}

// The driver's answer: no context was made yet.
extern "C" int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 0;
  return 0;
}

extern "C" int cuGetErrorString(int, const char** text) {
  *text = "there is no driver";
  return 0;
}

namespace {
struct DeviceGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return c10::Device(c10::DeviceType::CUDA, 0); }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Stream getStream(c10::Device device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, getDevice()); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = const_cast<DeviceGuard*>(this);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeStream(const c10::Stream&) const override {}
};
}  // namespace

extern "C" void lmworks_install_absent_gpu() {
  static DeviceGuard guard;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(&guard);
}
