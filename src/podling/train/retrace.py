"""Counting traces: a step that is traced twice is compiled twice, and that is never what anyone wanted."""

import functools
from collections.abc import Callable
from typing import Any

import jax


class TraceCounter:
    """Wraps a function so that every trace of it is noted, with the types it was traced for."""

    def __init__(self, function: Callable[..., Any]):
        functools.update_wrapper(self, function)  # so that the compiled program bears the function's name
        self._function = function
        self._signatures: list[dict[str, str]] = []

    def __call__(self, *args: Any) -> Any:
        """Runs only while JAX traces; the compiled program does not come through here."""
        leaves = jax.tree_util.tree_leaves_with_path(args)
        self._signatures.append({jax.tree_util.keystr(path): str(jax.typeof(leaf)) for path, leaf in leaves})
        return self._function(*args)

    @property
    def retraces(self) -> int:
        """Traces after the first."""
        return max(len(self._signatures) - 1, 0)

    def last_change(self) -> str:
        """The arguments whose type differs between the last two traces, before -> after."""
        if not self.retraces:
            return ""
        before, after = self._signatures[-2:]
        changed = [
            f"{path}: {before.get(path, 'absent')} -> {after.get(path, 'absent')}"
            for path in {**before, **after}
            if before.get(path) != after.get(path)
        ]
        return "; ".join(changed) or "nothing visible in the arguments' types"
