"""Accelerators are found in the file system."""

from pathlib import Path

import pytest

from podling.parallel.hardware import accelerator


def card(root: Path, vendor: str, device: str) -> None:
    folder = root / f"sys/bus/pci/devices/0000:00:0{len(list(root.rglob('vendor')))}.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(vendor + "\n")
    (folder / "device").write_text(device + "\n")


@pytest.mark.parametrize(("name", "kind"), [("nvidia0", "gpu"), ("kfd", "gpu"), ("accel0", "tpu"), ("null", None)])
def test_device_files(tmp_path: Path, name: str, kind: str | None) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / name).touch()
    assert accelerator(tmp_path) == kind


def test_a_tpu_behind_vfio_is_found_by_its_pci_id(tmp_path: Path) -> None:
    card(tmp_path, "0x1ae0", "0x0042")  # Google's network card
    card(tmp_path, "0x8086", "0x0063")  # another vendor's device with a TPU's id
    assert accelerator(tmp_path) is None
    card(tmp_path, "0x1ae0", "0x0063")
    assert accelerator(tmp_path) == "tpu"


def test_nothing_to_read_is_no_accelerator(tmp_path: Path) -> None:
    assert accelerator(tmp_path / "absent") is None
