// What torch's exceptions say: their what() goes on with a stack trace.
#include <c10/util/Exception.h>

#include "cli/commands.h"

std::string gka::cli::sentence_of(const std::exception& error) {
  const auto* torch = dynamic_cast<const c10::Error*>(&error);
  return torch ? torch->what_without_backtrace() : error.what();
}
