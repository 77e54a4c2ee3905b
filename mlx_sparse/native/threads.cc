// Our own threads, for calls from MLX.

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "runtime.h"

namespace sparse {

namespace {

struct Work {
  void (*call)(void* self, size_t i);
  void* self;
  size_t n;
  std::atomic<size_t> next{0};
  int helpers = 0;  // threads that may still run tasks of this work; guarded by the mutex

  void run() {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) call(self, i);
  }
};

int thread_count() {
  const char* given = std::getenv("OMP_NUM_THREADS");
  const int wanted = given ? std::atoi(given) : 0;
  return wanted > 0 ? std::min(wanted, workers()) : workers();
}

// The calling thread works on its own work. The other threads help with the oldest work that has tasks left.
class Crew {
 public:
  const pid_t process = getpid();

  void start() {
    try {
      for (int i = 1; i < thread_count(); i++) std::thread([this] { help(); }).detach();
    } catch (const std::system_error&) {  // the limit of the system; the calling thread does the rest
    }
  }

  void run(Work& work) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      open_.push_back(&work);
    }
    waiting_.notify_all();
    work.run();
    std::unique_lock<std::mutex> lock(mutex_);
    open_.erase(std::find(open_.begin(), open_.end(), &work));
    done_.wait(lock, [&] { return work.helpers == 0; });
  }

 private:
  Work* open_work() const {
    for (Work* work : open_) {
      if (work->next.load(std::memory_order_relaxed) < work->n) return work;
    }
    return nullptr;
  }

  void help() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      Work* work = nullptr;
      waiting_.wait(lock, [&] { return (work = open_work()) != nullptr; });
      work->helpers++;
      lock.unlock();
      work->run();
      lock.lock();
      if (--work->helpers == 0) done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable waiting_, done_;
  std::vector<Work*> open_;
};

}  // namespace

const Threads& Threads::shared() {
  static const Threads threads;
  return threads;
}

void Threads::parallel(size_t n, Call call, void* job) const {
  // A fork has none of the threads, so a child process needs a new crew. A crew is never deleted, because its threads
  // run until the process ends.
  static std::atomic<Crew*> crew{nullptr};  // no mutex, because a fork may copy a locked one
  Crew* now = crew.load();
  if (!now || now->process != getpid()) {
    Crew* mine = new Crew;
    if (crew.compare_exchange_strong(now, mine)) {
      (now = mine)->start();
    } else {
      delete mine;
    }
  }
  Work work{call, job, n};
  now->run(work);
}

}  // namespace sparse
