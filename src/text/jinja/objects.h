// SPDX-License-Identifier: Apache-2.0
// Macros, loops and namespaces as values of a template.
#pragma once

#include "text/jinja/ast.h"
#include "text/jinja/machine.h"

namespace lode::jinja {

/// A macro or the body of a call block; it sees the names of where it was made.
class Macro : public Object {
 public:
  Macro(const Stmt& stmt, Scope* scope) : stmt_(stmt), scope_(scope) {}
  std::string name() const override { return "macro '" + stmt_.text + "'"; }
  std::optional<Value> attribute(std::string_view name) const override;
  bool callable() const override { return true; }
  Value call(Machine& machine, Arguments arguments) override;

 private:
  const Stmt& stmt_;
  Scope* scope_;
};

class Namespace : public Object {
 public:
  std::string name() const override { return "a namespace"; }
  std::optional<Value> attribute(std::string_view name) const override;
  void set(std::string_view name, Value value) { names_.set(name, std::move(value)); }

 private:
  Scope names_;
};

/// `loop` within a loop.
class Loop : public Object {
 public:
  Loop(std::vector<Value> items, int level, const Stmt& stmt, Scope* scope)
      : items_(std::move(items)), level_(level), stmt_(stmt), scope_(scope) {}
  std::size_t size() const { return items_.size(); }
  void go_to(std::size_t at) { at_ = at; }
  const Value& item() const { return items_[at_]; }

  std::string name() const override { return "a loop"; }
  std::optional<Value> attribute(std::string_view name) const override;
  bool callable() const override { return true; }
  Value call(Machine& machine, Arguments arguments) override;  ///< goes down, in a recursive loop

 private:
  class Cycle;
  class Changed;
  std::vector<Value> items_;
  std::size_t at_ = 0;
  int level_;
  const Stmt& stmt_;
  Scope* scope_;
  std::shared_ptr<Object> changed_ = nullptr;
  mutable std::vector<Value> last_;  ///< what loop.changed was asked last
  friend class Changed;
};

}  // namespace lode::jinja
