"""accelerate on CPUs: prepared objects, gradients summed over two batches, and gathering."""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch.utils.data import DataLoader

from tests.torch.frameworks.toys.common import BATCH, RATE, Net, Samples, loss_of, write


def main(folder, way):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2 if way == "sums" else 1)
    model, samples = Net(), Samples()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples, BATCH))
    indices = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()
        indices.append(accelerator.gather_for_metrics(batch["labels"]))
    assert torch.equal(torch.cat(indices), samples.labels)
    assert broadcast_object_list([accelerator.process_index], 1) == [1]
    accelerator.wait_for_everyone()
    plain = accelerator.unwrap_model(model)
    losses = accelerator.gather(torch.tensor([loss_of(plain, samples)]))
    assert losses[0] == losses[1]
    write(folder, plain.state_dict())
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
