"""Exchanges messages and file descriptors between the processes of a host.

Processes find each other through the key-value service of `jax.distributed`, and then communicate
over UNIX sockets in folders that only this user can open. A `Meeting` is one such exchange. It is
used once, ends within twice its timeout, and leaves no thread and no file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import shutil
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

_KEY = "jax_ep/symmetric_memory/{process}"
_OUTCOME_KEY = "jax_ep/symmetric_memory/outcome/{process}"
_FOLDER = "jax_ep-"
_SOCKET = "socket"
# The most characters in the path of a UNIX socket; Linux allows a few more.
_MAX_PATH = 100
# The most file descriptors (two for each GPU of a process) and the most bytes of a message.
_MAX_DESCRIPTORS = 64
_MAX_MESSAGE = 1 << 20
_LENGTH = struct.Struct("<I")

Message = dict[str, Any]


class Refused(Exception):
    """Raised if processes cannot share memory; the text of the exception is the reason."""


class Store(Protocol):
    """The methods of jaxlib's key-value client that this library calls."""

    def key_value_set(self, key: str, value: str) -> None: ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...


def report(store: Store, process: int, reason: str | None) -> None:
    """Publishes the `reason` why this process's GPUs share no memory; None: they share it."""
    store.key_value_set(_OUTCOME_KEY.format(process=process), json.dumps(reason))


def reported(store: Store, process: int, timeout_s: float) -> str | None:
    """Waits for what `process` published by `report`; RuntimeError after `timeout_s` seconds."""
    key = _OUTCOME_KEY.format(process=process)
    try:
        text = store.blocking_key_value_get(key, _milliseconds(timeout_s))
    except Exception as error:
        raise RuntimeError(
            f"process {process} has not said within {timeout_s:g} s (JAX_EP_TIMEOUT_SECONDS) "
            f"whether its GPUs share memory; each process must lower the program: {error}"
        ) from error
    reason: str | None = json.loads(text)
    return reason


def _milliseconds(seconds: float) -> int:
    # Rounded up, so that nobody waits for less than the time that an error then names.
    return max(1, math.ceil(1000 * seconds))


def host_id() -> str:
    """Returns Linux's boot id, which is equal in all processes of a host, also in containers."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError as error:
        raise Refused(f"the id of this host cannot be read: {error}") from error


class Meeting(contextlib.ExitStack):
    """Lets one process exchange messages with the other processes of its host.

    Call `introduce`, `exchange` and `agree` once each, in this order. They raise `Refused` if a
    message has a key "failure", or if a process ended or took too long. `exchange` must end within
    `timeout_s` seconds from now; `agree` may take as many more. Without a `store`, the process is
    alone on its host.
    """

    def __init__(self, store: Store | None, process: int, timeout_s: float) -> None:
        super().__init__()
        self._store, self._process, self._timeout_s = store, process, timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._listener = self.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        # Of the other processes: the paths of their sockets, why some cannot be met, and the
        # connections by which this process sends and receives.
        self._paths: dict[int, str] = {}
        self._gone: dict[int, Refused] = {}
        self._to: dict[int, socket.socket] = {}
        self._from: dict[int, socket.socket] = {}

    def introduce(self, card: Message, processes: Iterable[int]) -> dict[int, Message]:
        """Publishes this process's card, which describes it; returns all `processes`' cards."""
        if self._store is None:
            return {self._process: card}
        card = card | {"socket": self._listen()}
        try:
            self._store.key_value_set(_KEY.format(process=self._process), json.dumps(card))
        except Exception as error:
            raise Refused(f"process {self._process} cannot publish its GPUs: {error}") from error
        cards = {self._process: card}
        for process in sorted(set(processes) - {self._process}):
            try:
                key = _KEY.format(process=process)
                text = self._store.blocking_key_value_get(key, _milliseconds(self._left()))
                cards[process] = json.loads(text)
            except Exception as error:
                raise Refused(
                    f"process {process} has not begun to share memory within "
                    f"{self._timeout_s:g} s (JAX_EP_TIMEOUT_SECONDS); each process must lower the "
                    f"program: {error}"
                ) from error
        return cards

    def exchange(
        self, cards: Mapping[int, Message], message: Message, descriptors: Sequence[int] = ()
    ) -> dict[int, tuple[Message, list[int]]]:
        """Sends a message to each other process of `cards`, and receives theirs.

        A message is a dict and a list of file descriptors, which the caller closes on both sides. A
        key "failure" with a reason says that this process cannot go on.
        """
        others = sorted(set(cards) - {self._process})
        self._paths = {process: cards[process]["socket"] for process in others}
        with contextlib.ExitStack() as received:
            try:
                self._connect(others)
                self._tell(message, descriptors)
                self._accept(others)
                messages = {process: self._receive(process, received) for process in others}
            except Refused as reason:
                self._tell({"failure": str(reason)})
                raise
            of_others = {process: other for process, (other, _) in messages.items()}
            raise_failure(of_others | {self._process: message})
            received.pop_all()  # The caller closes the descriptors.
        return messages

    def agree(self, message: Message) -> dict[int, Message]:
        """Sends `message` to the processes of `exchange`; returns the messages of all processes."""
        messages = {self._process: message}
        # Another process may have begun just before this process's deadline. Its own deadline is
        # then up to `timeout_s` later, so this process waits for another `timeout_s`.
        self._deadline = max(self._deadline, time.monotonic() + self._timeout_s)
        try:
            self._tell(message)
            for process in sorted(self._from):
                with contextlib.ExitStack() as received:
                    messages[process], _ = self._receive(process, received)
        except Refused as reason:
            self._tell({"failure": str(reason)})
            raise
        raise_failure(messages)
        return messages

    def _listen(self) -> str:
        """Opens this process's socket in a new folder; returns its path."""
        folder = tempfile.mkdtemp(prefix=_FOLDER)
        if len(folder) > _MAX_PATH - len(_SOCKET) - 1:
            os.rmdir(folder)
            folder = tempfile.mkdtemp(prefix=_FOLDER, dir="/tmp")
        self.callback(shutil.rmtree, folder, ignore_errors=True)
        path = os.path.join(folder, _SOCKET)
        try:
            self._listener.bind(path)
            self._listener.listen(_MAX_DESCRIPTORS)  # more than there are processes
        except OSError as error:
            raise Refused(f"process {self._process} cannot open a socket: {error}") from error
        return path

    def _left(self) -> float:
        # With a timeout of 0, a socket would raise BlockingIOError instead of TimeoutError.
        return max(self._deadline - time.monotonic(), 0.001)

    def _ended(self, process: int) -> Refused:
        """Makes the error for a process that has ended; removes the socket that it left, if any."""
        path = self._paths[process]
        folder = os.path.dirname(path)
        is_ours = os.path.basename(folder).startswith(_FOLDER)
        with contextlib.suppress(OSError):
            if is_ours and stat.S_ISSOCK(os.lstat(path).st_mode):
                os.unlink(path)
                os.rmdir(folder)
        return Refused(f"process {process} ended, or had given up, while memory was being shared")

    def _late(self, process: int) -> Refused:
        return Refused(
            f"process {process} did not share its memory within {self._timeout_s:g} s "
            "(JAX_EP_TIMEOUT_SECONDS)"
        )

    def _connect(self, others: Sequence[int]) -> None:
        """Connects to the other processes; stores in `_gone` why some cannot be met."""
        for process in others:
            connection = self.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            connection.settimeout(self._left())
            path = self._paths[process]
            try:
                connection.connect(path)
                if (uid := peer_uid(connection)) != os.getuid():
                    raise Refused(f"the socket of process {process} belongs to user {uid}")
                connection.sendall(_LENGTH.pack(self._process))  # says who connects
            except ConnectionError:
                self._gone[process] = self._ended(process)
            except FileNotFoundError:
                self._gone[process] = Refused(
                    f"process {process} ended, or had given up, before process {self._process} "
                    f"began, or is in another container: there is no {path}"
                )
            except OSError as error:
                reason = f"process {process} cannot be reached at {path}: {error}"
                self._gone[process] = Refused(reason)
            else:
                self._to[process] = connection

    def _accept(self, others: Sequence[int]) -> None:
        # A process that fails still connects, and sends the reason, before it closes its socket.
        # So all waiting connections are accepted before a process counts as ended.
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            for process, connection in self._to.items():
                selector.register(connection, selectors.EVENT_READ, process)
            while missing := [process for process in others if process not in self._from]:
                gone = [self._gone[process] for process in missing if process in self._gone]
                timeout_s = 0 if gone else self._left()
                ready = [key for key, _ in selector.select(timeout_s)]
                if any(key.fileobj is self._listener for key in ready):
                    self._accept_one(missing)
                    continue
                if gone:
                    raise gone[0]
                if not ready:
                    raise self._late(missing[0])
                for key in ready:
                    # Processes send no data over these connections, so a readable one was closed.
                    selector.unregister(key.fileobj)
                    self._gone[key.data] = self._ended(key.data)

    def _accept_one(self, missing: Sequence[int]) -> None:
        """Accepts a connection; keeps it if it is from this user and a process in `missing`."""
        connection, _ = self._listener.accept()
        self.enter_context(connection)
        connection.settimeout(self._left())
        process = -1
        if peer_uid(connection) == os.getuid():
            with contextlib.suppress(OSError):
                process = _LENGTH.unpack(_exactly(connection, _LENGTH.size))[0]
        if process in missing:
            self._from[process] = connection
        else:
            connection.close()

    def _tell(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        # Sends to every process that `_connect` has reached.
        data = json.dumps(message).encode()
        for connection in self._to.values():
            # Fails silently if the other process has ended: `_receive` raises a clearer error.
            with contextlib.suppress(OSError):
                connection.settimeout(self._left())
                socket.send_fds(connection, [_LENGTH.pack(len(data))], descriptors)
                connection.sendall(data)

    def _receive(self, process: int, received: contextlib.ExitStack) -> tuple[Message, list[int]]:
        """Receives a process's next message; `received` closes its file descriptors on exit."""
        connection = self._from[process]
        connection.settimeout(self._left())
        try:
            head, descriptors, flags, _ = socket.recv_fds(
                connection, _LENGTH.size, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
            for descriptor in descriptors:
                received.callback(os.close, descriptor)
            head += _exactly(connection, _LENGTH.size - len(head))
            length = _LENGTH.unpack(head)[0]
            if length > _MAX_MESSAGE or flags & socket.MSG_CTRUNC:
                raise Refused(
                    f"process {process} sent more than process {self._process} may receive"
                )
            return json.loads(_exactly(connection, length)), descriptors
        except TimeoutError as error:
            raise self._late(process) from error
        except (OSError, ValueError) as error:
            raise self._ended(process) from error


def peer_uid(connection: socket.socket) -> int:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _pid, uid, _gid = struct.unpack("3i", data)
    return int(uid)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (part := connection.recv(count - len(data))):
            raise ConnectionResetError("the other end was closed")
        data += part
    return data


def raise_failure(messages: Mapping[int, Message]) -> None:
    """Raises `Refused` with the "failure" of the lowest process number that has one."""
    for _, message in sorted(messages.items()):
        if failure := message.get("failure"):
            raise Refused(failure)
