"""Values that do not change once they are made."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["Immutable"]


class Immutable:
    """The base of what is too large, or too lazily worked out, to be a frozen dataclass.

    Subclasses set their fields with `vars(self).update(...)`; what is derived is a `functools.cached_property`.
    """

    def __setattr__(self, name: str, value: object) -> NoReturn:
        """Refuse.

        Raises:
            AttributeError: always.
        """
        raise AttributeError(f"a {type(self).__name__} does not change: make a new one instead of setting {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        """Refuse.

        Raises:
            AttributeError: always.
        """
        raise AttributeError(f"a {type(self).__name__} does not change: {name!r} stays")
