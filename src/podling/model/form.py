"""How the same mathematics is laid out for a machine: it decides speed and memory, and never what is computed."""

from dataclasses import dataclass

from podling.config import TrainConfig


@dataclass(frozen=True)
class Form:
    """One way of running the forward and the backward pass; the default is the plainest.

    `podling.tuning` chooses one for a device; a configuration's `auto` that nobody has settled means the plain form.
    """

    attention: str = "reference"  # which of `podling.model.attention`
    layers: str = "scan"  # scan: one body, compiled once; unroll: the layers one after another
    remat: str = "none"  # see `podling.model.remat`
    loss_chunk: int = 0  # positions of the loss at a time; 0: all

    @classmethod
    def of(cls, train: TrainConfig) -> "Form":
        """The form that a configuration asks for."""
        plain = cls()
        return cls(
            attention=plain.attention if train.attention == "auto" else train.attention,
            layers=plain.layers if train.layer_loop == "auto" else train.layer_loop,
            remat=plain.remat if train.remat == "auto" else train.remat,
            loss_chunk=max(0, train.loss_chunk),
        )
