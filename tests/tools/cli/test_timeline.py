from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import tracemalloc
from argparse import ArgumentParser
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdlite.errors import StartError
from hvdlite.tools.cli import timeline as command
from hvdlite.tools.trace import analysis as trace_analysis
from hvdlite.tools.trace import record
from tests.harness import ranks, run_script

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
SLEEP = 0.04


def run(*words):
    parser = ArgumentParser()
    command.add_arguments(parser)
    return command.main(parser.parse_args([*map(str, words)]))


def read(path):
    """Return the figures of a trace, with names as attributes."""
    figures, _ = trace_analysis.read(path)
    return json.loads(json.dumps(figures), object_hook=lambda each: SimpleNamespace(**each))


class Trace:
    """Events of hvdlite's timeline; times are in milliseconds."""

    def __init__(self):
        self.events = []

    def rank(self, rank, host=""):
        name = {"name": f"rank {rank} on host{host}", "job": "a job", "start": 1}
        self.events.append({"name": "process_name", "ph": "M", "pid": rank, "args": name})
        for row in ("step", "gradients", "named"):
            thread = {"pid": rank, "tid": f"{rank}.{row}", "args": {"name": row}}
            self.events.append({"name": "thread_name", "ph": "M", **thread})

    def add(self, rank, row, name, start, end, **args):
        times = {"ts": 10**15 + round(1000 * start), "dur": round(1000 * (end - start))}
        where = {"pid": rank, "tid": f"{rank}.{row}", "args": args}
        self.events.append({"name": name, "ph": "X", **where, **times})

    def exchange(self, rank, ready, start, end, tensor="bucket 0", nbytes=1000, **sent):
        self.add(rank, "gradients", "NEGOTIATE_ALLREDUCE", ready, start, tensor=tensor)
        self.add(rank, "gradients", "EXCHANGE", start, end)
        args = {"tensor": tensor, "tensors": 1, "bytes": nbytes, **sent}
        self.add(rank, "gradients", "ALLREDUCE", start, end, **args)

    def block(self, rank, start, end):
        self.add(rank, "step", "SYNCHRONIZE", start, end, tensor="bucket 0")

    def end_step(self, rank, end):
        self.add(rank, "step", "STEP", end - 1, end, exchange="SGD")

    def text(self):
        return "[\n" + "\n,".join(json.dumps(event) for event in self.events) + "\n]\n"

    def write(self, folder):
        path = Path(folder, "trace.json")
        path.write_text(self.text())
        return path


def straggler(steps=5):
    """Steps of 100 ms: rank 1 computes 80 ms, rank 0 20 ms, rank 2 50 ms; exchange takes 20 ms."""
    trace = Trace()
    for rank in range(3):
        trace.rank(rank)
    for step in range(steps):
        for rank, compute in enumerate((20, 80, 50)):
            begin = 100 * step
            trace.exchange(rank, begin + compute, begin + 80, begin + 100)
            trace.block(rank, begin + compute, begin + 100)
            trace.end_step(rank, begin + 100)
    return trace


class TestAnalysis:
    def test_a_straggler(self, tmp_path):
        analysis = read(str(straggler().write(tmp_path)))
        parts = [(s.seconds, s.compute, s.exchange, s.waiting, s.hidden) for s in analysis.shares]
        # From the first step's end to the last one's: four steps.
        assert parts[0] == pytest.approx((0.4, 0.08, 0.08, 0.24, 0), abs=1e-9)
        assert parts[1] == pytest.approx((0.4, 0.32, 0.08, 0.00, 0), abs=1e-9)
        assert parts[2] == pytest.approx((0.4, 0.20, 0.08, 0.12, 0), abs=1e-9)
        steps = analysis.steps
        assert (steps.count, steps.marker) == (5, "exchanges of SGD")
        times = (steps.seconds_mean, steps.seconds_median, steps.seconds_max)
        assert times == pytest.approx((0.1, 0.1, 0.1))
        assert (steps.operations, steps.small) == (1, 1)
        slowest = analysis.slowest
        assert (slowest.rank, slowest.last, slowest.blame) == (1, 1, 1)
        assert slowest.waited == pytest.approx((0.24 + 0.12) / 2)
        assert slowest.waited_per_step == pytest.approx(0.045)
        assert analysis.waited_for[0] == pytest.approx([0, 0.24, 0])
        assert analysis.waited_for[1] == pytest.approx([0, 0, 0])
        (tensor,) = analysis.tensors
        assert (tensor.name, tensor.row, tensor.count) == ("bucket 0", "gradients", 4)
        assert (tensor.exchange, tensor.exchange_max) == pytest.approx((0.02, 0.02))
        assert (tensor.nbytes, tensor.exchange_share) == (1000, 1)
        assert tensor.late == pytest.approx(0.06)
        assert (tensor.last_rank, tensor.last) == (1, 1)

    def test_steps_that_a_rank_lacks_are_told(self, tmp_path):
        """As after its death in an elastic job."""
        trace = straggler(9)
        analysis = read(str(trace.write(tmp_path)))
        assert (analysis.steps.count, analysis.problem) == (9, "")
        late = 10**15 + 400_000
        trace.events = [
            each for each in trace.events if each["pid"] != 1 or each.get("ts", 0) < late
        ]
        analysis = read(str(trace.write(tmp_path)))
        assert analysis.steps.count == 4
        assert re.search(
            r"trace.json has 4 steps of rank 1, and 9 of another \(.*first 4 of each$",
            analysis.problem,
        )

    def test_clocks_that_differ_change_nothing(self, tmp_path):
        trace = straggler()
        for event in trace.events:
            if event["pid"] == 1 and "ts" in event:
                event["ts"] += 3_000_000
        assert read(str(trace.write(tmp_path))).slowest.waited_per_step == pytest.approx(0.045)

    def test_exchange_beside_compute_is_hidden(self, tmp_path):
        trace = Trace()
        for rank in range(2):
            trace.rank(rank)
            for step in range(3):
                begin = 100 * step
                # The thread comes at 60 ms: 20 ms of the 30 ms of exchange are over then, and
                # the wait of rank 0 for bucket 0 as well.
                trace.exchange(rank, begin + (10, 40)[rank], begin + 40, begin + 70)
                trace.exchange(rank, begin + 70, begin + 70, begin + 80, tensor="bucket 1")
                trace.block(rank, begin + 60, begin + 75)
                trace.block(rank, begin + 75, begin + 90)  # 10 ms without an operation
                trace.end_step(rank, begin + 90)
        analysis = read(str(trace.write(tmp_path)))
        for share in analysis.shares:
            assert share.compute == pytest.approx(0.14)
            assert (share.exchange, share.waiting) == pytest.approx((0.04, 0.02))
            assert share.hidden == pytest.approx(0.04)
        assert analysis.slowest is None
        assert analysis.tensors[0].late == pytest.approx(0.03)

    def test_waits_of_other_threads_overlap(self, tmp_path):
        trace = straggler()
        for event in [e for e in trace.events if e["name"] == "SYNCHRONIZE"]:
            end = {**event, "ph": "e", "ts": event["ts"] + event.pop("dur"), "id": id(event)}
            event |= {"ph": "b", "id": id(event)}
            trace.events += [end, {**event, "id": -end["id"]}, {**end, "id": -end["id"]}]
        analysis = read(str(trace.write(tmp_path)))
        assert analysis.shares[0].waiting == pytest.approx(0.24)

    def test_one_rank_and_no_steps(self, tmp_path):
        trace = Trace()
        trace.rank(0)
        trace.exchange(0, 0, 0, 10, tensor="ALLREDUCE.noname.0")
        trace.exchange(0, 20, 20, 40, tensor="ALLREDUCE.noname.1")
        analysis = read(str(trace.write(tmp_path)))
        assert (analysis.steps.count, analysis.slowest) == (0, None)
        assert [(t.name, t.count, t.last_rank) for t in analysis.tensors] == [
            ("ALLREDUCE.noname.*", 2, None)
        ]
        assert analysis.shares[0].seconds == pytest.approx(0.04)
        assert analysis.shares[0].hidden == pytest.approx(0.03)


class TestFiles:
    @pytest.mark.slow
    def test_cut_off_at_every_byte(self, tmp_path):
        trace = Trace()
        for rank in range(2):
            trace.rank(rank)
            trace.exchange(rank, 10 * rank, 20, 30, tensor="w")
        trace.block(0, 0, 30)
        text = trace.text()
        ends = [at + 1 for at in range(len(text)) if text[at : at + 2] == "}\n"]
        first = next(end for end in ends if '"ALLREDUCE"' in text[:end])
        path = tmp_path / "trace.json"
        for length in range(len(text)):
            path.write_text(text[:length])
            if length < first:
                with pytest.raises(StartError, match=r"trace.json .*; .*record") as caught:
                    read(str(path))
                assert "\n" not in str(caught.value)
                continue
            analysis = read(str(path))
            assert analysis.events == sum(end <= length for end in ends)
            if "]" in text[first:length]:
                assert analysis.problem == ""
            else:
                assert analysis.problem.startswith(f"{path} is cut off (was the job killed?)")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "is empty, expected the JSON of Chrome trace events; hvdliterun --timeline"),
            (b"epoch 1: loss 0.3", "starts with 'epoch 1: loss 0.3', expected the JSON"),
            (b"\xff\xfe\x00", "starts with "),
            (b"[]", "ends without any operation .* after 0 events; record at least one step"),
            (b'{"traceEvents": [{"ph": "X", "name": "x", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]}',
             "after 1 events; record"),
        ],
    )  # fmt: skip
    def test_no_trace(self, tmp_path, content, message):
        path = tmp_path / "file.json"
        path.write_bytes(content)
        with pytest.raises(StartError, match=message) as caught:
            run(path)
        assert caught.value.code == 2

    def test_no_file(self, tmp_path):
        with pytest.raises(StartError, match=r"is a folder, expected a timeline's file; hvdliter"):
            run(tmp_path)
        with pytest.raises(StartError, match=r"none.json: No such file or directory; hvdliterun"):
            run(tmp_path / "none.json")
        path = straggler().write(tmp_path)
        with pytest.raises(StartError, match=r"--html /proc/x/y: "):
            run(path, "--html", "/proc/x/y")

    def test_damage_ends_the_reading(self, tmp_path, capsys):
        path = straggler().write(tmp_path)
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join([*lines[:60], "no event\n", *lines[60:]]))
        assert run(path) == 0
        assert (
            "trace.json is damaged: what follows counts its first 59 ev" in capsys.readouterr().out
        )

    def test_events_that_make_no_sense_are_passed_over(self, tmp_path):
        trace = straggler()
        good = [event for event in trace.events if event["ph"] == "X"]
        for field, value in (("ts", None), ("ts", 10**30), ("dur", -1), ("name", 5), ("pid", "x")):
            trace.events.append({**good[0], field: value})
        trace.events.append({**good[2], "args": {"tensors": 1, "tensor": "w", "bytes": 10**20}})
        trace.events.append({"ph": "X"})
        assert read(str(trace.write(tmp_path))).slowest.waited_per_step == pytest.approx(0.045)

    def test_memory_is_bounded(self, tmp_path, monkeypatch):
        monkeypatch.setattr(record, "_CHARACTERS", 2**12)
        path = straggler(200).write(tmp_path)
        assert path.stat().st_size > 4 * 10**5
        tracemalloc.start()
        try:
            count = sum(1 for _ in record.Record(path).parse())
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert count == 12 + 200 * 3 * 5
        assert peak < 2 * 10**5  # from Python 3.14 on, 2**17 are the file's buffer


class Cells(HTMLParser):
    """The text of tables: by the table's id, a list of rows."""

    def __init__(self, page):
        super().__init__()
        self.tables, self._rows, self._cell = {}, [], None
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag == "table":
            self._rows = self.tables[dict(attributes)["id"]] = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
            self._cell = self._rows[-1]

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._cell = None

    def handle_data(self, data):
        if self._cell is not None:
            self._cell[-1] += data


def check_page(page, document):
    """Compare the figures of a page with those of the JSON."""
    tables = Cells(page).tables
    _, *rows = tables["shares"]
    for row, share in zip(rows, document["shares"], strict=True):
        name, _, *parts, seconds = row
        assert (name, seconds) == (share["name"], f"{share['seconds']:.3f} s")
        for text, part in zip(parts, ("compute", "exchange", "waiting", "hidden"), strict=True):
            assert float(text.rstrip("%")) == pytest.approx(
                100 * share[part] / share["seconds"], abs=0.051
            )
    _, *rows = tables["tensors"]
    for row, tensor in zip(rows, document["tensors"], strict=True):
        name, count, _, _, exchange, _, _, late, last = row
        assert (name, count) == (tensor["name"], str(tensor["count"]))
        assert milliseconds(exchange) == pytest.approx(1e3 * tensor["exchange"], 0.01)
        assert milliseconds(late) == pytest.approx(1e3 * tensor["late"], 0.01, 1e-3)
        assert last.startswith(f"{tensor['last_rank']} ")


def milliseconds(text):
    number, unit = text.split()
    return float(number) * {"us": 1e-3, "ms": 1, "s": 1000}[unit]


def documents(path, folder, capsys):
    """The page and the JSON of a trace."""
    assert run(path, "--json", "--html", folder / "page.html") == 0
    return (folder / "page.html").read_text(), json.loads(capsys.readouterr().out)


class TestOutput:
    def test_the_text(self, tmp_path, capsys):
        assert run(straggler().write(tmp_path)) == 0
        lines = capsys.readouterr().out.splitlines()
        assert "rank 0 on host    0.400    20.0%     20.0%    60.0%             0.0%" in lines
        assert lines[-2].startswith("hint: The others wait for rank 1 (45 ms per step, 45% of the")
        assert lines[-1].startswith("hint: Exchange takes 20%: ")
        assert lines[0] == "3 ranks, 5 exchanges of SGD, 87 events"
        assert lines[1] == "time of a step: median 100 ms, mean 100 ms, longest 100 ms"
        assert "slowest: rank 1, last at 100% of the operations" in lines
        assert "the others waited 180 ms for it, 45.0 ms per step" in lines

    @pytest.mark.parametrize(
        ("sent", "hosts", "hint"),
        [
            (None, 1, "Exchange takes 67%: exchange less often"),
            (1000, 1, "Exchange takes 67%: exchange less often"),
            (1000, 2, "Exchange takes 67%: send fewer bytes (compression=; "),
            (250, 2, "Exchange takes 67%: compression sends 0.25 of the bytes already; exchange"),
            (250, 1, "compression sends 0.25 of the bytes, but within one host it takes longer"),
        ],
    )
    def test_a_hint_knows_what_is_sent(self, tmp_path, capsys, sent, hosts, hint):
        """Two ranks exchange 1,000 bytes by sending as many."""
        trace = Trace()
        for rank in range(2):
            trace.rank(rank, host=rank % hosts)
            for step in range(5):
                begin = 30 * step
                extra = {} if sent is None else {"sent": sent}
                trace.exchange(rank, begin + 10, begin + 10, begin + 30, **extra)
                trace.block(rank, begin + 10, begin + 30)
                trace.end_step(rank, begin + 30)
        assert run(trace.write(tmp_path)) == 0
        lines = capsys.readouterr().out.splitlines()
        assert hint in lines[-1]
        (row,) = (line.split() for line in lines if line.startswith("bucket 0"))
        assert row[3:5] == ["0.001", "-" if sent is None else f"{sent / 1e6:.3f}"]

    def test_ranks_that_take_turns_are_not_blamed(self, tmp_path):
        trace = Trace()
        for rank in range(2):
            trace.rank(rank)
            for step in range(21):
                begin = 100 * step
                own = begin + (80 if step % 2 == rank else 60)
                trace.exchange(rank, own, begin + 80, begin + 100)
                trace.block(rank, own, begin + 100)
        analysis = read(str(trace.write(tmp_path)))
        assert analysis.slowest.blame == pytest.approx(0.5)
        assert analysis.steps.marker == "operations of bucket 0"
        figures, _ = trace_analysis.read(analysis.file)
        (waiting, _) = sorted(trace_analysis.hints_of(figures), reverse=True)
        assert waiting.startswith("Waiting takes 10%, and no single rank causes it")

    def test_the_page_has_the_figures_of_the_json(self, tmp_path, capsys):
        page, document = documents(straggler().write(tmp_path), tmp_path, capsys)
        check_page(page, document)
        assert "http" not in page.replace("http-equiv", "")
        # Its lanes add up to the shares.
        _, _, data = page.partition('id="data">')
        lanes = json.loads(data.partition("</script>")[0])
        for share, rank in zip(document["shares"], lanes["ranks"], strict=True):
            for kind, name in enumerate(("waiting", "exchange")):
                flat = rank["blocked"]
                parts = zip(flat[1::3], flat[2::3], strict=True)
                total = sum(duration for duration, busy in parts if busy == kind)
                assert total * 1e-6 == pytest.approx(share[name])

    def test_a_name_cannot_leave_its_place(self, tmp_path, capsys):
        trace = straggler()
        trace.exchange(0, 150, 160, 170, tensor="</script><b>$title")
        page, document = documents(trace.write(tmp_path), tmp_path, capsys)
        assert "</script><b>$title" in {tensor["name"] for tensor in document["tensors"]}
        assert page.count("</script>") == 3
        assert "<b>$title" not in page

    def test_a_long_trace_is_shown_around_its_longest_step(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(command, "_MOST_INTERVALS", 900)
        trace = straggler(400)
        for event in trace.events:
            if event.get("ts", 0) >= 10**15 + 30_000_000:
                event["ts"] += 70_000  # step 301 takes longer
        page, _ = documents(trace.write(tmp_path), tmp_path, capsys)
        found = re.search(r"Steps (\d+) to (\d+) of 400, around the longest step, 301: ", page)
        assert 240 < int(found[1]) < 260 < 340 < int(found[2]) < 360
        assert len(page) < 200_000

    def test_a_step_that_is_longer_than_the_page(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(command, "_MOST_INTERVALS", 1)
        page, _ = documents(straggler(6).write(tmp_path), tmp_path, capsys)
        assert "A part of 6, around the longest step, " in page


SCRIPT = f"""
import time
import numpy as np
import hvdlite as hvd

hvd.init()
gradient = np.ones(50_000, np.float32)
for step in range(8):
    if hvd.rank() == 1:
        time.sleep({SLEEP})
    hvd.allreduce(gradient, name="gradient")
    hvd.allreduce(np.ones(1), name="loss")
"""


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """The trace of three ranks of which rank 1 sleeps in each step."""
    path = tmp_path_factory.mktemp("planted") / "trace.json"
    done = run_script(SCRIPT, 3, env={"HVDLITE_TIMELINE": str(path)})
    assert done.returncode == 0, done.stderr
    return path


def test_a_planted_straggler_is_named(planted):
    analysis = read(str(planted))
    assert analysis.slowest.rank == 1
    assert SLEEP <= analysis.slowest.waited_per_step + 0.005 < 2 * SLEEP
    assert analysis.steps.count == 8
    compute = [share.compute / share.seconds for share in analysis.shares]
    assert compute[1] > 0.7 > 0.3 > max(compute[0], compute[2])
    assert next(t for t in analysis.tensors if t.name == "allreduce.gradient").last_rank == 1


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="found no chromium or google-chrome on PATH")
def test_the_page_in_a_browser(planted, tmp_path, capsys):
    _, document = documents(planted, tmp_path, capsys)
    flags = (
        "headless no-sandbox disable-gpu disable-quic no-first-run disable-sync "
        "disable-background-networking disable-component-update enable-logging=stderr dump-dom "
        f"user-data-dir={tmp_path / 'profile'}"
    )
    done = subprocess.run(
        [BROWSER, *(f"--{flag}" for flag in flags.split()), (tmp_path / "page.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert 'data-drawn="3"' in done.stdout, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    check_page(done.stdout, document)


@pytest.mark.slow
@ranks(2)
def test_torch(tmp_path):
    """A straggler in a training."""
    torch = pytest.importorskip("torch")
    import hvdlite.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(100, 100)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), named_parameters=model.named_parameters()
    )
    hvd.start_timeline(tmp_path / "trace.json")
    for _ in range(8):
        optimizer.zero_grad()
        if hvd.rank() == 1:
            time.sleep(SLEEP)
        model(torch.ones(1, 100)).sum().backward()
        optimizer.step()
    hvd.stop_timeline()
    hvd.barrier()
    analysis = read(str(tmp_path / "trace.json"))
    assert (analysis.steps.count, analysis.slowest.rank) == (8, 1)
    assert SLEEP <= analysis.slowest.waited_per_step + 0.005 < 2 * SLEEP
    assert analysis.shares[0].waiting > analysis.shares[0].seconds / 2
