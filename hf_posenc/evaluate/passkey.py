"""Passkey recall: five digits hidden in a long text and asked for at its end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import OptionError
from hf_posenc.evaluate.perplexity import check_reach
from hf_posenc.modules import evaluating

MAX_NEW_TOKENS = 10


def _left_padded(prompts: list[list[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts as `(batch, longest)` ids and mask, their ends in line, where generation goes on."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return ids, mask


@torch.inference_mode()
def _continuations(model: Any, tokenizer: Any, prompts: list[list[int]]) -> list[str]:
    """Greedy continuations of at most ten tokens, decoded without the prompt."""
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    ids, mask = _left_padded(prompts, pad, model.device)
    made = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
        num_beams=1,
        pad_token_id=pad,
    )
    return [tokenizer.decode(row[ids.shape[1] :], skip_special_tokens=True) for row in made]


def passkey_accuracy(
    model: Any, tokenizer: Any, length: int, *, num_samples: int = 20, seed: int = 0, batch_size: int = 8
) -> float:
    """Share of the documents of `length` tokens whose five-digit key is the first number of a greedy answer, 0 ... 1.

    `length` counts the prompt and the ten tokens of the answer. Documents lie on a grid of depths and are drawn from
    `seed` alone. They are sorted by their number of tokens, so a batch holds little padding or none.

    Raises:
        ReachError: the unpatched model has a learned table of fewer than `length` positions.
        OptionError: `num_samples` or `batch_size` below 1.
    """
    from hf_posenc.eval_tasks.passkey import passkey_documents, passkey_score

    if num_samples < 1 or batch_size < 1:
        raise OptionError(f"num_samples and batch_size must be at least 1; got {num_samples} and {batch_size}")
    check_reach(model, length)
    documents = passkey_documents(tokenizer, length, num_samples=num_samples, seed=seed)
    encoded = [tokenizer(document.prompt, verbose=False)["input_ids"] for document in documents]
    order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]))
    right = 0
    with evaluating(model):
        for at in range(0, len(order), batch_size):
            batch = order[at : at + batch_size]
            answers = _continuations(model, tokenizer, [encoded[index] for index in batch])
            right += sum(passkey_score(text, documents[index].key) for text, index in zip(answers, batch, strict=True))
    return right / len(documents)
