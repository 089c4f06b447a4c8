"""Whole numbers of other makes."""

from __future__ import annotations

import operator
from typing import Any


def integer(value: Any) -> Any:
    """`value` as an int, if it is a whole number of another make: numpy's, a tensor of one, what has `__index__`.

    Everything else is left as it is, bools too: who asks refuses it.
    """
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value
