#include "infer/scheduler.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "layers/functions.h"

namespace gka::infer {
namespace {

/// Every so many pieces one goes to the prompt that waits longest; the others to whichever is soonest done.
constexpr std::int64_t kTurns = 4;

std::string in_mib(std::int64_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

/// The sentence of an error: torch's own come with a trace.
std::string sentence(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
}

void set_certainty(TokenEvent& event, std::vector<float> layers) {
  if (layers.empty()) return;
  event.certainty = std::accumulate(layers.begin(), layers.end(), 0.0F) / static_cast<float>(layers.size());
  event.layer_certainty = std::move(layers);
}

/// Column i of [layers, tokens].
std::vector<float> column(const at::Tensor& values, std::int64_t i) {
  std::vector<float> column;
  for (std::int64_t layer = 0; layer < values.size(0); ++layer) {
    column.push_back(values.const_data_ptr<float>()[layer * values.size(1) + i]);
  }
  return column;
}

at::Tensor on_host(const std::vector<at::Tensor>& layers) {
  std::vector<at::Tensor> flat;
  for (const auto& layer : layers) flat.push_back(layer.flatten());
  return at::stack(flat).to(at::kCPU, at::kFloat).contiguous();
}

}  // namespace

Scheduler::Scheduler(const models::Decoder& decoder, const SchedulerOptions& options)
    : decoder_(decoder),
      options_(options),
      pool_(decoder, options.pool),
      snapshots_(pool_, options.snapshot_bytes),
      stepper_(decoder, pool_, options.record),
      sketched_(decoder.config().mixer.gka.sketch_dim > 0) {}

Scheduler::~Scheduler() = default;

void Scheduler::step() {
  const at::NoGradGuard no_gradient;
  admit();
  if (reading_.empty() && running_.empty()) return;
  ++stats_.steps;
  decode();
  read_prompts();
}

void Scheduler::cancel(RequestId id) {
  for (auto* sequences : {&waiting_, &reading_, &running_}) {
    for (const auto& sequence : *sequences) {
      if (sequence->id == id) finish(*sequence, Finish::cancelled, "");
    }
    sweep(*sequences);
  }
}

void Scheduler::end_all(Finish how, const std::string& error) {
  for (auto* sequences : {&waiting_, &reading_, &running_}) {
    for (const auto& sequence : *sequences) finish(*sequence, how, error);
    sweep(*sequences);
  }
}

Stats Scheduler::stats() const {
  auto stats = stats_;
  stats.running = static_cast<std::int64_t>(running_.size() + reading_.size());
  stats.waiting = waiting();
  stats.slots = pool_.limits().slots;
  stats.slots_in_use = pool_.slots_in_use();
  stats.cache_bytes = pool_.limits().pages * pool_.page_bytes();
  stats.cache_bytes_in_use = pool_.pages_in_use() * pool_.page_bytes();
  stats.snapshot_bytes = snapshots_.bytes();
  stats.snapshots = snapshots_.count();
  return stats;
}

/// In the order they came: a large request is not overtaken until it starves. One that finds no room while nobody else
/// runs would wait for ever: memories hold it.
void Scheduler::admit() {
  while (!waiting_.empty()) {
    if (place(*waiting_.front())) {
      reading_.splice(reading_.end(), waiting_, waiting_.begin());
    } else if (waiting_.front()->id == 0) {
      waiting_.pop_front();
    } else if (reading_.empty() && running_.empty()) {
      auto& sequence = *waiting_.front();
      const auto tokens = sequence.prompt + sequence.request.max_tokens;
      const auto pages = most_pages(sequence, sequence.cuts.empty() ? Snapshots::Hit{} : look_up(sequence));
      finish(sequence, Finish::error,
             "a sequence of " + std::to_string(tokens) + " tokens needs " + std::to_string(pages * pool_.page_bytes()) +
                 " bytes of cache, and memories leave " + std::to_string(pool_.pages_free() * pool_.page_bytes()));
      waiting_.pop_front();
    } else {
      return;
    }
  }
}

/// Where attention forgets a part, the room a sequence needs depends on what is remembered: so that is looked up, and
/// held, before the room is taken. Others take room for all and look as late as can be (`begin`).
bool Scheduler::place(Sequence& sequence) {
  const bool forgets = !sequence.cuts.empty();
  const auto slot = pool_.take_slot();
  if (!slot) return false;
  Snapshots::Hit hit;
  try {
    if (forgets) hit = look_up(sequence);
  } catch (const std::exception& error) {  // a file that cannot be read
    pool_.give_slot(*slot);
    finish(sequence, Finish::error, sentence(error));
    return false;
  }
  for (const auto page : hit.pages) pool_.share(page);
  auto pages = pages_of_its_own(most_pages(sequence, hit));
  if (!pages) {
    for (const auto page : hit.pages) pool_.release(page);
    pool_.give_slot(*slot);
    return false;
  }
  sequence.slot = *slot;
  sequence.pages = hit.pages;
  sequence.pages.insert(sequence.pages.end(), pages->begin(), pages->end());
  if (forgets) go_on_from(sequence, std::move(hit));
  return true;
}

std::optional<Pages> Scheduler::pages_of_its_own(std::int64_t count) {
  auto pages = pool_.take_pages(count);
  if (!pages && snapshots_.free_pages(count)) pages = pool_.take_pages(count);
  return pages;
}

std::int64_t Scheduler::most_pages(const Sequence& sequence, const Snapshots::Hit& hit) {
  std::int64_t most = 0, dropped = hit.dropped;
  const auto reach = [&](std::int64_t end) {
    most = std::max(most, pages_for(end) - std::max(dropped, hit.tokens) / kGrid);
  };
  for (const auto& cut : sequence.cuts) {
    if (cut.at < hit.tokens) continue;
    reach(cut.at);
    dropped = cut.from;
  }
  reach(sequence.prompt + sequence.request.max_tokens);
  return most;
}

/// What the next stretch needs more than this one lies among the pages that are given back here.
void Scheduler::cut(Sequence& sequence) {
  const auto before = sequence.dropped;
  for (const auto& cut : sequence.cuts) {
    if (cut.at <= sequence.read) sequence.dropped = std::max(sequence.dropped, cut.from);
  }
  if (sequence.dropped == before) return;
  const auto gone = (sequence.dropped - before) / kGrid;
  for (std::int64_t i = 0; i < gone; ++i) pool_.release(sequence.pages[static_cast<std::size_t>(i)]);
  sequence.pages.erase(sequence.pages.begin(), sequence.pages.begin() + gone);
  const auto held = pages_for(sequence.read) - sequence.dropped / kGrid;
  Snapshots::Hit here;
  here.tokens = sequence.read;
  here.dropped = sequence.dropped;
  const auto wanted = held + most_pages(sequence, here);
  for (; std::ssize(sequence.pages) > wanted; sequence.pages.pop_back()) pool_.release(sequence.pages.back());
  if (std::ssize(sequence.pages) == wanted) return;
  const auto more = pool_.take_pages(wanted - std::ssize(sequence.pages));
  if (!more) throw std::logic_error("a sequence that let pages go finds fewer of them");
  sequence.pages.insert(sequence.pages.end(), more->begin(), more->end());
}

/// The device need not wait for the host to look at its tokens: where the next step is the same sequences' again, and
/// none of them can know of itself that it ends, it begins with them where they are. A sequence that turns out to have
/// ended has taken part in one step for nothing, in a slot that is its own until then.
void Scheduler::decode() {
  auto flight = std::exchange(flight_, {});
  if (!flight) {
    const auto all = groups();
    if (all.size() != 1 || !options_.ahead) {
      for (const auto& group : all) decode_group(group);
      return sweep(running_);
    }
    flight = take_off(all.front());
  }
  if (flight) {
    if (may_go_on(*flight)) flight_ = take_off(flight->group, &flight->draws);
    land(*std::move(flight));
  }
  sweep(running_);
}

void Scheduler::decode_group(const Group& group) {
  if (auto flight = take_off(group)) land(*std::move(flight));
}

/// Sequences of one group go through the model together. Each for itself where bits matter more than speed; apart
/// where the model takes one number of solver steps for a whole call.
std::vector<Scheduler::Group> Scheduler::groups() const {
  std::map<std::pair<std::int64_t, bool>, Group> groups;
  std::int64_t alone = 0;
  for (const auto& sequence : running_) {
    const bool certainty = sequence->request.certainty;
    const auto key = options_.deterministic ? alone++ : certainty || sketched_ ? sequence->iterations : 0;
    groups[{key, certainty}].push_back(sequence);
  }
  std::vector<Group> all;
  for (auto& [key, group] : groups) all.push_back(std::move(group));
  return all;
}

/// `ahead`: tokens of each that are drawn and not here.
Batch Scheduler::batch_of(const Group& group, std::int64_t ahead) const {
  Batch batch{.certainty = group.front()->request.certainty};
  bool own_iterations = false;
  for (const auto& sequence : group) {
    batch.ids.push_back(sequence->tokens.back());
    batch.slots.push_back(sequence->slot);
    batch.positions.push_back(std::ssize(sequence->tokens) - 1 + ahead);
    batch.places.push_back(batch.positions.back() - sequence->dropped);
    batch.pages.push_back(&sequence->pages);
    batch.iterations.push_back(sequence->iterations);
    own_iterations |= sequence->iterations != decoder_.config().mixer.gka.num_iter;
  }
  if (batch.places == batch.positions) batch.places.clear();
  if (!own_iterations) batch.iterations.clear();
  batch.one_iterations = batch.certainty || sketched_;
  return batch;
}

std::optional<Scheduler::Flight> Scheduler::take_off(const Group& group, const Draws* before) {
  const std::int64_t ahead = before != nullptr ? 1 : 0;
  try {
    const auto stepped = stepper_.step(batch_of(group, ahead), before != nullptr ? before->tokens() : at::Tensor());
    if (!stepped.certainty.empty()) {
      const auto values = on_host(stepped.certainty);
      for (std::size_t i = 0; i < group.size(); ++i) {
        group[i]->certainty = column(values, static_cast<std::int64_t>(i));
      }
    }
    return Flight{group, begin_draw(stepped.logits, rows_of(group, ahead))};
  } catch (const std::exception& error) {
    fail(group, error);
    return {};
  }
}

bool Scheduler::may_go_on(const Flight& flight) const {
  if (!options_.ahead || !waiting_.empty() || !reading_.empty() || flight.group.size() != running_.size()) return false;
  return std::ranges::all_of(flight.group, [](const auto& sequence) {
    const auto& request = sequence->request;
    const bool ends = sequence->generated() + 1 >= request.max_tokens;
    return sequence->id != 0 && !ends && !request.certainty && !looks_back(request);
  });
}

void Scheduler::land(Flight flight) {
  std::vector<Drawn> drawn;
  try {
    drawn = flight.draws.wait();
  } catch (const std::exception& error) {
    fail(flight.group, error);
  }
  for (std::size_t i = 0; i < drawn.size(); ++i) {
    auto& sequence = *flight.group[i];
    try {
      if (sequence.id != 0) deliver(sequence, std::move(drawn[i]));
    } catch (const std::exception& error) {  // whoever asked
      finish(sequence, Finish::error, sentence(error));
    }
  }
}

void Scheduler::fail(const Group& group, const std::exception& error) {
  for (const auto& sequence : group) finish(*sequence, Finish::error, sentence(error));
}

std::vector<Row> Scheduler::rows_of(const Group& group, std::int64_t ahead) {
  static const Sampling greedy{.temperature = 0};
  const auto& config = decoder_.config();
  std::vector<Row> rows;
  for (const auto& sequence : group) {
    try {
      rows.push_back(row_of(*sequence, config.eos_token_id, config.vocab_size, ahead));
    } catch (const std::exception& error) {  // the request's filter
      finish(*sequence, Finish::error, sentence(error));
      rows.push_back({.sampling = &greedy});
    }
  }
  return rows;
}

void Scheduler::read_prompts() {
  auto budget = std::max(kGrid, options_.step_tokens - static_cast<std::int64_t>(running_.size()));
  while (budget > 0 && !reading_.empty()) {
    const auto next = next_to_read();
    auto& sequence = **next;
    try {
      budget -= read_piece(sequence, budget);
      if (sequence.id != 0 && sequence.left_to_read() > 0) continue;
      if (sequence.id != 0) prompt_is_read(*next);
    } catch (const std::exception& error) {
      finish(sequence, Finish::error, sentence(error));
    }
    if (sequence.id == 0) {
      reading_.erase(next);
    } else {
      running_.splice(running_.end(), reading_, next);
    }
  }
  sweep(running_);
}

Scheduler::Sequences::iterator Scheduler::next_to_read() {
  if (++turn_ % kTurns == 0) return reading_.begin();
  return std::ranges::min_element(reading_, {}, [](const auto& sequence) { return sequence->left_to_read(); });
}

/// Looks for what is remembered of the prompt, as late as can be: another request may have read it meanwhile.
void Scheduler::begin(Sequence& sequence) {
  auto hit = look_up(sequence);
  for (std::size_t i = 0; i < hit.pages.size(); ++i) {
    pool_.share(hit.pages[i]);
    pool_.release(std::exchange(sequence.pages[i], hit.pages[i]));
  }
  go_on_from(sequence, std::move(hit));
}

/// The most that is remembered of a prompt. Until its first cut a sequence is like any other, until its second like any
/// that was cut as it was.
Snapshots::Hit Scheduler::look_up(Sequence& sequence) {
  if (const auto on_begin = sequence.on_begin) on_begin(*this, sequence);
  const auto& request = sequence.request;
  if (request.prompt_logprobs) return {};
  // The certainty that comes with the first new token is that of the prompt's last: somebody has to read it.
  auto usable = sequence.prompt - (request.certainty ? 1 : 0);
  Kind kind{.iterations = sequence.iterations, .cuts = sequence.cuts};
  for (;;) {
    auto hit = snapshots_.find(kind, std::span(sequence.tokens).first(static_cast<std::size_t>(usable)));
    if (hit.tokens > 0 || kind.cuts.empty()) return hit;
    usable = std::min(usable, kind.cuts.back().at);
    kind.cuts.pop_back();
  }
}

/// The pages that hold it are the sequence's already.
void Scheduler::go_on_from(Sequence& sequence, Snapshots::Hit hit) {
  sequence.begun = true;
  const auto& request = sequence.request;
  if (!request.prompt_logprobs) ++(hit.tokens > 0 ? stats_.snapshot_hits : stats_.snapshot_misses);
  if (hit.tokens > 0) {
    sequence.state = std::move(hit.snapshot.state);
    sequence.hidden = std::move(hit.snapshot.hidden);
    sequence.read = hit.tokens;
    sequence.dropped = hit.dropped;
    cut(sequence);
  }
  const std::chrono::duration<double> queued = std::chrono::steady_clock::now() - sequence.arrived;
  sequence.usage.queued_seconds = queued.count();
  sequence.usage.remembered_tokens = hit.tokens;
  sequence.usage.why_not_more = why_not_more(sequence, hit);
  stats_.remembered_tokens += hit.tokens;
  if (snapshots_.enabled()) {
    for (const auto boundary : request.boundaries) sequence.marks.insert(grid_floor(sequence.before + boundary));
    // A prompt that is only scored is seldom asked again.
    if (!request.prompt_logprobs) sequence.marks.insert({hit.shared, grid_floor(sequence.prompt)});
  }
  // A snapshot before a cut would hold the very pages that the cut lets go.
  const auto last_cut = sequence.cuts.empty() ? 0 : sequence.cuts.back().at;
  std::erase_if(sequence.marks, [&](auto mark) { return mark <= sequence.read || mark < last_cut; });
}

std::string Scheduler::why_not_more(const Sequence& sequence, const Snapshots::Hit& hit) const {
  const auto most = grid_floor(sequence.prompt), grid = kGrid;
  if (hit.tokens == most && most > 0) return {};
  if (most == 0) {
    return "the prompt has " + std::to_string(sequence.prompt) + " tokens, and prefixes are remembered in steps of " +
           std::to_string(grid);
  }
  if (sequence.request.prompt_logprobs) return "prompt_logprobs asks for every token of the prompt, so all were read";
  if (!snapshots_.enabled()) return "snapshots are switched off";
  if (hit.evicted) {
    return "a snapshot further along had to go: all of them together may take " + in_mib(snapshots_.limit());
  }
  if (hit.shared > hit.tokens) {
    return "an earlier prompt begins with the same " + std::to_string(hit.shared) +
           " tokens, but left no snapshot there; this one does";
  }
  if (hit.tokens > 0) {
    return "no earlier prompt goes on like this one after token " + std::to_string(hit.tokens);
  }
  return "no earlier prompt with the same solver steps begins with the same " + std::to_string(grid) + " tokens";
}

std::int64_t Scheduler::piece_end(const Sequence& sequence, std::int64_t budget) const {
  // Scores take a row of the vocabulary for every token of a piece.
  const bool alone = running_.empty() && !sequence.request.prompt_logprobs;
  const auto piece = alone ? options_.alone_tokens : options_.piece_tokens;
  const auto most = std::max(kGrid, grid_floor(std::min(piece, budget)));
  auto end = std::min(sequence.prompt, grid_floor(sequence.read) + most);
  const auto mark = sequence.marks.upper_bound(sequence.read);
  if (mark != sequence.marks.end()) end = std::min(end, *mark);
  for (const auto& cut : sequence.cuts) {
    if (cut.at > sequence.read) end = std::min(end, cut.at);
  }
  return end;
}

/// Returns how many tokens it took.
std::int64_t Scheduler::read_piece(Sequence& sequence, std::int64_t budget) {
  if (!sequence.begun) begin(sequence);
  const auto first = sequence.read, end = piece_end(sequence, budget), count = end - first;
  if (count == 0) return 0;
  const auto device = decoder_.device();
  const Tokens ids(sequence.tokens.begin() + first, sequence.tokens.begin() + end);
  const auto state = pool_.with_pages(first > 0 ? &sequence.state : nullptr);
  std::vector<at::Tensor> certainty;
  models::ForwardOptions options{.state = state ? &*state : nullptr, .want_state = true};
  options.inference.iterations = sequence.iterations;
  if (sequence.request.certainty) options.inference.certainty = &certainty;
  if (pool_.pages_needed()) {
    options.inference.pages = layers::upload(at::tensor(sequence.pages, at::kLong).unsqueeze(0), device);
    if (sequence.dropped > 0) options.inference.dropped = {sequence.dropped};
  }
  auto result = decoder_.forward(at::tensor(ids, at::kLong).unsqueeze(0),
                                 layers::Sequences::rows(1, count, device, {first}), options);
  const auto hidden = result.hidden.squeeze(0);
  sequence.state = std::move(result.state);
  sequence.hidden = hidden[-1].clone();
  if (sequence.request.prompt_logprobs || !certainty.empty()) score_piece(sequence, hidden, certainty);
  sequence.read = end;
  stats_.prompt_tokens += count;
  cut(sequence);
  if (sequence.marks.contains(end)) {
    snapshots_.add(sequence.kind_at(end), std::span(sequence.tokens).first(static_cast<std::size_t>(end)),
                   snapshot_of(sequence), sequence.pages);
  }
  return count;
}

Snapshot Scheduler::snapshot_of(const Sequence& sequence) {
  return {.state = sequence.state,
          .hidden = sequence.hidden,
          .bytes = bytes_of(sequence.state) + static_cast<std::int64_t>(sequence.hidden.nbytes())};
}

/// The prompt's own probabilities: what is at `read + i` says how likely the token after it is.
void Scheduler::score_piece(Sequence& sequence, const at::Tensor& hidden, const std::vector<at::Tensor>& certainty) {
  const auto sure = certainty.empty() ? at::Tensor() : on_host(certainty);
  const auto count = hidden.size(0), first = sequence.read;
  if (sure.defined()) sequence.certainty = column(sure, count - 1);
  const auto& request = sequence.request;
  if (!request.prompt_logprobs) return;
  if (first == 0 && sequence.before == 0) {
    sequence.scored.push_back({.token = sequence.tokens[0], .logprob = std::numeric_limits<float>::quiet_NaN()});
  }
  const auto begin = std::max<std::int64_t>(0, sequence.before - 1 - first);
  if (begin >= count) return;
  const auto logits = decoder_.logits(hidden.narrow(0, begin, count - begin));
  const auto next = sequence.tokens.begin() + first + begin + 1;
  const auto scored = std::min(count - begin, sequence.prompt - (first + begin + 1));
  auto events = score(logits.narrow(0, 0, scored), Tokens(next, next + scored), request.top_logprobs);
  for (std::int64_t i = 0; i < scored; ++i) {
    if (sure.defined()) set_certainty(events[static_cast<std::size_t>(i)], column(sure, begin + i));
  }
  std::ranges::move(events, std::back_inserter(sequence.scored));
  if (!sequence.sink.on_logits) return;
  const auto host = logits.to(at::kCPU, at::kFloat).contiguous();
  for (std::int64_t i = 0; i < host.size(0); ++i) {
    if (first + begin + i < sequence.before) continue;
    sequence.sink.on_logits({host.const_data_ptr<float>() + i * host.size(1), static_cast<std::size_t>(host.size(1))});
  }
}

void Scheduler::prompt_is_read(const std::shared_ptr<Sequence>& read) {
  auto& sequence = *read;
  if (sequence.on_read) sequence.on_read(*this, sequence);
  if (sequence.request.prompt_logprobs && sequence.sink.on_prompt) sequence.sink.on_prompt(sequence.scored);
  if (sequence.request.max_tokens == 0) {
    finish(sequence, Finish::length, "");
    return;
  }
  decoder_.scatter(sequence.state, pool_.state(), at::tensor({sequence.slot}, at::kLong).to(decoder_.device()));
  sequence.state = {};
  land({{read}, begin_draw(decoder_.logits(sequence.hidden.unsqueeze(0)), rows_of({read}, 0))});
}

void Scheduler::deliver(Sequence& sequence, Drawn drawn) {
  if (!drawn.error.empty()) return finish(sequence, Finish::error, drawn.error);
  const auto token = drawn.event.token;
  sequence.tokens.push_back(token);
  ++sequence.came[token];
  if (!sequence.seen.empty()) sequence.seen.insert(token);
  ++stats_.generated_tokens;
  if (sequence.request.certainty) set_certainty(drawn.event, sequence.certainty);
  if (sequence.sink.on_token) sequence.sink.on_token(drawn.event);
  const auto how = finish_of(sequence, decoder_.config().eos_token_id);
  if (how != Finish::none) finish(sequence, how, "");
}

void Scheduler::finish(Sequence& sequence, Finish how, const std::string& error) {
  if (sequence.id == 0) return;
  sequence.id = 0;
  if (sequence.slot >= 0) pool_.give_slot(sequence.slot);
  for (const auto page : sequence.pages) pool_.release(page);
  sequence.slot = -1;
  sequence.pages.clear();
  sequence.usage.prompt_tokens = sequence.prompt;
  sequence.usage.completion_tokens = sequence.generated();
  try {
    if (sequence.sink.on_end) sequence.sink.on_end(how, sequence.usage, error);
  } catch (...) {  // there is nobody left to tell, and the others have no part in it
  }
}

void Scheduler::sweep(Sequences& sequences) {
  sequences.remove_if([](const auto& sequence) { return sequence->id == 0; });
  if (running_.empty()) flight_.reset();  // nobody waits for what it brings
}

}  // namespace gka::infer
