"""Random training programs, against one process that computes the gradients of all ranks.

All ranks draw the same program from a seed: its parameters and which of them each rank uses, what
changes between steps, how gradients are reset, and by which of all ways a step is made.
"""

import copy
import random
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

from tests.harness import ranks

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd
from tests.torch.test_memory import lend_all, let_nothing_be_small

SHAPES = [(3,), (1,), (0,), (), (7, 5), (40, 30), (300, 300), (2, 3, 4), (257,), (16,)]
DTYPES = [[torch.float64]] * 2 + [[torch.float64, torch.float32, torch.bfloat16]]
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}
MODES = [lambda _: None, let_nothing_be_small, lend_all]
SETTINGS = {
    "HVDLITE_OVERLAP": ["0", "1"],
    "HVDLITE_FUSION_THRESHOLD": ["64", "4096", "67108864"],
    "HVDLITE_FIRST_BUCKET_SIZE": ["0", "1000000"],
}


class CallsParent(torch.optim.SGD):
    """torch's hooks surround its step, and the one that this calls."""

    def step(self, closure=None):
        return super().step(closure)


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.05, "fused": True}),
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    (torch.optim.Adam, {"lr": 0.01, "foreach": False}),
    (CallsParent, {"lr": 0.05, "weight_decay": 0.1}),
]


class Program:
    """Everything that does not change from step to step."""

    def __init__(self, seed):
        self.seed, draw = seed, random.Random(seed)
        self.draw, everybody = draw, list(range(hvd.size()))
        some = sorted(draw.sample(everybody, draw.randint(1, len(everybody))))
        self.members = some if draw.random() < 0.2 else everybody
        self.shapes = [draw.choice(SHAPES) for _ in range(draw.randint(1, 10))]
        self.dtypes = draw.choices(draw.choice(DTYPES), k=len(self.shapes))
        self.numbers = range(len(self.shapes))
        self.tables = {n for n in self.numbers if len(self.shapes[n]) == 2 and draw.random() < 0.5}
        self.sparse = {n for n in self.tables if draw.random() < 0.4}
        self.frozen = {n for n in self.numbers if draw.random() < 0.2}
        self.hooked = draw.choice([*({*self.numbers} - self.sparse), None, None])
        self.is_hooked_first, self.hook_step = draw.random() < 0.5, draw.choice([0, 1, 5])
        self.later = {n for n in self.numbers[1:] if draw.random() < 0.15}
        now = [n for n in self.numbers if n not in self.later]
        self.parts = [now[::2], now[1::2]] if len(now) > 1 and draw.random() < 0.3 else [now]
        self.kind, self.options = draw.choice(OPTIMIZERS)
        if self.sparse:
            self.kind, self.options = torch.optim.SGD, {"lr": 0.05}
        self.op = draw.choice([hvd.Average, hvd.Average, hvd.Sum])
        self.passes = draw.choice([1, 1, 1, 2, 3])
        self.is_weighted = self.op is hvd.Average and draw.random() < 0.3
        self.is_scaled = len(self.parts) == 1 and not self.sparse and draw.random() < 0.3
        self.calm_steps = draw.choice([0, 7])  # until gradients come without hooks in Python
        self.is_looked_at = draw.random() < 0.3 and not self.is_scaled

    def wrapping(self, process_set):
        """Return a function that wraps optimizers."""
        options = {
            "op": self.op,
            "process_set": process_set,
            "num_groups": self.draw.choice([0, 2]),
        }
        options["sparse_as_dense"], is_named, is_grouped = (
            self.draw.random() < 0.5 for _ in range(3)
        )
        if self.op is hvd.Average:
            options["gradient_predivide_factor"] = self.draw.choice([1.0, 1.0, 4.0])

        def wrap(made, parameters):
            names = [(f"p{n}", each) for n, each in enumerate(parameters)] if is_named else None
            groups = [each["params"] for each in made.param_groups] if is_grouped else None
            return hvd.DistributedOptimizer(
                made, names, backward_passes_per_step=self.passes, groups=groups, **options
            )

        return wrap


class Side:
    """The parameters and optimizers of this rank, or of the one process."""

    def __init__(self, program, wrap):
        self.program, self.wrap, self.is_armed = program, wrap, False
        draw = torch.Generator().manual_seed(program.seed)
        self.parameters = [
            torch.nn.Parameter(torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype))
            for shape, dtype in zip(program.shapes, program.dtypes, strict=True)
        ]
        for number in program.frozen:
            self.parameters[number].requires_grad_(False)
        is_first = program.is_hooked_first and self._add_hook()
        plain = [self._make([self.parameters[n] for n in part]) for part in program.parts]
        # Made before, schedules bypass what is wrapped: they replace step.
        self.schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.9) for each in plain]
        self.optimizers = [wrap(each, self.parameters) for each in plain]
        is_first or self._add_hook()

    def _add_hook(self):
        """Let a hook of the user's change a gradient in place, from some step on."""

        def double(parameter):
            if self.is_armed:
                parameter.grad.mul_(2)

        if self.program.hooked is not None:
            parameter = self.parameters[self.program.hooked]
            is_trained = parameter.requires_grad
            parameter.requires_grad_(True).register_post_accumulate_grad_hook(double)
            parameter.requires_grad_(is_trained)
        return True

    def _make(self, parameters):
        groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.02}]
        return self.program.kind(groups[: len(parameters)], **self.program.options)

    def reset(self, way):
        for each in self.parameters if way == "by hand" else ():
            each.grad = None
        for each in self.optimizers if way in ("none", "zeros") else ():
            each.zero_grad(set_to_none=way == "none")

    def freeze(self, number, is_frozen):
        self.parameters[number].requires_grad_(not is_frozen).grad = None

    def trained(self, optimizer):
        return [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]

    def backward(self, step, rank, factor=1):
        for pass_number in range(step.passes[rank]):
            terms = [self._term(step, n, [rank, n, pass_number]) for n in step.used[rank]]
            for part in filter(None, (terms[: step.cut], terms[step.cut :])):
                (sum(part) * factor).backward()

    def _term(self, step, number, seed):
        """Return a part of a loss; it reads rows of a table, and all of another parameter."""
        parameter, program = self.parameters[number], self.program
        draw = np.random.default_rng([program.seed, step.number, *seed])
        if number in program.tables:
            rows = torch.from_numpy(draw.integers(0, len(parameter), draw.integers(1, 6)))
            is_sparse = number in program.sparse and not step.is_dense
            found = torch.nn.functional.embedding(rows, parameter, sparse=is_sparse)
            return found.square().sum().double()
        factors = torch.as_tensor(draw.standard_normal(parameter.shape)).to(parameter.dtype)
        return (parameter * factors + parameter.square()).sum().double()


class Step:
    """The draws of a step: who uses what, and by which way it is made."""

    def __init__(self, program, number):
        self.number, draw, size = number, program.draw, hvd.size()
        is_calm, count = number < program.calm_steps, len(program.shapes)
        chance = 1.0 if is_calm else draw.choice([1.0, 0.8, 0.3, 0.0])
        order = draw.sample(
            program.numbers, count if is_calm or draw.random() < 0.7 else count // 2
        )
        order = sorted(order) if is_calm else order
        ready = [n for n in order if n not in program.frozen]
        self.used = [[n for n in ready if draw.random() < chance] for _ in range(size)]
        self.cut = 0 if is_calm else draw.choice([0, 0, count // 2])
        least = program.passes if draw.random() < 0.8 else 1
        self.passes = [draw.randint(least, program.passes) for _ in range(size)]
        self.samples = [draw.randint(n == program.members[0], 5) for n in range(size)]
        self.is_dense = draw.random() < 0.2  # what is sparse otherwise
        self.overflows = program.is_scaled and draw.random() < 0.3
        ways = ["step", "synchronize", "skip"]
        if not program.sparse:
            ways += ["clip by norm", "clip after"]
            ways += ["clip by the largest"] * ((0,) not in program.shapes)
        if program.passes == len(program.parts) == 1 and not program.is_scaled:
            ways += ["closure"] * 3
        self.way = draw.choice(ways)
        keeps = not (program.sparse or program.is_scaled)
        self.reset = draw.choice(["none", "none", "by hand"] + ["zeros", "kept"] * keeps)


class Training:
    def __init__(self, seed):
        self.program = program = Program(seed)
        self.is_for_all = len(program.members) == hvd.size()
        self.is_inside = hvd.rank() in program.members
        self.mates = program.members if self.is_inside else [hvd.rank()]
        where = hvd.global_process_set if self.is_for_all else hvd.add_process_set(program.members)
        self.own = Side(program, program.wrapping(where))
        self.alone = Side(program, lambda optimizer, _: optimizer)
        self.pairs = list(zip(self.own.optimizers, self.alone.optimizers, strict=True))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.overflows, self.views, self.has_clipped = 0, [], False

    def run(self, number):
        """Make a step on this rank and in the one process, and compare them."""
        self._change(number)
        step = Step(self.program, number)
        for side in (self.own, self.alone):
            side.is_armed = number >= self.program.hook_step
            side.reset(step.reset)
        if step.reset in ("zeros", "kept"):
            self.views.clear()
        self._begin_anew()
        spoils = step.overflows and hvd.rank() == self.program.members[-1]
        factor = self.scaler.scale(torch.tensor(np.inf if spoils else 1.0))
        if step.way != "closure":
            self.own.backward(step, hvd.rank(), factor if self.program.is_scaled else 1)
        self._begin_anew()
        trained = {p for optimizer in self.own.optimizers for p in self.own.trained(optimizer)}
        numbered = enumerate(self.own.parameters)
        plain = [p for n, p in numbered if n not in self.program.sparse and p in trained]
        dense = [p for p in plain if p.grad is not None]
        views = [(p, p.grad.view(-1)) for p in dense if self.program.is_looked_at]
        self._average(step)
        self._finish(step)
        for parameter, view in views:
            assert torch.equal(view, parameter.grad.view(-1)), "another tensor"
            self.views.append((view, view.clone()))
        assert all(torch.equal(view, value) for view, value in self.views), "changed later"
        self._check(step)

    def _change(self, number):
        program, draw = self.program, self.program.draw
        if number < program.calm_steps:
            return
        for each in sorted(program.frozen | {draw.choice(program.numbers)}):
            if draw.random() < 0.25:
                program.frozen ^= {each}
                for side in (self.own, self.alone):
                    side.freeze(each, each in program.frozen)
        for each in [n for n in program.later if draw.random() < 0.3]:
            program.later.remove(each)
            for side in (self.own, self.alone):
                side.parameters[each].grad = None
                side.optimizers[0].add_param_group({"params": [side.parameters[each]]})
        program.passes = draw.choice([1, 2]) if draw.random() < 0.1 else program.passes
        for optimizer in self.own.optimizers:
            optimizer.set_backward_passes_per_step(program.passes)
            if draw.random() < 0.1:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def _begin_anew(self):
        if self.program.draw.random() < 0.04 and self.is_for_all:
            hvd.barrier()  # one that is still in its backward pass could send nothing afterwards
            hvd.shutdown()
            hvd.init()

    def _average(self, step):
        """Give the one process the average, or the sum, of all ranks' gradients."""
        side, program = self.alone, self.program
        is_weighted = program.is_weighted and self.is_inside
        counts = {rank: step.samples[rank] if is_weighted else 1 for rank in self.mates}
        divisor = 1 if program.op is hvd.Sum else sum(counts.values())
        trained = {p for optimizer in side.optimizers for p in side.trained(optimizer)}
        before = [each.grad for each in side.parameters]
        self.totals = [None] * len(before)
        for rank, count in counts.items():
            for parameter, gradient in zip(side.parameters, before, strict=True):
                parameter.grad = None if gradient is None else gradient.clone()
            side.backward(step, rank)
            for number, parameter in enumerate(side.parameters):
                if parameter.grad is not None and parameter in trained:
                    part = parameter.grad.to_dense().double() * count / divisor
                    total = self.totals[number]
                    self.totals[number] = part if total is None else total + part
        for parameter, total in zip(side.parameters, self.totals, strict=True):
            parameter.grad = None if total is None else total.to(parameter.dtype)
        culprit = self.program.members[-1]
        spoilt = [n for n in step.used[culprit] if side.parameters[n] in trained]
        step.overflows = step.overflows and bool(
            counts.get(culprit) and any(side.parameters[n].numel() for n in spoilt)
        )

    def _finish(self, step):
        for optimizer, plain in self.pairs:
            weights = {"batch_size": step.samples[hvd.rank()]} if self.program.is_weighted else {}
            trained = self.alone.trained(plain)
            has_gradients = any(each.grad is not None for each in trained)
            is_scaled = self.program.is_scaled and has_gradients  # else torch refuses
            if step.way == "closure":
                self._check_closure(step, optimizer, weights)
            elif step.way != "step" and (weights or not step.way.startswith("clip by")):
                optimizer.synchronize(**weights)
                weights = {}
            if is_scaled and step.way != "step":
                self.scaler.unscale_(optimizer)
            if step.way.startswith("clip"):
                self._clip(step, optimizer, trained)
            if step.way not in ("closure", "skip"):
                is_synchronized = step.way in ("synchronize", "clip after")
                with optimizer.skip_synchronize() if is_synchronized else nullcontext():
                    scaled_step = partial(self.scaler.step, optimizer)
                    (scaled_step if is_scaled else optimizer.step)(**weights)
            if is_scaled:
                self.scaler.update()
                self.overflows += step.overflows
            if step.way != "skip" and not step.overflows:
                plain.step()
                for side in (self.own, self.alone):
                    side.schedules[self.pairs.index((optimizer, plain))].step()

    def _clip(self, step, optimizer, trained):
        self.has_clipped = True
        arguments = 0.5, np.inf if step.way == "clip by the largest" else 2.0
        norm = torch.nn.utils.clip_grad_norm_(trained, *arguments)
        used = [self.own.parameters[n] for n in step.used[hvd.rank()] if step.passes[hvd.rank()]]
        # Without a new gradient here, torch's function clips the last one, if it is there still.
        computes = any(each is one for each in used for one in self.own.trained(optimizer))
        is_averaged = self.program.is_weighted or self.program.is_scaled  # step() would warn
        if step.way == "clip after" or (step.number % 2 and computes and not is_averaged):
            found = torch.nn.utils.clip_grad_norm_(self.own.trained(optimizer), *arguments)
        else:
            found = optimizer.clip_grad_norm_(*arguments)
        limit = max(1e-2, *(LIMITS[dtype] for dtype in self.program.dtypes))
        assert step.overflows or found.item() == pytest.approx(norm.item(), rel=limit)

    def _check_closure(self, step, optimizer, weights):
        """Let a closure compute the gradients; its loss is averaged, or added up, as they are."""

        def closure():
            self.own.backward(step, hvd.rank())
            return torch.tensor(float(hvd.rank()))

        counts = {n: step.samples[n] if self.is_inside and weights else 1 for n in self.mates}
        divisor = sum(counts.values()) if self.program.op is hvd.Average else 1
        expected = sum(rank * count for rank, count in counts.items()) / divisor
        arguments, named = ([closure], {}) if step.number % 2 else ([], {"closure": closure})
        found = optimizer.step(*arguments, **named, **weights).item()
        assert found == pytest.approx(expected), "the loss"

    def _check(self, step):
        trained = {p for optimizer in self.alone.optimizers for p in self.alone.trained(optimizer)}
        for own, other in zip(self.own.parameters, self.alone.parameters, strict=True):
            # The norm by which all are clipped is as exact as the least exact ones.
            dtypes = self.program.dtypes if self.has_clipped else [own.dtype]
            limit = max(LIMITS[dtype] for dtype in dtypes)
            torch.testing.assert_close(own, other, rtol=limit, atol=limit)
            if other in trained and not step.overflows:
                assert (own.grad is None) == (other.grad is None)
                if own.grad is not None:
                    dense = own.grad.to_dense()
                    torch.testing.assert_close(dense, other.grad, rtol=limit, atol=limit)
            with torch.no_grad():  # the next step starts from the same
                other.copy_(own)

    def end(self):
        assert self.scaler.get_scale() == 1024.0 * 0.5**self.overflows
        weights = [each.detach().double().numpy().tobytes() for each in self.own.parameters]
        told = hvd.allgather_object((self.is_inside, weights))
        assert len({str(each) for is_inside, each in told if is_inside}) == 1


# Gradients without elements have strides of their own.
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout")
@ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    "number", [*range(4), *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 5))]
)
def test_training_is_that_of_one_process(monkeypatch, number, size):
    seed = 6 * (size - 1) + number
    for name, values in SETTINGS.items():
        monkeypatch.setenv(name, values[seed % len(values)])
    MODES[seed // 2 % 3](monkeypatch)
    hvd.shutdown()
    hvd.init()
    try:
        training = Training(seed)
        for number in range(14):
            try:
                training.run(number)
            except Exception as error:
                raise AssertionError(f"seed {seed}, step {number}: {error}") from error
        training.end()
    finally:
        hvd.shutdown()
