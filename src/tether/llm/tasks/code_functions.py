"""The functions and methods that a test may apply to what a program gave, here, outside the sandbox.

Each does what Python's, or numpy's, of that name does to plain data, within bounded time and memory, and
raises where Python's would.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from tether.llm.tasks.code_values import BITS, Items, bounded, distinct, make_dict

LENGTH = 10**6
"""Elements of the longest list or text that is made."""
_DIGITS = 400
_NUMBERS = (bool, int, float, complex)


def number(value: Any) -> Any:
    """Give `value` if it is a number within bounds."""
    if type(value) not in _NUMBERS:
        raise TypeError(f"{type(value).__name__} is no number")
    return bounded(value) if type(value) is int else value


def add(left: Any, right: Any) -> Any:
    """The sum of numbers, or two texts, lists or tuples one after the other."""
    if type(left) is type(right) and type(left) in (str, bytes, list, tuple):
        return left + right
    return number(number(left) + number(right))


def subtract(left: Any, right: Any) -> Any:
    """The difference of numbers or sets."""
    if _are_sets(left, right):
        return left - right
    return number(number(left) - number(right))


def multiply(left: Any, right: Any) -> Any:
    """The product of numbers, or a text, list or tuple repeated."""
    for whole, times in ((left, right), (right, left)):
        if type(whole) in (str, bytes, list, tuple) and type(times) in (bool, int):
            if len(whole) * times > LENGTH:
                raise OverflowError(f"more than {LENGTH} elements")
            return whole * times
    return number(number(left) * number(right))


def power(base: Any, exponent: Any) -> Any:
    """A power of numbers."""
    integers = type(base) in (bool, int) and type(exponent) in (bool, int)
    if integers and (base.bit_length() - 1) * exponent > BITS:
        raise OverflowError(f"an integer of more than {BITS} bits")
    return number(number(base) ** number(exponent))


def bitwise(on_integers: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """``&``, ``|`` or ``^`` of integers or of sets."""

    def operate(left: Any, right: Any) -> Any:
        if not _are_sets(left, right) and not {type(left), type(right)} <= {bool, int}:
            raise TypeError("neither integers nor sets")
        return on_integers(left, right)

    return operate


def _are_sets(left: Any, right: Any) -> bool:
    return isinstance(left, set | frozenset) and isinstance(right, set | frozenset)


def _round(value: Any, digits: Any = None) -> Any:
    if digits is not None and not -_DIGITS <= digits <= _DIGITS:
        raise OverflowError(f"more than {_DIGITS} digits")
    return round(number(value), digits)


def _sum(values: Iterable[Any], start: Any = 0) -> Any:
    total = number(start)
    for value in values:
        total = number(total + number(value))
    return total


def _range(*bounds: int) -> Items:
    made = range(*bounds)
    if len(made) > LENGTH:
        raise OverflowError(f"more than {LENGTH} elements")
    return Items(made)


def _count(values: Iterable[Any] = ()) -> dict[Any, int]:
    counts: dict[Any, int] = {}
    for value in distinct(values):
        counts[value] = counts.get(value, 0) + 1
    return counts


def _dict(given: Any = (), **named: Any) -> dict[Any, Any]:
    return {**(given if type(given) is dict else make_dict([tuple(pair) for pair in given])), **named}


def _join(separator: str, texts: Iterable[str]) -> str:
    listed = list(texts)
    if len(separator) * len(listed) + sum(map(len, listed)) > LENGTH:
        raise OverflowError(f"more than {LENGTH} characters")
    return separator.join(listed)


def _same_shape(compare: Callable[..., Any]) -> Callable[..., bool]:
    """A comparison of numpy's, of lists of numbers of one shape: it would stretch [] to fit [1]."""

    def compared(left: Any, right: Any, **bounds: Any) -> bool:
        if not {type(left), type(right)} <= {list, tuple, *_NUMBERS}:
            raise TypeError("neither numbers nor lists of them")
        return np.shape(left) == np.shape(right) and bool(np.all(compare(left, right, **bounds)))

    return compared


def _of_number(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values, **named: number(function(*map(number, values), **named))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{function.__name__: function for function in (abs, all, any, ascii, bool, chr, divmod, len)},
    **{function.__name__: function for function in (max, min, ord, repr, str, sorted)},
    **{kind.__name__: kind for kind in (list, tuple)},
    "complex": _of_number(complex),
    "int": lambda *values: bounded(int(*values)),
    "float": float,
    "pow": power,
    "round": _round,
    "sum": _sum,
    "range": _range,
    "set": lambda values=(): set(distinct(values)),
    "frozenset": lambda values=(): frozenset(distinct(values)),
    "dict": _dict,
    "reversed": lambda values: Items(reversed(values)),
    "enumerate": lambda values, start=0: Items(enumerate(values, start)),
    "zip": lambda *values, strict=False: Items(zip(*values, strict=strict)),
    "map": lambda function, *values: Items(map(function, *values)),
    "filter": lambda function, values: Items(filter(function, values)),
    "collections.Counter": _count,
    "math.isclose": math.isclose,
    **{
        f"math.{function.__name__}": _of_number(function)
        for function in (math.ceil, math.fabs, math.floor, math.sqrt, math.trunc, math.exp, math.log)
    },
    "math.isnan": math.isnan,
    "math.isinf": math.isinf,
    "cmath.isclose": cmath.isclose,
    "numpy.isclose": _same_shape(np.isclose),
    "numpy.allclose": _same_shape(np.isclose),
    "numpy.array_equal": _same_shape(np.equal),
    "numpy.abs": _of_number(abs),
    "numpy.round": _round,
}
"""By the full name."""

CONSTANTS: dict[str, Any] = {
    **{f"math.{name}": getattr(math, name) for name in ("pi", "e", "tau", "inf", "nan")},
    **{f"numpy.{name}": getattr(math, name) for name in ("pi", "e", "inf", "nan")},
}
TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict)
}
"""What `isinstance` may ask for."""


def _methods(kind: type, names: str) -> dict[str, Callable[..., Any]]:
    return {name: getattr(kind, name) for name in names.split()}


def _set_methods(kind: type) -> dict[str, Callable[..., Any]]:
    def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda value, *others: method(value, *map(distinct, others))

    return {name: guarded(method) for name, method in _methods(kind, _SET).items()}


_TEXT = (
    "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier "
    "islower isnumeric isprintable isspace istitle isupper lower lstrip removeprefix removesuffix rfind "
    "rindex rsplit rstrip split splitlines startswith strip swapcase title upper"
)
_SET = "difference intersection isdisjoint issubset issuperset symmetric_difference union"
METHODS: dict[type, dict[str, Callable[..., Any]]] = {
    str: {**_methods(str, _TEXT), "join": _join},
    list: _methods(list, "copy count index"),
    tuple: _methods(tuple, "count index"),
    dict: _methods(dict, "copy get items keys values"),
    set: _set_methods(set),
    frozenset: _set_methods(frozenset),
    float: _methods(float, "is_integer"),
}


def call_method(value: Any, name: str, arguments: Sequence[Any], named: dict[str, Any]) -> Any:
    """Call a method of plain data."""
    methods = METHODS.get(type(value), {})
    if name not in methods:
        raise AttributeError(f"{type(value).__name__} has no method {name!r} here")
    return methods[name](value, *arguments, **named)
