#include "serve/response_store.h"

#include <algorithm>
#include <charconv>
#include <iterator>
#include <set>
#include <utility>

#include "serve/ids.h"

namespace gka::serve {
namespace {

Problem unknown(const std::string& id) {
  return Problem(404, "there is no response '" + id.substr(0, 100) + "' kept here for this key", "response_id",
                 "response_not_found");
}

std::size_t read_limit(const std::string& text) {
  constexpr std::size_t kDefault = 20, kMost = 100;
  if (text.empty()) return kDefault;
  std::size_t limit = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), limit);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size() || limit < 1 || limit > kMost) {
    throw bad_request("'limit' takes a whole number from 1 to 100, and is " + text.substr(0, 60), "limit");
  }
  return limit;
}

/// The items of an answer, without the scores of its tokens, which nobody reads when it goes on.
Json answer_of(const KeptResponse& kept) {
  auto items = Json::parse(kept.response).value("output", Json::array());
  for (auto& item : items) {
    if (!item.contains("content")) continue;
    for (auto& part : item["content"]) part.erase("logprobs");
  }
  return items;
}

/// An item that is named by its id alone.
bool refers(const Json& item) {
  if (!item.is_object()) return false;
  const auto type = item.value("type", Json());
  return type == "item_reference" || (type.is_null() && item.contains("id") && !item.contains("role"));
}

}  // namespace

void ResponseStore::drop(Shelf& shelf, std::list<Entry>::iterator entry) {
  shelf.bytes -= (*entry)->bytes();
  shelf.places.erase((*entry)->id);
  shelf.entries.erase(entry);
}

void ResponseStore::keep(std::size_t key, KeptResponse response) {
  const auto bytes = response.bytes();
  if (!any() || bytes > limits_.bytes) return;
  const std::lock_guard lock(mutex_);
  auto& shelf = shelves_[key];
  while (shelf.entries.size() >= limits_.responses || shelf.bytes + bytes > limits_.bytes) {
    drop(shelf, std::prev(shelf.entries.end()));
  }
  shelf.entries.push_front(std::make_shared<const KeptResponse>(std::move(response)));
  shelf.places[shelf.entries.front()->id] = shelf.entries.begin();
  shelf.bytes += bytes;
}

ResponseStore::Entry ResponseStore::find(std::size_t key, const std::string& id) {
  const std::lock_guard lock(mutex_);
  auto& shelf = shelves_[key];
  const auto place = shelf.places.find(id);
  if (place == shelf.places.end()) return nullptr;
  shelf.entries.splice(shelf.entries.begin(), shelf.entries, place->second);
  return shelf.entries.front();
}

ResponseStore::Entry ResponseStore::found(std::size_t key, const std::string& id) {
  auto entry = find(key, id);
  if (!entry) throw unknown(id);
  return entry;
}

Json ResponseStore::response(std::size_t key, const std::string& id) { return Json::parse(found(key, id)->response); }

Json ResponseStore::items(std::size_t key, const std::string& id) { return Json::parse(found(key, id)->items); }

void ResponseStore::remove(std::size_t key, const std::string& id) {
  const std::lock_guard lock(mutex_);
  auto& shelf = shelves_[key];
  const auto place = shelf.places.find(id);
  if (place == shelf.places.end()) throw unknown(id);
  drop(shelf, place->second);
}

Json ResponseStore::conversation(std::size_t key, const std::string& id) {
  const auto entry = find(key, id);
  if (!entry) {  // 400, as OpenAI has it: the path is right, a field of the body is not
    throw bad_request("there is no response '" + id.substr(0, 100) +
                          "' kept here for this key to go on from (store: false, or it had to make room); send the "
                          "conversation's items as input",
                      "previous_response_id", "previous_response_not_found");
  }
  auto items = Json::parse(entry->items);
  for (auto& item : answer_of(*entry)) items.push_back(std::move(item));
  return items;
}

void ResponseStore::resolve(std::size_t key, Json& input) {
  std::map<std::string, Json> answers;  // each is read once, and each of its items named once
  std::set<std::string> named;
  for (std::size_t i = 0; input.is_array() && i < input.size(); ++i) {
    if (!refers(input[i])) continue;
    const auto id = input[i].value("id", Json());
    const auto where = "input[" + std::to_string(i) + "]";
    if (!id.is_string()) throw bad_request("'" + where + ".id' takes a text", where + ".id");
    const auto& name = id.get_ref<const std::string&>();
    if (!named.insert(name).second) {
      throw bad_request("'" + where + "' refers to the item '" + name.substr(0, 100) + "' a second time", where);
    }
    const auto [answer, first] = answers.try_emplace(response_of_item(name), Json::array());
    const auto entry = first ? find(key, answer->first) : nullptr;
    if (entry) answer->second = answer_of(*entry);
    const auto& output = answer->second;
    const auto item = std::ranges::find_if(output, [&](const Json& one) { return one["id"] == id; });
    if (item == output.end()) {
      throw bad_request("'" + where + "' refers to an item '" + name.substr(0, 100) +
                            "', and no answer that is kept here for this key has it; send the item itself",
                        where, "item_not_found");
    }
    input[i] = *item;
  }
}

Json page_of(const Json& items, const ItemPage& page) {
  if (!page.order.empty() && page.order != "asc" && page.order != "desc") {
    throw bad_request("'order' takes asc or desc, and is " + page.order.substr(0, 60), "order");
  }
  std::vector<Json> listed(items.begin(), items.end());
  if (page.order != "asc") std::ranges::reverse(listed);
  auto from = listed.begin();
  if (!page.after.empty()) {
    from = std::ranges::find_if(listed, [&](const Json& item) { return item["id"] == page.after; });
    if (from == listed.end()) {
      throw bad_request("'after' takes the id of an item of this response, and is " + page.after.substr(0, 60),
                        "after");
    }
    ++from;
  }
  const auto count = std::min(read_limit(page.limit), static_cast<std::size_t>(listed.end() - from));
  const auto to = from + static_cast<std::ptrdiff_t>(count);
  const Json data(std::vector<Json>(from, to));
  return {{"object", "list"},
          {"data", data},
          {"first_id", data.empty() ? Json("") : data.front()["id"]},
          {"last_id", data.empty() ? Json("") : data.back()["id"]},
          {"has_more", to != listed.end()}};
}

}  // namespace gka::serve
