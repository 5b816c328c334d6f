// The CPU kernel: what every kernel must do, under pools that help, that come too late or that never come. Built a second time under
// the address and undefined-behaviour sanitizers.
#include "ffi/kernel.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

#include "ffi/kernel_testing.h"

namespace xla_lamb {
namespace {

// A pool of real threads.
class Threads {
 public:
  explicit Threads(int count) {
    for (int i = 0; i < count; ++i) threads_.emplace_back([this] { Loop(); });
  }
  ~Threads() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  Pool pool() {
    Pool pool;
    pool.threads = static_cast<int64_t>(threads_.size());
    pool.schedule = [this](std::function<void()> task) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        tasks_.push_back(std::move(task));
      }
      wake_.notify_one();
    };
    return pool;
  }

 private:
  void Loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::vector<std::thread> threads_;
  std::deque<std::function<void()>> tasks_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
};

Kernel On(const Pool& pool) {
  return {[pool](const Step& step) { Run(step, pool); }, [pool](const GradNorm& norm) { Run(norm, pool); }};
}

const std::vector<std::pair<int64_t, int64_t>> kShapes = {
    {0, 1}, {1, 1}, {7, 1}, {8, 1}, {9, 1}, {127, 1}, {129, 1}, {4095, 1}, {4097, 1}, {12, 4}, {0, 3},
    {32 * 1024, 1}, {32 * 1024 + 1, 1}, {80 * 1000, 2}, {5, 5}, {100 * 1000, 1}};

void TestTypesAndPools() {
  Threads two(2), eight(8);
  // A pool whose tasks all run after the call, as when other work keeps it busy.
  std::vector<std::function<void()>> kept;
  Pool late;
  late.threads = 4;
  late.schedule = [&kept](std::function<void()> task) { kept.push_back(std::move(task)); };

  for (const Types& types : AllTypes()) {
    for (Decay decay : {Decay::kInRatio, Decay::kDecoupled, Decay::kL2}) {
      Case c;
      c.types = types;
      c.decay = decay;
      c.shapes = kShapes;
      c.in_place = decay != Decay::kL2;
      c.aligned = decay == Decay::kDecoupled;
      const std::vector<char> result = TestCase(On(Pool()), c);
      for (const Pool& pool : {two.pool(), eight.pool(), late}) {
        Buffers again = Make(c);
        Check(RunCase(On(pool), c, &again, false) == result, Name(c) + ": other bits with a pool of " + std::to_string(pool.threads));
      }
    }
  }
  for (const std::function<void()>& task : kept) task();  // long after their calls have returned
}

void TestConversions() {
  // Every float16 and bfloat16 survives the way to float and back; rounding is to nearest, ties to even.
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const Float16 half = {static_cast<uint16_t>(bits)};
    Float16 half_again;
    Narrow(Widen(half), &half_again);
    if (std::isnan(Widen(half))) {
      Check(std::isnan(Widen(half_again)), "float16 NaN");
    } else {
      Check(half_again.bits == half.bits, "float16 " + std::to_string(bits));
    }
    const BFloat16 brain = {static_cast<uint16_t>(bits)};
    BFloat16 brain_again;
    Narrow(Widen(brain), &brain_again);
    if (std::isnan(Widen(brain))) {
      Check(std::isnan(Widen(brain_again)), "bfloat16 NaN");
    } else {
      Check(brain_again.bits == brain.bits, "bfloat16 " + std::to_string(bits));
    }
  }
  const std::pair<float, uint16_t> halves[] = {{65504.0f, 0x7bff}, {65519.0f, 0x7bff}, {65520.0f, 0x7c00}, {1e30f, 0x7c00},
                                               {0x1p-24f, 0x0001}, {0x1p-25f, 0x0000}, {0x1.8p-24f, 0x0002}, {1.0f + 0x1p-11f, 0x3c00},
                                               {1.0f + 0x1.8p-10f, 0x3c02}, {-0.0f, 0x8000}};
  for (const auto& pair : halves) {
    Float16 x;
    Narrow(pair.first, &x);
    Check(x.bits == pair.second, "rounding to float16");
  }
}

}  // namespace
}  // namespace xla_lamb

int main() {
  using namespace xla_lamb;
  std::printf("instruction set: %s\n", InstructionSet());
  TestConversions();
  TestTypesAndPools();
  Threads three(3);
  for (const Pool& pool : {Pool(), three.pool()}) {
    TestSkip(On(pool), kShapes);
    TestUpdatesIntoGradients(On(pool), kShapes);
    TestBatch(On(pool));
    TestGradNorm(On(pool), {0, 1, 9, 100000, 32768});
  }
  return Report();
}
