#include "runtime.h"

#include <cstdlib>
#include <thread>

namespace sparse {

namespace {

std::atomic<int> forced_workers{0};

struct Block {
  char* memory = nullptr;
  size_t size = 0;
  ~Block() { std::free(memory); }
};

}  // namespace

int workers() {
  static const int machine = int(std::thread::hardware_concurrency());
  const int forced = forced_workers.load(std::memory_order_relaxed);
  return forced > 0 ? forced : machine > 0 ? machine : 1;
}

void set_workers(int count) { forced_workers = count; }

Scratch::Scratch(Kind kind, size_t bytes) {
  thread_local Block blocks[4];
  Block& block = blocks[kind];
  if (block.size < bytes) {
    std::free(block.memory);
    block = Block();
    const size_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
    block.memory = static_cast<char*>(std::aligned_alloc(4096, size));
    if (!block.memory) throw std::bad_alloc();
    block.size = size;
  }
  at_ = block.memory;
}

}  // namespace sparse
