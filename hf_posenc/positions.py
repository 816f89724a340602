"""Where every token of a call stands: computed once a forward, and carried along with the call, never on the model.

A value kept on the model would be read again by gradient checkpointing after another forward has overwritten it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import StaticLayer

from . import rotation, turned_keys, views
from .attention import own_name
from .biases import CallBias, bias_of_call
from .encodings import Alibi, Bias, Distance, Encoding, LogScaled, Rotation, Segmented
from .encodings.distance import zero
from .encodings.rotary import Frequencies
from .errors import OptionError
from .linear_bias import Once
from .turned_keys import TurnedKeys

HIDDEN = -1e3  # what a mask of numbers adds where a key must not be seen, or less
_POSITIONS = "_posenc_positions"  # an attribute of a cache


class Call(NamedTuple):
    """What one forward call tells every layer about positions; a named tuple so that tensors in it follow devices.

    `query_positions` (batch or 1, n) and `key_positions` (batch or 1, keys so far), in tokens; `plain`, whether the
    latter are what the mask alone would tell; `cos`, `sin` of the queries for hosts that turn early, float32; `turns`
    for those that turn late; `slopes` (heads,) of a linear bias; `query_scale` (batch or 1, n), what each query is
    multiplied with.
    `layers`: the indices of the layers in which these three act, None for all of them; `both_ways`: whether queries see
    later keys, so that a bias falls on either side; `views` of an encoding that sees some pairs at another distance;
    `bias`: what else is added to the scores; `kept`: keys that were turned for an earlier call; `once`: what the layers
    make of early tables or a linear bias, each part by the first of them.
    """

    query_positions: Tensor
    key_positions: Tensor
    plain: bool = True
    cos: Tensor | None = None
    sin: Tensor | None = None
    turns: tuple[rotation.Turn, ...] = ()
    slopes: Tensor | None = None
    layers: tuple[int, ...] | None = None
    both_ways: bool = False
    query_scale: Tensor | None = None
    views: views.Views | None = None
    bias: CallBias | None = None
    kept: TurnedKeys | None = None
    once: Once | None = None

    def early(self, like: Tensor, pairs: rotation.Pairs) -> tuple[Tensor, Tensor]:
        """The tables of the queries, `prepared` for tensors like this one by the first layer that asks."""
        cos, sin, once = self.cos, self.sin, self.once
        assert cos is not None and sin is not None and once is not None
        kind = ("early", like.dtype, like.device, pairs)
        return once.make(kind, None, lambda: rotation.prepared(cos.to(like.device), sin.to(like.device), like, pairs))


def take(kwargs: dict[str, Any], *names: str) -> Any:
    """The first of `names` that is given and not None: the host library renames its arguments between releases."""
    return next((kwargs[name] for name in names if kwargs.get(name) is not None), None)


def find_cache(kwargs: dict[str, Any]) -> Any:
    """The cache of a call, by its present or its earlier name."""
    return take(kwargs, "cache", "past_key_values", "layer_past")


def cache_argument(model: nn.Module) -> str:
    """What this release of the host library calls the cache among the arguments of a model's forward."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of `module.forward` by name."""
    if not args:
        return dict(kwargs)
    find = argument_names if torch.compiler.is_compiling() else argument_names_once
    return {**dict(zip(find(type(module).forward), args)), **kwargs}


def argument_names(forward: Callable[..., Any]) -> list[str]:
    """What a method calls its arguments, in their order."""
    return list(inspect.signature(forward).parameters)[1:]


argument_names_once = functools.cache(argument_names)  # a tenth of a millisecond, in every step


def find_tokens(kwargs: dict[str, Any]) -> tuple[Tensor, int]:
    """The ids or the embeddings of a call, and how many tokens long its rows are; raises `OptionError` with neither."""
    if kwargs.get("input_ids") is not None:
        return kwargs["input_ids"], kwargs["input_ids"].shape[-1]
    if kwargs.get("inputs_embeds") is not None:
        return kwargs["inputs_embeds"], kwargs["inputs_embeds"].shape[-2]
    raise OptionError("a forward call needs input_ids or inputs_embeds, and got neither")


def locate(kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, int, bool]:
    """Positions of a call's queries and of all keys it can see, the number of keys before it, and `Call.plain`.

    Queries: `position_ids` where given, else counted along the mask, so that padding does not count. Keys: what the
    cache remembers of earlier calls (see `RememberPositions`), else counted along the mask; then the queries' own.
    """
    tokens, n = find_tokens(kwargs)
    cache = find_cache(kwargs)
    if torch.compiler.is_compiling() and is_fixed(cache):
        return locate_in_buffer(kwargs, cache)
    past = int(cache.get_seq_length()) if cache is not None else 0
    counted = count_along_mask(kwargs.get("attention_mask"), past + n)
    if counted is None:
        counted = torch.arange(past + n, device=tokens.device)[None]
    counted = counted.to(tokens.device)
    given = kwargs.get("position_ids")
    queries = counted[:, past:] if given is None else given.to(tokens.device).reshape(-1, n)
    as_counted = given is None or is_plain(queries, counted[:, past:])
    plain = as_counted and not may_hide_old_keys(kwargs.get("attention_mask"))
    if past == 0:
        return queries, queries, past, plain
    earlier = remembered(cache, past, tokens.shape[0])
    if earlier is None and as_counted:
        return queries, counted.expand(max(len(counted), len(queries)), -1), past, plain
    earlier = counted[:, :past] if earlier is None else earlier.to(tokens.device)
    rows = max(len(earlier), len(queries))
    keys = torch.cat((earlier.expand(rows, -1), queries.expand(rows, -1)), dim=1)
    return queries, keys, past, plain and is_plain(keys, counted)


def is_fixed(cache: Any) -> bool:
    """Whether every layer of a cache is one buffer, filled from its first slot on, and nothing more is known of it."""
    layers = getattr(cache, "layers", None) or [None]
    return all(type(layer) is StaticLayer for layer in layers) and not hasattr(cache, _POSITIONS)


def locate_in_buffer(kwargs: dict[str, Any], cache: Any) -> tuple[Tensor, Tensor, int, bool]:
    """`locate` for the compiler, to which a number that a tensor holds is none: all slots are counted."""
    tokens, n = find_tokens(kwargs)
    past, mask = cache.get_seq_length(), kwargs.get("attention_mask")
    width = mask.shape[-1] if isinstance(mask, Tensor) else cache.layers[0].max_cache_len
    counted = count_along_mask(mask, width)
    keys = torch.arange(width, device=tokens.device)[None] if counted is None else counted.to(tokens.device)
    slots = past + torch.arange(n, device=tokens.device)
    given = kwargs.get("position_ids")
    queries = keys.index_select(1, slots) if given is None else given.to(tokens.device).reshape(-1, n)
    return queries, keys, past, True


def is_plain(positions: Tensor, counted: Tensor) -> bool:
    """Whether positions are those counted along the mask; taken for granted while the compiler traces."""
    return torch.compiler.is_compiling() or positions is counted or bool((positions == counted).all())


def may_hide_old_keys(mask: Any) -> bool:
    """Whether later calls with such a mask, prepared and 4-D, may tell nothing of the first keys: a window forgets."""
    return (isinstance(mask, Tensor) and mask.ndim == 4) or (isinstance(mask, dict) and "full_attention" not in mask)


def remembered(cache: Any, past: int, batch: int) -> Tensor | None:
    """The positions (batch or 1, past) that went with a cache's first `past` keys, or None where it knows none."""
    known = getattr(cache, _POSITIONS, None)
    if known is None or known.shape[1] < past or len(known) not in (1, batch):
        return None
    return known[:, :past]


def count_along_mask(mask: Any, length: int) -> Tensor | None:
    """Position of each of the first `length` slots by counting the unmasked ones before it, (batch, length), or None.

    In a prepared mask (batch, 1, n, keys) a key is padding where no query of the call sees it. A window that hides old
    keys from every query of a call is not told from padding: such a caller gives `position_ids` from the first call on.
    """
    if isinstance(mask, dict):
        mask = mask.get("full_attention")
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4):
        return None
    if mask.ndim == 4:
        mask = (mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] > HIDDEN).any(dim=1)
    valid = (mask[:, :length] > 0).long()
    if valid.shape[1] < length:
        return None
    return (valid.cumsum(-1) - 1).clamp(min=0)


@dataclass(eq=False)
class RememberPositions:
    """A hook after a backbone: leaves the positions of all keys so far on the cache that holds those keys.

    So a later call knows of positions that skipped; what the mask tells anyway is not kept, as rows of a cache may be
    put in another order. On the cache, which is the caller's own, and not on the model; a cropped cache uses the first
    of them. A traced call leaves none: its positions go up by one a token.
    """

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        call = self.find_call(kwargs)
        if call is None or output is None or torch.compiler.is_compiling():
            return
        parts = output.values() if isinstance(output, dict) else output
        cache = next((part for part in parts if hasattr(part, "get_seq_length")), None)
        if cache is not None:
            setattr(cache, _POSITIONS, None if call.plain else call.key_positions)

    def find_call(self, kwargs: dict[str, Any]) -> Call | None:
        """The `Call` of the forward that has just ended."""
        return kwargs.get("posenc")


@dataclass(eq=False)
class FillPositions:
    """A pre-hook of a backbone: a call that brings a padding mask and no `position_ids` gets them from the mask.

    `always`: also one without a mask, for hosts that would read them from a buffer with an end.
    """

    always: bool = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = named_arguments(module, args, kwargs)
        wanted = self.always or isinstance(kwargs.get("attention_mask"), Tensor)
        if kwargs.get("position_ids") is None and wanted:
            kwargs["position_ids"] = locate(kwargs)[0]
        return (), kwargs


@dataclass(eq=False)
class DescribeCall:
    """A pre-hook of a backbone: puts a `Call` into the keyword arguments, which travel to every attention layer.

    `through_attention` says that the encoding acts inside the attention function, which must then be ours; `pairs`
    and `layers` where in a head, and in which layers; `host_turns`, that the host does by itself what is turned before
    keys are cached; `stores_turned`, that queries and keys of a `Distance` are turned by then by what those wait turned
    by.
    """

    encoding: Encoding
    rotary_dim: int
    num_heads: int
    through_attention: bool
    pairs: rotation.Pairs = rotation.HALVES
    layers: tuple[int, ...] | None = None
    both_ways: bool = False
    host_turns: bool = False
    stores_turned: bool = False
    differences: rotation.Differences | None = field(default=None, init=False)
    frequencies: Frequencies | None = field(default=None, init=False)
    slopes: Tensor | None = field(default=None, init=False)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = named_arguments(module, args, kwargs)
        if self.through_attention:
            keep_attention(module)
        call = self.describe(kwargs)
        if isinstance(self.encoding, Bias):
            call = call._replace(bias=bias_of_call(module, self.encoding, call))
        if kwargs.get("position_ids") is None and isinstance(kwargs.get("attention_mask"), (Tensor, dict)):
            kwargs["position_ids"] = call.query_positions
        return (), {**kwargs, "posenc": call}

    def describe(self, kwargs: dict[str, Any]) -> Call:
        """The `Call` of a forward with these keyword arguments."""
        queries, keys, past, plain = locate(kwargs)
        scale = self.encoding.query_scale(queries) if isinstance(self.encoding, LogScaled) else None
        call = Call(queries, keys, plain, layers=self.layers, query_scale=scale)
        if isinstance(self.encoding, Rotation) and self.host_turns and not self.encoding.turns_late:
            return call
        if isinstance(self.encoding, Segmented):
            return self.describe_segments(self.encoding, call, past, find_cache(kwargs))
        if isinstance(self.encoding, Distance):
            early = self.stores_turned and self.encoding.stores_turned
            stored = self.encoding.stored if early else zero
            made = views.describe(
                self.encoding, self.rotary_dim, queries, keys, past, self.pairs, self.both_ways, stored
            )
            if early and not self.host_turns:
                call = self.turned_early(call, self.encoding.inv_freq, stored(queries))
            return call._replace(views=made)
        if isinstance(self.encoding, Rotation):
            return self.turned_early(call, self.encoding.inv_freq, queries)
        if isinstance(self.encoding, Alibi):
            slopes = self.encoding.slopes(self.num_heads) if self.slopes is None else self.slopes
            if not torch.compiler.is_compiling():
                self.slopes = slopes
            return call._replace(slopes=slopes.to(queries.device), once=Once())
        return call

    def turned_early(self, call: Call, inv_freq: Callable[[int], Frequencies], positions: Tensor) -> Call:
        """A call with the tables of its own tokens, for hosts that leave it to us to turn them before the cache."""
        found = self.frequencies or inv_freq(self.rotary_dim)
        if not torch.compiler.is_compiling():
            self.frequencies = found
        cos, sin = rotation.cos_sin(*found, positions)
        return call._replace(cos=cos, sin=sin, once=Once())

    def describe_segments(self, encoding: Segmented, call: Call, past: int, cache: Any) -> Call:
        """A call of an encoding by segments: what is turned early, what late, and what the last step left turned."""
        dim, keys = self.rotary_dim, call.key_positions
        if self.differences is None:
            self.differences = rotation.Differences(encoding, dim)
        turns = rotation.turns(self.differences, call.query_positions, keys, past, self.pairs)
        call = call._replace(turns=turns)
        if not self.host_turns:
            call = self.turned_early(call, encoding.plain_inv_freq, call.query_positions)
        kept = turned_keys.find(cache, past) if len(turns) == 1 else None
        if kept is None:
            turned_keys.drop(cache)
        else:
            kept.begin((encoding, turns[0].segments), keys, past)
        return call._replace(kept=kept)


def keep_attention(module: nn.Module) -> None:
    """Where the user has chosen another attention since the patch, choose ours over that one, or raise."""
    config: Any = module.config
    name = config._attn_implementation
    if not name.startswith("posenc_"):
        config._attn_implementation = own_name(name)
