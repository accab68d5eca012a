import io
import sys
from types import SimpleNamespace

import pytest

from tests.harness import mpirun

# As short as a training can be. Of each failure, rank 0 alone speaks.
SCRIPT = """
import json, sys
import hvdlite as hvd

hvd.init()
if "--data-dir" in sys.argv:
    sys.exit("no data" if hvd.rank() == 0 else 1)
if hvd.rank() == 0:
    print("not the last line")
    print(json.dumps({
        "framework": "x", "processes": hvd.size(), "images_per_s": 12345.6, "train_loss": 0.25,
        "test_accuracy": 0.975, "weights_sha256": "0123456789abcdef", "identical": True,
        "arguments": sys.argv[1:],
    }))
"""


@pytest.fixture
def demo(example, monkeypatch, tmp_path):
    """Return the demo with one framework: a module of Python's and the script above."""
    for name, value in mpirun.environment().items():
        monkeypatch.setenv(name, value)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    module = example("demo")
    monkeypatch.setattr(module, "FRAMEWORKS", (("Quick", "json", str(script)),))
    return module


@pytest.fixture
def run(demo, monkeypatch, capfd):
    """Run the demo; return its exit code, and what it prints."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["demo.py", *arguments])
        return demo.main(), *capfd.readouterr()

    return run


def test_table(run):
    code, out, err = run("--processes", "3")
    assert code == 0
    (row,) = [line for line in out.splitlines() if "Quick" in line]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["Quick", "3", "12,346", "0.2500", "0.9750", "yes (01234567)"]
    assert err == "Quick on 3 processes\n"


@pytest.mark.slow
def test_options_are_passed_on(demo, monkeypatch):
    options = SimpleNamespace(processes=1, data_dir=None, epochs=4)
    result = demo._train(demo.FRAMEWORKS[0][2], options)
    assert result["arguments"] == ["--json", "--epochs", "4"]


def test_failure(run):
    code, out, err = run("--data-dir", "nowhere")
    assert code == 1
    assert "failed" in out
    assert err.count("no data\n") == 1
    assert "hvdliterun: rank" in err


@pytest.mark.slow
def test_framework_that_is_not_installed(demo, run, monkeypatch):
    missing = ("Missing", "no_such_module", "none.py")
    monkeypatch.setattr(demo, "FRAMEWORKS", (missing, *demo.FRAMEWORKS))
    code, out, err = run()
    assert code == 0
    assert "Missing" not in out
    assert "pip install 'hvdlite[no_such_module]'" in err
    monkeypatch.setattr(demo, "FRAMEWORKS", (missing,))
    assert run()[0] == 1


def test_notices_of_tensorflow_are_left_out(demo, capfd):
    sent = b"\r 1%\r 2%\nI0000 00:00:17 port.cc:153] oneDNN\nWARNING: mine\n\r 3%"
    demo._forward(io.BufferedReader(io.BytesIO(sent), buffer_size=1))
    assert capfd.readouterr().err.encode() == sent.replace(
        b"I0000 00:00:17 port.cc:153] oneDNN\n", b""
    )
