// An engine for a model that is already in memory: what Engine::load makes, and what tests and other floors call.
#pragma once

#include <memory>

#include "infer/engine.h"
#include "models/decoder.h"

namespace gka::infer {

std::unique_ptr<Engine> make_engine(models::Decoder decoder, const EngineOptions& options = {});

}  // namespace gka::infer
