"""Hosts with a rotary module: one patch for all of them, and a layout that says what is an architecture's own.

What the host library has a type for goes through the config, and the host's own rotary module is built anew: the
forward path stays the stock one. For everything else that module is silenced, and the other two seams are used, or
queries and keys are turned in the attention function.
"""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass
from typing import Any, ClassVar, get_type_hints

import torch
from torch import Tensor, nn

from hf_posenc.encodings import Distance, Encoding, Geometry, Ntk, Rope, Rotation, Segmented
from hf_posenc.encodings.base import check_type
from hf_posenc.errors import OptionError, UnsupportedError
from hf_posenc.layout import SHIFT, pairs_error
from hf_posenc.ledger import Ledger
from hf_posenc.offload import held
from hf_posenc.positions import FillPositions
from hf_posenc.rotation import Pairs, cos_sin

from .base import (
    Patch,
    add_to_embedding,
    attention_refusal,
    describe_calls,
    expect,
    prove_added,
    rms,
    table_refusal,
    turns_early,
)
from .native_rope import (
    check_buffers,
    frequencies_off,
    is_native,
    refuse_scaled,
    typed,
    write_parameters,
)
from .rotary_modules import exact, per_pair, silent, stored

__all__ = ["RotaryHostPatch", "RotaryLayout"]


@dataclass(frozen=True)
class RotaryLayout:
    """What is an architecture's own, where it differs from Llama.

    `interleaved`: channel 2i turns with 2i + 1, as they reach the attention function; `start`: the field of the config
    that holds the first turned channel. `repeated`: each column of cos and sin stands twice in a row. `layer_type`: the
    type of the layers whose rotation is replaced, where every type has its own; `which_layers`: the field of the config
    that is true for layers that have positions. `scaled_embedding`: what enters the first layer is the embedding times
    the root of its width.
    """

    interleaved: bool = False
    start: str | None = None
    repeated: bool = False
    layer_type: str | None = None
    which_layers: str | None = None
    scaled_embedding: bool = False

    def __post_init__(self) -> None:
        for field, kind in get_type_hints(type(self)).items():
            check_type("RotaryLayout", field, getattr(self, field), kind)


def position_ids(kwargs: dict[str, Any]) -> Tensor:
    """Where a decoder layer is told its positions."""
    return kwargs["position_ids"]


class RotaryHostPatch(Patch):
    """Where an architecture with a rotary module keeps its positions.

    `backbone`: modelling file and class below `transformers.models`, as in "llama.LlamaModel"; raises `OptionError` for
    other text, and `backbone_type` and `refusal` an `UnsupportedError` for what is not there.
    """

    native: ClassVar[str] = "rope"

    def __init__(self, backbone: str, layout: RotaryLayout | None = None) -> None:
        self.package, _, self.backbone_class = str(backbone).partition(".")
        if not (self.package.isidentifier() and self.backbone_class.isidentifier()):
            raise OptionError(f"a backbone is named by file and class, as in 'llama.LlamaModel', got {backbone!r}")
        self.layout = layout or RotaryLayout()

    def backbone_type(self) -> type[nn.Module]:
        name = f"transformers.models.{self.package}.modeling_{self.package}"
        try:
            return getattr(importlib.import_module(name), self.backbone_class)
        except (ImportError, AttributeError) as error:
            raise UnsupportedError(
                f"this release of Transformers has no {self.backbone_class} in {name}: {error}"
            ) from error

    def geometry(self, backbone: Any) -> Geometry:
        config, embedding = backbone.config, backbone.get_input_embeddings()
        scale = config.hidden_size**0.5 if self.layout.scaled_embedding else 1.0
        return Geometry(
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            rotary_dim=self.width(config),
            rope_theta=self.parameters(config)["rope_theta"],
            max_position_embeddings=config.max_position_embeddings,
            embedding_rms=lambda: scale * rms(held(embedding)),
        )

    def parameters(self, config: Any) -> dict[str, Any]:
        """The host's rope parameters, of the layers whose rotation is replaced."""
        kind = self.layout.layer_type
        return config.rope_parameters if kind is None else config.rope_parameters[kind]

    def width(self, config: Any) -> int:
        """The channels of a head that turn."""
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(head_dim * self.parameters(config).get("partial_rotary_factor", 1.0))

    def pairs(self, config: Any) -> Pairs:
        """Which channels turn together, as they reach the attention function."""
        return Pairs(0 if self.layout.start is None else getattr(config, self.layout.start), self.layout.interleaved)

    def pairs_error(self, backbone: Any, encoding: Encoding, ids: Tensor) -> float | None:
        if not (isinstance(encoding, Rotation) and (encoding.turns_late or isinstance(encoding, Distance))):
            return None
        layers = self.layers(backbone.config, encoding)
        cos, sin = self.tables(backbone, torch.tensor([[0, SHIFT]]))
        step = cos[:, 1:] / cos[:, :1], sin[:, 1:] / cos[:, :1]  # without the host's own factor
        return pairs_error(backbone, ids, layers[0] if layers else 0, self.pairs(backbone.config), step)

    def layer_types(self, config: Any) -> set[str | None]:
        """The types of layers that have tables of their own, or None alone."""
        return {None} if self.layout.layer_type is None else set(config.layer_types)

    def layers(self, config: Any, encoding: Encoding) -> tuple[int, ...] | None:
        """The layers in which an encoding acts, None for all: those whose own positions it takes the place of."""
        if self.layout.layer_type is not None and isinstance(encoding, Rotation):
            return tuple(i for i, kind in enumerate(config.layer_types) if kind == self.layout.layer_type)
        if self.layout.which_layers is not None:
            return tuple(i for i, has in enumerate(getattr(config, self.layout.which_layers)) if has)
        return None

    def refusal(self, encoding: Encoding, config: Any) -> str | None:
        layout = self.layout
        for field in (layout.start, layout.which_layers, None if layout.layer_type is None else "layer_types"):
            if field is not None and not hasattr(config, field):
                return f"the layout of its patch names {field!r}, and this config has no such field"
        if layout.layer_type is not None and layout.layer_type not in config.rope_parameters:
            return f"the layout of its patch names layers of type {layout.layer_type!r}, and this config none"
        if encoding.seam in ("rotation", "score") and self.layers(config, encoding) == ():
            return f"it goes to the layers with {self.layout.layer_type or 'a rotation'}, and this config has none"
        capped = getattr(config, "attn_logit_softcapping", None) is not None
        if encoding.seam == "score" and capped and config._attn_implementation == "flex_attention":
            return "FlexAttention would soft-cap its bias with the scores; model.set_attn_implementation('eager') first"
        return table_refusal(encoding, config) or attention_refusal(encoding, config)

    def complete(self, encoding: Encoding, backbone: Any) -> Encoding:
        config = backbone.config
        check_buffers(backbone.rotary_emb, config)
        refuse_scaled(encoding, self.parameters(config), config.max_position_embeddings)
        width = self.width(config)
        if isinstance(encoding, Rotation) and width % 2:
            raise OptionError(
                f"{encoding.name}: rotations turn pairs of channels, and this host's heads are {width} wide"
            )
        return super().complete(encoding, backbone)

    def is_native_result(self, encoding: Encoding) -> bool:
        return is_native(encoding)

    def apply(self, backbone: Any, encoding: Encoding, ledger: Ledger) -> None:
        config, old = backbone.config, backbone.rotary_emb
        host, device = old.__class__, next(old.buffers()).device
        geometry = self.geometry(backbone)
        if turns_early(encoding):
            self.edit_config(config, encoding, host)
            ledger.set_module(backbone, "rotary_emb", exact(host)(config).to(device))
        else:
            ledger.set_module(backbone, "rotary_emb", self.rotary_beside(encoding, config, host).to(device))
        if encoding.inside_attention:
            layers, how = self.layers(config, encoding), {"host_turns": True, "stores_turned": True}
            describe_calls(backbone, encoding, geometry, ledger, self.pairs(config), layers, **how)
        elif encoding.seam == "embedding":  # and nope is silence alone
            add_to_embedding(backbone, backbone.layers[0], encoding, geometry, position_ids, ledger)
            ledger.add_pre_hook(backbone, FillPositions())

    def rotary_beside(self, encoding: Encoding, config: Any, host: Any) -> nn.Module:
        """The host's rotary module for what acts elsewhere: silent, or plain RoPE below an encoding by segments."""
        if isinstance(encoding, Segmented):
            plain = copy.deepcopy(config)
            rope = Rope(rope_theta=encoding.theta, original_max_position_embeddings=encoding.length)
            self.edit_config(plain, rope, host)
            return exact(host)(plain)
        waiting = isinstance(encoding, Distance) and encoding.stores_turned
        rotary: Any = (stored if waiting else silent)(host)(config)
        rotary.silent_type = self.layout.layer_type if isinstance(encoding, Rotation) else None
        if waiting:
            rotary.encoding, rotary.pairs, rotary.repeated = encoding, self.width(config) // 2, self.layout.repeated
        return rotary

    def edit_config(self, config: Any, encoding: Rotation, host: type[nn.Module]) -> None:
        """Write an encoding that the host library can hold into the model's own config, for its rotary class `host`."""
        old, kind = self.parameters(config), self.layout.layer_type
        length = encoding.original_max_position_embeddings
        if length is not None:  # first: the host library compares it with the factor, and warns where they disagree
            config.max_position_embeddings = max(encoding.reach() or length, length)
        kept = {key: old[key] for key in self.kept(encoding) if key in old}
        default = isinstance(encoding, (Rope, Ntk)) and not encoding.resonance
        if getattr(config, "head_dim", 0) is None and not default:  # which others don't read
            config.head_dim = config.hidden_size // config.num_attention_heads
        with torch.device("cpu"):  # a model may be put together on meta, where no frequencies can be read or compared
            write_parameters(
                config, encoding, self.width(config), kept, kind, lambda changed: self.turns(host(changed))
            )

    def turns(self, rotary: Any) -> bool:
        """Whether a rotary module can be called, far out and again."""
        kind = () if self.layout.layer_type is None else (self.layout.layer_type,)
        try:
            for _ in range(2):
                rotary(torch.zeros(1), torch.full((1, 1), 10**6), *kind)
        except UnboundLocalError:  # in 5.4.0, of a layer type's longrope, the second time
            return False
        return True

    def kept(self, encoding: Rotation) -> tuple[str, ...]:
        """The rope parameters of the host that stay as they are."""
        return ("partial_rotary_factor",)

    def numbers(self, backbone: Any) -> tuple[Tensor, float]:
        """The frequencies in the host's rotary module and its factor on cos and sin."""
        prefix = "" if self.layout.layer_type is None else f"{self.layout.layer_type}_"
        rotary = backbone.rotary_emb
        return getattr(rotary, f"{prefix}inv_freq"), float(getattr(rotary, f"{prefix}attention_scaling"))

    def tables(self, backbone: Any, positions: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """(cos, sin) that the host's rotary module gives at `positions` (batch, n), one column a pair."""
        device, kind = next(backbone.rotary_emb.buffers()).device, layer_type or self.layout.layer_type
        given = () if kind is None else (kind,)
        found = backbone.rotary_emb(torch.zeros(1, device=device), positions.to(device), *given)
        return per_pair(found, self.width(backbone.config) // 2, self.layout.repeated)

    def owns(self, backbone: Any, encoding: Encoding) -> bool:
        if not isinstance(encoding, Rotation) or not is_native(encoding):
            return False
        own, (found, scaling) = self.parameters(backbone.config), self.numbers(backbone)
        if isinstance(encoding, Segmented):
            return all(own.get(key) == value for key, value in (typed(encoding, 2 * len(found)) or {}).items())
        wanted, factor = encoding.inv_freq(2 * len(found))
        return frequencies_off(found, wanted) < 1e-5 and abs(scaling - factor) < 1e-6

    def prove(self, backbone: Any, encoding: Encoding) -> None:
        if turns_early(encoding):
            self.prove_frequencies(backbone, encoding)
        elif isinstance(encoding, Segmented):
            self.prove_frequencies(backbone, Rope(rope_theta=encoding.theta))
        else:
            self.prove_silence(backbone, encoding)
        if encoding.inside_attention:
            attention = next(
                m for m in backbone.layers[-1].modules() if hasattr(m, "layer_idx") and hasattr(m, "config")
            )
            name = attention.config._attn_implementation
            expect(name.startswith("posenc_"), f"the layers still use {name} attention")
        elif encoding.seam == "embedding":
            prove_added(backbone.layers[0])

    def prove_frequencies(self, backbone: Any, encoding: Rotation) -> None:
        """The host's rotary module turns by the encoding's frequencies."""
        found, found_scaling = self.numbers(backbone)
        wanted, scaling = encoding.inv_freq(self.width(backbone.config))
        expect(found.shape == wanted.shape, f"the host turns {len(found)} pairs of channels, not {len(wanted)}")
        off = frequencies_off(found, wanted)
        expect(off < 1e-5, f"the host's frequencies differ from {encoding.name}'s by up to {off:.1e}")
        expect(abs(found_scaling - scaling) < 1e-6, f"cos and sin are scaled by {found_scaling}, not by {scaling}")

    def prove_silence(self, backbone: Any, encoding: Encoding) -> None:
        """The host's rotary module turns nothing, or what keys wait turned by, in the layers where it must not."""
        for kind in {self.layout.layer_type} if isinstance(encoding, Rotation) else self.layer_types(backbone.config):
            cos, sin = self.tables(backbone, torch.tensor([[0, 7]]), kind)
            wanted = waiting_tables(encoding, torch.tensor([[0, 7]]), cos.shape[-1])
            apart = max(float((x.cpu() - y).abs().max()) for x, y in zip((cos, sin), wanted))
            expect(apart < 1e-5, "the host's own rotation is still there")


def waiting_tables(encoding: Encoding, positions: Tensor, pairs: int) -> tuple[Tensor, Tensor]:
    """cos and sin (batch, n, pairs) of a host whose rotation is taken out: of what keys wait turned by, if anything."""
    if not isinstance(encoding, Distance):
        return torch.ones(*positions.shape, pairs), torch.zeros(*positions.shape, pairs)
    cos, sin = cos_sin(*encoding.inv_freq(2 * pairs), encoding.stored(positions))
    return cos[..., :pairs], sin[..., :pairs]
