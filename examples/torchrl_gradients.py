"""Learning through the physics: TorchRL's rollouts over Brax, differentiated by torch (short-horizon actor-critic).

    pip install torch                # in its CPU build where there is no GPU: pytorch.org gives the line
    pip install -e ".[clients,brax]"
    python examples/torchrl_gradients.py

The policy learns by the gradient of the rewards themselves with respect to its actions, through ``--horizon`` steps of
physics, and by that of a critic for all that comes later (Xu et al., 2022). A rollout begins where the one before it ended,
cut off from its gradient. It prints the mean return of an episode without the policy's noise, before learning, now and then,
and after.
"""

import argparse
import time

try:
    import torch
    from tensordict.nn import InteractionType, TensorDictModule, set_interaction_type
    from tensordict.nn.distributions import NormalParamExtractor
    from torch import nn
    from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator

    import vecenv.torch
except (ImportError, ModuleNotFoundError) as missing:
    raise SystemExit(f"torchrl_gradients: {missing}: pip install -e '.[clients,brax]'") from None


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


def network(inputs, outputs, *end):
    return nn.Sequential(nn.Linear(inputs, 64), nn.ELU(), nn.Linear(64, 64), nn.ELU(), nn.Linear(64, outputs), *end)


def actor_critic(env):
    inputs, actions = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    actor = ProbabilisticActor(
        TensorDictModule(network(inputs, 2 * actions, NormalParamExtractor()), ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
    )
    return actor, ValueOperator(network(inputs, 1))


def returns(data, critic, discount):
    """Discounted rewards from each step on, ``[rows, horizon, 1]``, with the critic's value after it."""
    later = critic.module(data["next", "observation"]) * ~data["next", "terminated"]
    reward, done = data["next", "reward"], data["next", "done"]
    found = [later[:, -1]]  # of the last step, what comes after it
    for t in reversed(range(data.shape[-1])):
        found.append(reward[:, t] + discount * torch.where(done[:, t], later[:, t], found[-1]))
    return torch.stack(found[:0:-1], 1)


def evaluated(env, actor, steps):
    """The mean return of an episode of at most ``steps`` steps, without noise."""
    env.set_seed(0)
    with torch.no_grad(), set_interaction_type(InteractionType.DETERMINISTIC):
        data = env.rollout(steps, actor, break_when_any_done=False, break_when_all_done=True)
    before = torch.cumsum(data["next", "done"].int(), 1) - data["next", "done"].int()
    return float((data["next", "reward"] * (before == 0)).sum(1).mean())


def train(env, args):
    """Mean returns of an episode: before learning, after each tenth of it."""
    torch.manual_seed(args.seed)
    actor, critic = actor_critic(env)
    optimizers = [
        torch.optim.Adam(module.parameters(), lr=rate)
        for module, rate in ((actor, args.learning_rate), (critic, args.critic_learning_rate))
    ]
    points = [evaluated(env, actor, args.episode)]
    print(f"{0:>9} steps, mean return {points[0]:.3f}", flush=True)
    env.set_seed(args.seed)
    state = env.reset()
    for update in range(1, args.updates + 1):
        data = env.rollout(args.horizon, actor, tensordict=state, auto_reset=False, break_when_any_done=False)
        ahead = returns(data, critic, args.discount)
        starts = torch.cat([torch.ones_like(data["done"][:, :1]), data["next", "done"][:, :-1]], 1)
        learn(optimizers[0], actor, -(ahead * starts).sum() / starts.sum())
        seen, wanted = data["observation"].detach(), ahead.detach()
        for _ in range(args.critic_steps):
            learn(optimizers[1], critic, (critic.module(seen) - wanted).square().mean())
        state = env.step_mdp(data[:, -1].detach())
        if state["done"].any():
            state = env.reset(state.set("_reset", state["done"]))
        if update % max(args.updates // 10, 1) == 0:
            points.append(evaluated(env, actor, args.episode))  # the state is in the TensorDict: learning goes on from there
            print(f"{update * data.numel():>9} steps, mean return {points[-1]:.3f}", flush=True)
    return points


def learn(optimizer, module, loss):
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()


def main(args):
    start = time.perf_counter()
    torch.set_num_threads(1)
    options = {"backend": args.backend, "max_episode_steps": args.episode, "requires_grad": True}
    env = vecenv.torch.TensorDictEnv(args.env, (args.num_envs,), **options)
    train(env, args)
    print(f"{time.perf_counter() - start:.0f} s")


def arguments(given=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--env", default="reacher", help="of Brax")
    parser.add_argument("--backend", default="spring", help="of its physics: spring, positional, generalized")
    parser.add_argument("--num-envs", type=int, default=32, help="environments")
    parser.add_argument("--episode", type=int, default=50, help="steps of an episode")
    parser.add_argument("--horizon", type=int, default=10, help="steps that an update goes back through")
    parser.add_argument("--updates", type=int, default=300, help="of the policy")
    parser.add_argument("--critic-steps", type=int, default=4, help="updates of the critic for each of the policy")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="of the policy's Adam")
    parser.add_argument("--critic-learning-rate", type=float, default=1e-3, help="of the critic's")
    parser.add_argument("--discount", type=float, default=0.97, help="of later rewards")
    parser.add_argument("--seed", type=int, default=1, help="of environments and policy")
    return parser.parse_args(given)


if __name__ == "__main__":
    main(arguments())
