// `gka tokenizer`: learn a byte-level BPE from text, look at a tokenizer, and try it on standard input.
#include <CLI/CLI.hpp>
#include <iostream>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "base/files.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/numbers.h"
#include "cli/outputs.h"
#include "cli/progress.h"
#include "data/bpe_trainer.h"
#include "data/documents.h"
#include "data/tokenizer.h"
#include "train/text.h"

namespace gka::cli {
namespace {

constexpr std::size_t kBatchBytes = std::size_t{1} << 20;

struct Arguments {
  std::vector<std::string> files;
  std::string out;
  std::string field;
  std::string separator;
  data::BpeTrainerOptions train;
  std::string name = "bytes";
  bool specials = false;
  bool no_specials = false;
};

int train_bpe(const Arguments& arguments) {
  data::DocumentOptions options;
  if (!arguments.field.empty()) options.field = arguments.field;
  if (!arguments.separator.empty()) options.separator = arguments.separator;
  const data::DocumentReader reader(arguments.files, options);
  data::BpeTrainer trainer(arguments.train);
  keep_apart("--out", arguments.out, arguments.files);
  Interruptible signals(arguments.out);
  signals.writes_file(arguments.out);
  NewFile out(arguments.out);  // before the work, not after it: a folder that is not there is known now

  LiveLine line;
  reader.read(kBatchBytes, [&](const std::vector<data::RawDocument>& batch, std::int64_t bytes_done) {
    for (const auto& document : batch) trainer.add(reader.text(document));
    line.show([&] {
      return "reading, " + train::short_bytes(static_cast<double>(bytes_done)) + " of " +
             train::short_bytes(static_cast<double>(reader.total_bytes()));
    });
  });
  if (trainer.words() == 0) throw std::runtime_error("there is no text in what was read, so no tokenizer");
  const auto file = trainer.train([&](std::int64_t done, std::int64_t all) {
    line.show([&] { return std::to_string(done) + " of " + std::to_string(all) + " merges"; });
  });
  line.clear();
  out.write(file);
  signals.finish_file([&] { out.commit(); });

  const auto tokenizer = data::Tokenizer::load(arguments.out);
  std::cerr << arguments.out << ": " << tokenizer.describe() << ", from " << trainer.words() << " words ("
            << trainer.distinct_words() << " different) in " << train::short_duration(line.seconds()) << "\n";
  if (tokenizer.vocab_size() < arguments.train.vocab_size) {
    std::cerr << "gka: the text has no more pairs that occur " << arguments.train.min_count
              << " times, so the vocabulary is smaller than " << arguments.train.vocab_size << ".\n";
  }
  return 0;
}

int show(const Arguments& arguments) {
  const auto tokenizer = data::Tokenizer::load(arguments.name);
  std::cout << tokenizer.describe() << "\n";
  if (const auto end = tokenizer.end_of_document()) {
    std::cout << "end of document: " << *end << " " << tokenizer.bytes_of(*end) << "\n";
  }
  std::printf("fingerprint: %016llx\n", static_cast<unsigned long long>(tokenizer.fingerprint()));
  return 0;
}

std::string standard_input() { return {std::istreambuf_iterator<char>(std::cin), std::istreambuf_iterator<char>()}; }

int encode(const Arguments& arguments) {
  const auto tokenizer = data::Tokenizer::load(arguments.name);
  const auto specials = arguments.specials ? data::Specials::yes : data::Specials::no;
  std::string line;
  for (const auto id :
       tokenizer.encode(standard_input(), specials, arguments.no_specials ? data::Spelled::text : data::Spelled::token))
    line += (line.empty() ? "" : " ") + std::to_string(id);
  std::cout << line << "\n";
  return 0;
}

int decode(const Arguments& arguments) {
  const auto tokenizer = data::Tokenizer::load(arguments.name);
  std::vector<data::Token> ids;
  std::istringstream words(standard_input());
  for (std::string word; words >> word;) {
    std::size_t used = 0;
    long id = -1;
    try {
      id = std::stol(word, &used);
    } catch (const std::exception&) {
    }
    if (used != word.size() || id < 0 || id >= tokenizer.vocab_size()) {
      throw std::runtime_error("'" + word + "' is no token: they are numbers from 0 to " +
                               std::to_string(tokenizer.vocab_size() - 1));
    }
    ids.push_back(static_cast<data::Token>(id));
  }
  std::cout << tokenizer.decode(ids, arguments.specials ? data::Specials::yes : data::Specials::no);
  return 0;
}

std::string pattern_names() {
  std::string names;
  for (const auto& known : data::kKnownPatterns) names += std::string(known.name) + ", ";
  return names;
}

using Run = int (*)(const Arguments&);

/// A word after `gka tokenizer`; the one that was given sets `chosen`.
CLI::App* add_verb(CLI::App& app, const char* name, const char* summary, const std::shared_ptr<Run>& chosen, Run run) {
  auto* verb = app.add_subcommand(name, summary);
  verb->parse_complete_callback([chosen, run] { *chosen = run; });
  return verb;
}

}  // namespace

Action declare_tokenizer(CLI::App& app) {
  const auto arguments = std::make_shared<Arguments>();
  const auto chosen = std::make_shared<Run>(nullptr);
  app.require_subcommand(1);

  auto* train = add_verb(app, "train", "Learn a byte-level BPE from text", chosen, train_bpe);
  auto& options = arguments->train;
  train
      ->add_option(
          "files", arguments->files,
          "Text files, or JSON lines (.jsonl, .ndjson, or with --field), plain or compressed by gzip, zstd or xz; - is "
          "standard input")
      ->required()
      ->type_name("FILE");
  train->add_option("--out", arguments->out, "The tokenizer.json to write")->required()->type_name("FILE");
  train
      ->add_option("--vocab-size", options.vocab_size,
                   "Size of the vocabulary, with the 256 bytes and special tokens (default: 32768)")
      ->type_name("N")
      ->check(positive_number());
  train->add_option("--min-count", options.min_count, "Pairs that occur less often are not joined (default: 2)")
      ->type_name("N")
      ->check(positive_number());
  train
      ->add_option("--pattern", options.pattern,
                   "How text is cut into words: " + pattern_names() + "or a regular expression (default: gpt2)")
      ->type_name("NAME");
  train
      ->add_option("--special", options.specials,
                   "A special token; may be given several times (default: <|endoftext|>)")
      ->type_name("TOKEN")
      ->allow_extra_args(false);
  train->add_option("--field", arguments->field, "Files are JSON lines with the text under this key")->type_name("KEY");
  train->add_option("--separator", arguments->separator, "Text between the documents of a text file")
      ->type_name("TEXT");

  struct Verb {
    const char* name;
    const char* summary;
    Run run;
  };
  for (const auto& [name, summary, run] :
       {Verb{"info", "Describe a tokenizer", show}, Verb{"encode", "Turn standard input into token numbers", encode},
        Verb{"decode", "Turn token numbers on standard input into text", decode}}) {
    auto* verb = add_verb(app, name, summary, chosen, run);
    verb->add_option("tokenizer", arguments->name, "bytes, a tokenizer.json, or a folder with one (default: bytes)")
        ->type_name("NAME");
    if (run != show) verb->add_flag("--specials", arguments->specials, "Include the special tokens around a text");
    if (run == encode) {
      verb->add_flag("--no-specials", arguments->no_specials, "Read text that spells a special token as plain text");
    }
  }
  app.footer(
      "Examples:\n"
      "  gka tokenizer train --vocab-size 32768 --out tokenizer.json corpus/*.txt\n"
      "  echo 'Hello, world' | gka tokenizer encode tokenizer.json");
  return [arguments, chosen] { return (*chosen)(*arguments); };
}

}  // namespace gka::cli
