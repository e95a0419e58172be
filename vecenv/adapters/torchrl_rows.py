"""The rows of a vector environment as TorchRL wants them: a row that is over stays so until it is reset.

TorchRL resets environments itself, by masks, right after the step that ended their episodes, and keeps both the last
observation of an episode and the first of the next. The three autoreset modes are brought to that here:

* SAME_STEP has begun the next episode by then: its first observation is kept, and handed out by the reset, at no cost.
* NEXT_STEP and DISABLED are reset by a mask, before anything else happens to the row.

Rows that are over and are stepped nevertheless stay as they are and pay 0. Where the engine can step some rows, they are
left alone; where it steps all together, their steps happen and are not shown (with autoreset disabled, after a reset that is
not shown either), and their reset is a real one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array

from vecenv.adapters.torchrl_spaces import Codec, Tensors, put, rows_of, tensor_of
from vecenv.front.capabilities import capabilities_of
from vecenv.front.phases import dropping_pending
from vecenv.multi_agent.infos import own_keys

__all__ = ["Rows", "numeric"]

Mask = npt.NDArray[np.bool_]


class Rows:
    """Steps, resets and what is shown of them.

    Args:
        envs: The vector environment.
        mode: Its autoreset mode.
        observations, actions: How its spaces are tensors.
        infos: Columns of infos to show, by name, as they look in one row.

    Attributes:
        begun: Whether there was a reset.
        over: bool ``(n,)``; the episodes that ended and were not reset.
        terminated, truncated: How; bool ``(n,)``.
        observations: What is shown of all rows.
        infos: The same of the columns.
    """

    def __init__(
        self, envs: Any, mode: AutoresetMode, observations: Codec, actions: Codec, infos: Mapping[str, torch.Tensor]
    ) -> None:
        self._envs, self._observations, self._actions = envs, observations, actions
        self._columns = dict(infos)
        n = envs.num_envs
        able = capabilities_of(envs)
        # a wrapper would not see what is sent beside it
        self._by_row = envs.unwrapped is envs and able is not None and (able.first_ready or able.backend == "envpool")
        self._same_step = mode is AutoresetMode.SAME_STEP
        self._everyone = np.arange(n)
        # what the engine would refuse to step, or is undefined where it does not
        self._spent = np.zeros(n, np.bool_) if mode is AutoresetMode.DISABLED and not self._by_row else None
        # first observations and infos of episodes that nobody has asked for, where `_fresh`
        self._starts: tuple[Tensors, Tensors] | None = None
        self._fresh = np.zeros(n, np.bool_)
        self.begun = False
        self.over, self.terminated, self.truncated = (np.zeros(n, np.bool_) for _ in range(3))
        self.observations: Tensors = None
        self.infos: dict[str, torch.Tensor] = {}

    def reset(self, seed: Any = None, options: Any = None) -> None:
        """Begin an episode in every row; an answer that is still pending, as of an interrupted step, is dropped."""
        observations, infos = dropping_pending(self._envs, lambda: self._envs.reset(seed=seed, options=options))
        self.observations = self._observations.encode(observations)
        self.infos = self._read(infos, self._everyone)
        self._fresh = np.zeros_like(self._fresh)
        if self._spent is not None:
            self._spent = np.zeros_like(self._spent)
        self.over, self.terminated, self.truncated = (np.zeros_like(self.over) for _ in range(3))
        self.begun = True

    def restart(self, mask: Mask, options: Mapping[str, Any] | None = None) -> None:
        """Begin an episode in the rows under ``mask``; the others stay as they are."""
        ready = mask & self._fresh if options is None else np.zeros_like(mask)
        asked = mask & ~ready
        shown = rows_of(self.observations, slice(None))
        if ready.any():
            assert self._starts is not None
            observations, columns = self._starts
            put(shown, ready, rows_of(observations, ready))
            self.infos = {name: _merged(ready, columns[name], old) for name, old in self.infos.items()}
        if asked.any():
            observations, infos = self._envs.reset(options={**(options or {}), "reset_mask": asked.copy()})
            put(shown, asked, rows_of(self._observations.encode(observations), asked))
            columns = self._read(infos, self._everyone)
            self.infos = {name: _merged(asked, columns[name], old) for name, old in self.infos.items()}
            if self._spent is not None:
                self._spent = self._spent & ~asked
        self.observations = shown
        self._fresh = self._fresh & ~mask
        self.over, self.terminated, self.truncated = (
            flags & ~mask for flags in (self.over, self.terminated, self.truncated)
        )

    def all_begun(self) -> bool:
        """Whether all rows that are over have begun their next episode already, so that a reset costs nothing."""
        return not (self.over & ~self._fresh).any()

    def step(self, tensors: Any, chosen: Mask | None, frames: int) -> torch.Tensor:
        """Step the rows that are not over, and of those the ``chosen``; each until its episode ends or for ``frames``.

        Returns:
            The sums of the rewards, float32 ``(n,)``; 0 where there was no step.

        Raises:
            NotImplementedError: Rows that are not over are to stay, and the engine steps all rows together.
        """
        actions = self._actions.decode(tensors)
        if chosen is not None and not self._by_row and (left := ~chosen & ~self.over).any():
            raise NotImplementedError(
                f"{type(self._envs).__name__} steps all its environments together: it cannot leave out "
                f"{np.flatnonzero(left).tolist()}, whose episodes are not over"
            )
        rewards = None
        for _ in range(frames):
            live = ~self.over if chosen is None else chosen & ~self.over
            if not live.any():
                break
            paid = self._frame(actions, live)
            rewards = paid if rewards is None else rewards + paid
        return torch.zeros(len(self._everyone)) if rewards is None else rewards

    def _frame(self, actions: Any, live: Mask) -> torch.Tensor:
        every = bool(live.all())
        if every or not self._by_row:
            if self._spent is not None and self._spent.any():
                self._envs.reset(options={"reset_mask": self._spent.copy()})
            answer, ids = self._envs.step(actions), self._everyone
        else:
            wanted = np.flatnonzero(live)
            self._envs.send(_taken(actions, wanted), wanted)
            answer = self._envs.recv(count=len(wanted))
            ids = np.asarray(answer[4]["env_id"])
        observations = self._observations.encode(answer[0])
        terminated, truncated = (_host(flags) for flags in answer[2:4])
        infos = answer[4]
        if self._spent is not None:
            self._spent = terminated | truncated
        columns = self._read(infos, ids)
        if self._same_step and (ended := terminated | truncated).any():
            self._keep_starts(observations, columns, ended & live[ids], ids, infos)
        rewards = tensor_of(answer[1]).to("cpu", torch.float32, copy=True)
        if every:
            self.observations, self.infos, self.terminated, self.truncated = observations, columns, terminated, truncated
        else:
            rewards = self._show(observations, columns, rewards, (terminated, truncated), ids, live)
        self.over = self.terminated | self.truncated
        return rewards

    def _show(
        self, observations: Tensors, columns: dict[str, torch.Tensor], rewards: Any, flags: Any, ids: Any, live: Mask
    ) -> torch.Tensor:
        """Show what happened to the rows that are ``live``, and the others as they were."""
        picked = np.flatnonzero(live[ids])
        rows = ids[picked]
        if len(ids) == len(live):
            self._fresh = self._fresh & live  # the hidden rows have gone on from where their episodes began
        shown = rows_of(self.observations, slice(None))
        put(shown, rows, rows_of(observations, picked))
        self.observations = shown
        infos = {name: column.clone() for name, column in self.infos.items()}
        for name, column in columns.items():
            infos[name][rows] = column[picked]
        self.infos = infos
        self.terminated, self.truncated = self.terminated.copy(), self.truncated.copy()
        self.terminated[rows], self.truncated[rows] = flags[0][picked], flags[1][picked]
        paid = torch.zeros(len(live))
        paid[rows] = rewards[picked]
        return paid

    def _keep_starts(
        self, observations: Tensors, columns: dict[str, torch.Tensor], ended: Mask, ids: Any, infos: Mapping[str, Any]
    ) -> None:
        """Same-step mode: take the first observations of the next episodes away, and put the last ones in their place."""
        rows = np.flatnonzero(ended)
        if not len(rows):
            return
        if self._starts is None:
            self._starts = rows_of(self.observations, slice(None)), rows_of(self.infos, slice(None))
        for kept, new in zip(self._starts, (observations, columns), strict=True):
            put(kept, ids[rows], rows_of(new, rows))
        put(observations, rows, self._final(infos["final_obs"], rows))
        self._fresh = self._fresh.copy()
        self._fresh[ids[rows]] = True
        final = infos.get("final_info", {})
        for name, column in self._read(final, ids).items():
            columns[name][rows] = column[rows]

    def _final(self, finals: Any, rows: Any) -> Tensors:
        if not (isinstance(finals, np.ndarray) and finals.dtype.hasobject):
            return rows_of(self._observations.encode(finals), rows)
        space = self._envs.single_observation_space
        empty: Any = create_empty_array(space, len(rows))
        return self._observations.encode(concatenate(space, [finals[row] for row in rows], empty))

    def _read(self, infos: Mapping[str, Any], ids: Any) -> dict[str, torch.Tensor]:
        """The columns that are to be shown, zero where an environment says nothing."""
        found = {}
        for name, like in self._columns.items():
            column = infos.get(name)
            if column is None:
                found[name] = torch.zeros((len(ids), *like.shape), dtype=like.dtype)
            else:
                found[name] = tensor_of(column).to("cpu", like.dtype, copy=True).reshape(len(ids), *like.shape)
        return found


def numeric(infos: Mapping[str, Any], n: int) -> dict[str, torch.Tensor]:
    """The columns of infos that are numbers, as they look in one row."""
    found = {}
    for key in own_keys(infos):
        column = infos[key]
        if isinstance(column, Mapping) or key in ("env_id", "final_obs", "final_info"):
            continue
        if isinstance(column, np.ndarray) and column.dtype.kind not in "biuf":
            continue
        tensor = tensor_of(column)
        if tensor.shape[:1] == (n,):
            found[key] = torch.zeros_like(tensor[0], device="cpu")
    return found


def _merged(mask: Mask, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    merged = old.clone()
    merged[mask] = new[mask]
    return merged


def _host(flags: Any) -> Mask:
    """Flags of any library as the adapter's own."""
    array: Mask = np.array(flags.cpu().numpy() if isinstance(flags, torch.Tensor) else flags, dtype=np.bool_)
    return array


def _taken(actions: Any, rows: Sequence[int] | npt.NDArray[np.intp]) -> Any:
    if isinstance(actions, Mapping):
        return {key: _taken(inner, rows) for key, inner in actions.items()}
    if isinstance(actions, tuple):
        return tuple(_taken(inner, rows) for inner in actions)
    return actions[rows]
