// The subcommands of `gka`. A new one is a file that defines its declare function, and a line in the table.
#pragma once

#include <array>
#include <exception>
#include <functional>
#include <string>

namespace CLI {
class App;
}

namespace gka::cli {

/// What runs once the command line is read; its result is the exit status.
using Action = std::function<int()>;

struct Command {
  const char* name;
  const char* summary;
  /// Adds the options to `app` and returns the action that reads them. Null in a program that leaves the command to
  /// another (CMakeLists.txt says which has what).
  Action (*declare)(CLI::App& app);
};

/// What an exception says to the user.
std::string sentence_of(const std::exception& error);

// Weak: a program that does not have one knows it by a null.
[[gnu::weak]] Action declare_info(CLI::App& app);
[[gnu::weak]] Action declare_train(CLI::App& app);
[[gnu::weak]] Action declare_runs(CLI::App& app);
[[gnu::weak]] Action declare_plot(CLI::App& app);
[[gnu::weak]] Action declare_bench(CLI::App& app);
[[gnu::weak]] Action declare_score(CLI::App& app);
[[gnu::weak]] Action declare_eval(CLI::App& app);
[[gnu::weak]] Action declare_generate(CLI::App& app);
[[gnu::weak]] Action declare_serve(CLI::App& app);
[[gnu::weak]] Action declare_tokenize(CLI::App& app);
[[gnu::weak]] Action declare_tokenizer(CLI::App& app);
[[gnu::weak]] Action declare_import(CLI::App& app);
[[gnu::weak]] Action declare_export(CLI::App& app);
[[gnu::weak]] Action declare_convert(CLI::App& app);
[[gnu::weak]] Action declare_vision(CLI::App& app);

inline constexpr std::array kCommands{
    Command{"info", "Show what this build contains, what this machine can run, and which kernel a call takes",
            declare_info},
    Command{"score", "Score texts: perplexity and log-probabilities", declare_score},
    Command{"eval", "Evaluate a model on tasks: multiple choice, last words, bits per byte, generated answers",
            declare_eval},
    Command{"generate", "Continue a prompt token by token", declare_generate},
    Command{"serve", "Serve models: OpenAI's API, memories, and a chat page", declare_serve},
    Command{"tokenize", "Turn text or JSON lines into a token file for training", declare_tokenize},
    Command{"tokenizer", "Learn a tokenizer from text, describe one, or try it", declare_tokenizer},
    Command{"import", "Import a model: a Hugging Face folder or a GGUF file", declare_import},
    Command{"convert", "Make a hybrid: turn chosen attention layers into memories that take over their projections",
            declare_convert},
    Command{"export", "Write a model or a run's newest checkpoint as a Hugging Face folder", declare_export},
    Command{"train", "Train a model: start a run, or resume one to the same bits", declare_train},
    Command{"vision", "Train, evaluate and use models for images", declare_vision},
    Command{"runs", "List training runs and their status", declare_runs},
    Command{"plot", "Draw the curves of training runs", declare_plot},
    Command{"bench", "Measure how fast this machine trains and answers: whole models, and one layer of each kind",
            declare_bench},
};

}  // namespace gka::cli
