"""Processes that come together, or say why not: reports over loopback in threads, checks and the table of devices."""

import socket
import threading
import time
from types import SimpleNamespace

import jax
import pytest

from mesh.distributed import check_devices, describe, initialise, spare_threads
from mesh.launchers import Peer, Start
from mesh.roll_call import StartError, _line, check_peers, roll_call


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def call(*places: tuple[int, int], timeout_s: float = 10, port: int = 0, before=lambda port: None):
    """Has one thread for each (process, number of processes) report; returns what each got or raised, in that order."""
    port, results = port or free_port(), [None] * len(places)

    def report(slot: int, process: int, count: int) -> None:
        start = Start("environment", f"127.0.0.1:{port}", count, process)
        me = Peer(process, count, f"host{process}", (f"gpu{process}",), (0,), 1, 1)
        try:
            results[slot] = roll_call(start, me, timeout_s)
        except StartError as error:
            results[slot] = str(error)

    threads = [threading.Thread(target=report, args=(slot, *place)) for slot, place in enumerate(places)]
    threads[0].start()
    before(port)
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return results


def test_all_get_all_reports():
    results = call((1, 3), (0, 3), (2, 3))
    assert results[0] == results[1] == results[2]
    assert [(peer.process_id, peer.host, peer.gpus) for peer in results[0]] == [
        (i, f"host{i}", (f"gpu{i}",)) for i in range(3)
    ]


@pytest.mark.parametrize(
    "places, message",
    [
        ([(0, 3), (1, 3)], "only 2 of 3 processes came to 127.0.0.1:{port} within 1 s, missing 2"),
        ([(0, 2), (2, 3)], "process 2 on host2 was told of 3 processes, process 0 on host0 of 2: set NUM_PROCESSES"),
        ([(0, 3), (1, 3), (1, 3)], "two processes have the number 1, on host1 and host1"),
    ],
)
def test_every_process_that_came_says_what_is_wrong(places, message):
    port = free_port()
    for result in call(*places, timeout_s=1, port=port):
        assert message.format(port=port) in result


def test_unreachable_process_0_is_named_within_the_limit():
    began, port = time.monotonic(), free_port()
    (result,) = call((1, 2), timeout_s=0.5, port=port)
    assert time.monotonic() - began < 5
    assert f"process 1 of 2 (environment) on host1 could not reach process 0 at 127.0.0.1:{port} within 0.5 s" in result
    assert "COORDINATOR_TIMEOUT_S" in result


def test_a_port_that_something_else_holds_is_named_by_both_sides():
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        done = threading.Event()

        def answer() -> None:
            while not done.is_set():
                connection = server.accept()[0]
                connection.sendall(b"HTTP/1.1 400 Bad Request\n")
                connection.close()

        stranger = threading.Thread(target=answer)
        stranger.start()
        first, second = call((0, 2), (1, 2), timeout_s=0.3, port=port)
        done.set()
        socket.create_connection(("127.0.0.1", port)).close()
        stranger.join()
    assert f"process 0 (environment) can't listen on port {port}" in first
    assert f"process 0 at 127.0.0.1:{port} within 0.3 s (something else than process 0" in second


def test_strangers_and_processes_started_again_do_no_harm():
    def knock(port: int) -> None:
        earlier = Peer(1, 3, "an earlier one")
        for text in (b"GET / HTTP/1.1\r\n\r\n", b'{"protocol": "another"}\n', b"", _line(earlier)):
            for _ in range(100):
                try:
                    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                        connection.sendall(text)
                    break
                except OSError:
                    time.sleep(0.02)

    results = call((0, 3), (1, 3), (2, 3), before=knock)
    assert results[0] == results[1] == results[2]
    assert [peer.host for peer in results[0]] == ["host0", "host1", "host2"]


def peer(process: int, host: str, *gpus: str, **fields) -> Peer:
    return Peer(process, 2, host, gpus, tuple(range(len(gpus))), fields.pop("visible", len(gpus)), **fields)


@pytest.mark.parametrize(
    "first, second, message",
    [
        (peer(0, "a", "x"), peer(1, "a", "x"), "processes 0 and 1 on a drive the same GPU x: .*LOCAL_DEVICE_IDS"),
        (peer(0, "a", "x", "y"), peer(1, "b", "z"), "process 0 on a has 2 GPUs, process 1 on b has 1"),
        (peer(0, "a", "x"), peer(1, "b"), "process 0 on a has 1 GPUs, process 1 on b has 0"),
        (
            peer(0, "a", "x", num_installed=8),
            peer(1, "b", "y", num_installed=8),
            "process 0 is alone on a and sees 1 of its 8 GPUs.*--gpus-per-node",
        ),
    ],
)
def test_gpus_that_make_no_mesh_are_refused(first, second, message):
    with pytest.raises(StartError, match=message):
        check_peers([first, second])


@pytest.mark.parametrize(
    "first, second",
    [
        (peer(0, "a"), peer(1, "a")),  # CPUs
        (peer(0, "a", "x", num_installed=8), peer(1, "a", "y", num_installed=8)),
        (peer(0, "a", "x", num_installed=8, chosen=True), peer(1, "b", "y", num_installed=8, chosen=True)),
        (peer(0, "a", "x"), peer(1, "b", "x")),  # as two pods may number them
    ],
)
def test_gpus_that_make_a_mesh(first, second):
    check_peers([first, second])


def device(process: int, number: int):
    return SimpleNamespace(process_index=process, id=number, device_kind="NVIDIA H100", platform="gpu")


def test_devices_of_fewer_or_unequal_processes_are_refused():
    four, two = Start("SLURM", "a:1", 4, 0), Start("SLURM", "a:1", 2, 0, peers=(peer(0, "a"), peer(1, "b")))
    with pytest.raises(StartError, match="SLURM started 4 processes, but the 1 devices belong to 1"):
        check_devices(four, [device(0, 0)])
    with pytest.raises(StartError, match="process 0 on a has 2 gpu devices, process 1 on b has 1"):
        check_devices(two, [device(0, 0), device(0, 1), device(1, 2)])
    check_devices(two, [device(0, 0), device(1, 1)])


def test_the_table_names_every_process_and_its_devices(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [device(i // 4, i) for i in range(8)])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    peers = tuple(peer(i, f"node{i}", "w", "x", "y", "z", visible=8) for i in range(2))
    assert describe(Start("SLURM", "node0:61443", 2, 0, peers=peers)) == [
        ("processes", "2 (SLURM); 8 devices; process 0 at node0:61443"),
        ("process 0", "node0: 4 x NVIDIA H100, devices 0-3; GPUs 0-3 of 8 visible"),
        ("process 1", "node1: 4 x NVIDIA H100, devices 4-7; GPUs 0-3 of 8 visible"),
    ]


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf", "nan"])
def test_a_wrong_time_limit_is_named(text):
    with pytest.raises(ValueError, match=f"COORDINATOR_TIMEOUT_S='{text}' must be a number of seconds above 0"):
        initialise(Start("environment", "a:1", 2, 1), dict(COORDINATOR_TIMEOUT_S=text, JAX_PLATFORMS="cpu"))


@pytest.mark.parametrize(
    "environ, want",
    [
        ({}, None),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}, None),
        ({"XLA_FLAGS": "--a=2 --xla_force_host_platform_device_count=8 --b"}, "64"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "PJRT_NPROC": "5"}, "5"),
    ],
)
def test_several_cpu_devices_get_threads_to_spare(environ, want):
    spare_threads(environ)
    assert environ.get("PJRT_NPROC") == want
