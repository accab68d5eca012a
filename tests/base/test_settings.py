from __future__ import annotations

import math
from dataclasses import fields

import pytest

from hvdlite.base import settings
from hvdlite.base.settings import Settings
from hvdlite.errors import SettingsError

# Of each setting: texts with their values, and texts that are refused.
TEXTS = {
    "fusion_threshold": ([("0", 0), ("1048576", 1048576), (" 5 ", 5)], ["-1", "64MB", "1.5"]),
    "first_bucket_size": ([("0", 0), ("1024", 1024)], ["-1", "x"]),
    "check_ranks": ([("error", "error"), ("Warn", "warn"), ("off", "off")], ["1", "sometimes"]),
    "check_ranks_every": ([("0", 0), ("100", 100)], ["-1", "1.5", "often"]),
    "not_finite": ([("pass", "pass"), ("Raise", "raise"), ("skip", "skip")], ["1", "ignore"]),
    "stall_check_disable": (
        [("1", True), ("0", False), ("true", True), ("No", False)],
        ["2", "maybe"],
    ),
    "stall_check_time_seconds": (
        [("0.5", 0.5), ("60", 60.0), ("1e3", 1000.0), ("0", math.inf)],
        ["-1", "nan", "inf", "soon"],
    ),
    "stall_shutdown_time_seconds": ([("0", 0.0), ("0.25", 0.25)], ["-1", "nan", "inf"]),
    "shared_memory": ([("1", True), ("0", False)], ["2", "maybe"]),
    "device_transport": ([("auto", "auto"), ("Host", "host")], ["nccl", "1"]),
    "overlap": ([("auto", "auto"), ("Auto", "auto"), ("1", "1"), ("off", "0")], ["2", "sometimes"]),
    "cycle_time": ([("2.5", 2.5), ("0", 0.0)], ["-1", "1001", "nan", "soon"]),
    "cache_capacity": ([("0", 0), ("1024", 1024)], ["-1", "1.5", "many"]),
    "shutdown_timeout_seconds": ([("0.5", 0.5), ("5", 5.0)], ["0", "1e300", "never"]),
    "elastic": ([("1", True), ("0", False)], ["2", "perhaps"]),
    "spares": ([("0", 0), ("2", 2)], ["-1", "one"]),
    "virtual_ranks": ([("0", 0), ("8", 8)], ["-1", "two"]),
    "elastic_timeout": ([("0.5", 0.5), ("600", 600.0)], ["0", "-1", "inf", "long"]),
    "elastic_retries": ([("0", 0), ("12", 12)], ["-1", "1.5", "often"]),
    "elastic_reset_limit": ([("0", 0), ("3", 3)], ["-1", "never"]),
    "check_launcher": ([("1", True), ("0", False)], ["2", "maybe"]),
    "force_local_size": ([("0", 0), ("2", 2)], ["-1", "two"]),
    "timeline": ([("/tmp/trace.json", "/tmp/trace.json"), ("DYNAMIC", "")], ["traces/"]),
    "timeline_mark_cycles": ([("1", True), ("0", False)], ["2", "maybe"]),
    "terminal_columns": ([("0", 0), ("80", 80)], ["-1", "wide"]),
    "log_level": ([("debug", "debug"), ("WARNING", "warning"), ("Trace", "trace")], ["loud"]),
}
ALLOWED = {entry.name: entry.metadata["allowed"] for entry in fields(Settings)}


def test_every_setting_is_tested_here_and_says_what_is_allowed():
    assert set(TEXTS) == set(ALLOWED)
    assert min(map(len, ALLOWED.values())) > 5
    assert settings.read({}) == Settings()


@pytest.mark.parametrize("name", TEXTS)
def test_values_are_taken_or_named_with_what_is_allowed_and_empty_means_not_set(name):
    variables = [f"{prefix}_{name.upper()}" for prefix in ("HVDLITE", "HOROVOD")]
    good, bad = TEXTS[name]
    for variable in variables:
        for text, value in good:
            assert getattr(settings.read({variable: text}), name) == value
        for text in bad:
            with pytest.raises(SettingsError) as caught:
                settings.read({variable: text})
            assert str(caught.value) == f"{variable}={text!r} is not {ALLOWED[name]}"
            assert isinstance(caught.value, ValueError)
    for empty in ("", "  "):
        assert settings.read(dict.fromkeys(variables, empty)) == Settings()
        text, value = good[0]
        found = settings.read({variables[0]: empty, variables[1]: text})
        assert getattr(found, name) == value


def test_what_has_no_effect_gets_a_line_each():
    assert settings.ignored({f"HOROVOD_{name.upper()}": "1" for name in TEXTS}) == []
    # Variables of Horovod's build, of horovodrun, empty ones, and those of the launcher.
    names = "HOROVOD_WITH_PYTORCH HOROVOD_GPU_OPERATIONS HOROVOD_CUDA_HOME HOROVOD_RANK"
    names += " HOROVOD_GLOO_RENDEZVOUS_ADDR HOROVOD_CONTROLLER HVDLITE_MPIRUN PATH"
    assert (
        settings.ignored({"HOROVOD_THREAD_AFFINITY": " ", **dict.fromkeys(names.split(), "x")})
        == []
    )
    found = settings.ignored(
        {
            "HOROVOD_THREAD_AFFINITY": "1,2",
            "HOROVOD_FUSION_TRESHOLD": "1",
            "HVDLITE_CYCLE_TIMES": "1",
            "HOROVOD_COLOUR": "1",
            "HOROVOD_AUTOTUNE": "0",
            "HVDLITE_AUTOTUNE": "1",
        }
    )
    assert found == [
        "HOROVOD_COLOUR has no effect: no setting of Horovod's or hvdlite's",
        "HOROVOD_FUSION_TRESHOLD has no effect; HOROVOD_FUSION_THRESHOLD is a setting",
        "HOROVOD_THREAD_AFFINITY has no effect: hvdlite binds no threads; "
        "mpirun --bind-to binds ranks",
        "HVDLITE_AUTOTUNE has no effect: hvdlite's sizes are fixed; HVDLITE_FUSION_THRESHOLD sets "
        "that of the buckets",
        "HVDLITE_CYCLE_TIMES has no effect; HVDLITE_CYCLE_TIME is a setting",
    ]


def test_each_setting_is_looked_up_by_itself_ours_before_horovods(monkeypatch):
    both = {"HVDLITE_FUSION_THRESHOLD": "1", "HOROVOD_FUSION_THRESHOLD": "2"}
    assert settings.read(both).fusion_threshold == 1
    # Horovod's is not even looked at.
    both["HOROVOD_FUSION_THRESHOLD"] = "x"
    assert settings.read(both).fusion_threshold == 1
    values = settings.read({"HVDLITE_FORCE_LOCAL_SIZE": "2", "HOROVOD_LOG_LEVEL": "info"})
    assert (values.force_local_size, values.log_level) == (2, "info")
    assert values.fusion_threshold == Settings().fusion_threshold
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "7")
    assert settings.read().stall_check_time_seconds == 7.0
