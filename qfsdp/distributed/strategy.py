"""Section `sharding` of a config, and the mesh shape that it gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qfsdp.common.errors import InvalidField, UserError, check_bounds
from qfsdp.common.sizes import parse_size


@dataclass
class ShardingConfig:
    """Section `sharding`: what is spread over the ranks, and in which units.

    Fields:
        strategy: "full_shard": parameters, gradients and optimizer state are sharded over all
            ranks. "shard_grad_op": the same, but gathered parameters are kept from forward to
            backward; faster, and takes the memory of the whole model. "ddp": every rank holds the
            whole frozen base; trained parameters, gradients and optimizer state are sharded.
            "hybrid_full_shard", "hybrid_shard_grad_op": sharded as in the first two within a
            group of ranks, and replicated over the groups.
        replicate, shard: for hybrid strategies, the number of groups and the ranks per group. By
            default a machine is a group. Their product must be the number of ranks.
        wrap: the unit that is gathered at once. "decoder_layer" overlaps communication with
            compute best; "linear" gathers one linear at a time, for the least memory.
        prefetch: number of units that are gathered ahead while one computes; each takes its
            memory.
        cpu_offload: parameters, gradients and optimizer state are in host memory, and the
            optimizer runs there; a unit's parameters are on the device while it computes.
        offload_base: where the frozen weights of the linears are: "none": on the device; "cpu": in
            host memory; "disk": in the files of a quantized model folder.
        ring_memory: host memory for reading ahead with offload_base "disk", per rank.
        vocabulary: "gather": the embedding and the output layer are gathered like other units.
            "split": tokens travel instead of rows of the vocabulary: each rank looks up its own
            rows of the embedding, and computes the logits of its own rows of the output layer, for
            the tokens of all ranks that share them. "auto": split where a micro-batch of these
            ranks has fewer tokens than the vocabulary.
        reduce_gradients: "every_micro_batch"; "every_update": gradients of micro-batches add up
            unsharded, and are reduced after the last one. "auto": every update, if unsharded
            gradients take at most 1 GiB.
        expert_parallel: into how many parts the experts of a mixture are divided. Every part has
            an equal number of experts and of ranks, which gather these experts only; tokens travel
            to the ranks of their experts and back. 1: every rank gathers all experts. A divisor of
            the number of ranks and of the number of experts.
        context_parallel: how many neighbouring ranks share each row: a rank has one part of its
            tokens, and attention gathers keys and values of the others. For rows that are too long
            for one rank. 1: every rank has rows of its own. A divisor of the number of ranks.
    """

    strategy: Literal[
        "full_shard", "shard_grad_op", "ddp", "hybrid_full_shard", "hybrid_shard_grad_op"
    ] = "full_shard"
    replicate: int | None = None
    shard: int | None = None
    wrap: Literal["decoder_layer", "linear"] = "decoder_layer"
    prefetch: int = 1
    cpu_offload: bool = False
    offload_base: Literal["none", "cpu", "disk"] = "none"
    ring_memory: str = "4GiB"
    vocabulary: Literal["auto", "gather", "split"] = "auto"
    reduce_gradients: Literal["auto", "every_update", "every_micro_batch"] = "auto"
    expert_parallel: int = 1
    context_parallel: int = 1

    def check(self) -> None:
        for name in ("replicate", "shard"):
            value = getattr(self, name)
            if value is not None and not self.strategy.startswith("hybrid"):
                raise InvalidField(name, value, "null, or a strategy that starts with hybrid")
        check_bounds(self, "replicate", "shard", least=1)
        check_bounds(self, "prefetch", least=0)
        if self.offload_base != "none" and self.cpu_offload:
            why = "none: cpu_offload moves the base to host memory already"
            raise InvalidField("offload_base", self.offload_base, why)
        if self.strategy == "ddp" and (self.offload_base != "none" or self.cpu_offload):
            raise InvalidField("strategy", "ddp", "full_shard, if anything is offloaded")
        if self.vocabulary == "split" and self.cpu_offload:
            raise InvalidField("vocabulary", "split", "auto or gather with cpu_offload")
        for name in ("expert_parallel", "context_parallel"):
            if getattr(self, name) < 1:
                raise InvalidField(name, getattr(self, name), "an integer of at least 1")
        if self.expert_parallel > 1 and self.strategy not in ("full_shard", "shard_grad_op"):
            why = "full_shard or shard_grad_op with expert_parallel"
            raise InvalidField("strategy", self.strategy, why)
        try:
            parse_size(self.ring_memory)
        except ValueError:
            raise InvalidField("ring_memory", self.ring_memory, "a size such as 4GiB") from None


def mesh_shape(config: ShardingConfig, size: int, local_size: int) -> tuple[int, int]:
    """The number of replicated groups, and of ranks per group.

    Args:
        size: number of ranks.
        local_size: number of ranks on this machine.

    Raises:
        UserError: their product is not the number of ranks.
    """
    replicate, shard = config.replicate, config.shard
    if not config.strategy.startswith("hybrid"):
        return (size, 1) if config.strategy == "ddp" else (1, size)
    if shard is None:
        shard = size // replicate if replicate else local_size
    if replicate is None:
        replicate = max(1, size // shard)
    if replicate * shard != size:
        raise UserError(
            f"sharding.replicate x sharding.shard: {replicate} x {shard}; expected {size}, the "
            f"number of processes, {local_size} of them on this machine"
        )
    return replicate, shard


def needs_fsdp(config: ShardingConfig, world_size: int, casts: bool = False) -> bool:
    """Whether FSDP2 wraps the model; `casts`: trained weights are held in another dtype than they
    are computed in."""
    return world_size > 1 or config.cpu_offload or config.offload_base != "none" or casts
