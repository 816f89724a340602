"""The list of encodings, and the one way from a name and options to an `Encoding`."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

from . import encodings as e
from .encodings.base import Encoding, Seam
from .errors import OptionError, OptionTypeError, unknown


@dataclass(frozen=True)
class EncodingRow:
    """One encoding of the list: its name, the seam it lives in, one sentence, where it was published, its options."""

    name: str
    cls: type[Encoding]
    summary: str
    paper: str

    @property
    def seam(self) -> Seam:
        return self.cls.seam

    @property
    def options(self) -> tuple[str, ...]:
        names = [field.name for field in fields(self.cls)]
        return (*(n for n in names if n not in e.ADD_ONS), *(n for n in names if n in e.ADD_ONS))

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields(self.cls) if field.default is MISSING)


_ROWS = [
    EncodingRow("rope", e.Rope, "rotary positions, unscaled", "Su et al. 2021, arXiv 2104.09864"),
    EncodingRow(
        "linear", e.Linear, "position interpolation: every frequency ÷ factor", "Chen et al. 2023, arXiv 2306.15595"
    ),
    EncodingRow(
        "ntk", e.Ntk, "a larger base: low frequencies ÷ factor, high ones kept", "bloc97 2023; arXiv 2309.00071, 3.1"
    ),
    EncodingRow(
        "dynamic_ntk",
        e.DynamicNtk,
        "NTK that follows the length, causal by segments",
        "emozilla 2023; arXiv 2309.00071, 3.3",
    ),
    EncodingRow(
        "ntk_by_parts",
        e.NtkByParts,
        "YaRN's frequencies without its temperature",
        "Peng et al. 2023, arXiv 2309.00071, 3.2",
    ),
    EncodingRow(
        "yarn",
        e.Yarn,
        "slow pairs interpolated, fast ones kept, logits sharpened",
        "Peng et al. 2023, arXiv 2309.00071",
    ),
    EncodingRow(
        "dynamic_yarn",
        e.DynamicYarn,
        "YaRN that follows the length, causal by segments",
        "Peng et al. 2023, arXiv 2309.00071, 3.3",
    ),
    EncodingRow("llama3", e.Llama3, "scaling by wavelength, as in Llama 3.1", "Llama team 2024, arXiv 2407.21783"),
    EncodingRow(
        "longrope", e.LongRope, "one rescale factor a pair, short and long lists", "Ding et al. 2024, arXiv 2402.13753"
    ),
    EncodingRow(
        "alibi", e.Alibi, "a penalty on the score that grows with distance", "Press et al. 2021, arXiv 2108.12409"
    ),
    EncodingRow(
        "sinusoidal",
        e.Sinusoidal,
        "fixed sines and cosines added to the embedding",
        "Vaswani et al. 2017, arXiv 1706.03762",
    ),
    EncodingRow(
        "learned", e.Learned, "a trained vector a position, fresh or resized", "Gehring et al. 2017, arXiv 1705.03122"
    ),
    EncodingRow(
        "ntk_mixed",
        e.NtkMixed,
        "NTK with a base of its own for each pair",
        "Su 2023, kexue.fm/archives/9706",
    ),
    EncodingRow("p_rope", e.PRope, "only the fastest pairs turn, a share p", "Barbero et al. 2024, arXiv 2410.06205"),
    EncodingRow("nope", e.Nope, "no positions at all", "Kazemnejad et al. 2023, arXiv 2305.19466"),
    EncodingRow("rerope", e.Rerope, "RoPE whose distance stops growing at a window", "Su 2023, kexue.fm/archives/9708"),
    EncodingRow(
        "leaky_rerope",
        e.LeakyRerope,
        "RoPE whose distance grows k times slower past a window",
        "Su 2023, kexue.fm/archives/9708",
    ),
    EncodingRow(
        "self_extend",
        e.SelfExtend,
        "exact distances to neighbours, those to groups of tokens beyond",
        "Jin et al. 2024, arXiv 2401.01325",
    ),
    EncodingRow(
        "dual_chunk",
        e.DualChunk,
        "positions that start anew in every chunk, distances that stay bounded",
        "An et al. 2024, arXiv 2402.17463",
    ),
    EncodingRow(
        "xpos",
        e.Xpos,
        "RoPE whose scores fall with distance, fast pairs first",
        "Sun et al. 2022, arXiv 2212.10554",
    ),
    EncodingRow(
        "t5_bias",
        e.T5Bias,
        "a trained number a bucket of distances on the score",
        "Raffel et al. 2019, arXiv 1910.10683, 2.1",
    ),
    EncodingRow(
        "kerple",
        e.Kerple,
        "a trained logarithm or power of the distance on the score",
        "Chi et al. 2022, arXiv 2205.09921",
    ),
    EncodingRow(
        "fire",
        e.Fire,
        "a trained network of distance over position on the score",
        "Li et al. 2023, arXiv 2310.04418, 3",
    ),
    EncodingRow(
        "sandwich",
        e.Sandwich,
        "a product of sinusoids, by distance, on the score",
        "Chi et al. 2022, arXiv 2212.10356, 5",
    ),
]
ENCODINGS: dict[str, EncodingRow] = {row.name: row for row in _ROWS}

_TAKEN_FROM_OTHERS = {
    "attn_factor": "attention_factor",
    "scale_factor": "factor",
    "scaling_factor": "factor",
    "theta": "rope_theta",
    "base": "rope_theta",
    "original_length": "original_max_position_embeddings",
}


def register_encoding(cls: type[Encoding], summary: str = "from outside of this package", paper: str = "") -> None:
    """Give an encoding of your own a row in the list, so that its name can be patched, saved and loaded.

    `cls`: a frozen dataclass with a `name`; `summary` one sentence, `paper` its source. To be called in each process
    before the name is used, as by the module that defines the class; the same class again changes nothing. Raises
    `OptionTypeError` for what is no such class, `OptionError` for a name that is taken.
    """
    if not (isinstance(cls, type) and issubclass(cls, Encoding) and is_dataclass(cls) and hasattr(cls, "seam")):
        raise OptionTypeError(f"an encoding is a dataclass below one of hf_posenc.encodings, got {cls!r}")
    name = cls.__dict__.get("name")
    if not isinstance(name, str) or not name.isidentifier():
        raise OptionTypeError(f"{cls.__name__} needs a name: ClassVar[str] = 'a_name' of its own, got {name!r}")
    there = ENCODINGS.get(name)
    if there is not None and there.cls is not cls:
        raise OptionError(f"the name {name!r} is taken by {there.cls.__module__}.{there.cls.__name__}; choose another")
    ENCODINGS[name] = EncodingRow(name, cls, summary, paper)


def list_encodings() -> list[EncodingRow]:
    """Every encoding, in the order in which the documentation presents them."""
    return list(ENCODINGS.values())


def create(encoding: str | Encoding, /, **options: Any) -> Encoding:
    """An `Encoding` from its name and options.

    Raises `UnknownNameError` for a name or option that is not known (with the nearest one), `OptionTypeError` for a
    value of the wrong type, `OptionError` for a value out of range or an option that is missing.
    """
    if isinstance(encoding, Encoding):
        if options:
            raise OptionError(f"options {sorted(options)} were given beside an Encoding; use encoding.but(...) instead")
        return encoding
    if not isinstance(encoding, str):
        raise OptionTypeError(f"an encoding is a name or an Encoding, got {encoding!r} ({type(encoding).__name__})")
    row = ENCODINGS.get(encoding)
    if row is None:
        raise unknown("encoding", encoding, ENCODINGS)
    for option in options:
        if option not in row.options:
            raise _unknown_option(row, option)
    missing = [option for option in row.required if option not in options]
    if missing:
        raise OptionError(f"{encoding} needs {', '.join(f'{m}=…' for m in missing)}; it takes {', '.join(row.options)}")
    return row.cls(**{key: tuple(v) if isinstance(v, list) else v for key, v in options.items()})


def _unknown_option(row: EncodingRow, option: str) -> Exception:
    if not row.options:
        return OptionError(f"{row.name} takes no options, got {option!r}")
    usual = _TAKEN_FROM_OTHERS.get(option)
    return unknown(f"option of {row.name}", option, row.options, near=usual if usual in row.options else None)
