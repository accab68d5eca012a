from types import SimpleNamespace

import pytest

from tests.harness import ranks
from tests.logs import logged

pytest.importorskip("tensorflow")

import tensorflow as tf

import hvdlite.tensorflow as hvd
import hvdlite.tensorflow.recipe
from hvdlite.recipe.resources import share_of_node


@pytest.mark.slow
@ranks(2, fresh=True)
def test_threads_are_shared_on_a_cpu():
    hvd.init()
    device = hvd.pin_device()
    assert device.device_type == "CPU"
    assert tf.config.threading.get_intra_op_parallelism_threads() == share_of_node([])[0]
    assert tf.config.threading.get_inter_op_parallelism_threads() >= 2
    assert hvd.allreduce(tf.ones(1), op=hvd.Sum).numpy() == [2.0]
    hvd.pin_device()  # again, without harm


@ranks(2)
def test_numbers_that_the_program_has_set_stay(monkeypatch):
    hvd.init()
    asked = []
    for pool in ("intra", "inter"):
        threading = tf.config.threading
        monkeypatch.setattr(threading, f"get_{pool}_op_parallelism_threads", lambda: 3)
        monkeypatch.setattr(threading, f"set_{pool}_op_parallelism_threads", asked.append)
    hvd.pin_device()
    assert asked == []


@ranks(2)
def test_after_tensorflow_has_started_it_says_so(monkeypatch):
    hvd.init()
    tf.ones(1)
    monkeypatch.setattr(tf.config.threading, "get_intra_op_parallelism_threads", lambda: 0)
    # TensorFlow accepts the number that it has, which an earlier test may have set.
    monkeypatch.setattr(hvdlite.tensorflow.recipe, "share_of_node", lambda gpus: (77, None))
    with logged("INFO") as messages:
        assert hvd.pin_device().device_type == "CPU"
    assert len(messages) == 1
    assert f"rank {hvd.rank()}: TensorFlow had started before hvd.pin_device()" in messages[0]
    assert "(77 would leave" in messages[0]


def pretend_accelerators(monkeypatch, count):
    """Make TensorFlow see ``count`` GPUs; return the list that records the calls made for them."""
    done = []
    gpus = [SimpleNamespace(name=f"GPU:{number}") for number in range(count)]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda gpu, kind: done.append(gpu.name))
    monkeypatch.setattr(
        tf.config.experimental, "set_memory_growth", lambda gpu, on: done.append((gpu.name, on))
    )
    return done


@ranks(2)
def test_each_rank_gets_the_accelerator_of_its_local_rank(monkeypatch):
    hvd.init()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    done = pretend_accelerators(monkeypatch, 2)
    own = f"GPU:{hvd.local_rank()}"
    assert hvd.pin_device().name == own
    assert done == [own, (own, True)]


@ranks(2)
def test_each_rank_may_see_an_accelerator_of_its_own(monkeypatch):
    hvd.init()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(hvd.rank()))
    pretend_accelerators(monkeypatch, 1)
    assert hvd.pin_device().name == "GPU:0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ValueError, match=r"2 rank\(s\) on its node share 1 acc"):
        hvd.pin_device()


@ranks(1)
def test_accelerators_that_are_in_use_already(monkeypatch):
    hvd.init()
    pretend_accelerators(monkeypatch, 1)

    def refuse(gpu, kind):
        raise RuntimeError("Visible devices cannot be modified")

    monkeypatch.setattr(tf.config, "set_visible_devices", refuse)
    with pytest.raises(RuntimeError, match=r"rank 0: .* before hvd\.pin_device\(\)"):
        hvd.pin_device()
