"""The process group of simulated devices: `init_process_group("sim")`, after `import sim_group`.

Collectives of tensors on the device are late, as those of NCCL are: they come after what the current stream has to do
when they are called, on a stream of their own, and what the current stream has to do from `wait()` of their work on
comes after them. The host waits for none of them. [Note: late collectives] in `collectives.cpp` has how it works. Those
of tensors on the CPU are gloo's.

The environment variable `SIM_GROUP_DIR` names a directory of this machine, which is empty when the ranks are started.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

import sim_device  # noqa: F401  # Makes the device.
import torch
import torch.distributed as dist

__all__ = ["NAME", "SimGroup"]

NAME = "sim"

_streams: dict[torch.device, torch.Stream] = {}
_names: Counter[str] = Counter()
_REDUCTIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.PRODUCT: "product",
}


class _LateWork(dist.Work):
    """A collective that was started. Keeps its tensors until somebody has waited for it."""

    def __init__(self, event: torch.Event, tensors: Sequence[torch.Tensor], result: Any) -> None:
        super().__init__()
        self._event = event
        self._tensors: Sequence[torch.Tensor] = tensors
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream wait for it."""
        torch.accelerator.current_stream().wait_event(self._event)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return self._event.query()

    def is_success(self) -> bool:
        return self._event.query()

    def result(self) -> Any:
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[self._event.device])
        device = self._event.device
        module = torch.get_device_module(device)
        later = module.Stream(device)
        later.wait_event(self._event)
        with module.stream(later):  # Who waits for the future has its stream wait for this one, and not the host.
            future.set_result(self._result)
        return future


def _reduction(op: Any) -> str:
    # A `ReduceOp` is not hashable as its kinds are.
    return next(name for kind, name in _REDUCTIONS.items() if op == kind)


def _flat(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.detach() for tensor in tensors]


class SimGroup(dist.ProcessGroup):
    """Some of the ranks. Gives every collective that FSDP2, DTensor and object collectives ask for."""

    def __init__(self, options: Any, backend_options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
        self._gloo._set_sequence_number_for_group()
        for device in ("cpu", "sim"):  # torch asks a group for its types of devices.
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        name = options.group_id
        _names[name] += 1
        self._place = os.path.join(os.environ["SIM_GROUP_DIR"], f"{name}-{_names[name]}")
        self._number = 0

    def getBackendName(self) -> str:
        return NAME

    def _start(
        self,
        published: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        from_ranks: Sequence[int],
        offsets_bytes: Sequence[int],
        op: Any = dist.ReduceOp.SUM,
        result: Any = None,
    ) -> dist.Work:
        device = (*published, *outputs)[0].device
        if device not in _streams:
            _streams[device] = torch.Stream(device)
        stream = _streams[device]
        tensors = [*_flat(published), *_flat(outputs)]
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            torch.ops.sim.collective(
                _flat(published),
                _flat(outputs),
                from_ranks,
                offsets_bytes,
                _reduction(op),
                self._place,
                self._number,
                self.rank(),
                self.size(),
                device.index,
            )
        self._number += 1
        for output in outputs:
            torch.autograd.graph.increment_version(output.detach())
        return _LateWork(stream.record_event(), tensors, result)

    # --- As torch calls them; `opts` are of types of c10d ---

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        if tensors[0].device.type == "cpu":
            return self._gloo.allreduce(tensors, opts) if opts is not None else self._gloo.allreduce(tensors)
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        offsets = [sum(each.nbytes for each in tensors[:i]) for i in range(len(tensors))]
        return self._start(tensors, tensors, [-1] * len(tensors), offsets, op, tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        if tensors[0].device.type == "cpu":
            return self._gloo.allreduce_coalesced(tensors, opts)
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        if tensors[0].device.type == "cpu":
            return self._gloo.broadcast(tensors, opts)
        return self._start(tensors, tensors, [opts.rootRank], [0], result=tensors)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> dist.Work:
        if inputs[0].device.type == "cpu":
            return self._gloo.allgather(outputs, inputs, opts) if opts else self._gloo.allgather(outputs, inputs)
        return self._start(inputs, outputs[0], range(self.size()), [0] * self.size(), result=outputs)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [given], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        if inputs[0].device.type == "cpu":
            return [self._gloo._allgather_base(*pair) for pair in zip(outputs, inputs, strict=True)][-1]
        parts, ranks, offsets, offset = [], [], [], 0
        for output, given in zip(outputs, inputs, strict=True):
            parts += list(output.detach().view(-1).view(self.size(), -1).unbind())
            ranks += list(range(self.size()))
            offsets += [offset] * self.size()
            offset += given.nbytes
        return self._start(inputs, parts, ranks, offsets, result=outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> dist.Work:
        if inputs[0].device.type == "cpu":
            return [self._gloo._reduce_scatter_base(*pair, opts) for pair in zip(outputs, inputs, strict=True)][-1]
        offsets = [
            sum(each.nbytes for each in inputs[:i]) + self.rank() * output.nbytes for i, output in enumerate(outputs)
        ]
        return self._start(inputs, outputs, [-1] * len(outputs), offsets, opts.reduceOp, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> dist.Work:
        if outputs[0].device.type == "cpu":
            return self._gloo.scatter(outputs, inputs, opts)
        published = inputs[0] if inputs else []
        return self._start(published, outputs, [opts.rootRank], [self.rank() * outputs[0].nbytes], result=outputs)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> dist.Work:
        if inputs[0].device.type == "cpu":
            return self._gloo.gather(outputs, inputs, opts)
        targets = outputs[0] if outputs else []
        return self._start(inputs, targets, range(len(targets)), [0] * len(targets), result=outputs)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: list[int],
        input_sizes: list[int],
        opts: Any = None,
    ) -> dist.Work:
        if given.device.type == "cpu":
            return self._gloo.alltoall_base(output, given, output_sizes, input_sizes, opts)
        if len(set(output_sizes)) > 1 or len(set(input_sizes)) > 1:
            raise NotImplementedError("sim: all_to_all_single with sizes that differ")
        parts = list(output.detach().view(-1).view(self.size(), -1).unbind())
        offsets = [self.rank() * parts[0].nbytes] * self.size()
        return self._start([given], parts, range(self.size()), offsets, result=output)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._gloo.barrier()


dist.Backend.register_backend(NAME, SimGroup, extended_api=True, devices=["cpu", "sim"])
