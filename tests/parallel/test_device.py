"""Which devices are taken, and what is said when they are not there."""

import jax
import jax.numpy as jnp
import pytest

from podling.errors import InputError
from podling.parallel import device
from podling.parallel.device import compute_dtype, peak_flops, select_devices


@pytest.mark.parametrize(("asked", "extra"), [("tpu", "podling[tpu]"), ("gpu", "podling[cuda]")])
def test_an_absent_device_is_an_error_with_its_install_command(asked, extra):
    with pytest.raises(InputError) as error:
        select_devices(asked)
    text = str(error.value)
    assert f"--device: {asked} was asked for, and JAX finds only cpu" in text
    assert f"pip install '{extra}'" in text and "--device cpu" in text


@pytest.mark.parametrize("asked", ["auto", "cpu"])
def test_the_cpus_are_taken(asked):
    assert select_devices(asked) == jax.devices() and len(jax.devices()) == 8


@pytest.mark.parametrize(("kind", "extra"), [("gpu", "cuda"), ("tpu", "tpu")])
def test_an_accelerator_that_jax_cannot_use_is_never_passed_over(monkeypatch, kind, extra):
    monkeypatch.setattr(device, "accelerator", lambda: kind)
    monkeypatch.delenv("JAX_PLATFORMS")
    with pytest.raises(InputError) as error:
        select_devices("auto")
    assert f"this machine has a {kind.upper()} that JAX cannot use" in str(error.value)
    assert f"podling[{extra}]" in str(error.value)
    assert select_devices("cpu")  # said on purpose
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert select_devices("auto")  # this too


def test_jax_that_does_not_start(monkeypatch):
    def broken() -> str:
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr(device.jax, "default_backend", broken)
    with pytest.raises(InputError, match="JAX could not start on auto: Unable to initialize backend"):
        select_devices("auto")


def test_auto_precision_follows_the_platform():
    assert compute_dtype("auto", "cpu") == jnp.float32
    assert compute_dtype("auto", "tpu") == compute_dtype("auto", "gpu") == jnp.bfloat16
    assert compute_dtype("bfloat16", "cpu") == jnp.bfloat16
    assert compute_dtype("float32", "tpu") == jnp.float32


class Chip:
    platform = "tpu"

    def __init__(self, kind: str):
        self.device_kind = kind


@pytest.mark.parametrize(
    ("kind", "dtype", "peak"),
    [
        ("TPU v5 lite", "bfloat16", 197e12),
        ("TPU v5p", "bfloat16", 459e12),
        ("TPU v5", "bfloat16", 459e12),
        ("TPU v3", "bfloat16", 61.5e12),  # a core
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA H100 80GB HBM3", "float32", 67e12),
        ("Tesla T4", "bfloat16", 8.1e12),  # computed in float32
    ],
)
def test_published_peaks(kind, dtype, peak):
    found = peak_flops([Chip(kind)], jnp.dtype(dtype))
    assert found.flops_per_s == peak and found.source == f"published {dtype} peak of {kind}"


@pytest.mark.parametrize(
    ("kind", "dtype"), [("TPU v99", "bfloat16"), ("TPU v5e", "float32"), ("NVIDIA H100 PCIe", "bfloat16")]
)
def test_an_unknown_peak_is_none_and_says_so(kind, dtype):
    unknown = peak_flops([Chip(kind)], jnp.dtype(dtype))
    assert unknown.flops_per_s is None and kind in unknown.source and dtype in unknown.source


def test_a_cpus_peak_is_measured_and_shared_by_its_devices(monkeypatch):
    monkeypatch.setattr(device, "_measure_gemm", lambda chip: 80e9)
    peak = peak_flops(jax.devices(), jnp.dtype("float32"))
    assert peak.flops_per_s == 10e9 and "measured" in peak.source


def test_what_processes_of_one_cpu_share_is_not_measured_again(monkeypatch):
    monkeypatch.setattr(device, "_measure_gemm", lambda chip: pytest.fail("measured"))
    assert peak_flops(jax.devices(), jnp.dtype("float32"), 40e9).flops_per_s == 5e9


def test_the_measurement_is_of_a_matrix_product():
    """Wide, and still false for a wrong unit or for a product that was not waited for."""
    assert 1e8 < device._measure_gemm(jax.devices()[0], size=256, repeats=2) < 1e14


def test_a_gpu_that_does_not_answer(monkeypatch):
    """JAX says so with a bare AssertionError."""

    def broken() -> str:
        raise AssertionError

    monkeypatch.setattr(device.jax, "default_backend", broken)
    with pytest.raises(InputError, match="JAX could not start on gpu: no such device was found") as error:
        select_devices("gpu")
    assert "podling[cuda]" in str(error.value)
