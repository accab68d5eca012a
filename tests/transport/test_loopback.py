from __future__ import annotations

import pytest

from hvdlite.transport.loopback import Loopback
from tests.transport import checks


@pytest.mark.parametrize("check", checks.EVERYTHING, ids=lambda check: check.__name__)
def test_it_keeps_every_promise(check):
    transport = Loopback()
    check(transport)
    transport.close()


def test_reductions():
    transport = Loopback()
    assert checks.reductions(transport, (0, 1, 7)) == checks.reductions(transport, (0, 1, 7))
    checks.large_reductions(transport)
