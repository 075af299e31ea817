// SPDX-License-Identifier: Apache-2.0
// Tests: what stands behind `is`.
#include <array>

#include "text/jinja/natives.h"

namespace lode::jinja {

namespace {

template <Kind kind>
Value is_kind(Machine&, const Value& self, const Given&) {
  return self.is(kind);
}

Value is_defined(Machine&, const Value& self, const Given&) {
  return !self.is(Kind::undefined);
}
Value is_number(Machine&, const Value& self, const Given&) {
  return self.is_number();
}
Value is_integer(Machine&, const Value& self, const Given&) {
  return self.is(Kind::integer);
}
Value is_true(Machine&, const Value& self, const Given&) {
  return self.is(Kind::boolean) && self.boolean();
}
Value is_false(Machine&, const Value& self, const Given&) {
  return self.is(Kind::boolean) && !self.boolean();
}
Value is_iterable(Machine&, const Value& self, const Given&) {
  return self.is(Kind::undefined) || self.is(Kind::string) || self.is(Kind::list) || self.is(Kind::mapping);
}
Value is_callable(Machine&, const Value& self, const Given&) {
  return self.is(Kind::object) && self.object().callable();
}
Value is_upper(Machine& m, const Value& self, const Given&) {
  const Text text = m.str(self);
  return upper(text.view()) == text.bytes() && lower(text.view()) != text.bytes();
}
Value is_lower(Machine& m, const Value& self, const Given&) {
  const Text text = m.str(self);
  return lower(text.view()) == text.bytes() && upper(text.view()) != text.bytes();
}
Value is_even(Machine& m, const Value& self, const Given&) {
  return m.whole(self, "even") % 2 == 0;
}
Value is_odd(Machine& m, const Value& self, const Given&) {
  return m.whole(self, "odd") % 2 != 0;
}
Value is_divisible(Machine& m, const Value& self, const Given& given) {
  return !m.binary("%", m.whole(self, "divisibleby"), given.whole(0)).truthy();
}
Value is_in(Machine& m, const Value& self, const Given& given) {
  return m.contains(given.value(0), self);
}
Value is_equal(Machine& m, const Value& self, const Given& given) {
  return m.same(self, given.value(0));
}
Value is_other(Machine& m, const Value& self, const Given& given) {
  return !m.same(self, given.value(0));
}
Value is_less(Machine& m, const Value& self, const Given& given) {
  return m.less(self, given.value(0));
}
Value is_greater(Machine& m, const Value& self, const Given& given) {
  return m.less(given.value(0), self);
}
Value is_at_most(Machine& m, const Value& self, const Given& given) {
  return !m.less(given.value(0), self);
}
Value is_at_least(Machine& m, const Value& self, const Given& given) {
  return !m.less(self, given.value(0));
}
/// Python's `is`, for the values that it is asked of: none, true, false.
Value is_same(Machine& m, const Value& self, const Given& given) {
  return self.kind() == given.value(0).kind() && m.same(self, given.value(0));
}
Value is_never(Machine&, const Value&, const Given&) {
  return false;
}
Value is_filter(Machine& m, const Value& self, const Given&) {
  const std::string& name = m.text(self, "filter").bytes();
  return find_native(text_filters(), name) != nullptr || find_native(list_filters(), name) != nullptr;
}
Value is_test(Machine& m, const Value& self, const Given&) {
  return find_native(tests(), m.text(self, "test").bytes()) != nullptr;
}

}  // namespace

std::span<const Native> tests() {
  static const std::array kTests = {
      Native{"defined", {}, is_defined},
      Native{"undefined", {}, is_kind<Kind::undefined>},
      Native{"none", {}, is_kind<Kind::none>},
      Native{"string", {}, is_kind<Kind::string>},
      Native{"mapping", {}, is_kind<Kind::mapping>},
      Native{"sequence", {}, is_iterable},  // Jinja's, too, takes whatever has a length and elements
      Native{"iterable", {}, is_iterable},
      Native{"boolean", {}, is_kind<Kind::boolean>},
      Native{"number", {}, is_number},
      Native{"integer", {}, is_integer},
      Native{"float", {}, is_kind<Kind::real>},
      Native{"true", {}, is_true},
      Native{"false", {}, is_false},
      Native{"callable", {}, is_callable},
      Native{"upper", {}, is_upper},
      Native{"lower", {}, is_lower},
      Native{"even", {}, is_even},
      Native{"odd", {}, is_odd},
      Native{"divisibleby", {"num"}, is_divisible},
      Native{"in", {"seq"}, is_in},
      Native{"==", {"other"}, is_equal},
      Native{"eq", {"other"}, is_equal},
      Native{"equalto", {"other"}, is_equal},
      Native{"!=", {"other"}, is_other},
      Native{"ne", {"other"}, is_other},
      Native{"<", {"other"}, is_less},
      Native{"lt", {"other"}, is_less},
      Native{"lessthan", {"other"}, is_less},
      Native{">", {"other"}, is_greater},
      Native{"gt", {"other"}, is_greater},
      Native{"greaterthan", {"other"}, is_greater},
      Native{"<=", {"other"}, is_at_most},
      Native{"le", {"other"}, is_at_most},
      Native{">=", {"other"}, is_at_least},
      Native{"ge", {"other"}, is_at_least},
      Native{"sameas", {"other"}, is_same},
      Native{"escaped", {}, is_never},
      Native{"filter", {}, is_filter},
      Native{"test", {}, is_test},
  };
  return kTests;
}

}  // namespace lode::jinja
