"""A short random input for one patched model, and the checks that `verify` makes with it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from .encodings import Alibi, Distance, Learned, LogScaled, Segmented
from .errors import EffectError, UnsupportedError
from .formulas import check_numbers
from .modules import quiet_loading
from .offload import execution_device, is_offloaded
from .patches import Patch
from .patching import PatchState
from .positions import cache_argument
from .registry import ENCODINGS

PROBE = 48  # tokens; enough for a few steps on either side of a segment's end
SAVE_LIMIT = 2 * 2**30  # bytes of weights above which nothing is written to disk unless asked

# largest difference of logits allowed, as a share of the largest logit: a few roundings of the dtype
_SHARE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class Check:
    """One line of the table: `passed` is None where the check was not made, and `detail` says why."""

    name: str
    passed: bool | None
    figure: float | None
    limit: float | None
    detail: str


@dataclass
class Probe:
    """A short random input for one model, and the checks made with it."""

    model: Any
    backbone: Any
    state: PatchState
    patch: Patch
    tokenizer: Any

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        special = {*(getattr(self.tokenizer, "all_special_ids", None) or ()), self.backbone.config.pad_token_id}
        self.length = self._length()
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        allowed = torch.tensor([i for i in range(vocabulary) if i not in special])
        chosen = torch.randint(len(allowed), (1, self.length), generator=generator)
        self.ids = allowed[chosen].to(execution_device(self.backbone.get_input_embeddings()))
        start = self._start() + self.patch.first_position(self.backbone.config)
        self.positions = torch.arange(self.length, device=self.ids.device)[None] + start
        self.positions[:, self.length // 2 :] += self._skip()
        self.mask = torch.ones_like(self.ids)  # without one, positions that skip begin a new document

    def _length(self) -> int:
        limits = [PROBE]
        if isinstance(self.state.encoding, Learned):
            limits.append(self.table_rows())
        return min(limits)

    def table_rows(self) -> int:
        """Rows of the learned table in effect."""
        return len(self.patch.table(self.backbone).weight) - self.patch.rows_before(self.backbone.config)

    def _start(self) -> int:
        """Half a probe before the trained length's end where something begins there, so that calls cross it."""
        crossed = isinstance(self.state.encoding, Segmented) or self.scales_queries()
        return max(self.trained_length() - self.length // 2, 0) if crossed else 0

    def scales_queries(self) -> bool:
        """Whether the encoding makes far queries longer."""
        return isinstance(self.state.encoding, LogScaled) and self.state.encoding.logn

    def trained_length(self) -> int:
        """L of an encoding that knows it, in tokens."""
        assert isinstance(self.state.encoding, LogScaled)
        return self.state.encoding.length

    def _skip(self) -> int:
        """What the second half leaves out, so that its tokens see those of the first on both sides of a border."""
        encoding = self.state.encoding
        border = encoding.border() if isinstance(encoding, Distance) else None
        return 0 if border is None else max(border - self.length // 2, 0)

    def logits(self, ids: Tensor, **kwargs: Any) -> Tensor:
        """One row of numbers a token: logits, or what a bare backbone gives."""
        out = self.model(input_ids=ids, **kwargs)
        found = getattr(out, "logits", None)
        found = getattr(out, "last_hidden_state", None) if found is None else found
        if found is None or found.shape[:2] != ids.shape:
            raise UnsupportedError(
                f"verify needs one output a token, and {type(self.model).__name__} gives none; verify its backbone, "
                f"e.g. verify(model.{getattr(self.model, 'base_model_prefix', '') or 'base_model'})"
            )
        return found.float()

    def limit(self, logits: Tensor) -> float:
        # 8-bit activations are rounded anew in every call, a hair's breadth this way or that
        rounded = bool(getattr(self.model, "is_quantized", False))
        share = 2e-1 if rounded else _SHARE.get(next(self.model.parameters()).dtype, 1e-1)
        return share * max(1.0, float(logits.abs().max()))

    def compare(self, name: str, a: Tensor, b: Tensor, detail: str) -> Check:
        difference, limit = float((a - b).abs().max()), self.limit(a)
        return Check(name, difference <= limit, difference, limit, detail)

    def in_effect(self) -> Check:
        """The logits with the patch against those with it set aside."""
        after = self.logits(self.ids, position_ids=self.positions, attention_mask=self.mask)
        try:
            self.patch.prove(self.backbone, self.state.encoding)
        except EffectError as error:
            return Check("in effect", False, None, None, str(error))
        encoding = self.state.encoding
        if isinstance(encoding, Learned) and encoding.resize is not None and not self.state.resized_on_disk:
            rows = self.table_rows()
            with self.state.ledger.suspended():
                own = self.table_rows()
            detail = f"learned, {encoding.resize}: rows of the table; the host's own has {own}"
            return Check("in effect", rows == int(own * float(encoding.factor or 1)), float(rows), None, detail)
        if self.state.resized_on_disk:
            return Check(
                "in effect", True, None, None, f"{self.state.encoding.name}: the table on disk is the patched one"
            )
        with self.state.ledger.suspended():
            n, first = min(self.length, self.stock_reach()), self.patch.first_position(self.backbone.config)
            at = self.positions
            if int(at.max()) - first >= self.stock_reach():
                at = torch.arange(self.length, device=at.device)[None] + first
            before = self.logits(self.ids[:, :n], position_ids=at[:, :n], attention_mask=self.mask[:, :n])
        after = after[:, :n]
        difference = float((after - before).abs().max())
        if self.is_own():
            return Check(
                "in effect",
                difference <= self.limit(after),
                difference,
                self.limit(after),
                f"{self.state.encoding.name} is this model's own encoding: nothing may change",
            )
        return Check(
            "in effect", difference > 0, difference, None, f"{self.state.encoding.name}: logits moved by this much"
        )

    def acts(self) -> Check:
        """Every second position left out: that must move the logits, and with no positions at all it must not."""
        encoding, moved, how = self.state.encoding, self.positions - self.positions[:, :1], "halved positions"
        moved = moved // 2 + self.positions[:, :1]
        none = encoding.seam == "none"
        if none and self.scales_queries():  # which between two neighbours is no difference to be seen
            none, moved, how = False, self.positions + 7 * self.trained_length(), "positions far out"
        there, here = (self.logits(self.ids, position_ids=p, attention_mask=self.mask) for p in (moved, self.positions))
        difference, limit = float((there - here).abs().max()), self.limit(here)
        ok = difference <= limit if none else difference > limit / 10
        detail = f"{how} move nothing, as they must" if none else f"{how} move the logits by this much"
        return Check("positions act", ok, difference, limit if none else None, detail)

    def stock_reach(self) -> int:
        """The positions that the unpatched host accepts."""
        reach = self.patch.own_reach(self.backbone.config)
        return 2**31 if reach is None else reach

    def is_own(self) -> bool:
        """Whether the encoding is the one that the host has without a patch."""
        encoding = self.state.encoding
        with self.state.ledger.suspended():
            if self.patch.owns(self.backbone, encoding):
                return True
        if encoding.name != self.patch.native or self.scales_queries():
            return False
        if isinstance(encoding, Alibi):
            return torch.equal(encoding.slopes(8), Alibi().slopes(8))
        return isinstance(encoding, Learned) and encoding.options() == {}

    def numbers(self) -> Check:
        """The tables in effect against the formula in double precision."""
        return Check(*check_numbers(self.backbone, self.state.encoding, self.patch))

    def paired(self) -> Check | None:
        """Our rotation against the host's own, where ours takes its place in the attention function."""
        try:
            self.patch.prove(self.backbone, self.state.encoding)
        except EffectError:  # to set a damaged patch aside and put it back would mend it
            return None
        with self.state.ledger.suspended():
            found = self.patch.pairs_error(self.backbone, self.state.encoding, self.ids)
        if found is None:
            return None
        limit = 10 * _SHARE.get(next(self.model.parameters()).dtype, 1e-1)
        return Check("pairs = the host's", found <= limit, found, limit, "queries and keys five tokens on, by us")

    def cached(self) -> Check:
        """One call against a prefill, a chunk and single steps with a cache."""
        if not self.patch.cached(self.backbone.config):
            return Check("cached = uncached", None, None, None, "this model takes no cache")
        whole = self.logits(self.ids, position_ids=self.positions, attention_mask=self.mask, use_cache=False)
        parts, cache, at = [], DynamicCache(config=self.backbone.config), 0
        for n in (self.length // 2 - 2, 3, *[1] * 4, self.length - self.length // 2 - 5):
            if n <= 0:
                continue
            cut = slice(at, at + n)
            given = {cache_argument(self.model): cache, "attention_mask": self.mask[:, : at + n]}
            parts.append(self.logits(self.ids[:, cut], position_ids=self.positions[:, cut], use_cache=True, **given))
            at += n
        return self.compare(
            "cached = uncached", whole[:, :at], torch.cat(parts, 1), f"{at} tokens, prefill, chunk, steps"
        )

    def padded(self) -> Check:
        """A short row left-padded in a batch against the same row alone."""
        short = self.length // 2
        alone = self.logits(self.ids[:, :short])
        padding = self.ids[:, :1].expand(1, self.length - short)
        batch = torch.cat((torch.cat((padding, self.ids[:, :short]), 1), self.ids))
        mask = torch.ones_like(batch)
        mask[0, : self.length - short] = 0
        together = self.logits(batch, attention_mask=mask)[:1, self.length - short :]
        return self.compare(
            "padded = alone", alone, together, f"{short} tokens behind {self.length - short} of padding"
        )

    def reloaded(self, save: bool | None) -> Check:
        """The logits after a trip to disk."""
        from .checkpoint import from_pretrained

        name, encoding = "save → load", self.state.encoding
        if encoding.name not in ENCODINGS:
            return Check(name, None, None, None, f"{encoding.name} has no row in the registry: no folder can name it")
        size = sum(p.numel() * p.element_size() for p in self.model.parameters())
        if save is False:
            return Check(name, None, None, None, "save=False")
        if save is None and size > SAVE_LIMIT:
            return Check(
                name, None, None, None, f"{size / 2**30:.1f} GiB would be written; verify(model, save=True) does it"
            )
        if save is None and getattr(self.model, "is_quantized", False):  # 4 bits on a CPU do not survive being saved
            return Check(name, None, None, None, "weights are quantised; verify(model, save=True) writes them")
        if save is None and is_offloaded(self.model):
            return Check(
                name, None, None, None, "weights are offloaded; verify(model, save=True) gathers and writes them"
            )
        if self.model.__class__.__module__.startswith("peft"):
            return Check(name, None, None, None, "an adapter: see hf_posenc.save_pretrained")
        before = self.logits(self.ids, position_ids=self.positions, attention_mask=self.mask)
        with quiet_loading(), tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            dtype = next(self.model.parameters()).dtype
            with self.state.ledger.suspended():  # the one chosen before the patch, and not what is the default
                attention = self.backbone.config._attn_implementation
            given = {} if attention is None else {"attn_implementation": attention}
            again = from_pretrained(folder, dtype=dtype, auto_class=type(self.model), **given).to(self.ids.device)
            after = replace(self, model=again).logits(self.ids, position_ids=self.positions, attention_mask=self.mask)
        return self.compare(name, before, after, "a temporary folder, hf_posenc.from_pretrained")
