// Exact selection of the k largest scores of a row without sorting, in SparQ and SAAP.
//
// Scores are mapped to unsigned integers with the same order. The threshold for the k largest integers is found by
// counting, two bits per round. All items above the threshold, and the first items equal to the threshold, are written
// in order of index. A row that fits into the registers of one threadgroup is read once. The launcher divides a longer
// row into tiles, and the best k items of all tiles form a shorter row. If k is too large for tiles, each round reads
// the row.
#pragma once

#include "threadgroup.h"

constant constexpr uint TOP_K_ITEMS = 16;       // items per lane, held in registers
constant constexpr uint TOP_K_PARTIAL = 3 * MAX_SIMDGROUPS;
constant constexpr uint NEVER = 0;              // bits of an item that is never selected: invalid or -inf

// The part of a row that one threadgroup processes, and the position of the result.
struct Tile {
  uint b;      // sequence
  uint row;    // b * H + head
  uint first;  // index of the first item in the row
  uint count;  // number of items
  uint k;      // number of items to select
  uint slots;  // number of result slots per tile
  size_t out;  // index of the first result slot
};

// With one threadgroup along x, the tile is the whole row. Otherwise a tile has as many items as the registers hold.
inline Tile make_tile(uint3 at, uint3 grid, uint row_length, uint top_k, Place place) {
  Tile tile;
  tile.b = at.z;
  tile.row = at.z * grid.y + at.y;
  const uint size = grid.x == 1 ? row_length : TOP_K_ITEMS * place.threads();
  tile.first = at.x * size;
  tile.count = min(size, row_length - tile.first);
  tile.k = min(top_k, tile.count);
  tile.slots = min(top_k, size);
  tile.out = (size_t(tile.row) * grid.x + at.x) * tile.slots;
  return tile;
}

// Score source for top-k selection: the best items of each tile of a longer row.
template <typename Bits, typename Indices>
struct Candidates {
  Bits candidate_bits;
  Indices candidate_indices;

  uint bits(uint item) const { return candidate_bits[item]; }
  int index(uint item) const { return candidate_indices[item]; }
};

// The part of a row that one lane processes: item i of a block is item `first + 32 i` of the row. The items of a SIMD
// group are consecutive, so that its loads are coalesced.
template <typename Source>
struct Items {
  Source source;
  uint count;   // number of items in the row
  uint start;   // index of this lane's first item
  uint end;     // end of this SIMD group's items
  uint blocks;  // number of blocks of TOP_K_ITEMS items per lane; the same for all lanes
  uint loaded;
  uint bits[TOP_K_ITEMS];

  void load(uint block) {
    if (block != loaded) {
      loaded = block;
#pragma clang loop unroll(full)
      for (uint i = 0; i < TOP_K_ITEMS; ++i) {
        const uint item = number(block, i);
        bits[i] = item < end ? source.bits(item) : NEVER;
      }
    }
  }

  uint number(uint block, uint i) const { return start + (block * TOP_K_ITEMS + i) * LANES; }
};

template <typename Source>
Items<Source> make_items(Source source, uint count, Place place) {
  Items<Source> items;
  items.source = source;
  items.count = count;
  const uint steps = (count + place.threads() - 1) / place.threads();
  items.start = place.simdgroup * steps * LANES + place.lane;
  items.end = min(count, (place.simdgroup + 1) * steps * LANES);
  items.blocks = max((steps + TOP_K_ITEMS - 1) / TOP_K_ITEMS, 1u);
  items.loaded = items.blocks;
  return items;
}

// Return the sum of the counts of all SIMD groups to every thread. Successive calls alternate between two halves of
// `partial` by `round`, so that one barrier per sum is enough.
inline uint3 threadgroup_sum(uint3 counts, threadgroup uint3* partial, uint round, Place place) {
  threadgroup uint3* side = partial + (round & 1) * MAX_SIMDGROUPS;
  if (place.lane == 0) {
    side[place.simdgroup] = counts;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint3 all = of_simdgroup(side, place, uint3(0));
  return uint3(simd_sum(all.x), simd_sum(all.y), simd_sum(all.z));
}

// Numbers of items whose two bits at `shift` are 1, 2 and 3, among items whose higher bits equal those of `threshold`.
template <typename Source>
uint3 count_digits(
    thread Items<Source>& items, uint threshold, uint shift, threadgroup uint3* partial, uint round, Place place) {
  uint3 counts = uint3(0);
  for (uint block = 0; block < items.blocks; ++block) {
    items.load(block);
    uint packed = 0;  // three counts of ten bits: a SIMD group has 32 * TOP_K_ITEMS = 512 items
#pragma clang loop unroll(full)
    for (uint i = 0; i < TOP_K_ITEMS; ++i) {
      const uint digit = (items.bits[i] >> shift) - (threshold >> shift);
      packed += digit - 1 < 3 ? 1u << (10 * (digit - 1)) : 0;
    }
    packed = simd_sum(packed);
    counts += uint3(packed & 1023, (packed >> 10) & 1023, packed >> 20);
  }
  return threadgroup_sum(counts, partial, round, place);
}

// Return a threshold that at least k items reach and at most k items exceed; NEVER if fewer than k can be selected.
template <typename Source>
uint kth_largest(thread Items<Source>& items, uint k, threadgroup uint3* partial, Place place) {
  uint threshold = 0;
  uint above = 0;  // number of items that are larger in the bits found so far
  for (uint round = 0; round < 16; ++round) {
    const uint shift = 30 - 2 * round;
    const uint3 count = count_digits(items, threshold, shift, partial, round, place);
    uint digit = 3;
    uint reached = above + count.z;  // number of items at or above the candidate digit
    if (reached < k) {
      above = reached;
      digit = 2;
      reached += count.y;
    }
    if (reached < k) {
      above = reached;
      digit = 1;
      reached += count.x;
    }
    if (reached < k) {
      above = reached;
      digit = 0;
    }
    threshold |= digit << shift;
    if (reached == k) {
      break;  // exactly k items; uniform in the threadgroup
    }
  }
  return threshold;
}

// Write the best k items of a tile in order of index, then empty slots. Ties go to the lower index.
template <typename Source, typename Bits, typename Indices>
void select_best(Source source, Tile tile, Bits bits, Indices indices, threadgroup uint3* partial, Place place) {
  Items<Source> items = make_items(source, tile.count, place);
  const uint threshold = tile.k < tile.count ? kth_largest(items, tile.k, partial, place) : NEVER;
  const auto chosen_bits = bits + tile.out;
  const auto chosen_indices = indices + tile.out;

  // Numbers of items above and equal to the threshold: in this lane, in earlier SIMD groups, and in total.
  uint above = 0;
  uint equal = 0;
  for (uint block = 0; block < items.blocks; ++block) {
    items.load(block);
#pragma clang loop unroll(full)
    for (uint i = 0; i < TOP_K_ITEMS; ++i) {
      above += items.bits[i] > threshold ? 1 : 0;
      equal += items.bits[i] == threshold ? 1 : 0;
    }
  }
  threadgroup uint3* totals = partial + 2 * MAX_SIMDGROUPS;
  above = simd_sum(above);
  equal = simd_sum(equal);
  if (place.lane == 0) {
    totals[place.simdgroup] = uint3(above, equal, 0);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint3 total = of_simdgroup(totals, place, uint3(0));
  const uint all_above = simd_sum(total.x);
  const uint wanted_equal = threshold == NEVER ? 0 : min(tile.k - all_above, simd_sum(total.y));
  above = simd_sum(place.lane < place.simdgroup ? total.x : 0);
  equal = simd_sum(place.lane < place.simdgroup ? total.y : 0);

  for (uint block = 0; block < items.blocks; ++block) {
    items.load(block);
#pragma clang loop unroll(full)
    for (uint i = 0; i < TOP_K_ITEMS; ++i) {
      const uint is_above = items.bits[i] > threshold ? 1 : 0;
      const uint is_equal = items.bits[i] == threshold ? 1 : 0;
      const uint above_before = above + simd_prefix_exclusive_sum(is_above);
      const uint equal_before = equal + simd_prefix_exclusive_sum(is_equal);
      if (is_above || (is_equal && equal_before < wanted_equal)) {
        const uint slot = above_before + min(equal_before, wanted_equal);
        chosen_bits[slot] = items.bits[i];
        chosen_indices[slot] = source.index(items.number(block, i));
      }
      above += simd_sum(is_above);
      equal += simd_sum(is_equal);
    }
  }
  for (uint slot = all_above + wanted_equal + place.index(); slot < tile.slots; slot += place.threads()) {
    chosen_bits[slot] = NEVER;
    chosen_indices[slot] = -1;
  }
}
