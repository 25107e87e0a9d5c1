// Tokenizers, their patterns, and token files.
#include <cstring>
#include <vector>

#include "base/hash.h"
#include "data/pre_tokenizer.h"
#include "data/token_set.h"
#include "data/tokenizer.h"
#include "targets.h"

namespace gka::fuzz {
namespace {

constexpr std::array<std::string_view, 4> kTexts{"The cat's 3 hats, 1234567\r\n\n  and  tabs\t.",
                                                 "Straße \u017Fs 日本、語。 ﬁ ²Ⓐ\u0301", "<|endoftext|>a\xff\xc3", ""};

/// Checksums that fit, so that a changed byte gets past them.
void mend(std::string& bytes) {
  using Header = data::TokenFileHeader;
  if (bytes.size() < sizeof(Header)) return;
  const auto put = [&](std::size_t place, std::uint64_t value) { std::memcpy(bytes.data() + place, &value, 8); };
  put(offsetof(Header, body_hash), hash64(std::string_view(bytes).substr(sizeof(Header))));
  put(offsetof(Header, header_hash), hash64(std::string_view(bytes).substr(0, offsetof(Header, header_hash))));
}

void read_windows(const std::string& path, double eval_fraction, data::Part part) {
  const data::TokenSet set({.files = {{path}}, .eval_fraction = eval_fraction, .part = part, .verify = false});
  set.documents();
  for (const std::int64_t tokens : {1, 3, 64}) {
    std::vector<std::int64_t> inputs(static_cast<std::size_t>(tokens)), targets(inputs.size());
    if (set.windows(tokens) == 0) continue;
    for (std::int64_t index = 0; index < 20; ++index) {
      std::int64_t before = 0;
      for (const auto start : set.fill(index, inputs, targets)) {
        if (start < 1 || start > tokens || start <= before) std::abort();  // `packed` writes at start − 1
        before = start;
      }
    }
  }
}

}  // namespace

/// The first byte says whether the checksums are made to fit.
int fuzz_tokens(Bytes bytes) {
  if (bytes.empty()) return 0;
  std::string content(text_of(bytes.subspan(1)));
  if ((std::to_integer<int>(bytes[0]) & 1) != 0) mend(content);
  const MemoryFile file(std::as_bytes(std::span(content)));
  return expect_sentence([&] {
    data::TokenFile(file.path()).verify();
    read_windows(file.path(), 0, data::Part::train);
    read_windows(file.path(), 0.3, data::Part::train);
    read_windows(file.path(), 0.3, data::Part::eval);
  });
}

int fuzz_tokenizer(Bytes bytes) {
  const MemoryFile file(bytes);
  return expect_sentence([&] {
    const auto tokenizer = data::Tokenizer::load(file.path());
    for (const auto text : kTexts) {
      for (const auto spelled : {data::Spelled::token, data::Spelled::text}) {
        const auto ids = tokenizer.encode(text, data::Specials::yes, spelled);
        for (const auto id : ids) {
          if (id < 0 || id >= tokenizer.vocab_size()) std::abort();
        }
        tokenizer.decode(ids);
      }
    }
    tokenizer.describe();
    tokenizer.end_of_document();
  });
}

int fuzz_pattern(Bytes bytes) {
  return expect_sentence([&] {
    const data::Regex regex{std::string(text_of(bytes))};
    for (const auto& [name, behavior] : data::kSplitBehaviorNames) {
      data::PreTokenizer splitter({{.pattern = regex, .behavior = behavior}});
      data::PreTokenizer::Scratch scratch(splitter);
      for (const auto text : {kTexts[0], kTexts[1]}) {
        std::string joined;
        splitter.split(text, scratch, [&](std::string_view word) { joined += word; });
        if (behavior != data::SplitBehavior::removed && joined != text) std::abort();
      }
    }
  });
}

}  // namespace gka::fuzz
