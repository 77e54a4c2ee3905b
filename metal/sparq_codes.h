// Constants of 8-bit logits, shared by SparQ's first two kernels.
#pragma once

#include "score_tile.h"

// An 8-bit logit is the distance from the largest logit of the tile, in sixteenths of a nat.
constant constexpr uint NO_WEIGHT = 254;   // -inf, or too far below the largest logit
constant constexpr uint NO_SOFTMAX = 255;  // NaN or +inf: see merge_statistics
