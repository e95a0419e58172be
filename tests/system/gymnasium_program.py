"""A program that does not import vecenv."""

import gymnasium

if __name__ == "__main__":
    envs = gymnasium.vector.AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
    print(envs.reset(seed=0)[0].shape)
    envs.close()
