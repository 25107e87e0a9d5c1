#include "serve/response_store.h"

#include <algorithm>
#include <charconv>
#include <iterator>

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

/// An item that is named by its id alone.
bool refers(const Json& item) {
  if (!item.is_object()) return false;
  const auto type = item.value("type", Json());
  return type == "item_reference" || (type.is_null() && item.contains("id") && !item.contains("role"));
}

}  // namespace

void ResponseStore::drop(Shelf& shelf, std::list<Entry>::iterator entry) {
  shelf.bytes -= entry->bytes();
  shelf.places.erase(entry->id);
  shelf.entries.erase(entry);
}

void ResponseStore::keep(std::size_t key, const Json& response, const Json& items) {
  Entry entry{.id = response["id"].get<std::string>(), .response = dumped(response), .items = dumped(items)};
  const auto bytes = entry.bytes();
  if (!any() || bytes > limits_.bytes) return;
  const std::lock_guard lock(mutex_);
  auto& shelf = shelves_[key];
  while (shelf.entries.size() >= limits_.responses || shelf.bytes + bytes > limits_.bytes) {
    drop(shelf, std::prev(shelf.entries.end()));
  }
  shelf.entries.push_front(std::move(entry));
  shelf.places[shelf.entries.front().id] = shelf.entries.begin();
  shelf.bytes += bytes;
}

bool ResponseStore::find(std::size_t key, const std::string& id, Entry& entry) {
  const std::lock_guard lock(mutex_);
  auto& shelf = shelves_[key];
  const auto place = shelf.places.find(id);
  if (place == shelf.places.end()) return false;
  shelf.entries.splice(shelf.entries.begin(), shelf.entries, place->second);
  entry = shelf.entries.front();
  return true;
}

ResponseStore::Entry ResponseStore::found(std::size_t key, const std::string& id) {
  Entry entry;
  if (!find(key, id, entry)) throw unknown(id);
  return entry;
}

Json ResponseStore::response(std::size_t key, const std::string& id) { return Json::parse(found(key, id).response); }

Json ResponseStore::items(std::size_t key, const std::string& id) { return Json::parse(found(key, id).items); }

void ResponseStore::remove(std::size_t key, const std::string& id) {
  const std::lock_guard lock(mutex_);
  auto& shelf = shelves_[key];
  const auto place = shelf.places.find(id);
  if (place == shelf.places.end()) throw unknown(id);
  drop(shelf, place->second);
}

Json ResponseStore::conversation(std::size_t key, const std::string& id) {
  Entry entry;
  if (!find(key, id, entry)) {  // 400, as OpenAI has it: the path is right, a field of the body is not
    throw bad_request("there is no response '" + id.substr(0, 100) +
                          "' kept here for this key to go on from (store: false, or it had to make room); send the "
                          "conversation's items as input",
                      "previous_response_id", "previous_response_not_found");
  }
  auto items = Json::parse(entry.items);
  const auto response = Json::parse(entry.response);
  for (const auto& item : response["output"]) items.push_back(item);
  return items;
}

void ResponseStore::resolve(std::size_t key, Json& input) {
  for (std::size_t i = 0; input.is_array() && i < input.size(); ++i) {
    if (!refers(input[i])) continue;
    const auto id = input[i].value("id", Json());
    const auto where = "input[" + std::to_string(i) + "]";
    if (!id.is_string()) throw bad_request("'" + where + ".id' takes a text", where + ".id");
    const auto& name = id.get_ref<const std::string&>();
    Entry entry;
    const auto response = find(key, response_of_item(name), entry) ? Json::parse(entry.response) : Json::object();
    const auto output = response.value("output", Json::array());
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
