#include "c_api.h"

#include <limits>
#include <stdexcept>
#include <string>

#include "saap.h"
#include "sample.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

using namespace sparse;
using Size = std::initializer_list<int64_t>;

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

void require(bool holds, const char* name, const std::string& expected) {
  if (!holds) throw std::invalid_argument(std::string(name) + ": expected " + expected + ".");
}

// Returns the product of sizes that are below 2**31 each.
int64_t product(Size sizes) {
  int64_t all = 1;
  for (const int64_t size : sizes) {
    require(size >= 0 && !__builtin_mul_overflow(all, size, &all), "sizes", "a product below 2**63");
  }
  return all;
}

// Returns the data of a buffer that has `sizes` elements of `item` bytes.
template <class T = void>
T* data(const SparseBuffer& buffer, const char* name, Size sizes, int64_t item = sizeof(std::conditional_t<std::is_void_v<T>, char, T>)) {
  const int64_t bytes = product({product(sizes), item});
  require(buffer.bytes == bytes, name, std::to_string(bytes) + " bytes, got " + std::to_string(buffer.bytes));
  require(!bytes || buffer.data, name, "data");
  require(reinterpret_cast<uintptr_t>(buffer.data) % size_t(std::min<int64_t>(item, 4)) == 0, name, "aligned data");
  return static_cast<T*>(buffer.data);
}

Type type_of(int32_t type, const char* name) {
  require(type >= 0 && type <= 2, name, "a type 0, 1 or 2");
  return Type(type);
}

// Refuses sizes outside the range of int32, whose sums do not overflow.
void check_sizes(int64_t least, Size sizes) {
  for (const int64_t size : sizes) {
    require(size >= least && size <= kMost, "sizes", std::to_string(least) + " to 2**31 - 1");
  }
}

template <class T>
const T& checked(const T* given) {
  require(given, "arguments", "no null pointer");
  return *given;
}

// Writes the first valid key of each sequence.
void read_padding(const SparseBuffer& given, int64_t length, int64_t B, int64_t* first) {
  const int32_t* padding = given.data ? data<int32_t>(given, "left_padding", {B}) : nullptr;
  for (int64_t b = 0; b < B; b++) first[b] = padding ? std::clamp<int64_t>(padding[b], 0, length) : 0;
}

// The attention of a call. It uses scratch memory for the first key and the length of each sequence.
struct Call : Attention {
  explicit Call(const SparseAttention& given, bool writes = true) : Attention{} {
    kernels = &sparse::kernels();
    query_type = type_of(given.query_type, "query_type"), type = type_of(given.type, "type");
    B = given.B, Hq = given.Hq, Hkv = given.Hkv, L = given.L, C = given.capacity, D = given.D, Dv = given.Dv;
    check_sizes(1, {B, Hq, Hkv, L, C, D, Dv});
    require(Hq % Hkv == 0, "Hq", "a multiple of Hkv");
    require(L <= given.length && given.length <= C, "length", "L to the capacity");
    query = data(given.queries, "queries", {B, Hq, L, D}, size_of(query_type));
    keys = data(given.keys, "keys", {B, Hkv, C, D}, size_of(type));
    values = data(given.values, "values", {B, Hkv, C, Dv}, size_of(type));
    if (writes) {
      output = data(given.out, "out", {B, Hq, L, Dv}, size_of(query_type));
      lse = data<float>(given.lse, "lse", {B, Hq, L});
    }
    scale = given.scale;
    if (given.bias.data) {
      require(L == 1, "L", "1 with a bias");
      bias.type = type_of(given.bias_type, "bias_type"), bias.stride = given.length;
      bias.data = data(given.bias, "bias", {B, Hq, given.length}, size_of(bias.type));
      constexpr float kLowest[] = {-3.40282347e38f, -65504.0f, -3.38953139e38f};  // of float32, float16, bfloat16
      bias.lowest = kLowest[bias.type];
    }
    Scratch scratch(Scratch::kLengths, 2 * Scratch::size<int64_t>(B));
    int64_t *firsts = scratch.take<int64_t>(B), *lengths = scratch.take<int64_t>(B);
    std::fill(lengths, lengths + B, given.length);
    read_padding(given.left_padding, given.length, B, firsts);
    first = firsts, length = lengths;
  }
};

// Runs a function and returns null or the message of its exception.
template <class Function>
const char* guarded(const Function& function) {
  thread_local std::string message;
  try {
    function();
    return nullptr;
  } catch (const std::bad_alloc&) {
    message = "out of memory.";
  } catch (const std::exception& error) {
    message = error.what();
  }
  return message.c_str();
}

}  // namespace

EXPORTED int mlx_sparse_abi() { return 3; }

EXPORTED const char* mlx_sparse_dense(const SparseAttention* given, int64_t window) {
  return guarded([&] {
    Call a(checked(given));
    check_sizes(0, {window});
    a.window = window;
    attend_densely(a, Threads::shared());
  });
}

EXPORTED const char* mlx_sparse_sparq(const SparseAttention* given, const SparseSparQ* parameters) {
  return guarded([&] {
    const Call a(checked(given));
    const SparseSparQ& p = checked(parameters);
    require(a.L == 1, "L", "1");
    require(p.rank >= 1 && p.rank <= a.D, "rank", "1 to D");
    require(p.top_k >= 1 && p.local_window >= 0 && p.local_window <= p.top_k, "local_window", "0 to top_k");
    SparQ s{};
    s.rank = p.rank, s.top_k = std::min(p.top_k, given->length), s.local_window = std::min(p.local_window, s.top_k);
    if (p.center.data) {
      const int64_t groups = p.groups, planes = product({a.B, a.Hkv, a.D});
      require(groups >= given->length / kGroup && groups <= kMost, "groups", "all full groups");
      const uint8_t* codes = data<uint8_t>(p.codes, "codes", {planes, groups, kGroup / 2});
      s.codes.codes = codes ? codes : static_cast<const uint8_t*>(p.center.data);  // without groups nothing is read
      s.codes.lo = data<uint8_t>(p.lo, "lo", {planes, groups, 2});
      s.codes.step = data<uint8_t>(p.step, "step", {planes, groups, 2});
      s.codes.groups = groups, s.codes.code_size = kGroup / 2, s.codes.range_size = 2;
      s.center = data<float>(p.center, "center", {planes});
    } else {
      require(p.columns >= given->length && p.columns <= kMost, "columns", "all keys");
      s.keys_t = data(p.keys_t, "keys_t", {a.B, a.Hkv, a.D, p.columns}, size_of(a.type));
      s.lanes = p.columns, s.plane = a.D * p.columns;
    }
    if ((s.by_key = p.component_weight.data)) {
      s.deviation = data<float>(p.component_weight, "component_weight", {a.B, a.Hkv, a.D});
    }
    if ((s.reallocate = p.value_mean.data)) s.value_mean = data<float>(p.value_mean, "value_mean", {a.B, a.Hkv, a.Dv});
    s.recall = data<float>(p.recall, "recall", {a.B, a.Hkv});
    attend_sparsely(a, s, Threads::shared());
  });
}

EXPORTED const char* mlx_sparse_indices(const SparseAttention* given, const SparseLists* lists) {
  return guarded([&] {
    const Call a(checked(given));
    const int64_t N = checked(lists).N;
    require(a.L == 1, "L", "1");
    check_sizes(0, {N});
    const int32_t* indices = data<int32_t>(lists->indices, "indices", {a.B, a.Hkv, N});
    const int32_t* counts = lists->counts.data ? data<int32_t>(lists->counts, "counts", {a.B, a.Hkv}) : nullptr;
    const auto listed = [&](int64_t b, int64_t h, int32_t* to) {
      const int64_t list = b * a.Hkv + h, size = counts ? std::min<int64_t>(N, counts[list]) : N;
      int64_t count = 0;
      for (int64_t i = 0; i < size; i++) {
        const int32_t key = indices[list * N + i];
        to[count] = key;
        count += key >= 0 && key < given->length && !a.hidden(b, h, key);
      }
      return count;
    };
    attend_lists(a, N + 1, listed, Threads::shared());
  });
}

EXPORTED const char* mlx_sparse_blocks(const SparseAttention* given, const SparseLists* lists) {
  return guarded([&] {
    const Call a(checked(given));
    const int64_t N = checked(lists).N, size = lists->block_size;
    check_sizes(0, {N});
    check_sizes(1, {size});
    const int64_t R = (given->length - 1) / size - (given->length - a.L) / size + 1;
    attend_blocks(a, data<int32_t>(lists->indices, "indices", {a.B, a.Hq, R, N}), N, size, Threads::shared());
  });
}

EXPORTED const char* mlx_sparse_sample(const SparseAttention* given, const SparseLists* lists, float alpha_column,
                                       float alpha_slash, int64_t chunks) {
  return guarded([&] {
    const Call a(checked(given), false);
    const int64_t size = checked(lists).block_size;
    require(size >= 1 && size <= kBlock, "block_size", "1 to " + std::to_string(kBlock));
    require(chunks >= 1, "chunks", "at least 1");
    Sample sample(a, {alpha_column, alpha_slash, chunks, size});
    const int64_t width = sample.key_blocks();
    require(lists->N == width, "N", "the number of key blocks");
    int32_t* to = data<int32_t>(lists->indices, "indices", {a.B, a.Hq, sample.row_blocks(), width});
    if (!sample.everything()) sample.select_blocks(Threads::shared());
    sample.write_lists(to, width);
  });
}

EXPORTED const char* mlx_sparse_buckets(const SparseBuckets* given) {
  return guarded([&] {
    const SparseBuckets& g = checked(given);
    check_sizes(1, {g.B, g.Hkv, g.capacity, g.length});
    check_sizes(0, {g.n, g.buckets, g.listed, g.sink_tokens});
    const int32_t* rows = data<int32_t>(g.covered, "covered", {g.B});
    Scratch scratch(Scratch::kLengths, 2 * Scratch::size<int64_t>(g.B));
    int64_t *first = scratch.take<int64_t>(g.B), *covered = scratch.take<int64_t>(g.B);
    read_padding(g.left_padding, g.length, g.B, first);
    for (int64_t b = 0; b < g.B; b++) covered[b] = std::clamp<int64_t>(rows[b], 0, g.length);
    BucketLists lists{};
    lists.B = g.B, lists.Hkv = g.Hkv, lists.n = g.n, lists.buckets = g.buckets, lists.listed = g.listed;
    lists.capacity = g.capacity, lists.length = g.length, lists.sink_tokens = g.sink_tokens;
    lists.first = first, lists.covered = covered;
    lists.visited = data<int32_t>(g.visited, "visited", {g.B, g.Hkv, g.n});
    lists.offsets = data<int32_t>(g.offsets, "offsets", {g.B, g.Hkv, g.buckets + 1});
    lists.key_ids = data<int32_t>(g.key_ids, "key_ids", {g.B, g.Hkv, g.listed});
    lists.indices = data<int32_t>(g.indices, "indices", {g.B, g.Hkv, g.capacity});
    lists.counts = data<int32_t>(g.counts, "counts", {g.B, g.Hkv});
    list_buckets(lists);
  });
}
