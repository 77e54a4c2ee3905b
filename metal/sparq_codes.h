// Quantized scoring keys (int4) and 8-bit scores, shared by SparQ's first two kernels.
#pragma once

#include "score_tile.h"

// An 8-bit logit counts sixteenths of a nat below the largest logit of its tile.
constant constexpr uint NO_WEIGHT = 254;   // -inf, or outside the range
constant constexpr uint NO_SOFTMAX = 255;  // NaN or +inf: see merge_statistics
