"""The table of chips: its figures agree with one another and with what else is published."""

import pytest

from podling.chips import CHIPS, chip_of

TPUS = [chip for chip in CHIPS.values() if chip.platform == "tpu"]


@pytest.mark.parametrize("chip", TPUS, ids=lambda chip: chip.name)
def test_the_arrays_and_the_clock_make_the_peak(chip):
    """Of one device: a multiply and an add in every cell of every array in every cycle, two in v6e's."""
    cells = chip.mxus * chip.mxu_size**2 * (2 if chip.name == "v6e" else 1)
    assert cells * 2 * chip.clock_hz == pytest.approx(chip.peak_flops["bfloat16"], rel=0.02)


@pytest.mark.parametrize(
    ("name", "both_ways"), [("v5e", 400e9), ("v5p", 1200e9), ("v6e", 800e9), ("a100", 600e9), ("h100", 900e9)]
)
def test_links_add_up_to_the_published_sum(name, both_ways):
    assert 2 * CHIPS[name].links * CHIPS[name].link_bytes_per_s == both_ways


@pytest.mark.parametrize(
    ("name", "pod_flops"),
    [("v2", 11.5e15), ("v3", 126e15), ("v4", 1.1e18), ("v5e", 50.63e15), ("v6e", 234.9e15)],
)
def test_a_pod_reaches_the_published_peak(name, pod_flops):
    """Chips, devices of a chip and peak of a device, against the pod's own figure on the architecture pages."""
    chip = CHIPS[name]
    assert chip.most_chips * chip.devices_per_chip * chip.peak_flops["bfloat16"] == pytest.approx(pod_flops, rel=0.03)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_a_row_is_whole(chip):
    assert chip.device_kinds and chip.sources and hash(chip)
    if chip.platform != "cpu":
        assert chip.peak_flops["bfloat16"] and chip.hbm_bytes_per_s and chip.link_bytes_per_s
        assert 6 * 2**30 < chip.hbm_bytes < 120 * 2**30
        assert bool(chip.dims) == bool(chip.ring) == bool(chip.mxus) == (chip.platform == "tpu")
        assert chip.links == 2 * chip.dims or chip.platform == "gpu"  # a neighbour each way


def test_names_of_devices():
    assert chip_of("TPU v5 lite") is chip_of("TPU v5e") is CHIPS["v5e"]
    assert chip_of("NVIDIA H100 80GB HBM3") is CHIPS["h100"]
    for slower in ("NVIDIA H100 PCIe", "NVIDIA H200 NVL", "TPU v4 lite", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "TPU v99"):
        assert chip_of(slower) is None
    kinds = [kind for chip in CHIPS.values() for kind in chip.device_kinds]
    assert len(set(kinds)) == len(kinds)
