"""What privacy costs inside TRL's trainers: samples per second and peak memory, against the same trainer without privacy.

    python benchmarks/trainer_cost.py --out out/trainers                        # 1-billion Llama shape, LoRA, all visible GPUs
    python benchmarks/trainer_cost.py --shape 7b --base int8 --trainers sft     # 7-billion shape, torchao int8 base
    python benchmarks/trainer_cost.py --shape tiny --records 8 --length 16      # a smoke test, also on a CPU

The model is laid over the GPUs by Accelerate's device_map in equal shares (`--gpus N` takes the first N). Weights are random: cost
does not depend on them. Ordinary and private runs alternate in one process; each trains for `--steps` steps after two that are not
counted, on the same data. A step of the private run has as many records on average (`--records`), drawn by Poisson sampling; speed is
in records, so that the sizes drawn do not matter. Attention by cuDNN is off in both: it plans for each new number of rows anew, which
a short run with batches of many sizes would be charged for. Writes a table (standard output) and results.json. Needs 'opacus[hf]'.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from accelerate import dispatch_model, infer_auto_device_map, init_empty_weights
from accelerate.utils import get_balanced_memory, set_module_tensor_to_device
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from opacus.integrations.transformers import make_trainer_private

WARM_UP = 2  # steps: the first ones compare and allocate
WORDS = 1000
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4},
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
    },
    "7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
}
TRAINERS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "sft": (SFTTrainer, SFTConfig, {}),
    "dpo": (DPOTrainer, DPOConfig, {}),
    "kto": (KTOTrainer, KTOConfig, {"loss_type": "apo_zero_unpaired"}),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trainers", default="sft,dpo,kto")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--base", choices=("bf16", "int8"), default="bf16")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    parser.add_argument("--records", type=int, default=32, help="in a step")
    parser.add_argument("--physical", type=int, default=8, help="records in a forward")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--out", type=Path, default=Path("out/trainers"))
    options = parser.parse_args(argv)
    options.world = 1  # ranks: trainer_ranks.py
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    disable_progress_bars()
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name in options.trainers.split(","):
        for repeat in range(options.repeats):
            for private in (False, True):
                row = {"trainer": name, "private": private, "repeat": repeat}
                try:
                    row |= measure(name, private, options)
                except Exception as error:  # what cannot run is a row of the table
                    row["error"] = f"{type(error).__name__}: {str(error)[:300]}".replace("\n", " ")
                rows.append(row)
                say(row)
                gc.collect()
                torch.cuda.empty_cache()
    about = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "gpus": [torch.cuda.get_device_name(i) for i in range(options.gpus)],
        "python": platform.python_version(),
        "options": {key: str(value) for key, value in vars(options).items()},
    }
    summary = [line for name in options.trainers.split(",") if (line := summarise(name, rows)) is not None]
    results = {"about": about, "rows": rows, "summary": summary}
    (options.out / "results.json").write_text(json.dumps(results, indent=1))
    for line in summary:
        sys.stdout.write(f"{line['trainer']}: {line['speed']:.3f} x speed, {line['memory']:.3f} x memory\n")
    return int(any("error" in row for row in rows))


def measure(
    name: str,
    private: bool,
    options: argparse.Namespace,
    gpus: Sequence[int] | None = None,
    places: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """One training run.

    Args:
        gpus: those that this process uses; the first `options.gpus` by default.
        places: device map of the model; equal shares over the GPUs by default.
    """
    gpus = range(options.gpus) if gpus is None else gpus
    torch.backends.cuda.enable_cudnn_sdp(False)
    trainer = make_trainer(name, options, places)
    sizes = [options.records] * (WARM_UP + options.steps)
    look = look_seconds = 0.0
    if private:
        peak(gpus)
        began = time.perf_counter()
        make_trainer_private(
            trainer, noise_multiplier=1.0, delta=1e-6, max_grad_norm=1.0, accountant="rdp", seed=0
        )
        look, look_seconds = sum(peak(gpus)), time.perf_counter() - began
        sizes = [len(batch) for batch in trainer.get_train_dataloader().batch_sampler]
    peak(gpus)
    clock = Clock(gpus)
    trainer.add_callback(clock)
    trainer.train()
    seconds, counted = clock.seconds[WARM_UP:], sizes[WARM_UP : WARM_UP + options.steps]
    used = peak(gpus)
    return {
        "records_per_second": sum(counted) / sum(seconds),
        "ms_per_step": 1000 * statistics.mean(seconds),
        "records": sum(counted),
        "seconds": sum(seconds),
        "gib": sum(used),
        "gib_of_fullest_gpu": max(used, default=0.0),
        "gib_of_first_look": look,
        "seconds_of_first_look": look_seconds,
    }


def peak(gpus: Sequence[int]) -> list[float]:
    """GiB on each GPU at most since the last call."""
    found = [torch.cuda.max_memory_allocated(i) / 2**30 for i in gpus]
    for i in gpus:
        torch.cuda.reset_peak_memory_stats(i)
    return found


class Clock(TrainerCallback):
    """Seconds of each step, devices idle at both ends."""

    def __init__(self, gpus: Sequence[int]) -> None:
        self.gpus = gpus
        self.seconds: list[float] = []

    def _now(self) -> float:
        for i in self.gpus:
            torch.cuda.synchronize(i)
        return time.perf_counter()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._start = self._now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(self._now() - self._start)


def make_trainer(name: str, options: argparse.Namespace, places: Mapping[str, Any] | None = None) -> Any:
    trainer, config, changes = TRAINERS[name]
    steps = WARM_UP + options.steps
    args = config(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=options.physical,
        gradient_accumulation_steps=max(1, options.records // options.physical),
        max_steps=steps,
        max_length=options.length,
        learning_rate=1e-5,
        bf16=options.gpus > 0,
        use_cpu=options.gpus == 0,
        gradient_checkpointing=options.checkpointing,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        **changes,
    )
    away = [int(path.rsplit(".", 1)[1]) for path, place in (places or {}).items() if path and place == "cpu"]
    kept = [i for i in range(SHAPES[options.shape]["num_hidden_layers"]) if i not in away]
    tokenizer = make_tokenizer()
    return trainer(
        model=make_model(options, places),
        args=args,
        train_dataset=make_data(name, options.records * steps * options.world, options.length),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=options.rank,
            lora_alpha=2 * options.rank,
            target_modules=LINEAR
            if away
            else "all-linear",  # PEFT chooses layers by number among named ones only
            task_type="CAUSAL_LM",
            layers_to_transform=kept if away else None,  # offloaded layers are frozen
        ),
    )


def make_model(options: argparse.Namespace, given: Mapping[str, Any] | None = None) -> LlamaForCausalLM:
    """Laid over the GPUs (or on the CPU, or as `given`), its weights made where they are."""
    tiny = options.shape == "tiny"
    config = LlamaConfig(
        vocab_size=2048 if tiny else 32000,
        num_key_value_heads=4 if options.shape != "7b" else 32,
        max_position_embeddings=4096,
        pad_token_id=0,
        dtype="float32" if not options.gpus else "bfloat16",
        **SHAPES[options.shape],
    )
    dtype = torch.bfloat16 if options.gpus else torch.float32
    with init_empty_weights():
        model = LlamaForCausalLM(config).to(dtype)
    no_split = ["LlamaDecoderLayer"]
    places: dict[str, Any] = {"": "cpu"}
    if given is not None:
        places = dict(given)
    elif options.gpus:
        room = {i: torch.cuda.mem_get_info(i)[0] for i in range(options.gpus)}
        balanced = get_balanced_memory(model, max_memory=room, no_split_module_classes=no_split, dtype=dtype)
        places = infer_auto_device_map(
            model, max_memory=balanced, no_split_module_classes=no_split, dtype=dtype
        )
        places["lm_head"] = (
            0  # TRL's fused head leaves the loss there, and the trainer wants it on its first device
        )
    for path, weight in list(model.named_parameters()):
        device = places[max((k for k in places if path == k or path.startswith(f"{k}.") or not k), key=len)]
        value = torch.empty(weight.shape, dtype=dtype, device=device).normal_(0, 0.02)
        if path.endswith("norm.weight"):
            value.fill_(1.0)
        set_module_tensor_to_device(model, path, device, value=value)
    if options.base == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(
            model,
            Int8WeightOnlyConfig(),
            filter_fn=lambda layer, path: isinstance(layer, torch.nn.Linear) and path != "lm_head",
        )
    return (
        dispatch_model(model, places)
        if len(set(places.values())) > 1
        else model.to(next(iter(places.values())))
    )


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{i}": i + 4 for i in range(WORDS)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def make_data(name: str, count: int, length: int) -> Dataset:
    """Rows of `length` tokens."""
    ids = torch.randint(0, WORDS, (count, 2, length), generator=torch.Generator().manual_seed(0)).tolist()
    half = length // 2

    def text(numbers: list[int]) -> str:
        return " ".join(f"w{i}" for i in numbers)

    if name == "sft":
        return Dataset.from_list([{"text": text(one)} for one, _ in ids])
    rows = []
    for number, (one, other) in enumerate(ids):
        prompt, first, second = text(one[:half]), " " + text(one[half:-1]), " " + text(other[half:-1])
        if name == "dpo":
            rows.append({"prompt": prompt, "chosen": first, "rejected": second})
        else:
            rows.append({"prompt": prompt, "completion": first, "label": number % 2 == 0})
    return Dataset.from_list(rows)


def say(row: dict[str, Any]) -> None:
    kind = "private" if row["private"] else "ordinary"
    found = row.get("error") or (
        f"{row['records_per_second']:9.2f} records/s {row['ms_per_step']:9.1f} ms/step {row['gib']:8.2f} GiB "
        f"(fullest GPU {row['gib_of_fullest_gpu']:.2f}"
        + (
            f"; {row['gib_of_first_look']:.2f} GiB and {row['seconds_of_first_look']:.1f} s before, for the look at the loss)"
            if row["private"]
            else ")"
        )
    )
    sys.stdout.write(f"{row['trainer']:4s} {kind:9s} {found}\n")
    sys.stdout.flush()


def summarise(name: str, rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Private over ordinary; the best of the repeats on either side."""
    mine = [row for row in rows if row["trainer"] == name and "error" not in row]
    kinds = [[row for row in mine if row["private"] is private] for private in (False, True)]
    if not all(kinds):
        return None
    speed = [max(row["records_per_second"] for row in kind) for kind in kinds]
    memory = [min(row["gib"] for row in kind) or 1.0 for kind in kinds]
    return {"trainer": name, "speed": speed[1] / speed[0], "memory": memory[1] / memory[0]}


if __name__ == "__main__":
    raise SystemExit(main())
