// Which instruction set the kernels use.
#pragma once

#include "kernels.h"

namespace sparse {

// The fastest kernels that this machine runs and that are not above the limit.
const Kernels& kernels();

// Uses the kernels of that name, or the fastest for null; false where this machine has none of that name.
bool limit_kernels(const char* name);

}  // namespace sparse
