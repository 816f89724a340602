"""The form of every test of what is refused."""

from typing import Any

import pytest
import snapshots

from hf_posenc import PosencError


def assert_refused(kind: type[Exception], words: str, call: Any, model: Any = None) -> None:
    """`call` raises a `PosencError` that is a `kind` too, says all `words` (split at |), and leaves `model` alone."""
    was = None if model is None else snapshots.of_model(model)
    with pytest.raises(PosencError) as caught:
        call()
    assert isinstance(caught.value, kind), f"{type(caught.value).__mro__}"
    for word in words.split("|"):
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    if model is not None:
        assert snapshots.of_model(model) == was
