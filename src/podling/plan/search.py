"""The search for the fastest layout that fits: estimates rank, the compiler settles, each answer corrects the ranking.

A layout is a mesh, a micro-batch, a remat policy and a loss chunk: hundreds for one model and target, and a
compilation takes half a minute. The analytic estimates of `cost.analytic` order them; the one that looks fastest is
compiled; what the compiler says against the estimate goes into a small regression over the layout's parts, which
corrects all the estimates that are left; and so on, until nothing left looks faster than the best found.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from podling.config import Config
from podling.cost.records import Layout
from podling.model.fit import fits
from podling.parallel.axes import batch_ways, factorisations, mesh_text, read_mesh
from podling.plan.records import Option
from podling.plan.target import Target

REMAT = ("none", "dots", "full")
CHUNKS = (0, 128, 256, 512)
RIDGE = 0.3  # how much evidence a part of a layout needs before it is believed; 0 believes one observation wholly
NO_FASTER = 0.99  # what is left must promise to be faster than this share of the best found
AT_LEAST = 4  # compilations before the regression is trusted to end the search


@dataclass(frozen=True)
class Limits:
    """How long a search may go on."""

    compiles: int
    seconds: float
    cache: Path


@dataclass(frozen=True)
class Found:
    """What a search has seen."""

    fitting: tuple[Option, ...]  # fastest first
    refused: tuple[Option, ...]  # in the order in which they were tried
    considered: int  # layouts in the space


def layouts(config: Config, target: Target, held: frozenset[str]) -> list[Layout]:
    """Every layout of the space; what the person has said is held.

    Args:
        config: resolved.
        target: gives the number of devices, and which are joined.
        held: flags whose value stays (`--mesh`, `--train.micro-batch`, `--train.remat`, `--train.loss-chunk`).
    """
    train, context = config.train, config.model.context
    rows = train.batch_tokens // context
    remats = (train.remat,) if "--train.remat" in held else REMAT
    chunks = (train.loss_chunk,) if "--train.loss-chunk" in held else _chunks(context)
    found = []
    for mesh in _meshes(config, target, held):
        ways = batch_ways(mesh)
        micros = [size * ways for size in range(1, rows // ways + 1) if rows % (size * ways) == 0]
        if "--train.micro-batch" in held and train.micro_batch:
            micros = [size for size in micros if size == train.micro_batch]
        found += [
            Layout(mesh_text(mesh), micro, rows // micro, remat, chunk)
            for micro in micros
            for remat in remats
            for chunk in chunks
        ]
    return found


def _chunks(context: int) -> list[int]:
    return [chunk for chunk in CHUNKS if chunk < context and (chunk == 0 or context % chunk == 0)]


def _meshes(config: Config, target: Target, held: frozenset[str]) -> list[Mapping[str, int]]:
    if "--mesh" in held and config.run.mesh != "auto":
        return [read_mesh(config.run.mesh)[0]]
    possible = [mesh for mesh in factorisations(target.devices) if fits(config, mesh)]
    # What is sent for every layer stays between joined devices wherever that is possible.
    inside = [mesh for mesh in possible if target.joined % (mesh["fsdp"] * mesh["tensor"]) == 0]
    return list(inside or possible)


def search(
    candidates: Sequence[Option],
    compile_: Callable[[Layout], Option],
    limits: Limits,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """Compile the layouts that look fastest, until nothing left promises to be faster.

    Args:
        candidates: every layout with its estimate.
        compile_: asks the compiler.
        limits: after `compiles` answers, or when another would take longer than `seconds`, it ends; but never before
            the first that fits, or every layout that might has been refused.
        clock: seconds; injected in tests.
    """
    left = list(candidates)
    seen: list[tuple[Option, Option]] = []  # estimate, answer
    began_s = clock()
    while left:
        best = min((answer for _, answer in seen if answer.fits), key=_step_s, default=None)
        times, needs = _corrected(left, seen)
        limit = [option.hbm.limit_bytes for option in left]
        fitting = [index for index in range(len(left)) if needs[index] <= limit[index]]
        if best is not None:
            each_s = (clock() - began_s) / len(seen)
            if len(seen) >= limits.compiles or clock() - began_s + each_s > limits.seconds:
                break
            if not fitting or (len(seen) >= AT_LEAST and times[fitting].min() > NO_FASTER * _step_s(best)):
                break
        elif len(seen) >= 2 * limits.compiles:
            break
        index = _next(left, seen, times, needs, fitting)
        estimate = left.pop(index)
        answer = compile_(estimate.layout)
        seen.append((estimate, answer))
        if not answer.fits:
            left = [option for option in left if not _needs_more(option, estimate)]
    answers = [answer for _, answer in seen]
    return Found(
        fitting=tuple(sorted((answer for answer in answers if answer.fits), key=_step_s)),
        refused=tuple(answer for answer in answers if not answer.fits),
        considered=len(candidates),
    )


def _next(
    left: Sequence[Option],
    seen: Sequence[tuple[Option, Option]],
    times: np.ndarray,
    needs: np.ndarray,
    fitting: list[int],
) -> int:
    """Which to compile now: the fastest that should fit; at first one of every remat policy."""
    if not fitting:
        return int(needs.argmin())
    tried = {estimate.layout.remat for estimate, _ in seen}
    fresh = [index for index in fitting if left[index].layout.remat not in tried]
    fastest = min(fitting, key=lambda index: times[index])
    # A policy is worth a compilation only while an estimate, which may be that far off, has not ruled it out.
    worth = [index for index in fresh if times[index] < 1.5 * times[fastest]]
    return min(worth, key=lambda index: times[index]) if worth and len(seen) < AT_LEAST else fastest


def _needs_more(option: Option, refused: Option) -> bool:
    """Whether a layout surely needs more than one that was refused: the same, with more rows at once."""
    same = ("mesh", "remat", "loss_chunk")
    alike = all(getattr(option.layout, name) == getattr(refused.layout, name) for name in same)
    return alike and option.layout.micro_batch > refused.layout.micro_batch


def _corrected(left: Sequence[Option], seen: Sequence[tuple[Option, Option]]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and bytes of what is left: its estimates, times what the compiler's answers make of them."""
    estimates = [option.time.step_s if option.time else math.inf for option in left]
    timed = [(e, _step_s(a) / _step_s(e)) for e, a in seen if a.time is not None and e.time is not None]
    sized = [(e, a.hbm.total_bytes / e.hbm.total_bytes) for e, a in seen if a.hbm.total_bytes]
    needs = np.array([option.hbm.total_bytes for option in left], float)
    return np.array(estimates) * _factors(left, timed), needs * _factors(left, sized)


def _factors(left: Sequence[Option], observed: Sequence[tuple[Option, float]]) -> np.ndarray:
    """A factor for each layout, from the factors observed: a ridge regression of their logarithms on its parts."""
    if not observed:
        return np.ones(len(left))
    names = sorted({part for option, _ in observed for part in _parts(option.layout)})

    def rows(options: Sequence[Option]) -> np.ndarray:
        return np.array([[1.0, *(name in _parts(option.layout) for name in names)] for option in options], float)

    x = rows([option for option, _ in observed])
    y = np.log([factor for _, factor in observed])
    penalty = RIDGE * np.eye(x.shape[1])
    penalty[0, 0] = 1e-6  # the estimate as a whole may be off by any factor
    return np.exp(rows(left) @ np.linalg.solve(x.T @ x + penalty, x.T @ y))


def _parts(layout: Layout) -> frozenset[str]:
    rows = layout.micro_batch // batch_ways(read_mesh(layout.mesh)[0])
    mesh, remat = f"mesh {layout.mesh}", f"remat {layout.remat}"
    return frozenset((mesh, remat, f"rows {rows}", f"chunk {layout.loss_chunk}", f"{remat} rows {rows}"))


def _step_s(option: Option) -> float:
    assert option.time is not None
    return option.time.step_s
