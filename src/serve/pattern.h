// A regular expression of a JSON Schema as a machine over the bytes of a text, which also knows how many characters
// have to follow, and how many may: whoever writes the text never gets to where it cannot end.
//
// What may be in one is what ECMAScript has and a machine without a memory can do: alternatives, groups, classes,
// repetitions, \d \w \s, ^ and $. Look-around, back references and \b are refused.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

namespace gka::serve {

class Pattern {
 public:
  static constexpr std::uint32_t kStart = 0, kNowhere = UINT32_MAX, kAny = UINT32_MAX;

  /// What all patterns of a schema may take together, so that no request holds the server up: of a machine's states
  /// (each is a kilobyte), and of looks at its nodes while it is made (some ten million a second).
  struct Budget {
    std::size_t states = 16'384, work = 5'000'000;
  };
  /// Throws std::invalid_argument with what is wrong with it, as in "has a look-ahead".
  static std::shared_ptr<const Pattern> compile(std::string_view expression, Budget& budget);

  /// Where a byte leads; kNowhere: nothing that begins so can match.
  std::uint32_t step(std::uint32_t at, unsigned char byte) const { return states_[at].next[byte]; }
  bool accepts(std::uint32_t at) const { return states_[at].accepts; }
  /// Characters that have to follow at the least, and that may at the most (kAny: any number).
  std::uint32_t least(std::uint32_t at) const { return states_[at].least; }
  std::uint32_t most(std::uint32_t at) const { return states_[at].most; }

 private:
  struct State {
    std::array<std::uint32_t, 256> next;
    bool accepts = false;
    std::uint32_t least = kNowhere, most = 0;
  };
  void measure();
  void measure_least();
  void measure_most();
  std::vector<State> states_;
};

}  // namespace gka::serve
