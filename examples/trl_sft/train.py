"""TRL's SFTTrainer over a patched model, with LoRA: `python examples/trl_sft/train.py --data book.txt --out run`.

The patch goes in first, then the trainer puts the adapter around the model, and the adapter is saved with its encoding.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from hf_posenc import demo, from_pretrained, save_pretrained


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=str(demo.model_path("llama")), help="a folder or a hub id")
    parser.add_argument("--encoding", default="yarn")
    parser.add_argument("--factor", type=float, default=4.0)
    parser.add_argument("--data", type=Path, required=True, help="a UTF-8 text")
    parser.add_argument("--max-length", type=int, default=512, help="tokens a row")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    args = parse()
    model: Any = from_pretrained(args.model, encoding=args.encoding, options={"factor": args.factor})
    text = args.data.read_text(encoding="utf-8")
    rows = [text[at : at + 4 * args.max_length] for at in range(0, len(text), 4 * args.max_length)]
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(args.out / "checkpoints"),
            max_length=args.max_length,
            max_steps=args.steps,
            per_device_train_batch_size=1,
            learning_rate=2e-4,
            logging_steps=max(1, args.steps // 10),
            save_strategy="no",
            bf16=torch.cuda.is_available(),
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
        ),
        train_dataset=Dataset.from_dict({"text": rows}),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        peft_config=LoraConfig(target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()
    save_pretrained(trainer.model, args.out)
    print(f"saved to {args.out}; load it with hf_posenc.from_pretrained({str(args.out)!r})")


if __name__ == "__main__":
    main()
