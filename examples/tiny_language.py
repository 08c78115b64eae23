"""A tokenizer and a language model small enough to be made on the spot: nothing is downloaded. For the trainer examples.

In real use both come from `AutoTokenizer.from_pretrained(...)` and `AutoModelForCausalLM.from_pretrained(...)`.
"""

from __future__ import annotations

import os
import random

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ANIMALS = ["otter", "heron", "badger", "lynx", "magpie", "hare", "toad", "owl", "vole", "newt"]
PLACES = ["river", "marsh", "forest", "meadow", "quarry", "orchard", "harbour", "hill"]
DEEDS = ["slept", "hunted", "sang", "waited", "hid", "swam", "nested", "wandered"]
TIMES = ["at dawn", "at noon", "at dusk", "all night", "in the rain", "after the storm"]


def sentences(count: int, seed: int = 0) -> list[str]:
    """Simple sentences, most of them different."""
    draw = random.Random(seed)
    return [
        f"the {draw.choice(ANIMALS)} {draw.choice(DEEDS)} by the {draw.choice(PLACES)} {draw.choice(TIMES)}"
        for _ in range(count)
    ]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer, trained on sentences that are not the training data (a vocabulary is not covered by DP)."""
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words.train_from_iterator(sentences(2000, seed=99), trainers.WordLevelTrainer(special_tokens=special))
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> LlamaForCausalLM:
    """A Llama of two layers."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
