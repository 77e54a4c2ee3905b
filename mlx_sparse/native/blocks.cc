// Exact attention over lists of key blocks, for all prefill methods.

#include "prompt.h"

namespace sparse {

void attend_blocks(const Attention& a, const int32_t* lists, int64_t N, int64_t size, const Pool& pool) {
  const int64_t first = (a.length[0] - a.L) / size, last = (a.length[0] - 1) / size, R = last - first + 1;
  const int64_t heads = a.B * a.Hq;
  pool.run(heads * R, [&](int64_t i) {
    const int64_t r = last - i / heads, head = i % heads;  // the row blocks with the most keys first
    Scratch scratch(Scratch::kPart, Scratch::size<char>(r + 1));
    char* listed = scratch.take<char>(r + 1);
    std::fill(listed, listed + r + 1, 0);
    const int32_t* list = lists + (head * R + r - first) * N;
    for (int64_t n = 0; n < N; n++) {
      if (list[n] >= 0 && list[n] <= r) listed[list[n]] = 1;
    }
    attend_row_block(a, head, r, size, [&](int64_t block) { return listed[block]; });
  });
}

}  // namespace sparse
