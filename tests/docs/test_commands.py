"""The commands on all pages can be typed as they stand: options, targets and files exist."""

import re
import shutil

import pytest

from hvdlite.launch import options as launcher
from hvdlite.tools.cli import main as hvdlite
from tests.docs import pages

_TARGETS = set(re.findall(r"^([\w-]+):", (pages.ROOT / "Makefile").read_text(), re.MULTILINE))
_EXAMPLES = "\n".join(path.read_text() for path in (pages.ROOT / "examples").glob("*.py"))
_PROGRAMS = "bash cd curl git jupyter pip source srun salloc sbatch qsub kubectl pytest"


def mistakes(command):
    """Return the mistakes in a command, each in a line."""
    found, words = [], list(command.words)
    while "&&" in words:
        end = words.index("&&")
        found += _mistakes(words[:end])
        words = words[end + 1 :]
    return [f"{command.place}: {mistake}" for mistake in [*found, *_mistakes(words)]]


def _mistakes(words):
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    program, *arguments = words or [""]
    program = program.removeprefix(".venv/bin/")
    if program == "hvdliterun":
        return _launched(arguments)
    if program == "hvdlite":
        return _command(arguments)
    if program == "make":
        targets = [word for word in arguments if "=" not in word and not word.startswith("-")]
        return [f"make {target}: no such target" for target in targets if target not in _TARGETS]
    if program in ("mpirun", "mpiexec", "srun"):
        starts = [i for i, word in enumerate(arguments) if word.endswith(("python", "pytest"))]
        return _mistakes(arguments[starts[0] :]) if starts else []
    if program in ("python", "python3"):
        return _python(arguments)
    if program in _PROGRAMS.split() or shutil.which(program):
        return []
    return [f"{program}: unknown program"]


def _launched(arguments):
    """Parse a command line of hvdliterun, and that of the program that it starts."""
    try:
        options = launcher.parse(arguments)
    except SystemExit as end:
        return [f"hvdliterun exits with {end.code}: {arguments}"] if end.code else []
    return _mistakes(options.command) if options.command else []


def _command(arguments):
    """Parse a command line of hvdlite; its scripts exist."""
    if arguments[:1] == ["run"]:
        return _launched(arguments[1:])
    try:
        hvdlite.make_parser().parse_args(arguments)
    except SystemExit as end:
        return [f"hvdlite exits with {end.code}: {arguments}"] if end.code else []
    scripts = [word for word in arguments if word.endswith(".py")]
    return [mistake for script in scripts for mistake in _python([script])]


def _python(arguments):
    if arguments[:1] == ["-m"]:
        name = arguments[1].replace(".", "/")
        ways = (f"{name}.py", f"{name}/__main__.py")
        own = arguments[1].partition(".")[0] in ("hvdlite", "tests")
        exists = any((pages.ROOT / way).exists() for way in ways)
        found = [] if exists or not own else [f"python -m {arguments[1]}: no such module"]
        return found + (_python(arguments[2:]) if arguments[1] == "hvdlite.horovod" else [])
    if not arguments or not arguments[0].endswith(".py") or arguments[0] in pages.OWN_SCRIPTS:
        return []
    if not (pages.ROOT / arguments[0]).is_file():
        return [f"python {arguments[0]}: no such file"]
    flags = [word.partition("=")[0] for word in arguments[1:] if word.startswith("--")]
    return [f"{arguments[0]} {flag}: no such option" for flag in flags if flag not in _EXAMPLES]


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_commands_are_right(page, capsys):
    commands = pages.commands(page.read_text(), pages.name(page))
    found = [mistake for command in commands for mistake in mistakes(command)]
    assert found == [], capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("$ hvdliterun -np 2 --no-such-option python train.py", "hvdliterun exits with 2"),
        ("$ hvdliterun -np 2 \\\n    python examples/gone.py", "gone.py: no such file"),
        ("$ A=1 python examples/pytorch_mnist.py --gone 3", "--gone: no such option"),
        ("$ cd x && make gone", "make gone: no such target"),
        ("$ mpirun -np 2 .venv/bin/python -m tests.gone", "tests.gone: no such module"),
        ("$ hvdlite run -np 2 --gone python train.py", "hvdliterun exits with 2"),
        ("$ hvdlite timeline --gone trace.json", "hvdlite exits with 2"),
        ("$ hvdlite gone", "hvdlite exits with 2"),
        ("$ hvdlitreun", "unknown program"),
    ],
)
def test_a_mistake_is_found(text, mistake, capsys):
    (command,) = pages.commands(f"# A page\n\n```console\noutput\n{text}\n```\n")
    (found,) = mistakes(command)
    assert found.startswith("page:5: ")
    assert mistake in found


def test_commands_within_a_text():
    text = "Run `make docs`, `make ...` or `hvdliterun -np 2\npython train.py`.\n"
    assert [command.words[0] for command in pages.commands(text)] == ["make", "hvdliterun"]
