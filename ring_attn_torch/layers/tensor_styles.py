"""Tensor-parallel styles that torch.distributed lacks; imported by the first call of ``tensor_plan``."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from .attention import RingAttention


class Replicated(ParallelStyle):
    """A style that stores a module's weights as replicated DTensors. Inputs and outputs are plain tensors, equal on all ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replicated = lambda _, inputs, mesh: tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)
        local = lambda _, output, mesh: output.to_local()
        return distribute_module(module, device_mesh, input_fn=replicated, output_fn=local)  # type: ignore[arg-type]


class Heads(ParallelStyle):
    """A style for RingAttention. It sets ``first_head`` to the index of the rank's first head, and shards the sinks by head."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, RingAttention)
        ranks, config = device_mesh.size(), module.config
        for name, heads in (("heads", config.heads), ("kv_heads", config.kv_heads)):
            if heads % ranks:
                raise ValueError(
                    f"{name}={heads} cannot be shared equally by the {ranks} ranks of tensor parallelism: choose an axis of the "
                    "mesh whose size divides heads and kv_heads"
                )
        module.first_head = device_mesh.get_local_rank() * (config.heads // ranks)
        if module.sinks is not None:
            module.sinks = nn.Parameter(distribute_tensor(module.sinks.detach(), device_mesh, [Shard(0)]))
        return module
