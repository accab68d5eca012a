"""hvdliterun --elastic: the next rank goes first when the one that does dies."""

import pytest

from tests.elastic.test_recovery import run

CODE = """
import time
from pathlib import Path
per_node = {per_node}
path = Path("{folder}", f"node-{start // 2 if per_node else 0}")

def die():
    os.kill(os.getpid(), signal.SIGKILL)

with hvd.first(per_node):
    began = path.with_suffix(".began").exists()
    path.with_suffix(".began").touch()
    if start == 0:
        time.sleep(0.3)  # the others wait
        die()
    if not path.exists():
        time.sleep(0.1)
        path.write_text(str(start))
print(f"{start} of {hvd.size()}: by {path.read_text()}, after another: {began}", flush=True)
hvd.barrier()

def fail():
    if start == 1:
        die()
    raise KeyError(f"of rank {start}")

try:
    with hvd.first(per_node):
        fail()
except KeyError as error:
    print(f"{start} of {hvd.size()}: {error}", flush=True)
assert hvd.allgather_object(start) == [2, 3]
"""


@pytest.mark.slow
@pytest.mark.parametrize("per_node", [False, True])
def test_the_next_rank_goes_first(tmp_path, per_node):
    code = CODE.replace("{folder}", str(tmp_path)).replace("{per_node}", str(per_node))
    found, _ = run(code, 4, env={"HVDLITE_FORCE_LOCAL_SIZE": "2"} if per_node else {})
    if not per_node:
        ran = [f"{rank} of 3: by 1, after another: True" for rank in (1, 2, 3)]
    else:
        ran = [
            "1 of 3: by 1, after another: True",
            "2 of 3: by 2, after another: False",
            "3 of 3: by 2, after another: True",
        ]
    # The setting counts nodes by consecutive ranks: after the death they are 1 and 2, and 3.
    failing = 3 if per_node else 2
    failed = [f"{rank} of 2: 'of rank {failing}'" for rank in (2, 3)]
    assert found == sorted(ran + failed)
