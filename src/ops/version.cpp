// A file of its own: the server states the version too, and under the sanitizers it is built without torch.
#include "gka/info.h"

const char* gka::version() { return GKA_VERSION; }
