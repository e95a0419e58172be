"""The contract of a Gymnasium vector environment, as a test class for backends to inherit from.

The tests apply wherever environments run: in processes, in threads, on devices or on other machines. They build a vector
environment through one factory, use only the interface of :class:`gymnasium.vector.VectorEnv`, and check its results.
A backend declares missing abilities in class attributes, and the tests of these abilities are skipped::

    class TestMyVectorEnv(VectorEnvContract):
        autoreset_modes = (AutoresetMode.NEXT_STEP,)
        def make(self, num_envs=3, autoreset_mode=AutoresetMode.NEXT_STEP, **kwargs):
            return MyVectorEnv("Pong", num_envs)
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError
from gymnasium.spaces import GraphInstance
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, iterate

from vecenv.trajectories import STEP_FIELDS, AnyVectorEnv, Step, assert_identical, assert_same_steps, assert_same_trajectory
from vecenv.trajectories import reset as reset_with

__all__ = ["Subject", "VectorEnvContract", "assert_identical", "assert_same_trajectory"]


class Subject:
    """The vector environment under test, and its abilities.

    Attributes:
        autoreset_modes: The modes that :meth:`make` accepts; tests of other modes are skipped.
        honours_seeds: True if the same seed gives the same trajectory.
        supports_reset_mask: True if ``options["reset_mask"]`` resets some environments and not the others.
        seeds_masked_resets: True if such a reset accepts seeds.
        refuses_wrong_actions: True if a batch of the wrong length raises before any environment is stepped.
        fresh_observations: True if earlier observations stay unchanged (``copy=True`` in Gymnasium's terms).
        masks_infos: True if infos are dicts of arrays with a mask for every key.
        gives_final_observations: True if same-step autoreset returns ``final_obs`` and ``final_info``.
        max_steps: The number of random steps within which an episode must end.
        wrong_action_errors: The exceptions that a wrong batch of actions may raise.
    """

    autoreset_modes: ClassVar[tuple[AutoresetMode, ...]] = tuple(AutoresetMode)
    honours_seeds: ClassVar[bool] = True
    supports_reset_mask: ClassVar[bool] = True
    seeds_masked_resets: ClassVar[bool] = True
    refuses_wrong_actions: ClassVar[bool] = True
    fresh_observations: ClassVar[bool] = True
    masks_infos: ClassVar[bool] = True
    gives_final_observations: ClassVar[bool] = True
    max_steps: ClassVar[int] = 500
    wrong_action_errors: ClassVar[tuple[type[Exception], ...]] = (ValueError, TypeError)

    def make(
        self, num_envs: int = 3, autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP, **kwargs: Any
    ) -> AnyVectorEnv:
        """Build the vector environment under test, ready for its first ``reset``.

        Args:
            num_envs: The number of environments.
            autoreset_mode: One of :attr:`autoreset_modes`.
            **kwargs: Further options, for a subclass's own tests.
        """
        raise NotImplementedError("override make() with a factory of the vector environment under test")

    def sample_actions(self, envs: AnyVectorEnv) -> Any:
        """Return a batch of actions: ``envs.action_space.sample()`` unless overridden (for action masks, for example)."""
        return envs.action_space.sample()

    @contextmanager
    def opened(
        self, num_envs: int = 3, autoreset_mode: AutoresetMode | None = None, **kwargs: Any
    ) -> Iterator[AnyVectorEnv]:
        """Open a vector environment (by default in the first mode) with a seeded action space, and close it at the end."""
        mode = self.autoreset_modes[0] if autoreset_mode is None else autoreset_mode
        if mode not in self.autoreset_modes:
            pytest.skip(f"{type(self).__name__} does not support {mode}")
        envs = self.make(num_envs=num_envs, autoreset_mode=mode, **kwargs)
        try:
            envs.action_space.seed(123)
            yield envs
        finally:
            envs.close()

    @contextmanager
    def begun(self, num_envs: int = 3, autoreset_mode: AutoresetMode | None = None) -> Iterator[AnyVectorEnv]:
        """Open a vector environment as :meth:`opened` does, and reset it with seed 1."""
        with self.opened(num_envs, autoreset_mode) as envs:
            envs.reset(seed=1)
            yield envs

    def step(self, envs: AnyVectorEnv, actions: Any = None) -> Step:
        """Take one step with the given actions, or with random ones."""
        return envs.step(self.sample_actions(envs) if actions is None else actions)

    def step_and_reset(self, envs: AnyVectorEnv, actions: Any = None) -> Step:
        """Take one step. Without autoreset, then reset ended environments, or all if masked resets are not supported."""
        result = self.step(envs, actions)
        if envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED and (ended := result[2] | result[3]).any():
            envs.reset(options={"reset_mask": ended} if self.supports_reset_mask else None)
        return result

    def step_until_done(self, envs: AnyVectorEnv) -> Step:
        """Step until an episode ends in some environment; return the results of that step."""
        for _ in range(self.max_steps):
            result = self.step(envs)
            if (result[2] | result[3]).any():
                return result
        pytest.fail(f"no episode ended within {self.max_steps} random steps; override max_steps or make()")

    def _skip_without(self, attribute: str) -> None:
        """Skip the test if the backend lacks an ability."""
        if not getattr(self, attribute):
            pytest.skip(f"{type(self).__name__}.{attribute} is False")

    def _check_step(self, envs: AnyVectorEnv, result: Step) -> None:
        """Assert the types, shapes and dtypes of the results of ``step``."""
        assert isinstance(result, tuple)
        assert len(result) == 5, f"step returned {len(result)} values instead of 5"
        observations, rewards, terminations, truncations, infos = result
        assert observations in envs.observation_space
        for name, array, dtype in (
            ("rewards", rewards, np.float64),
            ("terminations", terminations, np.bool_),
            ("truncations", truncations, np.bool_),
        ):
            assert isinstance(array, np.ndarray), f"{name} is {type(array)}"
            assert array.dtype == dtype, f"{name} has dtype {array.dtype}, not {dtype.__name__}"
            assert array.shape == (envs.num_envs,), f"{name} has shape {array.shape}"
        assert isinstance(infos, dict)


class VectorEnvContract(Subject):
    """Tests of the promises that a Gymnasium vector environment makes to its users.

    Inherit, override :meth:`make`, and declare missing abilities of the backend in the class attributes.
    """

    # -- interface and results: spaces, shapes, dtypes, infos with masks ---------------------------------------------

    @pytest.mark.parametrize("num_envs", [1, 3])
    def test_envs_are_a_vector_env_with_batched_spaces(self, num_envs: int) -> None:
        with self.opened(num_envs) as envs:
            assert isinstance(envs, VectorEnv)
            assert isinstance(envs.unwrapped, VectorEnv)
            assert envs.num_envs == num_envs
            assert envs.action_space == batch_space(envs.single_action_space, num_envs)
            assert envs.observation_space == batch_space(envs.single_observation_space, num_envs)

    @pytest.mark.parametrize("mode", AutoresetMode)
    def test_metadata_names_the_autoreset_mode(self, mode: AutoresetMode) -> None:
        with self.opened(autoreset_mode=mode) as envs:
            assert envs.metadata["autoreset_mode"] is mode

    def test_a_new_vector_env_is_open_with_a_render_mode_and_spec_or_none(self) -> None:
        with self.opened() as envs:
            assert envs.closed is False
            assert envs.render_mode is None or isinstance(envs.render_mode, str)
            assert envs.spec is None or isinstance(envs.spec, gymnasium.envs.registration.EnvSpec)

    def test_the_repr_names_the_class_the_number_of_environments_and_the_spec(self) -> None:
        with self.opened(3) as envs:
            assert type(envs).__name__ in repr(envs)
            assert "num_envs=3" in repr(envs)
            spec = gymnasium.envs.registration.EnvSpec("Contract-v0")
            envs.unwrapped.spec = spec
            assert envs.spec is spec
            assert "Contract-v0" in repr(envs)

    @pytest.mark.parametrize("num_envs", [1, 3])
    def test_reset_returns_an_observation_of_the_batched_space_and_an_info_dict(self, num_envs: int) -> None:
        with self.opened(num_envs) as envs:
            result = envs.reset(seed=1)
            assert isinstance(result, tuple)
            assert len(result) == 2
            assert result[0] in envs.observation_space
            assert isinstance(result[1], dict)

    @pytest.mark.parametrize("num_envs", [1, 3])
    @pytest.mark.parametrize("mode", AutoresetMode)
    def test_step_returns_five_values_of_the_right_shapes_and_dtypes(self, mode: AutoresetMode, num_envs: int) -> None:
        with self.begun(num_envs, mode) as envs:
            for _ in range(5):
                self._check_step(envs, self.step_and_reset(envs))

    def test_a_reset_and_a_step_work_in_the_middle_of_an_episode(self) -> None:
        with self.opened() as envs:
            for seed in range(3):
                observations, _ = envs.reset(seed=seed)
                assert observations in envs.observation_space
                self._check_step(envs, self.step(envs))

    def test_rewards_and_flags_are_fresh_arrays_at_every_step(self) -> None:
        with self.begun() as envs:
            _, *first, _ = self.step_and_reset(envs)
            copies = copy.deepcopy(first)
            _, *second, _ = self.step(envs)
            for name, one, two, before in zip(STEP_FIELDS[1:4], first, second, copies, strict=True):
                assert not np.shares_memory(one, two), f"{name} of two steps share memory"
                assert_identical(one, before, f"{name} of an earlier step")
                assert one.flags.writeable, f"{name} cannot be written to"

    def test_observations_of_an_earlier_step_do_not_change(self) -> None:
        self._skip_without("fresh_observations")
        with self.opened() as envs:
            observations = [envs.reset(seed=1)[0]]
            copies = [copy.deepcopy(observations[0])]
            for _ in range(4):
                observations.append(self.step_and_reset(envs)[0])
                copies.append(copy.deepcopy(observations[-1]))
            for t, (one, before) in enumerate(zip(observations, copies, strict=True)):
                assert_identical(one, before, f"observations of step {t}")

    def test_observations_can_be_written_to_without_changing_the_next_ones(self) -> None:
        self._skip_without("fresh_observations")
        self._skip_without("honours_seeds")
        with self.opened() as envs, self.opened() as untouched:
            envs.reset(seed=1)
            untouched.reset(seed=1)
            for _ in range(3):
                actions = self.sample_actions(envs)
                mine = self.step_and_reset(envs, actions)
                theirs = self.step_and_reset(untouched, copy.deepcopy(actions))
                assert_identical(mine, theirs, "step")
                for leaf in _leaves(mine[0]):
                    if isinstance(leaf, np.ndarray) and leaf.dtype != object:
                        assert leaf.flags.writeable
                        leaf.fill(0)

    @pytest.mark.parametrize("mode", AutoresetMode)
    def test_every_info_has_a_mask_with_one_flag_for_each_environment(self, mode: AutoresetMode) -> None:
        self._skip_without("masks_infos")
        with self.opened(autoreset_mode=mode) as envs:
            _check_masks(envs.reset(seed=1)[1], envs.num_envs)
            _check_masks(self.step_until_done(envs)[4], envs.num_envs)
            if mode is not AutoresetMode.DISABLED:
                _check_masks(self.step(envs)[4], envs.num_envs)

    def test_infos_are_fresh_so_that_wrappers_may_write_into_them(self) -> None:
        with self.opened() as envs:
            _, infos = envs.reset(seed=1)
            infos["written by a wrapper"] = np.ones(envs.num_envs)
            again = self.step(envs)[4]
            assert again is not infos
            assert "written by a wrapper" not in again
            for leaf in _leaves(again):
                if isinstance(leaf, np.ndarray):
                    assert leaf.flags.writeable

    # -- seeds, and resets of some environments -----------------------------------------------------------------------

    @pytest.mark.parametrize("mode", AutoresetMode)
    def test_the_same_seed_gives_the_same_trajectory(self, mode: AutoresetMode) -> None:
        self._skip_without("honours_seeds")
        if mode is AutoresetMode.DISABLED:
            self._skip_without("supports_reset_mask")
        with self.opened(autoreset_mode=mode) as one, self.opened(autoreset_mode=mode) as other:
            self._assert_same_trajectory(one, other, 7, 7)

    def test_an_integer_seed_gives_consecutive_seeds(self) -> None:
        self._skip_without("honours_seeds")
        with self.opened(3) as one, self.opened(3) as other:
            self._assert_same_trajectory(one, other, 7, [7, 8, 9])

    def test_seeding_again_starts_the_same_trajectory_again(self) -> None:
        self._skip_without("honours_seeds")
        with self.opened() as envs, self.opened() as fresh:
            envs.reset(seed=3)
            for _ in range(5):
                self.step_and_reset(envs)
            envs.action_space.seed(123)
            self._assert_same_trajectory(envs, fresh, 11, 11)

    def _assert_same_trajectory(self, one: AnyVectorEnv, other: AnyVectorEnv, seed: Any, same_seed: Any) -> None:
        assert_identical(reset_with(one, seed), reset_with(other, same_seed), "reset")
        assert_same_steps(one, other, 20, lambda: self.sample_actions(one))

    @pytest.mark.parametrize("mode", AutoresetMode)
    def test_a_masked_reset_does_not_change_the_other_rows(self, mode: AutoresetMode) -> None:
        self._skip_without("supports_reset_mask")
        with self.begun(3, mode) as envs:
            before = copy.deepcopy(self.step(envs)[0])
            mask = np.array([False, True, False])
            observations, infos = envs.reset(options={"reset_mask": mask})
            assert observations in envs.observation_space
            self._assert_same_rows(envs, (0, 2), observations, before)
            for key, flags in infos.items():
                if isinstance(key, str) and key.startswith("_") and isinstance(flags, np.ndarray):
                    assert not flags[[0, 2]].any(), f"{key} reports environments that were not reset"
            assert_identical(mask, np.array([False, True, False]), "the caller's mask")

    def test_a_masked_reset_gives_the_chosen_rows_their_own_seeds(self) -> None:
        self._skip_without("supports_reset_mask")
        self._skip_without("seeds_masked_resets")
        with self.opened(3) as envs, self.opened(3) as fresh:
            envs.reset(seed=1)
            self.step(envs)
            mask = np.array([True, False, True])
            observations, _ = envs.reset(seed=9, options={"reset_mask": mask})
            expected, _ = fresh.reset(seed=9)
            self._assert_same_rows(envs, (0, 2), observations, expected)

    def _assert_same_rows(self, envs: AnyVectorEnv, indices: tuple[int, ...], actual: Any, expected: Any) -> None:
        mine, theirs = (list(iterate(envs.observation_space, batch)) for batch in (actual, expected))
        for index in indices:
            assert_identical(mine[index], theirs[index], f"observation of environment {index}")

    # -- the step that ends an episode, and the one after it ----------------------------------------------------------

    def test_next_step_autoreset_ignores_one_action_and_gives_zero_reward(self) -> None:
        with self.begun(autoreset_mode=AutoresetMode.NEXT_STEP) as envs:
            for _ in range(3):
                _, _, terminations, truncations, infos = self.step_until_done(envs)
                assert "final_obs" not in infos
                dones = terminations | truncations
                observations, rewards, terminations, truncations, _ = self.step(envs)
                assert observations in envs.observation_space
                assert (rewards[dones] == 0.0).all(), "the step that resets must have reward 0"
                assert not terminations[dones].any(), "the step that resets must not end an episode"
                assert not truncations[dones].any(), "the step that resets must not end an episode"

    def test_same_step_autoreset_reports_the_final_observation_and_info(self) -> None:
        self._skip_without("gives_final_observations")
        with self.begun(autoreset_mode=AutoresetMode.SAME_STEP) as envs:
            for _ in range(3):
                result = self.step_until_done(envs)
                self._check_step(envs, result)
                _, _, terminations, truncations, infos = result
                dones = terminations | truncations
                final_obs = infos["final_obs"]
                assert isinstance(final_obs, np.ndarray)
                assert final_obs.dtype == object
                assert final_obs.shape == (envs.num_envs,)
                assert_identical(infos["_final_obs"], dones, "infos['_final_obs']")
                assert_identical(infos["_final_info"], dones, "infos['_final_info']")
                assert isinstance(infos["final_info"], dict)
                for done, final in zip(dones, final_obs, strict=True):
                    assert (final in envs.single_observation_space) if done else (final is None)

    def test_same_step_autoreset_has_no_final_keys_if_no_episode_ends(self) -> None:
        self._skip_without("gives_final_observations")
        with self.begun(autoreset_mode=AutoresetMode.SAME_STEP) as envs:
            for _ in range(5):
                _, _, terminations, truncations, infos = self.step(envs)
                if not (terminations | truncations).any():
                    assert not {"final_obs", "_final_obs", "final_info", "_final_info"} & set(infos)

    def test_same_step_autoreset_returns_the_new_episode(self) -> None:
        self._skip_without("honours_seeds")
        with (
            self.opened(1, autoreset_mode=AutoresetMode.SAME_STEP) as same,
            self.opened(1, autoreset_mode=AutoresetMode.NEXT_STEP) as following,
        ):
            assert_identical(same.reset(seed=5), following.reset(seed=5), "reset")
            for t in range(self.max_steps):
                actions = self.sample_actions(same)
                one, other = self.step(same, actions), self.step(following, copy.deepcopy(actions))
                assert_identical(one[1:4], other[1:4], f"rewards and flags of step {t}")
                if (one[2] | one[3]).any():
                    after_reset = self.step(following, copy.deepcopy(actions))
                    assert_identical(one[0], after_reset[0], f"observation of the new episode at step {t}")
                    return
                assert_identical(one[0], other[0], f"observation of step {t}")

    def test_without_autoreset_a_masked_reset_starts_the_next_episode(self) -> None:
        self._skip_without("supports_reset_mask")
        with self.begun(autoreset_mode=AutoresetMode.DISABLED) as envs:
            for _ in range(3):
                _, _, terminations, truncations, infos = self.step_until_done(envs)
                assert "final_obs" not in infos
                observations, _ = envs.reset(options={"reset_mask": terminations | truncations})
                assert observations in envs.observation_space

    # -- wrong arguments, and close() ---------------------------------------------------------------------------------

    def test_a_list_of_seeds_of_the_wrong_length_is_refused_and_changes_nothing(self) -> None:
        self._skip_without("honours_seeds")
        with self.opened(3) as envs:
            for seeds in ([1, 2], [1, 2, 3, 4]):
                with pytest.raises(ValueError, match="3"):
                    reset_with(envs, seeds)
            observations, _ = envs.reset(seed=1)
            assert observations in envs.observation_space
            self._check_step(envs, self.step(envs))

    @pytest.mark.parametrize(
        ("mask", "error"),
        [
            ([True, False, True], TypeError),
            (np.array([True, False]), ValueError),
            (np.ones((3, 1), dtype=np.bool_), ValueError),
            (np.array([1, 0, 1]), TypeError),
            (np.zeros(3, dtype=np.bool_), ValueError),
        ],
        ids=["list", "too-short", "two-dimensional", "integers", "all-false"],
    )
    def test_a_wrong_reset_mask_is_refused_and_changes_nothing(self, mask: Any, error: type[Exception]) -> None:
        self._skip_without("supports_reset_mask")
        with self.begun(3) as envs:
            with pytest.raises(error, match="reset_mask"):
                envs.reset(options={"reset_mask": mask})
            self._check_step(envs, self.step(envs))

    @pytest.mark.parametrize("count", [2, 4], ids=["too-few", "too-many"])
    def test_the_wrong_number_of_actions_is_refused_before_anything_happens(self, count: int) -> None:
        self._skip_without("refuses_wrong_actions")
        with self.opened(3) as envs, self.opened(3) as untouched:
            envs.reset(seed=1)
            untouched.reset(seed=1)
            wrong = batch_space(envs.single_action_space, count)
            wrong.seed(1)
            with pytest.raises(self.wrong_action_errors):
                envs.step(wrong.sample())
            if not self.honours_seeds:
                self._check_step(envs, self.step(envs))
                return
            assert_same_steps(envs, untouched, 3, lambda: self.sample_actions(envs))

    def test_actions_are_not_written_to(self) -> None:
        with self.begun() as envs:
            actions = self.sample_actions(envs)
            before = copy.deepcopy(actions)
            self.step(envs, actions)
            assert_identical(actions, before, "the caller's actions")

    @pytest.mark.parametrize("begun", [True, False], ids=["after-a-reset", "before-the-first-reset"])
    def test_close_may_be_called_twice(self, begun: bool) -> None:
        with self.opened() as envs:
            if begun:
                envs.reset(seed=1)
            for _ in range(2):
                envs.close()
                assert envs.closed is True

    def test_use_after_close_raises(self) -> None:
        with self.begun() as envs:
            actions = self.sample_actions(envs)
            envs.close()
            for call in (lambda: envs.reset(seed=1), lambda: envs.step(actions)):
                with pytest.raises(ClosedEnvironmentError):
                    call()

    # -- Gymnasium's vector wrappers ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
    def test_record_episode_statistics_counts_returns_and_lengths(self, mode: AutoresetMode) -> None:
        with self.opened(autoreset_mode=mode) as envs:
            wrapped = gymnasium.wrappers.vector.RecordEpisodeStatistics(envs)
            wrapped.reset(seed=1)
            returns = np.zeros(envs.num_envs)
            lengths = np.zeros(envs.num_envs, dtype=np.int64)
            ended = np.zeros(envs.num_envs, dtype=np.bool_)
            for _ in range(self.max_steps):
                _, rewards, terminations, truncations, infos = self.step(wrapped)
                counted = ~ended | (mode is AutoresetMode.SAME_STEP)
                returns = np.where(ended, 0.0, returns) + np.where(counted, rewards, 0.0)
                lengths = np.where(ended, 0, lengths) + counted
                ended = terminations | truncations
                if ended.any():
                    assert_identical(infos["_episode"], ended, "infos['_episode']")
                    np.testing.assert_array_equal(infos["episode"]["l"][ended], lengths[ended])
                    np.testing.assert_array_equal(infos["episode"]["r"][ended], returns[ended])
                    return
            pytest.fail(f"no episode ended within {self.max_steps} random steps; override max_steps or make()")

    def test_dict_info_to_list_gives_one_dict_for_each_environment(self) -> None:
        self._skip_without("masks_infos")
        with self.opened() as envs:
            wrapped = gymnasium.wrappers.vector.DictInfoToList(envs)
            _, reset_infos = wrapped.reset(seed=1)
            step_infos = self.step(wrapped)[4]
            for infos in (reset_infos, step_infos):
                assert isinstance(infos, list)
                assert len(infos) == envs.num_envs
                assert all(isinstance(info, dict) for info in infos)

    def test_a_reward_wrapper_changes_every_reward(self) -> None:
        with self.opened() as envs:
            wrapped = gymnasium.wrappers.vector.TransformReward(envs, lambda rewards: rewards * 0.0 - 1.0)
            wrapped.reset(seed=1)
            np.testing.assert_array_equal(self.step(wrapped)[1], -np.ones(envs.num_envs))

    def test_closing_a_wrapper_closes_the_wrapped_vector_env(self) -> None:
        with self.opened() as envs:
            wrapped = gymnasium.wrappers.vector.RecordEpisodeStatistics(envs)
            wrapped.reset(seed=1)
            wrapped.close()
            assert envs.closed is True
            assert wrapped.closed is True


def _leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of nested dicts, tuples and lists, depth first; a ``GraphInstance`` is a leaf."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from _leaves(value)
    elif isinstance(tree, tuple | list) and not isinstance(tree, GraphInstance):
        for value in tree:
            yield from _leaves(value)
    else:
        yield tree


def _check_masks(infos: Mapping[Any, Any], num_envs: int, where: str = "infos") -> None:
    """Assert that every key of a batched info has a mask (bool, shape ``(num_envs,)``), at every level."""
    for key, value in infos.items():
        if isinstance(key, str) and key.startswith("_") and key[1:] in infos:
            continue
        mask = infos.get(f"_{key}")
        assert isinstance(mask, np.ndarray), f"{where}: key {key!r} has no mask '_{key}'"
        assert mask.dtype == np.bool_, f"{where}: mask '_{key}' has dtype {mask.dtype}"
        assert mask.shape == (num_envs,), f"{where}: mask '_{key}' has shape {mask.shape}"
        assert mask.any(), f"{where}: key {key!r} is present, but no environment reported it"
        if isinstance(value, Mapping):
            _check_masks(value, num_envs, f"{where}[{key!r}]")
        else:
            assert isinstance(value, np.ndarray), f"{where}[{key!r}] is {type(value)}, not an array"
            assert len(value) == num_envs, f"{where}[{key!r}] has {len(value)} rows for {num_envs} environments"
