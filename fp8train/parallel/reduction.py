"""Gradient reduction: quantise once, move bytes, sum in FP32.

Summing in eight bits gets worse with every rank; here each rank encodes its gradients once, an
all-to-all moves the bytes, and the owner of a shard decodes and sums in FP32 in rank order. The
sum is divided by N outside, in FP32. FSDP2 calls this in place of its own reduce-scatter, so the
result lands in the FP32 shard that the optimizer reads.

Under HSDP the reduce-scatter stays inside a replica, on the fast network, in 16 bits or more.
Between replicas the same is done once more, and the owner of a part of the mean sends it to all of
them: one byte an element each way on the slow network.

On a CPU a reduction is launched and left: the next module's gradients are computed and encoded
while its bytes travel, and `finish` completes what is left. Gradients alias the buffer that is
filled then, so nobody may read them before. On a GPU FSDP2 runs all of it in a stream of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from fp8train.parallel.audit import Audit
from fp8train.parallel.collectives import gather_into
from fp8train.parallel.ring import ring_reduce_scatter
from fp8train.precision.philox import key_of
from fp8train.precision.quantize import Draw
from fp8train.precision.wire import Codec, EightBit

IN_FLIGHT = 2  # reductions launched and not completed: encoded and received bytes of each are held

Steps = Iterator[dist.Work]  # of a reduction: what it waits for, one after the other


@dataclass(frozen=True)
class Method:
    """How gradients travel.

    Attributes:
        shard: the codec over the ranks that parameters are divided over.
        replicate: the codec between replicas.
        stochastic: eight-bit codecs round stochastically, by bits that `seed` is the key of.
        residual: what an eight-bit cast loses is added to the next step's gradient, and kept in
            this type; None: it is lost.
        ring: sums in the wire format, from rank to rank.
        ring_scaled: see `ring_reduce_scatter`.
    """

    shard: Codec
    replicate: Codec
    stochastic: bool = False
    seed: int = 0
    residual: torch.dtype | None = None
    ring: bool = False
    ring_scaled: bool = True


@dataclass
class GradientReduction:
    """The reductions of all FSDP modules of a model.

    Attributes:
        replicas: the ranks that hold copies of this rank's shards.
        modules: by name.
        deferred: reductions are completed later, see above.
        bytes_sent: that left this rank since the last `take_bytes`.
    """

    method: Method
    replicas: dist.ProcessGroup | None = None
    deferred: bool = True
    modules: dict[str, ModuleReduction] = field(default_factory=dict)
    step: int = 0
    bytes_sent: int = 0
    audit: Audit | None = None
    _pending: deque[tuple[dist.Work, Steps]] = field(default_factory=deque)

    def of_module(self, name: str) -> ModuleReduction:
        """The reduction of one FSDP module, whose name in the whole model this is."""
        self.modules[name] = ModuleReduction(name, self)
        return self.modules[name]

    def begin_step(self, step: int, audit: Audit | None = None) -> None:
        """What follows is of this step, and is to be audited."""
        self.step, self.audit = step, audit
        for module in self.modules.values():
            module.calls = 0

    def launch(self, steps: Steps) -> None:
        """Begin a reduction, after completing the oldest where too many are under way."""
        while len(self._pending) >= IN_FLIGHT:
            self._complete()
        if (work := next(steps, None)) is not None:
            self._pending.append((work, steps))
        if not self.deferred:
            self.finish()

    def _complete(self) -> None:
        """The oldest."""
        work, steps = self._pending.popleft()
        work.wait()
        for work in steps:
            work.wait()

    def finish(self) -> None:
        """Complete all; the gradients are there after it."""
        while self._pending:
            self._complete()

    def end_step(self, *, skipped: bool) -> None:
        """Keep what was lost to rounding for the next step; after a skipped one what was kept
        before it stays."""
        for module in self.modules.values():
            if not skipped:
                module.residuals |= module.proposed
            module.proposed = {}

    def residuals(self) -> dict[str, Tensor]:
        """What this rank keeps for the next step, by module and stage of the reduction."""
        return {
            f"{name}:{stage}": kept
            for name, module in self.modules.items()
            for stage, kept in module.residuals.items()
        }

    def restore(self, residuals: dict[str, Tensor], factor: float) -> None:
        """Keep what `residuals` gave, times a factor, for the stages that still round."""
        for key, kept in residuals.items():
            name, _, stage = key.rpartition(":")
            codec = self.method.shard if stage == "shard" else self.method.replicate
            if self.method.residual is not None and isinstance(codec, EightBit):
                self.modules[name].residuals[stage] = kept.mul_(factor)

    def take_bytes(self) -> int:
        """Bytes sent since the last call."""
        count, self.bytes_sent = self.bytes_sent, 0
        return count


class ModuleReduction:
    """FSDP2's `ReduceScatter` interface for one module.

    Attributes:
        calls: reductions in this step.
        residuals: what earlier steps' casts have lost, FP32 or BF16 [N, S], by stage of the
            reduction.
        proposed: the same after this step, if it is not skipped.
    """

    def __init__(self, name: str, owner: GradientReduction) -> None:
        self.name, self.owner, self.calls = name, owner, 0
        self.residuals: dict[str, Tensor] = {}
        self.proposed: dict[str, Tensor] = {}

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A buffer for FSDP2's copy-in and for the shard."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType | dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """Reduce input_tensor, FP32 [N·S] in rank order, into output_tensor, FP32 [S], over the
        group and the replicas; it is filled at the latest by `GradientReduction.finish`.

        Raises:
            ValueError: an op other than SUM, AVG and PREMUL_SUM.
        """
        divisor = divisor_of(op, group.size())
        x = input_tensor.view(group.size(), output_tensor.numel())
        self.owner.launch(self._reduce(output_tensor.view(-1), x, group, divisor))

    def between_replicas(self, shard: Tensor) -> None:
        """FSDP2's all-reduce hook, for replicas that hold all parameters, where it has nothing to
        scatter: the mean over the replicas of an FP32 shard, in its place."""
        self.owner.launch(self._reduce(shard.view(-1), None, None, 1.0))

    def _reduce(
        self, out: Tensor, x: Tensor | None, group: dist.ProcessGroup | None, divisor: float
    ) -> Steps:
        self.calls += 1
        audit, reference = self.owner.audit, None
        if audit is not None:
            reference = self._reference(out, x, group, divisor)
        if x is not None and group is not None:
            yield from self._scatter(out, x, group, divisor)
        if self.owner.replicas is not None:
            yield from self._share(out, self.owner.replicas)
        if audit is not None and reference is not None:
            audit.reduced(out, reference)

    def _scatter(self, out: Tensor, x: Tensor, group: dist.ProcessGroup, divisor: float) -> Steps:
        """The first stage: the sum over the group, divided."""
        method = self.owner.method
        if method.ring:
            total, sent = ring_reduce_scatter(x, group, method.shard, scaled=method.ring_scaled)
            self.owner.bytes_sent += sent
            out.copy_(total)
        else:
            messages = self._encode("shard", method.shard, x, group)
            received = torch.empty_like(messages)
            yield self._all_to_all(received, messages, group)
            out.zero_()
            method.shard.add(out, received)
        out.div_(divisor)

    def _share(self, out: Tensor, group: dist.ProcessGroup) -> Steps:
        """The second stage: the mean over the replicas, to all of them."""
        wire, count = self.owner.method.replicate, group.size()
        size = -(-out.numel() // count)  # of a replica's part of the shard
        parts = torch.zeros(count, size, device=out.device)
        parts.view(-1)[: out.numel()] = out
        messages = self._encode("replicate", wire, parts, group)
        received = torch.empty_like(messages)
        yield self._all_to_all(received, messages, group)
        mean = torch.zeros(size, device=out.device)
        wire.add(mean, received)
        mean.div_(count)
        message = self._encode("mean", wire, mean[None], group)
        means = message.new_empty(count, message.shape[1])
        self.owner.bytes_sent += message.numel() * (count - 1)
        work = gather_into(means, message, group=group, async_op=True)
        assert work is not None
        yield work
        decoded = [wire.decode(means[number], size) for number in range(count)]
        out.copy_(torch.cat(decoded)[: out.numel()])  # all replicas from the same bytes

    def _all_to_all(self, received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> dist.Work:
        self.owner.bytes_sent += sent[0].numel() * (group.size() - 1)
        work = dist.all_to_all_single(received, sent, group=group, async_op=True)
        assert work is not None
        return work

    def _encode(self, stage: str, wire: Codec, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Messages of x, FP32 [N, S], with the bits and the residual of this stage."""
        owner, method = self.owner, self.owner.method
        if not isinstance(wire, EightBit):
            return wire.encode(x)
        draw = None
        if method.stochastic:
            key = key_of(method.seed, "gradients", self.name, stage)
            tick = owner.step << 32 | self.calls
            number = group.rank()  # of these rows' messages among all that are summed
            if stage == "shard" and owner.replicas is not None:
                number += owner.replicas.rank() * group.size()
            draw = Draw(key, tick, row_offset=number * len(x))
        if method.residual is not None:
            kept = self.proposed.get(stage, self.residuals.get(stage))
            x = x if kept is None else x + kept
        messages = wire.encode(x, draw)
        if method.residual is not None:
            arrived = torch.stack([wire.decode(message, x.shape[1]) for message in messages])
            self.proposed[stage] = (x - arrived).to(method.residual)
        if owner.audit is not None:
            owner.audit.encoded(wire, messages, x)
        return messages

    def _reference(
        self, out: Tensor, x: Tensor | None, group: dist.ProcessGroup | None, divisor: float
    ) -> Tensor:
        """What FP32 makes of it."""
        mean = out.clone()
        if x is not None and group is not None:
            received = torch.empty_like(x)
            dist.all_to_all_single(received, x.contiguous(), group=group)
            mean = received.sum(dim=0) / divisor
        if self.owner.replicas is not None:
            dist.all_reduce(mean, group=self.owner.replicas)
            mean /= self.owner.replicas.size()
        return mean


def divisor_of(op: dist.ReduceOp.RedOpType | dist.ReduceOp, ranks: int) -> float:
    """What a sum is divided by: 1 for SUM, N for AVG, its factor's inverse for PREMUL_SUM.

    Raises:
        ValueError: another op.
    """
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return float(ranks)
    if op == dist.ReduceOp.PREMUL_SUM:
        state: tuple[object, float] = op.__getstate__()  # type: ignore[assignment]
        return 1.0 / state[1]
    raise ValueError(f"gradient reduction by {op}: only SUM, AVG and PREMUL_SUM are defined")
