"""What is particular to one of the hosts that are no rotary decoders, and what is refused on them."""

import math
from typing import Any

import pytest
import torch
from other_hosts import CONFIGS, HOSTS, OWN, Pair, pair, text, tiny_host
from pairs import LENGTH, assert_same, difference, generate, in_pieces, logits
from refusals import assert_refused
from test_transaction import LargestTensor
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification, BertModel

import hf_posenc
from hf_posenc import get_encoding, patch_model, support, unpatch_model
from hf_posenc.errors import ReachError, UnsupportedError
from hf_posenc.patches import find_patch
from hf_posenc.registry import create


def stock_bias_added_once(host: str, ids: torch.Tensor) -> torch.Tensor:
    """The stock host without its own ALiBi, run under a mask that holds it: -m·(i - j), and nothing from i < j."""
    model, n = tiny_host(host, attn_implementation="eager"), ids.shape[1]
    heads, d = model.config.num_attention_heads, model.config.head_dim
    slopes = hf_posenc.encodings.Alibi().slopes(heads) / math.sqrt(d)
    step = (torch.arange(n)[:, None] - torch.arange(n)).float()
    mask = (-slopes[:, None, None] * step).masked_fill(step < 0, torch.finfo(torch.float32).min)[None]
    model.transformer.use_alibi = False
    model.transformer.rotary_emb = Still(d)
    return logits(model, ids, attention_mask=mask)


class Still(nn.Module):
    """A rotary module that turns nothing."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (*position_ids.shape, self.dim)
        return torch.ones(shape), torch.zeros(shape)


def test_falcons_bias_is_added_once() -> None:
    """Stock Falcon's eager attention adds its ALiBi to the scores and again in the mask; sdpa and ours do it once."""
    ids = text(LENGTH)
    right = stock_bias_added_once("falcon-alibi", ids)
    sdpa, eager = (tiny_host("falcon-alibi", attn_implementation=name) for name in ("sdpa", "eager"))
    assert_same(logits(sdpa, ids), right, 1e-5)
    assert difference(logits(eager, ids), right) > 1e-2
    for model in (sdpa, eager):
        assert_same(logits(patch_model(model, "alibi"), ids), right, 1e-5)


@pytest.mark.parametrize("name", ["rope", "yarn"])
def test_falcons_weights_are_those_of_its_logits(name: str) -> None:
    """Stock Falcon under sdpa, asked for its attention weights, makes its scores without a mask."""
    ids, stock = text(LENGTH), tiny_host("falcon", attn_implementation="sdpa")
    asked: dict[str, Any] = {"input_ids": ids, "output_attentions": True}
    with torch.no_grad():
        assert difference(stock(**asked).logits, logits(stock, ids)) > 1e-2
        model = patch_model(stock, name, **({"factor": 4} if name == "yarn" else {}))
        out = model(**asked)
        assert_same(out.logits, logits(model, ids), 1e-5)
        assert all(float(weights.triu(1).abs().max()) == 0 for weights in out.attentions)
        mask = torch.ones_like(ids)
        mask[:, :5] = 0
        padded = model(**asked, attention_mask=mask).logits[:, 5:]
        assert_same(padded, logits(model, ids, attention_mask=mask)[:, 5:], 1e-5)


def test_falcons_factor_stretches_its_own_slopes() -> None:
    """Its slopes are divided by the square root of the head width, with the scores: of a rotary Falcon they are not."""
    kinds = {host: get_encoding(Pair(host, "alibi", {"factor": 2}).patched()) for host in ("falcon", "falcon-alibi")}
    assert kinds["falcon"].slopes(6)[0] == 1 / 8  # type: ignore[union-attr]
    assert kinds["falcon-alibi"].slopes(6)[0] == pytest.approx(1 / 8 / math.sqrt(8))  # type: ignore[union-attr]


def test_mpt_beyond_its_length() -> None:
    """Stock MPT has a bias as wide as max_seq_len, and fails one token later."""
    with pytest.raises(RuntimeError):
        logits(tiny_host("mpt"), text(LENGTH + 1))
    model = patch_model(tiny_host("mpt"), "alibi")
    assert_same(logits(model, text(200)), Pair("mpt", "alibi").reference(text(200)))
    assert_same(logits(model, text(200))[:, :LENGTH], logits(tiny_host("mpt"), text(LENGTH)), 1e-5)


def test_mpts_bias_max_is_what_its_config_says() -> None:
    """Transformers' own forward takes it for 8 whatever the config says; that of the model's authors does not."""
    six = {"attn_config": {"alibi_bias_max": 6}}
    assert torch.equal(logits(tiny_host("mpt", **six), text(LENGTH)), logits(tiny_host("mpt"), text(LENGTH)))
    model = patch_model(tiny_host("mpt", **six), "alibi")
    assert get_encoding(model).options() == {"factor": 1.0, "alibi_bias_max": 6.0}  # type: ignore[union-attr]
    assert difference(logits(model, text(LENGTH)), logits(tiny_host("mpt"), text(LENGTH))) > 1e-3
    assert hf_posenc.verify(model, progress=False).passed


@pytest.mark.parametrize("host", ["mpt", "opt", "falcon", "falcon-alibi", "gptj", "openai-gpt"])
def test_alibi_never_makes_a_mask_of_n_by_n(host: str) -> None:
    n = 512
    model, ids = patch_model(tiny_host(host), "alibi"), text(n)
    with torch.no_grad(), LargestTensor() as forward:
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    assert forward.elements < n * n
    padded = (torch.arange(n) >= 100).long()[None]
    with torch.no_grad(), LargestTensor() as forward:
        model(input_ids=ids, attention_mask=padded)
    assert forward.elements < 4 * n * n, "no bias for every head"


@pytest.mark.parametrize("host", ["gptj", "openai-gpt", "opt", "bert", "roberta"])
def test_the_hosts_own_encoding_beyond_its_tables(host: str) -> None:
    """GPT-J's is a formula and goes on; a learned table says where it ends, whatever buffer would have ended first."""
    stock, model = tiny_host(host), patch_model(tiny_host(host), OWN[host])
    with pytest.raises((RuntimeError, IndexError)):
        logits(stock, text(LENGTH + 1))
    if host == "gptj":
        assert_same(logits(model, text(LENGTH + 1))[:, :-1], logits(stock, text(LENGTH)), 1e-5)
        return
    logits(model, text(LENGTH))
    with pytest.raises(ReachError, match=f"position {LENGTH} has no row in a learned table of {LENGTH} .positions 0"):
        logits(model, text(LENGTH + 1))


@pytest.mark.parametrize("host", ["opt", "openai-gpt", "bert", "roberta"])
@pytest.mark.parametrize("rule", ["group", "repeat", "hierarchical", "cubic"])
def test_resized_tables(host: str, rule: str) -> None:
    p = Pair(host, "learned", {"resize": rule, "factor": 4.5})
    model = p.patched()
    assert_same(logits(model, text(140)), p.reference(text(140)))
    assert hf_posenc.verify(model, progress=False).passed
    rows = model.config.max_position_embeddings - (5 if host == "roberta" else 0)
    assert rows == int(LENGTH * 4.5)


def test_robertas_padding() -> None:
    """Right-padded with the padding token and a mask, nothing changes bit for bit; its row in the table is kept."""
    model, ids = tiny_host("roberta"), torch.cat((text(20), torch.full((1, 6), 4)), dim=1)
    mask = ids.ne(4).long()
    before, alone = logits(model, ids, attention_mask=mask), logits(model, ids)
    row = model.roberta.embeddings.position_embeddings.weight[:5].clone()
    patch_model(model, "learned")
    assert torch.equal(logits(model, ids, attention_mask=mask), before) and torch.equal(logits(model, ids), alone)
    unpatch_model(model)
    patch_model(model, "learned", resize="interpolate", factor=3)
    table = model.roberta.embeddings.position_embeddings
    assert torch.equal(table.weight[:5], row) and table.padding_idx == 4
    unpatch_model(model)
    patch_model(model, "sinusoidal")
    at = torch.tensor([[3, 4, 5, 6]])
    assert (model.roberta.embeddings.position_embeddings(at)[0, :2] == 0).all()


def test_opt_padding_and_width() -> None:
    """Narrow embeddings: vectors are added behind the projection, at the scale of what comes out of it."""
    model = tiny_host("opt-post")
    weight = model.model.decoder.project_in(model.model.decoder.embed_tokens.weight).detach()
    encoding: Any = get_encoding(patch_model(model, "sinusoidal"))
    assert encoding.scale == pytest.approx(float(weight.pow(2).mean().sqrt()) * math.sqrt(2), rel=1e-5)
    assert encoding.vectors(torch.arange(3), 48).shape == (3, 48)


@pytest.mark.parametrize("name", ["nope", "dynamic_ntk", "dynamic_yarn", "longrope"])
@pytest.mark.parametrize("host", ["bert", "roberta"])
def test_what_only_a_causal_model_can_hold_is_refused(host: str, name: str) -> None:
    p = pair(host, name)
    assert not support(host, name)
    words = "order" if name == "nope" else "causal by definition|yarn"
    assert_refused(UnsupportedError, f"{name}|{host}|{words}|is_decoder=True", lambda: p.patched())


@pytest.mark.parametrize("host", ["mpt", "opt", "gptj", "openai-gpt", "falcon-alibi"])
def test_whole_schedule_is_refused_without_a_rotary_module(host: str) -> None:
    options = {"factor": 2, "schedule": "whole"}
    with pytest.raises(UnsupportedError, match="segments"):
        patch_model(tiny_host(host), "dynamic_ntk", **options)


@pytest.mark.parametrize("host", ["mpt", "falcon", "gptj"])
def test_a_table_that_is_not_there_cannot_be_resized(host: str) -> None:
    with pytest.raises(UnsupportedError, match="has none"):
        patch_model(tiny_host(host), "learned", resize="repeat", factor=2)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")
def test_attention_without_a_function_of_ours_is_refused() -> None:
    """On an encoder FlexAttention's block mask cannot hold a bias; Falcon has layers of another class for flash."""
    with pytest.raises(UnsupportedError, match="sdpa"):
        patch_model(tiny_host("bert", attn_implementation="flex_attention"), "alibi")
    model = patch_model(tiny_host("bert"), "alibi")
    model.set_attn_implementation("flex_attention")
    with pytest.raises(UnsupportedError, match="sdpa"):
        logits(model, text(20))
    for host, name in (("falcon", "alibi"), ("falcon-alibi", "rope")):
        config = tiny_host(host).config
        config._attn_implementation_internal = "flash_attention_2"
        assert "attn_implementation='sdpa'" in str(find_patch("falcon").refusal(create(name), config))


def test_alibi_on_an_encoder_is_the_same_from_both_sides() -> None:
    """Read backwards, a text gives the same logits backwards: only distances count."""
    for host in ("bert", "roberta"):
        model, ids = patch_model(tiny_host(host), "alibi"), text(60)
        assert_same(logits(model, ids.flip(1)).flip(1), logits(model, ids), 1e-5)


@pytest.mark.parametrize("how", [torch.bfloat16, torch.float16])
def test_alibi_on_an_encoder_in_16_bits(how: torch.dtype) -> None:
    """As close to float32 as the model is without a bias: distances beyond 256 do not merge."""
    ids, found = text(900), {}
    for name in ("alibi", "sinusoidal"):
        model = patch_model(tiny_host("bert", initializer_range=0.05), name)
        want = logits(model, ids)
        found[name] = difference(logits(model.to(how), ids), want)
    assert found["alibi"] < 1.5 * found["sinusoidal"] + 0.003


@pytest.mark.parametrize("name", ["alibi", "rope", "learned"])
def test_other_classes_of_an_encoder(name: str) -> None:
    """The backbone alone; a classifier, which has no output a token and is verified by its backbone."""
    config = tiny_host("bert").config
    bare: Any = BertModel(config).eval()
    with torch.no_grad():
        before = bare(text(20)).last_hidden_state
        patch_model(bare, name)
        assert bare(text(20)).last_hidden_state.shape == before.shape
    assert hf_posenc.verify(bare, progress=False).passed
    unpatch_model(bare)
    assert torch.equal(bare(text(20)).last_hidden_state, before)
    classifier = patch_model(AutoModelForSequenceClassification.from_config(config), name)
    with pytest.raises(UnsupportedError, match=r"verify\(model\.bert\)"):
        hf_posenc.verify(classifier, progress=False)
    assert hf_posenc.verify(classifier.base_model, progress=False, save=False).passed


@pytest.mark.parametrize("name", ["alibi", "rope", "dynamic_yarn"])
def test_cross_attention_has_no_positions(name: str) -> None:
    """In a decoder with cross-attention only its own text is turned or biased."""
    model = pair("bert-decoder", name).patched(add_cross_attention=True)
    plain = pair("bert-decoder", "nope").patched(add_cross_attention=True)
    seen, one = torch.randn(1, 7, 48, generator=torch.Generator().manual_seed(0)), text(1)
    given = {"encoder_hidden_states": seen, "encoder_attention_mask": torch.ones(1, 7)}
    assert_same(logits(model, one, **given), logits(plain, one, **given), 1e-5)
    both = {**given, "encoder_hidden_states": seen.flip(1)}
    assert_same(logits(model, text(50), **both), logits(model, text(50), **given))
    whole = logits(model, text(50), **given)
    assert_same(in_pieces_with(model, text(50), (20, 20, 1, 9), given), whole)


def in_pieces_with(model: Any, ids: torch.Tensor, pieces: tuple[int, ...], given: dict[str, Any]) -> torch.Tensor:
    """As `in_pieces`, with the same encoder states beside every call."""
    from pairs import cache_name

    parts, cache, at = [], None, 0
    for n in pieces:
        inputs = {} if cache is None else {cache_name(model): cache}
        with torch.no_grad():
            out = model(input_ids=ids[:, at : at + n], use_cache=True, **given, **inputs)
        cache, at = out[cache_name(model)], at + n
        parts.append(out.logits)
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("host", HOSTS)
def test_on_the_backbone_alone(host: str) -> None:
    p = pair(host, "alibi")
    whole, bare = p.patched(), AutoModel.from_config(p.stock().config).eval()
    bare.load_state_dict(whole.base_model.state_dict(), strict=False)
    p.put_into(bare)
    with torch.no_grad():
        want = whole.base_model(input_ids=text(70)).last_hidden_state
        assert torch.equal(bare(input_ids=text(70)).last_hidden_state, want)
        embeds = bare.get_input_embeddings()(text(70))
        assert torch.equal(bare(inputs_embeds=embeds).last_hidden_state, want)


@pytest.mark.parametrize("host", ["mpt", "falcon-alibi", "gptj", "openai-gpt"])
def test_called_without_its_own_hooks(host: str) -> None:
    """The positions of an earlier call must not be taken for this one's."""
    model = patch_model(tiny_host(host), "alibi")
    logits(model, text(20))
    with pytest.raises((hf_posenc.PosencError, AttributeError, TypeError)):
        model.transformer.forward(text(20))
    unpatch_model(model)
    model.transformer.forward(text(20))


@pytest.mark.parametrize("host", ["opt", "gptj", "openai-gpt", "bert"])
def test_native_names_of_lengths_are_kept(host: str) -> None:
    """A table that is longer must be named in the config; nothing else may change there."""
    before = tiny_host(host).config.to_dict()
    for name in ("rope", "alibi", "sinusoidal"):
        after = patch_model(tiny_host(host), name).config.to_dict()
        after.pop("hf_posenc", None)
        assert {key: value for key, value in after.items() if before.get(key) != value} == {}
    assert CONFIGS[host]


def test_prompt_lookup_and_steps_on_mpt() -> None:
    """Candidates are tried and most of them cropped again: the cache goes back over the ends of segments."""
    model = pair("mpt", "dynamic_yarn").patched()
    ids = torch.tensor([[5, 9, 2, 11, 9, 2, 7, 5, 9] * 6])
    lookup = {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 1, "eos_token_id": 97, "use_cache": True}
    found = generate(model, ids, 12, **lookup)
    assert torch.equal(found[:, :12], generate(model, ids, 12))
    assert_same(in_pieces(model, ids, [1] * ids.shape[1]), logits(model, ids))
