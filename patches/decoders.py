"""The decoders that need no code of their own: what each has beside Llama's layout, if anything.

A row is the modelling file and class of the backbone below `transformers.models`, and its `RotaryLayout`.
"""

from __future__ import annotations

from .deepseek import MLA_START, DeepseekPatch
from .rotary_host import RotaryHostPatch, RotaryLayout
from .stablelm import StableLmPatch

__all__ = ["DECODERS"]

_GEMMA = RotaryLayout(scaled_embedding=True)

DECODERS: dict[str, RotaryHostPatch] = {
    "cohere": RotaryHostPatch("cohere.CohereModel", RotaryLayout(interleaved=True, repeated=True)),
    "deepseek_v2": DeepseekPatch("deepseek_v2.DeepseekV2Model", RotaryLayout(interleaved=True, start=MLA_START)),
    "deepseek_v3": DeepseekPatch("deepseek_v3.DeepseekV3Model", RotaryLayout(start=MLA_START)),
    "gemma": RotaryHostPatch("gemma.GemmaModel", _GEMMA),
    "gemma2": RotaryHostPatch("gemma2.Gemma2Model", _GEMMA),
    "gemma3_text": RotaryHostPatch(
        "gemma3.Gemma3TextModel", RotaryLayout(layer_type="full_attention", scaled_embedding=True)
    ),
    "glm": RotaryHostPatch("glm.GlmModel", RotaryLayout(interleaved=True)),
    "glm4": RotaryHostPatch("glm4.Glm4Model", RotaryLayout(interleaved=True)),
    "gpt_neox": RotaryHostPatch("gpt_neox.GPTNeoXModel"),
    "gpt_oss": RotaryHostPatch("gpt_oss.GptOssModel"),
    "llama": RotaryHostPatch("llama.LlamaModel"),
    "mistral": RotaryHostPatch("mistral.MistralModel"),
    "mixtral": RotaryHostPatch("mixtral.MixtralModel"),
    "olmo2": RotaryHostPatch("olmo2.Olmo2Model"),
    "olmoe": RotaryHostPatch("olmoe.OlmoeModel"),
    "phi": RotaryHostPatch("phi.PhiModel"),
    "phi3": RotaryHostPatch("phi3.Phi3Model"),
    "qwen2": RotaryHostPatch("qwen2.Qwen2Model"),
    "qwen2_moe": RotaryHostPatch("qwen2_moe.Qwen2MoeModel"),
    "qwen3": RotaryHostPatch("qwen3.Qwen3Model"),
    "qwen3_moe": RotaryHostPatch("qwen3_moe.Qwen3MoeModel"),
    "smollm3": RotaryHostPatch("smollm3.SmolLM3Model", RotaryLayout(which_layers="no_rope_layers")),
    "stablelm": StableLmPatch("stablelm.StableLmModel"),
    "starcoder2": RotaryHostPatch("starcoder2.Starcoder2Model"),
}
