// Threads and scratch memory of a call.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>

namespace sparse {

// Number of workers among which work is divided. A pool may use fewer threads.
int workers();
void set_workers(int count);  // for tests; 0 restores the default

// Threads that run the tasks of a call: those of an ONNX Runtime session, or our own.
class Pool {
 public:
  // Runs task(i) for each i in 0..n-1, in any order and in parallel, and returns when all tasks are done.
  template <class Task>
  void run(int64_t n, const Task& task) const {
    if (n <= 1) {
      if (n == 1) task(0);
      return;
    }
    Job<Task> job{task, {false}};
    parallel(size_t(n), Job<Task>::call, &job);
    if (job.failed) throw std::bad_alloc();  // tasks throw nothing else
  }

 protected:
  ~Pool() = default;
  using Call = void (*)(void* job, size_t i);
  // Runs call(job, i) for each i in 0..n-1. Throws std::bad_alloc if the threads do not run it.
  virtual void parallel(size_t n, Call call, void* job) const = 0;

 private:
  template <class Task>
  struct Job {
    const Task& task;
    std::atomic<bool> failed;
    static void call(void* self, size_t i) {
      Job* job = static_cast<Job*>(self);
      try {
        job->task(int64_t(i));
      } catch (const std::exception&) {
        job->failed = true;
      }
    }
  };
};

// Our own threads, as many as the machine has processors, or OMP_NUM_THREADS if it is smaller. Calls from several
// threads share them.
class Threads final : public Pool {
 public:
  static const Threads& shared();

 private:
  void parallel(size_t n, Call call, void* job) const override;
};

// Scratch memory of a thread, which persists between calls and only grows, so that repeated calls allocate nothing.
// There is one kind for a task, one for a nested part of a task, and two for data that the tasks of a call share. The
// kinds are separate, because the calling thread runs tasks too.
class Scratch {
 public:
  enum Kind { kTask, kPart, kCall, kLengths };
  // Takes all memory of this kind for this thread. Earlier results of take() become invalid.
  Scratch(Kind kind, size_t bytes);
  // Returns the next n numbers of type T, starting at a cache line.
  template <class T>
  T* take(int64_t n) {
    T* taken = reinterpret_cast<T*>(at_);
    at_ += size<T>(n);
    return taken;
  }
  template <class T>
  static size_t size(int64_t n) {
    return (size_t(n) * sizeof(T) + 63) / 64 * 64;
  }

 private:
  char* at_;
};

}  // namespace sparse
