"""Train a recommender whose embedding tables are spread over the ranks, with PyTorch.

    mpirun -np 2 python pytorch_embedding.py

A table of embeddings may be too large for one process. Here each rank has the rows whose numbers
leave its rank as the remainder, and an alltoall brings the rows that a batch needs: once with the
numbers, once back with the rows. Gradients flow back through it to where the rows are. The small
dense part of the model is on every rank, as usual, and its gradients are averaged.

The ratings are made up: of hidden properties of users and items, and noise.
"""

from __future__ import annotations

import console
import numpy as np
import torch
from plan import Plan
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hvdlite.torch as hvd

USERS, ITEMS, RATINGS, HIDDEN = 200, 100, 6000, 4


def main() -> None:
    """Train, evaluate and report."""
    options = console.parse_options(__doc__)

    # 1. Initialise: from here on, this process has a rank.
    hvd.init()

    # 2. Pin one accelerator to this process or, where there is none, its share of the cores.
    device = hvd.pin_device()

    # 3. Shard the data: every rating exactly once per epoch, over all ranks.
    train_set, test_set = make_ratings()
    sampler = hvd.ShardSampler(train_set, options.batch_size, seed=options.seed)
    batches = DataLoader(train_set, batch_sampler=sampler)

    torch.manual_seed(options.seed)
    model = Recommender().to(device)

    # 4. Scale the learning rate with the number of ranks, after a warm-up.
    plan = Plan(options, steps_per_epoch=len(sampler))
    warmup = hvd.warmup(options.lr, plan.warmup_steps)

    # 5. Wrap the optimizer of what all ranks have. That of the tables stays as it is: no other
    # rank has their rows.
    dense = hvd.DistributedOptimizer(
        torch.optim.Adam(model.top.parameters(), lr=options.lr),
        named_parameters=model.top.named_parameters(),
    )
    tables = torch.optim.Adam([model.users.rows, model.items.rows], lr=options.lr)

    # 6. Broadcast the initial state of what all ranks have.
    hvd.broadcast_parameters(model.top.state_dict(), root_rank=0)

    train_loss = None
    with hvd.progress(plan.last_step, unit="ratings") as bar:
        for epoch, steps in plan.epochs(0):
            sampler.set_epoch(epoch)
            loss_sum, count = 0.0, 0
            weights = sampler.sharding.weights
            for step, batch, weight in zip(steps, batches, weights, strict=False):
                for group in (*dense.param_groups, *tables.param_groups):
                    group["lr"] = warmup(step) * plan.decay(step)
                users, items, ratings = (part.to(device) for part in batch)
                loss_sum += train_step(model, dense, tables, users, items, ratings, weight)
                count += len(ratings)
                bar.update(len(ratings))

            # 8. Average the metrics over all ranks, weighted by their numbers of ratings.
            train_loss = hvd.average_metrics({"loss": loss_sum / count}, weight=count)["loss"]
            bar.set_postfix(epoch=epoch + 1, loss=train_loss)

    # 7. Checkpoint: the tables are gathered first, since every rank has other rows of them.
    state = {
        "top": model.top.state_dict(),
        "users": model.users.whole(),
        "items": model.items.whole(),
    }
    if options.checkpoint_dir:
        hvd.checkpoint(f"{options.checkpoint_dir}/pytorch_embedding.npz").save(state)

    together = [*state["top"].values(), state["users"], state["items"]]
    weights = [tensor.cpu() for tensor in together]
    result = {
        "framework": "pytorch",
        "processes": hvd.size(),
        "ratings_per_s": bar.samples_per_s or None,
        "train_loss": train_loss,
        "test_loss": evaluate(model, test_set, device),
        "rows_here": len(model.users.rows) + len(model.items.rows),
    }
    console.report(hvd, options.json, result, weights)


class SpreadEmbedding(nn.Module):
    """An embedding table of which each rank has the rows r, r + size, r + 2 size, ...

    Args:
        rows: of the whole table.
        width: of a row.
    """

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        # From one seed on all ranks, so that it is the same table for any number of them. A table
        # that is too large for this would get each row from a seed of its own.
        whole = torch.randn(rows, width) * 0.5
        self.rows = nn.Parameter(whole[hvd.rank() :: hvd.size()].clone())
        self._total = rows

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the rows of these numbers; all ranks call it, each with numbers of its own."""
        owners = numbers % hvd.size()
        order = torch.argsort(owners, stable=True)
        wanted = torch.bincount(owners, minlength=hvd.size())
        asked, asked_by = hvd.alltoall(numbers[order], wanted.cpu())
        found = self.rows[asked // hvd.size()]
        answers, _ = hvd.alltoall(found, asked_by)
        return answers[torch.argsort(order)]

    @torch.no_grad()
    def whole(self) -> torch.Tensor:
        """Return the whole table, on every rank."""
        parts = hvd.allgather(self.rows).split(
            [len(range(rank, self._total, hvd.size())) for rank in range(hvd.size())]
        )
        table = torch.empty(self._total, self.rows.shape[1], dtype=self.rows.dtype)
        for rank, part in enumerate(parts):
            table[rank :: hvd.size()] = part.cpu()
        return table


class Recommender(nn.Module):
    """Two tables that are spread over the ranks, and a network that all ranks have."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.users = SpreadEmbedding(USERS, width)
        self.items = SpreadEmbedding(ITEMS, width)
        self.top = nn.Sequential(nn.Linear(3 * width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return a rating for each pair."""
        user, item = self.users(users), self.items(items)
        return self.top(torch.cat([user, item, user * item], dim=1)).squeeze(1)


def make_ratings() -> tuple[TensorDataset, TensorDataset]:
    """Return the ratings to train with and those to test with, the same on every rank."""
    generator = np.random.default_rng(0)
    users = generator.integers(0, USERS, RATINGS)
    items = generator.integers(0, ITEMS, RATINGS)
    likes = generator.standard_normal((USERS, HIDDEN)) / HIDDEN**0.5
    traits = generator.standard_normal((ITEMS, HIDDEN))
    ratings = (likes[users] * traits[items]).sum(axis=1)
    ratings += 0.1 * generator.standard_normal(RATINGS)
    parts = [torch.from_numpy(part) for part in (users, items, ratings.astype(np.float32))]
    split = RATINGS * 5 // 6
    return (
        TensorDataset(*(part[:split] for part in parts)),
        TensorDataset(*(part[split:] for part in parts)),
    )


def train_step(
    model: Recommender,
    dense: torch.optim.Optimizer,
    tables: torch.optim.Optimizer,
    users: torch.Tensor,
    items: torch.Tensor,
    ratings: torch.Tensor,
    weight: float,
) -> float:
    """Take one step, and return the sum of this rank's losses."""
    dense.zero_grad()
    tables.zero_grad()
    loss = nn.functional.mse_loss(model(users, items), ratings)
    (weight * loss).backward()
    # The rows have got the sum of all ranks' gradients; the rest of the model gets the average.
    for table in (model.users, model.items):
        table.rows.grad /= hvd.size()
    dense.step()
    tables.step()
    return loss.item() * len(ratings)


@torch.no_grad()
def evaluate(model: Recommender, test_set: TensorDataset, device: torch.device) -> float:
    """Return the mean squared error, each rating counted once over all ranks."""
    total, count = 0.0, 0
    sampler = hvd.ShardSampler(test_set, batch_size=100, shuffle=False)
    for batch in DataLoader(test_set, batch_sampler=sampler):
        users, items, ratings = (part.to(device) for part in batch)
        error = nn.functional.mse_loss(model(users, items), ratings, reduction="sum")
        total, count = total + error.item(), count + len(ratings)
    return hvd.average_metrics({"loss": total / count}, weight=count)["loss"]


if __name__ == "__main__":
    main()
