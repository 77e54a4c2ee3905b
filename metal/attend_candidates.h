// Select and attend in one launch.
#pragma once

#include "attend.h"
#include "top_k_select.h"
