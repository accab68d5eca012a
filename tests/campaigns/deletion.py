"""Delete each room beside the core in a copy, and run the core's and the adapters' own tests there.

python -m tests.campaigns.deletion
python -m tests.campaigns.deletion schedule --all
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.test_floors import ROOMS, files, room_of

_ROOT = Path(__file__).parents[2]
DELETABLE = ("elastic", "virtual", "schedule", "horovod", "tools")
#: The folders of the tests that pass without any of them.
KEPT = ["base", "world", "observe", "transport", "engine", "compression", "collectives"]
KEPT += ["gradients", "recipe", "torch", "tensorflow", "keras"]


# An editable installation would find what has been deleted where it was installed from.
_WITHOUT_INSTALLATION = """\
import sys
installed = [each for each in sys.meta_path if "__editable__" in getattr(each, "__module__", "")]
for each in installed:
    sys.meta_path.remove(each)
"""


def delete(room: str, to: Path) -> int:
    """Copy what git has to a folder, but for a room and its tests; return the number of files."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=_ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    gone = {path.relative_to(_ROOT) for module, path in files().items() if room_of(module) == room}
    for name in filter(None, names):
        path = Path(name)
        if path in gone or path.parts[:2] == ("tests", room) or not (_ROOT / path).exists():
            continue
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(_ROOT / path, to / path, follow_symlinks=False)
    return len(gone)


def run(room: str, everything: bool) -> bool:
    """Delete a room in a copy, run the tests there, and print a line; return whether they pass."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"without-{room}-") as folder:
        count = delete(room, Path(folder))
        Path(folder, "sitecustomize.py").write_text(_WITHOUT_INSTALLATION)
        command = [sys.executable, "-m", "pytest", "-q", "-n", "4", "--dist", "loadgroup"]
        done = subprocess.run(
            [*command, *(() if everything else ("--fast",)), *(f"tests/{name}" for name in KEPT)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    print(*failed, sep="\n", end="\n" if failed else "")
    summary = done.stdout.strip().rpartition("\n")[2].strip("= ")
    minutes = (time.monotonic() - start) / 60
    print(f"without {room} ({count} files): {summary}; {minutes:.1f} minutes", flush=True)
    return done.returncode == 0


def main() -> None:
    """Run the trials that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=f"of {', '.join(DELETABLE)}")
    parser.add_argument("--all", action="store_true", help="all tests, not the fast selection")
    options = parser.parse_args()
    unknown = {*options.rooms} - {*ROOMS}
    if unknown:
        parser.error(f"no rooms: {', '.join(sorted(unknown))}")
    passed = [run(room, options.all) for room in options.rooms or DELETABLE]
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
