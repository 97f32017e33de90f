"""The hosts of the hosts scenario: network namespaces, with links between them through a bridge of this one.

Answers each line of stdin, of JSON, with one line of JSON on stdout; the first line comes by itself.

    (first)  {"address"}: where a store is to listen that all hosts reach
    save     {"bytes"}: a state of so many bytes is at `url`
    restore  {"restore_s", "read_bytes"}: `hosts` of them, a rank each, restore all of it, `together` or each for itself; how
             long the slowest took, and what all of them read of files
    mount    {"read_s", "read_bytes"}: `hosts` of them mount `folder` with `forebay`, as one cache, and read its only file, with as
             many bytes, at the same time; how long the slowest took, and what all of their mounts read of the folder
    send     {"send_s"}: as many bytes from one host to another, by plain TCP
    copy     {"copy_s"}: two of them, a rank each, save so many bytes each of which the other one holds a copy (`replicas`), a third
             time; how long the slower took from the seal until its copy was there

Started by the benchmark as `hosts.py MIB HOSTS [RATE]`, with RATE of each host's link as tc(8) takes it. `save` and `restore`
come with `url` and the `environment` of its store.
"""

import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Optional

import torch
import torch.distributed as dist

import forebay

TENSORS = 64
NET = f"10.{100 + os.getpid() % 100}"
"""What a run that was killed left has another one, most likely."""
ADDRESS = f"{NET}.0.1"
_CLONE_NEWNET = 0x40000000


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


class Hosts:
    """Namespaces, which go with this."""

    def __init__(self, count: int, rate: Optional[str]) -> None:
        self._bridge = f"fbb{os.getpid()}"
        self._names = [f"{self._bridge}-{number}" for number in range(count)]
        ip("link", "add", self._bridge, "type", "bridge")
        ip("address", "add", f"{ADDRESS}/16", "dev", self._bridge)
        ip("link", "set", self._bridge, "up")
        for number, name in enumerate(self._names):
            end = f"{self._bridge}v{number}"
            ip("netns", "add", name)
            ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", end)
            ip("link", "set", end, "master", self._bridge, "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "address", "add", f"{self.address(number)}/16", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            for where in [["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0"], ["tc", "qdisc", "add", "dev", end]]:
                if rate is not None:
                    limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
                    subprocess.run([*where, *limit], check=True)

    def remove(self) -> None:
        for name in self._names:
            ip("netns", "delete", name)
        ip("link", "delete", self._bridge)

    @staticmethod
    def address(number: int) -> str:
        return f"{NET}.1.{number + 1}"

    def run(self, count: int, work: Callable[[int], dict[str, float]]) -> list[dict[str, float]]:
        """What `work` gives in a process on each of the first hosts."""
        children, ends = [], []
        for number in range(count):
            end, told = os.pipe()
            child = os.fork()
            if child == 0:
                self._enter(number)
                os.write(told, json.dumps(work(number)).encode())
                os._exit(0)
            os.close(told)
            children.append(child)
            ends.append(end)
        with contextlib.ExitStack() as stack:
            texts = [stack.enter_context(open(end)).read() for end in ends]
        for child in children:
            os.waitpid(child, 0)
        return [json.loads(text) for text in texts]

    def _enter(self, number: int) -> None:
        fd = os.open(f"/run/netns/{self._names[number]}", os.O_RDONLY)
        assert ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        os.close(fd)


def make_state(mib: int, fill: bool) -> dict[str, torch.Tensor]:
    """Bytes that no compression shrinks, or memory that is there."""
    count = (mib << 20) // 4 // TENSORS
    if not fill:
        return {f"layer{index}.weight": torch.ones(count, dtype=torch.int32) for index in range(TENSORS)}
    random = torch.Generator().manual_seed(1)
    words = torch.randint(-(2**31), 2**31 - 1, (count * TENSORS,), dtype=torch.int32, generator=random)
    return {f"layer{index}.weight": part.clone() for index, part in enumerate(words.split(count))}


def read_of_files() -> int:
    """Bytes that this process has read so far."""
    with open("/proc/self/io") as io:
        return int(dict(line.split(": ") for line in io)["rchar"])


class Job:
    def __init__(self, hosts: Hosts, mib: int) -> None:
        self._hosts, self._mib = hosts, mib
        self._bytes = sum(tensor.nbytes for tensor in make_state(mib, False).values())

    def save(self, url: str) -> dict[str, float]:
        forebay.save(make_state(self._mib, True), url, step=1)
        return {"bytes": self._bytes}

    def restore(self, url: str, hosts: int, together: bool) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as meeting:

            def rank_of(rank: int) -> dict[str, float]:
                self._join(rank, hosts, meeting)
                state, expected = make_state(self._mib, False), make_state(self._mib, True)
                options: dict[str, Any] = {} if together else {"ranks": (0, 1)}
                dist.barrier()
                read, start = read_of_files(), time.perf_counter()
                with forebay.Checkpointer(url, rng=False, **options) as checkpointer:
                    assert checkpointer.restore(state) == 1
                    seconds = time.perf_counter() - start
                read = read_of_files() - read
                assert all(torch.equal(state[name], expected[name]) for name in expected)
                dist.barrier()
                return {"restore_s": seconds, "read_bytes": read}

            told = self._hosts.run(hosts, rank_of)
        return {
            "restore_s": max(rank["restore_s"] for rank in told),
            "read_bytes": sum(rank["read_bytes"] for rank in told),
        }

    def mount(self, forebay: str, folder: str, hosts: int) -> dict[str, float]:
        peers = ",".join(f"{self._hosts.address(number)}:7400" for number in range(hosts))
        file = os.path.join(folder, "all")
        if not os.path.exists(file):
            with open(file, "wb") as out:
                out.write(os.urandom(self._bytes))
        with tempfile.TemporaryDirectory() as meeting:
            secret = f"{meeting}/secret"
            with open(secret, "w") as out:
                out.write(os.urandom(32).hex())

            def until(what: str, come: Callable[[], bool]) -> None:
                end = time.monotonic() + 120
                while not come():
                    assert time.monotonic() < end, f"{what} did not come within two minutes"
                    time.sleep(0.05)

            def meet(number: int, what: str) -> None:
                open(f"{meeting}/{what}-{number}", "w").close()
                until(what, lambda: sum(name.startswith(what) for name in os.listdir(meeting)) == hosts)

            def host(number: int) -> dict[str, float]:
                home, point = f"{meeting}/home{number}", f"{meeting}/mnt{number}"
                os.mkdir(point)
                environment = {**os.environ, **{f"XDG_{what}_HOME": home for what in ("STATE", "CACHE", "CONFIG")}}
                own = ["--peers", peers, "--peer-secret", secret, "--peer-listen", f"{self._hosts.address(number)}:7400"]
                run = [forebay, "mount", "-f", "--read-only", *own, f"file://{folder}", point]

                def cache() -> dict[str, float]:
                    told = subprocess.run([forebay, "status", "--json"], env=environment, stdout=subprocess.PIPE, check=True)
                    mounts = json.loads(told.stdout)["mounts"]
                    return mounts[0]["cache"] if mounts else {}

                process = subprocess.Popen(run, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                try:
                    until("peers", lambda: cache().get("peers_here") == hosts - 1)
                    meet(number, "ready")
                    start, piece = time.perf_counter(), bytearray(1 << 20)
                    with open(f"{point}/all", "rb", 0) as data:
                        while data.readinto(piece):
                            pass
                    seconds, told = time.perf_counter() - start, cache()
                    meet(number, "done")
                    subprocess.run(["umount", point], check=True)
                    assert process.wait() == 0, "a mount failed"
                finally:
                    process.kill()
                return {"read_s": seconds, "read_bytes": told["origin_bytes"]}

            told = self._hosts.run(hosts, host)
        return {"read_s": max(host["read_s"] for host in told), "read_bytes": sum(host["read_bytes"] for host in told)}

    def copy(self) -> dict[str, float]:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as meeting:

            def rank_of(rank: int) -> dict[str, float]:
                self._join(rank, 2, meeting)
                state = make_state(self._mib, False)
                with forebay.Checkpointer(f"{meeting}/run", every=1, rng=False, replicas=1) as checkpointer:
                    for step in (1, 2, 3):
                        dist.barrier()
                        save = checkpointer.step(step, state)
                        assert save is not None and save.wait_replicated(120)
                        assert save.wait_durable(120)
                    told = save.timeline()
                    # Who is done keeps nothing for the other one any more.
                    dist.barrier()
                return {"copy_s": told["replicated_s"] - told["sealed_s"]}

            return {"copy_s": max(rank["copy_s"] for rank in self._hosts.run(2, rank_of))}

    def _join(self, rank: int, hosts: int, meeting: str) -> None:
        """Makes this process one of a job with one on each host."""
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(hosts), LOCAL_WORLD_SIZE="1", GLOO_SOCKET_IFNAME="eth0")
        os.environ.update(MASTER_ADDR=self._hosts.address(0), MASTER_PORT="29400", OMP_NUM_THREADS="1")
        dist.init_process_group("gloo", init_method=f"file://{meeting}/all", rank=rank, world_size=hosts)

    def send(self) -> dict[str, float]:
        with tempfile.TemporaryDirectory() as meeting:

            def side(number: int) -> dict[str, float]:
                piece = bytearray(1 << 20)
                if number == 1:
                    with socket.create_server((self._hosts.address(1), 0)) as server:
                        with open(f"{meeting}/new", "w") as file:
                            file.write(str(server.getsockname()[1]))
                        os.rename(f"{meeting}/new", f"{meeting}/port")
                        way, _ = server.accept()
                    left = self._bytes
                    while left > 0:
                        left -= way.recv_into(piece)
                    way.sendall(b"!")
                    return {}
                while not os.path.exists(f"{meeting}/port"):
                    time.sleep(0.01)
                with open(f"{meeting}/port") as file:
                    way = socket.create_connection((self._hosts.address(1), int(file.read())))
                start = time.perf_counter()
                for _ in range(self._bytes >> 20):
                    way.sendall(piece)
                way.recv(1)
                return {"send_s": time.perf_counter() - start}

            return self._hosts.run(2, side)[0]


@contextlib.contextmanager
def made(count: int, rate: Optional[str]) -> Iterator[Hosts]:
    hosts = Hosts(count, rate)
    try:
        yield hosts
    finally:
        hosts.remove()


def main() -> None:
    warnings.simplefilter("ignore")
    # A forked process has none of the threads that its parent computed on.
    torch.set_num_threads(1)
    mib, count, rate = int(sys.argv[1]), int(sys.argv[2]), (sys.argv[3:] or [None])[0]
    with made(count, rate) as hosts:
        job = Job(hosts, mib)
        acts = {"save": job.save, "restore": job.restore, "mount": job.mount, "send": job.send, "copy": job.copy}
        print(json.dumps({"address": ADDRESS}), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            os.environ.update(asked.pop("environment", {}))
            print(json.dumps(acts[asked.pop("act")](**asked)), flush=True)


if __name__ == "__main__":
    main()
