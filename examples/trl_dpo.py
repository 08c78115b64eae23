"""Direct preference optimisation with TRL and LoRA, privately. One record is a pair: chosen and rejected are clipped together.

    python examples/trl_dpo.py --epsilon 8

Needs `pip install 'opacus[hf]'`. Runs in a minute on a CPU; the model is made on the spot.
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from tiny_language import make_model, make_tokenizer, sentences
from trl import DPOConfig, DPOTrainer

from opacus.integrations.transformers import make_trainer_private


def preferences(count: int, seed: int) -> Dataset:
    """The sentence is preferred to the same sentence backwards."""
    rows = []
    for text in sentences(count, seed):
        words = text.split()
        prompt, rest = " ".join(words[:2]), words[2:]
        rows.append(
            {"prompt": prompt, "chosen": " " + " ".join(rest), "rejected": " " + " ".join(reversed(rest))}
        )
    return Dataset.from_list(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=8.0, help="of the whole run")
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--out", default="out/trl_dpo")
    options = parser.parse_args()

    tokenizer = make_tokenizer()
    trainer = DPOTrainer(
        model=make_model(tokenizer),
        args=DPOConfig(
            output_dir=options.out,
            beta=0.5,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=4,
            learning_rate=5e-3,
            logging_steps=4,
            bf16=torch.cuda.is_available(),
            report_to=[],
        ),
        train_dataset=preferences(options.records, seed=1),  # the pairs to protect
        eval_dataset=preferences(100, seed=2),  # public
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer = make_trainer_private(
        trainer, target_epsilon=options.epsilon, delta=1 / (10 * options.records), max_grad_norm=1.0
    )
    trainer.train()
    accuracy = trainer.evaluate()["eval_rewards/accuracies"]
    trainer.save_model()  # an ordinary adapter
    print(f"pairs ranked right {accuracy:.0%}, epsilon {trainer.get_epsilon():.3f}, adapter in {options.out}")


if __name__ == "__main__":
    main()
