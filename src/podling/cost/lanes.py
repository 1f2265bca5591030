"""What runs beside the compute: transfers in the background, and how long the schedule waits for them.

A lane is a way that transfers take one after another at its full bandwidth: the device's memory, or the links along
some mesh axes. Time is in seconds of that bandwidth.
"""

from dataclasses import dataclass, field


@dataclass
class Lane:
    """Transfers in a queue."""

    asked: float = 0.0
    done: float = 0.0

    def add(self, seconds: float) -> float:
        """Take on a transfer; returns what `Lanes.wait` wants to know."""
        self.asked += seconds
        return self.asked

    def go_on(self, seconds: float) -> None:
        """Time that the lane had for its queue."""
        self.done = min(self.asked, self.done + seconds)


@dataclass
class Lanes:
    """The lanes of one computation that runs step by step."""

    memory: Lane = field(default_factory=Lane)  # between HBM and VMEM
    links: dict[tuple[str, ...], Lane] = field(default_factory=dict)  # by the mesh axes that are crossed
    tickets: dict[str, float] = field(default_factory=dict)  # by the instruction that started it

    def go_on(self, seconds: float, memory_s: float = 0.0) -> None:
        """The schedule took this long for something else, and `memory_s` of it that kept the memory busy itself."""
        self.memory.go_on(max(0.0, seconds - memory_s))
        for lane in self.links.values():
            lane.go_on(seconds)

    def copy(self, name: str, seconds: float) -> None:
        """A copy between HBM and VMEM begins."""
        self.tickets[name] = self.memory.add(seconds)

    def send(self, name: str, axes: tuple[str, ...], seconds: float) -> None:
        """A collective begins."""
        self.tickets[name] = self.links.setdefault(axes, Lane()).add(seconds)

    def wait(self, name: str, axes: tuple[str, ...] | None = None) -> float:
        """Seconds until a transfer is through, of links along `axes` or of the memory; all lanes go on meanwhile."""
        lane = self.memory if axes is None else self.links[axes]
        left = max(0.0, self.tickets.pop(name) - lane.done)
        self.go_on(left)
        return left
