// Threads and scratch memory of a call.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>

#include "ort_abi.h"

namespace sparse {

// Number of workers among which work is divided. A session may use fewer threads.
int workers();
void set_workers(int count);  // for tests; 0 restores the default

// The thread pool of the session. Without a context all tasks run in the calling thread.
class Pool {
 public:
  Pool() = default;
  Pool(const ort::Api* api, const ort::KernelContext* context) : api_(api), context_(context) {}

  // Runs task(i) for each i in 0..n-1, in any order and in parallel, and returns when all tasks are done.
  template <class Task>
  void run(int64_t n, const Task& task) const {
    if (n == 1 || !context_) {
      for (int64_t i = 0; i < n; i++) task(i);
      return;
    }
    Job<Task> job{task, {false}};
    ort::Status* status = ort::ParallelFor::call(api_, context_, Job<Task>::call, size_t(n), 0, &job);
    if (status) ort::ReleaseStatus::call(api_, status);
    if (status || job.failed) throw std::bad_alloc();  // tasks throw nothing else
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
