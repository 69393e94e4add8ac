"""TRL's `GRPOTrainer` for models under a context-parallel plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import is_peft_model

from parallel_plans.huggingface.trl import ContextParallelMixin

NO_GENERATION = (
    "over a sharded sequence, completions come from elsewhere or from the ranks themselves; give "
    "rollout_func=..., which asks a server for them, or use_transformers_continuous_batching=True, "
    "and leave use_vllm, tools and environments out"
)


class ContextParallelGRPOMixin(ContextParallelMixin):
    """Context parallelism for TRL's `GRPOTrainer`.

    Put it before the trainer of TRL. Completions come from one of two places, and rewards,
    advantages, losses and metrics are the same as those of TRL's trainer on the ranks of
    `dp_replicate` alone:

    - from a `rollout_func`, which the first rank of each axis calls; the whole axis uses its
      completions and rewards;
    - with `use_transformers_continuous_batching=True`, from the ranks of the axis themselves, by
      `generate_batch` with the weights as they are. A prompt is computed once for all of its
      completions.

    Args:
        *args: arguments of TRL's trainer. `model` is under `context_parallel_plan`.
        **kwargs: arguments of TRL's trainer, including `rollout_func`; `mesh` as in
            `ContextParallelTrainer`. With `beta`, train an adapter: TRL makes a reference model
            that is not under the plan.

    Raises:
        TypeError: if it is mixed into another trainer.
        ValueError: see `ContextParallelMixin`. Also if the trainer would generate, completions are
            logged, or the completions of a prompt would be split between replicas.

    Example:
        >>> from trl import GRPOTrainer
        >>> class Trainer(ContextParallelGRPOMixin, GRPOTrainer):
        ...     pass
        >>> trainer = Trainer(
        ...     model, reward, config, train_dataset=rows, rollout_func=ask, mesh=mesh
        ... )  # doctest: +SKIP
    """

    _served: tuple[str, ...] = ("GRPOTrainer",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._check_generation()
        # TRL counts all ranks, but the ranks of an axis share their rows.
        config: Any = self.args
        config.generation_batch_size = self._rows_of_replica() * self._num_replicas()
        ask = self.rollout_func
        if ask is not None:
            self.rollout_func: Any = lambda prompts, trainer: self._share(
                lambda: ask(prompts, trainer)
            )

    def _makes_reference(self) -> bool:
        args: Any = self.args
        return args.beta != 0 and not is_peft_model(self.model)

    def _rows_of_replica(self) -> int:
        """Return the number of completions that a replica generates at once."""
        config: Any = self.args
        return config.per_device_train_batch_size * config.steps_per_generation

    def _check_generation(self) -> None:
        trainer: Any = self
        config, rows = trainer.args, self._rows_of_replica()
        is_own = config.use_transformers_continuous_batching
        if (trainer.rollout_func is None) != is_own or trainer.use_vllm or trainer.tools:
            raise ValueError(NO_GENERATION)
        if is_own and self.is_fsdp_enabled and self._num_replicas() > 1:
            raise ValueError(
                "FSDP gathers weights over replicas, whose completions take different numbers of "
                "steps; generate on one replica, by a mesh of cp alone, or give rollout_func"
            )
        if "tp" in (self._mesh.mesh_dim_names or ()):
            raise ValueError("GRPO shares completions along cp only; leave tp out of the mesh")
        if config.log_completions:
            raise ValueError(
                "log_completions=True would log those of every rank, and the ranks of cp share "
                "theirs; leave it out"
            )
        for name, number, group in (
            ("per_device_train_batch_size * steps_per_generation", rows, trainer.num_generations),
            (
                "per_device_eval_batch_size",
                config.per_device_eval_batch_size if config.do_eval else 0,
                trainer.num_generations_eval,
            ),
        ):
            if number % group:
                raise ValueError(
                    f"all completions of a prompt belong to one replica: {name} is a multiple of "
                    f"the {group} generations of a prompt, got {number}"
                )

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], images: Any, multimodal: Any, number: int, *_: Any
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Return completions and their log-probabilities, `number` for each prompt in a row."""
        trainer: Any = self
        if not trainer.args.use_transformers_continuous_batching or images is not None:
            raise ValueError(NO_GENERATION)
        # One seed for all ranks of cp, which must choose the same tokens.
        seed = self._share(lambda: int(torch.randint(2**62, ())))
        how = replace(trainer.continuous_batching_config, return_logprobs=True, seed=seed)
        model = self.accelerator.unwrap_model(trainer.model)
        # TRL repeats each prompt for its completions; the batch samples all of them from one.
        with torch.no_grad(), _evaluating(model):
            found = model.generate_batch(
                prompt_ids[::number],
                trainer.generation_config,
                how,
                num_return_sequences=number,
            )
        outputs = list(found.values())
        failed = [x.error for x in outputs if x.error is not None]
        if failed:
            raise ValueError(f"{len(failed)} prompts gave no completion, the first: {failed[0]}")
        return [x.generated_tokens for x in outputs], [x.logprobs for x in outputs]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        parent: Any = super()
        with self._counting_replicas():
            batch = parent._generate_and_score_completions(inputs)
        # TRL shuffles the batch next, and the rollout may have drawn random numbers on one rank.
        torch.set_rng_state(self._share(torch.get_rng_state))
        return batch

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the rewards of each axis's first rank: user functions may differ between ranks."""
        parent: Any = super()
        rewards = parent._calculate_rewards(*args, **kwargs)
        by_rank = rewards.view(dist.get_world_size(), -1, rewards.shape[-1])
        # The mesh has the ranks of a replica side by side, whatever their numbers are.
        first = self._mesh.mesh.view(self._num_replicas(), -1)[:, 0]
        return by_rank[first].flatten(0, 1)

    def compute_loss(
        self,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        with self._counting_replicas():
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    @contextmanager
    def _counting_replicas(self) -> Iterator[None]:
        """Present the replicas to TRL as its processes, while TRL gathers from them."""
        accelerator = self.accelerator
        self.accelerator: Any = _Replicas(self)
        try:
            yield
        finally:
            self.accelerator = accelerator

    def _share(self, make: Callable[[], Any]) -> Any:
        """Run `make` on the first rank of the axis; return its result, or raise, on all ranks."""
        group = self._mesh["cp"].get_group()
        made: list[Any] = [None, None]
        if group.rank() == 0:
            try:
                made[0] = make()
            except Exception as error:  # the user's code failed, and the other ranks wait
                made[1] = f"{type(error).__name__}: {error}"
                dist.broadcast_object_list(made, group=group, group_src=0)
                raise
        dist.broadcast_object_list(made, group=group, group_src=0)
        if made[1] is not None:
            raise RuntimeError(f"the first rank of the axis failed with {made[1]}")
        return made[0]


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Put a model into evaluation, where layers without a cache drop nothing."""
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)


class _Replicas:
    """An accelerator whose processes are the data-parallel replicas."""

    def __init__(self, trainer: ContextParallelGRPOMixin) -> None:
        self._accelerator = trainer.accelerator
        self.process_index = trainer._replica()
        self.num_processes = trainer._num_replicas()
        self.gather = trainer._gather_replicas

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)
