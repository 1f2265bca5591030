"""What is known of each kind of chip, written once: how fast it computes, how much it holds, what it sends.

Every figure is of one device as JAX counts them: a whole chip, but a core, half a chip, on TPU v2 and v3. What is
measured here instead of published (all of a CPU) is left out, or 0.

Sources, by the names used below:

- architecture pages: docs.cloud.google.com/tpu/docs/{v2,v3,v4,v5e,v5p,v6e}, read in November 2026
- Norrie et al. 2021: "The Design Process for Google's Training Chips: TPUv2 and TPUv3", IEEE Micro 41(2)
- Jouppi et al. 2023: "TPU v4: An Optically Reconfigurable Supercomputer", arxiv.org/abs/2304.01433, table 4
- scaling book: Austin et al. 2025, "How to Scale Your Model", jax-ml.github.io/scaling-book/tpus
- data sheets: NVIDIA's of the named card, without sparsity
- libtpu 0.0.42: the memory beyond which its compiler refuses a program ("exceeds available HBM")
- JAX, GPU memory allocation: docs.jax.dev; 75% of the card's memory is taken at the start, and that is counted on
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A kind of chip."""

    name: str
    """As after `--chip`, without a number."""
    platform: Literal["tpu", "gpu", "cpu"]
    device_kinds: tuple[str, ...]
    """What JAX calls such a device (`device_kind`); the first is said to people."""
    peak_flops: Mapping[str, float] = field(default_factory=dict, hash=False)
    """FLOP/s of matrix products by dtype; a dtype of which nothing is published is not there."""
    hbm_bytes: int = 0
    """Memory that a program may use."""
    hbm_bytes_per_s: float = 0.0
    mxu_size: int = 0
    """Rows and columns of a systolic array; 0 where there is none."""
    mxus: int = 0
    """Systolic arrays."""
    clock_hz: float = 0.0
    """What turns the compiler's `estimated_cycles` into seconds; arrays x size^2 x 2 x this is the peak (v6e: half)."""
    links: int = 0
    """Of a chip to its neighbours (to the switch, on GPUs)."""
    link_bytes_per_s: float = 0.0
    """One direction of one link."""
    between_slices_bytes_per_s: float = 0.0
    """Each way through the data centre's network, a device's share; 0 where slices cannot work together."""
    dims: int = 0
    """Of the grid that joins the chips; 0 where a switch or nothing does."""
    ring: int = 0
    """Chips along an axis of the grid from which on its ends are joined. (v4 and v5p: on all axes or on none.)"""
    cores: int = 1
    """Per chip; those of v4 and later work as one device."""
    split_cores: bool = False
    """Each core is a device of its own."""
    most_chips: int = 1
    """That one pod, or one machine with GPUs, joins."""
    sources: str = ""

    @property
    def device_kind(self) -> str:
        return self.device_kinds[0]

    @property
    def devices_per_chip(self) -> int:
        return self.cores if self.split_cores else 1


_TABLE = (
    Chip(
        name="v2", platform="tpu", device_kinds=("TPU v2",),
        peak_flops={"bfloat16": 22.5e12}, hbm_bytes=int(7.48 * GIB), hbm_bytes_per_s=350e9,
        mxu_size=128, mxus=1, clock_hz=0.7e9, links=4, link_bytes_per_s=62e9,
        dims=2, ring=16, cores=2, split_cores=True, most_chips=256,
        sources="peak, memory: architecture page (45 TFLOP/s and 700 GB/s a chip of two cores); clock, arrays, links "
        "(496 Gbit/s): Norrie et al. 2021",
    ),
    Chip(
        name="v3", platform="tpu", device_kinds=("TPU v3",),
        peak_flops={"bfloat16": 61.5e12}, hbm_bytes=int(15.48 * GIB), hbm_bytes_per_s=450e9,
        mxu_size=128, mxus=2, clock_hz=0.94e9, links=4, link_bytes_per_s=82e9,
        dims=2, ring=32, cores=2, split_cores=True, most_chips=1024,
        sources="peak, memory: architecture page (123 TFLOP/s and 900 GB/s a chip of two cores); clock, arrays, links "
        "(656 Gbit/s): Norrie et al. 2021 (Jouppi et al. 2023: 70 GB/s; scaling book: 100 GB/s)",
    ),
    Chip(
        name="v4", platform="tpu", device_kinds=("TPU v4",),
        peak_flops={"bfloat16": 275e12}, hbm_bytes=int(30.75 * GIB), hbm_bytes_per_s=1200e9,
        mxu_size=128, mxus=8, clock_hz=1.05e9, links=6, link_bytes_per_s=45e9, between_slices_bytes_per_s=6.25e9,
        dims=3, ring=4, cores=2, most_chips=4096,
        sources="peak, memory, arrays: architecture page; clock: Jouppi et al. 2023 (who say 50 GB/s a link); links, "
        "between slices (25 GB/s a host of 4 chips): scaling book",
    ),
    Chip(
        name="v5e", platform="tpu", device_kinds=("TPU v5 lite", "TPU v5e"),
        peak_flops={"bfloat16": 197e12}, hbm_bytes=int(15.75 * GIB), hbm_bytes_per_s=819e9,
        mxu_size=128, mxus=4, clock_hz=1.5e9, links=4, link_bytes_per_s=50e9, between_slices_bytes_per_s=3.125e9,
        dims=2, ring=16, most_chips=256,
        sources="peak, memory, arrays, links (400 GB/s a chip, both ways over 4), between slices (6.4 Tbit/s a pod): "
        "architecture page; clock: scaling book",
    ),
    Chip(
        name="v5p", platform="tpu", device_kinds=("TPU v5", "TPU v5p"),
        peak_flops={"bfloat16": 459e12}, hbm_bytes=int(95.74 * GIB), hbm_bytes_per_s=2765e9,
        mxu_size=128, mxus=8, clock_hz=1.75e9, links=6, link_bytes_per_s=100e9, between_slices_bytes_per_s=6.25e9,
        dims=3, ring=4, cores=2, most_chips=8960,
        sources="peak, memory, arrays, links (1200 GB/s a chip, both ways over 6), between slices (50 Gbit/s a chip): "
        "architecture page; clock: peak over what the arrays do in a cycle",
    ),
    Chip(
        # The peak is twice what two arrays of 256 do at 1.75 GHz, one product a cell and cycle; and the compiler counts
        # so: 301,616 cycles for matrices of 4096 x 4096 are 87% of the peak at 1.75 GHz. What it writes beside passes
        # over memory takes 0.89 of the published bandwidth there (docs/calibration.md), and would beat it at 3.5 GHz.
        name="v6e", platform="tpu", device_kinds=("TPU v6 lite", "TPU v6e"),
        peak_flops={"bfloat16": 918e12}, hbm_bytes=int(31.25 * GIB), hbm_bytes_per_s=1638e9,
        mxu_size=256, mxus=2, clock_hz=1.75e9, links=4, link_bytes_per_s=100e9, between_slices_bytes_per_s=12.5e9,
        dims=2, ring=16, most_chips=256,
        sources="peak, memory, arrays, links (800 GB/s a chip, both ways over 4), between slices (200 Gbit/s for 2 "
        "chips): architecture page; clock: the compiler's cycles, docs/calibration.md",
    ),
    Chip(
        name="t4", platform="gpu", device_kinds=("Tesla T4",),
        peak_flops={"float16": 65e12, "float32": 8.1e12, "bfloat16": 8.1e12},
        hbm_bytes=int(0.75 * 15360 * MIB), hbm_bytes_per_s=300e9, links=1, link_bytes_per_s=16e9, most_chips=4,
        sources="data sheet (PCIe 3 x16 in the place of links); it has no bfloat16 units, and XLA computes such "
        "products in float32 (openxla/xla issue 12429)",
    ),
    Chip(
        name="a100", platform="gpu", device_kinds=("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        peak_flops={"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12},
        hbm_bytes=int(0.75 * 40960 * MIB), hbm_bytes_per_s=1555e9, links=12, link_bytes_per_s=25e9,
        between_slices_bytes_per_s=25e9, most_chips=8,
        sources="data sheet, 40 GB; between machines: DGX A100 (a 200 Gbit/s card for each)",
    ),
    Chip(
        name="a100-80gb", platform="gpu", device_kinds=("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
        peak_flops={"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12},
        hbm_bytes=int(0.75 * 81920 * MIB), hbm_bytes_per_s=2039e9, links=12, link_bytes_per_s=25e9,
        between_slices_bytes_per_s=25e9, most_chips=8,
        sources="data sheet, 80 GB SXM (the PCIe card: 1935 GB/s); between machines: DGX A100 (a 200 Gbit/s card each)",
    ),
    Chip(  # the PCIe and NVL cards are slower and have other names
        name="h100", platform="gpu", device_kinds=("NVIDIA H100 80GB HBM3",),
        peak_flops={"bfloat16": 989e12, "float16": 989e12, "float32": 67e12},
        hbm_bytes=int(0.75 * 81559 * MIB), hbm_bytes_per_s=3350e9, links=18, link_bytes_per_s=25e9,
        between_slices_bytes_per_s=50e9, most_chips=8,
        sources="data sheet, SXM; between machines: DGX H100 (a 400 Gbit/s card for each)",
    ),
    Chip(
        name="h200", platform="gpu", device_kinds=("NVIDIA H200",),
        peak_flops={"bfloat16": 989e12, "float16": 989e12, "float32": 67e12},
        hbm_bytes=int(0.75 * 143771 * MIB), hbm_bytes_per_s=4800e9, links=18, link_bytes_per_s=25e9,
        between_slices_bytes_per_s=50e9, most_chips=8,
        sources="data sheet, SXM; between machines: DGX H200 (a 400 Gbit/s card for each)",
    ),
    Chip(name="cpu", platform="cpu", device_kinds=("cpu",), sources="measured on the machine itself"),
)  # fmt: skip

CHIPS: dict[str, Chip] = {chip.name: chip for chip in _TABLE}


def chip_of(device_kind: str) -> Chip | None:
    """The chip that JAX calls this.

    Names are compared whole: "NVIDIA H100 PCIe", "NVIDIA H200 NVL", "TPU v4 lite" and slices of a card (MIG) are other
    chips than the ones in the table, and slower.
    """
    return next((chip for chip in _TABLE if device_kind in chip.device_kinds), None)
