// SparQ's second step: one score per key of the group, and the best keys.
#pragma once

#include "group_scores.h"
#include "sparq_softmax.h"
