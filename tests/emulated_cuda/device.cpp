// CUDA devices that are emulated on the CPU: a torch without CUDA runs code for "cuda:0" to "cuda:7", with real values.
//
// A CUDA tensor here is a CPU tensor's memory under another device. Every operation on CUDA tensors comes to `run`,
// the fallback of the CUDA dispatch key, which calls the CPU's kernel on CPU aliases of the arguments. It raises an
// error, as CUDA does, when the arguments are on different devices. The host executes each operation at once, so
// between devices streams and events have no effect on values. Between a device and the host they have: what a copy
// brings to pinned memory is there once the host has waited for it, as `Order` says. Waits are told to a listener.
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
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

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

// Tells the messages that the host waits: for all that a device does, and so until its receives are there, or for the
// current stream of it.
std::atomic<void (*)(int device, bool is_whole)> messages{nullptr};

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

// ---------------------------------------------------------------------- what the host knows to have ended

using Place = std::pair<DeviceIndex, StreamId>;
using Clock = std::map<Place, uint64_t>;  // the last work of each stream that has ended, or must end before

// A copy between a device and pinned memory, which goes on while the host does.
struct Copy {
  Place stream;
  uint64_t number;
  at::Tensor host, value;
  bool is_to_host;
  // To the host: the memory had no meaning before. To the device: the memory must not have changed.
  void end() const {
    if (is_to_host) {
      host.copy_(value);
      return;
    }
    const auto now = host.contiguous();
    TORCH_CHECK(std::memcmp(now.const_data_ptr(), value.const_data_ptr(), value.nbytes()) == 0,
                "emulated CUDA: pinned memory was written before its copy to cuda:", static_cast<int>(stream.first),
                " had ended");
  }
};

class Order {
 public:
  // Puts work into a stream.
  uint64_t work(Place stream) {
    std::lock_guard lock(mutex_);
    return clocks_[stream][stream] = ++last_;
  }
  Clock of(Place stream) {
    std::lock_guard lock(mutex_);
    return clocks_[stream];
  }
  Clock of_device(DeviceIndex device) {
    std::lock_guard lock(mutex_);
    Clock all;
    for (const auto& [stream, clock] : clocks_) {
      if (stream.first == device) merge(all, clock);
    }
    return all;
  }
  // A stream waits for what was put into others.
  void wait(Place stream, const Clock& others) {
    std::lock_guard lock(mutex_);
    merge(clocks_[stream], others);
  }
  void add(Place stream, const at::Tensor& host, const at::Tensor& value, bool is_to_host) {
    const auto number = work(stream);
    std::lock_guard lock(mutex_);
    copies_.push_back({stream, number, host, value, is_to_host});
  }
  // The host waits.
  void end(const Clock& ended) {
    end_those([&] { merge(host_, ended); }, [&](const Copy& one) { return knows(one.stream, one.number); });
  }
  // A stream is about to copy pinned memory: earlier copies of it that the stream has waited for end before.
  void settle(Place stream, const at::Tensor& host) {
    const auto* low = static_cast<const char*>(host.const_data_ptr());
    const auto* high = low + host.nbytes();
    end_those([] {}, [&](const Copy& one) {
      const auto* other = static_cast<const char*>(one.host.const_data_ptr());
      const auto& clock = clocks_[stream];
      const auto found = clock.find(one.stream);
      return other < high && low < other + one.host.nbytes() && found != clock.end() && one.number <= found->second;
    });
  }

 private:
  template <typename Before, typename IsDone>
  void end_those(Before before, IsDone is_done) {
    std::vector<Copy> done;
    // Another thread that waits for the same copies returns when they have ended.
    std::lock_guard in_turn(ending_);
    {
      std::lock_guard lock(mutex_);
      before();
      std::vector<Copy> rest;
      for (auto& one : copies_) (is_done(one) ? done : rest).push_back(std::move(one));
      copies_ = std::move(rest);
    }
    at::AutoDispatchBelowADInplaceOrView below;
    impl::ExcludeDispatchKeyGuard without_modes(python_ks);
    for (const auto& one : done) one.end();
  }

 public:
  bool has_ended(Place stream, uint64_t number) {
    std::lock_guard lock(mutex_);
    return knows(stream, number);
  }

 private:
  static void merge(Clock& into, const Clock& other) {
    for (const auto& [stream, number] : other) into[stream] = std::max(into[stream], number);
  }
  bool knows(Place stream, uint64_t number) {
    const auto found = host_.find(stream);
    return found != host_.end() && number <= found->second;
  }

  std::mutex mutex_, ending_;
  uint64_t last_ = 0;
  std::map<Place, Clock> clocks_;
  Clock host_;
  std::vector<Copy> copies_;
};
Order& order() {
  static auto* one = new Order;  // threads use it until the process ends
  return *one;
}

Place current(DeviceIndex device) { return {device, current_stream[device]}; }

void host_waits_for(DeviceIndex device, const char* name) {
  tell(kSync, name);
  order().end(order().of(current(device)));
  if (auto note = messages.load()) note(device, false);
}

struct Event {
  std::chrono::steady_clock::time_point time;
  Place stream;
  uint64_t number = 0;
  Clock clock;
  bool was_asked = false;
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
    order().end(order().of_device(device(index).index()));
    if (auto drain = messages.load()) drain(device(index).index(), true);
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
  bool queryStream(const Stream& stream) const override {
    order().end(order().of(place(stream)));
    return true;
  }
  void synchronizeStream(const Stream& stream) const override {
    tell(kSync, "stream");
    order().end(order().of(place(stream)));
    if (auto note = messages.load()) note(stream.device_index(), false);
  }
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}

  static Place place(const Stream& stream) { return {stream.device_index(), stream.id()}; }
  void record(void** event, const Stream& stream, DeviceIndex, EventFlag) const override {
    if (!*event) *event = new Event;
    auto* recorded = static_cast<Event*>(*event);
    const auto number = order().work(place(stream));
    *recorded = {std::chrono::steady_clock::now(), place(stream), number, order().of(place(stream))};
  }
  void block(void* event, const Stream& stream) const override {
    if (event) order().wait(place(stream), static_cast<Event*>(event)->clock);
  }
  // The stream reaches an event when the host has waited for it, or has asked twice.
  bool queryEvent(void* event) const override {
    auto* asked = static_cast<Event*>(event);
    if (!asked || order().has_ended(asked->stream, asked->number)) return true;
    if (!std::exchange(asked->was_asked, true)) return false;
    order().end(asked->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    tell(kSync, "event");
    if (event) order().end(static_cast<Event*>(event)->clock);
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* begin, void* end, DeviceIndex) const override {
    const auto *first = static_cast<Event*>(begin), *last = static_cast<Event*>(end);
    TORCH_CHECK(first->stream.first == last->stream.first, "CUDA error: invalid resource handle: events of two devices");
    const auto between = last->time - first->time;
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
  // Memory that something else has allocated, and keeps.
  static void add(const void* data, size_t size) {
    std::lock_guard lock(mutex);
    blocks[static_cast<const char*>(data)] = size;
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
    if (is_mask && !is_counted) host_waits_for(index.is_cuda() ? index.get_device() : current_device, "indexing by a mask");
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
  const auto of_call = call.device ? call.device->index() : current_device;
  if (kSynchronising.count(schema.name()) > 0) host_waits_for(of_call, schema.name().c_str());
  if (schema.name() == "aten::repeat_interleave" && schema.overload_name() == "Tensor" && stack->back().isNone()) {
    host_waits_for(of_call, schema.name().c_str());
  }
  {
    std::optional<RandomNumbers> random;
    if (op.hasTag(at::Tag::nondeterministic_seeded) && !is_given_generator) {
      random.emplace(of_call);
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

// Another value for every element: what a copy that has not ended leaves to be read.
at::Tensor without_meaning(const at::Tensor& value) {
  if (value.scalar_type() == at::kBool) return value.logical_not();
  auto spoiled = at::empty_like(value);
  if (spoiled.nbytes()) std::memset(spoiled.mutable_data_ptr(), 0xff, spoiled.nbytes());  // NaN, or -1
  return spoiled;
}

// Whether the host's side of a copy takes the tensor's own memory. Otherwise its values go through memory that is not
// pinned, as in torch's copy_kernel_cuda.
bool is_direct(const at::Tensor& self, const at::Tensor& source) {
  const bool is_plain = self.scalar_type() == source.scalar_type() && self.sizes() == source.sizes() &&
                        self.strides() == source.strides() && self.is_non_overlapping_and_dense();
  return is_plain || (self.is_cuda() ? source : self).is_contiguous();
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source)) return self;
  at::AutoDispatchBelowADInplaceOrView below;
  if (self.is_cuda() && source.is_cuda()) {
    // Of two devices each waits for the other around it.
    const auto from = current(source.get_device()), to = current(self.get_device());
    order().wait(from, order().of(to));
    order().work(from);
    order().wait(to, order().of(from));
    on_cpu(self).copy_(on_cpu(source));
    return self;
  }
  const auto& on_host = self.is_cuda() ? source : self;
  const auto device = (self.is_cuda() ? self : source).get_device();
  const auto* name = self.is_cuda() ? "copy to the device" : "copy to the host";
  const bool is_pinned = PinnedAllocator::has(on_host.storage().data()) && is_direct(self, source);
  if (!is_pinned) tell(kPageable, name);
  if (!non_blocking || !(is_pinned || self.is_cuda())) host_waits_for(device, name);
  auto target = self.is_cuda() ? on_cpu(self) : self;
  const auto value = source.is_cuda() ? on_cpu(source) : source;
  if (!non_blocking || !is_pinned) {
    target.copy_(value);
    return self;
  }
  impl::ExcludeDispatchKeyGuard without_modes(python_ks);
  order().settle(current(device), on_host);
  const auto kept = value.to(target.scalar_type()).contiguous().clone();
  target.copy_(self.is_cuda() ? kept : without_meaning(kept));
  // To the device, the host's memory is compared with what it was.
  order().add(current(device), on_host, self.is_cuda() ? source.contiguous().clone() : kept, !self.is_cuda());
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
void emulated_cuda_wait_for_messages_by(void (*drain)(int, bool)) { messages = drain; }
void emulated_cuda_register_host(const void* data, size_t size) { PinnedAllocator::add(data, size); }
void emulated_cuda_listen(Listener listen) { listener = listen; }
int64_t emulated_cuda_allocated(int device) { return memory[device].allocated; }
int64_t emulated_cuda_peak(int device) { return memory[device].peak; }
void emulated_cuda_reset_peak(int device) { memory[device].peak = memory[device].allocated.load(); }
}
