import collections
import os
import resource

import numpy as np
import pytest

from tests.harness import ranks

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd


def same_everywhere(value):
    return all(other == value for other in hvd.allgather_object(value))


def weights(model):
    return [parameter.detach().numpy().tobytes() for parameter in model.state_dict().values()]


def make_model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)
    )


@ranks(3)
def test_broadcast_parameters_in_every_form(size):
    hvd.init()
    root = size - 1
    expected = weights(make_model(root))
    for form in (
        lambda model: model.state_dict(),
        lambda model: model,
        lambda model: model.state_dict().items(),
        lambda model: list(model.state_dict().values()),
        lambda model: dict(zip([0, None, "1", *range(2, 99)], model.state_dict().values())),  # noqa: B905
    ):
        model = make_model(hvd.rank())
        hvd.broadcast_parameters(form(model), root_rank=root)
        assert weights(model) == expected
    model = make_model(hvd.rank())
    hvd.broadcast_parameters(model.named_parameters(), root_rank=root)
    for mine, theirs in zip(model.parameters(), make_model(root).parameters(), strict=True):
        assert torch.equal(mine, theirs)


@ranks(2)
def test_broadcast_parameters_refuses_other_things():
    hvd.init()
    with pytest.raises(ValueError, match="must be a dict, a module"):
        hvd.broadcast_parameters([1, 2], root_rank=0)
    with pytest.raises(ValueError, match="one tensor"):
        hvd.broadcast_parameters(torch.zeros(3), root_rank=0)


class Counted(torch.nn.Linear):
    """A module with a state that is neither a parameter nor a buffer."""

    def __init__(self, state):
        super().__init__(2, 2)
        self.extra = state

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@ranks(2)
def test_broadcast_parameters_refuses_what_it_would_leave_as_it_is(size):
    hvd.init()
    model = make_model(hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for params, said in (
        ({"model": model.state_dict()}, r"params\['model'\] is a \w*[dD]ict, expected a tensor"),
        (optimizer.state_dict(), r"'param_groups'\] is a list.*hvd.broadcast_optimizer_state"),
        ({"weight": torch.zeros(1), "epoch": 3}, r"'epoch'\] is a int.*hvd.broadcast_object"),
        ([("lr", 0.1)], r"'lr'\] is a float"),
    ):
        with pytest.raises(ValueError, match=f"rank {hvd.rank()}: .*{said}"):
            hvd.broadcast_parameters(params, root_rank=0)
    value = torch.full((2,), float(hvd.rank()))
    hvd.broadcast_parameters({"value": value, "nothing": None}, root_rank=1)
    assert value.tolist() == [1.0, 1.0]


@ranks(2)
def test_broadcast_parameters_refuses_extra_state_and_says_what_to_do():
    hvd.init()
    for state in (hvd.rank() + 1, torch.tensor(hvd.rank() + 1)):
        model = torch.nn.Sequential(Counted(state))
        for params in (model, model.state_dict()):
            with pytest.raises(ValueError, match=r"'0._extra_state'.*model.load_state_dict\("):
                hvd.broadcast_parameters(params, root_rank=0)
        model.load_state_dict(hvd.broadcast_object(model.state_dict(), 0))
        assert int(model[0].extra) == 1
    hvd.broadcast_parameters(torch.nn.Sequential(Counted(None)), root_rank=0)


@ranks(2)
def test_broadcast_parameters_of_different_models(size):
    hvd.init()
    model = torch.nn.Linear(4 + (hvd.rank() == 1), 3)
    with pytest.raises(hvd.HorovodInternalError, match=r"'weight', \(3, 4\).*ranks? 0"):
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


# Their states are one tensor for each weight, several, numbers, and tensors of all weights.
OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "Adam": {"amsgrad": True},
    "ASGD": {},
    "LBFGS": {"max_iter": 3},
}


@ranks(2)
def test_broadcast_optimizer_state_of_optimizers_of_all_kinds():
    """Rank 0 has trained, the others have not: they go on as rank 0 does."""
    hvd.init()
    for name, options in OPTIMIZERS.items():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1, **options)
        x = torch.randn(8, 4)

        def closure(model=model, optimizer=optimizer, x=x):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss

        if hvd.rank() == 0:
            optimizer.param_groups[0]["lr"] = 0.05
            optimizer.step(closure)
            optimizer.step(closure)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        before = weights(model)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert weights(model) == before, f"{name}: a weight has moved"
        assert optimizer.param_groups[0]["lr"] == 0.05, name
        optimizer.step(closure)
        assert same_everywhere(weights(model)), name
        assert weights(model) != before, name


@ranks(2)
def test_broadcast_optimizer_state_of_different_optimizers():
    hvd.init()
    model = torch.nn.Linear(3 + hvd.rank(), 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(hvd.MismatchError, match="parameter group 0 is "):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)


class Around(torch.optim.Optimizer):
    """An optimizer around another one, whose groups and state it shares."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, inner.defaults)
        self.inner = inner
        self.param_groups, self.state = inner.param_groups, inner.state

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self, closure=None):
        self.inner.step(closure)


def after_two_steps(kind, dtype=torch.float32):
    """Return a parameter and an optimizer of it."""
    parameter = torch.nn.Parameter(torch.ones(3, dtype=dtype))
    optimizer = hvd.DistributedOptimizer(kind([parameter]))
    for _ in range(2):
        optimizer.zero_grad()
        (parameter * (hvd.rank() + 1.0)).sum().backward()
        optimizer.step()
    return parameter, optimizer


def by_broadcast(optimizer):
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def by_load_state_dict(optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("load", [by_broadcast, by_load_state_dict])
@pytest.mark.parametrize("is_around", [False, True])
@ranks(2)
def test_loaded_optimizers_keep_their_dicts(load, is_around):
    hvd.init()
    check_that_dicts_are_kept(load, is_around)


def check_that_dicts_are_kept(load, is_around):

    def make(parameters):
        inner = torch.optim.Adam(parameters, lr=0.1)
        return Around(inner) if is_around else inner

    parameter, optimizer = after_two_steps(make)
    group, state = optimizer.param_groups[0], optimizer.state[parameter]
    moment = state["exp_avg"]
    if load is by_broadcast and hvd.rank() > 0:
        moment.zero_()
        group["lr"] = 99.0
    load(optimizer)
    assert optimizer.param_groups[0] is group
    assert (group["lr"], len(group["params"]), group["params"][0] is parameter) == (0.1, 1, True)
    assert optimizer.state[parameter] is state
    if is_around:
        assert optimizer.inner.param_groups[0] is group
    if load is not by_load_state_dict:
        assert state["exp_avg"] is moment
    # 0.1 * g, then 0.9 times that and 0.1 * g again, of the average gradient g.
    torch.testing.assert_close(state["exp_avg"], torch.full((3,), 0.19 * (hvd.size() + 1) / 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@ranks(2)
def test_the_state_of_an_optimizer_keeps_its_dtype(dtype):
    hvd.init()
    check_that_dtypes_are_kept(by_broadcast, dtype)


def check_that_dtypes_are_kept(load, dtype, clears=True):
    # torch's NAdam keeps mu_product in float32, whatever the weights are.
    parameter, optimizer = after_two_steps(torch.optim.NAdam, dtype)
    product = optimizer.state[parameter]["mu_product"].item()
    if hvd.rank() > 0 and clears:
        optimizer.state.clear()  # as of one that begins
    load(optimizer)
    state = optimizer.state[parameter]
    assert state["mu_product"].dtype == torch.float32
    assert state["mu_product"].item() == product
    assert state["exp_avg"].dtype == dtype


@ranks(2)
@pytest.mark.parametrize("name", ["state.pt", "state.npz", "state.safetensors"])
def test_a_thread_writes_a_checkpoint_and_a_damaged_one_is_replaced(tmp_path, name):
    hvd.init()
    saved = hvd.checkpoint(tmp_path / name, keep=2)
    weight = torch.zeros(500)
    for _ in range(2):
        weight += 1
        saved.save({"w": weight}, blocking=False)
    weight += 1
    assert torch.equal(saved.load()["w"], torch.full((500,), 2.0))
    if hvd.rank() == 0:
        content = bytearray(saved.path.read_bytes())
        content[len(content) // 2] ^= 1
        saved.path.write_bytes(content)
    assert torch.equal(saved.load()["w"], torch.full((500,), 1.0))


@ranks(2)
def test_a_tensor_that_no_checkpoint_holds_is_an_error_on_all_ranks(tmp_path):
    hvd.init()
    saved = hvd.checkpoint(tmp_path / "state")
    bad = torch.eye(2).to_sparse() if hvd.rank() == 0 else torch.eye(2)
    with pytest.raises(TypeError, match=r"state\['model'\]\[1\]: .*torch.sparse_coo.*to_dense"):
        saved.save({"model": [torch.zeros(1), bad]})
    endless = []
    endless.append(endless)
    with pytest.raises(hvd.CheckpointError, match="contains itself"):
        saved.save(endless)
    assert saved.load(default=None) is None
    saved.save({"model": torch.ones(2), "torch.Tensor": 5, "also": {"torch.Tensor": 5}})
    state = saved.load()
    assert torch.equal(state["model"], torch.ones(2))
    assert state["also"] == {"torch.Tensor": 5}


def trained():
    """A model of several dtypes and its optimizer, after a step."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3).bfloat16(), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model[1](model[0](torch.ones(2, 4).bfloat16()).float()).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": (3, 0.5)}


def assert_same_state(found, expected):
    torch.testing.assert_close(found["model"], dict(expected["model"]), rtol=0, atol=0)
    for number, moments in expected["optimizer"]["state"].items():
        torch.testing.assert_close(found["optimizer"]["state"][number], moments, rtol=0, atol=0)
    assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    assert found["epoch"] == expected["epoch"]


@ranks(2)
def test_checkpoints_that_torch_load_reads_and_torch_save_writes(tmp_path):
    hvd.init()
    state = trained()
    for name in ("model.ckpt", "model.pt", "model.pth"):
        hvd.checkpoint(tmp_path / name).save(state if hvd.rank() == 0 else None)
        if name != "model.ckpt":
            assert_same_state(torch.load(tmp_path / name), state)
        assert_same_state(hvd.checkpoint(tmp_path / name).load(), state)
    assert sorted(os.listdir(tmp_path)) == ["model.ckpt", "model.pt", "model.pth"]
    hvd.barrier()
    # The script for one process, whatever it called its file.
    for name in ("model.pt", "before.ckpt"):
        if hvd.rank() == 0:
            torch.save(state, tmp_path / name)
        assert_same_state(hvd.checkpoint(tmp_path / name).load(), state)


@ranks(2)
def test_checkpoints_that_safetensors_reads_and_writes(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    hvd.init()
    state = trained()
    saved = hvd.checkpoint(tmp_path / "model.safetensors")
    saved.save(state if hvd.rank() == 0 else None)
    assert_same_state(saved.load(), state)
    found = safetensors.load_file(saved.path)
    for name, tensor in state["model"].items():
        torch.testing.assert_close(found[f"model.{name}"], tensor, rtol=0, atol=0)
    hvd.barrier()
    if hvd.rank() == 0:
        safetensors.save_file(dict(state["model"]), saved.path)
    torch.testing.assert_close(saved.load(), dict(state["model"]), rtol=0, atol=0)


@ranks(2)
def test_a_file_of_torch_that_is_damaged_is_an_error_on_all_ranks(tmp_path):
    hvd.init()
    saved = hvd.checkpoint(tmp_path / "model.pt")
    saved.save({"w": torch.arange(1000.0)})
    content = saved.path.read_bytes()
    flipped = bytearray(content)
    flipped[content.index(torch.arange(1000.0).numpy().tobytes()) + 500] ^= 1
    hvd.barrier()
    for damaged in (flipped, content[:-9], content[:2000], content[:3], b""):
        if hvd.rank() == 0:
            saved.path.write_bytes(damaged)
        with pytest.raises(hvd.CheckpointError, match=r"model\.pt is (damaged|not a ch|empty)"):
            saved.load()


@ranks(2)
@pytest.mark.parametrize("blocking", [True, False])
def test_a_file_of_torch_without_room_is_an_error_on_all_ranks(tmp_path, blocking):
    hvd.init()
    saved = hvd.checkpoint(tmp_path / "a.pt")
    saved.save({"w": torch.zeros(3)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    words = r"a\.pt cannot be written.*: File too large: the file needs 4\.0 MB"

    def save():
        saved.save({"w": torch.ones(10**6)}, blocking)
        saved.exists()  # raises what a thread could not do

    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
        with pytest.raises(hvd.CheckpointError, match=words):
            save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert saved.load()["w"].tolist() == [0, 0, 0]


@ranks(2)
def test_what_files_of_torch_cannot_hold_is_an_error_on_all_ranks(tmp_path):
    hvd.init()
    saved = hvd.checkpoint(tmp_path / "model.pt")
    saved.save("previous")
    point = collections.namedtuple("point", "x")(1)
    for bad in (np.ones(2), np.float32(1), {3}, point, collections.Counter("a"), object()):
        with pytest.raises(TypeError, match=r"state\['a'\]\[0\]: found .* file for torch\.load"):
            saved.save({"a": [bad]})
    assert saved.load() == "previous"
    # torch.load reads some of them, or all if the file is trusted; on every rank.
    for other in ({3}, np.ones(2)):
        if hvd.rank() == 0:
            torch.save({"a": [other]}, saved.path)
        with pytest.raises(hvd.CheckpointError, match=r"holds other types.*weights_only=False"):
            saved.load()


@ranks(2)
def test_only_rank_0_converts_what_is_saved(tmp_path):
    hvd.init()
    saved = hvd.checkpoint(tmp_path / "state")
    # A tensor without data cannot be converted, so this shows who tries.
    saved.save(torch.zeros(2) if hvd.rank() == 0 else torch.zeros(2, device="meta"))
    assert torch.equal(saved.load(), torch.zeros(2))


@ranks(2)
def test_a_look_at_the_first_batch_on_one_rank_leaves_the_epochs_alone(size):
    hvd.init()
    for num_workers in (0, 1):
        sampler = hvd.ShardSampler(24 * size, batch_size=4)
        loader = torch.utils.data.DataLoader(
            range(24 * size), batch_sampler=sampler, num_workers=num_workers
        )
        if hvd.rank() == size - 1:
            next(iter(loader))
        for epoch in range(2):
            mine = [batch.tolist() for batch in loader]
            assert mine == [indices.tolist() for indices in sampler.sharding.indices(epoch)]
            everyone = hvd.allgather(torch.tensor(mine).flatten())
            assert sorted(everyone.tolist()) == list(range(24 * size))


@ranks(2)
def test_evaluation_with_fewer_samples_than_ranks(size):
    hvd.init()
    with pytest.raises(ValueError, match="allow_empty=True"):
        hvd.ShardSampler(1, batch_size=4)
    sampler = hvd.ShardSampler(1, batch_size=4, shuffle=False, allow_empty=True)
    loader = torch.utils.data.DataLoader([5], batch_sampler=sampler)
    for _ in range(2):
        assert len(loader) == (hvd.rank() == 0)
        found = [batch.tolist() for batch in loader]
        assert found == ([[5]] if hvd.rank() == 0 else [])
    assert sampler.sharding == hvd.Sharding(1, 4, shuffle=False, allow_empty=True)


@ranks(3)
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_sampler_goes_on_in_the_middle_of_an_epoch(size, num_workers):
    """Each rank count goes on where 4 ranks stopped, in the same epoch and in the next one."""
    hvd.init()
    samples, stop = 50, 2
    before = [hvd.Sharding(samples, 4, rank, 4, seed=3) for rank in range(4)]
    taken = [index for each in before for batch in each.indices(1)[:stop] for index in batch]
    sampler = hvd.ShardSampler(samples, batch_size=3, seed=3)
    loader = torch.utils.data.DataLoader(
        range(samples), batch_sampler=sampler, num_workers=num_workers
    )
    sampler.load_state_dict(before[0].position(1, stop))
    for seen in (taken, []):
        mine = []
        steps = len(loader)
        for step, batch in enumerate(loader, start=1):
            mine.append(batch.tolist())
            state = sampler.state_dict(step)
            assert hvd.allgather_object(state) == [state] * size
        assert len(mine) == steps == step
        everyone = hvd.allgather_object(mine)
        flat = [index for batches in everyone for batch in batches for index in batch]
        assert sorted([*flat, *seen]) == list(range(samples))
    assert (state["epoch"], state["done"]) == (2, 50)  # in its loop, after the last batch
