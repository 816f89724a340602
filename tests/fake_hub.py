"""A hub that keeps what is uploaded to it, file by file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


def fake_hub(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, bytes]]:
    """Take the place of the hub that Transformers and PEFT push to; the list is filled, one item an upload."""
    from transformers.utils import hub

    pushed: list[dict[str, bytes]] = []

    class FakeApi:
        def create_repo(self, repo_id: str, **kwargs: Any) -> Any:
            return SimpleNamespace(repo_id=repo_id)

        def create_commit(self, repo_id: str, operations: Any, **kwargs: Any) -> Any:
            files = {o.path_in_repo: o.path_or_fileobj for o in operations}
            pushed.append({name: Path(file).read_bytes() for name, file in files.items()})
            return SimpleNamespace(oid="0", commit_url="")

        def create_branch(self, *args: Any, **kwargs: Any) -> None:
            pass

    from transformers import modeling_utils

    for module in (hub, modeling_utils):
        for name, fake in (("hf_api", FakeApi), ("create_repo", FakeApi().create_repo)):
            monkeypatch.setattr(module, name, fake, raising=False)
    monkeypatch.setattr(hub, "create_commit", FakeApi().create_commit, raising=False)
    monkeypatch.setattr(hub, "create_branch", FakeApi().create_branch, raising=False)
    return pushed
