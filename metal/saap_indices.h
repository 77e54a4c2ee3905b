// SAAP's list of a step: the sinks, the keys at the end, and the keys of the visited buckets (saap.10).
//
// The buckets' stretches are laid end to end, and threadgroups take equal parts of the list that results: a bucket that
// holds half of the keys is many threadgroups' work. Each of them finds the ends of all stretches for itself, so that
// nobody waits.
#pragma once

#include "threadgroup.h"

constant constexpr uint LIST_TILE = 1024;  // entries of a threadgroup

constant constexpr int NO_KEY = -1;

// The keys of a bucket: from where, and how many.
struct Stretch {
  uint first;
  uint count;
};

// The visited buckets of one KV head.
template <typename Visited, typename Offsets>
struct Stretches {
  Visited visited;  // numbers that are no bucket's hold no key
  Offsets offsets;  // (buckets + 1)
  uint buckets;
  uint keys;  // that are listed at most

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

// ends[slot] = keys in the stretches up to and with this one. Ends with a barrier.
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

// Key `at` of all stretches together.
template <typename All, typename KeyIds>
int bucket_key(uint at, All stretches, uint slots, KeyIds key_ids, const threadgroup uint* ends) {
  uint low = 0, high = slots - 1;  // the first stretch that ends behind it
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

// What is attended wherever it is: keys at both ends that no bucket holds.
struct ExactKeys {
  uint first;  // sink
  uint sinks;
  uint tail;  // first key
  uint count;

  uint key(uint entry) const { return entry < sinks ? first + entry : tail + (entry - sinks); }
};

inline ExactKeys exact_keys(int length, int covered, int sink_tokens, int padding) {
  const int first = max(padding, 0), tail = max(covered, first);
  const uint sinks = uint(min(max(covered - first, 0), sink_tokens));
  return {uint(first), sinks, uint(tail), sinks + uint(max(length - tail, 0))};
}
