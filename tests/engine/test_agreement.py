from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from hvdlite.engine import Signature, agreement, calls
from hvdlite.engine.agreement import (
    Description,
    QueueReport,
    ranks_text,
    report_missing,
)


def describe(name, digest, payload, key="", title="", **more):
    """An operation of the kind and the title that its name says, if not said otherwise."""
    return Description(name, key or name, title or repr(name), digest, payload, **more)


def report(*names, closing=False, **differently):
    """A report of operations that are alike on all ranks, but for those given by keyword."""
    alike = [describe(name, b"same", b"") for name in names]
    return QueueReport((*alike, *differently.values()), closing)


def decide(reports, members=None, give_up_after=math.inf):
    """Decide by reports, of which the last comes from a rank with a limit."""
    members = range(len(reports)) if members is None else members
    reports = [*reports[:-1], dataclasses.replace(reports[-1], limit=give_up_after)]
    return agreement.decide(dict(zip(members, reports, strict=True)))


def test_nothing_to_decide():
    decision = decide([report(), report()])
    assert (decision.ready, decision.differing) == ([], [])
    assert (decision.failed, decision.missing, decision.closing) == ({}, {}, [])


def test_what_is_everywhere_is_ready_in_one_order():
    reports = [report("a", "b", "c"), report("c", "a", "b"), report("b", "c", "a")]
    assert decide(reports).ready == ["a", "b", "c"]
    for permuted in itertools.permutations(reports):
        assert sorted(decide(permuted).ready) == ["a", "b", "c"]


def test_what_is_missing_somewhere_waits():
    decision = decide([report("a", "b"), report("b"), report("b", "c")])
    assert decision.ready == ["b"]
    assert decision.missing == {"'a'": [1, 2], "'c'": [0, 1]}
    assert decision.failed == {}


def test_payloads_may_differ():
    one, other = describe("a", b"same", b"\x01"), describe("a", b"same", b"\x02")
    assert decide([QueueReport((one,)), QueueReport((other,))]).ready == ["a"]


def test_signatures_may_not():
    decision = decide([report("a", b=describe("b", b"other", b"")), report("a", "b")])
    assert decision.ready == ["a"]
    assert decision.differing == [{0: "b", 1: "b"}]


def test_a_failure_on_one_rank_fails_all():
    failing = describe("a", b"same", b"", failure="no pickle")
    decision = decide([report("a", "b"), report("b", a=failing)])
    assert decision.ready == ["b"]
    assert decision.failed == {"a": "rank 1: no pickle"}


def test_a_failure_waits_for_all_ranks():
    # A rank that has not submitted it could not be told.
    failing = describe("a", b"same", b"", failure="no pickle")
    decision = decide([report(a=failing), report()])
    assert decision.missing == {"'a'": [1]}
    assert decision.failed == {}


def test_several_failures_are_all_told():
    failures = [describe("a", b"same", b"", failure=why) for why in ("this", "that")]
    decision = decide([QueueReport((failure,)) for failure in failures])
    assert decision.failed == {"a": "rank 0: this; rank 1: that"}


def test_a_failure_goes_before_a_difference():
    failing = describe("a", b"other", b"", failure="no pickle")
    decision = decide([report("a"), report(a=failing)])
    assert decision.failed == {"a": "rank 1: no pickle"}
    assert decision.differing == []


def test_a_rank_that_shuts_down_is_not_waited_for():
    decision = decide([report("a", "b"), report(closing=True), report("a", "b"), report("a")])
    assert decision.closing == [1]
    assert set(decision.failed) == {"a", "b"}
    assert "rank 1 shut down without submitting 'a'" in decision.failed["a"]
    assert decision.missing == {}


def test_a_rank_that_shuts_down_still_does_what_it_has_submitted():
    decision = decide([report("a"), report("a", closing=True)])
    assert decision.ready == ["a"]
    assert decision.failed == {}


def test_what_only_a_closing_rank_waits_for_goes_on_waiting():
    decision = decide([report("a", closing=True), report()])
    assert decision.missing == {"'a'": [1]}


def test_several_ranks_that_shut_down_are_all_named():
    decision = decide([report("a"), report(closing=True), report(closing=True)])
    assert "ranks 1, 2 shut down" in decision.failed["a"]


def test_messages_call_an_operation_by_its_title():
    titled = describe("a", b"same", b"", waited=9.0, title="'a' (gradients of 'x')")
    decision = decide([report(a=titled), report()])
    assert decision.missing == {"'a' (gradients of 'x')": [1]}
    failed = decide([report(a=titled), report()], give_up_after=5.0).failed["a"]
    assert failed.startswith("'a' (gradients of 'x') has waited 9 s")


def called(at, before):
    """An operation of a call without a name, in a line, after one in another line."""
    place, earlier = (calls.place_of([("train.py", line)]) for line in (at, before))
    report = calls.CallReport("allreduce", place, place.digest, earlier, "first", "")
    return describe("second", b"same", b"", stands_in=True, place=place.digest), report


def compare(*called, **joined):
    decision = decide([*(QueueReport((each,)) for each, _ in called), *joined.values()])
    assert decision.parted == ["second"]
    reports = {rank: {"second": report} for rank, (_, report) in enumerate(called)}
    return decision, agreement.compare_calls(decision, reports)


@pytest.mark.parametrize("joins", [False, True])
def test_calls_that_cross_fail_and_nobody_stands_in(joins):
    joined = {"rank_2": QueueReport((), joined=True)} if joins else {}
    decision, found = compare(called(1, 2), called(2, 1), **joined)
    assert (decision.ready, decision.substituted, found) == ([], [], {})
    assert decision.crossed == ["second"]
    assert "train.py:1 on rank 0 and train.py:2 on rank 1, after" in decision.failed["second"]


def test_calls_at_different_places_are_one_operation():
    decision, found = compare(called(1, 3), called(2, 3))
    assert decision.ready == list(found) == ["second"]
    assert "train.py:1 on rank 0 and train.py:2 on rank 1 are taken for the same" in (
        agreement.parted_text(found["second"])
    )


def test_ranks_that_wait_elsewhere_explain_a_wait():
    astray = QueueReport((), elsewhere=("'objects'",), steps=12)
    ahead = QueueReport((describe("a", b"same", b""),), steps=13)
    expected = "rank 1 is in 'objects', after 12 steps; others have made 13 steps"
    assert decide([ahead, astray]).astray == expected
    # Of rank 2 nothing is known.
    assert decide([ahead, astray, QueueReport(())]).astray == ""
    gone = QueueReport((), closing=True, steps=12)
    failed = decide([ahead, gone]).failed["a"]
    assert "rank 1 is at its end, after 12 steps; others have made 13 steps" in failed


def test_patience_ends_with_the_longest_wait():
    early = describe("a", b"same", b"", waited=11.0)
    late = describe("a", b"same", b"", waited=1.0)
    for first, second in ((early, late), (late, early)):
        reports = [QueueReport((first,)), QueueReport((second,)), report("b")]
        assert decide(reports, give_up_after=10.0).failed == {
            "a": "'a' has waited 11 s and is still missing on rank 2; rank 2 is in 'b'; "
            f"{agreement.LIKELY}, or raise HVDLITE_STALL_SHUTDOWN_TIME_SECONDS"
        }
        assert decide(reports, give_up_after=12.0).missing["'a'"] == [2]
        assert decide(reports).missing["'a'"] == [2]


def test_ranks_that_wait_for_each_other_give_up_together():
    def waiting(name, seconds, **more):
        return QueueReport((describe(name, b"same", b"", waited=seconds, **more),))

    decision = decide([waiting("a", 10.1), waiting("b", 9.9)], give_up_after=10.0)
    assert list(decision.failed) == ["a", "b"]
    assert not decide([waiting("a", 9.9), waiting("b", 9.8)], give_up_after=10.0).failed
    # What has just begun to wait may only be late, and what can run, or may wait, ends no patience.
    assert list(decide([waiting("a", 10.1), waiting("b", 4.9)], give_up_after=10.0).failed) == ["a"]
    exempt = waiting("join", 99.0, stall_exempt=True)
    assert not decide([exempt, waiting("b", 9.9)], give_up_after=10.0).failed
    complete = describe("c", b"same", b"", waited=99.0)
    both = QueueReport((complete, *waiting("a", 9.9).descriptions))
    assert not decide([both, QueueReport((complete,))], give_up_after=10.0).failed


def test_what_has_waited_long_still_runs_when_it_is_complete():
    old = describe("a", b"same", b"", waited=100.0)
    assert decide([QueueReport((old,)), report("a")], give_up_after=10.0).ready == ["a"]


def of_kinds(*kinds):
    return QueueReport(tuple(describe("x", b"same", b"", key=f"{kind}.x") for kind in kinds))


def test_kinds_of_one_name_do_not_meet():
    decision = decide([of_kinds("reduce", "gather"), of_kinds("gather", "reduce")])
    assert decision.ready == ["reduce.x", "gather.x"]
    assert decision.differing == []


def test_a_second_kind_waits():
    decision = decide([of_kinds("reduce", "gather"), of_kinds("reduce")])
    assert decision.ready == ["reduce.x"]
    assert (decision.differing, decision.missing) == ([], {"'x'": [1]})


def test_ranks_that_wait_under_one_name_for_different_kinds_clash():
    decision = decide([of_kinds("reduce"), of_kinds("reduce"), of_kinds("gather", "root")])
    assert decision.differing == [{0: "reduce.x", 1: "reduce.x", 2: "gather.x"}]
    assert (decision.ready, decision.missing) == ([], {})


def test_they_clash_only_when_all_are_there():
    decision = decide([of_kinds("reduce"), of_kinds("gather"), report()])
    assert decision.differing == []
    assert decision.missing == {"'x'": [1, 2], "'gather.x'": [0, 2]}


SIGNATURE = (("the operation", "allreduce"), ("dtype", "float32"), ("shape", (3, 4)))


def explain(name, entries):
    return agreement.explain(name, {rank: Signature(each) for rank, each in entries.items()})


def test_explain_names_the_first_difference_and_the_ranks():
    other = (*SIGNATURE[:2], ("shape", (3, 5)))
    text = explain("loss", {0: SIGNATURE, 1: other, 2: SIGNATURE})
    assert text == (
        "the ranks disagree on 'loss': shape is (3, 4) on ranks 0, 2, (3, 5) on rank 1; "
        "every rank must submit the same operation under one name"
    )


def test_explain_names_every_value():
    signatures = {rank: (("dtype", kind),) for rank, kind in enumerate(["int8", "int16", "int32"])}
    text = explain("a", signatures)
    assert "dtype is int8 on rank 0, int16 on rank 1, int32 on rank 2; all ranks have to" in text


def test_explain_tells_values_apart_that_only_look_different():
    assert "1 on rank 0, 1.0 on rank 1" in explain("a", {0: (("root", 1),), 1: (("root", 1.0),)})


def test_explain_where_the_fields_themselves_differ():
    other = (SIGNATURE[0], ("root_rank", 1))
    text = explain("a", {0: SIGNATURE, 1: other})
    assert "what follows is dtype float32 on rank 0, root_rank 1 on rank 1" in text


@pytest.mark.parametrize("longer", [0, 1])
def test_explain_where_one_has_more(longer):
    signatures = {longer: SIGNATURE, 1 - longer: SIGNATURE[:2]}
    text = explain("a", signatures)
    assert f"shape (3, 4) on rank {longer}" in text
    assert f"nothing more on rank {1 - longer}" in text


def test_ranks_text():
    assert ranks_text([1]) == "rank 1"
    assert ranks_text([0, 2]) == "ranks 0, 2"


def test_report_missing_stays_short():
    missing = {f"'t{number}'": [1] for number in range(10)}
    text = report_missing(missing, limit=2)
    assert text == "'t0' (missing on rank 1), 't1' (missing on rank 1) and 8 more"
    assert report_missing({"'a'": [0, 3]}) == "'a' (missing on ranks 0, 3)"


class TestJoinedRanks:
    def one(self, stands_in, digest=b"same", failure=None):
        return describe("a", digest, b"", failure=failure, stands_in=stands_in)

    def joined(self, *descriptions):
        join = describe("join()", b"join", b"", waited=1e9, key="join.join()", stall_exempt=True)
        return QueueReport((*descriptions, join), joined=True)

    def test_they_stand_in_where_they_can(self):
        reports = [QueueReport((self.one(True),)), self.joined(), QueueReport((self.one(True),))]
        decision = decide(reports)
        assert (decision.ready, decision.substituted) == (["a"], ["a"])
        assert (decision.failed, decision.missing) == ({}, {})

    def test_what_they_submitted_before_is_theirs(self):
        decision = decide([QueueReport((self.one(True),)), self.joined(self.one(True))])
        assert (decision.ready, decision.substituted) == (["a"], [])

    def test_what_needs_their_data_fails_and_says_who_has_joined(self):
        reports = [QueueReport((self.one(False),)), self.joined()]
        decision = decide(reports, members=[4, 7])
        assert decision.ready == []
        assert "'a' cannot go on without rank 7, which called join()" in decision.failed["a"]

    def test_who_has_not_joined_is_waited_for(self):
        decision = decide([QueueReport((self.one(True),)), self.joined(), QueueReport(())])
        assert (decision.ready, decision.missing) == ([], {"'a'": [1, 2]})

    def test_the_others_still_have_to_agree(self):
        reports = [
            QueueReport((self.one(True),)),
            self.joined(),
            QueueReport((self.one(True, b"other"),)),
        ]
        decision = decide(reports)
        assert (decision.ready, decision.differing) == ([], [{0: "a", 1: "a", 2: "a"}])

    def test_a_failure_of_one_is_that_of_all(self):
        reports = [QueueReport((self.one(True, failure="broken"),)), self.joined()]
        assert decide(reports).failed == {"a": "rank 0: broken"}

    def test_a_join_is_neither_reported_nor_given_up(self):
        decision = decide([QueueReport(()), self.joined()], give_up_after=10.0)
        assert (decision.failed, decision.missing, decision.differing) == ({}, {}, [])

    def test_a_join_does_not_wait_for_who_has_shut_down(self):
        decision = decide([QueueReport((), closing=True), self.joined()])
        assert "rank 0 shut down" in decision.failed["join.join()"]

    def test_all_have_joined(self):
        assert decide([self.joined(), self.joined()]).ready == ["join.join()"]


def test_messages_call_ranks_by_their_numbers_in_the_world():
    waiting = QueueReport((describe("a", b"same", b"", waited=9.0),))
    failed = decide([waiting, report()], members=[3, 5], give_up_after=5.0).failed
    assert "still missing on rank 5" in failed["a"]
    assert decide([waiting, report()], members=[3, 5]).missing == {"'a'": [5]}
    assert decide([report(closing=True), report()], members=[3, 5]).closing == [3]
