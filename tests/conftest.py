import os
import signal
from pathlib import Path

# Set before PyTorch is imported: tests that stand for ranks by threads would start an OpenMP
# team for each thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_START = str(Path(__file__).parent / "harness" / "start")  # its sitecustomize.py says what for
_PATHS = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
if _START not in _PATHS:
    os.environ["PYTHONPATH"] = os.pathsep.join([*_PATHS, _START])

pytest_plugins = ["tests.harness.plugin"]

# A shell that starts pytest in the background has it ignore these, and what tests start
# would inherit that; Ctrl-C is something they test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
