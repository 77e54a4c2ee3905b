// Types and functions that a kernel's library and the runtime share.
#pragma once

namespace msl {
struct site {  // a location in the kernel's text
  const char* file;
  int line, column;
  static constexpr site here(const char* f = __builtin_FILE(), int l = __builtin_LINE(), int c = __builtin_COLUMN()) {
    return {f, l, c};
  }
};

struct context {  // attributes of one thread
  char* buffer[31];
  unsigned thread_position_in_grid[3], threads_per_grid[3], threadgroup_position_in_grid[3], threadgroups_per_grid[3],
      thread_position_in_threadgroup[3], threads_per_threadgroup[3], dispatch_threads_per_threadgroup[3], grid_size[3],
      grid_origin[3], thread_index_in_threadgroup[3], thread_index_in_simdgroup[3], simdgroup_index_in_threadgroup[3],
      simdgroups_per_threadgroup[3], dispatch_simdgroups_per_threadgroup[3], threads_per_simdgroup[3],
      thread_execution_width[3], thread_index_in_quadgroup[3], quadgroup_index_in_threadgroup[3],
      quadgroups_per_threadgroup[3], dispatch_quadgroups_per_threadgroup[3];
};

struct parameter {  // one [[buffer(n)]] parameter of a kernel
  const char* name;
  int index, read_only, optional;
  int size;   // bytes of one scalar, or of the whole structure
  char code;  // f float, h half, b bfloat, i signed, u unsigned, ? bool, s structure
};

typedef void (*combine_t)(void** operands, unsigned active);  // 32 operands, null for inactive lanes
}  // namespace msl

extern "C" {
void msl_collective(const char* what, void* operand, msl::combine_t, int flags, msl::site);
void msl_barrier(int flags, msl::site);
void msl_inactive(unsigned lane, unsigned source);  // a combine function reports that `lane` reads from the inactive lane `source`
unsigned msl_lane();
void* msl_shared(int id, unsigned long bytes, int granule, const char* name);
void msl_access(const volatile void*, unsigned long bytes, int direction, int atomic, msl::site);
}
