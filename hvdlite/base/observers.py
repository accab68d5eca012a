"""Observer: a function that is called at each point that this rank reaches.

The timeline, the progress bar's clock and the planted faults of a rehearsal are observers. The core
calls them with the point and its details, in the thread that reaches it, and knows none of them
(it does write spans into the timeline by itself, see `hvdlite.observe.timeline.span`)::

    for observe in observers.current:
        observe("exchange", lane, operations)

==============  =============================================  =======================
point           this rank                                      details
==============  =============================================  =======================
``start``       is about to leave ``init()``
``submit``      is about to submit operations                  its lane, the operations
``waited``      has waited for an operation, or given up       its name, and when the wait
                                                               began, in monotonic ns
``meet``        is about to meet the others in a round         its lane, the operations
``agreed``      has met them                                   its lane, the operations
``exchange``    is about to exchange data                      its lane, the operations
``exchanged``   has exchanged them                             its lane, the operations
``confirm``     is about to confirm an outcome                 its lane
``deliver``     is about to deliver it                         its lane
``delivered``   goes on with it                                its lane
``recover``     is about to form the world of the survivors
``form``        is about to form a world
``checkpoint``  is about to replace a file by a complete one   the path of the new one
==============  =============================================  =======================
"""

from __future__ import annotations

from collections.abc import Callable

#: Called with the name of the point, and with its details.
Observer = Callable[..., object]

#: The observers, in the order of their calls. Assign a new tuple: other threads read it.
current: tuple[Observer, ...] = ()

#: Called once, before ``start``, with this process's number at the start of the job and the number
#: of processes; `hvdlite.assembly` replaces it.
plan: Callable[[int, int], object] = lambda place, places: None  # noqa: E731


def add(observer: Observer) -> None:
    """Add an observer, after the others."""
    global current
    current = (*current, observer)


def remove(observer: Observer) -> None:
    """Remove an observer, if it is there."""
    global current
    current = tuple(each for each in current if each != observer)
