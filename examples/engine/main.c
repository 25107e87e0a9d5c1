// continue_in_c MODEL TOKEN…: what main.cpp does, through the interface for C.
#include <gka/engine_c.h>
#include <stdio.h>
#include <stdlib.h>

static int say(const char* sentence) {
  fprintf(stderr, "%s\n", sentence);
  return 1;
}

/// Prints the tokens as they come.
static int follow(void* stream) {
  GkaEvent event = {0};
  for (int state = 0; state >= 0;) {
    state = gka_stream_next(stream, &event, 1000);
    if (state == 1 && event.kind == 2) printf("%lld (%.3f)\n", (long long)event.token, event.logprob);
  }
  return event.finish == 4 ? say(event.message) : 0;
}

int main(int count, char** words) {
  if (count < 3) return say("continue_in_c MODEL TOKEN...");
  int64_t* prompt = calloc((size_t)count, sizeof *prompt);
  if (prompt == NULL) return say("there is no memory left");
  for (int i = 2; i < count; ++i) prompt[i - 2] = atoll(words[i]);

  const GkaOptions options = {0};
  void* engine = gka_engine_load(words[1], &options);
  if (engine == NULL) return say(gka_error());
  const GkaRequest request = {.prompt = prompt,
                              .prompt_tokens = count - 2,
                              .top_p = 1,
                              .repetition_penalty = 1,
                              .max_tokens = 16,
                              .iterations = -1};
  void* stream = gka_engine_submit(engine, &request);
  const int status = stream == NULL ? say(gka_error()) : follow(stream);
  if (stream != NULL) gka_stream_free(stream);
  gka_engine_free(engine);
  free(prompt);
  return status;
}
