from __future__ import annotations

import pytest

import hvdlite as hvd
from hvdlite.base.reduction import Average, Sum
from hvdlite.compression import DENSE, Compression, Conversion, ErrorFeedback, Reduction, WarmUp
from hvdlite.gradients.options import Preset, make_options
from hvdlite.schedule import singa
from hvdlite.schedule.schedules import LocalSGD, PartialSync


def check(compression, schedule=None, op=Average, **kwargs):
    options = make_options(compression, schedule, Conversion(), Reduction(op), **kwargs)
    return options.strategy, options.schedule, options.passes


class TestSinga:
    def test_its_five_modes_are_one_argument(self):
        top, threshold = Compression.TopK(0.05), Compression.Threshold(0.05)
        assert check("fp32") == (DENSE, None, 1)
        assert check("fp16") == (Compression.fp16, None, 1)
        assert check("sparseTopK") == (ErrorFeedback(top), None, 1)
        assert check("sparseThreshold") == (ErrorFeedback(threshold), None, 1)
        strategy, schedule, _ = check("partialUpdate")
        assert (strategy, schedule) == (DENSE, PartialSync(bytes=2**23))

    def test_spars_and_corr(self):
        assert singa("sparseTopK", spars=0.2).compression == ErrorFeedback(Compression.TopK(0.2))
        assert singa("sparseTopK", 0.2, corr=False).compression == Compression.TopK(0.2)
        found = singa("sparseThreshold", spars=3.0, corr=False).compression
        assert found == Compression.Threshold(3.0)
        with pytest.raises(ValueError, match="ratio=2"):
            singa("sparseTopK", spars=2)

    def test_other_names(self):
        with pytest.raises(ValueError, match="'sparse' is none of SINGA's names: fp32, fp16, "):
            singa("sparse")
        with pytest.raises(ValueError, match=r"or a name that hvd\.singa takes: fp32, fp16, "):
            check("sparse")

    def test_it_is_public(self):
        assert hvd.singa is singa


class TestArguments:
    def test_a_preset_and_a_schedule(self):
        preset = Preset(Compression.fp16, LocalSGD(every=2))
        assert check(preset) == (Compression.fp16, LocalSGD(every=2), 1)
        with pytest.raises(ValueError, match=r"has the schedule .* leave out schedule="):
            check(preset, LocalSGD(every=3))
        assert check("fp16", LocalSGD(every=3))[1] == LocalSGD(every=3)

    def test_what_a_strategy_does_not_compute(self):
        with pytest.raises(ValueError, match=r"MajorityVote\(\) does not compute hvd\.Sum"):
            check(Compression.MajorityVote(), op=Sum)

    def test_weights_are_no_gradients(self):
        for compression in (
            Compression.TopK(0.1),
            ErrorFeedback(Compression.Sign()),
            WarmUp(Compression.fp16, 3),
        ):
            with pytest.raises(ValueError, match="is for gradients only"):
                check(compression, PartialSync(parts=2))
            check(compression, hvd.Schedule.DiLoCo(every=2))
        check(Compression.bf16, PartialSync(parts=2))
