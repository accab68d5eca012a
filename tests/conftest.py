import os
import signal

# Set before PyTorch is imported: tests that stand for ranks by threads would start an OpenMP
# team for each thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["tests.harness.plugin"]

# A shell that starts pytest in the background has it ignore these, and what tests start
# would inherit that; Ctrl-C is something they test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
