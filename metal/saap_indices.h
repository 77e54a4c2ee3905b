// Lists the keys of a SAAP decode step: sinks, keys that are not in the index, and keys of visited buckets (saap.10).
//
// The ranges of the visited buckets are concatenated, and each threadgroup processes an equal part of the result. A
// bucket with half of all keys is therefore divided among many threadgroups. Each threadgroup computes the ends of all
// ranges itself, so that no threadgroup waits for another.
#pragma once

#include "threadgroup.h"

constant constexpr uint LIST_TILE = 1024;  // list entries per threadgroup

constant constexpr int NO_KEY = -1;

// Range of a bucket in key_ids: first entry and number of keys.
struct Stretch {
  uint first;
  uint count;
};

// The visited buckets of one KV head.
template <typename Visited, typename Offsets>
struct Stretches {
  Visited visited;  // bucket ids; a number that is not a bucket is an empty slot
  Offsets offsets;  // (buckets + 1)
  uint buckets;
  uint keys;  // maximum number of listed keys

  Stretch operator()(uint slot) const {
    const int bucket = visited[slot];
    if (bucket < 0 || uint(bucket) >= buckets) {
      return {0, 0};
    }
    const uint first = min(uint(max(offsets[bucket], 0)), keys);
    const uint end = min(uint(max(offsets[bucket + 1], 0)), keys);
    return {first, end > first ? end - first : 0};
  }
};

// ends[slot] = total number of keys in ranges 0 to slot, inclusive. Ends with a barrier.
template <typename All>
void stretch_ends(
    All stretches,
    uint slots,
    threadgroup uint* ends,     // slots
    threadgroup uint* partial,  // MAX_SIMDGROUPS
    Place place) {
  const uint each = (slots + place.threads() - 1) / place.threads();
  const uint first = min(place.index() * each, slots), end = min(first + each, slots);
  uint own = 0;
  for (uint slot = first; slot < end; ++slot) {
    own += stretches(slot).count;
    ends[slot] = own;
  }
  uint before = simd_prefix_exclusive_sum(own);
  own = simd_sum(own);
  if (place.lane == 0) {
    partial[place.simdgroup] = own;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  before += simd_sum(place.lane < place.simdgroup ? partial[place.lane] : 0);
  for (uint slot = first; slot < end; ++slot) {
    ends[slot] += before;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Return key `at` of the concatenated ranges.
template <typename All, typename KeyIds>
int bucket_key(uint at, All stretches, uint slots, KeyIds key_ids, const threadgroup uint* ends) {
  uint low = 0, high = slots - 1;  // search for the first range that ends after `at`
  while (low < high) {
    const uint middle = (low + high) / 2;
    if (ends[middle] > at) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const Stretch stretch = stretches(low);
  const uint offset = at - (low > 0 ? ends[low - 1] : 0);
  return offset < stretch.count ? key_ids[stretch.first + offset] : NO_KEY;
}

// Keys that are always attended: the sinks and the keys that are not in the index (the tail).
struct ExactKeys {
  uint first;  // first sink
  uint sinks;
  uint tail;  // first key of the tail
  uint count;

  uint key(uint entry) const { return entry < sinks ? first + entry : tail + (entry - sinks); }
};

inline ExactKeys exact_keys(int length, int covered, int sink_tokens, int padding) {
  const int first = max(padding, 0), tail = max(covered, first);
  const uint sinks = uint(min(max(covered - first, 0), sink_tokens));
  return {uint(first), sinks, uint(tail), sinks + uint(max(length - tail, 0))};
}
