// Includes for SparQ's second launch, which sums the softmax over the group and lists the best keys.
#pragma once

#include "group_scores.h"
#include "sparq_softmax.h"
