"""After any failure, a client's next reset of all environments works, even with pending requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from failing import (
    FAULTS,
    FAULTY,
    FINE,
    NUM_ENVS,
    RAISES,
    actions_with_fault,
    assert_reset_drops_interrupted_call,
    assert_reset_works_after_failure,
    make_engine,
)
from gymnasium.error import AlreadyPendingCallError


class Sb3Client:
    """The calls of a program that uses Stable-Baselines3."""

    def __init__(self, envs: Any) -> None:
        pytest.importorskip("stable_baselines3", reason="needs Stable-Baselines3: pip install 'vecenv[clients]'")
        from vecenv.adapters import as_sb3

        self.envs = as_sb3(envs)
        self.close = self.envs.close

    def reset(self) -> Any:
        return self.envs.reset()

    def step(self, actions: Any) -> Any:
        return self.envs.step(actions)[0]


class TorchRLClient:
    """The calls of a program that uses TorchRL."""

    def __init__(self, envs: Any) -> None:
        pytest.importorskip("torchrl", reason="needs TorchRL: pip install 'vecenv[clients]'")
        from vecenv.adapters import as_torchrl

        self.envs = as_torchrl(envs, categorical_action_encoding=True)
        self.close = self.envs.close

    def reset(self) -> Any:
        self.data = self.envs.reset()
        return self.data["observation"].numpy()

    def step(self, actions: Any) -> Any:
        import torch

        return self.envs.step(self.data.set("action", torch.from_numpy(actions)))["next", "observation"].numpy()


class TianshouClient:
    """The calls of a program that uses Tianshou."""

    wait_num: int | None = None

    def __init__(self, envs: Any) -> None:
        pytest.importorskip("tianshou", reason="needs Tianshou: pip install 'vecenv[clients]'")
        from vecenv.adapters import as_tianshou

        self.envs = as_tianshou(envs, self.wait_num)
        self.close = self.envs.close

    def reset(self) -> Any:
        return self.envs.reset()[0]

    def step(self, actions: Any) -> Any:
        return self.envs.step(actions, np.arange(NUM_ENVS))[0]


class AsyncTianshouClient(TianshouClient):
    """The calls in asynchronous mode, which returns the results of a step of all environments in two parts."""

    wait_num = 2

    def step(self, actions: Any) -> Any:
        results = np.zeros((NUM_ENVS, 2), np.float32)
        for actions_to_send in (actions, None):
            observations, *_, infos = self.envs.step(actions_to_send, np.arange(NUM_ENVS))
            results[[info["env_id"] for info in infos]] = observations
        return results


CLIENTS = [Sb3Client, TorchRLClient, TianshouClient, AsyncTianshouClient]


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
@pytest.mark.parametrize("client", CLIENTS)
def test_next_reset_works_after_a_failure(client: Callable[[Any], Any], on_failure: str, fault: int) -> None:
    assert_reset_works_after_failure(client, on_failure, fault)


@pytest.mark.parametrize("client", CLIENTS)
def test_next_reset_drops_an_interrupted_call(client: Callable[[Any], Any]) -> None:
    assert_reset_drops_interrupted_call(client)


def test_tianshou_can_reset_only_the_failed_environment() -> None:
    client = AsyncTianshouClient(make_engine())
    client.reset()
    with pytest.raises(ValueError, match="stuck"):
        client.step(actions_with_fault(RAISES))
    venv = client.envs
    assert FAULTY in venv.ready_id
    observations, _ = venv.reset([FAULTY])
    assert observations[:, 0].tolist() == [0.0]
    while venv.waiting_id:
        observations, *_, infos = venv.step(None)
        assert observations[:, 0].tolist() == [1.0] * len(infos)
    observations, *_ = venv.step(np.zeros(1, np.int64), [FAULTY])
    assert observations[:, 0].tolist() == [1.0]
    venv.close()


def test_after_a_failed_step_of_some_rows_other_rows_are_refused_until_a_reset_of_all() -> None:
    torchrl, tianshou = TorchRLClient(make_engine()), TianshouClient(make_engine())
    import torch

    def step_torchrl(fault: int, rows: list[int]) -> Any:
        torchrl.data["_step"] = torch.from_numpy(np.isin(np.arange(NUM_ENVS), rows))
        return torchrl.step(actions_with_fault(fault))[rows, 0].tolist()

    def step_tianshou(fault: int, rows: list[int]) -> Any:
        return tianshou.envs.step(actions_with_fault(fault)[rows], rows)[0][:, 0].tolist()

    def reset_torchrl(row: int) -> None:
        mask = torch.from_numpy(np.arange(NUM_ENVS) == row)[:, None]
        torchrl.envs.reset(torchrl.data.clone().set("_reset", mask))

    for client, step, reset_row in (
        (torchrl, step_torchrl, reset_torchrl), (tianshou, step_tianshou, lambda row: tianshou.envs.reset([row]))
    ):  # fmt: skip
        client.reset()
        with pytest.raises(ValueError, match="stuck"):
            step(RAISES, [0, FAULTY])
        with pytest.raises(AlreadyPendingCallError, match="`reset` for env 3 with env 0 still in flight"):
            reset_row(3)  # would drop the result of env 0
        with pytest.raises(AlreadyPendingCallError, match="`step` for env 3 with env 0 still in flight"):
            step(FINE, [3])
        client.reset()
        assert step(FINE, [3]) == [1.0]
        client.close()
