"""Lightning's Trainer on CPUs: DDP, and the strategy that shards modules by `fully_shard`."""

import sys

import lightning
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from tests.torch.frameworks.toys.common import BATCH, RATE, Net, Samples, write


class Toy(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def configure_model(self):
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            for each in (self.net.layers[0], self.net.layers[2], self.net):
                fully_shard(each, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, index):
        loss = self.net(**batch)["loss"]
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        self.log("held_out", self.net(**batch)["loss"], sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), RATE)


def weights_of(trainer, model):
    """Return all weights, on each rank."""
    net = model.net
    return {
        name: each.full_tensor() if hasattr(each, "full_tensor") else each.detach()
        for name, each in net.state_dict().items()
    }


def main(folder, way):
    ways = {"ddp": "ddp", "fully_shard": ModelParallelStrategy(2, 1)}
    lightning.seed_everything(3)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ways[way],
        max_epochs=1,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # Lightning's shuffles
    )
    assert isinstance(trainer.strategy.cluster_environment, TorchElasticEnvironment)
    model, samples = Toy(), Samples()
    sampler = DistributedSampler(samples, 2, trainer.global_rank, shuffle=False)
    loader = DataLoader(samples, BATCH, sampler=sampler)
    trainer.fit(model, loader, loader)
    write(folder, weights_of(trainer, model))
    held_out = trainer.callback_metrics["held_out"]
    assert (trainer.strategy.all_gather(held_out) == held_out).all()
    trainer.save_checkpoint(f"{folder}/last.ckpt")


if __name__ == "__main__":
    main(*sys.argv[1:])
