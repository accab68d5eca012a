"""Observer: a function that hears of each point that this rank gets to.

The timeline and a rehearsal's planted faults are observers. The core calls each of them with a
point and with what it is about, in the thread that gets there, and knows none of them::

    for observe in observers.current:
        observe("exchange", lane, operations)

==============  =============================================  =======================
point           this rank                                      what it is about
==============  =============================================  =======================
``start``       is about to leave ``init()``
``submit``      is about to submit operations                  its lane, the operations
``wait``        is about to wait for an operation               its name
``waited``      has waited, or given up                        its name, the time before
``meet``        is about to meet the others in a round         its lane, the operations
``agreed``      has met them                                   its lane, the operations
``exchange``    is about to exchange data                      its lane, the operations
``exchanged``   has exchanged them                             its lane, the operations
``confirm``     is about to confirm an outcome                 its lane
``deliver``     is about to deliver it                         its lane
``delivered``   goes on with it                                its lane
``recover``     is about to form the world of those left
``form``        is about to form a world
``checkpoint``  is about to replace a file by a complete one   the path of the new one
==============  =============================================  =======================
"""

from __future__ import annotations

from collections.abc import Callable

#: Called with the name of the point, and with what it is about.
Observer = Callable[..., object]

#: Who hears of all points, in this order. Assign a new tuple: other threads read it.
current: tuple[Observer, ...] = ()

#: Called once, before ``start``, with this process's number at the start and the number of all;
#: the facade fills it.
plan: Callable[[int, int], object] = lambda place, places: None  # noqa: E731


def add(observer: Observer) -> None:
    """Have an observer hear of all points, after the others."""
    global current
    current = (*current, observer)


def remove(observer: Observer) -> None:
    """Have an observer hear of no more; do nothing if it did not."""
    global current
    current = tuple(each for each in current if each != observer)
