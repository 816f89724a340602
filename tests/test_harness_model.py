"""Our model class under lm-eval: what it loads, its likelihoods, its limits, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness_runs import bytes_model, request, run, write_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import hf_posenc
from hf_posenc.checkpoint import save_pretrained
from hf_posenc.demo.train import byte_tokenizer
from hf_posenc.errors import OptionError, PosencError, ReachError
from hf_posenc.evaluate.harness import PosencLM
from hf_posenc.evaluate.limits import UNLIMITED, reach

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    # One for all: documents are a function of what names them.
    monkeypatch.setenv("HF_POSENC_CACHE", str(tmp_path_factory.getbasetemp() / "documents"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that reads bytes, as a checkpoint."""
    return write_llama(tmp_path_factory.mktemp("llama"))


def test_batch_size_moves_no_score(folder: Path) -> None:
    for form in ("loglikelihood", "generate"):
        tasks = ["passkey", "copy_distance"]
        one, four = (
            run(str(folder), tasks, [300, 420], batch_size=size, form=form, encoding="yarn", options={"factor": 4.0})
            for size in (1, 4)
        )
        assert one.tasks.keys() == four.tasks.keys()
        for name, scores in one.tasks.items():
            other = four.tasks[name]
            assert scores.acc == other.acc and scores.by_depth == other.by_depth
            assert scores.nll == pytest.approx(other.nll, abs=1e-4)
            assert scores.gain == pytest.approx(other.gain, abs=1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
def test_batch_size_moves_no_passkey_that_a_trained_model_finds(name: str) -> None:
    one, four = (run(f"demo:{name}", lengths=160, form="generate", num_samples=6, batch_size=size) for size in (1, 4))
    assert one.tasks == four.tasks
    if name == "llama":
        assert one.tasks["passkey"].acc[160] > 0.5


def test_likelihood_is_the_models_own() -> None:
    """Few logits, padding and all: against one plain forward a document."""
    from hf_posenc.eval_tasks.tasks import documents

    model, tokenizer = bytes_model(), byte_tokenizer()
    wanted = []
    for document in documents("passkey", tokenizer, 300, num_samples=4):
        ids = torch.tensor([tokenizer(document.prompt + document.target)["input_ids"]])
        with torch.no_grad():
            logits = model(ids).logits[0]
        logp = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])
        wanted.append(-float(logp[-document.target_tokens :].mean()))
    found = run(model, tokenizer=tokenizer, batch_size=3).tasks["passkey_loglikelihood"]
    assert found.nll[300] == pytest.approx(sum(wanted) / 4, abs=1e-4)
    assert hf_posenc.get_encoding(model) is None


def test_patched_folder_adapter_and_merged_model_load(folder: Path, tmp_path: Path) -> None:
    import peft

    base = hf_posenc.from_pretrained(folder, encoding="alibi")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(base, lora).eval()
    save_pretrained(adapted, tmp_path / "adapter")
    with torch.no_grad():
        wanted = adapted(torch.arange(60)[None]).logits
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    byte_tokenizer().save_pretrained(tmp_path / "merged")
    for arguments in (
        {"pretrained": str(tmp_path / "adapter")},
        {"pretrained": str(folder), "peft": str(tmp_path / "adapter")},
        {"pretrained": str(folder), "peft": str(tmp_path / "adapter"), "encoding": "alibi"},
        {"pretrained": str(tmp_path / "merged")},
    ):
        lm = PosencLM(**arguments, device="cpu")
        assert hf_posenc.get_encoding(lm.model) == hf_posenc.get_encoding(merged)
        with torch.no_grad():
            assert torch.allclose(lm.model(torch.arange(60)[None]).logits, wanted, atol=1e-4)
        assert lm.tokenizer("a")["input_ids"] == [97]
    assert run(str(tmp_path / "adapter")).header["encoding"] == "alibi"


def test_the_limit_is_what_the_positions_reach() -> None:
    assert reach(bytes_model()) is None
    assert reach(bytes_model("bloom")) is None
    assert reach(hf_posenc.patch_model(bytes_model(), "yarn", factor=2.0)) is None
    gpt2 = bytes_model("gpt2")
    assert reach(gpt2) == 32
    with hf_posenc.patched(gpt2, "alibi"):
        assert reach(gpt2) is None
    with hf_posenc.patched(gpt2, "learned", resize="interpolate", factor=3.0):
        assert reach(gpt2) == 96
    with hf_posenc.patched(gpt2, "learned", max_position_embeddings=50):
        assert reach(gpt2) == 50
    mpt = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("mpt", d_model=32, n_heads=2, n_layers=1, max_seq_len=64, vocab_size=257)
    )
    assert reach(mpt) == 64
    assert reach(AutoModelForCausalLM.from_config(tiny_opt())) == 40


def tiny_opt() -> Any:
    sizes = {"hidden_size": 32, "ffn_dim": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    return AutoConfig.for_model("opt", vocab_size=257, max_position_embeddings=40, word_embed_proj_dim=32, **sizes)


def test_a_length_past_the_limit_is_refused_before_anything_is_built() -> None:
    model, tokenizer = bytes_model("gpt2"), byte_tokenizer()
    with pytest.raises(ReachError, match=r"passkey_loglikelihood at length 300: the limit of this model is 32"):
        run(model, tokenizer=tokenizer)
    with pytest.raises(ReachError, match=r"at length 300: the limit of this model is 290"):
        run(bytes_model(), tokenizer=tokenizer, max_length=290)
    assert run(model, tokenizer=tokenizer, encoding="alibi").tasks


def test_truncation_is_an_error_with_task_length_and_limit() -> None:
    lm = PosencLM(bytes_model(), tokenizer=byte_tokenizer(), max_length=20)
    assert lm.loglikelihood([request("loglikelihood", "a" * 18, "bcd")])
    with pytest.raises(ReachError, match=r"some_task: 21 tokens \(prompt 18, answer 4\), and the limit is 20"):
        lm.loglikelihood([request("loglikelihood", "a" * 18, "bcde")])
    greedy = {"max_gen_toks": 4, "do_sample": False, "until": []}
    assert lm.generate_until([request("generate_until", "a" * 16, greedy)])
    with pytest.raises(ReachError, match=r"some_task: 21 tokens \(prompt 17, answer up to 4\), and the limit is 20"):
        lm.generate_until([request("generate_until", "a" * 17, greedy)])


def test_logits_are_made_for_the_answers_alone() -> None:
    lm = PosencLM(bytes_model(), tokenizer=byte_tokenizer(), batch_size=2)
    made: list[int] = []
    lm.model.lm_head.register_forward_hook(lambda _module, _args, output: made.append(output.shape[1]))
    asked = [request("loglikelihood", "a" * size, "bc") for size in (90, 92, 95)]
    together = lm.loglikelihood(asked)
    assert made == [7, 2]
    alone = [lm.loglikelihood([one])[0][0] for one in asked]
    assert [value for value, _ in together] == pytest.approx(alone, abs=1e-5)


def test_auto_batches_need_a_limit() -> None:
    lm = PosencLM(bytes_model(), tokenizer=byte_tokenizer(), batch_size="auto")
    assert lm.max_length == UNLIMITED
    with pytest.raises(OptionError, match="max_length"):
        lm.generate_until([request("generate_until", "a", {})])


def bare_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, and not one special token."""
    vocab = {chr(i): i for i in range(257)}
    toy = Tokenizer(models.WordLevel(vocab))  # type: ignore[arg-type]
    toy.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=toy)


def test_a_tokenizer_without_specials_is_enough() -> None:
    for form in ("generate", "loglikelihood"):
        one, two = (
            run(bytes_model(), tokenizer=bare_tokenizer(), batch_size=size, form=form, lengths=[300]) for size in (1, 2)
        )
        for a, b in zip(one.tasks.values(), two.tasks.values()):
            assert a.acc == b.acc and a.nll == pytest.approx(b.nll, abs=1e-4)
    lm = PosencLM(bytes_model(), tokenizer=bare_tokenizer())
    assert lm.loglikelihood([request("loglikelihood", "", "abc")])
    assert len(lm.tokenizer) == 257


def test_a_tokenizer_that_ends_every_text_changes_no_score() -> None:
    plain, ends = byte_tokenizer(), byte_tokenizer()
    ends.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {ends.eos_token}", special_tokens=[(ends.eos_token, 256)]
    )
    asked = [request("loglikelihood", "The key is", " 12345"), request("loglikelihood", "It", " is")]
    greedy = {"max_gen_toks": 5, "do_sample": False, "until": []}
    answers = [request("generate_until", text, greedy) for text in ("The key is", "It")]
    lms = [PosencLM(bytes_model(), tokenizer=tokenizer, batch_size=2) for tokenizer in (plain, ends)]
    assert lms[0].loglikelihood(asked) == lms[1].loglikelihood(asked)
    assert lms[0].generate_until(answers) == lms[1].generate_until(answers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"encoding": "yarm"}, "did you mean 'yarn'"),
        ({"factor": 4.0}, "without encoding=NAME"),
        ({"encoding": "yarn"}, "yarn needs factor"),
        ({"delta": "other"}, "does not take it"),
    ],
)
def test_the_model_class_refuses(arguments: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(PosencError, match=message):
        PosencLM(str(folder), device="cpu", **arguments)
    with pytest.raises(OptionError, match="patch_model"):
        PosencLM(bytes_model(), encoding="alibi", tokenizer=byte_tokenizer())


def test_without_lm_eval_the_error_says_how_to_install_it() -> None:
    code = (
        "import sys; sys.modules['lm_eval'] = None\n"
        "from hf_posenc.errors import OptionError\n"
        "from hf_posenc.evaluate.run_tasks import run_tasks\n"
        "try: run_tasks('demo:llama')\n"
        "except OptionError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "pip install 'hf-posenc[eval]'" in done.stdout
