#include "models/gguf.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace gka::models {
namespace {

static_assert(std::endian::native == std::endian::little, "GGUF files are little-endian, and read as they are");

constexpr std::string_view kMagic = "GGUF";
constexpr std::uint64_t kLongestText = std::uint64_t{1} << 28;
constexpr std::uint64_t kMostEntries = std::uint64_t{1} << 24;
constexpr int kDeepestArray = 4;
constexpr std::uint32_t kMostDimensions = 4;

/// A type's blocks: how many numbers one holds, in how many bytes, and how they are read.
struct Block {
  GgufType type;
  std::string_view name;
  std::int64_t numbers;
  std::int64_t bytes;
  void (*read)(const std::uint8_t* block, float* out);
};

template <typename T>
T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

float half(const void* from) {
  const auto bits = load<std::uint16_t>(from);
  const auto sign = (bits & 0x8000) != 0 ? -1.0F : 1.0F;
  const int exponent = (bits >> 10) & 0x1f;
  const int fraction = bits & 0x3ff;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
  if (exponent == 0x1f) return fraction == 0 ? sign * HUGE_VALF : std::nanf("");
  return sign * std::ldexp(static_cast<float>(fraction + 0x400), exponent - 25);
}

void read_f32(const std::uint8_t* block, float* out) { *out = load<float>(block); }
void read_f16(const std::uint8_t* block, float* out) { *out = half(block); }
void read_bf16(const std::uint8_t* block, float* out) {
  *out = std::bit_cast<float>(static_cast<std::uint32_t>(load<std::uint16_t>(block)) << 16);
}

// Blocks of 32: a scale, in some a minimum, in some the fifth bits of all numbers, then the numbers. Byte j of a
// nibble pair holds numbers j and j + 16.

void read_q8_0(const std::uint8_t* block, float* out) {
  const float scale = half(block);
  for (int j = 0; j < 32; ++j) out[j] = scale * static_cast<float>(static_cast<std::int8_t>(block[2 + j]));
}

void read_nibbles(const std::uint8_t* nibbles, std::uint32_t fifth, float scale, float least, float* out) {
  for (int j = 0; j < 16; ++j) {
    const auto low = (nibbles[j] & 0xfU) | ((fifth >> j & 1U) << 4);
    const auto high = (nibbles[j] >> 4U) | ((fifth >> (j + 16) & 1U) << 4);
    out[j] = scale * static_cast<float>(low) + least;
    out[j + 16] = scale * static_cast<float>(high) + least;
  }
}

void read_q4_0(const std::uint8_t* block, float* out) {
  const float scale = half(block);
  read_nibbles(block + 2, 0, scale, -8.0F * scale, out);
}
void read_q4_1(const std::uint8_t* block, float* out) { read_nibbles(block + 4, 0, half(block), half(block + 2), out); }
void read_q5_0(const std::uint8_t* block, float* out) {
  const float scale = half(block);
  read_nibbles(block + 6, load<std::uint32_t>(block + 2), scale, -16.0F * scale, out);
}
void read_q5_1(const std::uint8_t* block, float* out) {
  read_nibbles(block + 8, load<std::uint32_t>(block + 4), half(block), half(block + 2), out);
}

// Blocks of 256 in eight parts of 32. Each part has a scale and a minimum of six bits, packed into 12 bytes: of the
// first four parts the low six bits of a byte each; of the last four, four bits in the last bytes and the other two in
// the top bits of the first.

struct Part {
  float scale, least;
};

Part part_of(const std::uint8_t* packed, int part, float scale, float least) {
  const int first = part % 4;
  std::uint32_t s = packed[first] & 63U, m = packed[first + 4] & 63U;
  if (part >= 4) {
    s = (packed[first + 8] & 0xfU) | (packed[first] >> 6U << 4U);
    m = (packed[first + 8] >> 4U) | (packed[first + 4] >> 6U << 4U);
  }
  return {.scale = scale * static_cast<float>(s), .least = least * static_cast<float>(m)};
}

/// `fifth`: the 32 bytes whose bit p is the fifth bit in part p; nullptr: none.
void read_parts(const std::uint8_t* block, const std::uint8_t* fifth, const std::uint8_t* nibbles, float* out) {
  const float scale = half(block), least = half(block + 2);
  for (int part = 0; part < 8; ++part) {
    const auto [s, m] = part_of(block + 4, part, scale, least);
    const auto* bytes = nibbles + 32 * (part / 2);
    for (int j = 0; j < 32; ++j) {
      std::uint32_t number = part % 2 == 0 ? bytes[j] & 0xfU : bytes[j] >> 4U;
      if (fifth != nullptr) number |= (fifth[j] >> part & 1U) << 4U;
      out[32 * part + j] = s * static_cast<float>(number) - m;
    }
  }
}

void read_q4_k(const std::uint8_t* block, float* out) { read_parts(block, nullptr, block + 16, out); }
void read_q5_k(const std::uint8_t* block, float* out) { read_parts(block, block + 16, block + 48, out); }

/// Two halves of 128, each in four parts of 32: low four bits, then two bits more, then a scale for every 16.
void read_q6_k(const std::uint8_t* block, float* out) {
  const float scale = half(block + 208);
  for (int i = 0; i < 256; ++i) {
    const int side = i / 128, part = i % 128 / 32, j = i % 32;
    const auto low = block[64 * side + 32 * (part % 2) + j];
    const auto nibble = part < 2 ? low & 0xf : low >> 4;
    const auto top = block[128 + 32 * side + j] >> (2 * part) & 3;
    const auto of_sixteen = static_cast<std::int8_t>(block[192 + 8 * side + 2 * part + j / 16]);
    out[i] = scale * static_cast<float>(of_sixteen) * static_cast<float>((nibble | top << 4) - 32);
  }
}

constexpr std::array kBlocks{
    Block{GgufType::f32, "F32", 1, 4, read_f32},        Block{GgufType::f16, "F16", 1, 2, read_f16},
    Block{GgufType::bf16, "BF16", 1, 2, read_bf16},     Block{GgufType::q4_0, "Q4_0", 32, 18, read_q4_0},
    Block{GgufType::q4_1, "Q4_1", 32, 20, read_q4_1},   Block{GgufType::q5_0, "Q5_0", 32, 22, read_q5_0},
    Block{GgufType::q5_1, "Q5_1", 32, 24, read_q5_1},   Block{GgufType::q8_0, "Q8_0", 32, 34, read_q8_0},
    Block{GgufType::q4_k, "Q4_K", 256, 144, read_q4_k}, Block{GgufType::q5_k, "Q5_K", 256, 176, read_q5_k},
    Block{GgufType::q6_k, "Q6_K", 256, 210, read_q6_k},
};

const Block* block_of(std::uint32_t type) {
  const auto* found = std::ranges::find(kBlocks, static_cast<GgufType>(type), &Block::type);
  return found == kBlocks.end() ? nullptr : found;
}

const Block& block_of(GgufType type) { return *block_of(static_cast<std::uint32_t>(type)); }

std::string list_types() {
  std::string list;
  for (const auto& block : kBlocks) list += (list.empty() ? "" : ", ") + std::string(block.name);
  return list;
}

/// A float32 as the double with the fewest digits that reads as it: 1e-5 rather than 9.999999747378752e-06.
double shortest(float value) {
  if (!std::isfinite(value)) return value;
  char text[32];
  const auto end = std::to_chars(text, text + sizeof(text), value).ptr;
  double wide = value;
  std::from_chars(text, end, wide);
  return wide;
}

class Reader {
 public:
  Reader(std::string_view bytes, const std::string& where) : bytes_(bytes), where_(where) {}

  Gguf all() {
    if (take(kMagic.size(), "its first bytes") != kMagic) fail("it does not begin with GGUF; it is of another format");
    const auto version = number<std::uint32_t>("its version");
    if (version != 2 && version != 3) {
      fail("its version is " + std::to_string(version) + ", and gka reads 2 and 3 (little-endian)");
    }
    const auto tensors = count("the number of its tensors"), keys = count("the number of its keys");
    Gguf gguf;
    for (std::uint64_t i = 0; i < keys; ++i) read_key(gguf);
    for (std::uint64_t i = 0; i < tensors; ++i) read_tensor(gguf);
    place_tensors(gguf);
    return gguf;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error(where_ + " is not a sound GGUF file: " + what);
  }

  std::string_view take(std::uint64_t size, const std::string& what) {
    if (size > bytes_.size() - place_) {
      fail("it ends at byte " + std::to_string(bytes_.size()) + " in the middle of " + what);
    }
    const auto part = bytes_.substr(place_, size);
    place_ += size;
    return part;
  }

  template <typename T>
  T number(const std::string& what) {
    return load<T>(take(sizeof(T), what).data());
  }

  std::uint64_t count(const std::string& what) {
    const auto value = number<std::uint64_t>(what);
    if (value > kMostEntries) fail(what + " is " + std::to_string(value) + ", more than any model has");
    return value;
  }

  std::string text(const std::string& what) {
    const auto length = number<std::uint64_t>("the length of " + what);
    if (length > kLongestText) fail(what + " has " + std::to_string(length) + " bytes");
    return std::string(take(length, what));
  }

  Json value(std::uint32_t kind, const std::string& key, int depth) {
    const auto what = "the value of '" + key + "'";
    switch (kind) {
      case 0: return number<std::uint8_t>(what);
      case 1: return number<std::int8_t>(what);
      case 2: return number<std::uint16_t>(what);
      case 3: return number<std::int16_t>(what);
      case 4: return number<std::uint32_t>(what);
      case 5: return number<std::int32_t>(what);
      case 6: return shortest(number<float>(what));
      case 7: return number<std::uint8_t>(what) != 0;
      case 8: return text(what);
      case 9: return array(key, depth + 1);
      case 10: return number<std::uint64_t>(what);
      case 11: return number<std::int64_t>(what);
      case 12: return number<double>(what);
      default: fail(what + " is of the kind " + std::to_string(kind) + ", which the format does not have");
    }
  }

  Json array(const std::string& key, int depth) {
    if (depth > kDeepestArray) fail("the value of '" + key + "' is a list in a list in a list");
    const auto kind = number<std::uint32_t>("the list '" + key + "'");
    const auto entries = count("the length of the list '" + key + "'");
    Json list = Json::array();
    for (std::uint64_t i = 0; i < entries; ++i) list.push_back(value(kind, key, depth));
    return list;
  }

  void read_key(Gguf& gguf) {
    const auto key = text("the name of a key");
    const auto kind = number<std::uint32_t>("the kind of '" + key + "'");
    if (gguf.metadata.contains(key)) fail("it has the key '" + key + "' twice");
    gguf.metadata[key] = value(kind, key, 0);
  }

  void read_tensor(Gguf& gguf) {
    const auto name = text("the name of a tensor");
    const auto what = "the shape of '" + name + "'";
    const auto dimensions = number<std::uint32_t>(what);
    if (dimensions == 0 || dimensions > kMostDimensions) {
      fail("'" + name + "' has " + std::to_string(dimensions) + " dimensions");
    }
    GgufTensor tensor;
    std::uint64_t numbers = 1;
    for (std::uint32_t i = 0; i < dimensions; ++i) {
      const auto size = number<std::uint64_t>(what);
      if (size == 0 || __builtin_mul_overflow(numbers, size, &numbers) || numbers > std::uint64_t{1} << 48) {
        fail(what + " is more than any tensor has, or nothing");
      }
      tensor.shape.insert(tensor.shape.begin(), static_cast<std::int64_t>(size));
    }
    const auto type = number<std::uint32_t>("the type of '" + name + "'");
    const auto* block = block_of(type);
    if (block == nullptr) {
      throw std::runtime_error("'" + name + "' of " + where_ + " has the type number " + std::to_string(type) +
                               ", which gka does not read; it reads " + list_types());
    }
    if (tensor.shape.back() % block->numbers != 0) {
      fail("a row of '" + name + "' has " + std::to_string(tensor.shape.back()) + " numbers, which are no blocks of " +
           std::to_string(block->numbers));
    }
    tensor.type = block->type;
    offsets_[name] = number<std::uint64_t>("the place of '" + name + "'");
    if (!gguf.tensors.emplace(name, std::move(tensor)).second) fail("it has the tensor '" + name + "' twice");
  }

  void place_tensors(Gguf& gguf) {
    std::int64_t alignment = 32;
    if (const auto found = gguf.metadata.find("general.alignment"); found != gguf.metadata.end()) {
      if (!json::read(*found, alignment) || alignment < 1 || alignment > 1 << 20) {
        fail("its 'general.alignment' is " + found->dump());
      }
    }
    const auto step = static_cast<std::uint64_t>(alignment);
    const auto begin = (place_ + step - 1) / step * step;
    for (auto& [name, tensor] : gguf.tensors) {
      const auto& block = block_of(tensor.type);
      const auto size = static_cast<std::uint64_t>(tensor.count()) / static_cast<std::uint64_t>(block.numbers) *
                        static_cast<std::uint64_t>(block.bytes);
      const auto offset = offsets_.at(name);
      if (begin > bytes_.size() || offset > bytes_.size() - begin || size > bytes_.size() - begin - offset) {
        fail("'" + name + "' ends behind the end of the file, at " + std::to_string(bytes_.size()) +
             " bytes; it may be truncated");
      }
      tensor.bytes = bytes_.substr(begin + offset, size);
    }
  }

  std::string_view bytes_;
  const std::string& where_;
  std::uint64_t place_ = 0;
  std::map<std::string, std::uint64_t> offsets_;
};

}  // namespace

std::int64_t GgufTensor::count() const {
  std::int64_t numbers = 1;
  for (const auto size : shape) numbers *= size;
  return numbers;
}

Gguf parse_gguf(std::string_view bytes, const std::string& where) { return Reader(bytes, where).all(); }

std::string_view name_of_gguf_type(GgufType type) { return block_of(type).name; }

bool is_plain(GgufType type) { return block_of(type).numbers == 1; }

void dequantise(const GgufTensor& tensor, std::span<float> out) {
  const auto& block = block_of(tensor.type);
  const auto count = tensor.count();
  if (std::ssize(out) != count) throw std::logic_error("a tensor is dequantised into room for as many numbers");
  const auto* from = reinterpret_cast<const std::uint8_t*>(tensor.bytes.data());
  for (std::int64_t i = 0; i < count / block.numbers; ++i) {
    block.read(from + i * block.bytes, out.data() + i * block.numbers);
  }
}

}  // namespace gka::models
