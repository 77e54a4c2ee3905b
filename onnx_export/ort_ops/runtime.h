// Threads and memory of one call.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>

#include "ort_abi.h"

namespace sparse {

// Machine threads that work is cut for; a session may use fewer.
int workers();
void set_workers(int count);  // for tests; 0 is the machine's own number

// The caller's thread pool. Without a context everything runs in the calling thread.
class Pool {
 public:
  Pool() = default;
  Pool(const ort::Api* api, const ort::KernelContext* context) : api_(api), context_(context) {}

  // task(i) for each i in 0..n-1, in any order and several at a time; returns when all are done.
  template <class Task>
  void run(int64_t n, const Task& task) const {
    if (n == 1 || !context_) {
      for (int64_t i = 0; i < n; i++) task(i);
      return;
    }
    Job<Task> job{task, {false}};
    ort::Status* status = ort::ParallelFor::call(api_, context_, Job<Task>::call, size_t(n), 0, &job);
    if (status) ort::ReleaseStatus::call(api_, status);
    if (status || job.failed) throw std::bad_alloc();  // the only thing that a task throws
  }

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
  const ort::Api* api_ = nullptr;
  const ort::KernelContext* context_ = nullptr;
};

// Memory that a thread keeps from call to call: it grows, so that a steady state allocates nothing. One kind for what a
// task needs, one for a part of it that takes memory of its own, two for what the tasks of a call share; the thread of
// the call runs tasks too.
class Scratch {
 public:
  enum Kind { kTask, kPart, kCall, kLengths };
  // Takes all of the thread's memory of that kind; what take() gave before is gone.
  Scratch(Kind kind, size_t bytes);
  // The next n numbers of type T, on a cache line of their own.
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
