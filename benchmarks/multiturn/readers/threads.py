"""Which request continues which, for traces that list requests one by one."""

from __future__ import annotations

from collections.abc import Hashable


class Threads:
    """Names a session and a turn for every request, given by what it may continue.

    A request is continued once; who continues it too, as when an answer is asked for again, begins a session of its
    own (at the same turn), so that a session is a line and no two requests are the same turn of it.

    >>> threads = Threads()
    >>> threads.place("a", None), threads.place("b", "a"), threads.place("c", "a"), threads.place("d", "b")
    (('a', 1), ('a', 2), ('c', 2), ('a', 3))
    """

    def __init__(self) -> None:
        self._last: dict[Hashable, tuple[str, int, bool]] = {}

    def place(self, name: str, parent: Hashable | None, *, end: Hashable | None = None) -> tuple[str, int]:
        """(session, turn) of a request that continues the one known as ``parent``, and is known as ``end`` (or
        ``name``) to those that continue it.
        """
        session, turn = name, 1
        if parent is not None and parent in self._last:
            of_parent, turn_of_parent, continued = self._last[parent]
            turn = turn_of_parent + 1
            if not continued:
                session = of_parent
                self._last[parent] = (of_parent, turn_of_parent, True)
        self._last[name if end is None else end] = (session, turn, False)
        return session, turn
