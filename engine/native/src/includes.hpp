// What the decoder needs of the standard library. Before any pragma: code shared between
// translation units must run on every processor.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "decoder.hpp"
#include "numbers.hpp"
#include "team.hpp"
