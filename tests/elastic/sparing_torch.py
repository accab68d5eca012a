"""A PyTorch job with spares: prints, on each rank, its size at each step and a hash of the state.

The state is the model, with statistics of batch normalization, the optimizer with its momenta, and
the sampler; the samples of each epoch are counted.
"""

import hashlib
import pickle
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdlite.torch as hvd

EPOCHS, SAMPLES = int(sys.argv[1]), 240
hvd.init()
torch.manual_seed(hvd.rank() + 100)  # rank 0's weights count
torch.set_num_threads(1)
dataset = TensorDataset(
    torch.randn(SAMPLES, 12, generator=torch.Generator().manual_seed(1)), torch.arange(SAMPLES)
)
model = torch.nn.Sequential(
    torch.nn.Linear(12, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 2)
)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    named_parameters=model.named_parameters(),
)
sampler = hvd.elastic.ElasticSampler(dataset, shuffle=True, seed=3)


@hvd.elastic.run
def train(state):
    while state.epoch < EPOCHS:
        loader = DataLoader(dataset, batch_size=4, sampler=state.sampler)
        for number, (inputs, samples) in enumerate(loader):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), samples % 2)
            loss.backward()
            optimizer.step()
            state.seen = [*state.seen, *hvd.allgather(samples, name="samples").tolist()]
            state.sizes = [*state.sizes, hvd.size()]
            state.sampler.record_batch(number, 4)
            if number % 3 == 2:
                state.commit()
        state.counts = [*state.counts, len(state.seen) - len(set(state.seen))]
        state.missed = [*state.missed, SAMPLES - len(set(state.seen))]
        state.seen = []
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()


state = hvd.elastic.TorchState(
    model, optimizer, sampler=sampler, epoch=0, sizes=[], seen=[], counts=[], missed=[]
)
train(state)
weights = {name: value.tolist() for name, value in model.state_dict().items() if "run" not in name}
momenta = [each["momentum_buffer"].tolist() for each in optimizer.state_dict()["state"].values()]
digest = hashlib.sha256(pickle.dumps((weights, momenta))).hexdigest()
print(f"left {hvd.rank()}: {digest}; {state.sizes}; {state.counts}; {state.missed}", flush=True)
