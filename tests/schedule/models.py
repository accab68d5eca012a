"""A small model, and what its ranks' weights become: simulated in float64 from the papers."""

from __future__ import annotations

import numpy as np

from hvdlite.schedule.local_steps import Moment

# By hand for two parts: 40, then 30 and 20, then 10; 1 to the first of equals, 0 to the smaller.
SHAPES = {"a": (5, 8), "b": (30,), "c": (4, 5), "d": (10,), "e": (), "f": (0, 3)}
PARTS = [("a", "d", "e"), ("b", "c", "f")]
RATE, MOMENTUM = 0.1, 0.9


def start():
    draw = np.random.default_rng(7).standard_normal
    return {name: np.asarray(draw(shape)) for name, shape in SHAPES.items()}


def gradient(name, weight, rank, step):
    """It depends on the weight, so that a wrong one has consequences."""
    noise = np.random.default_rng([rank, step, ord(name)]).standard_normal(SHAPES[name])
    return 0.3 * weight + noise


class Replica:
    """One rank's weights, and SGD with momentum on them."""

    def __init__(self, dtype=np.float64):
        self.weights = {name: weight.astype(dtype) for name, weight in start().items()}
        self.velocity = {name: np.zeros(shape, dtype) for name, shape in SHAPES.items()}

    def step(self, rank, step, names=SHAPES):
        for name in names:
            self.apply(name, gradient(name, self.weights[name].astype(np.float64), rank, step))

    def apply(self, name, own):
        weight, velocity = self.weights[name], self.velocity[name]
        velocity[...] = MOMENTUM * velocity + own.astype(weight.dtype)
        weight[...] = weight - RATE * velocity


class ArrayWeights:
    """Weights as `LocalSteps` takes them."""

    def __init__(self, replica, names=tuple(SHAPES)):
        self.replica, self.names = replica, names

    def read(self, number):
        return self.replica.weights[self.names[number]]

    def write(self, number, array):
        self.replica.weights[self.names[number]][...] = array

    def moments(self, number):
        velocity = self.replica.velocity[self.names[number]]
        return [Moment("velocity", velocity, lambda array: np.copyto(velocity, array))]


def mean(replicas, kind, name):
    return sum(getattr(replica, kind)[name] for replica in replicas) / len(replicas)


def average(replicas, names=SHAPES, kinds=("weights",)):
    for kind in kinds:
        for name in names:
            value = mean(replicas, kind, name)
            for replica in replicas:
                getattr(replica, kind)[name][...] = value


def step_all(replicas, step):
    for rank, replica in enumerate(replicas):
        replica.step(rank, step)


def averaged(size, steps, after):
    """Local steps, and an average after some of them, which are counted from 1."""
    replicas = [Replica() for _ in range(size)]
    for step in range(steps):
        step_all(replicas, step)
        if step + 1 in after:
            average(replicas)
    return replicas


def local_sgd(size, steps, every, first=0):
    """Lin et al. 2018: gradients are averaged in the first steps, then weights now and then."""
    replicas = [Replica() for _ in range(size)]
    for step in range(steps):
        if step < first:
            for name in SHAPES:
                own = [gradient(name, r.weights[name], n, step) for n, r in enumerate(replicas)]
                for replica in replicas:
                    replica.apply(name, sum(own) / size)
            continue
        step_all(replicas, step)
        if (step - first) % every == every - 1:
            average(replicas)
    return replicas


def partial(size, steps, momentum=False):
    """SINGA: after every step one part is averaged, in turns."""
    replicas = [Replica() for _ in range(size)]
    for step in range(steps):
        step_all(replicas, step)
        kinds = ("weights", "velocity") if momentum else ("weights",)
        average(replicas, PARTS[step % 2], kinds)
    return replicas


def diloco(size, steps, every, rate, momentum):
    """Douillard et al. 2023, algorithm 1, with Nesterov momentum as Sutskever et al. 2013.

    v' = m v - a g(x + m v), written for y = x + m v, at which the gradient is taken.
    """
    replicas = [Replica() for _ in range(size)]
    shared = start()
    speed = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(steps):
        step_all(replicas, step)
        if step % every == every - 1:
            for name in SHAPES:
                outer = sum(shared[name] - each.weights[name] for each in replicas) / size
                previous = speed[name]
                speed[name] = momentum * previous - rate * outer
                shared[name] = shared[name] + speed[name] + momentum * (speed[name] - previous)
                for replica in replicas:
                    replica.weights[name][...] = shared[name]
    return replicas
