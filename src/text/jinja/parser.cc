// SPDX-License-Identifier: Apache-2.0
#include "text/jinja/parser.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <set>

#include "base/text.h"
#include "lodestone/error.h"
#include "text/jinja/lexer.h"

namespace lode::jinja {

namespace {

constexpr int kDeepestTree = 250;      // operators and brackets in one another
constexpr int kDeepestBrackets = 120;  // each takes a dozen calls of the parser

class Parser {
 public:
  explicit Parser(std::string_view source) : tokens_(tokenize(source)) {}

  Body run() {
    Body body = parse_body({});
    if (!at(Token::Kind::end)) fail("expected the end of the template, found " + shown());
    return body;
  }

 private:
  using Kind = Token::Kind;
  using Words = std::initializer_list<std::string_view>;

  // The words.
  const Token& now() const { return tokens_[next_]; }
  const Token& after() const { return tokens_[std::min(next_ + 1, tokens_.size() - 1)]; }
  bool at(Kind kind) const { return now().kind == kind; }
  bool at_op(std::string_view op) const { return at(Kind::op) && now().text == op; }
  bool at_name(std::string_view name) const { return at(Kind::name) && now().text == name; }
  bool at_any(Words names) const {
    return at(Kind::name) && std::find(names.begin(), names.end(), now().text) != names.end();
  }
  Token take() { return tokens_[at(Kind::end) ? next_ : next_++]; }
  bool take_op(std::string_view op) {
    if (!at_op(op)) return false;
    take();
    return true;
  }
  bool take_name(std::string_view name) {
    if (!at_name(name)) return false;
    take();
    return true;
  }
  std::string shown() const;
  [[noreturn]] void fail(const std::string& what) const {
    throw InputError(fmt::format("line {}: {}", now().line, what));
  }
  void expect_op(std::string_view op) {
    if (!take_op(op)) fail(fmt::format("expected '{}', found {}", op, shown()));
  }
  std::string expect_a_name(const char* what) {
    if (!at(Kind::name)) fail(fmt::format("expected {}, found {}", what, shown()));
    return take().text;
  }

  /// Counts one level deeper as long as it lives.
  class Level {
   public:
    explicit Level(Parser& parser) : parser_(parser) {
      if (++parser_.level_ > kDeepestBrackets)
        parser_.fail(
            fmt::format("expected at most {} brackets or tags in one another, found more", kDeepestBrackets));
    }
    ~Level() { --parser_.level_; }

   private:
    Parser& parser_;
  };

  // Expressions, the loosest operator first.
  ExprPtr make(Expr::Kind kind, std::vector<ExprPtr> parts, std::string text = "");
  template <class... P>
  ExprPtr node(Expr::Kind kind, std::string text, P... parts) {
    std::vector<ExprPtr> all;
    (all.push_back(std::move(parts)), ...);
    return make(kind, std::move(all), std::move(text));
  }
  ExprPtr expression(bool conditional = true);
  ExprPtr conditional();
  ExprPtr either();
  ExprPtr both();
  ExprPtr negation();
  ExprPtr comparison();
  ExprPtr sum();
  ExprPtr concat();
  ExprPtr product();
  ExprPtr power();
  ExprPtr unary(bool with_filters = true);
  ExprPtr primary();
  ExprPtr constant(Value value);
  ExprPtr name_or_constant();
  ExprPtr list_literal();
  ExprPtr mapping_literal();
  ExprPtr postfix(ExprPtr node);
  ExprPtr filters(ExprPtr node);
  ExprPtr subscript(ExprPtr node);
  ExprPtr filter_of(ExprPtr input);
  ExprPtr test_of(ExprPtr input);
  ExprPtr call_of(ExprPtr callee);
  void arguments(Expr& call);
  ExprPtr tuple(bool conditional, bool brackets, Words ends = {});
  std::string dotted_name(const char* what);

  // Statements.
  Body parse_body(Words ends);
  Body body_until(Words ends, const std::string& tag);
  void statement(Body& body);
  Stmt loop();
  Stmt branch();
  Stmt set();
  Stmt macro();
  Stmt call_block();
  Stmt filter_block();
  Stmt with();
  Stmt plain_block(const std::string& end);
  void signature(Stmt& macro);
  void macro_body(Stmt& macro, const std::string& end);
  ExprPtr target(bool attributes);
  ExprPtr one_target(bool attributes);
  void end_of_tag();

  std::vector<Token> tokens_;
  std::size_t next_ = 0;
  int level_ = 0;
  std::vector<std::string> open_tags_;
  std::set<std::string> names_;  ///< that the macro being read looks at
};

std::string Parser::shown() const {
  switch (now().kind) {
    case Kind::end:
      return "the end of the template";
    case Kind::block_end:
    case Kind::output_end:
      return "the end of the tag";
    case Kind::text:
    case Kind::block_begin:
    case Kind::output_begin:
      return "the text behind a tag";
    default:
      return "'" + excerpt(now().text) + "'";
  }
}

ExprPtr Parser::make(Expr::Kind kind, std::vector<ExprPtr> parts, std::string text) {
  auto node = std::make_unique<Expr>();
  node->kind = kind;
  node->line = now().line;
  node->text = std::move(text);
  for (const ExprPtr& part : parts)
    if (part != nullptr) node->depth = std::max(node->depth, part->depth + 1);
  if (node->depth > kDeepestTree)
    fail(fmt::format("expected at most {} operators on one another, found more", kDeepestTree));
  node->parts = std::move(parts);
  return node;
}

ExprPtr Parser::expression(bool conditional) {
  const Level level(*this);
  return conditional ? this->conditional() : either();
}

ExprPtr Parser::conditional() {
  ExprPtr value = either();
  while (take_name("if")) {
    ExprPtr condition = either(), otherwise;
    if (take_name("else")) otherwise = expression();
    value = node(Expr::Kind::conditional, "", std::move(condition), std::move(value), std::move(otherwise));
  }
  return value;
}

ExprPtr Parser::either() {
  ExprPtr left = both();
  while (take_name("or")) left = node(Expr::Kind::either, "", std::move(left), both());
  return left;
}

ExprPtr Parser::both() {
  ExprPtr left = negation();
  while (take_name("and")) left = node(Expr::Kind::both, "", std::move(left), negation());
  return left;
}

ExprPtr Parser::negation() {
  if (!take_name("not")) return comparison();
  const Level level(*this);
  return node(Expr::Kind::negation, "", negation());
}

ExprPtr Parser::comparison() {
  std::vector<ExprPtr> parts;
  std::vector<std::string> ops;
  parts.push_back(sum());
  for (;;) {
    static constexpr std::array<std::string_view, 6> kOps = {"==", "!=", "<", "<=", ">", ">="};
    if (at(Kind::op) && std::find(kOps.begin(), kOps.end(), now().text) != kOps.end()) {
      ops.push_back(take().text);
    } else if (take_name("in")) {
      ops.emplace_back("in");
    } else if (at_name("not") && after().kind == Kind::name && after().text == "in") {
      take();
      take();
      ops.emplace_back("not in");
    } else {
      break;
    }
    parts.push_back(sum());
  }
  if (ops.empty()) return std::move(parts.front());
  ExprPtr node = make(Expr::Kind::compare, std::move(parts));
  node->ops = std::move(ops);
  return node;
}

ExprPtr Parser::sum() {
  ExprPtr left = concat();
  while (at_op("+") || at_op("-")) {
    const std::string op = take().text;
    left = node(Expr::Kind::binary, op, std::move(left), concat());
  }
  return left;
}

ExprPtr Parser::concat() {
  std::vector<ExprPtr> parts;
  do parts.push_back(product());
  while (take_op("~"));
  return parts.size() == 1 ? std::move(parts.front()) : make(Expr::Kind::concat, std::move(parts));
}

ExprPtr Parser::product() {
  ExprPtr left = power();
  while (at_op("*") || at_op("/") || at_op("//") || at_op("%")) {
    const std::string op = take().text;
    left = node(Expr::Kind::binary, op, std::move(left), power());
  }
  return left;
}

ExprPtr Parser::power() {
  ExprPtr left = unary();
  while (take_op("**")) left = node(Expr::Kind::binary, "**", std::move(left), unary());
  return left;
}

ExprPtr Parser::unary(bool with_filters) {
  const Level level(*this);
  ExprPtr value;
  if (at_op("-") || at_op("+")) {
    const std::string op = take().text;
    value = node(Expr::Kind::unary, op, unary(false));
  } else {
    value = primary();
  }
  value = postfix(std::move(value));
  return with_filters ? filters(std::move(value)) : std::move(value);
}

ExprPtr Parser::constant(Value value) {
  ExprPtr node = make(Expr::Kind::constant, {});
  node->value = std::move(value);
  return node;
}

ExprPtr Parser::name_or_constant() {
  const std::string name = take().text;
  if (name == "true" || name == "True") return constant(true);
  if (name == "false" || name == "False") return constant(false);
  if (name == "none" || name == "None") return constant(Value::none());
  names_.insert(name);
  return make(Expr::Kind::name, {}, name);
}

ExprPtr Parser::primary() {
  if (at(Kind::name)) return name_or_constant();
  if (at(Kind::string)) {
    std::string text;
    while (at(Kind::string)) text += take().text;
    return constant(Text(std::move(text)));
  }
  if (at(Kind::integer)) {
    std::int64_t value = 0;
    const std::string& digits = now().text;
    if (std::from_chars(digits.data(), digits.data() + digits.size(), value).ec != std::errc())
      fail("expected a whole number of 63 bits, found " + digits);
    take();
    return constant(value);
  }
  if (at(Kind::real)) return constant(std::strtod(take().text.c_str(), nullptr));
  if (take_op("(")) {
    ExprPtr value = tuple(true, true);
    expect_op(")");
    return value;
  }
  if (take_op("[")) return list_literal();
  if (take_op("{")) return mapping_literal();
  fail("expected a value, found " + shown());
}

ExprPtr Parser::list_literal() {
  std::vector<ExprPtr> items;
  while (!at_op("]")) {
    if (!items.empty()) expect_op(",");
    if (at_op("]")) break;
    items.push_back(expression());
  }
  expect_op("]");
  return make(Expr::Kind::list, std::move(items));
}

ExprPtr Parser::mapping_literal() {
  std::vector<ExprPtr> parts;
  while (!at_op("}")) {
    if (!parts.empty()) expect_op(",");
    if (at_op("}")) break;
    parts.push_back(expression());
    expect_op(":");
    parts.push_back(expression());
  }
  expect_op("}");
  return make(Expr::Kind::mapping, std::move(parts));
}

/// Values with commas between them are a tuple; `ends` are names that end it.
ExprPtr Parser::tuple(bool conditional, bool brackets, Words ends) {
  std::vector<ExprPtr> parts;
  bool comma = false;
  const auto ended = [&] {
    return at_op(")") || at(Kind::block_end) || at(Kind::output_end) || at_any(ends);
  };
  while (!ended()) {
    parts.push_back(expression(conditional));
    if (!take_op(",")) break;
    comma = true;
  }
  if (parts.size() == 1 && !comma) return std::move(parts.front());
  if (parts.empty() && !brackets) fail("expected a value, found " + shown());
  return make(Expr::Kind::tuple, std::move(parts));
}

ExprPtr Parser::postfix(ExprPtr node) {
  for (;;) {
    if (at_op(".") || at_op("["))
      node = subscript(std::move(node));
    else if (at_op("("))
      node = call_of(std::move(node));
    else
      return node;
  }
}

ExprPtr Parser::filters(ExprPtr node) {
  for (;;) {
    if (take_op("|"))
      node = filter_of(std::move(node));
    else if (take_name("is"))
      node = test_of(std::move(node));
    else if (at_op("("))
      node = call_of(std::move(node));
    else
      return node;
  }
}

ExprPtr Parser::subscript(ExprPtr object) {
  if (take_op(".")) {
    if (at(Kind::integer)) {
      ExprPtr key = primary();
      return node(Expr::Kind::item, "", std::move(object), std::move(key));
    }
    const std::string name = expect_a_name("the name of an attribute");
    return node(Expr::Kind::attribute, name, std::move(object));
  }
  expect_op("[");
  const auto bound = [&]() -> ExprPtr { return at_op(":") || at_op("]") ? nullptr : expression(); };
  ExprPtr start = bound();
  if (take_op(":")) {
    ExprPtr stop = bound(), step;
    if (take_op(":")) step = bound();
    expect_op("]");
    return node(Expr::Kind::slice, "", std::move(object), std::move(start), std::move(stop), std::move(step));
  }
  if (start == nullptr) fail("expected a key, found " + shown());
  expect_op("]");
  return node(Expr::Kind::item, "", std::move(object), std::move(start));
}

std::string Parser::dotted_name(const char* what) {
  std::string name = expect_a_name(what);
  while (take_op(".")) name += "." + expect_a_name(what);
  return name;
}

ExprPtr Parser::filter_of(ExprPtr input) {
  const std::string name = dotted_name("the name of a filter");
  ExprPtr result = node(Expr::Kind::filter, name, std::move(input));
  if (at_op("(")) arguments(*result);
  return result;
}

ExprPtr Parser::test_of(ExprPtr input) {
  const bool negated = take_name("not");
  ExprPtr result = node(Expr::Kind::test, "", std::move(input));
  result->text = dotted_name("the name of a test");
  const bool value =
      at(Kind::name) || at(Kind::string) || at(Kind::integer) || at(Kind::real) || at_op("[") || at_op("{");
  if (at_op("(")) {
    arguments(*result);
  } else if (value && !at_any({"else", "or", "and", "if", "is", "not", "in"})) {
    result->parts.push_back(postfix(primary()));
    result->depth = std::max(result->depth, result->parts.back()->depth + 1);
  }
  return negated ? node(Expr::Kind::negation, "", std::move(result)) : std::move(result);
}

ExprPtr Parser::call_of(ExprPtr callee) {
  ExprPtr call = node(Expr::Kind::call, "", std::move(callee));
  arguments(*call);
  return call;
}

void Parser::arguments(Expr& call) {
  expect_op("(");
  for (bool first = true; !at_op(")"); first = false) {
    if (!first) expect_op(",");
    if (at_op(")")) break;
    if (at_op("*") || at_op("**")) fail("expected arguments one by one, found " + shown());
    if (at(Kind::name) && after().kind == Kind::op && after().text == "=") {
      const std::string name = take().text;
      take();
      call.named.emplace_back(name, expression());
      call.depth = std::max(call.depth, call.named.back().second->depth + 1);
    } else {
      if (!call.named.empty()) fail("expected a named argument behind a named one, found " + shown());
      call.parts.push_back(expression());
      call.depth = std::max(call.depth, call.parts.back()->depth + 1);
    }
  }
  expect_op(")");
  if (call.depth > kDeepestTree)
    fail(fmt::format("expected at most {} operators on one another, found more", kDeepestTree));
}

void Parser::end_of_tag() {
  if (!at(Kind::block_end)) fail("expected the end of the tag, found " + shown());
  take();
}

/// Up to a tag whose name is one of `ends`; that name is the next word.
Body Parser::parse_body(Words ends) {
  const Level level(*this);
  Body body;
  for (;;) {
    if (at(Kind::text)) {
      const Token text = take();
      body.push_back({.kind = Stmt::Kind::text, .line = text.line, .text = text.text});
    } else if (at(Kind::output_begin)) {
      Stmt output = {.kind = Stmt::Kind::output, .line = take().line};
      output.exprs.push_back(tuple(true, false));
      if (!at(Kind::output_end)) fail("expected the end of the tag, found " + shown());
      take();
      body.push_back(std::move(output));
    } else if (at(Kind::block_begin)) {
      take();
      if (at_any(ends)) return body;
      statement(body);
    } else {
      return body;
    }
  }
}

Body Parser::body_until(Words ends, const std::string& tag) {
  const int line = now().line;
  Body body = parse_body(ends);
  if (!at_any(ends))
    throw InputError(fmt::format("line {}: expected {{% {} %}} for the tag '{}', found {}", line,
                                 std::string(*(ends.end() - 1)), tag, shown()));
  return body;
}

void Parser::statement(Body& body) {
  const Token tag = now();
  const std::string name = expect_a_name("the name of a tag");
  const auto made = [&]() -> Stmt {
    if (name == "for") return loop();
    if (name == "if") return branch();
    if (name == "set") return set();
    if (name == "macro") return macro();
    if (name == "call") return call_block();
    if (name == "filter") return filter_block();
    if (name == "with") return with();
    if (name == "generation") return plain_block("endgeneration");
    if (name == "break" || name == "continue")
      return {.kind = name == "break" ? Stmt::Kind::leave : Stmt::Kind::next};
    throw InputError(
        fmt::format("line {}: expected one of the tags for, if, set, macro, call, filter, with, generation, "
                    "break, continue, raw, found '{}'",
                    tag.line, excerpt(name)));
  };
  Stmt made_one = made();
  made_one.line = tag.line;
  end_of_tag();
  body.push_back(std::move(made_one));
}

ExprPtr Parser::one_target(bool attributes) {
  if (take_op("(")) {
    ExprPtr value = target(attributes);
    expect_op(")");
    return value;
  }
  const std::string name = expect_a_name("a name to assign to");
  ExprPtr value = make(Expr::Kind::name, {}, name);
  if (!attributes || !take_op(".")) return value;
  const std::string attribute = expect_a_name("the name of an attribute");
  return node(Expr::Kind::attribute, attribute, std::move(value));
}

ExprPtr Parser::target(bool attributes) {
  const Level level(*this);
  std::vector<ExprPtr> parts;
  bool comma = false;
  do {
    if (at_name("in") || at_op("=") || at_op(")")) break;
    parts.push_back(one_target(attributes));
    comma = at_op(",") || comma;
  } while (take_op(","));
  if (parts.empty()) fail("expected a name to assign to, found " + shown());
  return comma ? make(Expr::Kind::tuple, std::move(parts)) : std::move(parts.front());
}

Stmt Parser::loop() {
  Stmt loop = {.kind = Stmt::Kind::loop};
  loop.exprs.push_back(target(false));
  if (!take_name("in")) fail("expected 'in', found " + shown());
  loop.exprs.push_back(tuple(false, false, {"recursive", "if"}));
  loop.exprs.push_back(take_name("if") ? expression() : nullptr);
  loop.recursive = take_name("recursive");
  end_of_tag();
  loop.bodies.push_back(body_until({"else", "endfor"}, "for"));
  loop.bodies.emplace_back();
  if (take().text != "else") return loop;
  end_of_tag();
  loop.bodies.back() = body_until({"endfor"}, "for");
  take();
  return loop;
}

Stmt Parser::branch() {
  Stmt branch = {.kind = Stmt::Kind::branch};
  for (std::string tag = "if"; tag != "endif";) {
    if (tag != "else") branch.exprs.push_back(tuple(true, false));
    end_of_tag();
    branch.bodies.push_back(tag == "else" ? body_until({"endif"}, tag)
                                          : body_until({"elif", "else", "endif"}, tag));
    tag = take().text;
  }
  return branch;
}

Stmt Parser::set() {
  Stmt set = {.kind = Stmt::Kind::set};
  set.exprs.push_back(target(true));
  if (take_op("=")) {
    set.exprs.push_back(tuple(true, false));
    return set;
  }
  set.kind = Stmt::Kind::set_block;
  set.exprs.push_back(at_op("|") ? filters(nullptr) : nullptr);
  end_of_tag();
  set.bodies.push_back(body_until({"endset"}, "set"));
  take();
  return set;
}

void Parser::signature(Stmt& macro) {
  expect_op("(");
  for (bool first = true; !at_op(")"); first = false) {
    if (!first) expect_op(",");
    if (at_op(")")) break;
    macro.names.push_back(expect_a_name("the name of a parameter"));
    if (take_op("="))
      macro.exprs.push_back(expression());
    else if (!macro.exprs.empty())
      fail("expected a parameter with a default behind one that has it, found '" + macro.names.back() + "'");
  }
  expect_op(")");
}

void Parser::macro_body(Stmt& macro, const std::string& end) {
  end_of_tag();
  std::set<std::string> outer;
  std::swap(outer, names_);
  macro.bodies.push_back(body_until({end}, end.substr(3)));
  take();
  macro.wants_more = names_.contains("varargs");
  macro.wants_named_more = names_.contains("kwargs");
  names_.insert(outer.begin(), outer.end());
}

Stmt Parser::macro() {
  Stmt macro = {.kind = Stmt::Kind::macro};
  macro.text = expect_a_name("the name of a macro");
  signature(macro);
  macro_body(macro, "endmacro");
  return macro;
}

Stmt Parser::call_block() {
  Stmt call = {.kind = Stmt::Kind::call};
  call.text = "caller";
  if (at_op("(")) signature(call);
  call.call = expression();
  if (call.call->kind != Expr::Kind::call) fail("expected the call of a macro, found another expression");
  macro_body(call, "endcall");
  return call;
}

Stmt Parser::filter_block() {
  Stmt block = {.kind = Stmt::Kind::filter};
  block.exprs.push_back(filters(filter_of(nullptr)));
  end_of_tag();
  block.bodies.push_back(body_until({"endfilter"}, "filter"));
  take();
  return block;
}

Stmt Parser::with() {
  Stmt with = {.kind = Stmt::Kind::with};
  while (!at(Kind::block_end)) {
    if (!with.exprs.empty()) expect_op(",");
    with.exprs.push_back(one_target(false));
    expect_op("=");
    with.exprs.push_back(expression());
  }
  end_of_tag();
  with.bodies.push_back(body_until({"endwith"}, "with"));
  take();
  return with;
}

Stmt Parser::plain_block(const std::string& end) {
  Stmt block = {.kind = Stmt::Kind::block};
  end_of_tag();
  block.bodies.push_back(body_until({end}, end.substr(3)));
  take();
  return block;
}

}  // namespace

Body parse(std::string_view source) {
  return Parser(source).run();
}

}  // namespace lode::jinja
