// Recursive descent, with Jinja's own precedence: or, and, not, comparisons, + and -, ~, * / // %, **, signs, then
// attributes, calls, filters and tests.
#include "serve/jinja/parser.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <initializer_list>

#include "serve/jinja/lexer.h"

namespace gka::serve::jinja {
namespace {

constexpr int kDeepest = 150;

class Parser {
 public:
  explicit Parser(std::string_view source) : tokens_(tokenize(source)) {}

  NodePtr run() {
    auto all = statements({});
    if (!is(TokenKind::end)) fail("{% " + current().value + " %} closes nothing");
    return all;
  }

 private:
  using Words = std::initializer_list<std::string_view>;

  // --- tokens

  const Token& current() const { return tokens_[at_]; }
  const Token& ahead() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  bool is(TokenKind kind) const { return current().kind == kind; }
  bool is_symbol(std::string_view value) const { return is(TokenKind::symbol) && current().value == value; }
  bool is_word(std::string_view value) const { return is(TokenKind::name) && current().value == value; }
  bool is_word(Words values) const {
    return is(TokenKind::name) && std::ranges::find(values, current().value) != values.end();
  }

  [[noreturn]] void fail(const std::string& message) const { throw Error(message, current().line); }
  std::string seen() const {
    switch (current().kind) {
      case TokenKind::block_end: return "the tag's end";
      case TokenKind::output_end: return "}}";
      case TokenKind::end: return "the template's end";
      default: return "'" + current().value + "'";
    }
  }

  Token take() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }
  bool skip_symbol(std::string_view value) {
    const bool found = is_symbol(value);
    if (found) ++at_;
    return found;
  }
  bool skip_word(std::string_view value) {
    const bool found = is_word(value);
    if (found) ++at_;
    return found;
  }
  void expect_symbol(std::string_view value) {
    if (!skip_symbol(value)) fail("'" + std::string(value) + "' is expected here, not " + seen());
  }
  void expect_word(std::string_view value) {
    if (!skip_word(value)) fail("'" + std::string(value) + "' is expected here, not " + seen());
  }
  void expect(TokenKind kind, const std::string& what) {
    if (!is(kind)) fail(what + " is expected here, not " + seen());
    ++at_;
  }
  std::string identifier() {
    if (!is(TokenKind::name)) fail("a name is expected here, not " + seen());
    return take().value;
  }

  NodePtr node(Kind kind, std::string name = {}) const {
    return std::make_unique<Node>(Node{.kind = kind, .line = current().line, .name = std::move(name)});
  }
  template <typename... Children>
  NodePtr node_of(Kind kind, std::string name, Children... children) const {
    auto made = node(kind, std::move(name));
    (made->children.push_back(std::move(children)), ...);
    if (!made->children.empty() && made->children[0]) made->line = made->children[0]->line;
    return made;
  }

  /// Counts how deep the tree gets, so that neither parsing nor running it can exhaust the stack.
  class Deeper {
   public:
    explicit Deeper(Parser& parser) : parser_(parser) {
      if (++parser_.depth_ > kDeepest)
        parser_.fail("the template is nested more than " + std::to_string(kDeepest) + " deep");
    }
    ~Deeper() { --parser_.depth_; }

   private:
    Parser& parser_;
  };

  /// a + b + c + … is a tree as deep as it is long.
  void check_length(int length) const {
    if (length > kDeepest) fail("more than " + std::to_string(kDeepest) + " operators in a row");
  }

  // --- statements

  /// Up to a tag that starts with one of `ends`, which is not consumed (its "{%" is).
  NodePtr statements(Words ends) {
    const Deeper deeper(*this);
    auto body = node(Kind::sequence);
    while (!is(TokenKind::end)) {
      if (is(TokenKind::data)) {
        body->children.push_back(node(Kind::data));
        body->children.back()->value = take().value;
      } else if (is(TokenKind::output_begin)) {
        ++at_;
        body->children.push_back(node_of(Kind::output, "", tuple_expression()));
        expect(TokenKind::output_end, "}}");
      } else {
        expect(TokenKind::block_begin, "a tag");
        if (is_word(ends)) return body;
        body->children.push_back(statement());
      }
    }
    if (ends.size() > 0) fail("{% " + std::string(*(ends.end() - 1)) + " %} is missing");
    return body;
  }

  NodePtr statement() {
    struct Entry {
      std::string_view word;
      NodePtr (Parser::*parse)();
    };
    static constexpr Entry kStatements[] = {
        {"if", &Parser::if_statement},       {"for", &Parser::for_statement},
        {"set", &Parser::set_statement},     {"macro", &Parser::macro_statement},
        {"call", &Parser::call_statement},   {"filter", &Parser::filter_statement},
        {"with", &Parser::with_statement},   {"generation", &Parser::generation_statement},
        {"break", &Parser::leave_statement}, {"continue", &Parser::next_statement},
    };
    if (!is(TokenKind::name)) fail("a tag starts with a name, not with " + seen());
    const auto* found = std::ranges::find(kStatements, current().value, &Entry::word);
    if (found == std::end(kStatements))
      fail("the tag '" + current().value + "' is unknown, or stands in the wrong place");
    ++at_;
    return (this->*found->parse)();
  }

  void end_tag() { expect(TokenKind::block_end, "the tag's end"); }
  /// A body and its closing tag.
  NodePtr body_until(std::string_view end) {
    end_tag();
    auto body = statements({end});
    expect_word(end);
    end_tag();
    return body;
  }

  NodePtr if_statement() {
    auto made = node(Kind::branch);
    made->children.push_back(tuple_expression(false));
    end_tag();
    for (;;) {
      made->children.push_back(statements({"elif", "else", "endif"}));
      const auto word = identifier();
      if (word == "elif") made->children.push_back(tuple_expression(false));
      end_tag();
      if (word == "endif") return made;
      if (word == "else") {
        made->children.push_back(statements({"endif"}));
        expect_word("endif");
        end_tag();
        return made;
      }
    }
  }

  NodePtr for_statement() {
    auto made = node(Kind::loop);
    auto target = target_list();
    expect_word("in");
    auto list = tuple_expression(true, false);
    NodePtr condition, otherwise;
    if (skip_word("if")) condition = expression();
    if (skip_word("recursive")) made->name = "recursive";
    end_tag();
    ++loops_;
    auto body = statements({"else", "endfor"});
    --loops_;
    if (skip_word("else")) {
      end_tag();
      otherwise = statements({"endfor"});
    }
    expect_word("endfor");
    end_tag();
    for (auto* child : {&target, &list, &condition, &body, &otherwise}) made->children.push_back(std::move(*child));
    return made;
  }

  NodePtr set_statement() {
    auto target = target_list(true);
    if (skip_symbol("=")) {
      auto made = node_of(Kind::set, "", std::move(target), tuple_expression());
      end_tag();
      return made;
    }
    NodePtr chain;
    if (is_symbol("|")) chain = filters(node(Kind::captured));
    auto body = body_until("endset");
    return node_of(Kind::set_block, "", std::move(target), std::move(body), std::move(chain));
  }

  NodePtr macro_statement() {
    auto made = node(Kind::macro, identifier());
    made->named = parameters();
    made->children.push_back(body_until("endmacro"));
    return made;
  }

  NodePtr call_statement() {
    auto made = node(Kind::call_block);
    if (is_symbol("(")) made->named = parameters();
    made->children.push_back(expression());
    if (made->children[0]->kind != Kind::call) fail("{% call %} takes a call");
    made->children.push_back(body_until("endcall"));
    return made;
  }

  NodePtr filter_statement() {
    auto chain = filters(node(Kind::captured), true);
    auto body = body_until("endfilter");
    return node_of(Kind::filter_block, "", std::move(chain), std::move(body));
  }

  NodePtr with_statement() {
    auto made = node(Kind::with);
    while (!is(TokenKind::block_end)) {
      if (!made->named.empty()) expect_symbol(",");
      auto name = identifier();
      expect_symbol("=");
      made->named.emplace_back(std::move(name), expression());
    }
    made->children.push_back(body_until("endwith"));
    return made;
  }

  /// Marks what the assistant said, for training; here its body alone counts.
  NodePtr generation_statement() { return body_until("endgeneration"); }

  NodePtr leave_statement() { return jump(Kind::leave); }
  NodePtr next_statement() { return jump(Kind::next); }
  NodePtr jump(Kind kind) {
    if (loops_ == 0) fail("break and continue belong into a loop");
    end_tag();
    return node(kind);
  }

  std::vector<std::pair<std::string, NodePtr>> parameters() {
    std::vector<std::pair<std::string, NodePtr>> all;
    expect_symbol("(");
    while (!skip_symbol(")")) {
      if (!all.empty()) expect_symbol(",");
      auto name = identifier();
      NodePtr otherwise;
      if (skip_symbol("=")) otherwise = expression();
      all.emplace_back(std::move(name), std::move(otherwise));
    }
    return all;
  }

  NodePtr target(bool attributes) {
    if (skip_symbol("(")) {
      auto inner = target_list();
      expect_symbol(")");
      return inner;
    }
    auto made = node(Kind::name, identifier());
    if (attributes && skip_symbol(".")) made = node_of(Kind::attribute, identifier(), std::move(made));
    return made;
  }

  NodePtr target_list(bool attributes = false) {
    auto first = target(attributes);
    if (!is_symbol(",")) return first;
    auto made = node_of(Kind::tuple, "", std::move(first));
    while (skip_symbol(",")) {
      if (is_word("in") || is_symbol("=")) break;
      made->children.push_back(target(attributes));
    }
    return made;
  }

  // --- expressions

  NodePtr expression(bool conditional = true) {
    const Deeper deeper(*this);
    return conditional ? condition() : disjunction();
  }

  bool tuple_ends() const {
    return is(TokenKind::block_end) || is(TokenKind::output_end) || is_symbol(")") || is_symbol("=");
  }

  /// One expression, or several with commas between them.
  NodePtr tuple_expression(bool commas = true, bool conditional = true) {
    auto first = expression(conditional);
    if (!commas || !is_symbol(",")) return first;
    auto made = node_of(Kind::tuple, "", std::move(first));
    while (skip_symbol(",")) {
      if (tuple_ends()) break;
      made->children.push_back(expression(conditional));
    }
    return made;
  }

  NodePtr condition() {
    auto value = disjunction();
    while (skip_word("if")) {
      auto test = disjunction();
      NodePtr otherwise;
      if (skip_word("else")) otherwise = expression();
      value = node_of(Kind::conditional, "", std::move(value), std::move(test), std::move(otherwise));
    }
    return value;
  }

  NodePtr disjunction() {
    auto left = conjunction();
    for (int length = 0; skip_word("or"); check_length(++length)) {
      left = node_of(Kind::binary, "or", std::move(left), conjunction());
    }
    return left;
  }

  NodePtr conjunction() {
    auto left = inversion();
    for (int length = 0; skip_word("and"); check_length(++length)) {
      left = node_of(Kind::binary, "and", std::move(left), inversion());
    }
    return left;
  }

  NodePtr inversion() {
    const Deeper deeper(*this);
    if (skip_word("not")) return node_of(Kind::negation, "", inversion());
    return comparison();
  }

  NodePtr comparison() {
    auto first = sum();
    NodePtr made;
    for (;;) {
      const auto op = comparison_operator();
      if (op.empty()) return made ? std::move(made) : std::move(first);
      if (!made) made = node_of(Kind::comparison, "", std::move(first));
      made->named.emplace_back(op, nullptr);
      made->children.push_back(sum());
    }
  }

  std::string comparison_operator() {
    for (const auto* op : {"==", "!=", "<=", ">=", "<", ">"}) {
      if (skip_symbol(op)) return op;
    }
    if (skip_word("in")) return "in";
    if (is_word("not") && ahead().kind == TokenKind::name && ahead().value == "in") {
      at_ += 2;
      return "not in";
    }
    return {};
  }

  template <typename Next>
  NodePtr left_to_right(std::initializer_list<const char*> operators, Next&& next) {
    auto left = next();
    for (int length = 0;; check_length(++length)) {
      const auto* op = std::ranges::find_if(operators, [&](const char* known) { return skip_symbol(known); });
      if (op == operators.end()) return left;
      left = node_of(Kind::binary, *op, std::move(left), next());
    }
  }

  NodePtr sum() {
    return left_to_right({"+", "-"}, [&] { return concatenation(); });
  }
  NodePtr concatenation() {
    return left_to_right({"~"}, [&] { return product(); });
  }
  NodePtr product() {
    return left_to_right({"*", "//", "/", "%"}, [&] { return power(); });
  }
  NodePtr power() {
    return left_to_right({"**"}, [&] { return signed_value(true); });
  }

  NodePtr signed_value(bool with_filters) {
    const Deeper deeper(*this);
    NodePtr made;
    for (const auto* sign : {"-", "+"}) {
      if (!made && skip_symbol(sign)) made = node_of(Kind::unary, sign, signed_value(false));
    }
    if (!made) made = primary();
    made = postfix(std::move(made));
    return with_filters ? filters_and_tests(std::move(made)) : std::move(made);
  }

  NodePtr constant(Value value) {
    auto made = node(Kind::constant);
    made->value = std::move(value);
    return made;
  }

  NodePtr primary() {
    const auto token = current();
    switch (token.kind) {
      case TokenKind::name: return word();
      case TokenKind::text: {
        std::string all;
        while (is(TokenKind::text)) all += take().value;
        return constant(std::move(all));
      }
      case TokenKind::integer: ++at_; return constant(parsed<std::int64_t>(token));
      case TokenKind::real: ++at_; return constant(parsed<double>(token));
      default: break;
    }
    if (skip_symbol("(")) return parenthesis();
    if (skip_symbol("[")) return list_of(Kind::list, "]");
    if (skip_symbol("{")) return dictionary();
    fail("a value is expected here, not " + seen());
  }

  template <typename Number>
  Value parsed(const Token& token) const {
    Number number{};
    const auto* end = token.value.data() + token.value.size();
    const auto result = std::from_chars(token.value.data(), end, number);
    if (result.ec != std::errc()) fail("the number " + token.value + " is too large");
    return number;
  }

  NodePtr word() {
    static constexpr std::pair<std::string_view, int> kConstants[] = {{"true", 1},  {"True", 1}, {"false", 0},
                                                                      {"False", 0}, {"none", 2}, {"None", 2}};
    const auto name = take().value;
    const auto* known = std::ranges::find_if(kConstants, [&](const auto& entry) { return entry.first == name; });
    if (known == std::end(kConstants)) return node(Kind::name, name);
    return constant(known->second == 2 ? Value(None{}) : Value(known->second == 1));
  }

  NodePtr parenthesis() {
    if (skip_symbol(")")) return node(Kind::tuple);
    auto inner = tuple_expression();
    expect_symbol(")");
    return inner;
  }

  NodePtr list_of(Kind kind, std::string_view close) {
    auto made = node(kind);
    while (!skip_symbol(close)) {
      if (!made->children.empty()) {
        expect_symbol(",");
        if (skip_symbol(close)) break;
      }
      made->children.push_back(expression());
    }
    return made;
  }

  NodePtr dictionary() {
    auto made = node(Kind::dict);
    while (!skip_symbol("}")) {
      if (!made->children.empty()) {
        expect_symbol(",");
        if (skip_symbol("}")) break;
      }
      made->children.push_back(expression());
      expect_symbol(":");
      made->children.push_back(expression());
    }
    return made;
  }

  NodePtr postfix(NodePtr subject) {
    for (int length = 0;; check_length(++length)) {
      if (skip_symbol(".")) {
        subject = attribute(std::move(subject));
      } else if (skip_symbol("[")) {
        subject = subscript(std::move(subject));
      } else if (is_symbol("(")) {
        subject = call(std::move(subject));
      } else {
        return subject;
      }
    }
  }

  NodePtr attribute(NodePtr subject) {
    if (is(TokenKind::integer)) {
      const auto token = take();
      return node_of(Kind::subscript, "", std::move(subject), constant(parsed<std::int64_t>(token)));
    }
    return node_of(Kind::attribute, identifier(), std::move(subject));
  }

  NodePtr subscript(NodePtr subject) {
    NodePtr parts[3];
    int colons = 0;
    while (!is_symbol("]")) {
      if (skip_symbol(":")) {
        if (++colons > 2) fail("a slice has at most two ':'");
      } else {
        if (parts[colons]) fail("']' is expected here, not " + seen());
        parts[colons] = expression();
      }
    }
    expect_symbol("]");
    if (colons > 0) {
      return node_of(Kind::slice, "", std::move(subject), std::move(parts[0]), std::move(parts[1]),
                     std::move(parts[2]));
    }
    if (!parts[0]) fail("[] needs an index");
    return node_of(Kind::subscript, "", std::move(subject), std::move(parts[0]));
  }

  void arguments(Node& into) {
    expect_symbol("(");
    for (bool first = true; !skip_symbol(")"); first = false) {
      if (!first) {
        expect_symbol(",");
        if (skip_symbol(")")) return;
      }
      if (is(TokenKind::name) && ahead().kind == TokenKind::symbol && ahead().value == "=") {
        auto name = take().value;
        ++at_;
        into.named.emplace_back(std::move(name), expression());
      } else {
        if (!into.named.empty()) fail("an argument without a name stands after one with a name");
        into.children.push_back(expression());
      }
    }
  }

  NodePtr call(NodePtr function) {
    auto made = node_of(Kind::call, "", std::move(function));
    arguments(*made);
    return made;
  }

  NodePtr filters(NodePtr subject, bool first_without_bar = false) {
    for (int length = 0; first_without_bar || skip_symbol("|"); check_length(++length)) {
      first_without_bar = false;
      auto name = identifier();
      while (skip_symbol(".")) name += "." + identifier();
      subject = node_of(Kind::filter, std::move(name), std::move(subject));
      if (is_symbol("(")) arguments(*subject);
    }
    return subject;
  }

  NodePtr filters_and_tests(NodePtr subject) {
    for (int length = 0;; check_length(++length)) {
      if (is_symbol("|")) {
        subject = filters(std::move(subject));
      } else if (is_word("is")) {
        ++at_;
        subject = test(std::move(subject));
      } else if (is_symbol("(")) {
        subject = call(std::move(subject));
      } else {
        return subject;
      }
    }
  }

  NodePtr test(NodePtr subject) {
    const bool negated = skip_word("not");
    auto made = node_of(Kind::test, identifier(), std::move(subject));
    const bool value = is(TokenKind::text) || is(TokenKind::integer) || is(TokenKind::real) || is_symbol("[") ||
                       is_symbol("{") ||
                       (is(TokenKind::name) && !is_word({"else", "or", "and", "if", "is", "not", "in"}));
    if (is_symbol("(")) {
      arguments(*made);
    } else if (value) {
      made->children.push_back(postfix(primary()));
    }
    return negated ? node_of(Kind::negation, "", std::move(made)) : std::move(made);
  }

  std::vector<Token> tokens_;
  std::size_t at_ = 0;
  int depth_ = 0, loops_ = 0;
};

}  // namespace

NodePtr parse(std::string_view source) { return Parser(source).run(); }

}  // namespace gka::serve::jinja
