// continue MODEL TOKEN…: the likeliest sixteen tokens after a prompt of token numbers, as they come.
#include <gka/engine.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <future>

int main(int count, char** words) {
  if (count < 3) {
    std::fputs("continue MODEL TOKEN...\n", stderr);
    return 2;
  }
  try {
    const auto engine = gka::Engine::load(words[1]);
    gka::Request request{.max_tokens = 16};
    request.sampling.temperature = 0;
    for (int i = 2; i < count; ++i) request.prompt.push_back(std::atoll(words[i]));

    std::promise<void> over;
    gka::Sink sink;
    sink.on_token = [](const gka::TokenEvent& event) {
      std::printf("%lld (%.3f)\n", static_cast<long long>(event.token), event.logprob);
    };
    sink.on_end = [&](gka::Finish, const gka::Usage&, const std::string&) { over.set_value(); };
    engine->submit(request, sink);
    over.get_future().wait();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
