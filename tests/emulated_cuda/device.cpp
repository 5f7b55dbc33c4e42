// CUDA devices that are emulated on the CPU: a torch without CUDA runs code for "cuda:0" to "cuda:7", with real values.
//
// A CUDA tensor here is a CPU tensor's memory under another device. Every operation on CUDA tensors comes to `run`,
// the fallback of the CUDA dispatch key, which calls the CPU's kernel on CPU aliases of the arguments. It raises an
// error, as CUDA does, when the arguments are on different devices. The host executes each operation at once, so
// streams and events have no effect on values; they and blocking synchronisations are told to a listener.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {
using namespace c10;
using at::Generator;

constexpr DeviceIndex kNumDevices = 8;

// ---------------------------------------------------------------------- what the tests observe

using Listener = void (*)(const char* kind, const char* name);
std::atomic<Listener> listener{nullptr};

void tell(const char* kind, const char* name) {
  if (auto listen = listener.load()) listen(kind, name);
}

// Waits until the messages that a device is receiving are there.
std::atomic<void (*)(int device)> messages{nullptr};

constexpr auto kSync = "synchronisation", kPageable = "pageable copy";

struct Memory {
  std::atomic<int64_t> allocated{0}, peak{0};
  void add(int64_t bytes) {
    const auto now = allocated += bytes;
    auto before = peak.load();
    while (now > before && !peak.compare_exchange_weak(before, now)) {
    }
  }
};
std::array<Memory, kNumDevices> memory;

// ---------------------------------------------------------------------- devices, streams, events

thread_local DeviceIndex current_device = 0;
thread_local std::array<StreamId, kNumDevices> current_stream{};
std::atomic<StreamId> next_stream{1};

struct Event {
  std::chrono::steady_clock::time_point time;
};

struct Guard final : impl::DeviceGuardImplInterface {
  static Device device(DeviceIndex index) { return {kCUDA, index < 0 ? current_device : index}; }
  static Device valid(Device d) {
    TORCH_CHECK(d.index() < kNumDevices, "CUDA error: invalid device ordinal ", static_cast<int>(d.index()));
    return device(d.index());
  }
  DeviceType type() const override { return kCUDA; }
  Device getDevice() const override { return device(-1); }
  void uncheckedSetDevice(Device d) const noexcept override { current_device = device(d.index()).index(); }
  void setDevice(Device d) const override { uncheckedSetDevice(valid(d)); }
  Device exchangeDevice(Device d) const override {
    const auto before = getDevice();
    setDevice(d);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  void synchronizeDevice(DeviceIndex index) const override {
    tell(kSync, "device");
    if (auto drain = messages.load()) drain(device(index).index());
  }

  Stream getStream(Device d) const override {
    const auto on = device(d.index());
    return Stream(Stream::UNSAFE, on, current_stream[on.index()]);
  }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::UNSAFE, device(d.index()), 0); }
  Stream getNewStream(Device d, int) const override { return Stream(Stream::UNSAFE, device(d.index()), next_stream++); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream stream) const override {
    const auto before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { tell(kSync, "stream"); }
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}

  void record(void** event, const Stream&, DeviceIndex, EventFlag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->time = std::chrono::steady_clock::now();
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { tell(kSync, "event"); }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* begin, void* end, DeviceIndex) const override {
    const auto between = static_cast<Event*>(end)->time - static_cast<Event*>(begin)->time;
    return std::chrono::duration<double, std::milli>(between).count();
  }
};
Guard guard;
impl::DeviceGuardImplRegistrar registrar(kCUDA, &guard);

// ---------------------------------------------------------------------- random numbers

// Each device has a generator of its own. With the CPU's seed it gives the CPU's numbers, so that results compare.
std::array<Generator, kNumDevices> generators;

// While it lives, the CPU's default generator is at the state of a device's.
class RandomNumbers {
 public:
  explicit RandomNumbers(DeviceIndex index)
      : of_device_(generators[index]), of_cpu_(at::detail::getDefaultCPUGenerator()), saved_(of_cpu_.get_state()) {
    of_cpu_.set_state(of_device_.get_state());
  }
  ~RandomNumbers() {
    of_device_.set_state(of_cpu_.get_state());
    of_cpu_.set_state(saved_);
  }

 private:
  Generator of_device_, of_cpu_;
  at::Tensor saved_;
};

// ---------------------------------------------------------------------- pinned memory

struct PinnedAllocator final : Allocator {
  static inline std::mutex mutex;
  static inline std::map<const char*, size_t> blocks;  // by the address of the beginning

  DataPtr allocate(size_t size) override {
    auto* data = static_cast<char*>(alloc_cpu(std::max<size_t>(size, 1)));
    std::lock_guard lock(mutex);
    blocks[data] = std::max<size_t>(size, 1);
    return {data, data, &release, kCPU};
  }
  static void release(void* data) {
    {
      std::lock_guard lock(mutex);
      blocks.erase(static_cast<char*>(data));
    }
    free_cpu(data);
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t size) const override { default_copy_data(target, source, size); }
  static bool has(const void* data) {
    std::lock_guard lock(mutex);
    auto after = blocks.upper_bound(static_cast<const char*>(data));
    if (after == blocks.begin()) return false;
    --after;
    return static_cast<const char*>(data) < after->first + after->second;
  }
};
PinnedAllocator pinned_allocator;

// ---------------------------------------------------------------------- tensors: one memory under two devices

struct Held {
  Storage storage;  // whose memory this is
  DeviceIndex device;
};

at::Tensor view_of(Storage storage, const at::Tensor& like, DispatchKey key) {
  auto made = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// A CPU tensor with the memory of a CUDA tensor.
at::Tensor on_cpu(const at::Tensor& cuda) {
  auto release = [](void* held) { delete static_cast<Storage*>(held); };
  DataPtr data(cuda.storage().mutable_data(), new Storage(cuda.storage()), release, kCPU);
  Storage storage(Storage::use_byte_size_t(), cuda.storage().nbytes(), std::move(data), GetCPUAllocator(), true);
  return view_of(std::move(storage), cuda, DispatchKey::CPU);
}

// A CUDA tensor with the memory of a fresh CPU tensor; the memory counts as allocated on the device.
at::Tensor on_cuda(const at::Tensor& cpu, Device device) {
  memory[device.index()].add(static_cast<int64_t>(cpu.storage().nbytes()));
  auto release = [](void* pointer) {
    auto* held = static_cast<Held*>(pointer);
    memory[held->device].allocated -= static_cast<int64_t>(held->storage.nbytes());
    delete held;
  };
  DataPtr data(cpu.storage().mutable_data(), new Held{cpu.storage(), device.index()}, release, device);
  Storage storage(Storage::use_byte_size_t(), cpu.storage().nbytes(), std::move(data), nullptr, false);
  return view_of(std::move(storage), cpu, DispatchKey::CUDA);
}

// ---------------------------------------------------------------------- operations

bool is_one_of(const std::string& name, const std::set<std::string>& names) { return names.count(name) > 0; }
bool begins(const std::string& name, const char* prefix) { return name.rfind(prefix, 0) == 0; }

// The arguments and results of one operation, on their way to the CPU's kernel and back.
class Call {
 public:
  explicit Call(const OperatorHandle& op)
      : op_(op), name_(op.schema().name()), takes_cpu_numbers_(
            op.hasTag(at::Tag::pointwise) || begins(name_, "aten::_foreach_") || begins(name_, "aten::_fused_") ||
            is_one_of(name_, {"aten::fill_", "aten::fill", "aten::index_fill_", "aten::index_fill", "aten::masked_fill_",
                              "aten::masked_fill", "aten::_index_put_impl_", "aten::index_put_", "aten::index_put"})) {}

  std::optional<Device> device;

  at::Tensor to_cpu(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      // As CUDA does, pointwise operations take a number that is a CPU tensor without dimensions, and all a Python number.
      const bool is_python_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
      if (!is_python_number && !(takes_cpu_numbers_ && tensor.dim() == 0)) refuse(tensor.device());
      return tensor;
    }
    if (!device) device = tensor.device();
    if (*device != tensor.device()) refuse(tensor.device());
    return alias(tensor);
  }

  // Indices may be on the CPU; CUDA then copies them to the device.
  at::Tensor index_to_cpu(const at::Tensor& index) {
    if (!index.defined()) return index;
    // Of `index` torch's own code has done this before it comes here, and it was counted.
    const bool is_counted = name_ == "aten::index";
    const bool is_mask = index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
    if (is_mask && !is_counted) tell(kSync, "indexing by a mask");
    if (index.is_cuda()) return to_cpu(index);
    if (!is_counted) {
      tell(kSync, "copy of an index to the device");
      tell(kPageable, "copy of an index to the device");
    }
    return index;
  }

  at::Tensor to_cuda(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    for (const auto& [cuda, cpu] : aliases_) {
      if (cpu.is_same(tensor)) return cuda;
    }
    for (const auto& [cuda, cpu] : aliases_) {
      if (cpu.storage().is_alias_of(tensor.storage())) return view_of(cuda.storage(), tensor, DispatchKey::CUDA);
    }
    return on_cuda(tensor, device.value_or(Guard::device(-1)));
  }

  // Carry over what the kernel did to the arguments themselves, such as a resize.
  void settle() {
    for (const auto& [cuda, cpu] : aliases_) {
      auto* impl = cuda.unsafeGetTensorImpl();
      if (cpu.storage().data() != cuda.storage().data()) {
        impl->set_storage_keep_dtype(on_cuda(cpu, cuda.device()).storage());
      }
      if (cpu.sizes() != cuda.sizes() || cpu.strides() != cuda.strides()) {
        impl->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
      }
    }
  }

 private:
  at::Tensor alias(const at::Tensor& cuda) {
    for (const auto& [known, cpu] : aliases_) {
      if (known.is_same(cuda)) return cpu;
    }
    aliases_.emplace_back(cuda, on_cpu(cuda));
    return aliases_.back().second;
  }
  void refuse(Device found) {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ",
                device ? *device : Device(kCUDA, current_device), " and ", found, "! (when calling ", toString(op_.operator_name()),
                " on an emulated CUDA device)");
  }

  const OperatorHandle& op_;
  std::string name_;
  bool takes_cpu_numbers_;
  std::vector<std::pair<at::Tensor, at::Tensor>> aliases_;
};

// Operations whose CUDA kernels wait for the device, because the host needs a value or a size.
const std::set<std::string> kSynchronising{
    "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::multinomial"};

void run(const OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Call call(op);
  const auto num_arguments = schema.arguments().size();
  auto first = stack->size() - num_arguments;
  bool is_given_generator = false;
  // A tensor's device comes first: some operations also have an argument `device`.
  for (size_t i = 0; i < num_arguments && !call.device; ++i) {
    const auto& value = (*stack)[first + i];
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda()) call.device = value.toTensor().device();
  }
  for (size_t i = 0; i < num_arguments; ++i) {
    auto& value = (*stack)[first + i];
    if (value.isTensor()) {
      value = call.to_cpu(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors;
      for (const at::Tensor& one : value.toTensorVector()) tensors.push_back(call.to_cpu(one));
      value = tensors;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (std::optional<at::Tensor> one : value.toOptionalTensorList()) {
        tensors.push_back(one ? std::optional(call.index_to_cpu(*one)) : std::nullopt);
      }
      value = tensors;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      if (!call.device) call.device = Guard::valid(value.toDevice());
      value = Device(kCPU);
    } else if (value.isGenerator()) {
      is_given_generator = true;
    } else if (schema.arguments()[i].name() == "pin_memory") {
      value = IValue();
    }
  }
  if (kSynchronising.count(schema.name()) > 0) tell(kSync, schema.name().c_str());
  if (schema.name() == "aten::repeat_interleave" && schema.overload_name() == "Tensor" && stack->back().isNone()) {
    tell(kSync, schema.name().c_str());
  }
  {
    std::optional<RandomNumbers> random;
    if (op.hasTag(at::Tag::nondeterministic_seeded) && !is_given_generator) {
      random.emplace(call.device ? call.device->index() : current_device);
    }
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  }
  call.settle();
  const auto num_returns = schema.returns().size();
  first = stack->size() - num_returns;
  for (size_t i = 0; i < num_returns; ++i) {
    auto& value = (*stack)[first + i];
    if (value.isTensor()) {
      value = call.to_cuda(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors;
      for (const at::Tensor& one : value.toTensorVector()) tensors.push_back(call.to_cuda(one));
      value = tensors;
    }
  }
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source)) return self;
  if (self.is_cuda() != source.is_cuda()) {
    const auto& on_host = self.is_cuda() ? source : self;
    const auto* name = self.is_cuda() ? "copy to the device" : "copy to the host";
    const bool is_pinned = PinnedAllocator::has(on_host.storage().data());
    if (!non_blocking || !(is_pinned || self.is_cuda())) tell(kSync, name);
    if (!is_pinned) tell(kPageable, name);
  }
  auto target = self.is_cuda() ? on_cpu(self) : self;
  at::AutoDispatchBelowADInplaceOrView below;
  target.copy_(source.is_cuda() ? on_cpu(source) : source);
  return self;
}

void copy_each(at::TensorList targets, at::TensorList sources, bool non_blocking) {
  for (size_t i = 0; i < targets.size(); ++i) {
    at::Tensor target = targets[i];
    copy(target, sources[i], non_blocking);
  }
}

// Attention decomposes into plain operations: there is no CPU kernel for CUDA's fused ones.
int64_t attention_backend(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                          double, bool, std::optional<double>, bool) {
  return 0;
}

at::Tensor& set_storage(at::Tensor& self, Storage storage, SymInt offset, SymIntArrayRef size, SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

void record_stream(at::Tensor&, at::Stream) {}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("copy_", &copy);
  library.impl("_foreach_copy_", &copy_each);
  library.impl("_fused_sdp_choice", &attention_backend);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("record_stream", &record_stream);
}

}  // namespace

// ---------------------------------------------------------------------- what torch asks of CUDA

namespace at::cuda::detail {
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kNumDevices; }
  DeviceIndex getCurrentDevice() const override { return guard.getDevice().index(); }
  const Generator& getDefaultGenerator(DeviceIndex index) const override { return generators[Guard::device(index).index()]; }
  Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<CPUGeneratorImpl>(default_rng_seed_val); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override { return PinnedAllocator::has(data); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at::cuda::detail

extern "C" {
void emulated_cuda_use_generator(int device, GeneratorImpl* generator) {
  generators[device] = Generator(intrusive_ptr<GeneratorImpl>::reclaim_copy(generator));
}
void emulated_cuda_wait_for_messages_by(void (*drain)(int)) { messages = drain; }
void emulated_cuda_listen(Listener listen) { listener = listen; }
int64_t emulated_cuda_allocated(int device) { return memory[device].allocated; }
int64_t emulated_cuda_peak(int device) { return memory[device].peak; }
void emulated_cuda_reset_peak(int device) { memory[device].peak = memory[device].allocated.load(); }
}
