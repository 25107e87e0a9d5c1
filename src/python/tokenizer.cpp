// The tokenizer as a class of torch's. Texts come back as bytes in a tensor, since a token may end inside a character.
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "data/tokenizer.h"

namespace gka::python {
namespace {

data::Specials specials(bool yes) { return yes ? data::Specials::yes : data::Specials::no; }

class Tokenizer final : public torch::CustomClassHolder {
 public:
  explicit Tokenizer(const std::string& name) : tokenizer_(data::Tokenizer::load(name)) {}

  at::Tensor encode(const std::string& text, bool special) const {
    const auto ids = tokenizer_.encode(text, specials(special));
    auto tensor = at::empty({std::ssize(ids)}, at::TensorOptions(at::kLong));
    std::ranges::copy(ids, tensor.mutable_data_ptr<std::int64_t>());
    return tensor;
  }

  at::Tensor decode(const at::Tensor& ids, bool special) const {
    const auto flat = ids.to(at::kCPU, at::kLong).contiguous().view({-1});
    const auto* first = flat.const_data_ptr<std::int64_t>();
    std::vector<data::Token> tokens;
    for (std::int64_t i = 0; i < flat.numel(); ++i) {
      TORCH_CHECK_VALUE(first[i] >= 0 && first[i] <= INT32_MAX, "decode: ids has ", first[i], ", which is no token");
      tokens.push_back(static_cast<data::Token>(first[i]));
    }
    const auto text = tokenizer_.decode(tokens, specials(special));
    auto bytes = at::empty({std::ssize(text)}, at::TensorOptions(at::kByte));
    if (!text.empty()) std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
    return bytes;
  }

  /// −1 where there is no such token.
  std::int64_t find(const std::string& token) const { return tokenizer_.find(token).value_or(-1); }
  std::int64_t end_of_document() const { return tokenizer_.end_of_document().value_or(-1); }
  std::int64_t vocab_size() const { return tokenizer_.vocab_size(); }
  std::string describe() const { return tokenizer_.describe(); }

 private:
  data::Tokenizer tokenizer_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(gka, m) {
  m.class_<Tokenizer>("Tokenizer")
      .def(torch::init<std::string>())
      .def("encode", &Tokenizer::encode)
      .def("decode", &Tokenizer::decode)
      .def("find", &Tokenizer::find)
      .def("end_of_document", &Tokenizer::end_of_document)
      .def("vocab_size", &Tokenizer::vocab_size)
      .def("describe", &Tokenizer::describe);
}

}  // namespace gka::python
