"""Tensor parallel: what the ranks of one tensor-parallel axis have to tell each other.

All ranks of the axis train on the same samples. Each holds pieces of some parameters and all of others. A sample's squared norm
is the sum over ranks of what they find for their pieces, plus, once, what each of them finds for parameters that all hold.
One collective per physical batch adds the squared norms up; one per call adds up the rows of a normalisation whose
positions are split. Nothing else is exchanged on differential privacy's account.

Shapes: N norms (one for each parameter or block of them), B samples, W ranks of the axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opacus.distributed.sharding import axes_of
from opacus.errors import PerSampleGradientError, raise_if_any
from opacus.grad_sample.kept import Kept, KeptRows
from opacus.grad_sample.tensor_parallel import tensor_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["TensorAxis", "add_rows"]

# relative to a parameter's own squared norm, and to the whole one's: above what ranks may round differently
_OWN, _WHOLE = 1e-2, {torch.float64: 1e-9, torch.float32: 1e-6}


def add_rows(kept: dict[str, Kept], mesh: DeviceMesh) -> dict[str, Kept]:
    """Per-sample gradients, `[B, *shape]` each, of positions that are split over the axis, added up: one collective."""
    rows = {name: use.instantiated() for name, use in kept.items()}
    together = torch.cat([one.flatten(1) for one in rows.values()], 1)
    if together.numel():
        dist.all_reduce(together, group=mesh.get_group())
    parts = together.split(
        [one[:1].numel() if len(one) else one.flatten(1).shape[1] for one in rows.values()], 1
    )
    return {
        name: KeptRows(part.reshape(one.shape)) for (name, one), part in zip(rows.items(), parts, strict=True)
    }


class TensorAxis:
    """The tensor-parallel axis of a model, if it has one, on this rank.

    Args:
        root: the model.

    Attributes:
        mesh: of the axis, one dimension; None where no layer is split over ranks.
        names: of the mesh axes that are tensor parallel.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self._agreed: set[int] = set()  # parameters that ranks hold whole and were found to agree on
        self._set(tensor_mesh(root))

    def _set(self, mesh: DeviceMesh | None) -> None:
        self.mesh = mesh
        self.names: frozenset[Any] = frozenset(axes_of(mesh) if mesh is not None else ())

    def check(self, mesh: DeviceMesh, where: str) -> None:
        """Raise if the layer `where` is split over another axis than other layers."""
        if self.mesh is None:  # parallelize_module came after the hooks
            self._set(mesh)
        elif self.mesh != mesh:
            raise PerSampleGradientError(
                "per-sample gradients cannot be computed",
                [
                    f"{where} is split over {mesh}, other layers over {self.mesh}: norms are added up over one "
                    "tensor-parallel axis. Parallelize all layers over the same mesh."
                ],
            )

    def agrees_on(self, parameters: Iterable[int]) -> bool:
        """Whether parameters with these ids were compared between the ranks before."""
        return self.mesh is None or self._agreed.issuperset(parameters)

    def whole(
        self, squared: Sequence[Tensor], split: Sequence[bool], parameters: Sequence[nn.Parameter]
    ) -> list[Tensor]:
        """Squared norms of whole parameters from those of this rank's pieces. Collective, if there is an axis.

        Args:
            squared: `[B]` each. split: whether each is of a piece; the others are the same on every rank.
            parameters: one for each.

        Raises:
            PerSampleGradientError: on every rank, naming parameters that all hold whole and whose gradients differ.
        """
        if self.mesh is None or not squared or not squared[0].numel():
            return list(squared)
        home = next(
            (one.device for one in squared if one.device.type == self.mesh.device_type), squared[0].device
        )
        wide = torch.float32 if home.type == "mps" else torch.float64
        own_NB = torch.stack([one.to(home, wide) for one in squared]).clamp_(min=0)
        total_NB = _added(own_NB, split, self.mesh)
        fresh = {id(p) for p in parameters} - self._agreed
        if fresh:
            apart = _differing(own_NB, total_NB, split, [p.dtype for p in parameters], self.mesh)
            self._refuse({id(parameters[i]) for i in apart})
            self._agreed |= fresh
        return [total.to(one.device, one.dtype) for total, one in zip(total_NB, squared, strict=True)]

    def _refuse(self, apart: set[int]) -> None:
        raise_if_any(
            "tensor-parallel ranks do not agree",
            [
                f"{name} is held whole by every rank, but its per-sample gradients differ between them, so that the ranks would "
                "drift apart. Give all ranks the same samples in the same order (and the same dropout), or, where the layer sees "
                "only a part of the positions or heads, name it in the plan (SequenceParallel)."
                for name, p in self.root.named_parameters()
                if id(p) in apart
            ],
            PerSampleGradientError,
        )


def _added(own_NB: Tensor, split: Sequence[bool], mesh: DeviceMesh) -> Tensor:
    """Pieces added up, and the mean of what all ranks hold: the same bits on every rank, so that clip factors are."""
    share = torch.tensor([1.0 if one else 1.0 / mesh.size() for one in split], dtype=own_NB.dtype)
    total = own_NB * share.to(own_NB.device, non_blocking=True).unsqueeze(1)
    dist.all_reduce(total, group=mesh.get_group())
    return total


def _differing(
    own_NB: Tensor, total_NB: Tensor, split: Sequence[bool], dtypes: Sequence[torch.dtype], mesh: DeviceMesh
) -> list[int]:
    """Which of the N that are no pieces differ between ranks, the same list on every rank. Waits for the device."""
    room = torch.tensor([_WHOLE.get(dtype, 1e-4) for dtype in dtypes], dtype=total_NB.dtype)
    allowed_NB = _OWN * total_NB + room.to(total_NB.device).unsqueeze(1) * total_NB.sum(0)
    apart_N = ((own_NB - total_NB).abs() > allowed_NB).any(1).to(torch.int32)
    dist.all_reduce(apart_N, op=dist.ReduceOp.MAX, group=mesh.get_group())
    return [
        i for i, (apart, piece) in enumerate(zip(apart_N.tolist(), split, strict=True)) if apart and not piece
    ]
