from __future__ import annotations

import json
import re
import sys
from argparse import ArgumentParser

import pytest

from hvdlite.errors import StartError
from hvdlite.tools.cli import scale
from hvdlite.tools.cli.main import main
from hvdlite.tools.cli.scale import WALL, Run, compare, find_speed

# Its speed is a closed form: 100 * size ** 0.5.
SCRIPT = """
import json, sys
import hvdlite as hvd

hvd.init()
fails = "--fail" in sys.argv and hvd.size() == 2 and hvd.rank() == 1
hvd.barrier()
if fails:
    print("before the end")
    sys.exit(3)
if hvd.rank() == 0:
    print(json.dumps({"images_per_s": 1.0}))
    print(json.dumps({"images_per_s": 100 * hvd.size() ** 0.5, "words": sys.argv[1:]}))
    print("the end")
"""


def run(*words):
    parser = ArgumentParser()
    scale.add_arguments(parser)
    return scale.main(parser.parse_args([*map(str, words)]))


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


class TestSpeed:
    TEXT = 'epoch 1\n{"images_per_s": 3}\n{"samples_per_s": 4, "loss": "low"}\n{"b": null}\n{"b"'

    def test_by_convention_the_last(self):
        assert find_speed(self.TEXT) == ("samples_per_s", 4)
        assert find_speed('[1,0]<stdout>: {"images_per_s": 2.5}\n\n') == ("images_per_s", 2.5)
        assert find_speed("epoch 1\n[1]\n{3}") is None

    def test_by_name(self):
        assert find_speed(self.TEXT, "images_per_s") == ("images_per_s", 3)
        with pytest.raises(StartError, match=r"loss: found 'low', expected a number above 0"):
            find_speed(self.TEXT, "loss")
        with pytest.raises(StartError, match=r"--metric x is not in the output: .* JSON has b$"):
            find_speed(self.TEXT, "x")
        with pytest.raises(StartError, match=r"--metric x is not .* it has no line of JSON"):
            find_speed("", "x")

    def test_by_pattern(self):
        text = "speed: 3.5/s\nspeed: 4.5/s\nspeed: none"
        assert find_speed(text, pattern=re.compile(r"speed: ([0-9.]+)")) == ("speed", 4.5)
        with pytest.raises(StartError, match=r"--pattern 'rate (.*)' matches nothing"):
            find_speed(text, pattern=re.compile("rate (.*)"))
        with pytest.raises(StartError, match=r"found 'none', expected a number above 0"):
            find_speed(text, pattern=re.compile("speed: (.*)"))


class TestComparison:
    def test_mean_deviation_and_efficiency(self):
        speeds = {1: [90, 110], 4: [300, 340]}
        runs = {
            number: [Run("images_per_s", value, 2.0) for value in values]
            for number, values in speeds.items()
        }
        name, (one, four) = compare(runs)
        assert name == "images_per_s"
        assert (one["mean"], one["speedup"], one["efficiency"]) == (100, 1, 1)
        assert one["deviation"] == pytest.approx(200**0.5)
        assert (four["mean"], four["speedup"], four["efficiency"]) == pytest.approx((320, 3.2, 0.8))

    def test_of_wall_times(self):
        runs = {n: [Run(WALL, s, s)] for n, s in ((2, 10.0), (4, 8.0))}
        _, (two, four) = compare(runs)
        assert (two["speedup"], two["efficiency"], two["deviation"]) == (2, 1, None)
        assert (four["speedup"], four["efficiency"]) == pytest.approx((2.5, 0.625))

    def test_of_different_things(self):
        runs = {1: [Run(WALL, 1.0, 1.0)], 2: [Run("images_per_s", 5.0, 1.0)]}
        with pytest.raises(StartError, match="the speed is images_per_s in some runs, and wall ti"):
            compare(runs)


class TestCommand:
    @pytest.mark.slow
    def test_a_script_on_one_and_two_ranks(self, script, tmp_path, capsys):
        pytest.importorskip("matplotlib")
        plot = tmp_path / "scaling.pdf"
        assert run("--runs", 1, "--json", "--plot", plot, script, "--np", "2,1", "--lr", 1) == 0
        output = capsys.readouterr()
        document = json.loads(output.out)
        assert document["metric"] == "images_per_s"
        results = document["results"]
        assert [speed["ranks"] for speed in results] == [1, 2]
        assert [speed["mean"] for speed in results] == pytest.approx([100, 100 * 2**0.5])
        assert results[1]["efficiency"] == pytest.approx(0.5**0.5)
        assert document["command"].endswith("train.py --lr 1")
        assert "1 rank, run 1 of 1: images_per_s 100, " in output.err
        assert plot.read_bytes().startswith(b"%PDF")

    @pytest.mark.slow
    def test_a_script_that_fails(self, script, capsys):
        assert main(["scale", "--np", "2", "--runs", "2", str(script), "--fail"]) == 3
        output = capsys.readouterr()
        assert output.out == ""
        found = "hvdlite scale: 2 ranks, run 1 of 2: exit code 3; the last lines of its output:"
        assert output.err.startswith(found)
        assert "hvdliterun: rank 1 on host" in output.err

    def test_the_turns_go_forth_and_back(self, script, capsys, monkeypatch):
        turns = []

        def fake(number, turn, command, options):
            turns.append((number, turn))
            return Run(WALL, 6.0 / number, 1.0)

        monkeypatch.setattr(scale, "_run", fake)
        assert run("--np", "4,1,2", "--runs", 2, script) == 0
        assert turns == [(1, 1), (2, 1), (4, 1), (4, 2), (2, 2), (1, 2)]
        lines = capsys.readouterr().out.splitlines()
        assert lines[3].split() == ["4", "1.5", "0", "4.00", "100.0%"]
        assert lines[4].startswith("note: found no images_per_s or samples_per_s in the output")

    def test_a_plot_that_cannot_be_written(self, script, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        for plot, message in (
            ("x.gif", r"--plot x.gif: expected a name that ends in .png or .pdf"),
            ("/none/x.png", r"--plot /none/x.png: there is no folder /none"),
            (script.with_name("x.png"), r"--plot: .*; run `pip install hvdlite\[cli\]`"),
        ):
            with pytest.raises(StartError, match=message):
                run("--plot", plot, script)

    def test_mistakes_in_options(self, script, capsys):
        for option, value, message in (
            ("--np", "1,x", "argument --np: found '1,x', expected numbers of ranks as in 1,2,4"),
            ("--np", "0", "argument --np: found '0'"),
            ("--runs", "0", "argument --runs: found '0', expected a number from 1 on"),
            ("--pattern", "speed", "'speed' has no group; put the number into parentheses"),
            ("--pattern", "(", "is no regular expression"),
        ):
            with pytest.raises(SystemExit):
                run(option, value, script)
            assert message in capsys.readouterr().err

    def test_mistakes_after_the_script(self, tmp_path, script):
        with pytest.raises(StartError, match="--np: found 'many', expected numbers of ranks"):
            run(script, "--np", "many")
        with pytest.raises(StartError, match=r"none.py: no such file"):
            run(tmp_path / "none.py")
