"""Trains a policy with the exact gradient through the physics of a Brax environment, with TorchRL and without a critic.

    pip install -e ".[clients]"
    python examples/torchrl_gradient.py

The policy learns to keep a pole upright on a cart. The loss depends on the angle of the pole and the position of the cart.
`TensorDictEnv` propagates its gradient through Brax's physics to all earlier actions, so `backward` after a short rollout
computes the policy gradient. Each rollout continues where the last one ended, but its gradient does not. On 2 cores without
a GPU, it prints in a minute:

    before: 18 of 200 steps upright
    update 25: loss 0.0040, 604 steps/s
    update 50: loss 0.0077, 973 steps/s
    update 75: loss 0.0044, 1226 steps/s
    update 100: loss 0.0026, 1439 steps/s
    after: 103 of 200 steps upright
"""

import argparse
import time

try:
    import torch
    from tensordict.nn import TensorDictModule
    from torch import nn

    from vecenv.torch import TensorDictEnv
except ImportError as missing:
    needed = "torch (CPU build: pytorch.org)" if missing.name == "torch" else "-e '.[clients]'"
    raise SystemExit(f"torchrl_gradient: {missing}: pip install {needed}") from None

MAX_STEPS = 200  # per episode


def mean_episode_length(env: TensorDictEnv, policy: TensorDictModule) -> float:
    """Return the mean number of steps until the pole falls, over one episode per environment."""
    env.set_seed(1_000)
    with torch.no_grad():
        data = env.rollout(MAX_STEPS, policy, break_when_all_done=True, break_when_any_done=False)
    return float(data["next", "reward"].sum(1).mean())  # 1 per step; 0 after the end of an episode


def main(updates: int, num_envs: int, horizon: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the network is tiny, so leave the cores to the physics
    env = TensorDictEnv("inverted_pendulum", [num_envs], backend="spring", requires_grad=True, max_episode_steps=MAX_STEPS)
    network = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1), nn.Tanh())
    policy = TensorDictModule(network, in_keys=["observation"], out_keys=["action"])
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    print(f"before: {mean_episode_length(env, policy):.0f} of {MAX_STEPS} steps upright", flush=True)
    env.set_seed(0)
    latest, start = env.reset(), time.perf_counter()
    for update in range(1, updates + 1):
        data = env.rollout(horizon, policy, tensordict=latest, auto_reset=False, break_when_any_done=False)
        cart, pole = data["next", "observation"][..., 0], data["next", "observation"][..., 1]
        loss = (pole.square() + 0.1 * cart.square()).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        latest = env.maybe_reset(env.step_mdp(data[:, -1])).detach()  # the next rollout continues from here
        if update % max(updates // 4, 1) == 0:
            rate = update * num_envs * horizon / (time.perf_counter() - start)
            print(f"update {update}: loss {loss.item():.4f}, {rate:.0f} steps/s", flush=True)
    print(f"after: {mean_episode_length(env, policy):.0f} of {MAX_STEPS} steps upright")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=100, help="number of policy updates (default: %(default)s)")
    parser.add_argument("--num-envs", type=int, default=32, help="number of environments (default: %(default)s)")
    parser.add_argument(
        "--horizon", type=int, default=16, help="steps per rollout, and so per gradient (default: %(default)s)"
    )
    options = parser.parse_args()
    main(options.updates, options.num_envs, options.horizon)
