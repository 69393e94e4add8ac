"""The public `SequenceAxis`: an axis of a mesh, and how attention over it runs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor

from dtensor_ring.agreement.group_state import meet
from dtensor_ring.balanced.balanced import Balanced
from dtensor_ring.dtensor import call_check, sequence
from dtensor_ring.dtensor.annotation import annotate, annotation_of, axis_group
from dtensor_ring.dtensor.attention import attend
from dtensor_ring.dtensor.attention_options import AttentionOptions
from dtensor_ring.dtensor.axis_config import check_axis_options, check_machine
from dtensor_ring.dtensor.call_check import checked_barrier
from dtensor_ring.dtensor.choice import device_name, machine_of
from dtensor_ring.dtensor.gather import sum_over_sequence
from dtensor_ring.dtensor.laboratory import (
    AnyMachine,
    is_machine,
    preset_names,
    read_machine,
    written_machine,
)
from dtensor_ring.dtensor.per_query import with_bias
from dtensor_ring.dtensor.placement import dtensor_of
from dtensor_ring.dtensor.sequence_order import local_tokens
from dtensor_ring.dtensor.sequence_tensor import from_local_tokens
from dtensor_ring.dtensor.token_mesh import token_mesh
from dtensor_ring.ops.options import Call, on_dtensors
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.plan import plan
from dtensor_ring.planning.ranges import as_count
from dtensor_ring.planning.run_table import PerBatch, as_layout
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.strategy import AUTO, check_strategy
from dtensor_ring.transport.symmetric import use_symmetric
from dtensor_ring.transport.transport import TransferPolicy, Transport, set_transport

if TYPE_CHECKING:
    from dtensor_ring.dtensor.laboratory import Machine


class SequenceAxis:
    """A mesh axis that sequences are sharded over: layout, strategy, kernel and transfer policy.

    The object configures the axis for `ring_attention`, `ContextParallel` and the plans for models.
    It also applies to `torch.nn.functional.scaled_dot_product_attention` on DTensors whose
    dimension 2 is sharded over the axis, of this mesh or of the one it was sliced from; `attn_mask`
    and dropout are refused there. Make the object before the first tensor is sharded over the axis.
    Tokens must be sharded in its order, as `shard` does: `distribute_tensor` and `redistribute`
    know only contiguous shards.

    Args:
        mesh: a 1-D mesh, or one axis of a larger one, such as `mesh["cp"]`.
        layout: how tokens are sharded: a layout or its spec ("contiguous", "striped", "zigzag",
            "block_cyclic:128"); "balanced", or a `Balanced` layout, if it belongs to a batch: then
            only `ring_attention` and `attention` with `runs` can be called.
        strategy: how attention is made parallel. Keys and values travel: "ring" uses "around" (from
            each rank to the next) or "direct" (to the ranks that see them), whichever moves less;
            "all_gather" first gathers all that is seen. "ulysses" is an all-to-all of heads over
            all ranks, "ulysses:4" over groups of four, with a ring among the groups,
            "ulysses:4+all_gather" with an all-gather. "auto" is the fastest of them for each mask
            and shape, simulated on `machine`. See `docs/strategies.md`.
        kernel: name of the block kernel; by default the first of `available_kernels()` that
            supports the call.
        policy: the dtypes in which messages travel, and whether copy engines move them.
        transport: what moves the messages; by default the mesh's process group, or what the policy
            names.
        machine: what "auto" simulates: the path of a file that `python -m dtensor_ring calibrate`
            wrote, which the first rank of the axis reads for all; the name of a data sheet, such as
            "h100"; or a `Machine`. By default the data sheet of the device; where there is none, as
            for CPUs, that of "h100".
        strict: on GPUs a call goes on while ranks compare it, so a difference is an error of the
            next call, within a second. With `strict=True` each call waits on the host until the
            previous rank has made the same call, and nothing is computed from other data. Calls on
            CPUs always do. For debugging: the device may run out of work. See `docs/failures.md`.

    An omitted option is taken from another object of the same axis, else from the default. Objects
    of one axis may differ: what `shard` makes goes by its own object, and tensors of two objects
    cannot be mixed. Other calls, such as plain SDPA on DTensors that you made, go by the last one.

    Raises:
        ValueError: if the mesh is not 1-D, a value is unknown, the axis was used before without
            a layout, or, on all ranks, if the first one cannot read the file of the machine.
        TypeError: if the mesh, the layout, the policy or the machine has a wrong type.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> axis = SequenceAxis(mesh, "zigzag")
        >>> q, k, v = (axis.shard(torch.randn(1, 2, 8, 4), 2) for _ in range(3))
        >>> axis.unshard(axis.attention(q, k, v), 2).shape
        torch.Size([1, 2, 8, 4])
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        layout: Layout | str = "zigzag",
        *,
        strategy: str | None = None,
        kernel: str | None = None,
        policy: TransferPolicy | None = None,
        transport: Transport | None = None,
        machine: AnyMachine | None = None,
        strict: bool | None = None,
    ) -> None:
        if strict is not None:
            strict = call_check.as_flag("strict", strict)
        group, layout = axis_group(mesh), as_layout(layout)
        how: dict[str, Any] = {"strategy": strategy, "kernel": kernel, "policy": policy}
        check_axis_options(layout, **how)  # before ranks wait for the file of a machine
        how["machine"] = shared_machine(group, machine, mesh.device_type)
        self._config = annotate(mesh, layout, **how)
        if transport is not None:
            set_transport(group, transport)
        if self.policy.transport == "symmetric":
            use_symmetric(group)
        meet(group, strict)
        sequence.install_handlers()
        self.mesh = mesh
        self._group_name, self._size, self._strict = group.group_name, group.size(), strict
        # Graphs take them as constants, so they are made here.
        self.token_mesh = mesh if self.layout.per_batch else token_mesh(mesh, self._config)

    def __reduce__(self) -> tuple[partial[SequenceAxis], tuple[DeviceMesh, Layout]]:
        """Pickle the arguments: loading the object configures the axis there."""
        how: dict[str, Any] = {"strategy": self.strategy, "kernel": self.kernel}
        how |= {"policy": self.policy, "machine": self.machine, "strict": self._strict}
        return partial(SequenceAxis, **how), (self.mesh, self.layout)

    @property
    def layout(self) -> Layout:
        """The layout: which tokens each rank holds."""
        return self._config.layout

    @property
    def strategy(self) -> str:
        """The strategy that makes attention parallel; "auto" chooses one for each call."""
        return self._config.strategy

    @property
    def kernel(self) -> str | None:
        """Name of the block kernel, `None` for the first that supports a call."""
        return self._config.kernel

    @property
    def policy(self) -> TransferPolicy:
        """The dtypes in which messages travel."""
        return self._config.policy

    @property
    def machine(self) -> Machine | None:
        """The machine by which "auto" chooses, `None` for the data sheet of the device."""
        return self._config.machine

    def __repr__(self) -> str:
        what = f"{self.mesh}, {self.layout.spec!r}, strategy={self.strategy!r}"
        return f"SequenceAxis({what}, kernel={self.kernel!r}, policy={self.policy})"

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttentionOptions]
    ) -> Tensor:
        """Run `ring_attention` over this axis.

        Args:
            query: `(B, N, S, H)` as a DTensor, or this rank's shard `(B, N, L, H)`; likewise key
                and value.
            key: `(B, Nkv, S, H)`.
            value: `(B, Nkv, S, Hv)`.
            options: those of `ring_attention` but `kernel` and `mesh`, which are the axis's:
                `mask`, `cu_seqlens`, `slices`, `key_runs`, `sinks`, `relative_bias`, `scale`,
                `softcap`, `key_cu_seqlens`, `runs`, `strategy`, `dropout_p`, `dropout_seed`. And
                `seq_len`, the S of local shards, if ranks hold different numbers of tokens.

        Returns:
            `(B, N, S, Hv)`, or `(B, N, L, Hv)`, in the form of the query.

        Raises:
            TypeError: if an option is unknown, or as `ring_attention`, like all other errors.
        """
        return self._attention(query, key, value, False, **options)[0]

    def attention_with_lse(
        self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[AttentionOptions]
    ) -> tuple[Tensor, Tensor]:
        """Run `attention`, and also return the log-sum-exp of the scores, for `merge_attention`.

        Args:
            query: as in `attention`.
            key: likewise.
            value: likewise.
            options: as in `attention`.

        Returns:
            `out`, and `lse` `(B, N, S)` in its form, float32 or wider, -inf for a query without
            keys.
        """
        out, lse = self._attention(query, key, value, True, **options)
        assert lse is not None
        return out, lse

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        with_lse: bool,
        *,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
        sinks: Tensor | None = None,
        relative_bias: Tensor | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        key_cu_seqlens: Tensor | None = None,
        runs: Tensor | None = None,
        slices: Slices | Tensor | None = None,
        seq_len: int | None = None,
        key_runs: Tensor | None = None,
        strategy: str | None = None,
        dropout_p: float = 0.0,
        dropout_seed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return `out` of `attention`, and lse if it is asked for."""
        call_check.check_tensors(query, key, value)
        if strategy is not None:
            check_strategy(strategy)
        mask = call_check.mask_of(mask, slices)
        batch = call_check.batch_of(cu_seqlens, key_cu_seqlens, runs, slices, key_runs)
        has_runs = key_runs is not None and runs is not None
        if seq_len is not None and (dtensor_of(query) is not None or has_runs):
            has_own = "runs and key_runs are given" if has_runs else "query is a DTensor"
            raise ValueError(
                f"seq_len is for local shards of a whole sequence, and {has_own}, which say it; "
                "leave it out"
            )
        drop = {"dropout_p": dropout_p, "dropout_seed": dropout_seed}
        if dtensor_of(query) is not None:
            # No kernel here: the op takes that of the axis that the DTensors are sharded over.
            scores = call_check.scores_of(query, mask, scale, softcap, sinks, None, **drop)
            if relative_bias is not None:
                query = with_bias(query, relative_bias)
            return attend(query, key, value, Call(batch, scores, on_dtensors(strategy)), with_lse)
        scores = call_check.scores_of(query, mask, scale, softcap, sinks, self.kernel, **drop)
        if relative_bias is not None:
            query = with_bias(query, relative_bias)
        lengths: tuple[int | None, int | None] = (None, None)
        if not has_runs:  # else the layout is not used
            self._config.check_runs(runs is not None)
            lengths = query.shape[2] * self._size, key.shape[2] * self._size
        if seq_len is not None:
            lengths = (as_count("seq_len", seq_len),) * 2
        place = self._config.place(self._group_name, lengths[0], lengths[1], strategy)
        return attend(query, key, value, Call(batch, scores, place), with_lse)

    def prepare(
        self,
        seq_len: int,
        *,
        mask: Mask | None = None,
        cu_seqlens: Tensor | None = None,
        runs: Tensor | None = None,
        slices: Slices | Tensor | None = None,
        strategy: str | None = None,
    ) -> None:
        """Plan the attention of a batch before its first call, which then finds the plan.

        To hide the planning time, call this in a thread of this process while the previous batch is
        computed: `executor.submit(axis.prepare, ...)`. Nothing is sent. Plans are looked up by
        content, so the call may pass other tensors with equal content. Processes of a data loader
        can make the layout and its `sequence_runs`, and pass them on with the batch.

        Args:
            seq_len: global length of queries and keys, S, in tokens.
            mask: which keys a query sees; causal by default, full with `slices`.
            cu_seqlens: boundaries of documents, `(D+1,)`, or `(B, D+1)` of this rank's batch rows.
            runs: the runs of this batch, for a layout that belongs to it.
            slices: what queries see, in place of mask and boundaries.
            strategy: the strategy of the attention; by default the axis's. "auto" needs tensors to
                choose, so name the one of the call.

        Raises:
            TypeError: if an argument has a wrong type.
            ValueError: if the axis cannot run this attention, or the strategy is "auto".

        Example:
            >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
            >>> axis = SequenceAxis(mesh, "zigzag")
            >>> axis.prepare(8, cu_seqlens=torch.tensor([0, 3, 8], dtype=torch.int32))
        """
        length = as_count("seq_len", seq_len)
        if strategy is not None:
            check_strategy(strategy)
        batch = call_check.batch_of(cu_seqlens, None, runs, slices)
        empty = torch.empty(0)  # plans do not depend on the tensors
        scores = call_check.scores_of(empty, call_check.mask_of(mask, slices), 1.0, 0.0, None, None)
        place = self._config.place(self._group_name, length, length, strategy)
        call = Call(batch, scores, place)
        if place.strategy == AUTO:
            raise ValueError(
                '"auto" is chosen by the heads of a call, which prepare does not know; '
                "pass the strategy that the call takes, such as strategy='ring'"
            )
        call_check.check_options(empty, call)
        self._config.check_runs(runs is not None)
        by_row = ((batch.cu_seqlens, 2), (batch.slices, 3))
        # A table for each batch row says how many there are; one for all is planned as one row.
        num_rows = next((len(x) for x, ndim in by_row if x is not None and x.ndim == ndim), 1)
        plan(*call.in_whole_blocks().request(num_rows))

    def shard(self, tensor: Tensor, dim: int, layout: Balanced | None = None) -> DTensor:
        """Shard a tensor that every rank holds whole, see `shard_sequence`.

        What is computed from it goes by this object, also after another one of the same ranks.
        """
        dim = sequence.check_whole(tensor, dim)
        chosen = sequence.order_of(self._config, layout, f"is annotated {self.layout.spec}")
        local = local_tokens(tensor, self.mesh, dim, chosen)
        on = token_mesh(self.mesh, self._config, chosen)
        return from_local_tokens(local, on, dim, tensor.shape[dim])

    def unshard(self, dtensor: DTensor, dim: int, layout: Balanced | None = None) -> Tensor:
        """Gather a DTensor whole, in the original order, see `unshard_sequence`."""
        return sequence.unshard_sequence(dtensor, dim, layout)

    def sum(self, local: Tensor, dim: int | None = None, seq_len: int | None = None) -> Tensor:
        """Sum a tensor over the ranks, such as the loss of each rank, see `sum_over_sequence`."""
        return sum_over_sequence(local, self.mesh, dim, seq_len)

    def positions(self, seq_len: int) -> Tensor:
        """Return the positions of this rank's tokens in a sequence of `seq_len`, int64, `(L,)`.

        Raises:
            ValueError: if the layout cannot shard that length, or belongs to a batch.
        """
        seq_len = as_count("seq_len", seq_len)
        # The layout of one batch would be wrong for another one; `PerBatch` refuses.
        layout = PerBatch() if self.layout.per_batch else self.layout
        return sequence.local_positions(self.mesh, layout, seq_len)


def output_mesh(axis: SequenceAxis, layout: Layout) -> DeviceMesh:
    """Return the mesh of what a model on local shards returns, whose gradients average.

    Args:
        axis: the axis; the tensors go by its options.
        layout: the order of the tokens: that of the axis, of a batch, or `Padded`.
    """
    return token_mesh(axis.mesh, axis._config, layout, averages=True)


def shared_machine(
    group: ProcessGroup, given: AnyMachine | None, device: str = "cpu"
) -> Machine | None:
    """Return the machine that all ranks of a group get for their axis.

    The first rank reads a file and sends it to the others, once for each axis and name. Other ranks
    need not have the file.

    Args:
        group: the group of the axis.
        given: a machine, the name of a preset, or the path of a file of rank 0.
        device: type of the devices of the axis.

    Raises:
        TypeError: if it is something else.
        ValueError: on all ranks, if the first one cannot read the file, or its GPU is another
            device than the one that was measured.
        RingError: if a rank does something else meanwhile.
    """
    check_machine(given)
    if given is None or is_machine(given):
        return given
    name = str(given)
    if name.lower() in preset_names():
        return read_machine(name)
    here = annotation_of(group)
    # One rank reads the file for all, as all must choose by the same numbers.
    if name not in here.machines:
        here.machines[name] = _received(group, name, device)
    return here.machines[name]


def machine_on(mesh: DeviceMesh, given: AnyMachine | None = None) -> Machine:
    """Return the machine by which "auto" chooses over a 1-D mesh, before it is annotated.

    All ranks call it alike, see `SequenceAxis`.

    Args:
        mesh: a 1-D mesh.
        given: the machine that `SequenceAxis` will get, a name or a path; `None` for the data
            sheet of the device.

    Raises:
        TypeError: if it is something else.
        ValueError: on all ranks, if the first one cannot read the file.
    """
    group, device = axis_group(mesh), mesh.device_type
    return shared_machine(group, given, device) or machine_of(annotation_of(group), device)


def _received(group: ProcessGroup, path: str, device: str) -> Machine:
    """Return the machine of a file that the first rank reads."""
    if group.size() == 1 or dist.get_backend(group) == "fake":  # nobody to send or to get it
        return _read(path, device)
    with checked_barrier(group, "reading the file of a machine", {}):
        pass  # raises if a rank is in another call, where the collective below would hang
    # The error travels, too: if the reader raised alone, the others would wait for its text.
    box: list[Any] = [_text(path, device) if group.rank() == 0 else None]
    dist.broadcast_object_list(box, group=group, group_src=0)
    text, error = box[0]
    if error:
        reader = dist.get_process_group_ranks(group)[0]
        raise ValueError(f"rank {reader}, which reads the machine for its axis: {error}")
    return written_machine(text, path)


def _read(path: str, device: str) -> Machine:
    """Return the machine of a file; on CPUs any, as for dry runs."""
    found, name = read_machine(path), device_name(device)
    if name:
        found.check_device(name)
    return found


def _text(path: str, device: str) -> tuple[str, str]:
    """Return a machine as text, and an empty error; or an error."""
    try:
        return _read(path, device).to_json(), ""
    except ValueError as error:
        return "", str(error)
