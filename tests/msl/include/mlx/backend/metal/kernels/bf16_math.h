#pragma once  // in place of MLX's: msl.h has the overloads for bfloat
