"""Room for documents that change from batch to batch, while a CUDA graph stays the same."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.compute.capture import refuse_capture
from dtensor_ring.dtensor.annotation import axis_group
from dtensor_ring.dtensor.call_check import checked_barrier
from dtensor_ring.ops.attention_record import numbers_text
from dtensor_ring.ops.boundaries import check_integers, know_changing
from dtensor_ring.planning.changing import ChangingDocuments
from dtensor_ring.planning.ranges import as_count


class DocumentRoom:
    """Boundaries of packed documents, with room: one CUDA graph serves all batches that fit.

    Pass `room.cu_seqlens` in place of the boundaries. Its launches and messages are those of one
    document, with empty segments, so a call costs more than with the boundaries themselves. The
    mask must be full or causal, and the layout zigzag or contiguous. All batch rows have the same
    documents.

    Args:
        mesh: the axis over which the sequence is sharded, a mesh of one dim.
        seq_len: global length of the sequence, in tokens.
        max_documents: the most documents of a batch.

    Attributes:
        cu_seqlens: int32 `(max_documents + 1,)` on the CPU: what stands for the documents. Write
            nothing into it; `fill` does.

    Raises:
        ValueError: if a number is negative, or there is room for no document.

    Example:
        >>> import torch
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> room = DocumentRoom(mesh, seq_len=8, max_documents=4)
        >>> room.fill(torch.tensor([0, 5, 8]))
        >>> room.cu_seqlens
        tensor([0, 5, 8, 8, 8], dtype=torch.int32)
    """

    def __init__(self, mesh: DeviceMesh, seq_len: int, max_documents: int) -> None:
        self._group, self._device = axis_group(mesh), torch.device(mesh.device_type)
        self._documents = ChangingDocuments(as_count("seq_len", seq_len), max_documents)
        self.cu_seqlens = torch.from_numpy(self._documents.bounds).int()
        know_changing(self.cu_seqlens, self._documents)

    def fill(self, cu_seqlens: Tensor) -> None:
        """Take the documents of the next batch, on all ranks alike, before it is replayed.

        Kernels that the current stream has queued read the documents before.

        Args:
            cu_seqlens: boundaries `(D+1,)` on the CPU, int32 or int64; at most `max_documents`.

        Raises:
            ValueError: on every rank, if they are no boundaries of the sequence, there is no room
                for them, or ranks differ.
            RuntimeError: while a CUDA graph is captured.
        """
        refuse_capture(self._device, "documents are replaced", "call fill before, and after it")
        is_tensor = isinstance(cu_seqlens, Tensor)
        text = numbers_text(cu_seqlens.cpu().numpy()) if is_tensor else repr(cu_seqlens)
        with checked_barrier(self._group, "fill", {"cu_seqlens": text}):
            if not is_tensor:
                raise TypeError(f"cu_seqlens must be a tensor (D+1,), got {text}")
            check_integers(cu_seqlens, "cu_seqlens")
            bounds = self._documents.checked(cu_seqlens.cpu().numpy())
        self._documents.replace(bounds)
        self.cu_seqlens.copy_(torch.from_numpy(bounds))
