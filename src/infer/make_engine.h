// An engine for a model that is already in memory: what Engine::load makes, and what tests and other floors call.
#pragma once

#include <memory>
#include <string>

#include "infer/engine.h"
#include "infer/scheduler.h"
#include "models/decoder.h"

namespace gka::infer {

std::unique_ptr<Engine> make_engine(models::Decoder decoder, const EngineOptions& options = {});

/// Whether attention's caches are to be bytes: EngineOptions::kv_cache_dtype. `argument` is what the caller calls it.
bool has_int8_cache(const std::string& argument, const std::string& kv_cache_dtype);

/// How the engine steps. Where its options leave it open: as many sequences and as much context as a part of the memory
/// holds.
SchedulerOptions scheduler_options(const models::Decoder& decoder, const EngineOptions& options);

}  // namespace gka::infer
