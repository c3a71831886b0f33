"""Several machines: torchrun's flags for them, checked, and how they find each other.

    tune run --nnodes 2 --node_rank N --master_addr HOST recipes/...     the same on every machine,
                                                                         but N
    tune run --nnodes 1:2 --rdzv_backend c10d --rdzv_endpoint HOST:29400 recipes/...

The first form is torchrun's static rendezvous: the agent of node 0 opens a store on --master_port
(29500 by default), and the others connect to it. In the second form any machine may come later.
"""

from __future__ import annotations

import os
import re
import socket
import time
from argparse import Namespace

from qfsdp.common.errors import UserError
from qfsdp.common.long_waits import long_wait

WAIT_S = 600  # for the other machines; torchrun's own limit
NAME_WAIT_S = 60  # for a name: a cluster may know those of its machines some seconds late
PORT = 29500  # torchrun's --master_port
# Where the ranks of one machine meet. By default torchrun uses the machine's host name. In some
# containers that name has no address, and ranks waited five minutes for their store.
LOOPBACK = "127.0.0.1"
_PAUSE_S = 0.5


def set_rendezvous(args: Namespace, nodes: range) -> None:
    """Completes torchrun's flags, in place.

    Args:
        args: torchrun's parsed flags.
        nodes: the numbers of machines that --nnodes allows.

    Raises:
        UserError: --node_rank is not below --nnodes, --nnodes is a range without an endpoint, or
            --standalone, which looks for no other machine, is to have several.
    """
    rank, most = int(args.node_rank), nodes[-1]
    if args.standalone and most > 1:
        raise UserError(f"--standalone: with --nnodes {args.nnodes}; expected one of the two")
    if args.rdzv_endpoint:
        return
    if not 0 <= rank < most:
        expected = f"0 to {most - 1}, as --nnodes is {args.nnodes}"
        raise UserError(f"--node_rank: {rank} is not valid; expected {expected}")
    args.master_port = args.master_port or PORT
    if most == 1:
        args.standalone = True  # a free port, so that several runs can share a machine
        args.local_addr = args.local_addr or LOOPBACK
    elif args.rdzv_backend != "static":
        # torchrun would take localhost, and every machine would wait for the others on its own.
        args.rdzv_endpoint = f"{args.master_addr}:{args.master_port}"
    elif len(nodes) > 1:
        raise UserError(
            f"--nnodes: {args.nnodes} is a changing number of machines; expected "
            "--rdzv_backend c10d --rdzv_endpoint HOST:PORT with it"
        )


def wait_for_master(args: Namespace) -> None:
    """Waits until the name of the endpoint's host is known and, with a static rendezvous, until the
    agent of node 0 can be reached; node 0 then waits for nothing. Raises UserError: it cannot
    within `WAIT_S`, or the seconds of `--rdzv_conf timeout=N`; or the name is not known."""
    static = args.rdzv_backend == "static"
    if args.standalone or (static and int(args.node_rank) == 0):
        return
    place = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
    limit = wait_seconds(args)
    wait_for_name("--rdzv_endpoint" if args.rdzv_endpoint else "--master_addr", place)
    if not static:
        return
    host, _, port = place.rpartition(":")
    ended = time.monotonic() + limit
    with long_wait(f"waiting for the machine with --node_rank 0 at {place}, {limit} s at most"):
        while True:
            try:
                socket.create_connection((host, int(port)), timeout=max(_PAUSE_S, 5)).close()
                return
            except OSError as error:
                if time.monotonic() > ended:
                    raise UserError(
                        f"--master_addr: {place} cannot be reached for {limit} s "
                        f"({error.strerror or error}); expected the machine with --node_rank 0, "
                        "with the same --master_port on all"
                    ) from None
            time.sleep(_PAUSE_S)


def wait_for_name(flag: str, endpoint: str) -> None:
    """torchrun would ask for two minutes and a rank for ten, with traces of C++. Raises UserError,
    with the flag or variable that has the name."""
    host = (endpoint.rpartition(":")[0] or endpoint).strip("[]")
    ended = time.monotonic() + NAME_WAIT_S
    with long_wait(f"waiting until the name {host!r} is known, {NAME_WAIT_S} s at most"):
        while True:
            try:
                socket.getaddrinfo(host, None)
                return
            except socket.gaierror as error:
                if time.monotonic() > ended:
                    raise UserError(
                        f"{flag}: {host!r} is not known ({error.strerror}); expected the name or "
                        "address of a machine of this run"
                    ) from None
            time.sleep(_PAUSE_S)


def check_master() -> None:
    """Checks the variables by which a rank finds the first one. Raises UserError: one is missing,
    empty, or no port."""
    given = f"WORLD_SIZE: {os.environ['WORLD_SIZE']} in the environment"
    needed = ("RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in needed if not os.environ.get(name)]:
        without = f"{given}, without {', '.join(missing)}"
        raise UserError(f"{without}; expected all that torchrun sets, or `unset WORLD_SIZE`")
    port = os.environ["MASTER_PORT"]
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 2**16):
        raise UserError(f"MASTER_PORT: {port!r} in the environment; expected a port, 1 to 65535")


def used_port(error: Exception, name: str) -> UserError | None:
    """What PyTorch says of a port in use as one line; `name` is the flag or variable that gave the
    port. None: it says something else."""
    port = re.search(r"port: (\d+)", str(error))
    if "EADDRINUSE" not in str(error) or port is None:
        return None
    used = f"{name}: port {port[1]} of this machine is in use"
    return UserError(f"{used}; expected a free one, the same on all machines")


def wait_seconds(args: Namespace) -> int:
    """The seconds that machines wait for each other; raises UserError."""
    given = dict(part.partition("=")[::2] for part in str(args.rdzv_conf).split(",") if part)
    text = given.get("timeout", str(WAIT_S)).strip()
    if not text.isdecimal() or not text.isascii():
        raise UserError(f"--rdzv_conf: timeout={text!r} is not valid; expected seconds")
    return int(text)
