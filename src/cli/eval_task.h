// Task files of `gka eval`: JSON lines, the first about the task, then one per item. docs/evaluation.md has the format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gka::cli {

/// What an item asks: the likeliest ending of several; one ending, which should also be what the model says by itself;
/// how likely a whole text is; an answer that has one of several texts in it, or is one of them.
enum class TaskKind : std::uint8_t { choice, last_word, text, contains, exact };
inline constexpr std::size_t kTaskKinds = 5;

struct TaskItem {
  std::vector<std::string> contexts{};  // one, or one for each ending; none for a text
  std::vector<std::string> endings{};   // choices; the target; the text; or answers
  std::int64_t answer = 0;              // the right choice

  const std::string& context(std::size_t ending) const { return contexts.size() == 1 ? contexts[0] : contexts[ending]; }
};

struct Task {
  std::string path{}, name{};
  TaskKind kind = TaskKind::choice;
  std::string delimiter = " ";                           // between context and ending
  std::vector<std::string> stop{};                       // what ends a generated answer
  std::int64_t max_tokens = 32;                          // of a generated answer
  bool ignore_case = false, ignore_punctuation = false;  // of an exact answer
  std::vector<TaskItem> items{};

  bool generates() const { return kind == TaskKind::contains || kind == TaskKind::exact; }
};

std::string_view name_of(TaskKind kind);

/// The first `limit` items (0: all). Throws one sentence with the line that is wrong.
Task read_task(const std::string& path, std::int64_t limit);

}  // namespace gka::cli
