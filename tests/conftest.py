"""Every test runs on the CPU, as eight devices, and may not lean on what JAX would forgive."""

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

# Before the first import of JAX, by a test or by a process that a test starts.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# A test never reaches for the network; the local cache of a hub is no part of a test either.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

ROOT = Path(__file__).parent.parent
PARITY = all(find_spec(name) for name in ("torch", "transformers"))


@pytest.fixture(scope="session", autouse=True)
def _signals_as_in_a_terminal() -> None:
    """A shell starts background jobs with Ctrl-C ignored, and the runs that tests start would inherit that."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


def pytest_configure(config: pytest.Config) -> None:
    """Prepared data goes to a cache of this session, never the developer's."""
    cache = tempfile.TemporaryDirectory(prefix="podling-tests-")
    os.environ["XDG_CACHE_HOME"] = cache.name
    config.add_cleanup(cache.cleanup)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared data of one test is no other test's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module", autouse=True)
def _programs_go_with_their_module() -> Iterator[None]:
    """What one file of tests compiled is no use to the next: kept, it would come to gigabytes."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()


@pytest.fixture(scope="module")
def quick_compile() -> Iterator[None]:
    """For tests that compile much and compute little: XLA leaves out most optimisations and takes a third of the time.

    Use it with `pytestmark = pytest.mark.usefixtures("quick_compile")`, so that it comes before other fixtures.
    """
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Comparisons with PyTorch are skipped without it, except where they are promised to run."""
    if PARITY:
        return
    if os.environ.get("PODLING_PARITY") == "1":
        raise pytest.UsageError(
            "PODLING_PARITY=1 and torch or transformers is missing: pip install -e '.[test,parity]'"
        )
    skip = pytest.mark.skip(reason="needs the parity extra: pip install -e '.[test,parity]'")
    for item in items:
        if item.get_closest_marker("parity"):
            item.add_marker(skip)
