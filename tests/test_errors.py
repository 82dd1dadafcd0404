"""The error tree in the module docstring is the error tree."""

from __future__ import annotations

import inspect
import re

from specli import errors

LINE = re.compile(r"^    (?P<indent>[ │├└─]*)(?P<name>[A-Z]\w+) +(?P<code>\d+) +\S", re.MULTILINE)


def listed() -> dict[str, tuple[int, int]]:
    """Name -> (depth, exit code), as the docstring draws the tree."""
    assert errors.__doc__ is not None
    return {m["name"]: (len(m["indent"]) // 4, int(m["code"])) for m in LINE.finditer(errors.__doc__)}


def defined() -> dict[str, type[BaseException]]:
    return {
        name: kind
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, BaseException) and kind.__module__ == errors.__name__
    }


def test_the_docstring_lists_every_class_and_no_other() -> None:
    assert listed().keys() == defined().keys()


def test_exit_codes_are_the_listed_ones() -> None:
    assert {name: code for name, (_depth, code) in listed().items()} == {
        name: kind.exit_code for name, kind in defined().items()
    }


def test_parents_are_the_listed_ones() -> None:
    path: list[str] = []
    for name, (depth, _code) in listed().items():
        path = [*path[:depth], name]
        parent = defined()[name].__mro__[1]
        assert parent is (defined()[path[-2]] if depth else Exception)


def test_every_class_is_explained_and_caught_by_one_base() -> None:
    for kind in defined().values():
        assert issubclass(kind, errors.SpecError)
        assert kind.__doc__
        assert 0 < kind.exit_code < 256
