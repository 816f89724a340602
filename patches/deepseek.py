"""DeepSeek: latent attention, of whose heads only the last part turns, and a softmax scale that knows of the scaling.

Where the config's YaRN names `mscale_all_dim`, the host multiplies its softmax scale by that temperature, in the
constructor of its attention: the scale has to follow the config in and out.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from hf_posenc.encodings import Encoding, Rotation, Yarn
from hf_posenc.ledger import Ledger

from .base import expect, turns_early
from .rotary_host import RotaryHostPatch

__all__ = ["MLA_START", "DeepseekPatch"]

MLA_START = "qk_nope_head_dim"  # of a head's channels, those before are never turned
_MSCALE = ("mscale", "mscale_all_dim")


class DeepseekPatch(RotaryHostPatch):
    """A rotary host whose softmax scale depends on its rope parameters."""

    def complete(self, encoding: Encoding, backbone: Any) -> Encoding:
        encoding = super().complete(encoding, backbone)
        if isinstance(encoding, Yarn) and encoding.attention_factor is None and self.has_mscale(backbone.config):
            trial = copy.deepcopy(backbone.config)
            host = type(backbone.rotary_emb)
            self.edit_config(trial, encoding.but(resonance=False), host)
            encoding = encoding.but(attention_factor=float(host(trial).attention_scaling))
        return encoding

    def has_mscale(self, config: Any) -> bool:
        """Whether this host shares YaRN's temperature out between cos and sin and the softmax."""
        return all(self.parameters(config).get(key) for key in _MSCALE)

    def edit_config(self, config: Any, encoding: Rotation, host: type[nn.Module]) -> None:
        super().edit_config(config, encoding, host)
        if isinstance(encoding, Yarn) and self.has_mscale(config):  # of which the attention makes its softmax scale
            config.rope_parameters["factor"] = float(encoding.factor)

    def kept(self, encoding: Rotation) -> tuple[str, ...]:
        return (*super().kept(encoding), *(_MSCALE if isinstance(encoding, Yarn) else ()))

    def apply(self, backbone: Any, encoding: Encoding, ledger: Ledger) -> None:
        super().apply(backbone, encoding, ledger)
        for layer in backbone.layers:
            ledger.set_attribute(layer.self_attn, "scaling", self.scaling(backbone, encoding))

    def scaling(self, backbone: Any, encoding: Encoding) -> float:
        """The softmax scale that the host's own attention has under the encoding's rope parameters."""
        config = backbone.config
        if not turns_early(encoding):
            config = copy.deepcopy(config)
            config.rope_parameters = {"rope_type": "default", "rope_theta": self.parameters(config)["rope_theta"]}
        with torch.device("meta"):
            return type(backbone.layers[0].self_attn)(config, layer_idx=0).scaling

    def prove(self, backbone: Any, encoding: Encoding) -> None:
        super().prove(backbone, encoding)
        wanted = self.scaling(backbone, encoding)
        found = {layer.self_attn.scaling for layer in backbone.layers}
        expect(found == {wanted}, f"the softmax scale is {sorted(found)}, not {wanted}")
