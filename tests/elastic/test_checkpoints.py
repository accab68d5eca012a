"""hvdliterun --elastic: the ranks that are left save and load when rank 0 dies meanwhile."""

import pytest

from tests.elastic.test_recovery import run

CODE = """
from hvdlite import collectives

def die(*_, **options):
    os.kill(os.getpid(), signal.SIGKILL)

saved = hvd.checkpoint("{path}", keep=2)
broadcast_async = collectives.broadcast_async
state = {"by": start, "array": np.full(5, start)}

def told():
    loaded = saved.load()
    assert (loaded["array"] == loaded["by"]).all()
    print(start, hvd.size(), loaded["by"], flush=True)

saved.save(state)
told()

if start == 0:
    os.replace = die  # the file is whole, and has a temporary name
saved.save(state)
told()

if start == 1:
    saved._writer = die
saved.save(state, blocking=False)
told()

if start == 2:
    saved._read_file = die
told()

def broadcast_after_the_death(*arguments, **options):
    if start == 3:
        die()
    hvd.allreduce(np.ones(1))
    return broadcast_async(*arguments, **options)

collectives.broadcast_async = broadcast_after_the_death
try:
    told()
except hvd.errors.HorovodInternalError as error:
    print(start, error)
collectives.broadcast_async = broadcast_async
told()
try:
    saved.save(None)
except hvd.CheckpointError as error:
    print(start, error)
told()
"""


@pytest.mark.slow
def test_who_is_rank_0_by_then_saves_and_loads(tmp_path):
    path = tmp_path / "state.npz"
    lost = f"{path}: the rank that has read it died before it had sent all of it; load it again"
    refused = (
        f"{path} cannot be written: rank 0, which had the state, has died, and rank 4 of the start,"
        " which has taken its place, passed None; with --elastic, pass the state on all ranks"
    )
    assert run(CODE.replace("{path}", str(path)), 6)[0] == sorted(
        [
            *[f"{start} 6 0" for start in range(6)],
            *[f"{start} 5 1" for start in range(1, 6)],
            *[f"{start} 4 2" for start in range(2, 6)],
            *[f"{start} 3 2" for start in range(3, 6)],
            *[f"{start} {text}" for start in (4, 5) for text in (lost, "2 2", refused, "2 2")],
        ]
    )
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "state.npz",
        "state.npz.generation-2",
    ]
