// SparQ's second launch: one score per key for the group, and the best keys.
#pragma once

#include "group_scores.h"
#include "sparq_softmax.h"
