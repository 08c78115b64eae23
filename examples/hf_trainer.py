"""Fine-tune a language model with `transformers.Trainer`, privately: one call between building the trainer and `train()`.

    python examples/hf_trainer.py --epsilon 8
    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py     # two ranks share out each batch

Needs `pip install 'opacus[hf]'`. Runs in a minute on a CPU; the model is made on the spot. For a real one, replace
`make_model` by `AutoModelForCausalLM.from_pretrained(name, device_map="auto")`: nothing else changes.
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from tiny_language import make_model, make_tokenizer, sentences
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

from opacus.integrations.transformers import make_trainer_private


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=8.0, help="of the whole run")
    parser.add_argument("--records", type=int, default=2000)
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--out", default="out/hf_trainer")
    options = parser.parse_args()

    tokenizer = make_tokenizer()

    def encode(count: int, seed: int) -> Dataset:
        texts = [f"<s> {text} </s>" for text in sentences(count, seed)]
        return Dataset.from_dict({"input_ids": [tokenizer(text)["input_ids"] for text in texts]})

    trainer = Trainer(
        model=make_model(tokenizer),
        args=TrainingArguments(
            output_dir=options.out,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=32,  # what fits into memory
            gradient_accumulation_steps=4,  # 128 records a step and rank on average, drawn by Poisson sampling
            learning_rate=3e-3,
            lr_scheduler_type="cosine",
            logging_steps=4,
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=encode(options.records, seed=1),  # the records to protect
        eval_dataset=encode(200, seed=2),  # public: evaluation is outside the guarantee
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer = make_trainer_private(
        trainer, target_epsilon=options.epsilon, delta=1 / (10 * options.records), max_grad_norm=1.0
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()  # an ordinary model
    if not trainer.is_world_process_zero():
        return
    print(
        f"evaluation loss {before:.3f} -> {after:.3f}, epsilon {trainer.get_epsilon():.3f}, saved in {options.out}"
    )


if __name__ == "__main__":
    main()
