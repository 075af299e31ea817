// SPDX-License-Identifier: Apache-2.0
// Runs a template's tree. Every node, every element looked at and every byte made is counted against a limit, so that
// a hostile template ends in an error, not in a hang or a full memory.
//
// Names are looked up as in Jinja: loops, macros and blocks have names of their own, `if` has not, and what is set
// inside is forgotten outside; a namespace carries values out.
#pragma once

#include <cstdint>
#include <ctime>
#include <deque>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/jinja/ast.h"
#include "text/jinja/value.h"

namespace lode::jinja {

struct Limits {
  std::size_t steps = 4 << 20;   ///< nodes and elements; 64 bytes of text that is searched are one
  std::size_t bytes = 64 << 20;  ///< of all strings and lists made, in sum
  int depth = 1200;              ///< of nodes and macros in one another
};

struct Scope {
  Scope* outer = nullptr;
  std::vector<std::pair<std::string, Value>> names;
  bool kept = false;  ///< a macro was made in it and looks into it

  const Value* find(std::string_view name) const;  ///< here or further out
  void set(std::string_view name, Value value);    ///< here
};

class Machine {
 public:
  Machine(const Limits& limits, std::time_t now) : limits_(limits), now_(now) {}

  /// What the template prints. InputError without a line; line() is where it happened.
  Text run(const Body& body, std::vector<std::pair<std::string, Value>> globals);
  int line() const { return line_; }

  // For filters, tests, methods and functions.
  [[noreturn]] void fail(const std::string& what) const;
  void spend(std::size_t steps);
  void spend_bytes(std::size_t bytes) { spend(bytes / 64 + 1); }
  /// Counts what is about to be made.
  void take(std::size_t bytes);
  Value made(Text text);
  Value made(std::vector<Value> items, bool tuple = false);
  Text str(const Value& value);  ///< Python's str()
  const Text& text(const Value& value, std::string_view what);
  std::int64_t whole(const Value& value, std::string_view what);
  /// The elements of a list, keys of a mapping, characters of a string; nothing of something undefined.
  std::vector<Value> elements(const Value& value);
  Value attribute(const Value& object, const std::string& name);
  Value item(const Value& object, const Value& key);
  /// "a.b.0"; `otherwise`, if there is one, stands for whatever is undefined on the way.
  Value attribute_path(const Value& object, const Value& path, const Value* otherwise = nullptr);
  Value call(const Value& callee, Arguments arguments);
  Value filter(const std::string& name, const Value& input, Arguments arguments);
  bool test(const std::string& name, const Value& input, Arguments arguments);
  bool contains(const Value& container, const Value& element);
  bool less(const Value& a, const Value& b);
  bool same(const Value& a, const Value& b);
  Value binary(const std::string& op, const Value& left, const Value& right);
  std::time_t now() const { return now_; }
  /// Namespaces may hold themselves, so the machine owns them.
  std::shared_ptr<Object> keep(std::unique_ptr<Object> object);

  // For macros and recursive loops.
  Text run_macro(const Stmt& macro, Scope* scope, Arguments arguments, const Value* caller);
  Text run_loop(const Stmt& loop, Scope* scope, const Value& list, int level);

 private:
  enum class Flow { on, leave, next };
  class Nested;
  class Inner;

  Scope* open(Scope* outer);
  void close(Scope* scope);
  Flow exec(const Body& body, Scope* scope, Text& out);
  Flow exec(const Stmt& stmt, Scope* scope, Text& out);
  Flow exec_branch(const Stmt& stmt, Scope* scope, Text& out);
  void exec_loop(const Stmt& stmt, Scope* scope, const Value& list, int level, Text& out);
  void exec_set_block(const Stmt& stmt, Scope* scope);
  void exec_with(const Stmt& stmt, Scope* scope, Text& out);
  void exec_call(const Stmt& stmt, Scope* scope, Text& out);
  Text exec_inner(const Stmt& stmt, Scope* scope);
  void print(Text& out, const Text& text);
  void assign(const Expr& target, Scope* scope, const Value& value);
  void bind_parameters(const Stmt& macro, Scope* scope, Arguments& arguments);

  Value eval(const Expr& expr, Scope* scope);
  Value eval_node(const Expr& expr, Scope* scope);
  Value eval_name(const Expr& expr, Scope* scope);
  Value eval_mapping(const Expr& expr, Scope* scope);
  Value eval_compare(const Expr& expr, Scope* scope);
  bool compare(const std::string& op, const Value& left, const Value& right);
  Value eval_concat(const Expr& expr, Scope* scope);
  Value eval_unary(const Expr& expr, Scope* scope);
  Value eval_slice(const Expr& expr, Scope* scope);
  Value eval_call(const Expr& expr, Scope* scope);
  Value eval_filter(const Expr& expr, Scope* scope, const Value* block);
  std::vector<Value> eval_all(const std::vector<ExprPtr>& parts, Scope* scope);
  Arguments eval_arguments(const Expr& expr, Scope* scope);

  Value add(const Value& left, const Value& right);
  Value multiply(const Value& left, const Value& right);
  Value arithmetic(const std::string& op, const Value& left, const Value& right);
  Value whole_arithmetic(const std::string& op, std::int64_t left, std::int64_t right);
  Value repeated(const Value& value, std::int64_t times);

  Limits limits_;
  std::time_t now_;
  std::size_t steps_ = 0, bytes_ = 0;
  int depth_ = 0, line_ = 1;
  std::deque<Scope> scopes_;
  std::vector<std::unique_ptr<Object>> kept_;
  Scope* root_ = nullptr;
};

}  // namespace lode::jinja
