"""The options of hvdliterun, among them those of horovodrun."""

from __future__ import annotations

import json
import sys

import pytest

from hvdlite.launch.cli import main
from hvdlite.launch.options import parse, report_ignored, variables
from hvdlite.version import __version__

# Each spelling that horovodrun 0.28 has, with a value where it takes one.
HOROVODRUN = """
-np 2|--num-proc 2|--disable-cache|--start-timeout 5|--network-interfaces eth0,eth1
--network-interface eth0|--output-filename D|--verbose|--config-file F|-p 22|--ssh-port 22|-i F
--ssh-identity-file F|--fusion-threshold-mb 3|--cycle-time-ms 2.5|--cache-capacity 9
--hierarchical-allreduce|--no-hierarchical-allreduce|--hierarchical-allgather
--no-hierarchical-allgather|--torus-allreduce|--no-torus-allreduce|--autotune|--no-autotune
--autotune-log-file F|--autotune-warmup-samples 1|--autotune-steps-per-sample 1
--autotune-bayes-opt-max-samples 1|--autotune-gaussian-process-noise 0.5|--min-np 1|--min-num-proc 1
--max-np 4|--max-num-proc 4|--slots-per-host 2|--elastic-timeout 7|--reset-limit 3
--blacklist-cooldown-range 1 2|--timeline-filename F|--timeline-mark-cycles
--no-timeline-mark-cycles|--stall-check|--no-stall-check|--stall-check-warning-time-seconds 4
--stall-check-shutdown-time-seconds 6|--mpi-threads-disable|--no-mpi-threads-disable
--mpi-args=--x|--tcp|--binding-args=--y|--num-nccl-streams 1|--thread-affinity 1
--gloo-timeout-seconds 1|--log-level DEBUG|--log-with-timestamp|--log-without-timestamp
-prefix-timestamp|--prefix-output-with-timestamp|--log-hide-timestamp|--no-log-hide-timestamp|-H a:1
--hosts a:1|-hostfile F|--hostfile F|--host-discovery-script F|--gloo|--mpi|--jsrun|-cb
--check-build
"""
SPELLINGS = [words.split() for line in HOROVODRUN.split("\n") for words in line.split("|") if words]

VARIABLES = {
    "--fusion-threshold-mb": {"HVDLITE_FUSION_THRESHOLD": "3145728"},
    "--cycle-time-ms": {"HVDLITE_CYCLE_TIME": "2.5"},
    "--cache-capacity": {"HVDLITE_CACHE_CAPACITY": "9"},
    "--elastic-timeout": {"HVDLITE_ELASTIC_TIMEOUT": "7"},
    "--reset-limit": {"HVDLITE_ELASTIC_RESET_LIMIT": "3"},
    "--timeline-mark-cycles": {"HVDLITE_TIMELINE_MARK_CYCLES": "1"},
    "--no-timeline-mark-cycles": {"HVDLITE_TIMELINE_MARK_CYCLES": "0"},
    "--stall-check": {"HVDLITE_STALL_CHECK_DISABLE": "0"},
    "--no-stall-check": {"HVDLITE_STALL_CHECK_DISABLE": "1"},
    "--stall-check-warning-time-seconds": {"HVDLITE_STALL_CHECK_TIME_SECONDS": "4"},
    "--stall-check-shutdown-time-seconds": {"HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "6"},
    "--log-level": {"HVDLITE_LOG_LEVEL": "DEBUG"},
    "--network-interface": {"NCCL_SOCKET_IFNAME": "eth0"},
    "--network-interfaces": {"NCCL_SOCKET_IFNAME": "eth0,eth1"},
}
ELSEWHERE = """
-np --num-proc --start-timeout --output-filename --verbose --config-file -p --ssh-port -i
--ssh-identity-file --timeline-filename --mpi-args=--x --tcp --binding-args=--y -prefix-timestamp
--prefix-output-with-timestamp -H --hosts -hostfile --hostfile -cb --check-build
--min-np --min-num-proc --max-np --max-num-proc --slots-per-host --host-discovery-script
--blacklist-cooldown-range
"""


@pytest.mark.parametrize("words", SPELLINGS, ids=" ".join)
def test_each_spelling_of_horovodrun(words, tmp_path, capsys):
    (tmp_path / "F").write_text("params:\n")
    words = [str(tmp_path / "F") if word == "F" else word for word in words]
    options = parse([*words, "train", *words])
    assert options.command == ["train", *words]
    report_ignored(options)
    ignored = capsys.readouterr().err.rpartition(": ")[2].split()
    if words[0] in VARIABLES:
        assert variables(options) == VARIABLES[words[0]]
        assert ignored == []
    elif words[0] in ELSEWHERE.split():
        assert ignored == []
    else:
        assert ignored == [words[0].replace("--no-", "--")]
        assert variables(options) == {}


def test_blanks_around_a_number_do_not_matter():
    assert parse(["-np", " 2", "train"]).num_proc == 2


def test_the_number_of_processes_has_the_flag_of_mpirun_too():
    """Until Python 3.13, argparse takes it for the beginning of ``-np``."""
    assert parse(["-n", "2", "train"]).num_proc == 2


@pytest.mark.parametrize("flag", ["-v", "--version"])
def test_v_is_the_version(flag, capsys):
    with pytest.raises(SystemExit) as ended:
        parse([flag])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = capsys.readouterr().out
    for words in SPELLINGS:
        assert words[0].partition("=")[0] in text


@pytest.fixture
def mpirun(tmp_path, monkeypatch, capfd):
    """Run hvdliterun with a program in mpirun's place; what that got: arguments, environment."""
    got = tmp_path / "got"
    program = tmp_path / "mpirun"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        "if '--version' in sys.argv: sys.exit(print(open(sys.argv[0] + '.banner').read()))\n"
        f"json.dump([sys.argv[1:], dict(os.environ)], open({str(got)!r}, 'w'))\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("HVDLITE_MPIRUN", str(program))

    monkeypatch.setattr("hvdlite.launch.hosts.check_names", lambda hosts, arguments: None)

    def run(banner, *arguments):
        (tmp_path / "mpirun.banner").write_text(banner)
        assert main([*arguments, "true"]) == 0
        return (*json.loads(got.read_text()), capfd.readouterr().err.splitlines())

    return run


_REMOTE = ["-np", "2", "-H", "a:1,b:1", "-p", "2222", "-i", "key", "--start-timeout", "5"]
_NETWORKS = ["--network-interface", "eth0", "--network-interface", "eth1,eth2"]


def test_what_mpirun_gets(mpirun, tmp_path):
    more = ["--mpi-args=--map-by 'a b'", "--binding-args=--bind-to core", "-prefix-timestamp"]
    ssh = "-p 2222 -i key -o ConnectTimeout=5"
    arguments, settings, err = mpirun("(Open MPI) 5.0.11", *_REMOTE, *_NETWORKS, *more, "--tcp")
    assert err == []
    position = arguments.index("--map-by")
    added = ["--map-by", "a b", "--bind-to", "core", "--output", "timestamp", sys.executable]
    assert arguments[position : position + 7] == added
    assert settings["PRTE_MCA_plm_ssh_args"] == ssh
    assert settings["PRTE_MCA_prte_if_include"] == "eth0,eth1,eth2"
    assert settings["NCCL_SOCKET_IFNAME"] == "eth0,eth1,eth2"
    assert (settings["OMPI_MCA_pml"], settings["NCCL_IB_DISABLE"]) == ("ob1", "1")
    settings = mpirun("(Open MPI) 4.1.6", *_REMOTE)[1]
    assert settings["OMPI_MCA_plm_rsh_args"] == ssh
    _, settings, err = mpirun("HYDRA build details 4.2", *_REMOTE, *_NETWORKS, "-prefix-timestamp")
    assert settings["HYDRA_LAUNCHER_EXTRA_ARGS"] == ssh
    assert settings["HYDRA_IFACE"] == "eth0"
    assert err == ["hvdliterun: --prefix-output-with-timestamp has no effect: MPICH cannot do it"]
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost slots=2\n")
    arguments, settings, err = mpirun(
        "(Open MPI) 5.0.11",
        "-np",
        "2",
        "-hostfile",
        str(hosts),
        "--network-interface",
        "lo",
        "--gloo",
        "--thread-affinity=3",
        "--gloo",
    )
    assert arguments[:4] == ["-np", "2", "--host", "localhost:2"]
    assert "PRTE_MCA_prte_if_include" not in settings  # It would find no network between hosts.
    ignored = "options of horovodrun without effect here: --thread-affinity, --gloo"
    assert err == [f"hvdliterun: {ignored}"]


def test_networks_of_hosts_that_a_batch_system_has_chosen(mpirun, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    arguments, settings, _ = mpirun("(Open MPI) 5.0.11", "-np", "2", "--network-interface", "eth0")
    assert settings["PRTE_MCA_prte_if_include"] == "eth0"
    assert "NCCL_SOCKET_IFNAME" in arguments  # after -x, for the other hosts


_CONFIG = """
controller: gloo
params:
  fusion_threshold_mb: 3
  cycle_time_ms: 2.5
  cache_capacity: null
  hierarchical_allreduce: true
  nosuch: 1
timeline:
  filename: {0}/trace.json
  mark_cycles: false
stall_check:
  enabled: false
  warning_time_seconds: 4
autotune:
  enabled: false
  log_file: "auto.csv"
library_options:
  thread_affinity: 1
logging:
  level: DEBUG
  hide_timestamp: true
nosuch:
  cache_capacity: 1
"""


def test_config_file(tmp_path, capsys):
    pytest.importorskip("yaml")
    path = tmp_path / "config.yaml"
    path.write_text(_CONFIG.format(tmp_path))
    options = parse(["--cycle-time-ms", "4", "--config-file", str(path), "--autotune", "train"])
    assert variables(options) == {
        "HVDLITE_FUSION_THRESHOLD": "3145728",
        "HVDLITE_CYCLE_TIME": "4",  # The command line counts more.
        "HVDLITE_TIMELINE_MARK_CYCLES": "0",
        "HVDLITE_STALL_CHECK_DISABLE": "1",
        "HVDLITE_STALL_CHECK_TIME_SECONDS": "4",
        "HVDLITE_LOG_LEVEL": "DEBUG",
        "HVDLITE_TIMELINE": f"{tmp_path}/trace.json",
    }
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("config.yaml: ")[1].split()[0] for line in lines] == [
        "params.nosuch",
        "nosuch.cache_capacity",
    ]
    report_ignored(options)
    assert capsys.readouterr().err.endswith(
        "--hierarchical-allreduce, --autotune, --log-hide-timestamp, --autotune-log-file, "
        "--thread-affinity, --gloo\n"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "config.yaml: No such file"),
        ("params: [", "config.yaml: while parsing"),
        ("- 1", "found list, expected sections"),
        ("params:\n  cache_capacity: many", "='many' is not a number of calls, 0 or more"),
        ("params:\n  fusion_threshold_mb: 0.5", "found '0.5', expected a number from 0 on"),
        ("stall_check:\n  warning_time_seconds: 1e10", "is not a number of seconds, or 0"),
        ("timeline:\n  mark_cycles: 3", "timeline.mark_cycles is 3, expected true or false"),
    ],
)
def test_config_file_with_a_mistake(tmp_path, capsys, text, words):
    pytest.importorskip("yaml")
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    try:
        code = main(["-np", "1", "--config-file", str(path), "true"])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--config-file {path}: " in line
    assert words in line
