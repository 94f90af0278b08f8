# SPDX-License-Identifier: Apache-2.0
"""`ValkeyStore`: pages of prefixes in a Valkey or Redis server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .._checks import check_int, check_positive
from .memory import check_batch, check_keys, view

# Replies are in memory before they are copied to their addresses.
_CHUNK_BYTES = 16 << 20


def _client() -> Any:
    try:
        import redis
    except ImportError:
        raise ImportError(
            "ValkeyStore needs the redis client; install it with: pip install 'tvm-pagedkv[valkey]'"
        ) from None
    return redis


class ValkeyStore:
    """A store of pages in a Valkey or Redis server, which limits and evicts by itself.

    Parameters
    ----------
    url : str
        Such as ``"valkey://127.0.0.1:6379/0"``, ``"redis://..."``, ``"rediss://..."`` for TLS or
        ``"unix:///path"``; user and password as in redis-py.
    ttl : float, optional
        Seconds after which the server forgets a value that was put. None leaves it to the server's
        ``maxmemory-policy``.
    prefix : str
        What names of keys start with in the server.
    timeout : float
        Seconds that the server has to accept a connection and to answer a read or write.

    Raises
    ------
    ImportError
        If redis-py is not installed.
    ConnectionError
        If the server cannot be reached or refuses the client.

    Notes
    -----
    A lost connection raises a ConnectionError, and the next call connects again. The server and the
    network are trusted: who can write to the server can change K and V.
    """

    def __init__(
        self,
        url: str,
        *,
        ttl: float | None = None,
        prefix: str = "pagedkv:",
        timeout: float = 5.0,
    ) -> None:
        timeout = check_positive("timeout", timeout)
        self._ttl_ms = None if ttl is None else check_int("ttl in ms", round(ttl * 1000))
        self._prefix = prefix.encode()
        self._url = url
        self._is_closed = False
        self._redis = _client()
        for name in ("valkey", "valkeys"):
            if url.startswith(f"{name}://"):
                url = "redis" + url.removeprefix("valkey")
        try:
            self._server = self._redis.Redis.from_url(
                url,
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                retry=self._redis.retry.Retry(self._redis.backoff.NoBackoff(), 0),
            )
        except ValueError as error:
            raise ValueError(f"url must name a Valkey server, got {url!r}: {error}") from None
        try:
            self._server.ping()
        except self._redis.RedisError as error:
            self._server.close()
            raise ConnectionError(f"no Valkey server answers at {self._where()}: {error}") from None

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether the server has it."""
        check_keys(keys)
        replies = self._pipeline(("EXISTS", self._prefix + key) for key in keys)
        return [reply == 1 for reply in replies]

    def get_into(
        self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[bool]:
        """Read values to addresses; return for each whether the server has one of that size."""
        check_batch(keys, addresses, sizes)
        results = []
        for chunk in _chunks(sizes):
            values = self._call("mget", [self._prefix + keys[i] for i in chunk])
            for i, value in zip(chunk, values, strict=True):
                is_there = value is not None and len(value) == sizes[i]
                if is_there:
                    view(addresses[i], sizes[i])[:] = value
                results.append(is_there)
        return results

    def put_from(
        self, keys: Sequence[bytes], addresses: Sequence[int], sizes: Sequence[int]
    ) -> list[bool]:
        """Write values; return for each whether the server has taken it."""
        check_batch(keys, addresses, sizes)
        expiry = () if self._ttl_ms is None else ("PX", self._ttl_ms)
        results = []
        for chunk in _chunks(sizes):
            replies = self._pipeline(
                ("SET", self._prefix + keys[i], view(addresses[i], sizes[i]), *expiry)
                for i in chunk
            )
            results += [reply is True for reply in replies]
        return results

    def register(self, address: int, size: int) -> None:
        """Do nothing: a socket reads and writes any memory."""

    def close(self) -> None:
        """Close the connection; closing again does nothing."""
        self._is_closed = True
        self._server.close()

    def _pipeline(self, commands: Iterator[tuple[Any, ...]]) -> list[Any]:
        """Return the replies of commands; an error of one of them is its reply."""
        pipeline = self._server.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return list(self._call_of(pipeline.execute, raise_on_error=False))

    def _call(self, name: str, *arguments: Any) -> Any:
        return self._call_of(getattr(self._server, name), *arguments)

    def _call_of(self, function: Any, *arguments: Any, **named: Any) -> Any:
        if self._is_closed:
            raise ValueError("the ValkeyStore is closed")
        try:
            return function(*arguments, **named)
        except self._redis.RedisError as error:
            raise ConnectionError(f"the Valkey server at {self._where()}: {error}") from None

    def _where(self) -> str:
        return self._url.rpartition("@")[2]  # without user and password


def _chunks(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield ranges of indices whose values are together not too large."""
    chunk: list[int] = []
    total = 0
    for i, size in enumerate(sizes):
        if chunk and total + size > _CHUNK_BYTES:
            yield chunk
            chunk, total = [], 0
        chunk.append(i)
        total += size
    if chunk:
        yield chunk
