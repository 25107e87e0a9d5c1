// An engine for a model that is already in memory: what Engine::load makes, and what tests and other floors call.
#pragma once

#include <memory>

#include "infer/engine.h"
#include "infer/scheduler.h"
#include "models/decoder.h"

namespace gka::infer {

std::unique_ptr<Engine> make_engine(models::Decoder decoder, const EngineOptions& options = {});

/// How the engine steps. Where its options leave it open: as many sequences and as much context as a part of the memory
/// holds.
SchedulerOptions scheduler_options(const models::Decoder& decoder, const EngineOptions& options);

}  // namespace gka::infer
