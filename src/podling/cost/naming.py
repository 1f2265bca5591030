"""What an array of the compiled step is in the model: its category, and a name that the model's reader knows."""

import re
from collections.abc import Iterable, Iterator

from podling.cost.liveness import Buffer
from podling.hlo.program import SAME_VALUE, Program
from podling.hlo.text import Computation, Instruction

PRODUCTS = {
    "btd,dn->btn": "q, k, v",
    "bthk,bshk->bhts": "scores",
    "bhts,bshk->bthk": "weighted values",
    "btn,nd->btd": "projection out",
    "btd,df->btf": "hidden layer",
    "btf,fd->btd": "projection down",
    "btd,vd->btv": "logits",
    "btv,vd->btd": "gradient of the hidden states",
    "btv,btd->vd": "gradient of the table",
}
"""The einsums of `podling.model` by what they give."""
COPIES = (*SAME_VALUE, "slice-start", "slice-done", "get-tuple-element")
BETWEEN_LAYERS = ("while", "closed_call", "carried")
_SCOPES = ("attention", "mlp", "loss", "embedding", "final_norm", "optimizer")


class Names:
    """Categories and names of the buffers of one program."""

    def __init__(self, program: Program):
        self.program = program
        entry = program.computations[program.entry].values()
        self.params = {
            i.op_name.removeprefix("state."): i.shapes[0].dims
            for i in entry
            if i.opcode == "parameter" and i.op_name.startswith("state.params.")
        }
        self.vocab = next((dims[0] for name, dims in self.params.items() if name.endswith("token_embed")), 0)
        self.hidden = next((dims[-1] for name, dims in self.params.items() if name.endswith("up_kernel")), 0)

    def of(self, buffer: Buffer) -> tuple[str, str]:
        """Category and name."""
        if buffer.argument:
            return _argument(buffer.made_by.op_name or buffer.made_by.name)
        sources, dims = self._sources(buffer), buffer.shape.dims
        backward = any("transpose(jvp" in source for source in sources)
        forward = not backward and any("jvp(" in source for source in sources)
        if forward and self._stacked(buffer) and dims not in self.params.values():
            return "activations", f"{words(sources, dims, self.hidden)}, every layer"
        param = self._param(dims)
        if any("opt_state" in source for source in sources):
            return "temporary", f"copy of {_argument(next(s for s in sources if 'opt_state' in s))[1]}"
        if param and not backward and any("state.params" in source for source in sources):
            return "parameters", f"{param}, {'copied' if buffer.shape.dtype == 'f32' else 'in ' + buffer.shape.dtype}"
        if param and (backward or buffer.shape.dtype == "f32"):
            return "gradients", f"gradient of {param}"
        if param:
            return "parameters", f"{param}, in {buffer.shape.dtype}"
        if self.vocab in dims and any("loss" in source for source in sources):
            return "logits", "gradient of the logits" if backward else "logits"
        # The backward pass may write over what it has read: what made an array says whose it is.
        made = [source for source in sources if "jvp(" in source and "transpose(jvp" not in source]
        if made and (forward or "transpose(jvp" not in buffer.made_by.op_name) and self._read_backward(buffer):
            return "activations", words(made, dims, self.hidden)
        return "temporary", words(sources, dims, self.hidden)

    def _param(self, dims: tuple[int, ...]) -> str:
        """The parameter of this shape, or with a layer of this shape, in whatever order of axes; or gathered."""
        wanted = _rank(dims)
        if len(wanted) < 2:
            return ""
        whole = list(self.params.items())
        layer = [(f"{name}, one layer", held[1:]) for name, held in whole if ".blocks." in name]
        same = [name for name, held in whole + layer if held == dims]
        same += [name for name, held in whole + layer if _rank(held) == wanted]
        ways = self.program.partitions
        same += [f"{name}, gathered" for name, held in whole + layer if _gathered(_rank(held), wanted, ways)]
        return next(iter(same), "")

    def _stacked(self, buffer: Buffer) -> bool:
        """Whether a loop writes it piece by piece, one a turn."""
        turns = {self.program.times[computation] // self.program.times[buffer.computation] for computation, _ in
                 buffer.written_by if computation != buffer.computation}  # fmt: skip
        return bool(turns) and buffer.shape.dims[:1] == (max(turns),)

    def _read_backward(self, buffer: Buffer) -> bool:
        """Whether the backward pass of layers that run one after another reads it."""
        here = self.program.computations[buffer.computation]
        same, found = {buffer.made_by.name}, False
        for user in here.values():  # in the order of the schedule: what is read was made before
            if same.isdisjoint(user.operands):
                continue
            if user.opcode in COPIES or "ConcatBitcast" in user.attributes:
                same.add(user.name)
            inside = self.program.computations.get(dict(user.calls).get("calls", ""), {})
            found |= any("transpose(jvp" in each.op_name for each in (user, *inside.values()))
        return found

    def _sources(self, buffer: Buffer) -> list[str]:
        """Which lines of the traced program make or fill it."""
        made = [*buffer.written_by, (buffer.computation, buffer.made_by)]
        found = [name for where, instruction in made for name in self._origin(where, instruction, buffer)]
        return [name for name in found if name]

    def _origin(self, where: str, instruction: Instruction, buffer: Buffer) -> Iterator[str]:
        """The op_name of what is written, behind copies and updates of a piece."""
        here = self.program.computations[where]
        if instruction.opcode == "fusion":
            inside = self.program.computations[dict(instruction.calls)["calls"]]
            for update in _updates(inside, buffer.shape.dims):
                piece = self.program.plain(inside, update.operands[1])
                if piece.opcode == "parameter":
                    piece = self._plain(here, instruction.operands[int(piece.literal)])
                yield piece.op_name if piece.opcode != "parameter" else "jvp()/carried"
        elif instruction.opcode in COPIES and instruction.operands:
            yield self._plain(here, instruction.operands[0]).op_name
        yield instruction.op_name

    def _plain(self, here: Computation, name: str) -> Instruction:
        """The instruction behind copies; an element of what a loop carries is itself."""
        value = here[name]
        while value.operands and (value.opcode in COPIES or "ConcatBitcast" in value.attributes):
            value = here[value.operands[0]]
        return value


def words(sources: list[str], dims: tuple[int, ...], hidden: int = 0) -> str:
    """`attention: q, k, v` of `jit(train_step)/jvp()/while/body/attention/btd,dn->btn/dot_general`."""
    told = [source for source in sources if "/" in source and "dynamic_update" not in source]
    if not told:
        return next(iter(sources), "") or "made by the compiler"
    parts = told[0].split("/")
    scope = next((scope for scope in _SCOPES for part in parts if scope in part), "")
    what = next((PRODUCTS[part] for part in parts if part in PRODUCTS), "")
    if scope == "attention" and len(dims) > 3 and dims[-1] == dims[-2]:
        what = "scores"
    elif not what and parts[-1] in BETWEEN_LAYERS:
        what = "residual stream"
    elif not what and parts[-1] == "reduce_precision":  # a result that is kept as it is
        heads = scope == "attention" and dims[-1:] < (128,)
        what = "hidden layer" if scope == "mlp" and hidden in dims else "heads" if heads else "residual stream"
    what = what or parts[-1].replace("_", " ")
    if "transpose(jvp" in told[0] and "rematted" not in told[0]:
        what = f"backward of {what}"
    return f"{scope}: {what}" if scope else what


def _updates(inside: Computation, dims: tuple[int, ...]) -> Iterable[Instruction]:
    return [i for i in inside.values() if i.opcode == "dynamic-update-slice" and i.shapes[0].dims == dims]


def _argument(op_name: str) -> tuple[str, str]:
    if op_name.startswith("state.params."):
        return "parameters", op_name.removeprefix("state.")
    moment = re.search(r"\b(mu|nu)\..*", op_name)
    return ("moments", moment[0]) if moment else ("temporary", op_name.removeprefix("state."))


def _rank(dims: tuple[int, ...]) -> list[int]:
    return sorted(size for size in dims if size > 1)


def _gathered(held: list[int], wanted: list[int], ways: int) -> bool:
    """Whether `wanted` is `held` with one of its axes some times as long, as an all-gather over some devices gives."""
    if len(held) != len(wanted) or len(held) < 2:
        return False
    left, more = list(held), list(wanted)
    for size in held:
        if size in more:
            left.remove(size)
            more.remove(size)
    return len(left) == 1 and more[0] % left[0] == 0 and ways % (more[0] // left[0]) == 0
