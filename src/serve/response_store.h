// Responses that were answered, for GET, DELETE and previous_response_id: in memory, each key's own, so many and so
// many bytes for each; those that were not asked for longest make room.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

#include "serve/problem.h"

namespace gka::serve {

struct KeptResponse {               // as text, whose bytes are known
  std::string id, response, items;  // items: what was answered, a list
  std::size_t bytes() const { return id.size() + response.size() + items.size(); }
};

class ResponseStore {
 public:
  struct Limits {  // for each key
    std::size_t responses = 1000, bytes = std::size_t{64} << 20;
  };
  explicit ResponseStore(Limits limits) : limits_(limits) {}

  bool any() const { return limits_.responses > 0 && limits_.bytes > 0; }
  void keep(std::size_t key, KeptResponse response);
  // These throw Problem where the key has no such response.
  Json response(std::size_t key, const std::string& id);
  Json items(std::size_t key, const std::string& id);
  void remove(std::size_t key, const std::string& id);
  /// Puts the items of kept answers where `input` has references to them.
  void resolve(std::size_t key, Json& input);
  /// What the next answer goes on from: the items and the answer's own, without scores.
  Json conversation(std::size_t key, const std::string& id);

 private:
  using Entry = std::shared_ptr<const KeptResponse>;
  struct Shelf {
    std::list<Entry> entries{};  // the one that was asked for last comes first
    std::unordered_map<std::string, std::list<Entry>::iterator> places{};
    std::size_t bytes = 0;
  };
  /// The entry, which comes first then; null where there is none.
  Entry find(std::size_t key, const std::string& id);
  Entry found(std::size_t key, const std::string& id);
  static void drop(Shelf& shelf, std::list<Entry>::iterator entry);

  Limits limits_;
  std::mutex mutex_;
  std::map<std::size_t, Shelf> shelves_;
};

/// A page of a list of items as GET …/input_items asks for it by order, limit and after. Throws Problem.
struct ItemPage {
  std::string order, limit, after;  // as they stand behind the path; "": not given
};
Json page_of(const Json& items, const ItemPage& page);

}  // namespace gka::serve
