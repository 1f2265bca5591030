"""What is short in these tests, so that nobody waits."""

import pytest

from podling.hosts import address
from podling.hosts import member as member_module


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "BEAT_S", 0.05)
    monkeypatch.setattr(member_module, "GRACE_S", 0.3)
    monkeypatch.setattr(address, "TELL_S", 0.2)
