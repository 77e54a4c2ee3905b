// Quest, docs/spec/quest.md: the bounds of the pages that get a key, and one decode step.

#include "caches.h"
#include "select.h"

namespace sparse {

namespace {

// Smallest and largest of each component of every page of a head, (2, pages, D). A past and its present may be the same
// memory.
struct Bounds final : Follow {
  const Append& append;
  const int64_t* first;  // (B)
  int64_t page_size, pages;
  const void* past;
  void* present;

  Bounds(const Append& append, const int64_t* first) : append(append), first(first) {}
  void head(int64_t b, int64_t h) const override;
  const char* plane(int64_t b, int64_t h, int64_t which) const {
    const int64_t bytes = pages * append.D * size_of(append.type);
    return static_cast<const char*>(present) + ((b * append.Hkv + h) * 2 + which) * bytes;
  }
};

// (quest.1) of the pages that hold the new rows, from all of their rows.
void Bounds::head(int64_t b, int64_t h) const {
  const int64_t D = append.D, item = size_of(append.type), plane_bytes = pages * D * item;
  const int64_t at = (b * append.Hkv + h) * 2 * plane_bytes, end = append.past_length[b] + append.L;
  if (past != present) {
    std::copy_n(static_cast<const char*>(past) + at, 2 * plane_bytes, static_cast<char*>(present) + at);
  }
  Scratch scratch(Scratch::kTask, 3 * Scratch::size<float>(D));
  float *row = scratch.take<float>(D), *low = scratch.take<float>(D), *high = scratch.take<float>(D);
  const char* keys = append.plane(append.present_key, b, h);
  for (int64_t page = append.past_length[b] / page_size; page * page_size < end; page++) {
    std::fill(low, low + D, __builtin_inff());
    std::fill(high, high + D, -__builtin_inff());
    for (int64_t j = std::max(page * page_size, first[b]); j < std::min((page + 1) * page_size, end); j++) {
      read_rows(row, append.rows, keys, j, 1);
      for (int64_t d = 0; d < D; d++) {  // NaN stays: no comparison with it is true
        low[d] = low[d] <= row[d] || low[d] != low[d] ? low[d] : row[d];
        high[d] = high[d] >= row[d] || high[d] != high[d] ? high[d] : row[d];
      }
    }
    char* to = static_cast<char*>(present) + at + page * D * item;
    append.kernels->narrow(to, low, D);
    append.kernels->narrow(to + plane_bytes, high, D);
  }
}

// z of (quest.3) for `count` pages from `first` on.
void score_pages(const Attention& a, const Bounds& bounds, int64_t b, int64_t h, int64_t first, int64_t count, float* z,
                 Scratch& scratch) {
  const int64_t D = a.D, G = a.G();
  float *up = scratch.take<float>(G * D), *down = scratch.take<float>(G * D);
  float *most = scratch.take<float>(G * kBlock), *least = scratch.take<float>(G * kBlock);
  a.typed().widen(up, static_cast<const char*>(a.query) + a.group_offset(b, h), G * D);
  for (int64_t i = 0; i < G * D; i++) {
    down[i] = up[i] > 0 ? 0 : up[i];
    up[i] = up[i] > 0 ? up[i] : 0;
  }
  for (int64_t i = 0; i < count; i += kBlock) {
    const int n = int(std::min<int64_t>(kBlock, count - i));
    const auto multiply = [&](const float* query, const char* plane, float* products) {
      const Keys block{plane, plane, nullptr, first + i, n, 0, nullptr, nullptr};
      a.typed().score({int(G), int(D), query, nullptr, nullptr, nullptr}, block, products);
    };
    multiply(up, bounds.plane(b, h, 1), most);
    multiply(down, bounds.plane(b, h, 0), least);
    for (int64_t p = 0; p < n; p++) {
      z[i + p] = -__builtin_inff();
      for (int64_t g = 0; g < G; g++) {
        const float bound = most[g * kBlock + p] + least[g * kBlock + p];
        if (!(bound <= z[i + p])) z[i + p] = bound != bound ? __builtin_inff() : bound;
      }
    }
  }
}

// Appends the new keys of a head and lists the keys of its best K pages, (quest.4) and (quest.5).
int64_t choose(const Attention& a, const Bounds& bounds, int64_t K, int64_t b, int64_t h, int32_t* listed) {
  a.append->head(b, h);
  const int64_t size = bounds.page_size, begin = a.first[b], end = a.length[b];
  if (begin >= end) return 0;
  const int64_t first = begin / size, current = (end - 1) / size, others = current - first;
  const int64_t wanted = std::min(K - 1, others);
  Scratch scratch(Scratch::kTask, 2 * Scratch::size<float>(a.G() * a.D) + 2 * Scratch::size<float>(a.G() * kBlock) +
                                      Scratch::size<float>(others) + 2 * Scratch::size<int32_t>(others));
  float* z = scratch.take<float>(others);
  int32_t *best = scratch.take<int32_t>(others), *work = scratch.take<int32_t>(others), *end_of_list = listed;
  const bool choice = wanted && wanted < others;
  if (choice) {
    score_pages(a, bounds, b, h, first, others, z, scratch);
    largest(*a.kernels, z, others, wanted, best, work);
  }
  const auto list = [&](int64_t page) {
    const int64_t stop = std::min((page + 1) * size, end);
    for (int64_t j = std::max(page * size, begin); j < stop; j++) *end_of_list++ = int32_t(j);
  };
  for (int64_t p = 0; p < wanted; p++) {
    if (!choice || z[best[p]] != -__builtin_inff()) list(first + (choice ? best[p] : p));
  }
  list(current);
  return end_of_list - listed;
}

void compute_quest_attention(const Attributes& attributes, const Context& context) {
  const Tensor query = context.input(0, "query", 'T'), padding = context.input(7, "left_padding", 'i');
  const Tensor past_bounds = context.input(5, "past_bounds", 'T');
  const Caches caches(context, 1, 3, 4, 6);
  Append append = caches.append(attributes, context);
  Lengths lengths(caches.key.shape[0]);
  Attention a = attention_over(attributes, context, caches, append, query, padding, lengths.all);
  Bounds bounds(append, a.first);
  bounds.page_size = attributes["page_size"], bounds.pages = (a.C + bounds.page_size - 1) / bounds.page_size;
  past_bounds.expect({a.B, a.Hkv, 2, bounds.pages, a.D});
  a.output = context.output(0, {a.B, a.Hq, a.L, a.D});
  caches.make(context, append, 1, 2);
  a.keys = append.present_key, a.values = append.present_value;
  bounds.past = past_bounds.data, bounds.present = context.output(3, {a.B, a.Hkv, 2, bounds.pages, a.D});
  append.follow = &bounds;
  const Pool pool(context.api(), context.context());
  if (!chooses(attributes, a)) return attend_prompt(attributes, a, pool);
  const Attention heads = as_heads(a, lengths.prefix);
  const int64_t K = std::min((attributes["top_k"] + bounds.page_size - 1) / bounds.page_size, bounds.pages);
  const int64_t room = std::min(K * bounds.page_size, longest_of(heads) + 1);
  attend_lists(
      heads, room, [&](int64_t b, int64_t h, int32_t* listed) { return choose(heads, bounds, K, b, h, listed); }, pool);
}

}  // namespace

const std::string kQuest = "page_size top_k scale dense_below verify_queries";
static const Registered registered({
    {"QuestAttention", "TTTRRTii", "TRRT", {0, 3, 4, 5}, kQuest, compute_quest_attention},
    {"SampleQuestAttention", "TTTRRTii", "TRRT", {0, 3, 4, 5}, kQuest + kSampled, compute_quest_attention},
});

}  // namespace sparse
