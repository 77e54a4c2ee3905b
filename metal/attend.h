// Exact softmax attention of a group of query heads over a list of keys, used by all decode methods.
//
// A threadgroup processes the list in tiles of ATTEND_TILE keys and reads each row of K and V once for the whole group.
// For each tile, the threadgroup scores all keys, converts the scores to weights with a running maximum (online
// softmax) and adds the weighted values. The keys of a tile are divided among the SIMD groups, whose sums are added at
// the end. All arithmetic is float32.
#pragma once

#include "bias.h"
#include "rows.h"

constant constexpr int EMPTY = -1;  // a slot of a list without a key

// Number of lanes that share a row of d components, four components per lane; at most all lanes of a SIMD group.
constexpr uint shared_lanes(uint d) {
  uint lanes = LANES;
  while (lanes / 2 >= d / 4) {
    lanes /= 2;
  }
  return lanes;
}

// Layout of rows of D components in a SIMD group: `lanes` lanes share a row, four components at a time.
template <int D>
struct RowLayout {
  enum : uint { lanes = shared_lanes(D), chunks = (D / 4 + lanes - 1) / lanes, rows = LANES / lanes };
};

// Compile-time sizes.
template <int D, int G, int SIMDGROUPS>
struct AttendSizes {
  enum : uint {
    step = SIMDGROUPS * RowLayout<D>::rows,         // rows that the threadgroup reads at once
    passes = (ATTEND_TILE + step - 1) / step,       // passes to read a tile
    most = RowLayout<D>::chunks > 2 ? 2 : 4,
    batch = passes < most ? passes : most,          // rows that a lane loads at once
    heads = (G + SIMDGROUPS - 1) / SIMDGROUPS,      // query heads per SIMD group in the softmax
    scores = G * D,                                 // scratch memory: queries, then scores ...
    working = G * D + G * ATTEND_TILE,
    merging = SIMDGROUPS * D,                       // ... and at the end the sums of one or more heads
    scratch = working > merging ? working : merging,
    merged_heads = scratch / merging < G ? scratch / merging : G,
  };
};

// Approximate attention weights (sparq.4) of the selected keys, for the sum in (sparq.8).
template <int SCORED, typename Logits, typename Softmax>
struct ChosenMass {
  Logits logits;    // (G / SCORED, stride, SCORED) of the KV head
  Softmax softmax;  // (G, 2) of the KV head
  uint stride;
  uint first;  // first query head of this threadgroup

  float operator()(int key, uint g) const {
    const uint head = first + g;
    const float logit = logits[(size_t(head / SCORED) * stride + uint(key)) * SCORED + head % SCORED];
    return exp(logit - softmax[head * 2]) * softmax[head * 2 + 1];
  }
};

struct NoMass {
  float operator()(int, uint) const { return 0.0f; }
};

// Running softmax state of one query head; the same in all lanes of the SIMD group that processes the head.
struct Running {
  float largest;
  float total;
  float mass;
};

// The part of the key or value rows of one tile that this lane reads.
template <typename Rows, int D, int SIMDGROUPS>
struct TileRows {
  Rows rows;  // rows of the KV head: see rows.h
  const threadgroup int* list;
  Place place;

  uint slot(uint pass) const {
    return (pass * SIMDGROUPS + place.simdgroup) * RowLayout<D>::rows + place.lane / RowLayout<D>::lanes;
  }
  uint chunk(uint c) const { return c * RowLayout<D>::lanes + place.lane % RowLayout<D>::lanes; }

  // Return false if the row has no components for this lane.
  bool has(uint c) const { return D / 4 % RowLayout<D>::lanes == 0 || chunk(c) < D / 4; }

  // Return chunk c of the row in `slot`; zeros for an empty slot.
  float4 load(uint slot, uint c) const {
    const int key = slot < ATTEND_TILE && has(c) ? list[slot] : EMPTY;
    if (key == EMPTY) {
      return float4(0.0f);
    }
    return rows.read(uint(key), chunk(c));
  }

  // Load the chunks of BATCH passes without waiting between the loads.
  template <uint BATCH>
  void load_batch(uint pass, thread float4 (&loaded)[BATCH][RowLayout<D>::chunks]) const {
#pragma clang loop unroll(full)
    for (uint u = 0; u < BATCH; ++u) {
#pragma clang loop unroll(full)
      for (uint c = 0; c < RowLayout<D>::chunks; ++c) {
        loaded[u][c] = load(slot(pass + u), c);
      }
    }
  }
};

// scores[g * ATTEND_TILE + slot] = q_g . k for the first `count` slots.
template <int D, int G, int SIMDGROUPS, typename Rows>
void score_tile(
    TileRows<Rows, D, SIMDGROUPS> keys, uint count, const threadgroup float4* q, threadgroup float* scores) {
  typedef AttendSizes<D, G, SIMDGROUPS> N;
  typedef RowLayout<D> Layout;
  for (uint pass = 0; pass * N::step < count; pass += N::batch) {
    float4 key[N::batch][Layout::chunks];
    keys.template load_batch<N::batch>(pass, key);
#pragma clang loop unroll(full)
    for (uint u = 0; u < N::batch; ++u) {
      const uint slot = keys.slot(pass + u);
#pragma clang loop unroll(full)
      for (uint g = 0; g < G; ++g) {
        float score = 0.0f;
#pragma clang loop unroll(full)
        for (uint c = 0; c < Layout::chunks; ++c) {
          score += keys.has(c) ? dot(key[u][c], q[g * (D / 4) + keys.chunk(c)]) : 0.0f;
        }
        for (uint offset = Layout::lanes / 2; offset > 0; offset /= 2) {
          score += simd_shuffle_xor(score, ushort(offset));
        }
        if (keys.place.lane % Layout::lanes == 0 && slot < ATTEND_TILE) {
          scores[g * ATTEND_TILE + slot] = score;
        }
      }
    }
  }
}

// Convert the scores of one query head to weights with the new maximum. Return the factor that rescales earlier sums.
template <typename Bias, typename Mass>
float weigh_tile(
    threadgroup float* scores,  // scores of the query head
    const threadgroup int* list,
    uint count,
    float scale,
    uint g,
    Bias bias,
    Mass mass,
    thread Running& running,
    Place place) {
  float score[ATTEND_TILE / LANES];
  float largest = running.largest;
#pragma clang loop unroll(full)
  for (uint i = 0; i < ATTEND_TILE / LANES; ++i) {
    const uint slot = i * LANES + place.lane;
    const bool filled = slot < count && list[slot] != EMPTY;
    score[i] = filled ? bias.add(scores[slot] * scale, uint(list[slot]), g) : -INFINITY;
    largest = max(largest, score[i]);
  }
  largest = simd_max(largest);
  float total = 0.0f;
  float chosen = 0.0f;
#pragma clang loop unroll(full)
  for (uint i = 0; i < ATTEND_TILE / LANES; ++i) {
    const uint slot = i * LANES + place.lane;
    const bool filled = slot < count && list[slot] != EMPTY;
    const float weight = score[i] == -INFINITY ? 0.0f : exp(score[i] - largest);
    if (slot < count) {
      scores[slot] = weight;
    }
    total += weight;
    chosen += filled ? mass(list[slot], g) : 0.0f;
  }
  const float factor = running.total != 0.0f ? exp(running.largest - largest) : 0.0f;
  running.total = running.total * factor + simd_sum(total);
  running.mass += simd_sum(chosen);
  running.largest = largest;
  return factor;
}

// sums[g] += weight * value over the first `count` slots.
template <int D, int G, int SIMDGROUPS, typename Rows>
void add_values(
    TileRows<Rows, D, SIMDGROUPS> values,
    uint count,
    const threadgroup float* weights,
    thread float4 (&sums)[G][RowLayout<D>::chunks]) {
  typedef AttendSizes<D, G, SIMDGROUPS> N;
  typedef RowLayout<D> Layout;
  for (uint pass = 0; pass * N::step < count; pass += N::batch) {
    float4 value[N::batch][Layout::chunks];
    values.template load_batch<N::batch>(pass, value);
#pragma clang loop unroll(full)
    for (uint u = 0; u < N::batch; ++u) {
      const uint slot = values.slot(pass + u);
      if (slot < count) {
#pragma clang loop unroll(full)
        for (uint g = 0; g < G; ++g) {
#pragma clang loop unroll(full)
          for (uint c = 0; c < Layout::chunks; ++c) {
            sums[g][c] += weights[g * ATTEND_TILE + slot] * value[u][c];
          }
        }
      }
    }
  }
}

// Store the sums of each SIMD group for the query heads [first, first + heads): D floats per head and SIMD group. Ends
// with a barrier.
template <int D, int G, int SIMDGROUPS>
void gather_sums(
    thread float4 (&sums)[G][RowLayout<D>::chunks], uint first, uint heads, threadgroup float4* parts, Place place) {
  typedef RowLayout<D> Layout;
#pragma clang loop unroll(full)
  for (uint g = 0; g < G; ++g) {
    if (g >= first && g < first + heads) {
#pragma clang loop unroll(full)
      for (uint c = 0; c < Layout::chunks; ++c) {
        float4 sum = sums[g][c];
        for (uint offset = Layout::lanes; offset < LANES; offset *= 2) {
          sum += simd_shuffle_xor(sum, ushort(offset));
        }
        const uint chunk = c * Layout::lanes + place.lane;
        if (place.lane < Layout::lanes && chunk < D / 4) {
          parts[((g - first) * SIMDGROUPS + place.simdgroup) * (D / 4) + chunk] = sum;
        }
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// The part of a list that one threadgroup processes, and the threadgroup memory for this work.
template <int D, int G, int SIMDGROUPS>
struct AttendShared {
  threadgroup float4* scratch;  // AttendSizes::scratch floats
  threadgroup int* list;        // ATTEND_TILE
  threadgroup float* factor;    // G
  threadgroup Running* softmax; // G
};

// Attend to the keys indices[0 .. count). The sums of weighted values stay in registers; the running softmax of each
// head is written to shared.softmax. Ends with a barrier.
template <
    int D, int G, int SIMDGROUPS, typename Keys, typename Values, typename Queries, typename Indices, typename Bias,
    typename Mass>
void attend_list(
    Queries queries,  // (G, D)
    Keys keys,        // rows.h
    Values values,
    Indices indices,
    uint count,
    uint length,  // number of keys in use
    float scale,
    Bias bias,
    Mass mass,
    thread float4 (&sums)[G][RowLayout<D>::chunks],
    AttendShared<D, G, SIMDGROUPS> shared,
    Place place) {
  typedef AttendSizes<D, G, SIMDGROUPS> N;
  threadgroup float* q = reinterpret_cast<threadgroup float*>(shared.scratch);
  threadgroup float* scores = q + N::scores;
  for (uint i = place.index(); i < G * D; i += place.threads()) {
    q[i] = float(queries[i]);
  }
  Running running[N::heads];
#pragma clang loop unroll(full)
  for (uint h = 0; h < N::heads; ++h) {
    running[h] = {-INFINITY, 0.0f, 0.0f};
  }
  for (uint first = 0; first < count; first += ATTEND_TILE) {
    const uint tile = min(ATTEND_TILE, count - first);
    if (place.index() < ATTEND_TILE) {
      const int key = place.index() < tile ? indices[first + place.index()] : EMPTY;
      shared.list[place.index()] = key >= 0 && uint(key) < length && !bias.hides(uint(key)) ? key : EMPTY;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    score_tile<D, G, SIMDGROUPS>(TileRows<Keys, D, SIMDGROUPS>{keys, shared.list, place}, tile, shared.scratch, scores);
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
    for (uint h = 0; h < N::heads; ++h) {
      const uint g = h * SIMDGROUPS + place.simdgroup;
      if (g < G) {
        const float factor =
            weigh_tile(scores + g * ATTEND_TILE, shared.list, tile, scale, g, bias, mass, running[h], place);
        if (place.lane == 0) {
          shared.factor[g] = factor;
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma clang loop unroll(full)
    for (uint g = 0; g < G; ++g) {
#pragma clang loop unroll(full)
      for (uint c = 0; c < RowLayout<D>::chunks; ++c) {
        sums[g][c] *= shared.factor[g];
      }
    }
    add_values<D, G, SIMDGROUPS>(TileRows<Values, D, SIMDGROUPS>{values, shared.list, place}, tile, scores, sums);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
#pragma clang loop unroll(full)
  for (uint h = 0; h < N::heads; ++h) {
    const uint g = h * SIMDGROUPS + place.simdgroup;
    if (g < G && place.lane == 0) {
      shared.softmax[g].largest = running[h].largest;
      shared.softmax[g].total = running[h].total;
      shared.softmax[g].mass = running[h].mass;
    }
  }
}

// Attend to a part of a list (sparq.7): normalized output and log-sum-exp; 0 and -inf if the part has no key.
// finish(g, d, y, softmax) converts component d of the output of head g to the stored value.
template <int D, int G, int SIMDGROUPS, typename Out, typename Finish>
void store_sums(
    thread float4 (&sums)[G][RowLayout<D>::chunks],
    AttendShared<D, G, SIMDGROUPS> shared,
    device Out* out,    // (G, D)
    device float* lse,  // (G)
    Finish finish,
    Place place) {
  typedef AttendSizes<D, G, SIMDGROUPS> N;
  const threadgroup float* parts = reinterpret_cast<const threadgroup float*>(shared.scratch);
#pragma clang loop unroll(full)
  for (uint first = 0; first < G; first += N::merged_heads) {
    if (first > 0) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    const uint heads = min(uint(N::merged_heads), G - first);
    gather_sums<D, G, SIMDGROUPS>(sums, first, heads, shared.scratch, place);
    for (uint i = place.index(); i < heads * D; i += place.threads()) {
      const uint g = first + i / D;
      float sum = 0.0f;
      for (uint s = 0; s < SIMDGROUPS; ++s) {
        sum += parts[((i / D) * SIMDGROUPS + s) * D + i % D];
      }
      const float total = shared.softmax[g].total;
      const float result = total == 0.0f ? 0.0f : finish(g, i % D, sum / total, shared.softmax[g].mass);
      out[size_t(first) * D + i] = static_cast<Out>(result);
    }
  }
  if (place.index() < G) {
    const threadgroup Running& softmax = shared.softmax[place.index()];
    lse[place.index()] = softmax.total == 0.0f ? -INFINITY : softmax.largest + log(softmax.total);
  }
}

// Write the results of a part without keys. This reads no input.
template <int D, int G, typename Out>
void store_nothing(device Out* out, device float* lse, Place place) {
  for (uint i = place.index(); i < G * D; i += place.threads()) {
    out[i] = Out(0.0f);
  }
  if (place.index() < G) {
    lse[place.index()] = -INFINITY;
  }
}

// Store the output unchanged ...
struct Attended {
  float operator()(uint, uint, float y, float) const { return y; }
};

// ... or mixed with the mean value (sparq.10), in float32, because bfloat16 rounds an alpha of 0.9996 to 1.
template <int D, typename Mean>
struct Reallocated {
  Mean value_mean;  // (D) of the KV head

  float operator()(uint, uint d, float y, float alpha) const { return alpha * y + (1.0f - alpha) * value_mean[d]; }
};
