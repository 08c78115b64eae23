"""KTO with TRL and LoRA, privately: unpaired judgements. The loss has to be `apo_zero_unpaired`.

    python examples/trl_kto.py --epsilon 8

(The default, `kto`, compares each record with a mean over others: no clipping bounds what a record does there, so it is refused.)
Needs `pip install 'opacus[hf]'`. Runs in a minute on a CPU; the model is made on the spot.
"""

from __future__ import annotations

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from tiny_language import make_model, make_tokenizer, sentences
from trl import KTOConfig, KTOTrainer

from opacus.integrations.transformers import make_trainer_private


def judgements(count: int, seed: int) -> Dataset:
    """Every second completion is backwards, and judged bad."""
    rows = []
    for number, text in enumerate(sentences(count, seed)):
        words = text.split()
        prompt, rest, good = " ".join(words[:2]), words[2:], number % 2 == 0
        completion = " " + " ".join(rest if good else reversed(rest))
        rows.append({"prompt": prompt, "completion": completion, "label": good})
    return Dataset.from_list(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=8.0, help="of the whole run")
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--out", default="out/trl_kto")
    options = parser.parse_args()

    tokenizer = make_tokenizer()
    trainer = KTOTrainer(
        model=make_model(tokenizer),
        args=KTOConfig(
            output_dir=options.out,
            loss_type="apo_zero_unpaired",
            beta=0.5,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=4,
            learning_rate=5e-3,
            logging_steps=4,
            bf16=torch.cuda.is_available(),
            report_to=[],
        ),
        train_dataset=judgements(options.records, seed=1),  # the judgements to protect
        eval_dataset=judgements(100, seed=2),  # public
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer = make_trainer_private(
        trainer, target_epsilon=options.epsilon, delta=1 / (10 * options.records), max_grad_norm=1.0
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()  # an ordinary adapter
    print(
        f"evaluation loss {before:.3f} -> {after:.3f}, epsilon {trainer.get_epsilon():.3f}, adapter in {options.out}"
    )


if __name__ == "__main__":
    main()
