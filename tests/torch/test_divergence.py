"""Jobs in which one rank parts from the others, and jobs in which none does."""

import pytest

pytest.importorskip("torch")

from tests.campaigns import divergence

# All of them: python -m tests.campaigns.divergence


# In a process set and with --elastic, too: python -m tests.campaigns.divergence
@pytest.mark.parametrize("variant", ["plain", pytest.param("virtual", marks=pytest.mark.slow)])
def test_every_rank_is_told_where_and_when_they_have_parted(variant):
    cases = 6 if variant == "plain" else 3
    found = divergence.run("torch", variant, seed=len(variant), cases=cases)
    assert len(found) == cases
    assert max(each.steps for each in found) <= 20


@pytest.mark.slow
def test_no_alarm():
    output = divergence.run_quietly("torch", divergence.QUIET, steps=30)
    assert output.count("30 steps without an alarm") == len(divergence.QUIET)
