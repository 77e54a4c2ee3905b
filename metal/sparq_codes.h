// Keys in few bits, and their scores in 8: what both of SparQ's first two kernels know of them.
#pragma once

#include "score_tile.h"

// A logit as sixteenths of a nat below the largest of its tile.
constant constexpr uint NO_WEIGHT = 254;   // -inf, or too far below
constant constexpr uint NO_SOFTMAX = 255;  // NaN or +inf: see merge_statistics
