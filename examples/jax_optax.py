"""Train on handwritten digits with JAX, over an optimizer of optax that averages gradients.

    python jax_optax.py
    mpirun -np 2 python jax_optax.py --compression fp16 --data-dir mnist

hvdlite has no adapter for JAX: `distributed` and `broadcast` are all that a script needs, to be
copied. The numbered comments are the steps that make a script for one process one for N.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import console
import failures
import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import CLASSES, Samples
from jax.experimental import io_callback
from jax.flatten_util import ravel_pytree
from plan import Plan

import hvdlite as hvd


def distributed(
    inner: optax.GradientTransformation, compression: Any = hvd.Compression.none
) -> optax.GradientTransformation:
    """Return an optimizer that gets the average of all ranks' gradients, also inside `jax.jit`.

    All gradients travel in one array, so that a step has one exchange.

    Args:
        inner: the optimizer, with whatever else needs the averages, such as clipping.
        compression: as for `hvdlite.allreduce`; it must be stateless.
    """
    inner = optax.with_extra_args_support(inner)

    def exchange(gradients: jax.Array) -> np.ndarray:
        # A name, since the script may call hvdlite while JAX still computes the step.
        return hvd.allreduce(np.asarray(gradients), name="gradients", compression=compression)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        flat, unravel = ravel_pytree(gradients)
        result = jax.ShapeDtypeStruct(flat.shape, flat.dtype)
        averages = io_callback(exchange, result, flat, ordered=True)
        return inner.update(unravel(averages), state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def broadcast(tree: Any, root_rank: int = 0) -> Any:
    """Return the arrays of rank ``root_rank``; outside `jax.jit`."""

    def from_root(path: Any, leaf: Any) -> jax.Array:
        name = f"broadcast{jax.tree_util.keystr(path)}"
        return jnp.asarray(hvd.broadcast(np.asarray(leaf), root_rank, name=name))

    return jax.tree_util.tree_map_with_path(from_root, tree)


def main() -> None:
    """Train, evaluate and report."""
    options = console.parse_options(__doc__)

    # 1. Initialise. 2. Pin one GPU to this process, if there are any, before JAX looks for them.
    hvd.init()
    jax.config.update("jax_cuda_visible_devices", str(hvd.local_rank()))

    # 3. Shard the data: every image exactly once per epoch, over all ranks.
    data = failures.load_data(hvd, options.data_dir)
    batches = hvd.shard(data.train, options.batch_size, seed=options.seed)

    # The ranks begin with different weights on purpose: step 6 makes them equal.
    rng = np.random.default_rng(options.seed + hvd.rank())
    params = make_params(rng, [data.train.images[0].size, 128, 128, CLASSES])

    # 4. Scale the learning rate with the number of ranks, after a warm-up.
    plan = Plan(options, steps_per_epoch=len(batches))
    warmup_steps = round(plan.warmup_steps)
    rate = hvd.scale_lr(options.lr)
    schedules = (
        optax.linear_schedule(options.lr, rate, warmup_steps),
        optax.linear_schedule(rate, 0, plan.steps - warmup_steps),
    )

    # 5. Wrap the optimizer: it gets the average of all ranks' gradients.
    optimizer = distributed(
        optax.sgd(optax.join_schedules(schedules, [warmup_steps]), momentum=0.9),
        compression=getattr(hvd.Compression, options.compression),
    )
    state = optimizer.init(params)

    checkpoint = hvd.checkpoint(Path(options.checkpoint_dir or ".", "jax_optax.npz"))
    first_epoch = 0
    if options.checkpoint_dir and (saved := checkpoint.load(default=None)):
        first_epoch = saved["epoch"]
        structure = jax.tree.structure((params, state))
        params, state = jax.tree.unflatten(structure, map(jnp.asarray, saved["leaves"]))

    # 6. Broadcast the initial state: all ranks begin with that of rank 0.
    params, state = broadcast((params, state))

    @jax.jit
    def train_step(params: Any, state: Any, images: Any, labels: Any, weight: Any) -> Any:
        """Take one step, and return this rank's mean loss.

        The weight is 1, except where a remainder gives one rank an image more than another: it
        makes the average over the ranks the average over the images.
        """

        def weighted_loss(params: Any) -> tuple[jax.Array, jax.Array]:
            logits = apply(params, images)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return weight * losses.mean(), losses.mean()

        gradients, loss = jax.grad(weighted_loss, has_aux=True)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    train_loss = None
    with hvd.progress(plan.last_step, initial=first_epoch * len(batches)) as bar:
        for epoch, steps in plan.epochs(first_epoch):
            batches.set_epoch(epoch)
            loss_sum, count = 0.0, 0
            for _, (images, labels), weight in zip(
                steps, batches, batches.sharding.weights, strict=False
            ):
                params, state, loss = train_step(params, state, images, labels, weight)
                loss_sum += float(loss) * len(labels)
                count += len(labels)
                bar.update(len(labels))

            # 7. Checkpoint: rank 0 alone writes the file, and all call it.
            if options.checkpoint_dir and len(steps) == len(batches):
                leaves = [np.asarray(leaf) for leaf in jax.tree.leaves((params, state))]
                checkpoint.save({"epoch": epoch + 1, "leaves": leaves})

            # 8. Average the metrics over all ranks, weighted by their numbers of images.
            train_loss = hvd.average_metrics({"loss": loss_sum / count}, weight=count)["loss"]
            bar.set_postfix(epoch=epoch + 1, loss=train_loss)

    result = {
        "framework": "jax",
        "processes": hvd.size(),
        "train_loss": train_loss,
        "test_accuracy": evaluate(params, data.test),
    }
    console.report(hvd, options.json, result, jax.tree.leaves(params))


def make_params(rng: np.random.Generator, widths: list[int]) -> list[dict[str, jax.Array]]:
    """Return the weights of a perceptron with layers of these widths, the input's first."""
    return [
        {
            "kernel": jnp.float32(rng.normal(0, (2 / inputs) ** 0.5, (inputs, outputs))),
            "bias": jnp.zeros(outputs),
        }
        for inputs, outputs in itertools.pairwise(widths)
    ]


def apply(params: list[dict[str, jax.Array]], images: Any) -> jax.Array:
    """Return the logits of images."""
    values = images.reshape(len(images), -1)
    for layer in params[:-1]:
        values = jax.nn.relu(values @ layer["kernel"] + layer["bias"])
    return values @ params[-1]["kernel"] + params[-1]["bias"]


def evaluate(params: list[dict[str, jax.Array]], samples: Samples) -> float:
    """Return the accuracy on the test images, each counted once over all ranks."""
    predict = jax.jit(lambda params, images: apply(params, images).argmax(axis=1))
    correct = count = 0
    for images, labels in hvd.shard(samples, 256, shuffle=False):
        correct += int((np.asarray(predict(params, images)) == labels).sum())
        count += len(labels)
    total = hvd.sum_metrics({"correct": correct, "count": count})
    return total["correct"] / total["count"]


if __name__ == "__main__":
    try:
        main()
    except hvd.CheckpointError as error:
        failures.exit_all(hvd, str(error))
