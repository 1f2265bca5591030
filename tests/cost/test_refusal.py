"""What compilers say when there is too little memory, read back."""

from podling.cost.refusal import read_refusal

GIB, MIB = 2**30, 2**20
V5E = int(15.75 * GIB)

TEMPORARIES = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (16.61G) exceeds "
    "available HBM (15.75G)."
)
LISTED = """RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 16.50G of 15.48G hbm. Exceeded hbm capacity.

Total hbm usage >= 18.02G:
    reserved        530.00M
    program          16.50G
    arguments         1.00G

Output size 0B; shares 0B with arguments.

Program hbm requirement 16.50G:
    HLO temp         16.40G (99.9% utilization: Unpadded (16.38G) Padded (16.39G), 0.1% fragmentation (10.00M))

  Largest program allocations in hbm:

  1. Size: 4.50G
     Operator: op_name="jit(train_step)/jvp()/while/body/attention/bthk,bshk->bhts/dot_general"
     Shape: f32[12,8,12,1024,1024]{3,4,2,1,0:T(8,128)}
     Unpadded size: 4.50G
     XLA label: %custom-call.7 = f32[12,8,12,1024,1024]{3,4,2,1,0:T(8,128)} custom-call()
     Allocation type: HLO temp
     ==========================

  2. Size: 576.00M
     Shape: bf16[12,8,1024,3072]{3,2,1,0:T(8,128)(2,1)}
     Unpadded size: 576.00M
     XLA label: %copy.1
     Allocation type: HLO temp
     ==========================
"""
VMEM = (
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 32.42M of 16.00M vmem. Exceeded vmem capacity by "
    "16.42M."
)


def test_a_total_alone():
    refusal = read_refusal("noise\n" + TEMPORARIES, 1)
    assert refusal.hbm.limit_bytes == V5E and not refusal.hbm.fits
    assert abs(refusal.hbm.total_bytes - 16.61 * GIB) < 2
    assert refusal.words == ("the step needs at least 16.61 GiB, and a device has 15.75 GiB: 880.6 MiB too much")


def test_a_list_of_allocations():
    refusal = read_refusal(LISTED, 1)
    assert abs(refusal.hbm.total_bytes - 17.5 * GIB) < 4 and refusal.hbm.limit_bytes == int(15.48 * GIB) + 1
    assert sum(refusal.hbm.by_category.values()) == refusal.hbm.total_bytes
    assert [(t.name, t.shape, t.device_bytes) for t in refusal.hbm.largest] == [
        ("attention: scores", "f32[12,8,12,1024,1024]", int(4.5 * GIB)),
        ("made by the compiler", "bf16[12,8,1024,3072]", 576 * MIB),
    ]
    assert "the step needs 17.50 GiB, and a device has 15.48 GiB: 2.02 GiB too much" in refusal.words
    assert "most of it attention: scores (4.50 GiB)" in refusal.words


def test_memory_that_is_not_the_devices_main_one():
    refusal = read_refusal(VMEM, V5E)
    assert (refusal.hbm.total_bytes, refusal.hbm.limit_bytes) == (0, V5E)
    assert refusal.words == "an operation of the step needs 32.4 MiB of the chip's vmem, which has 16.0 MiB"


def test_a_form_that_is_not_known_is_quoted_and_never_fits_by_accident():
    refusal = read_refusal("Traceback\nRESOURCE_EXHAUSTED: allocator gave up\nmore", V5E)
    assert not refusal.hbm.fits and "RESOURCE_EXHAUSTED: allocator gave up" in refusal.words
    refusal = read_refusal("INTERNAL: Mosaic failed to compile\nstack", V5E)
    assert refusal.words == "the compiler failed: INTERNAL: Mosaic failed to compile"
    assert read_refusal("", V5E).words == "the compiler failed: it gave no reason"
