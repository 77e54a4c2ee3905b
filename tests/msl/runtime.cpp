// Runs one launch of a kernel on one host thread: (a) memory, (b) races and traffic, (c) fibers and their schedule,
// (d) callbacks of clang's instrumentation for every load and store, (e) launch. It uses the C library only.
#include "abi.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

using msl::site;
typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;
enum Direction { READ, WRITE, UPDATE };  // an atomic update reads and writes

// ---- structures that kernel.py reads and writes, and defines too
struct Traffic { u64 lane, interval, threadgroup, dispatch; };
struct Buffer {
  void* data;
  const char* name;
  u64 bytes;
  int index, read_only, initialised, granule;
  Traffic traffic[2];  // reads, writes
  u64 unwritten, first_unwritten;
};
struct Fault {
  char kind[32], text[320], where[160], buffer[64];
  u64 pc, other_pc;  // offsets into the kernel's library; @ in text is replaced by the location of other_pc
  site at, other;    // the locations, if an offset is 0
};
struct Launch {
  Buffer* buffers;
  int buffer_count, line_bytes;
  u32 grid[3], threadgroup[3], seed;
  void (*entry)(const msl::context*);
  const char *library, *library_end;
  u64 threadgroup_bytes;
  Fault fault;
};

static Launch* launch;
static jmp_buf back_to_launch;

// ---- (a) memory: each buffer and threadgroup array is in the middle of 64 GiB, so that a wild index still identifies it
struct Mark {  // the last access of one direction to a granule
  u32 group, interval, fence;
  u32 place;  // offset into the kernel's library, or SITE and a number
  u16 thread;
  u8 state;
};
enum { SET = 1, HOST = 2, MANY_LANES = 4, MANY_SIMDGROUPS = 8, MANY_GROUPS = 16 };
struct Cell { Mark mark[2]; };              // read, written
struct Line { u32 interval, group; };       // time of the last access
struct Region {
  char* start;
  u64 bytes;
  const char* name;
  bool read_only;
  int granule;
  Cell* cells[2];    // one per granule for plain accesses, and for atomic accesses from the first one; null for read-only memory
  Line* lines[2];    // one per cache line and direction; null for threadgroup memory
  Buffer* buffer;    // null for threadgroup memory
  int id;            // number of the threadgroup array in the kernel's text
};
constexpr int SLOT_BITS = 36, BUFFERS = 31, SLOTS = 64;
constexpr u64 SLOT = 1ull << SLOT_BITS, PAGE = 1 << 16;
static char* slots;
static Region regions[SLOTS];
static u64 pages(u64 bytes) { return (bytes + PAGE) / PAGE * PAGE; }
static u64 granules(const Region& r) { return (r.bytes + r.granule - 1) / r.granule; }

static bool protect(char* at, u64 bytes, int protection) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  return mmap(at, bytes, protection, flags, -1, 0) == at;
}
static Region& open_region(int slot, u64 bytes, int granule, const char* name) {
  Region& r = regions[slot];
  r = Region{slots + slot * SLOT + SLOT / 2, bytes, name, false, granule, {}, {}, nullptr, 0};
  if (!protect(r.start, pages(bytes), PROT_READ | PROT_WRITE)) abort();
  return r;
}
static void close_region(Region& r) {
  if (!r.start) return;
  protect(r.start, pages(r.bytes), PROT_NONE);
  for (int i = 0; i < 2; ++i) free(r.cells[i]), free(r.lines[i]);
  r = Region{};
}
static Cell* new_cells(const Region& r) { return static_cast<Cell*>(calloc(granules(r) + 1, sizeof(Cell))); }
static void halve_granules(Region& r) {  // for a smaller access
  u64 count = granules(r);
  r.granule /= 2;
  for (Cell*& cells : r.cells) {
    if (!cells) continue;
    Cell* coarse = cells;
    cells = new_cells(r);
    for (u64 i = 0; i < granules(r) && i / 2 < count; ++i) cells[i] = coarse[i / 2];
    free(coarse);
  }
}
static bool written(const Region& r, u64 granule) {
  return (r.cells[0][granule].mark[1].state | (r.cells[1] ? r.cells[1][granule].mark[1].state : 0)) & SET;
}

// ---- (c) fibers, first part: state of the running lane for the checks
struct Lane {
  msl::context context;
  jmp_buf resume;
  bool started;
  const char* what;  // operation and location at which the lane waits
  void* operand;
  msl::combine_t combine;
  int flags;
  site at;
  u64 calls;  // hash of the return addresses up to the kernel, to distinguish two calls of a helper
};
struct Simdgroup { u32 ready, in_operation, in_barrier, fence[2]; };  // masks of lanes by state; other lanes have returned
constexpr int DEVICE = 0, THREADGROUP = 1, MAX_THREADS = 1024;
constexpr u64 STACK = 256 << 10;
static Lane lanes[MAX_THREADS];
static Simdgroup simdgroups[MAX_THREADS / 32];
static char* stacks;
static u32 order[MAX_THREADS / 32];
static u32 threads, current, group, interval, fence[2];  // fence: number of passed barriers by memory space
static u64 random_state;

static u32 random_below(u32 n) {  // always 0 for seed 0: the natural order
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull * (launch->seed != 0);
  return launch->seed ? (random_state >> 33) % n : 0;
}

struct Place { void* pc; site at; };
constexpr u32 SITE = 1u << 31;
static u64 offset_of(void* pc) { return static_cast<const char*>(pc) - launch->library - 1; }
static site sites[1024];
static u32 site_number(const site& at) {
  u32 i = 0;
  while (i < 1023 && sites[i].file && (sites[i].line != at.line || sites[i].file != at.file)) ++i;
  sites[i] = at;
  return i;
}
[[noreturn]] __attribute__((format(printf, 4, 5))) static void fail(const char* kind, const char* buffer, Place place,
                                                                    const char* format, ...) {
  Fault& f = launch->fault;
  snprintf(f.kind, sizeof f.kind, "%s", kind);
  snprintf(f.buffer, sizeof f.buffer, "%s", buffer ? buffer : "");
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(f.text, sizeof f.text, format, arguments);
  va_end(arguments);
  f.pc = place.pc ? offset_of(place.pc) : 0;
  f.at = place.at;
  auto& c = lanes[current].context;
  const u32 *t = c.thread_position_in_threadgroup, *g = c.threadgroup_position_in_grid;
  snprintf(f.where, sizeof f.where, "thread (%u,%u,%u) of threadgroup (%u,%u,%u), simdgroup %u lane %u", t[0], t[1], t[2],
           g[0], g[1], g[2], current / 32, current % 32);
  _longjmp(back_to_launch, 2);
}
static const char* thread_name(u32 thread) {
  static char text[48];
  const u32* t = lanes[thread].context.thread_position_in_threadgroup;
  snprintf(text, sizeof text, "thread (%u,%u,%u)", t[0], t[1], t[2]);
  return text;
}

static const char* const VERB[] = {"read", "write", "update"};
[[noreturn]] static void fail_access(const char* kind, const Region& r, u64 offset, u64 bytes, Direction direction, Place place,
                                     const char* more) {
  fail(kind, r.name, place, "%s of %llu bytes at offset %lld of %s %s (%llu bytes)%s", VERB[direction], bytes, (long long)offset,
       r.buffer ? "buffer" : "threadgroup array", r.name, r.bytes, more);
}

// ---- (b) races and traffic
static bool ordered(const Mark& m, int space) {  // does m come before the current access?
  if (!(m.state & SET) || m.state & HOST) return true;
  if (m.group != group || m.state & MANY_GROUPS) return false;
  if (m.interval != fence[space]) return true;
  if (m.thread / 32 != current / 32 || m.state & MANY_SIMDGROUPS) return false;
  return m.fence != simdgroups[current / 32].fence[space] || (m.thread == current && !(m.state & MANY_LANES));
}
static void set_mark(Mark& m, int space, u32 place) {
  u8 state = SET;
  u32 my_fence = simdgroups[current / 32].fence[space];
  if (m.state & SET && !(m.state & HOST)) {
    state |= m.state & MANY_GROUPS;
    if (m.group != group) {
      state |= MANY_GROUPS;
    } else if (m.interval == fence[space]) {
      state |= m.state & MANY_SIMDGROUPS;
      if (m.thread / 32 != current / 32) state |= MANY_SIMDGROUPS;
      else if (m.fence == my_fence) state |= (m.state & MANY_LANES) | (m.thread != current ? MANY_LANES : 0);
    }
  }
  m = Mark{group, fence[space], my_fence, place, u16(current), state};
}
[[noreturn]] static void race(Region& r, const Mark& m, u64 offset, u64 bytes, Direction direction, bool by_write, Place place) {
  char other[160];
  const char* did = by_write ? "written" : "read";
  if (m.group != group || m.state & MANY_GROUPS) {
    const u32* all = lanes[current].context.threadgroups_per_grid;
    snprintf(other, sizeof other, ", %s by %sthreadgroup (%u,%u,%u) at @", did, m.group == group ? "other threadgroups and " : "",
             m.group % all[0], m.group / all[0] % all[1], m.group / all[0] / all[1]);
  } else {
    snprintf(other, sizeof other, ", %s without a barrier between by %s%s at @", did,
             m.state & (MANY_LANES | MANY_SIMDGROUPS) ? "several threads, last " : "", thread_name(m.thread));
  }
  if (m.place & SITE) launch->fault.other = sites[m.place & ~SITE];
  else launch->fault.other_pc = m.place;
  fail_access("RACE", r, offset, bytes, direction == READ ? READ : WRITE, place, other);
}
static void check_cells(Region& r, u64 offset, u64 bytes, Direction direction, bool atomic, Place place) {
  int space = r.buffer ? DEVICE : THREADGROUP;
  bool write = direction != READ;
  while ((offset | bytes) & (r.granule - 1)) halve_granules(r);
  if (atomic && !r.cells[1]) r.cells[1] = new_cells(r);
  u32 mark_place = place.pc ? u32(offset_of(place.pc)) : SITE | site_number(place.at);
  for (u64 i = offset / r.granule; i < (offset + bytes) / r.granule; ++i) {
    if (direction != WRITE && !written(r, i))
      fail_access("UNINITIALISED", r, offset, bytes, READ, place, "");
    for (int kind = 0; kind < (atomic || !r.cells[1] ? 1 : 2); ++kind)  // two atomic accesses do not conflict
      for (int by_write = !write; by_write < 2; ++by_write)
        if (const Mark& m = r.cells[kind][i].mark[by_write]; !ordered(m, space)) race(r, m, offset, bytes, direction, by_write, place);
    set_mark(r.cells[atomic][i].mark[write], space, mark_place);
  }
}
static void count(Region& r, u64 offset, u64 bytes, bool write) {
  Traffic& t = r.buffer->traffic[write];
  u64 size = launch->line_bytes;
  t.lane += bytes;
  for (u64 i = offset / size; i <= (offset + bytes - 1) / size; ++i) {
    Line& line = r.lines[write][i];
    if (line.interval == interval) continue;
    line.interval = interval;
    t.interval += size;
    if (line.group == group + 1) continue;
    t.threadgroup += size;
    if (!line.group) t.dispatch += size;
    line.group = group + 1;
  }
}
static void access_elsewhere(const char* p, u64 bytes, Direction direction, Place place) {
  if (u64(p - (stacks + current * STACK)) < STACK) return;
  bool constant = p >= launch->library && p < launch->library_end;
  if (constant && direction == READ) return;
  if (constant) fail("WRITE TO CONSTANT", nullptr, place, "write of %llu bytes to a constant of the program", bytes);
  if (u64(p - stacks) < STACK * MAX_THREADS)
    fail("OUT OF BOUNDS", nullptr, place, "%s of %llu bytes in the private memory of %s", VERB[direction], bytes,
         thread_name((p - stacks) / STACK));
  fail("OUT OF BOUNDS", nullptr, place, "%s of %llu bytes at address %p, where nothing is (a buffer left out?)", VERB[direction], bytes,
       (const void*)p);
}
static void access(const volatile void* address, u64 bytes, Direction direction, bool aligned, bool atomic, Place place) {
  const char* p = (const char*)address;
  u64 slot = u64(p - slots) >> SLOT_BITS;
  if (slot >= SLOTS || !regions[slot].start) return access_elsewhere(p, bytes, direction, place);
  Region& r = regions[slot];
  u64 offset = p - r.start;
  const char* kind = offset >= r.bytes || bytes > r.bytes - offset ? "OUT OF BOUNDS" : aligned && offset % bytes ? "MISALIGNED"
      : direction != READ && r.read_only ? "WRITE TO CONSTANT" : nullptr;
  if (kind) fail_access(kind, r, offset, bytes, direction, place, "");
  if (r.buffer && direction != WRITE) count(r, offset, bytes, false);
  if (r.buffer && direction != READ) count(r, offset, bytes, true);
  if (r.cells[0]) check_cells(r, offset, bytes, direction, atomic, place);
}

// ---- (c) fibers and schedule: the lanes of a simdgroup run until all wait or have returned, then the next simdgroup runs
static bool same_place(const Lane& a, const Lane& b) {
  return a.what == b.what && a.calls == b.calls && a.at.line == b.at.line && a.at.column == b.at.column;
}
[[noreturn]] static void divergent(const char* kind, u32 first, u32 second, bool returned) {
  current = first;
  Lane &a = lanes[first], &b = lanes[second];
  if (returned) fail(kind, nullptr, {nullptr, a.at}, "%s is not reached by %s, which has returned", a.what, thread_name(second));
  fail(kind, nullptr, {nullptr, a.at}, "%s is not reached by %s, which waits in %s at %s:%d%s", a.what, thread_name(second), b.what,
       b.at.file, b.at.line, a.at.line == b.at.line ? ", called from elsewhere" : "");
}
static void finish_operation(u32 index) {
  Simdgroup& s = simdgroups[index];
  u32 base = index * 32, first = base + __builtin_ctz(s.in_operation);
  if (s.in_barrier) divergent("DIVERGENT SIMD OP", first, base + __builtin_ctz(s.in_barrier), false);
  void* operands[32] = {};
  for (u32 left = s.in_operation; left; left &= left - 1) {
    u32 i = __builtin_ctz(left);
    if (!same_place(lanes[first], lanes[base + i])) divergent("DIVERGENT SIMD OP", first, base + i, false);
    operands[i] = lanes[base + i].operand;
  }
  if (lanes[first].combine) lanes[first].combine(operands, s.in_operation);
  s.fence[DEVICE] += lanes[first].flags & 1;
  s.fence[THREADGROUP] += lanes[first].flags >> 1 & 1;
  s.ready = s.in_operation;
  s.in_operation = 0;
  ++interval;
}
static void shuffle_order() {
  u32 count = (threads + 31) / 32;
  for (u32 i = 0; i < count; ++i) order[i] = i;
  for (u32 i = count; launch->seed && i > 1; --i) {
    u32 j = random_below(i), t = order[i - 1];
    order[i - 1] = order[j];
    order[j] = t;
  }
}
static bool finish_barrier() {  // returns false if all threads have returned
  u32 first = threads, outside = threads;
  for (u32 i = 0; i < threads; ++i) {
    u32& found = simdgroups[i / 32].in_barrier >> i % 32 & 1 ? first : outside;
    if (found == threads) found = i;
  }
  if (first == threads) return false;
  if (outside != threads) divergent("DIVERGENT BARRIER", first, outside, true);
  for (u32 i = 0; i < threads; ++i)
    if (!same_place(lanes[first], lanes[i])) divergent("DIVERGENT BARRIER", first, i, false);
  fence[DEVICE] += lanes[first].flags & 1;
  fence[THREADGROUP] += lanes[first].flags >> 1 & 1;
  for (u32 i = 0; i < threads; i += 32) {
    simdgroups[i / 32].ready = simdgroups[i / 32].in_barrier;
    simdgroups[i / 32].in_barrier = 0;
  }
  shuffle_order();
  return true;
}
static bool next_lane() {
  for (u32 running = current / 32;;) {
    Simdgroup& s = simdgroups[running];
    if (s.ready) {
      u32 turn = random_below(32), turned = s.ready >> turn | (turn ? s.ready << (32 - turn) : 0);
      u32 i = (__builtin_ctz(turned) + turn) % 32;
      s.ready &= ~(1u << i);
      current = running * 32 + i;
      return true;
    }
    if (s.in_operation) {
      finish_operation(running);
      continue;
    }
    u32 count = (threads + 31) / 32, i = 0;
    while (i < count && !simdgroups[order[i]].ready) ++i;
    if (i == count && !finish_barrier()) return false;
    running = order[i == count ? 0 : i];
    ++interval;
  }
}
[[noreturn]] static void switch_lane();
static void fiber() {
  for (;;) {
    launch->entry(&lanes[current].context);
    if (!_setjmp(lanes[current].resume)) switch_lane();
  }
}
[[noreturn]] static void switch_lane() {
  if (!next_lane()) _longjmp(back_to_launch, 1);
  Lane& lane = lanes[current];
  if (lane.started) _longjmp(lane.resume, 1);
  lane.started = true;
  static ucontext_t fresh;
  getcontext(&fresh);
  u64 color = 192 * (current % 61);  // with one variable of all lanes in one cache set the speed would be half
  fresh.uc_stack.ss_sp = stacks + current * STACK + 4096;
  fresh.uc_stack.ss_size = STACK - 4096 - color;
  makecontext(&fresh, fiber, 0);
  setcontext(&fresh);
  abort();
}
static void wait(const char* what, void* operand, msl::combine_t combine, int flags, const site& at, u32 Simdgroup::*state) {
  Lane& lane = lanes[current];
  lane.what = what;
  lane.operand = operand;
  lane.combine = combine;
  lane.flags = flags;
  lane.at = at;
  lane.calls = 0;
  char* stack = stacks + current * STACK;
  auto frame = static_cast<char**>(__builtin_frame_address(0));
  for (; u64((char*)frame - stack) < STACK - 16; frame = reinterpret_cast<char**>(*frame))
    lane.calls = lane.calls * 0x9E3779B97F4A7C15ull + u64(frame[1]);
  simdgroups[current / 32].*state |= 1u << current % 32;
  if (!_setjmp(lane.resume)) switch_lane();
}

#define PC __builtin_return_address(0)
extern "C" {
// ---- (d) callbacks: operations of the kernel, clang's loads and stores, clang's checks
void msl_collective(const char* what, void* operand, msl::combine_t combine, int flags, site at) {
  wait(what, operand, combine, flags, at, &Simdgroup::in_operation);
}
void msl_barrier(int flags, site at) { wait("threadgroup_barrier", nullptr, nullptr, flags, at, &Simdgroup::in_barrier); }
unsigned msl_lane() { return current % 32; }
void msl_inactive(unsigned lane, unsigned source) {
  current = current / 32 * 32 + lane;
  fail("INACTIVE LANE", nullptr, {nullptr, lanes[current].at}, "%s reads from lane %d, which takes no part", lanes[current].what, int(source));
}
void msl_access(const volatile void* p, unsigned long bytes, int direction, int atomic, site at) {
  access(p, bytes, Direction(direction), true, atomic, {nullptr, at});
}
void* msl_shared(int id, unsigned long bytes, int granule, const char* name) {
  int slot = BUFFERS;
  while (slot < SLOTS && regions[slot].start && regions[slot].id != id) ++slot;
  if (slot == SLOTS) fail("THREADGROUP MEMORY", name, {PC, {}}, "in more than %d arrays", SLOTS - BUFFERS);
  if (regions[slot].start) return regions[slot].start;
  launch->threadgroup_bytes += bytes;
  if (launch->threadgroup_bytes > 32768)
    fail("THREADGROUP MEMORY", name, {PC, {}}, "%llu bytes with array %s, 32768 is the most",
         launch->threadgroup_bytes, name);
  Region& r = open_region(slot, bytes, granule, name);
  r.id = id;
  r.cells[0] = new_cells(r);
  memset(r.start, 0xAA, bytes);
  return r.start;
}
#define HOOKS(n) \
  void __tsan_read##n(void* p) { access(p, n, READ, true, false, {PC, {}}); } \
  void __tsan_write##n(void* p) { access(p, n, WRITE, true, false, {PC, {}}); } \
  void __tsan_unaligned_read##n(void* p) { access(p, n, READ, false, false, {PC, {}}); } \
  void __tsan_unaligned_write##n(void* p) { access(p, n, WRITE, false, false, {PC, {}}); }
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
void __tsan_init() {}
#define COPY(name) \
  void* __tsan_##name(void* to, const void* from, size_t n) { \
    if (n) access(from, n, READ, false, false, {PC, {}}), access(to, n, WRITE, false, false, {PC, {}}); \
    return name(to, from, n); \
  }
COPY(memcpy) COPY(memmove)
void* __tsan_memset(void* to, int value, size_t n) {
  if (n) access(to, n, WRITE, false, false, {PC, {}});
  return memset(to, value, n);
}

struct Ubsan { const char* file; u32 line, column; };
struct UbsanType { u16 kind, info; char name[1]; };
static Place place_of(const Ubsan& at) { return {nullptr, {at.file, int(at.line), int(at.column)}}; }
static const UbsanType& type_of(const Ubsan* at, int i) { return *reinterpret_cast<UbsanType* const*>(at + 1)[i]; }
static long long number(const UbsanType& type, u64 bits) {  // info: bit 0 for signed, then log2 of the width
  int unused = 64 - (1 << (type.info >> 1));
  return type.info & 1 ? (long long)(bits << unused) >> unused : bits << unused >> unused;
}
void __ubsan_handle_out_of_bounds(Ubsan* at, u64 index) {
  fail("OUT OF BOUNDS", "?", place_of(*at), "index %lld of array ? of type %s", number(type_of(at, 1), index), type_of(at, 0).name);
}
void __ubsan_handle_shift_out_of_bounds(Ubsan* at, u64, u64 by) {
  fail("WIDE SHIFT", nullptr, place_of(*at), "shift of type %s by %lld", type_of(at, 0).name, number(type_of(at, 1), by));
}
void __ubsan_handle_divrem_overflow(Ubsan* at, u64, u64) {
  fail("DIVISION BY ZERO", nullptr, place_of(*at), "in type %s", type_of(at, 0).name);
}

__attribute__((weak)) __bf16 __truncsfbf2(float x) {  // libgcc before 13 lacks this function
  u32 bits = __builtin_bit_cast(u32, x);
  u16 top = x != x ? bits >> 16 | 64 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return __builtin_bit_cast(__bf16, top);
}

// ---- (e) launch
static void run_threadgroup(u32 number) {
  u32 tg[3], size[3], all[3];
  for (int i = 0, n = number; i < 3; ++i) {
    all[i] = (launch->grid[i] + launch->threadgroup[i] - 1) / launch->threadgroup[i];
    tg[i] = n % all[i];
    n /= all[i];
    u32 left = launch->grid[i] - tg[i] * launch->threadgroup[i];
    size[i] = left < launch->threadgroup[i] ? left : launch->threadgroup[i];
  }
  group = number;
  threads = size[0] * size[1] * size[2];
  u32 nominal = launch->threadgroup[0] * launch->threadgroup[1] * launch->threadgroup[2];
  for (u32 t = 0; t < threads; ++t) {
    auto& c = lanes[t].context;
    u32 at[3] = {t % size[0], t / size[0] % size[1], t / size[0] / size[1]};
    for (int i = 0; i < 3; ++i) {
      c.thread_position_in_threadgroup[i] = at[i];
      c.thread_position_in_grid[i] = tg[i] * launch->threadgroup[i] + at[i];
      c.threads_per_grid[i] = c.grid_size[i] = launch->grid[i];
      c.threadgroup_position_in_grid[i] = tg[i];
      c.threadgroups_per_grid[i] = all[i];
      c.threads_per_threadgroup[i] = size[i];
      c.dispatch_threads_per_threadgroup[i] = launch->threadgroup[i];
    }
    c.thread_index_in_threadgroup[0] = t;
    c.thread_index_in_simdgroup[0] = t % 32;
    c.simdgroup_index_in_threadgroup[0] = t / 32;
    c.simdgroups_per_threadgroup[0] = (threads + 31) / 32;
    c.dispatch_simdgroups_per_threadgroup[0] = (nominal + 31) / 32;
    c.threads_per_simdgroup[0] = c.thread_execution_width[0] = 32;
    c.thread_index_in_quadgroup[0] = t % 4;
    c.quadgroup_index_in_threadgroup[0] = t / 4;
    c.quadgroups_per_threadgroup[0] = (threads + 3) / 4;
    c.dispatch_quadgroups_per_threadgroup[0] = (nominal + 3) / 4;
  }
  memset(simdgroups, 0, sizeof simdgroups);
  for (u32 t = 0; t < threads; ++t) simdgroups[t / 32].ready |= 1u << t % 32;
  for (int i = BUFFERS; i < SLOTS; ++i) {  // threadgroup memory of a new threadgroup is unwritten
    if (!regions[i].start) continue;
    for (Cell* cells : regions[i].cells)
      if (cells) memset(cells, 0, granules(regions[i]) * sizeof(Cell));
    memset(regions[i].start, 0xAA, regions[i].bytes);
  }
  fence[0] = fence[1] = 0;
  ++interval;
  shuffle_order();
  current = order[0] * 32;
  switch_lane();
}
static void open_buffers() {
  for (int i = 0; i < launch->buffer_count; ++i) {
    Buffer& b = launch->buffers[i];
    Region& r = open_region(b.index, b.bytes, b.granule, b.name);
    memcpy(r.start, b.data, b.bytes);
    r.buffer = &b;
    r.read_only = b.read_only;
    for (auto& lines : r.lines) lines = static_cast<Line*>(calloc(b.bytes / launch->line_bytes + 1, sizeof(Line)));
    if (b.read_only) continue;
    r.cells[0] = new_cells(r);
    for (u64 j = 0; b.initialised && j < granules(r); ++j) r.cells[0][j].mark[1].state = SET | HOST;
    if (!b.initialised) memset(r.start, 0xAA, b.bytes);
  }
  for (auto& lane : lanes)
    for (int i = 0; i < BUFFERS; ++i) lane.context.buffer[i] = regions[i].start;
}
static void close_buffers() {
  for (int i = 0; i < launch->buffer_count; ++i) {
    Buffer& b = launch->buffers[i];
    Region& r = regions[b.index];
    if (b.read_only) continue;
    memcpy(b.data, r.start, b.bytes);
    for (u64 j = granules(r); j-- > 0;)
      if (!written(r, j)) b.unwritten += r.granule, b.first_unwritten = j * r.granule;
  }
}
int msl_launch(Launch* l) {  // returns 0: done, 1: fault found, 2: no address space
  launch = l;
  if (!slots) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* reserved = mmap(nullptr, SLOTS * SLOT, PROT_NONE, flags, -1, 0);
    void* stack = mmap(nullptr, MAX_THREADS * STACK, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (reserved == MAP_FAILED || stack == MAP_FAILED) return 2;
    slots = static_cast<char*>(reserved);
    stacks = static_cast<char*>(stack);
    for (int i = 0; i < MAX_THREADS; ++i) mprotect(stacks + i * STACK, 4096, PROT_NONE);
  }
  random_state = l->seed;
  interval = 0;
  memset(sites, 0, sizeof sites);
  for (auto& lane : lanes) lane.started = false;
  open_buffers();
  static u32 number, total, first;
  static volatile int state;
  total = 1;
  for (int i = 0; i < 3; ++i) total *= (l->grid[i] + l->threadgroup[i] - 1) / l->threadgroup[i];
  first = random_below(total);
  for (number = 0; number < total; ++number) {
    state = _setjmp(back_to_launch);
    if (!state) run_threadgroup((first + (l->seed & 1 ? total - 1 - number : number)) % total);
    if (state == 2) break;
  }
  close_buffers();
  for (auto& r : regions) close_region(r);
  return state == 2;
}
}
