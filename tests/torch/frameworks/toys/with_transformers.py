"""The Trainer of Hugging Face on CPUs, with an evaluation, and with a start from a checkpoint."""

import sys

from transformers import Trainer, TrainingArguments

from tests.torch.frameworks.toys.common import BATCH, RATE, STEPS, Net, Samples, write


def make(folder, steps):
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
    )
    samples = Samples()
    return Trainer(Net(), arguments, train_dataset=samples, eval_dataset=samples)


def main(folder, way):
    if way == "again":
        make(folder, 2).train()
    trainer = make(folder, STEPS)
    trainer.train(resume_from_checkpoint=way == "again")
    assert trainer.evaluate()["eval_loss"] > 0
    write(folder, trainer.accelerator.unwrap_model(trainer.model).state_dict())


if __name__ == "__main__":
    main(*sys.argv[1:])
