#define GKA_JSON_ONCE
#include "base/json_once.h"
