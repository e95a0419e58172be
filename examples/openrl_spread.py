"""Multi-agent PPO on MPE's simple_spread, with vecenv's interface for OpenRL programs.

    pip install torch                # without a GPU, the CPU build: see pytorch.org
    pip install -e ".[clients,multi-agent]" mpe2
    python examples/openrl_spread.py

Three agents learn to cover three landmarks without collisions. After each update, the program prints the mean return per
episode and agent over the last five updates; at the end, it prints the duration.

Batches have OpenRL's shape, ``[environments, agents, ...]``. All agents share one policy; the input of the critic includes
the observations of all agents, which OpenRL calls the shared observation.
"""

import argparse
import time

import numpy as np

try:
    import torch
    from mpe2 import simple_spread_v3
    from torch import nn
    from torch.distributions import Categorical
except ModuleNotFoundError as missing:
    requirements = {"mpe2": "mpe2", "torch": "torch (CPU build: pytorch.org)"}
    needed = requirements.get(missing.name or "", "-e '.[clients,multi-agent]'")
    raise SystemExit(f"openrl_spread: {missing}: pip install {needed}") from None

from vecenv.multi_agent import make_openrl  # instead of: from openrl.envs.vec_env.async_venv import AsyncVectorEnv

EPISODE_STEPS = 25


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


def make_env():
    return simple_spread_v3.parallel_env(max_cycles=EPISODE_STEPS)


def make_network(inputs, outputs, gain):
    layers = [nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    for layer, scale in zip(layers[::2], (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class Agents(nn.Module):
    """An actor and a critic for all agents. The critic gets the observation of an agent, and then those of all agents."""

    def __init__(self, agents, inputs, actions):
        super().__init__()
        self.actor = make_network(inputs, actions, 0.01)
        self.critic = make_network(inputs * (agents + 1), 1, 1.0)

    def forward(self, observations):
        """Return the distributions and values ``[..., agents]`` for observations ``[..., agents, inputs]``."""
        shared = observations.flatten(-2).unsqueeze(-2).expand(*observations.shape[:-1], -1)
        values = self.critic(torch.cat([observations, shared], -1)).squeeze(-1)
        return Categorical(logits=self.actor(observations)), values


def collect(envs, agents, observations):
    """Return one episode per environment as fields ``[steps, environments, agents, ...]``, and the next observations."""
    rows = []
    for _ in range(EPISODE_STEPS):
        with torch.no_grad():
            policy, values = agents(observations)
            actions = policy.sample()
        next_observations, rewards, dones, _ = envs.step(actions.unsqueeze(-1).numpy())
        rows.append((observations, actions, policy.log_prob(actions), values, torch.as_tensor(rewards[..., 0]).float()))
        observations = torch.as_tensor(next_observations)
    assert dones.all()  # episodes begin together and have the same length
    return [torch.stack(field) for field in zip(*rows, strict=True)], observations


def advantages(rewards, values, discount, gae_lambda):
    """Return the generalised advantage estimates of complete episodes."""
    result, advantage = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        next_value = values[t + 1] if t + 1 < len(values) else torch.zeros_like(advantage)
        advantage = rewards[t] + discount * next_value - values[t] + discount * gae_lambda * advantage
        result[t] = advantage
    return result


def learn(agents, optimizer, episodes, args):
    observations, actions, log_probs, values, rewards = episodes
    rewards = rewards * args.reward_scale
    advantage = advantages(rewards, values, args.discount, args.gae_lambda)
    targets = advantage + values
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    fields = [field.flatten(0, 1) for field in (observations, actions, log_probs, advantage, targets)]
    for _ in range(args.epochs):
        for rows in torch.randperm(len(fields[0])).chunk(args.minibatches):
            observation, action, log_prob, advantage, target = (field[rows] for field in fields)
            policy, value = agents(observation)
            ratio = torch.exp(policy.log_prob(action) - log_prob)
            clipped = torch.clamp(ratio, 1 - args.clip, 1 + args.clip)
            loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
            loss += 0.5 * (value - target).square().mean() - args.entropy * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agents.parameters(), 0.5)
            optimizer.step()


def main(args):
    start = time.perf_counter()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the networks are small, so leave the cores to the environments
    envs = make_openrl([make_env] * args.num_envs, context="forkserver", num_workers=args.workers)
    agents = Agents(envs.agent_num, envs.observation_space.shape[0], envs.action_space.n)
    optimizer = torch.optim.Adam(agents.parameters(), lr=args.learning_rate, eps=1e-5)
    observations, _ = envs.reset(seed=args.seed)
    observations = torch.as_tensor(observations)
    returns = []
    for update in range(args.steps // (EPISODE_STEPS * args.num_envs)):
        episodes, observations = collect(envs, agents, observations)
        learn(agents, optimizer, episodes, args)
        returns.append(float(episodes[-1].sum(0).mean()))
        steps = (update + 1) * EPISODE_STEPS * args.num_envs
        print(f"{steps:>11} steps, mean return of the last 5 updates {np.mean(returns[-5:]):.3f}", flush=True)
    envs.close()
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--steps", type=int, default=160_000, help="total environment steps")
    parser.add_argument("--num-envs", type=int, default=64, help="number of environments")
    parser.add_argument("--workers", type=int, default=2, help="number of worker processes; 0: step in this process")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the episodes of an update")
    parser.add_argument("--minibatches", type=int, default=4, help="minibatches per pass")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="learning rate of Adam")
    parser.add_argument("--discount", type=float, default=0.95, help="discount factor of rewards")
    parser.add_argument("--gae-lambda", type=float, default=0.95, help="lambda of generalised advantage estimation")
    parser.add_argument("--clip", type=float, default=0.2, help="clipping range of the probability ratio")
    parser.add_argument("--entropy", type=float, default=0.01, help="weight of the entropy bonus")
    parser.add_argument("--reward-scale", type=float, default=0.2, help="factor applied to rewards for learning")
    parser.add_argument("--seed", type=int, default=1, help="seed of environments, policy and shuffling")
    main(parser.parse_args())
