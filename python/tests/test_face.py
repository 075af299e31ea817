# SPDX-License-Identifier: Apache-2.0
"""What help() says of the package."""

import inspect

import pytest

import lodestone


def public(name):
    """A name of the package, and what a class of it has for users."""
    found = getattr(lodestone, name)
    yield name, found
    for member, value in vars(found).items() if inspect.isclass(found) else ():
        if not member.startswith("_"):
            yield f"{name}.{member}", value


@pytest.mark.parametrize("name", lodestone.__all__)
def test_every_public_name_says_what_it_is(name):
    for full_name, value in public(name):
        assert (value.__doc__ or "").strip(), f"{full_name} has no docstring"


@pytest.mark.parametrize("name", ["attend", "attend_causal", "plan", "merge", "top_k", "Plan.run", "Selector.attend", "Selector.select"])
def test_kernels_say_shapes_types_and_errors(name):
    found = lodestone
    for part in name.split("."):
        found = getattr(found, part)
    assert "float32 [" in found.__doc__ or "int32 [" in found.__doc__
    assert "Returns" in found.__doc__ or "Error" in found.__doc__
