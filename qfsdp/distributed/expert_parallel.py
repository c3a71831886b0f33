"""Expert parallelism: ranks share out the experts of a mixture, and tokens travel to them.

Rank r holds the rows that it holds without expert parallelism: those of part r of `size` in
`[experts * out, ...]`. With N parts, size / N neighbouring ranks hold all rows of experts / N
experts. So only gathering changes: FSDP2 gathers the rows over these neighbours, not over all
ranks, and reduces gradients over them. Everything else that knows rows (loading, norms, clipping,
checkpoints, adapter files) sees a parameter of all ranks, as before. Two ranks with the same place
in different parts exchange tokens:

    rank      0   1   2   3       4 experts, N = 2
    gathers   experts 0, 1 | experts 2, 3
    exchange  0 with 2, 1 with 3

The gradient of an expert is summed over the tokens of one such group in backward, and over the
groups by FSDP2: over all tokens, as without expert parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from qfsdp.common.errors import UserError
from qfsdp.distributed.strategy import ShardingConfig
from qfsdp.distributed.world import World, new_mesh
from qfsdp.modules.adapters.linears import LowRankExpertLinear
from qfsdp.modules.experts.mixture import MixtureMLP
from qfsdp.modules.experts.stacked import Experts, combine, dispatch, spread
from qfsdp.modules.transformer import Decoder
from qfsdp.tensor_subclasses.dtensor import local_part, sharded
from qfsdp.tensor_subclasses.kernels import dry_run
from qfsdp.tensor_subclasses.quantized_tensor import QuantizedTensor


class _Exchange(torch.autograd.Function):
    """Sends `send[i]` rows to rank i of a group and receives `receive[i]` from it, in order."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.way = (receive, send, group)
        return exchanged(x, send, receive, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return exchanged(grad, *ctx.way), None, None, None


def exchanged(
    x: Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """The rows that the ranks of `group` send to this one, in their order. Collective."""
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=group)
    return out


class ExpertExchange:
    """Computes the experts of tokens where the experts are; see `MixtureMLP.exchange`.

    Args:
        group: ranks that hold all experts between them, an equal number each.
        experts: number of all experts.
    """

    def __init__(self, group: dist.ProcessGroup, experts: int) -> None:
        self.group, self.experts = group, experts
        # A compiled layer has one break here. Numbers of tokens differ from step to step, and
        # FSDP2's hooks are inside: traced, a tiny model had six breaks or new builds instead of
        # two. No decorator: it would import Dynamo, 0.6 s, at every start.
        self._uncompiled = torch.compiler.disable(self._exchange)

    def __call__(self, local: Experts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """As `Experts.forward` of all experts; `local` has those of this rank."""
        y: Tensor = self._uncompiled(local, x, chosen, weights)
        return y

    def _exchange(self, local: Experts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The host waits for the number of tokens of every expert: a rank must know how many
        come."""
        order, places, ends = dispatch(chosen, self.experts)
        send, receive, arriving = self._plan(ends, order.numel())

        def exchange(rows: Tensor, *way: list[int]) -> Tensor:
            return _Exchange.apply(rows, *way, self.group)

        rows = exchange(spread(x, order, places), send, receive)
        factors = exchange(weights.flatten()[order], send, receive)
        y = local(rows, arriving.unsqueeze(1), factors.unsqueeze(1))
        return combine(exchange(y, receive, send), order, places)

    def _plan(self, ends: Tensor, rows: int) -> tuple[list[int], list[int], Tensor]:
        """The numbers of rows to send to and to receive from each rank, and of each row that
        arrives the number of its expert among those of this rank.

        In a dry run, where nobody knows the counts, every rank sends and receives equal shares.
        """
        size = self.group.size()
        counts = ends.long().diff(prepend=ends.new_zeros(1))
        each = self.experts // size
        theirs = exchanged(counts, [each] * size, [each] * size, self.group).view(size, each)
        if dry_run.current is None:
            both = torch.stack([counts.view(size, each).sum(1), theirs.sum(1)])
            send, receive = both.tolist()
        else:
            send = receive = [rows // size + (rank < rows % size) for rank in range(size)]
        of_rows = torch.arange(each, device=ends.device).repeat(size)
        arriving = of_rows.repeat_interleave(theirs.flatten(), output_size=sum(receive))
        return send, receive, arriving


def check_expert_parallel(model: Decoder, config: ShardingConfig, ranks: int) -> None:
    """Checks that the experts of `model`, on the meta device, can be shared out. Raises UserError:
    they cannot."""
    parts = config.expert_parallel
    given = f"sharding.expert_parallel: {parts}"
    if model.config.experts is None:
        raise UserError(f"{given}; expected 1, as the model has no experts")
    if ranks % parts:
        raise UserError(f"{given}; expected a divisor of {ranks}, the number of ranks")
    if (count := model.config.experts.count) % parts:
        raise UserError(f"{given}; expected a divisor of {count}, the number of experts")
    for name, module in model.named_modules():
        if isinstance(module, LowRankExpertLinear) and module.shared is not None:
            raise UserError(f"{given}; expected 1 with adapter.expert_sharing: outer")
        for key, param in module.named_parameters() if isinstance(module, Experts) else ():
            if param.size(0) % ranks:
                raise UserError(
                    f"{given}: {param.size(0)} rows of {name}.{key} on {ranks} ranks; expected a "
                    "number of rows that the ranks divide, or 1"
                )


def expert_mesh(config: ShardingConfig, world: World) -> DeviceMesh:
    """Parts x ranks of a part; the last dimension is that of FSDP2 for experts."""
    parts = config.expert_parallel
    return new_mesh(world, (parts, world.size // parts), ("experts", "rows"))


def keep_own_experts(model: Decoder, mesh: DeviceMesh) -> list[Experts]:
    """Leaves in every mixture of `model`, on the meta device, the experts of this rank's part, and
    has tokens travel. Returns the experts, to be sharded over the part by rows."""
    parts, part = mesh["experts"].size(), mesh["experts"].get_local_rank()
    found = []
    for module in model.modules():
        if not isinstance(module, MixtureMLP):
            continue
        experts, count = module.experts, module.experts.config.count
        module.exchange = ExpertExchange(mesh["experts"].get_group(), count)
        experts.count = count // parts
        for linear in experts.modules():
            for name, param in list(linear.named_parameters(recurse=False)):
                size = param.size(0) // parts
                rows = param.detach()[part * size : (part + 1) * size]
                if isinstance(rows, QuantizedTensor):
                    rows.position = replace(rows.position, parts=parts)
                setattr(linear, name, nn.Parameter(rows, requires_grad=param.requires_grad))
        found.append(experts)
    return found


def see_all_rows(experts: Experts, mesh: DeviceMesh, parts: int) -> None:
    """Makes parameters that are sharded over a part parameters of all ranks: the same local rows,
    and the shape of all. FSDP2 takes such a parameter, and makes gradients like it, as after
    `load_state_dict(assign=True)`.

    Args:
        mesh: 1-D, of all ranks.
    """
    for linear in experts.modules():
        for name, param in list(linear.named_parameters(recurse=False)):
            shape = (param.size(0) * parts, *param.shape[1:])
            whole = sharded(local_part(param).detach(), mesh, [Shard(0)], shape)
            setattr(linear, name, nn.Parameter(whole, requires_grad=param.requires_grad))
