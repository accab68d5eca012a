import functools

import numpy as np
import pytest

from tests.harness import ranks

pytest.importorskip("tensorflow")

import keras
import tensorflow as tf

import hvdlite.tensorflow as hvd
from hvdlite.errors import NotFiniteError
from tests.tensorflow.modes import close, each_mode, equal, in_mode, reduced

SAMPLES = 24  # divisible by 1, 2 and 3 ranks


def make_variables(seed=0):
    draw = np.random.default_rng(seed).normal
    return {
        "first": tf.Variable(draw(size=(6, 8)), dtype=tf.float32, name="first"),
        "rest": [
            tf.Variable(draw(size=(8, 3)), dtype=tf.float32, name="second"),
            tf.Variable(draw(size=3), dtype=tf.float32, name="bias"),
        ],
    }


def batch(seed=0):
    draw = np.random.default_rng(seed).normal
    return draw(size=(SAMPLES, 6)).astype(np.float32), draw(size=(SAMPLES, 3)).astype(np.float32)


def own(data):
    share = SAMPLES // hvd.size()
    return data[hvd.rank() * share : (hvd.rank() + 1) * share]


def loss_of(variables, x, y):
    second, bias = variables["rest"]
    return tf.reduce_mean((tf.tanh(x @ variables["first"]) @ second + bias - y) ** 2)


def expected_gradients(variables, x, y):
    with tf.GradientTape() as tape:
        loss = loss_of(variables, x, y)
    return [gradient.numpy() for gradient in tape.gradient(loss, tf.nest.flatten(variables))]


def alike(gradients, expected, tolerance=1e-6):
    flat = tf.nest.flatten(gradients)
    return all(close(g, e, tolerance) for g, e in zip(flat, expected, strict=True))


@ranks(2)
@each_mode
def test_small_and_large_gradients_side_by_side(mode):
    """Small neighbours travel as one tensor; empty, large and missing gradients lie between."""
    hvd.init()
    shapes = [(3,), (), (0, 2), (5,), (300, 100), (2, 2), (7,), (20000,), (4,), (3, 1)]
    without = {6}
    variables = [tf.Variable(tf.zeros(shape)) for shape in shapes]
    factors = [tf.constant(np.random.default_rng(n).normal(size=s)) for n, s in enumerate(shapes)]

    def loss(value):
        return sum(
            value * tf.reduce_sum(variable * tf.cast(factor, tf.float32))
            for n, (variable, factor) in enumerate(zip(variables, factors, strict=True))
            if n not in without
        )

    step = in_mode(mode, lambda value: reduced(lambda: loss(value), variables))
    mean = (hvd.size() + 1) / 2
    for _ in range(2):
        found = step(tf.constant(hvd.rank() + 1.0))
        for n, (each, factor) in enumerate(zip(found, factors, strict=True)):
            assert each is None if n in without else close(each, mean * factor.numpy())


@ranks(2, 3)
@each_mode
def test_gradients_are_those_of_the_union_of_the_batches(mode):
    hvd.init()
    variables, (x, y) = make_variables(), batch()

    def around(x, y):
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_of(variables, x, y)
        assert isinstance(tape, tf.GradientTape)
        return tape.gradient(loss, variables)

    def after(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(variables, x, y)
        tape = hvd.DistributedGradientTape(tape)
        return tape.gradient(loss, sources=variables)

    for function in (around, after):
        gradients = in_mode(mode, function)(own(x), own(y))
        assert set(gradients) == {"first", "rest"}
        assert len(gradients["rest"]) == 2
        assert alike(gradients, expected_gradients(variables, x, y))


@ranks(2)
@each_mode
def test_sum_predivide_and_compression(size, mode):
    hvd.init()
    variables, (x, y) = make_variables(), batch()
    average = expected_gradients(variables, x, y)

    def function(x, y, **options):
        return reduced(lambda: loss_of(variables, x, y), variables, **options)

    for options, factor, tolerance in (
        ({"op": hvd.Sum}, size, 1e-6),
        ({"gradient_predivide_factor": 4.0}, 1, 1e-6),
        ({"num_groups": 2}, 1, 1e-6),
        ({"compression": hvd.Compression.fp16}, 1, 2e-3),
        ({"compression": hvd.Compression.bf16}, 1, 2e-2),
    ):
        gradients = in_mode(mode, functools.partial(function, **options))(own(x), own(y))
        expected = [factor * gradient for gradient in average]
        assert alike(gradients, expected, tolerance), options
        if "compression" in options:
            assert not alike(gradients, expected, 1e-6)


@ranks(2)
@each_mode
def test_any_structure_of_sources(mode):
    hvd.init()
    w, v = tf.Variable([1.0, 2.0], name="w"), tf.Variable(3.0, name="v")
    rank = float(hvd.rank())

    def gradient(structure):
        return reduced(lambda: tf.reduce_sum(w * rank) + v * rank, structure)

    of_w, of_v = [0.5, 0.5], 0.5
    for structure in (w, [w], (v, w), {"b": [w, {"a": v}], "a": (w,)}, [w, v, w]):
        found = in_mode(mode, lambda s=structure: gradient(s))()
        tf.nest.assert_same_structure(found, structure)
        for source, result in zip(tf.nest.flatten(structure), tf.nest.flatten(found), strict=True):
            assert equal(result, of_w if source is w else of_v)


@ranks(2)
@each_mode
def test_watched_tensors_and_output_gradients(mode):
    hvd.init()
    rank = float(hvd.rank())

    def gradient():
        x = tf.constant([1.0, 2.0])
        with hvd.DistributedGradientTape(tf.GradientTape(watch_accessed_variables=False)) as tape:
            tape.watch(x)
            with tape.stop_recording():
                factor = 2.0 * x
            y = x * factor * rank
        assert tape.watched_variables() == ()
        return tape.gradient(y, x, output_gradients=tf.constant([1.0, 10.0]))

    assert equal(in_mode(mode, gradient)(), [1.0, 20.0])


@ranks(2)
@each_mode
def test_persistent_tape_and_second_derivatives(mode):
    hvd.init()
    x = tf.Variable(2.0, name="x")
    scale = 1.0 + hvd.rank()  # the mean is 1.5

    def persistent():
        with hvd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
            square, cube = scale * x**2, scale * x**3
        return tape.gradient(square, x), tape.gradient(cube, x), tape.jacobian(cube, x)

    def second():
        with hvd.DistributedGradientTape(tf.GradientTape()) as outer:
            with hvd.DistributedGradientTape(tf.GradientTape()) as inner:
                cube = scale * x**3
            slope = inner.gradient(cube, x)
        return slope, outer.gradient(slope, x)

    of_square, of_cube, jacobian = in_mode(mode, persistent)()
    assert (of_square.numpy(), of_cube.numpy()) == (1.5 * 4, 1.5 * 12)
    assert jacobian.numpy() == scale * 12
    slope, curvature = in_mode(mode, second)()
    assert (slope.numpy(), curvature.numpy()) == (1.5 * 12, 1.5 * 12)


@ranks(2)
def test_gradient_that_only_some_ranks_have_counts_as_zeros(size):
    hvd.init()
    variables = [tf.Variable([1.0, 2.0], name=name) for name in ("everywhere", "first", "nowhere")]
    everywhere, first, nowhere = variables
    for step in range(3):
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(everywhere)
            if hvd.rank() == step % size:
                loss += tf.reduce_sum(first) * 6.0
        gradients = tape.gradient(loss, variables)
        assert equal(gradients[0], [1.0, 1.0])
        assert equal(gradients[1], [6.0 / size] * 2)
        assert gradients[2] is None
    assert reduced(lambda: tf.constant(1.0), [nowhere, first]) == [None, None]


@ranks(2)
def test_graph_refuses_a_gradient_that_only_some_ranks_have(size):
    hvd.init()
    everywhere, first = (tf.Variable([1.0, 2.0], name=name) for name in ("everywhere", "first"))

    def gradient(**options):
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(everywhere)
            if hvd.rank() == 0:
                loss += tf.reduce_sum(first) * 6.0
        return tape.gradient(loss, [everywhere, first], **options)

    said = "(?s)gradient of 'first' is None on rank 1 but not on rank 0.*UnconnectedGradients.ZERO"
    with pytest.raises(tf.errors.FailedPreconditionError, match=said):
        tf.function(gradient)()
    zeros = tf.UnconnectedGradients.ZERO
    gradients = tf.function(lambda: gradient(unconnected_gradients=zeros))()
    assert equal(gradients[0], [1.0, 1.0])
    assert equal(gradients[1], [6.0 / size] * 2)

    @tf.function
    def unused_everywhere():
        return reduced(lambda: tf.reduce_sum(everywhere), [everywhere, first])

    of_everywhere, of_first = unused_everywhere()
    assert equal(of_everywhere, [1.0, 1.0])
    assert of_first is None


@ranks(2)
@each_mode
def test_gradients_of_one_step_are_not_those_of_the_next(mode):
    """TensorFlow continues to use the memory of arrays that it is given."""
    hvd.init()
    for shapes in ([(64, 64)], [(), (1,), (16,), (64, 64), (300, 999)]):
        variables = [tf.Variable(tf.zeros(shape), name=f"{mode} {len(shapes)}") for shape in shapes]
        kept = [tf.Variable(tf.zeros(shape)) for shape in shapes]

        def step(factor, variables=variables, kept=kept):
            found = reduced(
                lambda: tf.add_n([factor * tf.reduce_sum(each) for each in variables]), variables
            )
            for variable, gradient in zip(kept, found, strict=True):
                variable.assign(gradient)
            return found

        step = in_mode(mode, step)
        steps = [step(tf.constant(float(number))) for number in range(4)]
        values = [variable.numpy() for variable in kept]
        step(tf.constant(9.0))
        for number, found in enumerate(steps):
            for gradient in found:
                assert equal(gradient, np.full(gradient.shape, float(number)))
        assert all((value == 3.0).all() for value in values)


@ranks(2)
@each_mode
def test_two_models_in_one_program(mode):
    hvd.init()
    models = [make_variables(seed) for seed in (1, 2)]
    models[1]["rest"].pop(0)
    models[1]["rest"].insert(0, tf.Variable(np.ones((8, 3)), dtype=tf.float32, name="other"))

    def function(number, x, y):
        return reduced(lambda: loss_of(models[number], x, y), models[number])

    functions = [in_mode(mode, lambda x, y, n=number: function(n, x, y)) for number in (0, 1)]
    for step in range(3):
        x, y = batch(step)
        for number in (0, 1):
            gradients = functions[number](own(x), own(y))
            assert alike(gradients, expected_gradients(models[number], x, y))


@ranks(2)
def test_one_rank_may_trace_again(size):
    hvd.init()
    variables, (x, y) = make_variables(), batch()
    traces = []

    @tf.function
    def gradients(x, y):
        traces.append(x.shape)
        return reduced(lambda: loss_of(variables, x, y), variables, op=hvd.Sum)

    gradients(own(x), own(y))
    stop = 3 if hvd.rank() == 0 else None
    found = gradients(own(x)[:stop], own(y)[:stop])
    assert len(traces) == (2 if hvd.rank() == 0 else 1)
    share = SAMPLES // size
    expected = [
        sum(parts)
        for parts in zip(
            *(
                expected_gradients(variables, x[start:stop], y[start:stop])
                for start in range(0, SAMPLES, share)
                for stop in [3 if start == 0 else start + share]
            ),
            strict=True,
        )
    ]
    assert alike(found, expected)


@ranks(2)
def test_training_loop_inside_a_graph():
    hvd.init()
    w, factor = tf.Variable([4.0, 8.0]), 0.25 if hvd.rank() else 0.75

    @tf.function
    def train(steps):
        for _ in tf.range(steps):
            w.assign_sub(0.5 * reduced(lambda: factor * tf.reduce_sum(w**2), w))

    train(tf.constant(3))  # the mean loss is w^2 / 2, so each step halves w
    assert equal(w, [0.5, 1.0])


@ranks(2)
@each_mode
def test_many_small_buckets_and_a_new_world(mode, monkeypatch):
    hvd.init()
    variables, (x, y) = make_variables(), batch()

    def function(x, y):
        return reduced(lambda: loss_of(variables, x, y), variables)

    expected = expected_gradients(variables, x, y)
    before = in_mode(mode, function)
    assert alike(before(own(x), own(y)), expected)
    hvd.shutdown()
    hvd.init()
    assert alike(before(own(x), own(y)), expected)  # traced in a world that is gone
    hvd.shutdown()
    monkeypatch.setenv("HVDLITE_FUSION_THRESHOLD", "64")
    monkeypatch.setenv("HVDLITE_FIRST_BUCKET_SIZE", "0")
    hvd.init()
    try:
        for _ in range(2):
            assert alike(in_mode(mode, function)(own(x), own(y)), expected)
        if mode == "function":
            with pytest.raises(hvd.HorovodInternalError, match="function again after init"):
                before(own(x), own(y))
    finally:
        hvd.shutdown()
        monkeypatch.undo()
        hvd.init()


@ranks(3)
@each_mode
@pytest.mark.parametrize("sparse_as_dense", [False, True])
def test_sparse_gradients(size, mode, sparse_as_dense):
    hvd.init()
    table = tf.Variable(tf.ones((7, 2)), name="table")
    bias = tf.Variable(tf.zeros(2), name="bias")
    rows = tf.constant([hvd.rank(), hvd.rank() + 1, 6])

    def function():
        return reduced(
            lambda: 6.0 * tf.reduce_sum(tf.gather(table, rows) + bias),
            [table, bias],
            sparse_as_dense=sparse_as_dense,
        )

    expected = np.zeros((7, 2))
    for rank in range(size):
        for row in (rank, rank + 1, 6):
            expected[row] += 6.0 / size
    for _ in range(2):
        of_table, of_bias = in_mode(mode, function)()
        assert isinstance(of_table, tf.Tensor if sparse_as_dense else tf.IndexedSlices)
        assert of_table.shape == (7, 2)
        assert close(tf.convert_to_tensor(of_table), expected)
        assert equal(of_bias, [18.0, 18.0])


@ranks(2)
@each_mode
def test_slices_that_only_some_ranks_have(size, mode):
    hvd.init()
    table, bias = (tf.Variable(tf.ones((4, 2)), name=name) for name in ("table", "bias"))
    kind = tf.errors.FailedPreconditionError

    def gradient(sources, options, unconnected="zero"):
        with hvd.DistributedGradientTape(tf.GradientTape(), **options) as tape:
            loss = tf.reduce_sum(bias)
            if hvd.rank() == 0:
                loss += tf.reduce_sum(tf.gather(table, [1]))
        return tape.gradient(loss, sources, unconnected_gradients=unconnected)

    said = (
        r"(?s)the gradient of 'table' \(dense everywhere with sparse_as_dense=True\) is "
        "IndexedSlices on rank 0, dense or None on rank"
    )
    for sources in ([bias, table], [table]):
        for unconnected in ("zero", "none"):
            with pytest.raises(kind, match=said):
                in_mode(mode, lambda s=sources, u=unconnected: gradient(s, {}, u))()
    dense = {"sparse_as_dense": True}
    of_bias, of_table = in_mode(mode, lambda: gradient([bias, table], dense))()
    assert equal(of_bias, np.ones((4, 2)))
    assert close(of_table, np.eye(4, 2, -1)[:, [0, 0]] * [[0], [1 / size], [0], [0]])


@ranks(2)
@each_mode
@pytest.mark.parametrize("scale", [True, False])
def test_local_sources_are_not_exchanged(size, mode, scale):
    hvd.init()
    shared, local, table = (
        tf.Variable([[1.0], [2.0]], name=name) for name in ("shared", "local", "table")
    )
    factor = 1.0 + hvd.rank()

    def function():
        with tf.GradientTape() as tape:
            rows = tf.gather(table, [1])
            loss = factor * (tf.reduce_sum(shared + local) + tf.reduce_sum(rows))
        tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
        tape.register_local_source(local)
        tape.register_local_source(table)
        return tape.gradient(loss, [local, shared, table])

    of_local, of_shared, of_table = in_mode(mode, function)()
    own_gradient = factor / size if scale else factor
    assert equal(of_local, [[own_gradient]] * 2)
    assert equal(of_shared, [[1.5]] * 2)
    assert equal(tf.convert_to_tensor(of_table), [[0.0], [own_gradient]])


@ranks(2)
@each_mode
@pytest.mark.parametrize("scale", [True, False])
def test_partial_tape_leaves_local_layers_to_their_rank(size, mode, scale):
    hvd.init()
    first, local = keras.layers.Dense(2, name="first"), keras.layers.Dense(1, name="local")
    module = tf.Module()
    module.weight = tf.Variable(1.0, name="of a module")
    factor = 1.0 + hvd.rank()
    x = tf.ones((1, 2))
    made = []

    def function():
        options = {"local_layers": [local, module], "scale_local_gradients": scale}
        with hvd.PartialDistributedGradientTape(tf.GradientTape(), **options) as tape:
            y = local(first(x))  # made after the tape, in the first call
            loss = factor * (tf.reduce_sum(first.bias) + tf.reduce_sum(local.bias) + module.weight)
            loss += 0.0 * tf.reduce_sum(y)
        made[:] = [first.bias, local.bias, module.weight]
        shared, own, of_module = made
        return tape.gradient(loss, {"shared": shared, "own": (own, [of_module])})

    gradients = in_mode(mode, function)()
    alone = factor / size if scale else factor
    assert close(gradients["shared"], [(size + 1) / 2] * 2)
    assert close(gradients["own"][0], [alone])
    assert close(gradients["own"][1][0], alone)


@ranks(2)
def test_partial_tape_of_one_layer_or_none(size):
    hvd.init()
    layer = keras.layers.Dense(1, kernel_initializer="ones")
    layer.build((None, 1))
    factor = 1.0 + hvd.rank()
    for layers, expected in (({layer}, factor / 2), (layer, factor / 2), (None, 1.5), ([], 1.5)):
        with tf.GradientTape() as tape:
            loss = factor * tf.reduce_sum(layer.kernel)
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=layers)
        assert isinstance(tape, hvd.DistributedGradientTape)
        assert close(tape.gradient(loss, layer.kernel), [[expected]])
    with pytest.raises(TypeError, match=r"expected a layer or a tf\.Module, found 3"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[3])


@ranks(1)
def test_wrong_use_is_refused():
    hvd.init()
    tape = hvd.DistributedGradientTape(tf.GradientTape())
    with pytest.raises(ValueError, match="wrap it once"):
        hvd.DistributedGradientTape(tape)
    for wrong, kind, said in (
        ({"gradtape": 3}, TypeError, "expected a tf.GradientTape, found int"),
        ({"compression": 16}, TypeError, "is no compression"),
        ({"op": hvd.Max}, ValueError, "not Max"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, ValueError, "needs op=hvd.Average"),
        ({"num_groups": -1}, ValueError, "num_groups=-1 is not an integer of 0 or more"),
        ({"groups": "all"}, ValueError, "is neither a number"),
    ):
        with pytest.raises(kind, match=said):
            hvd.DistributedGradientTape(**{"gradtape": tf.GradientTape(), **wrong})
    w = tf.Variable(1.0)

    @tf.function(jit_compile=True)
    def compiled():
        return reduced(lambda: w * w, w)

    with pytest.raises(ValueError, match="without jit_compile=True"):
        compiled()

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def of_unknown_shape(x):
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            tape.watch(x)
            loss = x * x
        return tape.gradient(loss, x)

    with pytest.raises(ValueError, match=r"static shape \(None,\) inside tf.function"):
        of_unknown_shape(tf.ones(2))


@ranks(2)
def test_user_class_of_tape_keeps_its_own():
    hvd.init()

    class Named(tf.GradientTape):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def greet(self):
            return f"I am {self.name}"

    x = tf.Variable(3.0)
    with Named("tape") as inner:
        y = x * x * (1.0 + hvd.rank())
    tape = hvd.DistributedGradientTape(inner)
    assert tape.greet() == "I am tape"
    assert tape.gradient(y, x).numpy() == 9.0
    with pytest.raises(RuntimeError, match="persistent"):
        inner.gradient(y, x)


@ranks(2)
@each_mode
def test_a_rank_outside_of_the_process_set_keeps_its_gradients(mode):
    check_a_rank_outside_of_the_process_set(mode)


def check_a_rank_outside_of_the_process_set(mode, **options):
    hvd.init()
    last = hvd.add_process_set([1])
    variable = tf.Variable([1.0])
    try:

        def gradient():
            tape = hvd.DistributedGradientTape(tf.GradientTape(), process_set=last, **options)
            with tape:
                loss = tf.reduce_sum(variable) * (1.0 + hvd.rank())
            tape.register_local_source(variable)
            found = tape.gradient(loss, variable)
            tape.end_step()
            if options:
                tape.average_weights()
            return found

        assert equal(in_mode(mode, gradient)(), [1.0 + hvd.rank()])
    finally:
        hvd.remove_process_set(last)


@ranks(2)
@each_mode
@pytest.mark.parametrize("elements", [4, 2**19])  # from 1 MiB on without a copy of a part
def test_averages_that_are_not_finite_are_an_error_that_can_be_caught(mode, elements):
    """A tape cannot leave out the optimizer's step."""
    rehearsal = pytest.importorskip("hvdlite.tools.rehearsal")
    hvd.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVDLITE_NOT_FINITE", "skip")
        hvd.init()
    culprit = hvd.size() - 1
    variables = [
        tf.Variable(tf.ones(size), name=name) for size, name in ((elements, "w"), (2, "b"))
    ]

    def train():
        gradients = reduced(lambda: sum(map(tf.reduce_sum, variables)), variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(gradient)

    step = in_mode(mode, train)
    try:
        step()
        faults = f"corrupt:rank={culprit},name=w,value=inf"
        rehearsal.plant({rehearsal.VARIABLE: faults}, hvd.rank(), hvd.size())
        with pytest.raises(NotFiniteError, match=rf"'w' on rank {culprit} \(1 of .*\[0\]: inf"):
            step()
        step()
        for variable in variables:
            assert equal(variable, np.full(variable.shape, -1))
    finally:
        rehearsal.plant({}, hvd.rank(), hvd.size())
        hvd.shutdown()
