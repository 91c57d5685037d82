"""All processes report to process 0 over plain TCP, on the coordinator's port, before JAX takes that port.

JAX ends the process with a C++ abort and a stack trace when the coordinator can't be reached, when a process is missing
and when the counts disagree. Here each of these is an error that every process tells in one sentence, within the time
limit. The reports also exchange host names and GPUs, without a compiled program and before any device is opened.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Sequence

from mesh.launchers import Peer, Start, split_address

PROTOCOL = "moex roll call 1"
HELLO_S = 5.0
"""How long process 0 waits for the report on a new connection, which may be a port scanner's."""
GRACE_S = 5.0
"""How much longer than its own limit a process waits for the answer of process 0, which can name who is missing."""


class StartError(ValueError):
    """The processes that were started don't make up a run."""


def check_peers(peers: Sequence[Peer]) -> None:
    """Raises StartError when two processes drive one GPU, each is left with one of a host, or they drive unequal numbers."""
    owners: dict[tuple[str, str], Peer] = {}
    for peer in peers:
        for gpu in peer.gpus:
            other = owners.setdefault((peer.host, gpu), peer)
            if other is not peer:
                raise StartError(
                    f"processes {other.process_id} and {peer.process_id} on {peer.host} drive the same GPU {gpu}: give "
                    "each its own with LOCAL_DEVICE_IDS or CUDA_VISIBLE_DEVICES, or start one process for each host"
                )
    hosts = [peer.host for peer in peers]
    for peer in peers:
        most = max(peer.num_visible, peer.num_installed)
        if len(peer.gpus) == 1 < most and hosts.count(peer.host) == 1 < len(peers) and not peer.chosen:
            raise StartError(
                f"process {peer.process_id} is alone on {peer.host} and sees {peer.num_visible} of its {most} GPUs: let the "
                "launcher give it all of them (SLURM: --gpus-per-node, without --gpus-per-task), start one process for each "
                "GPU, or set LOCAL_DEVICE_IDS=0 where one is meant"
            )
    check_equal({peer.process_id: (peer.host, len(peer.gpus)) for peer in peers}, "GPUs")


def check_equal(devices: dict[int, tuple[str, int]], what: str) -> None:
    """Raises StartError, naming one process of each kind, unless all have the same number; values are (host, number)."""
    first = next(iter(devices))
    for process, (host, number) in devices.items():
        if number != devices[first][1]:
            raise StartError(
                f"process {first} on {devices[first][0]} has {devices[first][1]} {what}, process {process} on {host} has "
                f"{number}: a mesh needs as many on each; correct the launcher's request or LOCAL_DEVICE_IDS"
            )


def roll_call(start: Start, me: Peer, timeout_s: float, check: Callable[[Sequence[Peer]], None] = check_peers):
    """Returns the reports of all processes, in order, on each of them.

    Raises StartError on every process that could be reached when some don't come within `timeout_s` seconds, two have
    one number, their counts differ or `check` refuses them.
    """
    assert start.coordinator is not None
    deadline = time.monotonic() + timeout_s
    if start.process_id:
        return _report(start, me, deadline, timeout_s)
    with contextlib.ExitStack() as stack:
        return _collect(start, me, deadline, timeout_s, check, stack)


def _collect(start: Start, me: Peer, deadline: float, timeout_s: float, check, stack: contextlib.ExitStack):
    server = stack.enter_context(_listen(start))
    peers, waiting, refused, problem = {0: me}, {}, [], ""
    while len(peers) < start.num_processes and not problem:
        if (left := deadline - time.monotonic()) <= 0:
            problem = _missing(start, peers, timeout_s)
            break
        server.settimeout(left)
        try:
            connection = stack.enter_context(server.accept()[0])
        except TimeoutError:
            continue
        if (peer := _hello(connection)) is None:
            continue
        if problem := _unfit(me, peer, None if _left(waiting.get(peer.process_id)) else peers.get(peer.process_id)):
            refused.append(connection)
            break
        peers[peer.process_id], waiting[peer.process_id] = peer, connection
        for gone in [i for i, other in waiting.items() if _left(other)]:  # it ended; the launcher may start it again
            del peers[gone], waiting[gone]
    ordered = tuple(peers[i] for i in sorted(peers))
    if not problem:
        try:
            check(ordered)
        except StartError as error:
            problem = str(error)
    answer = _line(dict(problem=problem, peers=[] if problem else ordered))
    for connection in (*waiting.values(), *refused):
        with contextlib.suppress(OSError):
            connection.settimeout(HELLO_S)
            connection.sendall(answer)
    if problem:
        raise StartError(problem)
    return ordered


def _unfit(me: Peer, peer: Peer, other: Peer | None) -> str:
    """Why process 0 can't take the report of `peer`, where `other` is who has its number already; empty if it can."""
    if peer.num_processes != me.num_processes:
        return (
            f"process {peer.process_id} on {peer.host} was told of {peer.num_processes} processes, process 0 on {me.host} "
            f"of {me.num_processes}: set NUM_PROCESSES alike on all"
        )
    if other:
        return (
            f"two processes have the number {peer.process_id}, on {other.host} and {peer.host}: set PROCESS_ID on each"
        )
    return ""


def _report(start: Start, me: Peer, deadline: float, timeout_s: float):
    host, port = split_address(start.coordinator or "")
    while True:
        left = max(deadline - time.monotonic(), 0.1)
        reached = False
        try:
            with socket.create_connection((host, port), timeout=min(left, HELLO_S)) as connection:
                reached = True
                connection.sendall(_line(me))
                connection.settimeout(left + GRACE_S)
                with connection.makefile("rb") as answers:
                    answer = _parse(answers.readline())
            reason = "something else than process 0 of this run answers there"
        except TimeoutError:
            answer, reason = None, "no answer"
        except OSError as error:
            answer, reason = None, error.strerror or str(error)
        if answer is not None and answer["problem"]:
            raise StartError(answer["problem"])
        if answer is not None:
            return tuple(_peer(fields) for fields in answer["peers"])
        if time.monotonic() >= deadline:
            what = "had no answer from" if reached else "could not reach"
            raise StartError(
                f"process {start.process_id} of {start.num_processes} ({start.launcher}) on {me.host} {what} process 0 at "
                f"{start.coordinator} within {timeout_s:g} s ({reason}): check that process 0 runs and that "
                "COORDINATOR_ADDRESS names its host, as seen from here, and a port that no firewall closes; "
                "COORDINATOR_TIMEOUT_S waits longer"
            )
        time.sleep(min(0.5, left))


def _listen(start: Start) -> socket.socket:
    _, port = split_address(start.coordinator or "")
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=dual, backlog=1024)
    except OSError as error:
        raise StartError(
            f"process 0 ({start.launcher}) can't listen on port {port} of {socket.gethostname()} for "
            f"{start.coordinator}: {os.strerror(error.errno or 0)}; end what holds the port, or set another in "
            "COORDINATOR_ADDRESS on all processes"
        ) from error


def _missing(start: Start, peers: dict[int, Peer], timeout_s: float) -> str:
    missing = [i for i in range(start.num_processes) if i not in peers]
    some = ", ".join(map(str, missing[:16])) + (" ..." if len(missing) > 16 else "")
    return (
        f"only {len(peers)} of {start.num_processes} processes came to {start.coordinator} within {timeout_s:g} s, missing "
        f"{some}: see what they say, and check that they were started and that COORDINATOR_ADDRESS is right for them; "
        "COORDINATOR_TIMEOUT_S waits longer"
    )


def _hello(connection: socket.socket) -> Peer | None:
    """The report that comes on a new connection; None for a stranger's."""
    connection.settimeout(HELLO_S)
    with contextlib.suppress(OSError), connection.makefile("rb") as lines:
        return _peer(message["body"]) if (message := _parse(lines.readline(1 << 20))) else None
    return None


def _left(connection: socket.socket | None) -> bool:
    """Whether the other end has closed: it sends nothing after its report, so readable means the end."""
    if connection is None:
        return False
    try:
        connection.setblocking(False)
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _line(body) -> bytes:
    body = body._asdict() if isinstance(body, Peer) else body
    if "peers" in body:
        body = body | {"peers": [peer._asdict() for peer in body["peers"]]}
        return json.dumps({"protocol": PROTOCOL, **body}).encode() + b"\n"
    return json.dumps({"protocol": PROTOCOL, "body": body}).encode() + b"\n"


def _parse(line: bytes) -> dict | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and message.get("protocol") == PROTOCOL else None


def _peer(fields: dict) -> Peer:
    return Peer(**fields | {name: tuple(fields[name]) for name in ("gpus", "local_ids")})
