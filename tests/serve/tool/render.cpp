// Renders templates for the tests in Python: a line of JSON {"template", "variables", "now"} on the standard input
// gives one on the standard output, {"text", "foreign"} or {"error", "line", "raised"}.
#include <iostream>
#include <string>

#include "serve/jinja/template.h"

using gka::Json;
using namespace gka::serve::jinja;

namespace {

Json render(const Json& job) {
  try {
    Limits limits;
    if (job.contains("now")) limits.now = job["now"].get<std::time_t>();
    if (job.contains("steps")) limits.steps = job["steps"].get<std::int64_t>();
    const auto parsed = Template::parse(job["template"].get<std::string>());
    const auto text = parsed.render(Value::from_json(job["variables"], Origin::request), limits);
    std::string foreign;
    for (std::size_t i = 0; i < text.size(); ++i) foreign += text.foreign(i) ? '1' : '0';
    return {{"text", text.bytes()}, {"foreign", foreign}};
  } catch (const Raised& error) {
    return {{"error", error.what()}, {"line", error.line}, {"raised", true}};
  } catch (const Error& error) {
    return {{"error", error.what()}, {"line", error.line}, {"raised", false}};
  }
}

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) std::cout << render(Json::parse(line)).dump() << std::endl;
}
