// SPDX-License-Identifier: Apache-2.0
// A template as a tree. Trees are as deep as the parser lets them be (kDeepest), so that walking one is safe.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "text/jinja/value.h"

namespace lode::jinja {

struct Expr;
using ExprPtr = std::unique_ptr<Expr>;

struct Expr {
  enum class Kind {
    constant,     ///< value
    name,         ///< text
    list,         ///< parts
    tuple,        ///< parts
    mapping,      ///< parts: key, value, key, value ...
    unary,        ///< text is - or +; parts: operand
    negation,     ///< parts: operand
    binary,       ///< text is + - * / // % **; parts: left, right
    concat,       ///< parts
    compare,      ///< parts: first, others; ops: one less than parts
    both,         ///< and; parts: left, right
    either,       ///< or; parts: left, right
    conditional,  ///< parts: condition, then, else (null: undefined)
    attribute,    ///< parts: object; text
    item,         ///< parts: object, key
    slice,        ///< parts: object, start, stop, step (null: left out)
    call,         ///< parts: callee, arguments; named
    filter,       ///< text; parts: input (null: of a filter block), arguments; named
    test,         ///< text; parts: input, arguments; named
  };
  Kind kind;
  int line = 0;
  std::string text;
  Value value;
  std::vector<ExprPtr> parts;
  std::vector<std::pair<std::string, ExprPtr>> named;
  std::vector<std::string> ops;
  int depth = 1;  ///< of the tree below, itself included
};

struct Stmt;
using Body = std::vector<Stmt>;

struct Stmt {
  enum class Kind {
    text,       ///< text
    output,     ///< exprs: value
    loop,       ///< exprs: target, list, condition (may be null); bodies: body, else
    branch,     ///< exprs: conditions; bodies: one each, and maybe one more for else
    set,        ///< exprs: target, value
    set_block,  ///< exprs: target, filters (may be null); bodies: body
    macro,  ///< text: name; names: parameters; exprs: their defaults (null: none), from the end; bodies: body
    call,   ///< as macro, without a name; call: what is called
    filter,  ///< exprs: filters; bodies: body
    with,    ///< exprs: target, value, target, value ...; bodies: body
    block,   ///< bodies: body, with names of its own
    leave,   ///< break
    next,    ///< continue
  };
  Kind kind;
  int line = 0;
  std::string text;
  std::vector<ExprPtr> exprs;
  std::vector<std::string> names;
  std::vector<Body> bodies;
  ExprPtr call;
  bool recursive = false;                             ///< of a loop
  bool wants_more = false, wants_named_more = false;  ///< of a macro: it looks at varargs, kwargs
};

}  // namespace lode::jinja
