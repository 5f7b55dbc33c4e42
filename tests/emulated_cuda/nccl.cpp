// A stand-in for NCCL between processes whose CUDA devices are emulated. gloo moves the bytes; the rules are NCCL's:
//
// * CUDA tensors only. Tags are ignored: the operations of a communicator run one after another, in order.
// * A group has one communicator for its collectives on each device, numbered in the order in which a process first
//   uses them, and one for each pair of ranks that send or receive. All their ranks must create a communicator.
// * A send does not end before its receive has begun. Nothing is read or written before both are there.
// * No tensor is held: memory that is freed before an operation has ended is an error, as it would be overwritten.
// * A result is in memory once its work was waited for, or the device was synchronised.
// * The communicator of two ranks is set up while no message is under way on its device: that takes memory, for which
//   CUDA may wait for all that the device does, also for a message whose other end is not there yet.
// * Each rank has a GPU of its own, or with NCCL_MULTI_RANK_GPU_ENABLE=1 two of a machine share one.
// * With CUDA_LAUNCH_BLOCKING=1 each operation is waited for; a device that is synchronised waits for its receives.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

namespace {
using c10d::Backend;
using c10d::Work;
using Tensors = std::vector<at::Tensor>;

constexpr int kNumDevices = 8;

bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && std::strcmp(value, "1") == 0;
}

constexpr int kData = 0, kReady = 1;  // tags of the transport

// ---------------------------------------------------------------------- operations that have not ended

using Deliver = std::function<void()>;  // puts the results of an operation into memory

// Done once: by whoever waits first.
struct Results {
  int device;
  std::once_flag once;
  Deliver deliver;
  void arrive() {
    std::call_once(once, [this] {
      if (deliver) deliver();
    });
  }
};

struct Pending {
  std::mutex mutex;
  std::condition_variable changed;
  std::array<int, kNumDevices> receives{};
  // Messages that the host does not know to have ended: the device of each, and whether its stream has waited for it.
  std::map<const c10d::Work*, std::pair<int, bool>> under_way;
  std::exception_ptr failure;
  std::vector<std::shared_ptr<Results>> results;

  void message_begins(const c10d::Work* one, int device) {
    std::lock_guard lock(mutex);
    under_way[one] = {device, false};
  }
  void message_is_waited_for(const c10d::Work* one) {
    std::lock_guard lock(mutex);
    if (const auto found = under_way.find(one); found != under_way.end()) found->second.second = true;
  }
  void message_has_ended(const c10d::Work* one) {
    std::lock_guard lock(mutex);
    under_way.erase(one);
  }
  void host_waits(int device, bool is_whole) {
    std::lock_guard lock(mutex);
    std::erase_if(under_way, [&](const auto& one) {
      return one.second.first == device && (is_whole || one.second.second);
    });
  }
  bool has_messages(int device) {
    std::lock_guard lock(mutex);
    return std::any_of(under_way.begin(), under_way.end(), [&](const auto& one) { return one.second.first == device; });
  }
  void arrived(std::shared_ptr<Results> one) {
    std::lock_guard lock(mutex);
    results.push_back(std::move(one));
  }
  void forget(const std::shared_ptr<Results>& one) {
    std::lock_guard lock(mutex);
    results.erase(std::remove(results.begin(), results.end(), one), results.end());
  }

  void add(int device, int change) {
    std::lock_guard lock(mutex);
    receives[device] += change;
    changed.notify_all();
  }
  void fail(std::exception_ptr error) {
    std::lock_guard lock(mutex);
    if (!failure) failure = std::move(error);
    changed.notify_all();
  }
  void raise_failure() {
    std::lock_guard lock(mutex);
    if (failure) std::rethrow_exception(std::exchange(failure, nullptr));
  }
  void drain(int device) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return failure || receives[device] == 0; });
    if (failure) std::rethrow_exception(std::exchange(failure, nullptr));
    const auto all = results;
    lock.unlock();
    for (const auto& one : all) {
      if (one->device != device) continue;
      one->arrive();
      forget(one);
    }
  }
};
Pending& pending() {
  static auto* one = new Pending;  // threads use it until the process ends
  return *one;
}

bool is_blocking() {
  const auto* value = std::getenv("CUDA_LAUNCH_BLOCKING");
  return value && std::strcmp(value, "1") == 0;
}

class NcclWork final : public Work {
 public:
  NcclWork(int rank, c10d::OpType type) : Work(rank, type) {}
  bool isCompleted() override {
    const bool has_ended = Work::isCompleted();
    if (has_ended) pending().message_has_ended(this);
    return has_ended;
  }
  void end(std::exception_ptr error, std::shared_ptr<Results> results) {
    results_ = std::move(results);
    finish(std::move(error));
  }
  // Called by `wait` when the operation has ended.
  void synchronize() override {
    pending().message_is_waited_for(this);
    if (!results_) return;
    results_->arrive();
    pending().forget(results_);
  }

 private:
  std::shared_ptr<Results> results_;
};

// ---------------------------------------------------------------------- memory that is not held

class Buffer {
 public:
  Buffer(const at::Tensor& tensor, std::string operation)
      : storage_(tensor.storage().getWeakStorageImpl()),
        data_(static_cast<char*>(tensor.data_ptr())),
        size_(tensor.nbytes()),
        numel_(tensor.numel()),
        type_(tensor.scalar_type()),
        operation_(std::move(operation)) {}

  at::Tensor read() const {
    const auto held = lock();
    auto copy = like();
    if (size_) std::memcpy(copy.data_ptr(), data_, size_);
    return copy;
  }
  void write(const at::Tensor& value) const {
    const auto held = lock();
    if (size_) std::memcpy(data_, value.contiguous().data_ptr(), size_);
  }
  at::Tensor like() const { return at::empty({numel_}, at::TensorOptions(type_)); }
  void check_alive() const { lock(); }
  void spoil() const {
    if (size_) std::memset(data_, 0xff, size_);  // until it arrives: NaN, or -1
  }

 private:
  c10::intrusive_ptr<c10::StorageImpl> lock() const {
    auto held = storage_.lock();
    TORCH_CHECK(held, "emulated NCCL: the memory of a tensor was freed before its ", operation_, " had ended");
    return held;
  }
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  char* data_;
  size_t size_;
  int64_t numel_;
  at::ScalarType type_;
  std::string operation_;
};

// ---------------------------------------------------------------------- communicators

// Runs operations one after another. Its thread ends with the process.
struct Communicator {
  c10::intrusive_ptr<Backend> transport;
  int device;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> jobs;

  void start(std::shared_ptr<Communicator> self) {
    std::thread([self] {
      while (true) {
        std::function<void()> job;
        {
          std::unique_lock lock(self->mutex);
          self->changed.wait(lock, [&] { return !self->jobs.empty(); });
          job = std::move(self->jobs.front());
          self->jobs.pop_front();
        }
        job();
      }
    }).detach();
  }
  void post(std::function<void()> job) {
    std::lock_guard lock(mutex);
    jobs.push_back(std::move(job));
    changed.notify_one();
  }
};

// The two ends of a message meet before either touches memory.
Deliver send_now(Backend& transport, int peer, const Buffer& buffer) {
  Tensors token{at::empty({1})};
  transport.recv(token, peer, kReady)->wait();
  Tensors value{buffer.read()};
  transport.send(value, peer, kData)->wait();
  buffer.check_alive();
  return {};
}

Deliver receive_now(Backend& transport, int peer, const Buffer& buffer) {
  buffer.check_alive();
  Tensors token{at::zeros({1})}, value{buffer.like()};
  transport.send(token, peer, kReady)->wait();
  transport.recv(value, peer, kData)->wait();
  buffer.check_alive();
  return [buffer, received = value[0]] { buffer.write(received); };
}

struct Message {
  bool is_send;
  int peer;
  Buffer buffer;
};

class ProcessGroupNCCL final : public Backend {
 public:
  // make_transport: (name, rank, size) -> a gloo backend
  ProcessGroupNCCL(int rank, int size, pybind11::object make_transport)
      : Backend(rank, size), make_transport_(make_transport.release().ptr()) {}

  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void eagerConnectSingleDevice(at::Device) override {}
  void setTimeout(std::chrono::milliseconds) override {}
  void shutdown() override { pending().raise_failure(); }
  void abort() override {}

  // -------------------------------------------------------------------- messages

  c10::intrusive_ptr<Work> send(Tensors& tensors, int peer, int) override {
    return message({true, peer, checked(tensors, "send")}, tensors[0].device());
  }
  c10::intrusive_ptr<Work> recv(Tensors& tensors, int peer, int) override {
    return message({false, peer, checked(tensors, "receive")}, tensors[0].device());
  }
  void startCoalescing() override { is_coalescing_ = true; }
  c10::intrusive_ptr<Work> endCoalescing() override {
    is_coalescing_ = false;
    TORCH_CHECK(!coalesced_.empty(), "emulated NCCL: a batch without messages");
    auto messages = std::exchange(coalesced_, {});
    const bool receives = std::any_of(messages.begin(), messages.end(), [](const auto& one) { return !one.is_send; });
    // A batch uses the communicator of the device; its sends and its receives go on at the same time.
    return post(of_device(coalesced_device_), c10d::OpType::COALESCED, receives, [messages](Backend& transport) {
      std::exception_ptr error;
      std::vector<Deliver> received;
      std::thread sends([&] {
        try {
          for (const auto& one : messages) {
            if (one.is_send) send_now(transport, one.peer, one.buffer);
          }
        } catch (...) {
          error = std::current_exception();
        }
      });
      try {
        for (const auto& one : messages) {
          if (!one.is_send) received.push_back(receive_now(transport, one.peer, one.buffer));
        }
      } catch (...) {
        sends.join();
        throw;
      }
      sends.join();
      if (error) std::rethrow_exception(error);
      return [received] {
        for (const auto& one : received) one();
      };
    });
  }

  // -------------------------------------------------------------------- collectives

  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return in_place(tensors, c10d::OpType::BROADCAST, "broadcast", options.rootRank != getRank(), [options](Backend& transport, Tensors& copies) {
      transport.broadcast(copies, options)->wait();
    });
  }
  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return in_place(tensors, c10d::OpType::ALLREDUCE, "all_reduce", true, [options](Backend& transport, Tensors& copies) {
      transport.allreduce(copies, options)->wait();
    });
  }
  c10::intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const bool is_target = options.rootRank == getRank();
    return in_place(tensors, c10d::OpType::REDUCE, "reduce", is_target, [options](Backend& transport, Tensors& copies) {
      transport.reduce(copies, options)->wait();
    });
  }
  c10::intrusive_ptr<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions&) override {
    std::vector<Buffer> targets;
    for (auto& one : outputs.at(0)) targets.push_back(checked({one}, "all_gather"));
    auto source = checked(inputs, "all_gather");
    return post(of_device(inputs[0].device()), c10d::OpType::ALLGATHER, true, [targets, given = source.read(), source](Backend& transport) {
      Tensors input{given};
      source.check_alive();
      std::vector<Tensors> gathered(1);
      for (const auto& one : targets) gathered[0].push_back(one.like());
      transport.allgather(gathered, input)->wait();
      return [targets, gathered] {
        for (size_t i = 0; i < targets.size(); ++i) targets[i].write(gathered[0][i]);
      };
    });
  }
  c10::intrusive_ptr<Work> reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                          const c10d::ReduceScatterOptions&) override {
    const auto target = checked(outputs, "reduce_scatter");
    std::vector<Buffer> sources;
    std::vector<at::Tensor> given;
    for (auto& one : inputs.at(0)) sources.push_back(checked({one}, "reduce_scatter"));
    for (const auto& one : sources) given.push_back(one.read());
    target.spoil();
    return post(of_device(outputs[0].device()), c10d::OpType::REDUCE_SCATTER, true,
                [target, sources, given, own = getRank()](Backend& transport) {
      Tensors sum{at::cat(given)};
      transport.allreduce(sum, c10d::AllreduceOptions())->wait();
      for (const auto& one : sources) one.check_alive();
      const auto part = sum[0].chunk(given.size())[own].clone();
      return [target, part] { target.write(part); };
    });
  }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions&) override {
    // An all_reduce on the first device that the group has used, or else on that of the rank's number.
    const int device = of_devices_.empty() ? getRank() % kNumDevices : of_devices_.begin()->first;
    Tensors token{at::zeros({1}, at::Device(at::kCUDA, static_cast<at::DeviceIndex>(device)))};
    auto work = allreduce(token, {});
    work->wait();
    return work;
  }

 private:
  using Act = std::function<Deliver(Backend&)>;

  static Buffer checked(const Tensors& tensors, const char* operation) {
    TORCH_CHECK(tensors.size() == 1, "emulated NCCL: one tensor an operation");
    const auto& tensor = tensors[0];
    TORCH_CHECK_VALUE(tensor.is_cuda(), "Tensors must be CUDA and dense (emulated NCCL, ", operation, ")");
    TORCH_CHECK_VALUE(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous (emulated NCCL, ", operation, ")");
    return Buffer(tensor, operation);
  }

  c10::intrusive_ptr<Work> message(Message one, at::Device device) {
    if (!one.is_send) one.buffer.spoil();
    if (is_coalescing_) {
      coalesced_.push_back(std::move(one));
      coalesced_device_ = device;
      return c10::make_intrusive<NcclWork>(getRank(), c10d::OpType::COALESCED);
    }
    const auto type = one.is_send ? c10d::OpType::SEND : c10d::OpType::RECV;
    const int other = one.peer < getRank() ? 0 : 1;  // its number in the communicator of the two
    return post(of_pair(one.peer, device), type, !one.is_send, [one, other](Backend& transport) {
      return (one.is_send ? send_now : receive_now)(transport, other, one.buffer);
    });
  }

  c10::intrusive_ptr<Work> in_place(Tensors& tensors, c10d::OpType type, const char* name, bool is_written,
                                    std::function<void(Backend&, Tensors&)> act) {
    auto buffer = checked(tensors, name);
    const auto communicator = of_device(tensors[0].device());
    const auto given = buffer.read();
    if (is_written) buffer.spoil();
    return post(communicator, type, true, [buffer, given, is_written, act](Backend& transport) -> Deliver {
      Tensors copies{given};
      act(transport, copies);
      buffer.check_alive();
      if (!is_written) return {};
      return [buffer, result = copies[0]] { buffer.write(result); };
    });
  }

  c10::intrusive_ptr<Work> post(const std::shared_ptr<Communicator>& communicator, c10d::OpType type, bool is_awaited,
                                Act act) {
    pending().raise_failure();
    const int device = communicator->device;
    auto work = c10::make_intrusive<NcclWork>(getRank(), type);
    if (!is_blocking() && (type == c10d::OpType::SEND || type == c10d::OpType::RECV)) {
      pending().message_begins(work.get(), device);
    }
    if (is_awaited) pending().add(device, 1);
    communicator->post([communicator, act, work, device, is_awaited] {
      std::exception_ptr error;
      auto results = std::make_shared<Results>();
      results->device = device;
      try {
        results->deliver = act(*communicator->transport);
        if (results->deliver) pending().arrived(results);
      } catch (...) {
        error = std::current_exception();
        pending().fail(error);
      }
      if (is_awaited) pending().add(device, -1);
      work->end(error, results);
    });
    if (is_blocking()) work->wait();
    return work;
  }

  std::shared_ptr<Communicator> of_pair(int peer, at::Device device) {
    const std::pair<int, int> ranks = std::minmax({getRank(), peer});
    auto& found = of_pairs_[peer];
    if (!found) {
      TORCH_CHECK(!pending().has_messages(device.index()), "emulated NCCL: a communicator of ranks ", ranks.first,
                  " and ", ranks.second, " is set up while a message may be under way on ", device,
                  "; synchronize the device before");
      const auto name = "pair " + std::to_string(ranks.first) + ":" + std::to_string(ranks.second);
      found = create(name, getRank() == ranks.first ? 0 : 1, 2, device);
    }
    TORCH_CHECK(found->device == device.index(), "emulated NCCL: the communicator of ranks ", ranks.first, " and ",
                ranks.second, " is on cuda:", found->device, ", the tensor on ", device);
    return found;
  }

  std::shared_ptr<Communicator> of_device(at::Device device) {
    auto& found = of_devices_[device.index()];
    if (!found) found = create("communicator " + std::to_string(num_communicators_++), getRank(), getSize(), device);
    return found;
  }

  // Waits for its other ranks, as NCCL does.
  std::shared_ptr<Communicator> create(const std::string& name, int rank, int size, at::Device device) {
    auto made = std::make_shared<Communicator>();
    made->device = device.index();
    {
      pybind11::gil_scoped_acquire gil;
      auto transport = pybind11::reinterpret_borrow<pybind11::object>(make_transport_)(name, rank, size);
      made->transport = transport.cast<c10::intrusive_ptr<Backend>>();
    }
    Tensors mine{at::full({1}, device.index(), at::kLong)};
    std::vector<Tensors> all(1);
    for (int i = 0; i < size; ++i) all[0].push_back(at::empty({1}, at::kLong));
    made->transport->allgather(all, mine)->wait();
    const bool may_share = is_set("NCCL_MULTI_RANK_GPU_ENABLE"), has_own_channels = is_set("NCCL_MAX_CTAS");
    for (int i = 0, others = 0; i < size; ++i) {
      if (i == rank || all[0][i].item<int64_t>() != device.index()) continue;
      TORCH_CHECK(may_share && ++others == 1, "Duplicate GPU detected : rank ", rank, " and rank ", i,
                  " both on CUDA device ", static_cast<int>(device.index()), " (emulated NCCL)");
      TORCH_CHECK(has_own_channels, "ranks of one GPU without NCCL_MAX_CTAS=1 would wait for each other for ever");
    }
    made->start(made);
    return made;
  }

  PyObject* make_transport_;
  std::map<int, std::shared_ptr<Communicator>> of_pairs_, of_devices_;
  int num_communicators_ = 0;
  bool is_coalescing_ = false;
  std::vector<Message> coalesced_;
  at::Device coalesced_device_{at::kCUDA, 0};
};

}  // namespace

extern "C" void emulated_nccl_drain(int device, bool is_whole) {
  if (is_whole) pending().drain(device);
  pending().host_waits(device, is_whole);
}

PYBIND11_MODULE(emulated_nccl, module) {
  pybind11::class_<ProcessGroupNCCL, c10::intrusive_ptr<ProcessGroupNCCL>, Backend>(module, "ProcessGroupNCCL")
      .def(pybind11::init([](pybind11::object store, int rank, int size, pybind11::object options) {
        auto python = pybind11::module_::import("tests.emulated_cuda.nccl");
        return c10::make_intrusive<ProcessGroupNCCL>(rank, size, python.attr("transport_of")(store, options));
      }));
  module.def("drain", [] { return reinterpret_cast<intptr_t>(&emulated_nccl_drain); });
}
