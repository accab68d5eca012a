"""Communicators that all ranks get, or none."""

import pickle
from types import SimpleNamespace

import pytest

from hvdlite.elastic.forming import Forming


class Comm:
    """A communicator of one rank that notes what is asked of it."""

    rank = 0

    def __init__(self):
        self.said = []
        self.is_revoked = False

    def Agree(self, flag):  # noqa: N802 - mpi4py's
        self.said.append(flag)
        return flag

    def Revoke(self):  # noqa: N802
        self.is_revoked = True


MPI = SimpleNamespace(Exception=type("Exception", (RuntimeError,), {}))


def test_all_is_well():
    comm = Comm()
    with Forming(MPI, comm) as forming:
        found = forming.create(lambda *args: ("new", *args), 1, 2)
    assert (forming.failure, forming.made, found) == (None, [("new", 1, 2)], ("new", 1, 2))
    assert (comm.said, comm.is_revoked) == ([1, 1, 1], False)


@pytest.mark.parametrize("error", [MPI.Exception("lost"), pickle.UnpicklingError("what came")])
def test_an_exception_on_one_rank_ends_it_on_all(error):
    comm, inner = Comm(), Comm()
    with Forming(MPI, comm) as forming:
        forming.create(lambda: inner)
        raise error
    assert forming.failure is error
    assert (comm.is_revoked, inner.is_revoked, comm.said) == (True, True, [1, 1, 0])


def test_a_communicator_that_cannot_be_made_is_not_revoked():
    """Another rank may be making it still, in which Open MPI would crash."""
    comm = Comm()

    def fail():
        raise MPI.Exception("cannot")

    with Forming(MPI, comm) as forming:
        first = forming.create(Comm)
        forming.create(fail)
    assert str(forming.failure) == "rank 0: another rank has died, or could not communicate"
    assert (forming.made, first.is_revoked, comm.said) == ([first], True, [1, 1, 0])


def test_an_interrupt_is_none_of_its_business():
    with pytest.raises(KeyboardInterrupt), Forming(MPI, Comm()):
        raise KeyboardInterrupt
