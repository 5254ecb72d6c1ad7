"""Measures how close `optimizer.step()` comes to the drive: step time / max(bytes / drive's speed, compute).

    python benchmarks/optimizer_step.py --nvme-path DIR [--deepspeed [PYTHON]]

Everything is measured alternately in one run, on one drive, by one engine: the drive's read and write speed, the step
with the state on disk, and the same step with the state in memory (`device: cpu`), which is the compute. Gradients are
random and made once: only the step is measured. Prints medians, the ratio, and bytes per parameter and step compared
with what the kernel counted (`/proc/self/io`). The drive's speed is taken of a file of 1 GiB, first written and then
read; and of the optimizer's own files, read and written back by turns without any arithmetic (`records_s`: a drive that
serves one file from a cache of its own does not serve these). With `--verify` a third optimizer, whose records are
checked, takes a step beside one that is not, first or second by turns: what checksums cost, in time and in CPU seconds.
With `--deepspeed` the same model is trained by DeepSpeed ZeRO-3 with its optimizer alone on the same drive, in a
process of its own, and its steps are compared.
"""

from __future__ import annotations

import functools
import resource
import shutil
from pathlib import Path

import torch
from benchmark import keep_result, make_parser, medians, settings_of, system, timed
from deepspeed_peer import add_deepspeed, require_deepspeed, run_deepspeed
from drive_speed import Drive, Records
from gpt import GPT, SIZES

import swapper
from swapper.io.handle import AsyncIOHandle

WARM_UP = 2
"""Steps of the peer before the first that counts."""


def main() -> None:
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument("--size", choices=sorted(SIZES), default="small")
    parser.add_argument("--vocab-size", type=int, default=50304)
    parser.add_argument("--pool-bytes", default="256MiB")
    parser.add_argument("--bucket-bytes", default="32MiB")
    parser.add_argument("--encoding", default="exact", help="of the state: exact, packed, bf16 or int8")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--verify", action="store_true", help="measure `verify: crc32c` too")
    add_deepspeed(parser)
    arguments = parser.parse_args()
    require_deepspeed(parser, arguments.deepspeed)

    own = arguments.nvme_path / "optimizer-step"
    own.mkdir(parents=True, exist_ok=True)
    common = {"pool_bytes": arguments.pool_bytes, "bucket_bytes": arguments.bucket_bytes}
    on_disk = swapper.OffloadConfig(
        nvme_path=own,
        offload_optimizer={"device": "nvme", "master_weights": True, "encoding": arguments.encoding},
        aio={"backend": arguments.backend},
        **common,
    )
    in_memory = swapper.OffloadConfig(
        offload_optimizer={"device": "cpu", "master_weights": True, "encoding": arguments.encoding}, **common
    )
    models = [make_model(arguments.size, arguments.vocab_size) for _ in range(3 if arguments.verify else 2)]
    numel = sum(p.numel() for p in models[0].parameters())
    disk = swapper.wrap_optimizer(torch.optim.AdamW(models[0].parameters(), lr=1e-4), on_disk)
    memory = swapper.wrap_optimizer(torch.optim.AdamW(models[1].parameters(), lr=1e-4), in_memory)
    optimizers = [disk, memory]
    if arguments.verify:
        verifying = on_disk.model_copy(update={"verify": "crc32c", "nvme_path": arguments.nvme_path})
        optimizers.append(swapper.wrap_optimizer(torch.optim.AdamW(models[2].parameters(), lr=1e-4), verifying))
    for optimizer in optimizers:
        step_and_flush(optimizer)  # Makes the state.
    swapped = swapper.of(disk)

    rows: list[dict[str, float]] = []
    with AsyncIOHandle(backend=arguments.backend, block_bytes=on_disk.aio.block_size) as handle:
        drive, records = Drive(handle, arguments.nvme_path), Records(handle, own)
        for turn in range(arguments.rounds):
            write_bps, read_bps = drive.measure()
            before, before_io = swapped.stats(), kernel_bytes()
            disk_s = timed(lambda: step_and_flush(disk))
            after, after_io = swapped.stats(), kernel_bytes()
            memory_s = timed(memory.step)
            read, written = after.bytes_read - before.bytes_read, after.bytes_written - before.bytes_written
            drive_s = read / read_bps + written / write_bps
            records_s = (read + written) / records.move()
            rows.append(
                {
                    "step_s": disk_s,
                    "compute_s": memory_s,
                    "drive_s": drive_s,
                    "records_s": records_s,
                    "ratio": disk_s / max(drive_s, memory_s),
                    "records_ratio": disk_s / max(records_s, memory_s),
                    "read_gbps": read_bps / 1e9,
                    "write_gbps": write_bps / 1e9,
                    "read_per_parameter": read / numel,
                    "written_per_parameter": written / numel,
                    "kernel_read_per_parameter": (after_io[0] - before_io[0]) / numel,
                    "kernel_written_per_parameter": (after_io[1] - before_io[1]) / numel,
                    "wait_read_s": after.wait_read_s - before.wait_read_s,
                    "wait_write_s": after.wait_write_s - before.wait_write_s,
                }
            )
            if arguments.verify:
                rows[-1] |= cost_of_verifying(disk, optimizers[2], verified_first=turn % 2 == 1)
        backend = handle.backend
        drive.close()
        records.close()
    median = medians(rows)
    print(f"{system()}, engine {backend}; {numel / 1e6:.0f}M parameters, bf16, AdamW, fp32 masters")
    print(f"pool {arguments.pool_bytes}, buckets {arguments.bucket_bytes}; medians of {arguments.rounds} rounds")
    for key, value in median.items():
        print(f"  {key:<30} {value:8.3f}")
    print(f"step / max(drive, compute) = {median['ratio']:.3f}")
    print(f"step / max(its own files, compute) = {median['records_ratio']:.3f}")
    if arguments.verify:
        print(
            f"verify on / off = {median['verified_ratio']:.3f} in time, "
            f"{median['verified_cpu_ratio']:.3f} in CPU seconds"
        )
    for optimizer in optimizers:
        swapper.of(optimizer).close()
    shutil.rmtree(own)
    record = {"system": system(), "backend": backend, "numel": numel, "median": median, "rounds": rows}
    if arguments.deepspeed:
        del models, disk, memory, optimizers, optimizer, swapped  # The peer needs the memory.
        flags = ["--threads", str(torch.get_num_threads()), "--steps", str(WARM_UP + arguments.rounds)]
        peer = run_deepspeed(arguments, *flags, "--parameters-in-memory")
        peer_s = medians(peer["rows"][WARM_UP:])["optimizer_s"]
        print(
            f"DeepSpeed ZeRO-3, optimizer on NVMe: step {peer_s:.3f} s, peak memory {peer['peak_bytes'] / 1e6:.0f} MB"
        )
        print(f"swapper / DeepSpeed: step {median['step_s'] / peer_s:.2f} (bar: 0.55, with int8 0.35)")
        record["deepspeed"] = peer
    keep_result(arguments, "optimizer-step", {"arguments": settings_of(arguments), **record})


def make_model(size: str, vocab_size: int) -> GPT:
    torch.manual_seed(0)
    model = GPT(SIZES[size], vocab_size).to(torch.bfloat16)
    for p in model.parameters():
        p.grad = torch.randn(p.shape).to(torch.bfloat16).mul_(1e-2)
    return model


def step_and_flush(optimizer: torch.optim.Optimizer) -> None:
    """A step with its whole cost: the writes that would hide under the next forward are waited for."""
    optimizer.step()
    swapper.of(optimizer).flush()


def cost_of_verifying(
    disk: torch.optim.Optimizer, verifying: torch.optim.Optimizer, verified_first: bool
) -> dict[str, float]:
    """A step of each, one after the other."""
    times_s, cpus_s = {}, {}
    for optimizer in (verifying, disk) if verified_first else (disk, verifying):
        before_cpu_s = cpu_s()
        times_s[optimizer] = timed(functools.partial(step_and_flush, optimizer))
        cpus_s[optimizer] = cpu_s() - before_cpu_s
    return {
        "verified_ratio": times_s[verifying] / times_s[disk],
        "verified_cpu_ratio": cpus_s[verifying] / cpus_s[disk],
        "verified_cpu_s_more": cpus_s[verifying] - cpus_s[disk],
    }


def cpu_s() -> float:
    """CPU seconds of this process so far, of all threads, user and kernel."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def kernel_bytes() -> tuple[int, int]:
    """Bytes that this process read from and wrote to block devices so far, proc_pid_io(5)."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


if __name__ == "__main__":
    main()
