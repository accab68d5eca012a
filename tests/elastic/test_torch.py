from __future__ import annotations

import copy
import functools
import itertools
import logging
import pickle

import pytest

pytest.importorskip("torch")

import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdlite.torch as hvd
from hvdlite.gradients.bucket import GradientBucket
from hvdlite.recipe import Sharding
from hvdlite.torch import elastic
from hvdlite.torch.elastic import ElasticSampler, ObjectState, TorchState
from hvdlite.world import membership
from tests.harness import ranks
from tests.torch import test_state as loading


def make_model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 30), torch.nn.BatchNorm1d(30), torch.nn.ReLU(), torch.nn.Linear(30, 1)
    )


def copied(model):
    return copy.deepcopy(model.state_dict())


def same(mine, theirs):
    return all(torch.equal(mine[name], theirs[name]) for name in theirs)


def plain(value):
    """Return a state with lists in the place of tensors."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()


OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
}


class TestState:
    @ranks(2)
    def test_another_process_goes_on_from_a_dump(self):
        hvd.init()

        def make(seed):
            model = make_model(seed)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            compression = hvd.Compression.ErrorFeedback(hvd.Compression.TopK(0.1))
            optimizer = hvd.DistributedOptimizer(
                optimizer, model.named_parameters(), compression=compression
            )
            sampler = hvd.ShardSampler(23, batch_size=2)
            return TorchState(model, optimizer, sampler=sampler, epoch=seed)

        state = make(0)
        hvd.broadcast_parameters(state.model.state_dict(), 0)
        step(state.model, state.optimizer)
        batches = iter(state.sampler)
        next(batches)
        state.gather()
        dump = pickle.dumps(state.dump())
        other = make(1)
        other.load(pickle.loads(dump))
        assert other.epoch == 0
        assert same(other.model.state_dict(), state.model.state_dict())
        assert plain(other.optimizer.state_dict()) == plain(state.optimizer.state_dict())
        assert [*other.sampler] == [*batches]
        for parameter in other.model.parameters():
            parameter.data.zero_()
        other.restore()
        assert same(other.model.state_dict(), state.model.state_dict())

    @ranks(3)
    def test_a_spare_takes_on_the_global_batches_of_the_others(self, size):
        """As if one rank more had started, and died at the end of the first step."""
        hvd.init()
        sampler = hvd.ShardSampler(30, batch_size=2, shuffle=False)
        state = TorchState(sampler=sampler)
        if hvd.rank() != size - 1:  # else it is the spare
            before = Sharding(30, 2, hvd.rank(), size + 1, shuffle=False)
            sampler._batches.sharding = before
            next(iter(sampler))
        state.sync()
        together = 2 * (size + 1)
        everywhere = hvd.allgather_object([*sampler])
        steps = [[*itertools.chain(*parts)] for parts in zip(*everywhere, strict=True)]
        samples = [*range(30)]
        assert steps == [samples[at : at + together] for at in range(together, 30, together)]

    @ranks(1)
    @pytest.mark.parametrize("kind", list(OPTIMIZERS))
    @pytest.mark.parametrize("wrapped", [False, True])
    def test_everything_comes_back_and_twice(self, kind, wrapped):
        hvd.init()
        model = make_model(0)
        optimizer = OPTIMIZERS[kind](model.parameters())
        if wrapped:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        state = TorchState(model, optimizer, scheduler=scheduler, epoch=0, notes=["a"])
        assert (state.model, state.optimizer, state.scheduler) == (model, optimizer, scheduler)
        step(model, optimizer)
        scheduler.step()
        state.epoch = 1
        state.save()
        weights, options = copied(model), copy.deepcopy(optimizer.state_dict())
        for _ in range(2):
            for _ in range(3):
                step(model, optimizer)
                scheduler.step()
            state.epoch = 4
            state.notes.append("b")
            assert not same(model.state_dict(), weights)
            state.restore()
            assert same(model.state_dict(), weights)
            assert (state.epoch, state.notes, scheduler.last_epoch) == (1, ["a"], 1)
            found = optimizer.state_dict()
            assert found["param_groups"] == options["param_groups"]
            for number, entries in options["state"].items():
                assert same(found["state"][number], entries)
            assert all(parameter.grad is None for parameter in model.parameters())

    @ranks(2)
    def test_a_step_that_one_rank_has_given_up_is_forgotten(self):
        """It waits for no other rank, whose exchange may have failed."""
        hvd.init()
        model = make_model(0)
        optimizer = OPTIMIZERS["Adam"](model.parameters())
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        state = TorchState(model, optimizer)
        step(model, optimizer)
        state.save()
        if hvd.rank() == 0:
            sum(parameter.sum() for parameter in model.parameters()).backward()
        state.restore()
        assert all(parameter.grad is None for parameter in model.parameters())
        hvd.shutdown()
        hvd.init()
        state.on_reset()
        state.sync()
        step(model, optimizer)
        assert len({*hvd.allgather_object(repr(copied(model)))}) == 1

    @ranks(1)
    def test_an_optimizer_without_state_gets_none(self):
        hvd.init()
        model = make_model(0)
        optimizer = torch.optim.Adam(model.parameters())
        state = TorchState(model, optimizer)
        step(model, optimizer)
        state.restore()
        assert not optimizer.state

    @ranks(3)
    def test_sync_gives_everything_of_rank_0_and_keeps_it(self, size):
        hvd.init()
        rank = hvd.rank()
        model = make_model(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + rank, momentum=0.9)
        step(model, optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5 + rank)
        sampler = ElasticSampler(range(20))
        sampler.set_epoch(3)
        sampler.record_batch(0, 2)
        state = TorchState(model, optimizer, scheduler=scheduler, sampler=sampler, epoch=rank)
        state.sync()
        for _ in range(2):
            everybody = hvd.allgather_object(
                (model.state_dict(), optimizer.state_dict()["state"], sampler.state_dict())
            )
            for weights, momenta, samples in everybody:
                assert same(weights, everybody[0][0])
                assert same(momenta[0], everybody[0][1][0])
                assert samples["epoch"] == 3
                assert len(samples["processed_indices"]) == 2 * size
            assert optimizer.param_groups[0]["lr"] == 0.1
            assert (scheduler.step_size, state.epoch) == (5, 0)
            with torch.no_grad():
                model[0].weight.zero_()
            sampler.record_batch(1, 2)
            state.epoch = 8
            state.restore()

    @pytest.mark.slow
    @ranks(2)
    def test_a_rank_in_another_epoch_adds_nothing(self):
        hvd.init()
        sampler = ElasticSampler(range(20))
        sampler.set_epoch(hvd.rank())
        sampler.record_batch(0, 3)
        state = TorchState(sampler=sampler)
        mine = sampler.get_indices(0, 3)
        state.merge()
        assert sampler.epoch == 0
        assert sampler.processed_indices == set(hvd.allgather_object(mine)[0])

    @ranks(2)
    def test_a_module_with_a_state_of_its_own(self):
        hvd.init()

        class Counted(torch.nn.Linear):
            count = 0

            def get_extra_state(self):
                return self.count

            def set_extra_state(self, count):
                self.count = count

        torch.manual_seed(hvd.rank())
        model = Counted(2, 2)
        model.count = 5 + hvd.rank()
        TorchState(model).sync()
        assert model.count == 5
        assert hvd.allgather(model.weight.detach()[None]).unique(dim=0).shape[0] == 1

    @ranks(2)
    def test_handlers_of_ones_own_and_horovods(self, monkeypatch):
        hvd.init()
        rank = hvd.rank()

        class Counter:
            count = rank

        class CounterHandler(elastic.StateHandler):
            def save(self):
                self.saved = self.value.count

            def restore(self):
                self.value.count = self.saved

            def sync(self):
                self.value.count = hvd.broadcast_object(self.value.count, 0)

        registry = [(Counter, CounterHandler), *elastic.get_handler_registry()]
        monkeypatch.setattr(elastic, "_registry", elastic.get_handler_registry())
        elastic.set_handler_registry(registry)
        model = torch.nn.Linear(2, 2)
        counter, given = Counter(), Counter()
        state = TorchState(
            elastic.ModelStateHandler(model), counter=counter, given=CounterHandler(given), epoch=0
        )
        assert (state.model, state.counter, state.given) == (model, counter, given)
        state.sync()
        assert (counter.count, given.count) == (0, 0)
        counter.count = given.count = 7
        with torch.no_grad():
            model.weight.zero_()
        state.restore()
        assert (counter.count, given.count) == (0, 0)
        assert model.weight.abs().sum() > 0
        model.weight.sum().backward()
        handler = elastic.OptimizerStateHandler(torch.optim.SGD(model.parameters(), lr=0.5))
        handler.value.param_groups[0]["lr"] = 0.1 + rank
        handler.sync()
        assert handler.value.param_groups[0]["lr"] == 0.1
        handler.restore()
        assert handler.value.param_groups[0]["lr"] == 0.5
        assert model.weight.grad is None

    def test_it_is_where_horovod_has_it(self):
        assert hvd.elastic.TorchState is TorchState
        assert hvd.elastic.ObjectState is ObjectState
        assert {"State", "run", "ElasticSampler"} <= set(vars(hvd.elastic))


EPOCHS, SAMPLES, BATCH = 3, 48, 4


def train(action, when, passes=1):
    """Train, with something happening once in the middle; return all that is left of it."""
    logging.getLogger("hvdlite").handlers[:] = [logging.NullHandler()]
    torch.manual_seed(7)
    inputs = torch.randn(SAMPLES, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = make_model(hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), backward_passes_per_step=passes
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    sampler = ElasticSampler(data)
    loader = DataLoader(data, BATCH, sampler=sampler)
    happens = [action]
    begun = []

    def look(place):
        here = (state.epoch, state.batch) == (1, 2) and place == when
        if here and happens:
            happens.pop()()

    @hvd.elastic.run
    def run(state):
        begun.append((state.epoch, state.batch))
        while state.epoch < EPOCHS:
            for number, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                for _ in range(passes):
                    loss = torch.nn.functional.mse_loss(model(x), y)
                    loss.backward()
                    look("after backward")
                look("before step")
                optimizer.step()
                look("after step")
                state.sampler.record_batch(number, BATCH)
                state.batch += 1
                if state.batch % 2 == 0:
                    state.commit()
            scheduler.step()
            state.epoch, state.batch = state.epoch + 1, 0
            state.sampler.set_epoch(state.epoch)
            state.commit()

    state = TorchState(model, optimizer, scheduler=scheduler, sampler=sampler, epoch=0, batch=0)
    run(state)
    assert begun == ([(0, 0), (1, 2)] if action else [(0, 0)])
    momentum = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    return [*(p.detach() for p in model.parameters()), *momentum]


def fail():
    raise hvd.HorovodInternalError("made up")


def mismatch():
    hvd.allreduce(torch.ones(2 + hvd.rank()), name="shapes")


def break_gradients():
    """Have the next bucket of this rank raise between the meeting and the data."""
    original = GradientBucket.execute

    def execute(self, *args):
        GradientBucket.execute = original
        raise MemoryError("no room")

    GradientBucket.execute = execute


class TestTraining:
    @ranks(2)
    @pytest.mark.parametrize(
        ("action", "when"),
        [
            *((fail, when) for when in ("after backward", "before step", "after step")),
            (mismatch, "before step"),
            *((break_gradients, when) for when in ("after backward", "before step")),
        ],
    )
    def test_the_weights_are_those_of_an_undisturbed_run(self, action, when, size):
        hvd.init()
        everybody = action is mismatch or hvd.rank() == size - 1
        disturbed = train(action if everybody else lambda: None, when)
        for tensor in disturbed:
            assert hvd.allgather(tensor[None]).unique(dim=0).shape[0] == 1
        for mine, theirs in zip(disturbed, undisturbed(), strict=True):
            assert torch.equal(mine, theirs)

    @ranks(2)
    def test_in_the_middle_of_an_accumulation(self):
        hvd.init()
        action = fail if hvd.rank() == 0 else lambda: None
        for mine, theirs in zip(
            train(action, "after backward", passes=2), undisturbed(passes=2), strict=True
        ):
            assert torch.equal(mine, theirs)


@functools.cache
def undisturbed(passes=1):
    return train(None, "never", passes)


@ranks(2)
def test_news_of_hosts_interrupt_all_ranks_and_callbacks_follow_a_reset():
    hvd.init()
    state = TorchState(torch.nn.Linear(2, 1), epoch=0)
    assert isinstance(state, hvd.elastic.State)
    called = []
    state.register_reset_callbacks([lambda: called.append("reset")])
    state.check_host_updates()  # nothing new: it returns on all ranks
    if hvd.rank() == 1:
        state.on_hosts_updated(1.0, hvd.elastic.HostUpdate.ADDED)
    with pytest.raises(hvd.HostsUpdatedInterrupt):
        state.check_host_updates()
    state.on_reset()
    assert called == ["reset"]
    state.commit()


def by_sync(optimizer):
    hvd.elastic.TorchState(optimizer=optimizer).sync()


def by_restore(optimizer):
    state = hvd.elastic.TorchState(optimizer=optimizer)
    optimizer.param_groups[0]["lr"] = 99.0
    state.restore()


@ranks(2)
@pytest.mark.parametrize("load", [by_sync, by_restore])
def test_the_optimizer_of_a_state_keeps_its_dicts_and_dtypes(load):
    hvd.init()
    for is_around in (False, True):
        loading.check_that_dicts_are_kept(load, is_around)
    for dtype in (torch.bfloat16, torch.float64):
        loading.check_that_dtypes_are_kept(load, dtype, clears=load is by_sync)


@ranks(2)
def test_what_only_some_ranks_have_made_before_a_failure():
    """The next call of the function makes optimizers and data that find those of the others."""
    hvd.init()
    model, calls = torch.nn.Linear(3, 1), []

    @elastic.run
    def train(state):
        calls.append(hvd.rank())
        if calls == [1]:
            raise hvd.HorovodInternalError("made up")
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        hvd.shard(torch.arange(8), batch_size=1)
        if calls == [0]:
            hvd.allreduce(torch.ones(1))
        optimizer.zero_grad()
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        return dict(membership.counts)

    counts = hvd.allgather_object(train(TorchState(model)))
    assert counts[0] == counts[1]
