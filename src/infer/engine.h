// The engine's interface is public, for programs that have no server: include/gka/engine.h.
#pragma once

#include "gka/engine.h"  // IWYU pragma: export
