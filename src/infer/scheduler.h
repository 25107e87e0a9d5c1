// What the engine's thread does: each step takes every running sequence one token further, and then spends what is left
// of a budget of tokens on prompts.
//
// Prompts are read in pieces that end on a grid of 64 tokens counted from the start of the sequence, each piece a call
// of its own: so the numbers that come out do not depend on what else is read, nor on where a snapshot let the reading
// begin.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "infer/pool.h"
#include "infer/sequence.h"
#include "infer/snapshots.h"
#include "infer/stepper.h"

namespace gka::infer {

struct SchedulerOptions {
  Pool::Limits pool;
  std::int64_t step_tokens = 0;
  std::int64_t snapshot_bytes = 0;
  std::int64_t piece_tokens = kGrid;  // a prompt is read in pieces of at most so many,
  std::int64_t alone_tokens = kGrid;  // and of so many while nobody waits for a next token
  bool deterministic = false;         // sequences step one by one
  bool record = false;
  bool ahead = false;  // a next step is begun before the tokens of the last are looked at
};

class Scheduler {
 public:
  Scheduler(const models::Decoder& decoder, const SchedulerOptions& options);
  ~Scheduler();

  void add(std::unique_ptr<Sequence> sequence) { waiting_.push_back(std::move(sequence)); }
  void cancel(RequestId id);
  /// Ends all of them.
  void end_all(Finish finish, const std::string& error);
  /// One step; nothing where nothing is to do.
  void step();

  bool idle() const { return waiting_.empty() && reading_.empty() && running_.empty(); }
  std::int64_t waiting() const { return static_cast<std::int64_t>(waiting_.size()); }
  /// What is counted here; `waiting` is that of this scheduler alone.
  Stats stats() const;
  Pool& pool() { return pool_; }
  Snapshots& snapshots() { return snapshots_; }
  const models::Decoder& decoder() const { return decoder_; }
  /// What a sequence whose prompt is being read knows now.
  static Snapshot snapshot_of(const Sequence& sequence);
  /// Pages that a sequence which goes on from `hit` needs of its own at any one time.
  static std::int64_t most_pages(const Sequence& sequence, const Snapshots::Hit& hit);

 private:
  using Sequences = std::list<std::shared_ptr<Sequence>>;
  using Group = std::vector<std::shared_ptr<Sequence>>;
  /// A step that was begun, and whose tokens nobody has looked at.
  struct Flight {
    Group group;
    Draws draws;
  };

  void admit();
  bool place(Sequence& sequence);
  std::optional<Pages> pages_of_its_own(std::int64_t count);
  /// Lets attention forget what the cuts say that were reached.
  void cut(Sequence& sequence);
  void decode();
  void decode_group(const Group& group);
  std::vector<Group> groups() const;
  Batch batch_of(const Group& group, std::int64_t ahead) const;
  /// Begins a step: with the last token of each, or with the one that is drawn (`before`) and not here.
  std::optional<Flight> take_off(const Group& group, const Draws* before = nullptr);
  bool may_go_on(const Flight& flight) const;
  void land(Flight flight);
  void fail(const Group& group, const std::exception& error);
  std::vector<Row> rows_of(const Group& group, std::int64_t ahead);
  void read_prompts();
  Sequences::iterator next_to_read();
  void begin(Sequence& sequence);
  Snapshots::Hit look_up(Sequence& sequence);
  void go_on_from(Sequence& sequence, Snapshots::Hit hit);
  std::int64_t read_piece(Sequence& sequence, std::int64_t budget);
  std::int64_t piece_end(const Sequence& sequence, std::int64_t budget) const;
  void score_piece(Sequence& sequence, const at::Tensor& hidden, const std::vector<at::Tensor>& certainty);
  void prompt_is_read(const std::shared_ptr<Sequence>& read);
  void deliver(Sequence& sequence, Drawn drawn);
  void finish(Sequence& sequence, Finish finish, const std::string& error);
  void sweep(Sequences& sequences);
  std::string why_not_more(const Sequence& sequence, const Snapshots::Hit& hit) const;

  const models::Decoder& decoder_;
  SchedulerOptions options_;
  Pool pool_;
  Snapshots snapshots_;
  Stepper stepper_;
  bool sketched_;                          // GKA layers whose steps take one number of iterations for all
  Sequences waiting_, reading_, running_;  // a sequence whose id is 0 is over
  std::optional<Flight> flight_;           // of all that run
  std::int64_t turn_ = 0;
  Stats stats_{};
};

}  // namespace gka::infer
