"""The search for the fastest layout that fits: estimates rank, the compiler settles, each answer corrects the ranking.

A layout is a mesh, a micro-batch, a remat policy and a loss chunk: hundreds for one model and target, and a
compilation takes half a minute. The analytic estimates of `cost.analytic` order them; the one that looks fastest is
compiled; what the compiler says against the estimate goes into a small regression over the layout's parts, which
corrects all the estimates that are left; and so on, until nothing left looks faster than the best found.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
PART = 0.08  # how far off, as a logarithm, the estimate of one part of a layout is expected to be
NOISE = 0.02  # and what is left when every part is known
HOPE = 0.5  # standard deviations by which a layout may be better than it is thought to be
FAR_OFF = 1.2  # a remat policy or a mesh that no compilation has shown may be better by this than its estimate
MESHES = 3  # compiled at least, where so many are worth it
AS_FAST = 1.01  # within this of the fastest, a layout is chosen for the memory that it leaves
NO_FASTER = 0.995  # what is left must hope to be faster than this share of the best found


@dataclass(frozen=True)
class Limits:
    """How long a search may go on."""

    compiles: int
    seconds: float
    cache: Path


@dataclass(frozen=True)
class Found:
    """What a search has seen."""

    fitting: tuple[Option, ...]  # as `best_first` puts them
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
    remats = (train.remat,) if "--train.remat" in held and train.remat != "auto" else REMAT
    chunks = (train.loss_chunk,) if "--train.loss-chunk" in held and train.loss_chunk >= 0 else _chunks(context)
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
            fresh = _fresh(left, seen, times, fitting)
            if not fitting or (not fresh and times[fitting].min() > NO_FASTER * _step_s(best)):
                break
        elif len(seen) >= 2 * limits.compiles:
            break
        worth = _fresh(left, seen, times, fitting) or fitting
        index = min(worth, key=lambda index: times[index]) if fitting else int(needs.argmin())
        estimate = left.pop(index)
        answer = compile_(estimate.layout)
        answer = replace(answer, estimated_s=estimate.time.step_s if estimate.time else None)
        seen.append((estimate, answer))
        if not answer.fits:
            left = [option for option in left if not _needs_more(option, estimate)]
    answers = [answer for _, answer in seen]
    return Found(
        fitting=best_first(answer for answer in answers if answer.fits),
        refused=tuple(answer for answer in answers if not answer.fits),
        considered=len(candidates),
    )


def best_first(fitting: Iterable[Option]) -> tuple[Option, ...]:
    """Fastest first, but before all the one that needs least memory of those within 1% of the fastest."""
    fastest = sorted(fitting, key=_step_s)
    if not fastest:
        return ()
    near = [option for option in fastest if _step_s(option) <= AS_FAST * _step_s(fastest[0])]
    best = min(near, key=lambda option: option.hbm.total_bytes)
    return (best, *(option for option in fastest if option is not best))


def _fresh(
    left: Sequence[Option], seen: Sequence[tuple[Option, Option]], times: np.ndarray, fitting: list[int]
) -> list[int]:
    """What shows a remat policy or a mesh for the first time, and might be the fastest all the same."""
    if not fitting or not seen:
        return []
    remats = {estimate.layout.remat for estimate, _ in seen}
    meshes = {estimate.layout.mesh for estimate, _ in seen}
    near = [index for index in fitting if times[index] < FAR_OFF * times[fitting].min()]
    remat = [index for index in near if left[index].layout.remat not in remats]
    mesh = [index for index in near if left[index].layout.mesh not in meshes and len(meshes) < MESHES]
    return remat or mesh


def _needs_more(option: Option, refused: Option) -> bool:
    """Whether a layout surely needs more than one that was refused: the same, with more rows at once."""
    same = ("mesh", "remat", "loss_chunk")
    alike = all(getattr(option.layout, name) == getattr(refused.layout, name) for name in same)
    return alike and option.layout.micro_batch > refused.layout.micro_batch


def _corrected(left: Sequence[Option], seen: Sequence[tuple[Option, Option]]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds that one may hope for and bytes to expect of what is left.

    That is its estimates, times what the compiler's answers so far make of them.
    """
    estimates = [option.time.step_s if option.time else math.inf for option in left]
    timed = [(e, _step_s(a) / _step_s(e)) for e, a in seen if a.time is not None and e.time is not None]
    sized = [(e, a.hbm.total_bytes / e.hbm.total_bytes) for e, a in seen if a.hbm.total_bytes]
    needs = np.array([option.hbm.total_bytes for option in left], float)
    return np.array(estimates) * _factors(left, timed, HOPE), needs * _factors(left, sized, 0.0)


def _factors(left: Sequence[Option], observed: Sequence[tuple[Option, float]], hope: float) -> np.ndarray:
    """A factor for each layout, from the factors observed: a Bayesian linear regression of their logarithms.

    Every part of a layout has a factor of its own, expected to be 1 (Bishop 2006, section 3.3). `hope` lowers each
    result by so many standard deviations: what has unknown parts is worth a look that what is well known is not.
    """
    if not observed:
        return np.ones(len(left))
    options = [option for option, _ in observed]
    names = sorted({part for option in (*options, *left) for part in _parts(option.layout)})

    def rows(options: Sequence[Option]) -> np.ndarray:
        parts = [_parts(option.layout) for option in options]
        return np.array([[1.0, *(name in part for name in names)] for part in parts], float)

    x, y = rows(options), np.log([factor for _, factor in observed])
    prior = np.full(x.shape[1], 1 / PART**2)
    prior[0] = 1e-4  # the estimate as a whole may be off by any factor
    covariance = np.linalg.inv(np.diag(prior) + x.T @ x / NOISE**2)
    mean = covariance @ x.T @ y / NOISE**2
    ahead = rows(left)
    deviation = np.sqrt(np.einsum("ij,jk,ik->i", ahead, covariance, ahead))
    return np.exp(ahead @ mean - hope * deviation)


def _parts(layout: Layout) -> frozenset[str]:
    rows = layout.micro_batch // batch_ways(read_mesh(layout.mesh)[0])
    mesh, remat = f"mesh {layout.mesh}", f"remat {layout.remat}"
    return frozenset((mesh, remat, f"rows {rows}", f"chunk {layout.loss_chunk}"))


def _step_s(option: Option) -> float:
    assert option.time is not None
    return option.time.step_s
