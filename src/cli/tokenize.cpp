// `gka tokenize`: text or JSON lines to a token file for training. Documents are read in batches; threads encode a
// batch, and it is written in the order of the files, so the result does not depend on how many there are.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <iostream>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/files.h"
#include "cli/commands.h"
#include "cli/interrupt.h"
#include "cli/outputs.h"
#include "cli/progress.h"
#include "data/documents.h"
#include "data/token_file.h"
#include "data/tokenizer.h"
#include "train/run.h"
#include "train/text.h"

namespace gka::cli {
namespace {

constexpr std::size_t kBatchBytes = std::size_t{16} << 20;

struct Arguments {
  std::vector<std::string> files;
  std::string tokenizer = "bytes";
  std::string out;
  std::string field;
  std::string separator;
  std::string end_token;
  bool no_end_token = false;
  bool no_specials = false;
  bool verify = false;
  int threads = 0;
};

/// Calls body(0) … body(count − 1) on `threads` threads; the first exception is thrown again here.
template <typename Body>
void in_parallel(std::size_t count, int threads, Body&& body) {
  std::atomic<std::size_t> next{0};
  std::exception_ptr failed;
  std::mutex mutex;
  const auto work = [&] {
    for (std::size_t i = next++; i < count; i = next++) {
      try {
        body(i);
      } catch (...) {
        const std::scoped_lock lock(mutex);
        if (!failed) failed = std::current_exception();
        next = count;
      }
    }
  };
  {
    std::vector<std::jthread> others;
    for (int i = 1; i < std::min<int>(threads, static_cast<int>(count)); ++i) others.emplace_back(work);
    work();
  }
  if (failed) std::rethrow_exception(failed);
}

std::optional<data::Token> end_token(const Arguments& arguments, const data::Tokenizer& tokenizer) {
  if (arguments.no_end_token) return std::nullopt;
  if (arguments.end_token.empty()) {
    if (const auto end = tokenizer.end_of_document()) return end;
    throw std::runtime_error(
        "this tokenizer has no end-of-document token that gka knows; name one with --end-token, or say "
        "--no-end-token");
  }
  if (const auto end = tokenizer.find(arguments.end_token)) return end;
  throw std::runtime_error("--end-token: the tokenizer has no token '" + arguments.end_token + "'");
}

std::string where_it_goes(const std::string& prefix) {
  if (prefix.ends_with('/') || std::filesystem::is_directory(prefix)) {
    throw std::runtime_error("--out takes the name of the token file without its .tokens, and '" + prefix +
                             "' is a folder; name a file in it, such as " +
                             (std::filesystem::path(prefix) / "corpus").string());
  }
  return prefix.ends_with(".tokens") ? prefix : prefix + ".tokens";
}

int check_files(const Arguments& arguments) {
  for (const auto& path : arguments.files) {
    const data::TokenFile file(path);
    file.verify();
    std::cout << path << ": " << file.tokens() << " tokens, " << file.documents() << " documents, "
              << 8 * file.header().token_bytes << " bits a token, vocabulary " << file.header().vocab_size
              << "; intact\n";
  }
  return 0;
}

/// A copy for the models trained on the tokens: their checkpoints take it along. The copy of an earlier call may be the
/// very tokenizer that this one reads.
void keep_tokenizer(const std::filesystem::path& name, const std::filesystem::path& token_file) {
  const auto file = std::filesystem::is_directory(name) ? name / "tokenizer.json" : name;
  if (!std::filesystem::exists(file)) return;  // bytes need none, and GPT-2's two files are no tokenizer.json
  write_text(data::tokenizer_beside(token_file), read_text(file));
}

int tokenize(const Arguments& arguments) {
  if (arguments.verify) return check_files(arguments);
  if (arguments.out.empty()) throw std::runtime_error("gka tokenize needs --out PREFIX, the name of the token file");
  const auto tokenizer = data::Tokenizer::load(arguments.tokenizer);
  const auto end = end_token(arguments, tokenizer);
  data::DocumentOptions options;
  if (!arguments.field.empty()) options.field = arguments.field;
  if (!arguments.separator.empty()) options.separator = arguments.separator;
  const data::DocumentReader reader(arguments.files, options);
  const int threads =
      arguments.threads > 0 ? arguments.threads : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));

  const auto spelled = arguments.no_specials ? data::Spelled::text : data::Spelled::token;
  const auto path = where_it_goes(arguments.out);
  keep_apart("--out", path, arguments.files);
  const train::RunFolder folder(std::filesystem::absolute(path).parent_path());
  Interruptible signals(path);
  signals.writes_file(path);
  data::TokenFileWriter writer(path, tokenizer, end);
  LiveLine line;
  std::vector<std::vector<data::Token>> encoded;
  reader.read(kBatchBytes, [&](const std::vector<data::RawDocument>& batch, std::int64_t bytes_done) {
    encoded.resize(batch.size());
    in_parallel(batch.size(), threads, [&](std::size_t i) {
      encoded[i].clear();
      tokenizer.encode(reader.text(batch[i]), encoded[i], data::Specials::no, spelled);
    });
    for (const auto& document : encoded) writer.add(document);
    line.show([&] {
      const auto share =
          static_cast<double>(bytes_done) / std::max<double>(1, static_cast<double>(reader.total_bytes()));
      const auto left = line.seconds() * (1 - share) / std::max(share, 1e-9);
      return std::to_string(static_cast<int>(100 * share)) + "%, " +
             train::short_count(static_cast<double>(writer.header().tokens)) + " tokens, " +
             train::short_bytes(static_cast<double>(bytes_done) / line.seconds()) + "/s, " +
             train::short_duration(left) + " left";
    });
  });
  line.clear();
  if (writer.header().tokens == 0) throw std::runtime_error("there is no text in what was read, so no token file");
  signals.finish_file([&] {
    writer.commit();
    if (arguments.tokenizer != "bytes") keep_tokenizer(arguments.tokenizer, path);
  });
  const auto& header = writer.header();
  std::cerr << path << ": " << header.tokens << " tokens, " << header.documents << " documents, "
            << std::filesystem::file_size(path) << " bytes, in " << train::short_duration(line.seconds()) << "\n";
  return 0;
}

}  // namespace

Action declare_tokenize(CLI::App& app) {
  const auto arguments = std::make_shared<Arguments>();
  app.add_option(
         "files", arguments->files,
         "Text files, or JSON lines (.jsonl, .ndjson, or with --field), plain or compressed by gzip, zstd or xz; - is "
         "standard input")
      ->required()
      ->type_name("FILE");
  app.add_option("--tokenizer", arguments->tokenizer, "bytes, a tokenizer.json, or a folder with one (default: bytes)")
      ->type_name("NAME");
  app.add_option("--out", arguments->out, "The token file is PREFIX.tokens")->type_name("PREFIX");
  app.add_option("--field", arguments->field, "Files are JSON lines with the text under this key")->type_name("KEY");
  app.add_option("--separator", arguments->separator,
                 "Text between the documents of a text file (default: a file is one document)")
      ->type_name("TEXT");
  auto* end = app.add_option("--end-token", arguments->end_token,
                             "Token to put after every document (default: the tokenizer's own)")
                  ->type_name("TOKEN");
  app.add_flag("--no-end-token", arguments->no_end_token, "Put nothing after a document")->excludes(end);
  app.add_flag("--no-specials", arguments->no_specials, "Read text that spells a special token as plain text");
  app.add_option("--threads", arguments->threads, "Threads that encode (default: all cores)")->type_name("N");
  app.add_flag("--verify", arguments->verify, "Check token files against their checksums");
  app.footer(
      "Examples:\n"
      "  gka tokenize book.txt --out data/book\n"
      "  gka tokenize web-*.jsonl --field content --tokenizer model/tokenizer.json --out data/web\n"
      "  gka tokenize --verify data/web.tokens");
  return [arguments] { return tokenize(*arguments); };
}

}  // namespace gka::cli
