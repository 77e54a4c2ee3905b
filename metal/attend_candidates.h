// Includes for the kernels that select keys and attend to them in one launch.
#pragma once

#include "attend.h"
#include "group_scores.h"
