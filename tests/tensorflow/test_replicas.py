"""Test the comparison of variables that comes with the second exchange of a tape's gradients."""

import pytest

from tests.harness import ranks
from tests.logs import logged

pytest.importorskip("tensorflow")

import numpy as np
import tensorflow as tf

import hvdlite.tensorflow as hvd
from hvdlite.gradients.replicas import DEVICE_STRIDE
from hvdlite.tensorflow import variables as module
from tests.tensorflow.modes import each_mode, in_mode, reduced


def make_variables(seed):
    draw = np.random.default_rng(seed).normal
    return [
        tf.Variable(draw(size=(4, 3)), dtype=tf.float32, name="kernel"),
        tf.Variable(draw(size=3), dtype=tf.float32, name="bias"),
    ]


def make_step(mode, variables, **options):
    """Return a step that returns the loss; with ``local`` the bias is a local source."""
    kernel, bias = variables
    local = options.pop("local", False)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ kernel + bias) ** 2)
        tape = hvd.DistributedGradientTape(tape, **options)
        if local:
            tape.register_local_source(bias)
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        tape.end_step()
        return loss

    return in_mode(mode, step)


def batch(number):
    return np.random.default_rng(10 * number + hvd.rank()).normal(size=(5, 4)).astype(np.float32)


def for_some_steps(step):
    """Make as many steps as it takes to compare all slices, of small variables, too."""
    for number in range(4, 8):
        step(number)


def values(variables):
    return [variable.numpy().tolist() for variable in variables]


@ranks(2)
@each_mode
def test_variables_that_were_never_broadcast(mode):
    hvd.init()
    variables = make_variables(hvd.rank())
    step = make_step(mode, variables)
    step(batch(0))
    before = values(variables)
    with pytest.raises(hvd.MismatchError) as caught:
        step(batch(1))
    assert values(variables) == before
    message = str(caught.value)
    assert "'kernel' is " in message
    assert all(f"on rank {rank}" in message for rank in range(hvd.size()))
    assert "2 of 2 weights differ" in message
    assert "hvd.broadcast_variables(" in message
    hvd.broadcast_variables(variables, root_rank=0)
    for number in range(2, 4):
        step(batch(number))
    assert hvd.allgather_object(values(variables)) == [values(variables)] * hvd.size()


@ranks(2)
@each_mode
def test_variables_on_an_accelerator(mode):
    """Its rows are copied to the host; here the host stands for it."""
    hvd.init()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_is_on_gpu", lambda variable: True)
        variables = make_variables(hvd.rank())
        step = make_step(mode, variables)
        step(batch(0))
        with pytest.raises(hvd.MismatchError, match="2 of 2 weights differ"):
            step(batch(1))
        hvd.broadcast_variables(variables, root_rank=0)

        def go_on():
            for number in range(3 * DEVICE_STRIDE):
                step(batch(number))

        go_on()
        if hvd.rank() == 1:
            variables[0][2, 1].assign(variables[0][2, 1] + 1.0)
        with pytest.raises(hvd.MismatchError, match=r"element \[2, 1\] of the weight 'kernel'"):
            go_on()


@ranks(2)
@each_mode
def test_a_broadcast_after_the_first_step_is_early_enough(mode):
    hvd.init()
    for seed in (0, 5):  # two models, of the same names and shapes
        variables = make_variables(seed + hvd.rank())
        step = make_step(mode, variables)
        for number in range(3):
            step(batch(number))
            if number == 0:
                hvd.broadcast_variables(variables, root_rank=0)
        assert hvd.allgather_object(values(variables)) == [values(variables)] * 2


@ranks(2)
@each_mode
def test_variables_that_part_in_mid_training(mode):
    hvd.init()
    variables = make_variables(0)
    step = make_step(mode, variables)
    for number in range(4):
        step(batch(number))
    if hvd.rank() == 1:
        variables[1][2].assign(variables[1][2] + 1.0)
    with pytest.raises(hvd.MismatchError) as caught:
        for_some_steps(lambda number: step(batch(number)))
    message = str(caught.value)
    assert "element [2] of the weight 'bias' is " in message
    assert "(equal in step " in message


@ranks(2)
def test_steps_that_one_graph_makes_are_compared_in_their_order():
    hvd.init()
    weights = [tf.Variable(tf.ones(size), name=f"weight{size}") for size in (3, 100000)]
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.1))
    optimizer.build(weights)

    @tf.function
    def several(x):
        for _ in range(3):
            optimizer.apply_gradients([(x * weight, weight) for weight in weights])

    for _ in range(4):
        several(tf.constant(1.0 + hvd.rank()))
    assert int(optimizer.iterations) == 12
    assert len({each.tobytes() for each in hvd.allgather_object(weights[1].numpy())}) == 1


@ranks(2)
@each_mode
def test_what_may_differ(mode):
    hvd.init()
    variables = make_variables(0)
    variables[1].assign(variables[1] + hvd.rank())
    local = make_step(mode, variables, local=True)
    for number in range(4):
        local(batch(number))


@ranks(2)
@each_mode
def test_slices_alone(mode):
    hvd.init()
    table = tf.Variable(tf.fill((4, 2), 1.0 + hvd.rank()), name="table")

    def step():
        table.scatter_sub(reduced(lambda: tf.reduce_sum(tf.gather(table, [0, 2])), table))

    step = in_mode(mode, step)
    step()
    with pytest.raises(hvd.MismatchError, match="'table' is "):
        step()


@ranks(2)
def test_optimizers_of_tensorflow_1():
    hvd.init()
    weight = tf.Variable([1.0, 2.0])
    plain = tf.compat.v1.train.MomentumOptimizer(0.1 * (1 + hvd.rank()), 0.9)
    optimizer = hvd.DistributedOptimizer(plain)
    optimizer.minimize(lambda: tf.reduce_sum(weight), var_list=[weight])
    with pytest.raises(hvd.MismatchError, match=r"learning_rate is 0.1 on rank 0, 0.2 on rank 1"):
        optimizer.minimize(lambda: tf.reduce_sum(weight), var_list=[weight])


@ranks(2)
def test_optimizers_of_tensorflow_1_whose_state_parts():
    hvd.init()
    weight = tf.Variable([1.0, 2.0], name="weight")
    optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.MomentumOptimizer(0.1, 0.9))
    for _ in range(3):
        optimizer.minimize(lambda: tf.reduce_sum(weight), var_list=[weight])
    if hvd.rank() == 1:
        optimizer.get_slot(weight, "momentum").assign([9.0, 9.0])
    with pytest.raises(hvd.MismatchError, match="the optimizer's momentum of 'weight' is "):
        for_some_steps(
            lambda _: optimizer.minimize(lambda: tf.reduce_sum(weight), var_list=[weight])
        )


@ranks(2)
def test_updates_in_a_graph_wait_until_variables_were_compared():
    """This includes updates that use no gradient, like weight decay."""
    hvd.init()
    variables = make_variables(0)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ variables[0] + variables[1]) ** 2)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.1 * variable)
            variable.assign_sub(0.1 * gradient)

    operations = step.get_concrete_function(batch(0)).graph.get_operations()
    decays = [each for each in operations if each.type == "AssignSubVariableOp"]
    exchanges = [each for each in operations if each.type == "PyFunc"]
    assert len(decays) == 4
    assert exchanges
    for operation in decays:
        assert set(exchanges) <= _before(operation)
    for number in range(4):
        step(batch(number))


@ranks(2)
def test_a_graph_with_a_step_for_each_part_compares_after_the_updates_of_the_part_before():
    hvd.init()
    weights = [tf.Variable(tf.ones(3), name=f"weight{number}") for number in range(2)]
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1, momentum=0.9))
    optimizer.build(weights)

    @tf.function
    def step(x):
        for weight in weights:
            optimizer.apply_gradients([(x * weight, weight)])

    operations = step.get_concrete_function(tf.constant(1.0)).graph.get_operations()
    assigned = [each for each in operations if each.type == "AssignVariableOp"]
    first, _ = (each for each in assigned if each.get_attr("dtype") == tf.int64)  # counts of steps
    assert first in _before([each for each in operations if each.type == "PyFunc"][-1])
    for number in range(4):
        step(tf.constant(1.0 + number))


def _before(operation):
    """Return all operations that a graph runs before one."""
    found, waiting = set(), [operation]
    while waiting:
        each = waiting.pop()
        for earlier in (*each.control_inputs, *(tensor.op for tensor in each.inputs)):
            if earlier not in found:
                found.add(earlier)
                waiting.append(earlier)
    return found


@ranks(2)
@each_mode
def test_ranks_that_train_on_the_same_data_are_told_so(mode):
    hvd.init()
    step = make_step(mode, make_variables(0))
    with logged() as messages:
        for number in range(6):
            step(np.full((5, 4), number + 1, np.float32))
    assert len(messages) == (hvd.rank() == 0)
    assert all("ranks 0, 1 computed the same gradients" in each for each in messages)


@ranks(2)
def test_ranks_whose_datasets_are_shuffled_differently_are_told_so():
    hvd.init()
    inputs = np.random.default_rng(3).normal(size=(60, 4)).astype(np.float32)
    own = tf.data.Dataset.from_tensor_slices(inputs).shuffle(60, seed=hvd.rank() + 1)
    batches = iter(own.apply(hvd.sharded(5)))
    step = make_step("eager", make_variables(0))
    with logged() as messages:
        for _ in range(6):
            step(next(batches).numpy())
    assert len(messages) == (hvd.rank() == 0)
    assert all("rank 0 and rank 1 divide the data differently" in each for each in messages)


@ranks(2)
def test_a_tape_that_was_not_wrapped():
    hvd.init()
    warned = []
    cases = [(False, False, False), (True, False, False), (False, True, True)]
    for wraps, by_hand, in_graph in cases:
        variables = make_variables(seed=0)

        @tf.function
        def step(x, is_first, variables=variables, wraps=wraps, by_hand=by_hand):
            kernel, bias = variables
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ kernel + bias) ** 2)
            if wraps:
                tape = hvd.DistributedGradientTape(tape)
            for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                variable.assign_sub(0.01 * (hvd.allreduce(gradient) if by_hand else gradient))
            if is_first:
                hvd.broadcast_variables(variables, root_rank=0)

        if not in_graph:
            hvd.broadcast_variables(variables, root_rank=0)
        with logged() as messages:
            for number in range(60):
                step(batch(number), in_graph and number == 0)
        alone = [each for each in messages if each.startswith("each rank trains by itself")]
        assert all("hvd.DistributedGradientTape(tape)" in each for each in alone)
        warned.append(len(alone))
    assert warned == ([1, 0, 0] if hvd.rank() == 0 else [0, 0, 0])
