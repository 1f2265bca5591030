"""What crosses the links in a step: the collectives that each axis of the mesh implies."""

from collections.abc import Mapping

from podling.files import show_binary
from podling.layout.table import ACTIVATIONS, GRADIENTS, LAYER, Row, totals
from podling.train.batch_plan import BatchPlan


def traffic(sizes: Mapping[str, int], rows: list[Row], plan: BatchPlan, remat: str) -> dict[str, str]:
    """One sentence for every axis of more than one device.

    Args:
        sizes: devices on each mesh axis.
        rows: `table.state_rows` and `table.step_rows`.
        plan: how the batch is cut.
        remat: what the backward pass computes again.
    """
    bytes_of = totals(rows)
    each = "" if plan.micro_steps == 1 else f", in each of the {plan.micro_steps} micro-batches"
    dtype = next(row.dtype for row in rows if row.kind == LAYER and row.name == "qkv_kernel")
    stream = next(row.device_bytes for row in rows if row.kind == ACTIVATIONS and "gathered" in row.name)
    # The transposes of the four, and gathered sequences again; whole blocks take one more sum.
    back = "seven" if remat == "full" else "six"
    copied = {
        axis: sum(row.device_bytes for row in rows if row.kind == GRADIENTS and not _over(row, axis)) for axis in sizes
    }
    sentences = {
        "data": f"one all-reduce a step: the gradients, {show_binary(bytes_of[GRADIENTS])} on each device",
        "fsdp": (
            f"all-gather of each layer's weights in {dtype} before they are used ({show_binary(bytes_of[LAYER])} a "
            "layer), forward and again backward; reduce-scatter of their gradients; all-to-all of looked-up "
            f"embeddings{each}. One all-reduce a step: gradients of what is copied, {show_binary(copied['fsdp'])}"
        ),
        "tensor": (
            "all-gather of the residual stream's positions into attention and MLP, reduce-scatter out of them: "
            f"{show_binary(stream)} each, four a layer forward and {back} backward; all-reduce of the loss's maxima "
            f"and sums{each}. One all-reduce a step: gradients of what is copied, {show_binary(copied['tensor'])}"
        ),
    }
    return {axis: sentence for axis, sentence in sentences.items() if sizes[axis] > 1}


def _over(row: Row, axis: str) -> bool:
    return any(axis in mesh_axes for mesh_axes in row.mesh_axes)
