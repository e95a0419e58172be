"""PPO in one file, in the style of CleanRL, with only torch and Gymnasium's vector interface.

    pip install torch                # without a GPU, the CPU build: see pytorch.org
    pip install -e .
    python examples/cleanrl_ppo.py

On 2 cores without a GPU, its last lines were, with torch 2.13 (other versions print other numbers):

     149504 steps, mean return of the last 100 episodes 500.000000
    31 s

Only the import is specific to vecenv. With ``from gymnasium.vector import AsyncVectorEnv`` instead, the program prints
exactly the same returns.
"""

import argparse
import time

import gymnasium as gym
import numpy as np
from gymnasium.wrappers.vector import RecordEpisodeStatistics

try:
    import torch
    from torch import nn
    from torch.distributions import Categorical
except ModuleNotFoundError as missing:
    raise SystemExit(f"cleanrl_ppo: {missing}: pip install torch (CPU build: pytorch.org)") from None

from vecenv import AsyncVectorEnv


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


def make_env():
    return gym.make("CartPole-v1")


def make_network(inputs, outputs, gain):
    layers = [nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    for layer, scale in zip(layers[::2], (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def main(args):
    start = time.perf_counter()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the networks are tiny, so leave the cores to the environments
    # "forkserver", because a forked process would lack the threads that torch has started
    envs = AsyncVectorEnv([make_env] * args.num_envs, context="forkserver", autoreset_mode="SameStep")
    envs = RecordEpisodeStatistics(envs)
    actor = make_network(envs.single_observation_space.shape[0], envs.single_action_space.n, 0.01)
    critic = make_network(envs.single_observation_space.shape[0], 1, 1.0)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=args.learning_rate, eps=1e-5)

    shape = (args.rollout, args.num_envs)
    observations = torch.zeros((*shape, *envs.single_observation_space.shape))
    actions, log_probs, rewards, values = torch.zeros(shape, dtype=torch.long), *torch.zeros((3, *shape))
    ended = torch.zeros(shape)
    observation = torch.as_tensor(envs.reset(seed=args.seed)[0])
    returns = []

    updates = args.steps // (args.rollout * args.num_envs)
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - update / updates)
        for t in range(args.rollout):
            with torch.no_grad():
                policy = Categorical(logits=actor(observation))
                action = policy.sample()
                observations[t], actions[t] = observation, action
                log_probs[t], values[t] = policy.log_prob(action), critic(observation).squeeze(-1)
            next_observation, reward, terminated, truncated, infos = envs.step(action.numpy())
            rewards[t], ended[t] = torch.as_tensor(reward), torch.as_tensor(terminated | truncated)
            for i in np.flatnonzero(truncated & ~terminated):  # bootstrap from the value of the last state
                with torch.no_grad():
                    rewards[t, i] += args.discount * critic(torch.as_tensor(infos["final_obs"][i])).item()
            if "episode" in infos:
                returns += infos["episode"]["r"][infos["_episode"]].tolist()
            observation = torch.as_tensor(next_observation)

        with torch.no_grad():
            next_value, advantage = critic(observation).squeeze(-1), torch.zeros(args.num_envs)
            advantages = torch.zeros(shape)
            for t in reversed(range(args.rollout)):
                not_ended = 1 - ended[t]
                delta = rewards[t] + args.discount * next_value * not_ended - values[t]
                advantage = delta + args.discount * args.gae_lambda * not_ended * advantage
                advantages[t], next_value = advantage, values[t]
            targets = (advantages + values).flatten()
        flat = [field.flatten(0, 1) for field in (observations, actions, log_probs, advantages)]

        for _ in range(args.epochs):
            for rows in torch.randperm(len(targets)).split(args.minibatch):
                old_observation, old_action, old_log_prob, advantage = (field[rows] for field in flat)
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                policy = Categorical(logits=actor(old_observation))
                ratio = (policy.log_prob(old_action) - old_log_prob).exp()
                clipped_ratio = ratio.clamp(1 - args.clip, 1 + args.clip)
                policy_loss = -torch.min(advantage * ratio, advantage * clipped_ratio).mean()
                value_loss = (critic(old_observation).squeeze(-1) - targets[rows]).square().mean() / 2
                loss = policy_loss + value_loss / 2 - args.entropy * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
        if (update + 1) % 10 == 0 or update + 1 == updates:
            mean = np.mean(returns[-100:])
            print(f"{(update + 1) * len(targets):7} steps, mean return of the last 100 episodes {mean:.6f}")
    envs.close()
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--steps", type=int, default=150_000, help="total environment steps")
    parser.add_argument("--num-envs", type=int, default=8, help="number of environments")
    parser.add_argument("--rollout", type=int, default=128, help="steps of each environment per update")
    parser.add_argument("--minibatch", type=int, default=256, help="transitions per gradient step")
    parser.add_argument("--epochs", type=int, default=8, help="passes over a rollout")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="initial learning rate of Adam, which falls to 0")
    parser.add_argument("--discount", type=float, default=0.99, help="discount factor of rewards")
    parser.add_argument("--gae-lambda", type=float, default=0.95, help="lambda of generalised advantage estimation")
    parser.add_argument("--clip", type=float, default=0.2, help="clipping range of the probability ratio")
    parser.add_argument("--entropy", type=float, default=0.005, help="weight of the entropy bonus")
    parser.add_argument("--seed", type=int, default=1, help="seed of environments, policy and shuffling")
    main(parser.parse_args())
