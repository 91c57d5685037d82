"""Wrong values for fields of JSON files: every field of a file, replaced by each of them or left out."""

import copy
from collections.abc import Iterator
from typing import Any

ODD = (None, -1, 0, 10**30, 1.5, True, "x", "", "../../x", [], {}, [None])


def fields(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths of all fields, of a list's items the first two."""
    inside = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for name, one in inside:
        yield (*path, name)
        yield from fields(one, (*path, name))


def changed(value: Any) -> Iterator[tuple[tuple, Any]]:
    """(path of a field, the value with that field wrong or absent)."""
    for path in fields(value):
        for odd in (*ODD, KeyError):
            new = copy.deepcopy(value)
            holder = new
            for name in path[:-1]:
                holder = holder[name]
            if odd is KeyError:
                del holder[path[-1]]
            else:
                holder[path[-1]] = odd
            yield path, new
