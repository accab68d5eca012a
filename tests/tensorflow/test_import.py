import subprocess
import sys

from tests.harness import mpirun


def test_without_tensorflow_the_pip_command_is_told():
    source = "import sys; sys.modules['tensorflow'] = None; import hvdlite.tensorflow"
    done = subprocess.run(
        [sys.executable, "-c", source], env=mpirun.environment(), capture_output=True, text=True
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: hvdlite.tensorflow needs TensorFlow")
    assert "`pip install hvdlite[tensorflow]`" in last
