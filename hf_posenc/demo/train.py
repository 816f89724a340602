"""Train a demo checkpoint on CPU: `python -m hf_posenc.demo.train llama|gpt2|bloom [--steps N] [--out DIR]`.

Those that ship: llama with `--steps 1300` (16 minutes on 2 cores), gpt2 and bloom with `--steps 700` (7 minutes each).

What made retrieval appear at this size is the curriculum, not the model: windows grow from 48 to 256 bytes over the
first half, and the rows mix copying, dense recall, prose and passkeys. Passkeys alone, or full windows from the
start, taught nothing.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import time
from pathlib import Path
from typing import Any, get_args

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from hf_posenc.demo import ModelName, model_path
from hf_posenc.eval_tasks.passkey import build_passkey
from hf_posenc.eval_tasks.text import document, filler_sentence, ledger, repeated_segment
from hf_posenc.evaluate.run_tasks import run_tasks

TRAINED_LENGTH = 256
FIRST_LENGTH = 48
BYTES_PER_STEP = 6000
PEAK_LR = 1.5e-3
END_OF_TEXT = "<|endoftext|>"
END_ID = 256
VOCAB_SIZE = 264


def byte_tokenizer() -> Any:
    """One token a byte, its id the byte's value; id 256 is `<|endoftext|>`; nothing is added to a text."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    # GPT-2's table of stand-ins: printable bytes stand for themselves, the others take the code points from 256 on.
    others = [b for b in range(256) if b not in printable]
    symbols = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={symbols[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        add_prefix_space=False,
    )


def new_model(name: ModelName) -> Any:
    """A fresh model of 1.8 M parameters, 192 wide, 4 layers, 4 heads, its config saying the trained length."""
    ids: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": END_ID,
        "eos_token_id": END_ID,
        "pad_token_id": END_ID,
    }
    if name == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                **ids,
                hidden_size=192,
                intermediate_size=512,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=4,
                max_position_embeddings=TRAINED_LENGTH,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
                tie_word_embeddings=True,
            )
        )
    if name == "gpt2":
        no_dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(
            GPT2Config(**ids, **no_dropout, n_positions=TRAINED_LENGTH, n_embd=192, n_layer=4, n_head=4)
        )
    # BLOOM's config has no field for the length: the released models carry it as an extra key of this name.
    ids["seq_length"] = TRAINED_LENGTH
    return BloomForCausalLM(BloomConfig(**ids, hidden_size=192, n_layer=4, n_head=4))


def passkey_row(rng: random.Random, n_bytes: int) -> str:
    """A solved passkey document and filler up to `n_bytes`; in little room, only the key said twice."""
    if n_bytes < 128:
        key = rng.randrange(10000, 100000)
        text = f"The pass key is {key}."
        while len(text) + 24 + 48 < n_bytes:
            text += f" {filler_sentence(rng)}"
        text += f" The pass key is {key}."
    else:
        length = n_bytes if rng.random() < 0.5 else rng.randrange(124, n_bytes)
        made = build_passkey(len, length, rng=rng, depth=rng.random())
        text = f"{made.prompt} {made.key}."
    while len(text) < n_bytes:
        text += f" {filler_sentence(rng)}"
    return text[:n_bytes]


def training_row(seed: int, n_bytes: int) -> list[int]:
    """Token ids of one row: a quarter each of copying, dense recall, prose and passkey; one in five starts with bos."""
    rng = random.Random(f"row/{seed}")
    kind = seed % 4
    if kind == 0:
        text = repeated_segment(rng, n_bytes)
    elif kind == 1:
        text = ledger(rng, n_bytes)
    elif kind == 2:
        text = document(seed, n_bytes)
    else:
        text = passkey_row(rng, n_bytes)
    row = list(text.encode("ascii"))
    return [END_ID, *row[:-1]] if rng.random() < 0.2 else row


def window(progress: float) -> int:
    """Bytes a row: from 48 to 256 over the first half of training."""
    return round(FIRST_LENGTH + (TRAINED_LENGTH - FIRST_LENGTH) * min(1.0, 2 * progress))


def learning_rate(progress: float) -> float:
    """Linear warm-up over 3 %, then a cosine to 2 % of the peak."""
    return PEAK_LR * min(progress / 0.03, 0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2)


@torch.no_grad()
def tail_perplexity(model: Any, length: int, *, num_samples: int = 16) -> float:
    """exp(mean nll) of the last 64 bytes of held-out documents of `length` bytes, all scored in one forward."""
    rows = [list(document(i, length, split="held-out").encode()) for i in range(num_samples)]
    ids = torch.tensor(rows)
    logits = model(input_ids=ids).logits[:, -65:-1].float()
    return float(torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, -64:]).exp())


def save(model: Any, tokenizer: Any, out: Path) -> None:
    """Write the folder: weights in fp16, and a config that loads them as fp32, in which a CPU is faster and finer."""
    copy.deepcopy(model).half().save_pretrained(out)
    tokenizer.save_pretrained(out)
    config = out / "config.json"
    values = json.loads(config.read_text()) | {"dtype": "float32"}
    config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def train(
    name: ModelName,
    *,
    out: Path,
    minutes: float = 12.0,
    steps: int | None = None,
    seed: int = 0,
) -> None:
    """Train for `minutes` of wall clock, or for exactly `steps`, which repeats on the same machine; saves on the way.

    Learning rate and window follow whichever of the two is given, so a busy machine ends in time and annealed.
    """
    torch.manual_seed(seed)
    model, tokenizer = new_model(name), byte_tokenizer()
    print(
        f"{name}: {model.num_parameters():,} parameters, {f'{steps} steps' if steps else f'{minutes} minutes'}, {out}"
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    start, step, rows, saved, progress = time.monotonic(), 0, 0, 0, 0.0
    while progress < 1:
        length = window(progress)
        count = BYTES_PER_STEP // length
        ids = torch.tensor([training_row(rows + i, length) for i in range(count)])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress)
        loss = training_step(model, optimizer, ids)
        step, rows = step + 1, rows + count
        progress = step / steps if steps else (time.monotonic() - start) / (60 * minutes)
        if step % 25 == 0:
            print(f"{progress:4.0%} step {step} window {length} loss {loss:.3f}", flush=True)
        if progress < 1 and int(10 * progress) > saved:
            saved = int(10 * progress)
            save(model, tokenizer, out)
            print(f"{progress:4.0%} {measures(model, tokenizer, num_samples=10)}", flush=True)
    save(model, tokenizer, out)
    print(f"{step} steps, {(time.monotonic() - start) / 60:.1f} minutes: {measures(model, tokenizer, num_samples=40)}")


def training_step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    """One step of gradient descent on rows of one size; returns the loss in nats a byte."""
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def measures(model: Any, tokenizer: Any, num_samples: int) -> str:
    """What the model does inside its trained length."""
    model.eval()
    lengths = (128, TRAINED_LENGTH)
    scores = run_tasks(
        model, "passkey", lengths, tokenizer=tokenizer, num_samples=num_samples, batch_size=8, bars=False
    )
    assert scores is not None
    passkey = [scores.tasks["passkey"].acc[n] for n in lengths]
    perplexity = tail_perplexity(model, TRAINED_LENGTH)
    model.train()
    return f"passkey 128: {passkey[0]:.2f}, 256: {passkey[1]:.2f}; perplexity of the last 64 of 256: {perplexity:.3f}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=get_args(ModelName))
    parser.add_argument("--minutes", type=float, default=12.0, help="wall clock to spend (default: 12)")
    parser.add_argument("--steps", type=int, help="train for so many steps instead, however long they take")
    parser.add_argument("--out", type=Path, help="folder to write; default: the checkpoint that ships")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    out = args.out or model_path(args.model)
    train(args.model, out=out, minutes=args.minutes, steps=args.steps, seed=args.seed)


if __name__ == "__main__":
    main()
