"""`hf-posenc`, a model class of lm-eval: Transformers' own one, with a position encoding of ours put in.

    lm_eval --model hf-posenc --model_args pretrained=MODEL,encoding=yarn,factor=4 ...

Beyond lm-eval's `hf`: adapters and patched folders keep their encoding; a request longer than the model reaches is an
error; logits are made for the answers alone; processes of one accelerate run share the work on CPUs too.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_posenc.errors import OptionError, ReachError
from hf_posenc.evaluate.limits import UNLIMITED, reach

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise OptionError(
        f"the tasks run through lm-eval, which is not installed ({error}); pip install 'hf-posenc[eval]'"
    ) from error

NAME = "hf-posenc"
_REFUSED = ("delta", "autogptq", "gptqmodel", "tp_plan")


def base_of(path: str) -> str:
    """The base model that an adapter's folder names; any other path as it is."""
    if not Path(path, "adapter_config.json").is_file():
        return path
    from hf_posenc import adapters

    return str(adapters.read(path).base_model_name_or_path or path)


def find_tokenizer(name: str, **kwargs: Any) -> Any:
    """The tokenizer beside a model; beside its base where `name` is an adapter's folder without one."""
    from transformers import AutoTokenizer

    from hf_posenc.evaluate.loading import load_tokenizer, resolve_model

    path = resolve_model(name)
    has_own = not Path(path, "adapter_config.json").is_file() or Path(path, "tokenizer_config.json").is_file()
    path = path if has_own else resolve_model(base_of(path))
    return AutoTokenizer.from_pretrained(path, **kwargs) if kwargs else load_tokenizer(path)


def appended(tokenizer: Any) -> list[int]:
    """The special tokens that the tokenizer puts after a text: an answer does not come after the end."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    starts = [at for at in range(len(whole)) if plain and whole[at : at + len(plain)] == plain]
    return list(whole[starts[-1] + len(plain) :]) if starts else []


def options_of(encoding: str | None, arguments: dict[str, Any]) -> dict[str, Any]:
    """Take the options of `encoding` out of `arguments`; raises for a name or value that is not known."""
    from hf_posenc.registry import ENCODINGS, create

    known = {option for row in ENCODINGS.values() for option in row.options}
    options = {key: arguments.pop(key) for key in [*arguments] if key in known}
    if encoding is None and options:
        raise OptionError(f"{', '.join(options)} without encoding=NAME: name the encoding that takes it")
    if encoding is not None:
        create(encoding, **options)
    return options


@register_model(NAME)
class PosencLM(HFLM):  # type: ignore[misc]
    """A causal language model under lm-eval, with the encoding `encoding` or the one that its folder records.

    Args:
        pretrained: a checkpoint, an adapter's folder, a patched or merged model, `demo:llama`; or a loaded model.
        encoding: a name of `hf_posenc.list_encodings()`; its options are further arguments (`factor=4`).
        max_length: the most tokens a request may have; by default what the positions reach (see `reach`).
        bars: show lm-eval's own progress bars.
        kwargs: as lm-eval's `hf` takes them; what it does not know goes to Transformers.

    Raises:
        PosencError: an encoding, an option or a folder that is not right; later, a request that would be truncated.
    """

    tokenizer: Any

    def __init__(self, pretrained: Any, *, encoding: str | None = None, bars: bool = True, **kwargs: Any) -> None:
        from hf_posenc.evaluate.loading import parse_device, resolve_model

        refused = [name for name in _REFUSED if kwargs.get(name)]
        if refused:
            raise OptionError(f"{', '.join(refused)}: {NAME} does not take it; use lm-eval's own model 'hf'")
        self._bars = bars
        self._encoding, self._options = encoding, options_of(encoding, kwargs)
        self._names: dict[Any, str] = {}
        self._kept: tuple[int, int] | None = None
        self._reach: int | None = None
        kwargs.setdefault("softmax_dtype", "float32")
        kwargs["device"] = kwargs.get("device") or str(parse_device(None))
        if isinstance(pretrained, str):
            pretrained = resolve_model(pretrained)
        elif encoding is not None:
            raise OptionError("encoding= goes with a model's name; patch a loaded model with patch_model")
        super().__init__(pretrained, **kwargs)
        if hasattr(self, "accelerator"):
            # lm-eval itself shares the work only where it counts more than one GPU.
            self._rank, self._world_size = self.accelerator.process_index, self.accelerator.num_processes

    def _get_config(self, pretrained: str, **kwargs: Any) -> None:
        super()._get_config(base_of(pretrained), **kwargs)

    def _create_tokenizer(self, pretrained: Any, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        if not tokenizer and isinstance(pretrained, str) and base_of(pretrained) != pretrained:
            tokenizer = find_tokenizer(pretrained)
        super()._create_tokenizer(pretrained, tokenizer, *args, **kwargs)
        made = self.tokenizer
        if made.pad_token is None and made.unk_token is None and made.eos_token is None:
            # lm-eval would add a token that the model has no row for. What pads is masked: any token will do.
            made.pad_token = made.convert_ids_to_tokens(0)
        self._tail = appended(made)

    def _create_model(self, pretrained: str, *args: Any, **kwargs: Any) -> None:
        """Base, then encoding, then adapter, on the device."""
        from transformers import AutoModelForCausalLM

        import hf_posenc
        from hf_posenc import adapters
        from hf_posenc.checkpoint import is_recorded, recorded_with

        assert not args, "lm-eval names every argument"
        peft, split = kwargs.pop("peft", None), bool(kwargs.pop("parallelize", False))
        memory = ("gpus", "max_memory_per_gpu", "max_cpu_memory", "offload_folder")
        place = {name: kwargs.pop(name, None) for name in memory}
        given = {key: value for key, value in kwargs.items() if value is not None and key not in _REFUSED}
        if not given.get("subfolder"):
            given.pop("subfolder", None)
        if split:
            given |= self._get_accelerate_args(parallelize=True, device_map=given.pop("device_map", None), **place)
        encoding: Any = self._encoding
        if encoding is None and peft and is_recorded(Path(peft)):
            encoding = recorded_with(Path(peft))
        options = self._options if isinstance(encoding, str) else None
        given = {"auto_class": AutoModelForCausalLM, **given}
        model = hf_posenc.from_pretrained(pretrained, encoding=encoding, options=options, **given)
        if peft:
            model = adapters.attach(model, peft)
        self._model = model if split else model.to(self.device)
        self._config = self._model.config

    @property
    def max_length(self) -> int:
        """The most tokens a request may have."""
        if self._reach is None:
            self._reach = reach(self.model) or UNLIMITED
            if self._max_length is not None and not 1 <= int(self._max_length) <= self._reach:
                ends = "have no end" if self._reach == UNLIMITED else f"end at {self._reach}"
                raise OptionError(f"max_length={self._max_length}: give at least 1, and this model's positions {ends}")
        return int(self._max_length or self._reach)

    @property
    def eot_token_id(self) -> int | None:  # type: ignore[override]
        """The end of a text; None for a tokenizer that has none."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before an empty context: the beginning, else the end of a text, else the padding."""
        ids = (self.custom_prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        return next((int(i) for i in ids if i is not None), int(self.tokenizer.pad_token_id))

    def tok_decode(self, tokens: Any, skip_special_tokens: bool = True) -> Any:
        """Text of tokens; None, the end of a text that this tokenizer does not have, stays None."""
        return None if tokens is None else super().tok_decode(tokens, skip_special_tokens=skip_special_tokens)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, *args: Any, **kwargs: Any) -> list[int]:
        """Tokens of a text that goes on: without what the tokenizer puts at its end."""
        ids = super().tok_encode(string, add_special_tokens, *args, **kwargs)
        n = len(self._tail)
        return ids[:-n] if n and ids[-n:] == self._tail else ids

    def _refuse(self, key: Any, size: int, limit: int, what: str) -> None:
        if size > limit:
            name = self._names.get(key) or "a request"
            raise ReachError(
                f"{name}: {size} tokens ({what}), and the limit is {limit}; a truncated prompt would be scored as if "
                "it were whole. Ask for shorter lengths, give max_length=... if the model reaches further, "
                "or an encoding without an end (rope, yarn, alibi)"
            )

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers; raises `ReachError` for a prompt that leaves no room for one."""
        self._refuse_auto_without_limit()
        self._names = {request.args[0]: request.task_name for request in requests}
        return super().generate_until(list(requests), disable_tqdm=disable_tqdm or not self._bars)

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Tokens and mask of a batch; raises `ReachError` instead of truncating."""
        ids, mask = super().tok_batch_encode(list(strings), padding_side, None, truncation)
        if self._tail and padding_side == "left":
            ids, mask = ids[:, : -len(self._tail)], mask[:, : -len(self._tail)]
        if left_truncate_len is not None:
            room = self.max_length - left_truncate_len
            for text, size in zip(strings, mask.sum(1).tolist()):
                self._refuse(text, size + room, self.max_length, f"prompt {size}, answer up to {room}")
        return ids, mask

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-likelihood in nats, is greedy) of each continuation; raises `ReachError` instead of truncating."""
        self._names = {tuple(request.args): request.task_name for request in requests}
        return super().loglikelihood(list(requests), disable_tqdm=disable_tqdm or not self._bars)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in windows of `max_length`."""
        self._refuse_auto_without_limit()
        return super().loglikelihood_rolling(list(requests), disable_tqdm=disable_tqdm or not self._bars)

    def _refuse_auto_without_limit(self) -> None:
        if self.batch_size == "auto" and self.max_length == UNLIMITED:
            raise OptionError("batch_size=auto tries a batch of max_length tokens, and this model has no end: give one")

    def _loglikelihood_tokens(self, requests: Any, *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        for key, context, answer in requests:
            # The last token is predicted and never read, so one more than the limit fits.
            size = len(context) + len(answer)
            self._refuse(key, size - 1, self.max_length, f"prompt {len(context)}, answer {len(answer)}")
        if requests:
            self._kept = min(len(c) for _, c, _ in requests), max(len(a) for _, _, a in requests)
        try:
            return super()._loglikelihood_tokens(requests, *args, **kwargs)
        finally:
            self._kept = None

    def _model_call(self, inps: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Logits (batch, kept, vocabulary) of the last positions, which hold every answer: lm-eval counts from the end.

        Logits of all positions would be the largest thing in memory: 32k tokens x 49k words are 6 GiB in fp32.
        """
        if self._kept is None or args or kwargs or not _can_keep(self.model):
            return super()._model_call(inps, *args, **kwargs)
        context, answer = self._kept
        rows, length = inps.shape
        keep = min(length, answer if rows == 1 else length - context + 1)
        mixed: Any = self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(device_type=self.device.type, dtype=mixed, enabled=mixed is not None):
            return self.model(inps, use_cache=False, logits_to_keep=keep).logits


def _can_keep(model: Any) -> bool:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "logits_to_keep" in inspect.signature(inner.forward).parameters
