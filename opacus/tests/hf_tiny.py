"""Tiny models, a tokenizer and data sets for the tests of trainers; nothing is downloaded.

Import it after `pytest.importorskip("transformers")`.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import datasets
import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
datasets.disable_progress_bars()

TEXTS = [  # lengths differ widely
    "a cold wind came down from the north",
    "stop",
    "the ship left the old harbour before dawn and nobody on the quay saw its grey sails go past the lighthouse",
    "rivers meet here",
    "she counted nine white stones and put them back one by one",
    "the old house",
    "before dawn nobody saw the north wind put the sails down",
    "nine grey ships",
    "a white lighthouse came past",
    "here the rivers left the stones and the old harbour one by one and nobody counted them",
    "the quay",
    "cold stones meet the wind before she came down from the lighthouse",
]


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    words.train_from_iterator(TEXTS, trainers.WordLevelTrainer(special_tokens=special))
    names = {
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
    }
    return PreTrainedTokenizerFast(tokenizer_object=words, **names)


TOKENIZER = make_tokenizer()
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def llama(cls: type = LlamaForCausalLM, *, tied: bool = False, seed: int = 0, **options: object):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        **sizes,
        **_SPECIAL,
        **options,
    )
    return cls(config)


def llama_scorer(seed: int = 0):
    return llama(LlamaForSequenceClassification, seed=seed, num_labels=1)


def gpt2(seed: int = 0, dropout: float = 0.0):
    torch.manual_seed(seed)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(TOKENIZER), n_embd=32, n_layer=2, n_head=4, n_positions=128, **drops, **_SPECIAL
        )
    )


def bert(cls: type = BertForSequenceClassification, seed: int = 0):
    torch.manual_seed(seed)
    return cls(
        BertConfig(
            vocab_size=len(TOKENIZER),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            pad_token_id=0,
        )
    )


def bert_masked(seed: int = 0):
    return bert(BertForMaskedLM, seed)


def token_data() -> Dataset:
    return Dataset.from_list([{"input_ids": TOKENIZER(text + " </s>")["input_ids"]} for text in TEXTS])


def labelled_data() -> Dataset:
    return Dataset.from_list([{**row, "labels": i % 2} for i, row in enumerate(token_data())])


def masked_data() -> Dataset:
    """Every second token is to be guessed, at least one; masked once and for all, so that runs can be compared."""
    rows = []
    for row in token_data():
        ids = row["input_ids"]
        chosen = [i % 2 == 0 for i in range(len(ids))]
        rows.append(
            {
                "input_ids": [4 if c else t for c, t in zip(chosen, ids, strict=True)],
                "labels": [t if c else -100 for c, t in zip(chosen, ids, strict=True)],
            }
        )
    return Dataset.from_list(rows)


def text_data() -> Dataset:
    return Dataset.from_dict({"text": TEXTS})


def pair_data() -> Dataset:
    n = len(TEXTS)
    return Dataset.from_list(
        [
            {"prompt": TEXTS[i], "chosen": " " + TEXTS[(i + 1) % n], "rejected": " " + TEXTS[(i + 5) % n]}
            for i in range(n)
        ]
    )


def judged_data() -> Dataset:
    n = len(TEXTS)
    return Dataset.from_list(
        [{"prompt": TEXTS[i], "completion": " " + TEXTS[(i + 1) % n], "label": i % 3 != 0} for i in range(n)]
    )
