#!/usr/bin/env python3
"""The gradient all-reduce beside Open MPI's MPI_Allreduce() and UCX's own bandwidth, in one run.

  bench_comm.py BUILD [shared] [options]        2 ranks of one machine, over shared memory
  bench_comm.py BUILD network [options]         2 ranks in two network namespaces, over a link of limited rate (root)

Needs, in the build folder, `ninja tests/bench/bench_allreduce tests/bench/bench_mpi`; mpirun and ucx_perftest, `ip` and
`tc`; what is missing is left out of the table. Programs run one after the other, in each of --rounds rounds, each on a
core of its own, so that a machine that changes its speed changes it for all; figures are medians over the rounds of each
program's median. With --realtime (root) they run at real-time priority, so that nothing else runs on their cores; not over a
network, where daemons and the kernel's own threads need the cores too.

Open MPI gets what it needs to be a fair peer: malloc() that keeps its memory, as page faults would cost it ten times
the exchange, and sums in place.
"""
import argparse
import os
import re
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "multirank"))
from ranks import Process, finish, free_port, running

KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "4294967296", "MALLOC_TOP_PAD_": "268435456"}
NAMESPACES = ("fp8bench0", "fp8bench1")
ADDRESSES = ("10.98.77.1", "10.98.77.2")
LIMIT_SECONDS = 600


def output_of(started):
    """Of the first of those that were started."""
    ends = finish(started, LIMIT_SECONDS)
    if any(code for code, _, _ in ends):
        raise RuntimeError(f"{started[0].name} failed")
    return ends[0][1]


def median_of(output, pattern=r"median ([0-9.]+)"):
    found = re.findall(pattern, output)
    if not found:
        raise RuntimeError(f"no figure in {output!r}")
    return float(found[-1])


class Shared:
    """Two cores of this machine."""

    def __init__(self, options):
        self.options = options
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) < 2:
            sys.exit("bench_comm.py: one core; 2 ranks need 2")
        self.cores = cores[:2]

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        pass

    def favoured(self):
        return ["chrt", "-f", "20"] if self.options.realtime else []

    def prefix(self, rank):
        return ["taskset", "-c", str(self.cores[rank])] + self.favoured()

    def ours(self, algorithm, *more):
        options = self.options
        program = os.path.join(options.build, "tests/bench/bench_allreduce")
        command = [program, algorithm, str(options.elements), str(options.repeats), "1", *more]
        with running([self.prefix(rank) + command for rank in range(2)], host=self.address(), port=free_port(),
                     settings={rank: self.ucx(rank) for rank in range(2)}, FP8COMM_SECRET=secrets.token_hex(16),
                     OMP_NUM_THREADS=1) as started:
            return output_of(started)

    def address(self):
        return "127.0.0.1"

    def ucx(self, rank):
        return {"UCX_TLS": "sm,self"}

    def mpi(self):
        options = self.options
        return self.launched(self.favoured() + ["mpirun", "--allow-run-as-root", "-n", "2", "--bind-to", "core",
                                                os.path.join(options.build, "tests/bench/bench_mpi"), options.elements,
                                                options.repeats])

    @staticmethod
    def launched(command):
        with Process(command, launcher=True, **KEEP_MEMORY) as started:
            return output_of([started])

    def bandwidth(self):
        """GB/s of ucx_perftest's 64 MiB messages."""
        port = free_port()
        with Process(self.prefix(0) + ["ucx_perftest", "-p", port], **self.ucx(0)) as server:
            time.sleep(1)
            with Process(self.prefix(1) + ["ucx_perftest", self.address(), "-p", port, "-t", "tag_bw", "-s", "67108864",
                                           "-n", "10", "-w", "2"], **self.ucx(1)) as client:
                output = output_of([client])
            server.finish(LIMIT_SECONDS)
        final = [line.split() for line in output.splitlines() if line.startswith("Final:")][-1]
        # Iterations, percentile, two latencies, then the average and overall bandwidth in MiB/s.
        return float(final[6]) * (1 << 20) * 1e-9


class Network(Shared):
    """Two namespaces joined by a veth, either end of which sends at the rate given at most."""

    def __init__(self, options):
        super().__init__(options)
        self.folder = None

    @staticmethod
    def command(*words):
        result = subprocess.run(words, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"{' '.join(words)}: {result.stderr.strip()}")

    def __enter__(self):
        self.remove()
        try:
            for name in NAMESPACES:
                self.command("ip", "netns", "add", name)
            self.command("ip", "link", "add", "fp8bv0", "netns", NAMESPACES[0], "type", "veth", "peer", "name", "fp8bv1",
                         "netns", NAMESPACES[1])
            for rank, name in enumerate(NAMESPACES):
                device = f"fp8bv{rank}"
                self.command("ip", "-n", name, "addr", "add", ADDRESSES[rank] + "/24", "dev", device)
                self.command("ip", "-n", name, "link", "set", "lo", "up")
                self.command("ip", "-n", name, "link", "set", device, "up")
                self.command("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", "rate", self.options.rate,
                             "burst", "1mb", "latency", "100ms")
        except RuntimeError as error:
            self.remove()
            sys.exit(f"bench_comm.py: no network of namespaces here: {error}")
        time.sleep(2)  # until the kernel calls the link running, without which UCX leaves it out
        self.folder = tempfile.mkdtemp()
        # mpirun starts the second rank's daemon on the "host" of that address with this, in place of ssh.
        self.agent = os.path.join(self.folder, "agent")
        with open(self.agent, "w") as agent:
            agent.write(f'#!/bin/sh\nshift\nexec ip netns exec {NAMESPACES[1]} unshare --uts '
                        f'sh -c \'hostname {NAMESPACES[1]}; exec sh -c "$*"\' sh "$@"\n')
        os.chmod(self.agent, 0o700)
        return self

    @staticmethod
    def remove():
        for name in NAMESPACES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def __exit__(self, *unused):
        self.remove()
        if self.folder:
            shutil.rmtree(self.folder)

    def prefix(self, rank):
        return ["ip", "netns", "exec", NAMESPACES[rank]] + super().prefix(rank)

    def address(self):
        return ADDRESSES[0]

    def ucx(self, rank):
        return {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": f"fp8bv{rank}"}

    def mpi(self):
        options = self.options
        network = ADDRESSES[0].rsplit(".", 1)[0] + ".0/24"
        keep = [word for name in KEEP_MEMORY for word in ("-x", name)]
        command = ["ip", "netns", "exec", NAMESPACES[0], "unshare", "--uts", "sh", "-c",
                   f'hostname {NAMESPACES[0]}; exec "$@"', "sh", "mpirun", "--allow-run-as-root", "--host",
                   ",".join(address + ":1" for address in ADDRESSES), "-n", "2", "--mca", "plm_rsh_agent", self.agent,
                   "--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", network, "--mca",
                   "oob_tcp_if_include", network, *keep,
                   os.path.join(options.build, "tests/bench/bench_mpi"), str(options.elements), str(options.repeats)]
        return self.launched(command)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("where", nargs="?", choices=("shared", "network"), default="shared")
    parser.add_argument("--elements", type=int, help="default: 16M in shared memory, 64M over a network")
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc has it (1gbit)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, help="all-reduces a round and program (10 and 2)")
    parser.add_argument("--realtime", action="store_true")
    options = parser.parse_args()
    shared = options.where == "shared"
    if options.realtime and not shared:
        parser.error("--realtime is for shared memory: over a network daemons and the kernel's threads need the cores too")
    options.elements = options.elements or (16 << 20 if shared else 64 << 20)
    options.repeats = options.repeats or (10 if shared else 2)
    if not os.path.exists(os.path.join(options.build, "tests/bench/bench_allreduce")):
        parser.error(f"{options.build} has no tests/bench/bench_allreduce; build it first")
    rows = [("two-shot, to FP32", "two-shot", ()), ("two-shot, to FP8", "two-shot", ("fp8",)),
            ("two-shot, to FP32, amax known", "two-shot", ("fp32", "amax")),
            ("two-shot, to FP8, amax known", "two-shot", ("fp8", "amax")),
            ("two-shot, to FP32, delayed scaling", "two-shot", ("fp32", "delayed")),
            ("two-shot, to FP8, delayed scaling", "two-shot", ("fp8", "delayed")), ("native, to FP32", "native", ()),
            ("bf16", "bf16", ()), ("fp32", "fp32", ())]
    if not shared:
        rows = [rows[0], rows[1], rows[7], rows[8]]
    times, sent, bandwidths = {}, {}, []
    with (Shared if shared else Network)(options) as place:
        for _ in range(options.rounds):
            for name, algorithm, more in rows:
                output = place.ours(algorithm, *more)
                times.setdefault(name, []).append(median_of(output))
                sent[name] = int(re.search(r"bytes (\d+)", output).group(1))
            if shutil.which("mpirun") and os.path.exists(os.path.join(options.build, "tests/bench/bench_mpi")):
                times.setdefault("Open MPI, fp32", []).append(median_of(place.mpi()))
            if shutil.which("ucx_perftest"):
                bandwidths.append(place.bandwidth())
    peer = statistics.median(times["Open MPI, fp32"]) if "Open MPI, fp32" in times else None
    own = statistics.median(times["fp32"])
    bandwidth = statistics.median(bandwidths) if bandwidths else None
    print(f"{options.elements} FP32 gradients, 2 ranks, {options.where}{'' if shared else ', ' + options.rate}"
          f"{', real-time' if options.realtime else ''}")
    if bandwidth:
        print(f"ucx_perftest tag_bw, 64 MiB: {bandwidth:.3g} GB/s ({min(bandwidths):.3g} to {max(bandwidths):.3g})")
    print("| what | ms | least to most | times as fast as Open MPI's | as fp32 here | bytes at tag_bw, ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, figures in times.items():
        middle = statistics.median(figures)
        at_bandwidth = f"{sent[name] / bandwidth * 1e-6:.3g}" if bandwidth and name in sent else ""
        print(f"| {name} | {middle:.4g} | {min(figures):.4g} to {max(figures):.4g} | "
              f"{f'{peer / middle:.2f}' if peer else ''} | {own / middle:.2f} | {at_bandwidth} |")


if __name__ == "__main__":
    main()
