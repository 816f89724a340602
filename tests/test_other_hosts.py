"""Every encoding on the hosts that are no rotary decoders: it moves the logits, to where an independent oracle says."""

from typing import Any

import numpy as np
import other_seams
import pytest
import torch
from other_hosts import (
    CONFIGS,
    HOSTS,
    OTHERS,
    OWN,
    PAIRS,
    VARIANTS,
    VARIED,
    Pair,
    every,
    is_dynamic,
    is_rotation,
    pair,
    text,
    tiny_host,
)
from pairs import ENCODINGS, LENGTH, assert_same, difference, logits

from hf_posenc import get_encoding, patch_model, support
from hf_posenc.patching import find_backbone
from hf_posenc.positions import DescribeCall

LONG = 144
FAR = 32_768
BY_TYPE = sorted({kind for kind, _ in CONFIGS.values()})


@every(PAIRS)
def test_logits_move(pair: Pair) -> None:
    ids = text(LENGTH)
    stock, patched = logits(pair.stock(), ids), logits(pair.patched(), ids)
    moved = difference(patched, stock)
    if is_dynamic(pair) and OWN[pair.host] == "rope" and pair.name != "longrope":
        assert moved < 1e-5, "below the trained length a dynamic encoding is the plain model"
        moved = difference(
            logits(pair.patched(), text(LONG)), logits(pair.stock(max_position_embeddings=LONG), text(LONG))
        )
    assert moved > 1e-2


@pytest.mark.parametrize("host", [*HOSTS, *(host for host in VARIANTS if host != "mpt-other")])
def test_the_native_encoding_changes_nothing(host: str) -> None:
    """Bit for bit; where ALiBi leaves the host's own scores for the attention interface, up to rounding."""
    model, ids = tiny_host(host), text(LENGTH)
    before = logits(model, ids)
    after = logits(patch_model(model, OWN[host]), ids)
    if OWN[host] == "alibi" or host == "gptj":
        assert_same(after, before, 1e-5)
    else:
        assert torch.equal(after, before)


@every([*PAIRS, *OTHERS, *VARIED])
def test_logits_equal_the_oracle(pair: Pair) -> None:
    assert_same(logits(pair.patched(), text(LONG)), pair.reference(text(LONG)))


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", ["rope", "alibi", "sinusoidal"])
def test_without_options(host: str, name: str) -> None:
    assert_same(logits(Pair(host, name).patched(), text(LONG)), Pair(host, name).reference(text(LONG)))


@every([p for p in PAIRS if p.name not in ("learned", "nope")])
def test_positions_that_start_late_and_skip(pair: Pair) -> None:
    places = np.array([*range(17, 40), *range(51, 75), 90, 91, *range(120, 131)])
    ids = text(len(places))
    first = 5 if pair.host == "roberta" else 0
    given = {"position_ids": torch.from_numpy(places)[None] + first, "attention_mask": torch.ones_like(ids)}
    assert_same(logits(pair.patched(), ids, **given), pair.reference(ids, places))


def tables_in_use(model: Any, positions: torch.Tensor) -> list[tuple[Any, Any]]:
    """cos and sin (1, n, pairs) that a call at `positions` turns its queries with, one a position."""
    patch, backbone = find_backbone(model)
    hook = next((h for h in backbone._forward_pre_hooks.values() if isinstance(h, DescribeCall)), None)
    if hook is None:
        cos, sin = patch.tables(backbone, positions)  # type: ignore[misc]
        return [(cos[:, i].double(), sin[:, i].double()) for i in range(positions.shape[1])]
    found = []
    for t in positions[0]:
        call = hook.describe({"input_ids": t.reshape(1, 1), "position_ids": t.reshape(1, 1)})
        assert call.cos is not None and call.sin is not None
        turned = torch.complex(call.cos.double(), call.sin.double())
        for turn in call.turns:
            assert turn.tables is not None
            turned = turned * torch.complex(*(table.double() for table in turn.tables.between(0, 1, t.device)))
        turned = turned[:, 0, : turned.shape[-1] // 2]
        found.append((turned.real, turned.imag))
    return found


@every([p for p in [*PAIRS, *OTHERS] if is_rotation(p)])
def test_phases_stay_exact_in_half_precision(pair: Pair) -> None:
    positions = np.array([0, 1, LENGTH, 777, FAR - 1])
    wanted = other_seams.rotations(pair.stock().config, pair.name, positions, **pair.options)
    found = tables_in_use(pair.patched().to(torch.bfloat16), torch.from_numpy(positions)[None])
    for (cos, sin), t, (inv_freq, scale) in zip(found, positions, wanted):
        phase = torch.from_numpy(t * inv_freq)
        off = (torch.complex(cos, sin) / scale - torch.polar(torch.ones_like(phase), phase)).abs().max()
        assert off < 1e-2, f"{off:.3g} rad at position {t}"


@every([p for p in PAIRS if p.name != "learned"])
def test_half_precision_is_close_far_out(pair: Pair) -> None:
    """Rounded frequencies, slopes or positions would give a share near 1."""
    ids = text(2 * LENGTH + 5)
    places = torch.arange(FAR - 100, FAR - 100 + ids.shape[1])[None]
    exact = logits(pair.patched(), ids, position_ids=places)
    rough = logits(pair.patched().to(torch.bfloat16), ids, position_ids=places)
    assert (rough - exact).pow(2).mean().sqrt() < 0.25 * exact.pow(2).mean().sqrt()


@every(PAIRS)
def test_the_encoding_is_complete(pair: Pair) -> None:
    encoding = get_encoding(pair.patched())
    assert encoding is not None and encoding.name == pair.name
    assert {**encoding.options(), **pair.options} == encoding.options()


@pytest.mark.parametrize("kind", BY_TYPE)
def test_what_the_table_says_is_so(kind: str) -> None:
    """A pair that is said to work does, and one that is refused gives the same reason as the table."""
    for name in ENCODINGS:
        said = support(kind, name)
        p = pair(kind, name)
        if said:
            assert get_encoding(p.patched()) is not None
        else:
            with pytest.raises(Exception, match="is_decoder") as caught:
                p.patched()
            assert said.reason in str(caught.value)
