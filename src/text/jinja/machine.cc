// SPDX-License-Identifier: Apache-2.0
// Statements; eval.cc has the expressions.
#include "text/jinja/machine.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/text.h"
#include "lodestone/error.h"
#include "text/jinja/objects.h"

namespace lode::jinja {

const Value* Scope::find(std::string_view name) const {
  for (const Scope* scope = this; scope != nullptr; scope = scope->outer)
    for (const auto& [known, value] : scope->names)
      if (known == name) return &value;
  return nullptr;
}

void Scope::set(std::string_view name, Value value) {
  for (auto& [known, old] : names) {
    if (known != name) continue;
    old = std::move(value);
    return;
  }
  names.emplace_back(name, std::move(value));
}

/// A scope for as long as it lives.
class Machine::Inner {
 public:
  Inner(Machine& machine, Scope* outer) : machine_(machine), scope_(machine.open(outer)) {}
  ~Inner() { machine_.close(scope_); }
  Scope* operator->() const { return scope_; }
  operator Scope*() const { return scope_; }

 private:
  Machine& machine_;
  Scope* scope_;
};

Scope* Machine::open(Scope* outer) {
  spend(1);
  take(sizeof(Scope));
  scopes_.push_back({.outer = outer, .names = {}});
  return &scopes_.back();
}

/// What a macro looks into stays until the end.
void Machine::close(Scope* scope) {
  if (!scope->kept) scope->names.clear();
  if (!scope->kept && scope == &scopes_.back()) scopes_.pop_back();
}

void Machine::fail(const std::string& what) const {
  throw InputError(what);
}

void Machine::spend(std::size_t steps) {
  steps_ += steps;
  if (steps_ > limits_.steps)
    fail(
        fmt::format("expected a template that ends, found one that takes more than {} steps", limits_.steps));
}

void Machine::take(std::size_t bytes) {
  if (bytes > limits_.bytes || bytes_ + bytes > limits_.bytes)
    fail(fmt::format("expected a template that makes at most {} of text, found more",
                     human_bytes(static_cast<std::int64_t>(limits_.bytes))));
  bytes_ += bytes;
}

std::shared_ptr<Object> Machine::keep(std::unique_ptr<Object> object) {
  take(sizeof(Scope));
  kept_.push_back(std::move(object));
  return {std::shared_ptr<Object>(), kept_.back().get()};  // owns nothing
}

Text Machine::run(const Body& body, std::vector<std::pair<std::string, Value>> globals) {
  Inner root(*this, nullptr);
  root->names = std::move(globals);
  root->kept = true;
  root_ = root;
  Text out;
  if (exec(body, root_, out) != Flow::on)
    fail("expected 'break' and 'continue' within a loop, found one outside");
  return out;
}

void Machine::print(Text& out, const Text& text) {
  take(text.size());
  out.append(text);
}

Machine::Flow Machine::exec(const Body& body, Scope* scope, Text& out) {
  for (const Stmt& stmt : body)
    if (const Flow flow = exec(stmt, scope, out); flow != Flow::on) return flow;
  return Flow::on;
}

Machine::Flow Machine::exec(const Stmt& stmt, Scope* scope, Text& out) {
  spend(1);
  line_ = stmt.line;
  if (++depth_ > limits_.depth)
    fail(fmt::format("expected calls at most {} deep, found more", limits_.depth));
  struct Up {
    int& depth;
    ~Up() { --depth; }
  } up{depth_};
  switch (stmt.kind) {
    case Stmt::Kind::text:
      print(out, Text(stmt.text));
      return Flow::on;
    case Stmt::Kind::output:
      print(out, str(eval(*stmt.exprs[0], scope)));
      return Flow::on;
    case Stmt::Kind::loop:
      exec_loop(stmt, scope, eval(*stmt.exprs[1], scope), 0, out);
      return Flow::on;
    case Stmt::Kind::branch:
      return exec_branch(stmt, scope, out);
    case Stmt::Kind::set:
      assign(*stmt.exprs[0], scope, eval(*stmt.exprs[1], scope));
      return Flow::on;
    case Stmt::Kind::set_block:
      exec_set_block(stmt, scope);
      return Flow::on;
    case Stmt::Kind::macro:
      scope->kept = true;
      scope->set(stmt.text, std::make_shared<Macro>(stmt, scope));
      return Flow::on;
    case Stmt::Kind::call:
      exec_call(stmt, scope, out);
      return Flow::on;
    case Stmt::Kind::filter: {
      const Value inner = made(exec_inner(stmt, scope));
      print(out, str(eval_filter(*stmt.exprs[0], scope, &inner)));
      return Flow::on;
    }
    case Stmt::Kind::with:
      exec_with(stmt, scope, out);
      return Flow::on;
    case Stmt::Kind::block:
      print(out, exec_inner(stmt, scope));
      return Flow::on;
    case Stmt::Kind::leave:
      return Flow::leave;
    case Stmt::Kind::next:
      break;
  }
  return Flow::next;
}

Machine::Flow Machine::exec_branch(const Stmt& stmt, Scope* scope, Text& out) {
  for (std::size_t i = 0; i < stmt.exprs.size(); ++i)
    if (eval(*stmt.exprs[i], scope).truthy()) return exec(stmt.bodies[i], scope, out);
  return stmt.bodies.size() > stmt.exprs.size() ? exec(stmt.bodies.back(), scope, out) : Flow::on;
}

Text Machine::exec_inner(const Stmt& stmt, Scope* scope) {
  Inner inner(*this, scope);
  Text out;
  if (exec(stmt.bodies[0], inner, out) != Flow::on)
    fail("expected no 'break' or 'continue' out of a block, found one");
  return out;
}

void Machine::exec_set_block(const Stmt& stmt, Scope* scope) {
  const Value text = made(exec_inner(stmt, scope));
  const ExprPtr& filters = stmt.exprs[1];
  assign(*stmt.exprs[0], scope, filters == nullptr ? text : eval_filter(*filters, scope, &text));
}

void Machine::exec_with(const Stmt& stmt, Scope* scope, Text& out) {
  Inner inner(*this, scope);
  for (std::size_t i = 0; i < stmt.exprs.size(); i += 2)
    assign(*stmt.exprs[i], inner, eval(*stmt.exprs[i + 1], scope));
  if (exec(stmt.bodies[0], inner, out) != Flow::on)
    fail("expected no 'break' or 'continue' out of 'with', found one");
}

void Machine::exec_call(const Stmt& stmt, Scope* scope, Text& out) {
  scope->kept = true;
  Arguments arguments = eval_arguments(*stmt.call, scope);
  arguments.named.emplace_back("caller", std::make_shared<Macro>(stmt, scope));
  print(out, str(call(eval(*stmt.call->parts[0], scope), std::move(arguments))));
}

void Machine::assign(const Expr& target, Scope* scope, const Value& value) {
  if (target.kind == Expr::Kind::name) return scope->set(target.text, value);
  if (target.kind == Expr::Kind::attribute) {
    const Value space = eval(*target.parts[0], scope);
    auto* const names = space.is(Kind::object) ? dynamic_cast<Namespace*>(&space.object()) : nullptr;
    if (names == nullptr)
      fail("expected a namespace to set '" + target.text + "' in, found " + std::string(space.type_name()));
    return names->set(target.text, value);
  }
  const std::vector<Value> items = elements(value);
  if (items.size() != target.parts.size())
    fail(fmt::format("expected {} values for as many names, found {}", target.parts.size(), items.size()));
  for (std::size_t i = 0; i < items.size(); ++i) assign(*target.parts[i], scope, items[i]);
}

void Machine::exec_loop(const Stmt& stmt, Scope* scope, const Value& list, int level, Text& out) {
  std::vector<Value> items = elements(list);
  if (const ExprPtr& wanted = stmt.exprs[2]; wanted != nullptr) {
    std::erase_if(items, [&](const Value& item) {
      Inner inner(*this, scope);
      assign(*stmt.exprs[0], inner, item);
      return !eval(*wanted, inner).truthy();
    });
  }
  if (items.empty()) {
    Inner inner(*this, scope);
    if (exec(stmt.bodies[1], inner, out) != Flow::on)
      fail("expected no 'break' or 'continue' in a loop's 'else', found one");
    return;
  }
  const auto loop = std::make_shared<Loop>(std::move(items), level, stmt, scope);
  for (std::size_t i = 0; i < loop->size(); ++i) {
    Inner inner(*this, scope);
    loop->go_to(i);
    inner->set("loop", std::shared_ptr<Object>(loop));
    assign(*stmt.exprs[0], inner, loop->item());
    if (exec(stmt.bodies[0], inner, out) == Flow::leave) return;
  }
}

Text Machine::run_loop(const Stmt& loop, Scope* scope, const Value& list, int level) {
  Text out;
  exec_loop(loop, scope, list, level, out);
  return out;
}

/// By position, by name, by default; a default may look at the parameters before it.
void Machine::bind_parameters(const Stmt& macro, Scope* scope, Arguments& arguments) {
  const std::size_t count = macro.names.size(), defaults = count - macro.exprs.size();
  for (std::size_t i = 0; i < count; ++i) {
    const std::string& name = macro.names[i];
    const auto named = std::find_if(arguments.named.begin(), arguments.named.end(),
                                    [&](const auto& given) { return given.first == name; });
    if (i < arguments.positional.size()) {
      scope->set(name, arguments.positional[i]);
    } else if (named != arguments.named.end()) {
      scope->set(name, named->second);
      arguments.named.erase(named);
    } else {
      scope->set(name, i < defaults ? Value::undefined(name) : eval(*macro.exprs[i - defaults], scope));
    }
  }
}

Text Machine::run_macro(const Stmt& macro, Scope* scope, Arguments arguments, const Value* caller) {
  Inner inner(*this, scope);
  if (caller != nullptr) inner->set("caller", *caller);
  bind_parameters(macro, inner, arguments);
  const std::size_t count = std::min(macro.names.size(), arguments.positional.size());
  std::vector<Value> more(arguments.positional.begin() + static_cast<std::ptrdiff_t>(count),
                          arguments.positional.end());
  if (!more.empty() && !macro.wants_more)
    fail(fmt::format("macro '{}': expected at most {} arguments, found {}", macro.text, macro.names.size(),
                     arguments.positional.size()));
  if (!arguments.named.empty() && !macro.wants_named_more)
    fail(fmt::format("macro '{}': expected no argument '{}', found one", macro.text,
                     arguments.named.front().first));
  inner->set("varargs", Value::list(std::move(more), true));
  std::vector<Value::Entry> named;
  for (auto& [name, value] : arguments.named) named.emplace_back(name, value);
  inner->set("kwargs", Value::mapping(std::move(named)));
  Text out;
  if (exec(macro.bodies[0], inner, out) != Flow::on)
    fail("expected no 'break' or 'continue' out of a macro, found one");
  return out;
}

}  // namespace lode::jinja
