#include "cli/eval_task.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>

#include "base/fields.h"
#include "base/files.h"

namespace gka::cli {
namespace {

constexpr std::array<std::pair<std::string_view, TaskKind>, kTaskKinds> kKinds{{{"choice", TaskKind::choice},
                                                                                {"last_word", TaskKind::last_word},
                                                                                {"text", TaskKind::text},
                                                                                {"contains", TaskKind::contains},
                                                                                {"exact", TaskKind::exact}}};

std::string list_kinds() {
  std::string text;
  for (const auto& [name, kind] : kKinds) text += (text.empty() ? "" : ", ") + std::string(name);
  return text;
}

TaskKind parse_kind(const std::string& name, const std::string& where) {
  for (const auto& [known, kind] : kKinds) {
    if (name == known) return kind;
  }
  throw std::runtime_error("'kind' of " + where + " takes one of " + list_kinds() + ", and is '" + name + "'");
}

void refuse(const std::string& /*key*/, const std::string& complaint) { throw std::runtime_error(complaint); }

/// The first line of a file.
Task read_header(const Json& json, const std::string& path, const std::string& where) {
  Task task{.path = path};
  std::string kind, source, licence;
  read_fields(json, where, refuse, [&](auto&& visit) {
    visit("task", task.name);
    visit("kind", kind);
    visit("delimiter", task.delimiter);
    visit("stop", task.stop);
    visit("max_tokens", task.max_tokens);
    visit("ignore_case", task.ignore_case);
    visit("ignore_punctuation", task.ignore_punctuation);
    visit("source", source);
    visit("licence", licence);
  });
  if (task.name.empty()) {
    throw std::runtime_error(where +
                             " takes the task's name under \"task\": the first line of a task file is about it");
  }
  task.kind = parse_kind(kind, where);
  if (task.max_tokens < 1) {
    throw std::runtime_error("'max_tokens' of " + where + " takes at least 1, and is " +
                             std::to_string(task.max_tokens));
  }
  if (std::ranges::find(task.stop, "") != task.stop.end()) {
    throw std::runtime_error("'stop' of " + where + " takes texts that are not empty");
  }
  return task;
}

void need(bool fine, const std::string& where, const char* what) {
  if (!fine) throw std::runtime_error(where + " takes " + what);
}

TaskItem read_choice(const Json& json, const std::string& where) {
  TaskItem item;
  std::string context;
  item.answer = -1;
  read_fields(json, where, refuse, [&](auto&& visit) {
    visit("context", context);
    visit("contexts", item.contexts);
    visit("choices", item.endings);
    visit("answer", item.answer);
  });
  need(context.empty() || item.contexts.empty(), where, "a \"context\" or \"contexts\", as many as choices, not both");
  if (item.contexts.empty()) item.contexts = {context};
  const auto count = std::ssize(item.endings);
  need(count >= 2, where, "at least two choices");
  need(item.answer >= 0 && item.answer < count, where, "the number of the right choice, from 0, under \"answer\"");
  need(item.contexts.size() == 1 || std::ssize(item.contexts) == count, where, "a context, or as many as choices");
  const bool spoken = std::ranges::none_of(item.endings, [](const auto& choice) { return choice.empty(); });
  need(spoken, where, "choices that are not empty");
  return item;
}

TaskItem read_last_word(const Json& json, const std::string& where) {
  TaskItem item{.contexts = {""}, .endings = {""}};
  read_fields(json, where, refuse, [&](auto&& visit) {
    visit("context", item.contexts[0]);
    visit("target", item.endings[0]);
  });
  need(!item.endings[0].empty(), where, "a target that is not empty");
  return item;
}

TaskItem read_text_item(const Json& json, const std::string& where) {
  TaskItem item{.endings = {""}};
  read_fields(json, where, refuse, [&](auto&& visit) { visit("text", item.endings[0]); });
  need(!item.endings[0].empty(), where, "a text that is not empty");
  return item;
}

TaskItem read_answers(const Json& json, const std::string& where) {
  TaskItem item{.contexts = {""}};
  read_fields(json, where, refuse, [&](auto&& visit) {
    visit("context", item.contexts[0]);
    visit("answers", item.endings);
  });
  need(!item.contexts[0].empty(), where, "a context that is not empty");
  need(!item.endings.empty(), where, "at least one answer");
  return item;
}

TaskItem read_contained(const Json& json, const std::string& where) {
  auto item = read_answers(json, where);
  const bool spoken = std::ranges::none_of(item.endings, [](const auto& answer) { return answer.empty(); });
  need(spoken, where, "answers that are not empty: every text contains those");
  return item;
}

TaskItem read_item(TaskKind kind, const Json& json, const std::string& where) {
  using Read = TaskItem (*)(const Json&, const std::string&);
  constexpr std::array<Read, kTaskKinds> kReads{read_choice, read_last_word, read_text_item, read_contained,
                                                read_answers};
  return kReads[static_cast<std::size_t>(kind)](json, where);
}

}  // namespace

std::string_view name_of(TaskKind kind) {
  return std::ranges::find(kKinds, kind, [](const auto& entry) { return entry.second; })->first;
}

Task read_task(const std::string& path, std::int64_t limit) {
  const MappedFile file(path);
  const auto text = file.text();
  Task task;
  std::int64_t number = 0;
  for (std::size_t start = 0; start < text.size() && (limit == 0 || std::ssize(task.items) < limit);) {
    const auto end = std::min(text.find('\n', start), text.size());
    const auto line = text.substr(start, end - start);
    const auto where = "line " + std::to_string(++number) + " of " + path;
    start = end + 1;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const auto json = parse_json(line, where);
    if (task.name.empty()) {
      task = read_header(json, path, where);
    } else {
      task.items.push_back(read_item(task.kind, json, where));
    }
  }
  if (task.items.empty()) throw std::runtime_error(path + " has no items in it");
  return task;
}

}  // namespace gka::cli
