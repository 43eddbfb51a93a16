"""A store to which others may write → notes that only workers of this run can have written.

Torch's store has no authentication. So the workers' notes there, such as their addresses, are signed with the run's
secret, which is never in the store: a note that another process has written or changed raises an error. The secret is
``TODIST_SECRET``; :func:`torchopt_dist.launch` makes one for each launch and hands it out itself. Without it, workers
on one machine make a secret in a file that only their user can read. Otherwise nothing is signed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from torchopt_dist.errors import InitializationError

__all__ = ["VARIABLE", "SealedStore", "given_secret", "open_store"]

VARIABLE = "TODIST_SECRET"
LEAST_LENGTH = 16
FOLDER, FILE = "todist-", "secret"


class SealedStore:
    """Notes of a run's workers to each other, on a store whose keys are this run's alone, and which torch may use, too.

    By the ``nonce`` notes of another run with the same secret are rejected; without a ``secret`` nothing is signed.
    """

    def __init__(self, plain: dist.Store, nonce: str = "", secret: bytes | None = None) -> None:
        self.plain = plain
        self._nonce = nonce
        self._secret = secret

    def tell(self, key: str, text: str) -> None:
        """Leave a note for all."""
        self.plain.set(key, f"{self._seal(key, text)}:{text}")

    def told(self, *keys: str) -> list[str]:
        """Wait for the notes under these keys, and return them.

        Raises ``InitializationError`` if one is not of a worker of this run, and torch's ``DistError`` if the store has
        ended, or a note has not come within its time-out.
        """
        return [self._opened(key, note.decode()) for key, note in zip(keys, self._get(keys), strict=True)]

    def make_token(self, purpose: str) -> str:
        """Make a token that only the workers of this run know; called by one worker."""
        if self._secret is not None:
            return self.token(purpose)
        token = secrets.token_hex(16)
        self.tell(f"token/{purpose}", token)
        return token

    def token(self, purpose: str) -> str:
        """That token, on the other workers: made from the secret, or read from the store if there is none."""
        if self._secret is not None:
            return self._seal(purpose, "token")
        return self.told(f"token/{purpose}")[0]

    def _get(self, keys: tuple[str, ...]) -> list[bytes]:
        return self.plain.multi_get(list(keys))

    def _seal(self, key: str, text: str) -> str:
        if self._secret is None:
            return ""
        message = json.dumps([self._nonce, key, text]).encode()
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()

    def _opened(self, key: str, note: str) -> str:
        seal, _, text = note.partition(":")
        if hmac.compare_digest(seal.encode(), self._seal(key, text).encode()):
            return text
        rule = (
            "is not signed with this run's secret: another process has written it"
            if self._secret is not None
            else "is signed, and this worker has no secret"
        )
        raise InitializationError(
            f"the note {key!r} in the store {rule}, or {VARIABLE} is not the same on all workers; "
            "set it to the same value on all nodes, or on none"
        )


@contextmanager
def open_store(plain: dist.Store, nonce: str, rank: int, on_one_machine: bool) -> Iterator[SealedStore]:
    """A context with the notes of this run; it is left when all workers have written theirs.

    Raises ``InitializationError`` if ``TODIST_SECRET`` is too short, rank 0 does not say in time where the secret is
    that it has made, or that cannot be read.
    """
    given = given_secret()
    if given is not None:
        yield SealedStore(plain, nonce, given)
    elif not on_one_machine:
        yield SealedStore(plain, nonce)
    elif rank == 0:
        folder = Path(tempfile.mkdtemp(prefix=FOLDER))  # only this user can enter it
        try:
            made = secrets.token_bytes(32)
            (folder / FILE).write_bytes(made)
            plain.set(FILE, str(folder / FILE))
            yield SealedStore(plain, nonce, made)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    else:
        try:
            path = Path(plain.get(FILE).decode())
        except dist.DistError as error:
            raise InitializationError(f"rank {rank} did not hear from rank 0: {error}") from error
        yield SealedStore(plain, nonce, _read(path))


def given_secret() -> bytes | None:
    """The secret in the environment, if there is one; raises ``InitializationError`` if it is too short."""
    given = os.environ.get(VARIABLE)
    if given is not None and len(given) < LEAST_LENGTH:
        raise InitializationError(
            f"the environment variable {VARIABLE} must have at least {LEAST_LENGTH} characters, got {len(given)}; "
            "`python -c 'import secrets; print(secrets.token_hex())'` prints a good one"
        )
    return None if given is None else given.encode()


def _read(path: Path) -> bytes:
    """The secret that rank 0 has written there; a process of another user cannot have made such a file."""
    try:
        folder = path.parent.lstat()
        # On Windows a folder has neither, and that of temporary files is the user's own.
        own = not hasattr(os, "getuid") or folder.st_uid == os.getuid()
        closed = own and not (hasattr(os, "getuid") and stat.S_IMODE(folder.st_mode) & 0o077)
        if not (closed and path.parent.name.startswith(FOLDER) and path.name == FILE):
            raise PermissionError("its folder is not this user's alone")
        return path.read_bytes()
    except OSError as error:
        raise InitializationError(
            f"the run's secret, which rank 0 has left at {str(path)!r}, cannot be read: {error}. LOCAL_WORLD_SIZE says "
            f"that all workers are on this machine; if they do not share its files, set {VARIABLE} to the same value "
            "for all of them"
        ) from error
