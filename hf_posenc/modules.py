"""The few modules that patches share: embeddings that are silent or bounded, tables of positions, rotary buffers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .encodings import Sinusoidal
from .errors import ReachError


def check_reach(positions: Tensor, rows: int, offset: int = 0) -> None:
    """Raise `ReachError` where a number names no row in a table of `rows`, in which `offset` is that of position 0."""
    if torch.compiler.is_compiling() or positions.numel() == 0:
        return
    low, high = (int(edge) for edge in positions.aminmax())
    if low < 0 or high >= rows:
        outside, rows = (high if high >= rows else low) - offset, rows - offset
        raise ReachError(
            f"position {outside} has no row in a learned table of {rows} (positions 0 to {rows - 1}); shorten the "
            "input, stretch the table with patch_model(model, 'learned', resize='interpolate', factor=…), after "
            "unpatch_model where it is patched already, or use an encoding that has no end, such as 'rope' or 'alibi'"
        )


class SilentEmbedding(nn.Embedding):
    """A position table taken out of play: returns zeros. Its weight and its state-dict key stay as they were."""

    def forward(self, input: Tensor) -> Tensor:
        return self.weight.new_zeros(*input.shape, self.embedding_dim)


class BoundedEmbedding(nn.Embedding):
    """A position table that says clearly where it ends; `offset`: the row of position 0."""

    offset: int = 0

    def forward(self, input: Tensor) -> Tensor:
        check_reach(input, self.num_embeddings, self.offset)
        return super().forward(input)


class SinusoidalEmbedding(nn.Embedding):
    """A position table taken out of play, with sinusoids in its place; `encoding` is set by the patch.

    `offset`: the row of position 0; the rows before it, as for padding, are zeros.
    """

    encoding: Sinusoidal
    offset: int = 0

    def forward(self, input: Tensor) -> Tensor:
        found = self.encoding.vectors(input - self.offset, self.embedding_dim).to(self.weight.dtype)
        return found * (input >= self.offset)[..., None] if self.offset else found


class PositionTable(nn.Module):
    """A fresh learned table, weight (rows, dim), owned by the model and saved with it."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(table)

    def forward(self, positions: Tensor) -> Tensor:
        check_reach(positions, len(self.weight))
        return nn.functional.embedding(positions, self.weight)


@dataclass(eq=False)
class AddVectors:
    """A pre-hook of the first layer: adds the vectors of its positions to the hidden states.

    On the layer and not on the token embedding, which a caller who brings `inputs_embeds` never runs.
    """

    vectors: Callable[[Tensor], Tensor]
    positions: Callable[[dict[str, Any]], Tensor]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden, rest = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
        added = self.vectors(self.positions(kwargs).to(hidden.device))
        return (hidden + added.to(hidden), *rest), kwargs


@dataclass(eq=False)
class SinusoidVectors:
    """`Sinusoidal.vectors` for one width, as an object that can be pickled."""

    encoding: Sinusoidal
    dim: int

    def __call__(self, positions: Tensor) -> Tensor:
        return self.encoding.vectors(positions, self.dim)


@dataclass(eq=False)
class TableVectors:
    """The rows of the table that stands at `owner.posenc`, looked up at each call: PEFT may have wrapped it since."""

    owner: nn.Module

    def __call__(self, positions: Tensor) -> Tensor:
        table: Any = self.owner.posenc
        return table(positions)


class ExactBuffers(nn.Module):
    """Mixin for a host's rotary module: frequencies are recomputed from the config whenever tensors are moved or cast.

    `model.to(bfloat16)` would otherwise round them (at position 32k that is tens of radians), and `to_empty` would
    leave garbage in them; neither raises.
    """

    def _apply(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> nn.Module:
        moved = super()._apply(fn, *args, **kwargs)
        device = next(self.buffers()).device
        if device.type != "meta":
            fresh = type(self)(self.config)
            for name, buffer in fresh.named_buffers():
                self._buffers[name] = buffer.to(device)
            # a dynamic type grows its frequencies again when asked, but only past the length it thinks it has
            for name in [name for name in vars(self) if name.endswith("max_seq_len_cached")]:
                self.__dict__[name] = self.__dict__.get("original_max_seq_len")
        return moved


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off for the block; every module gets its own mode back, frozen parts of a model in training included."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def quiet_loading() -> Iterator[None]:
    """The host library's own bars for reading and writing weights left out, where they would break ours."""
    from transformers.utils import logging as untyped

    logging: Any = untyped
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Without the warning that PEFT makes Transformers give by a name it asks for, which no user can act upon."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        yield
