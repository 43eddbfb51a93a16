"""Objects with a state, a step → a file that rank 0 writes whole or not at all; the newest whole file → the objects."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor

from torchopt_dist.arguments.missing_names import missing_methods
from torchopt_dist.arguments.numbers import integer
from torchopt_dist.arguments.options import hinted
from torchopt_dist.checkpoint import _contents, _files
from torchopt_dist.checkpoint._random_states import capture_random_states, restore_random_states
from torchopt_dist.distributed.world import get_rank
from torchopt_dist.errors import CheckpointError

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Checkpointer", "Restored"]

log = logging.getLogger(__package__)

_FORMAT = 1


class Restored(NamedTuple):
    """The result of :meth:`Checkpointer.restore`."""

    step: int
    """The step that was saved; 0 if there is no checkpoint."""
    objects: dict[str, Any]
    """The objects by name, with what was saved in the place of plain values."""


@missing_methods(load="restore(objects)", load_state_dict="restore(objects)", latest="steps()[-1]")
class Checkpointer:
    """Saves the state of a program from time to time, and restores it after a crash.

    An object is anything with ``state_dict`` and ``load_state_dict`` (modules, optimizers, schedulers, samplers,
    gradient scalers), a generator of torch, numpy or Python, a tensor, a plain value (numbers, texts, arrays of numpy,
    and lists, tuples, sets and dicts of them), or a tree of all these. The default generators of Python, numpy and
    torch are saved with them.

    Rank 0 writes, and other ranks do nothing in :meth:`save`; all ranks can restore, where they share the folder. A
    file is written under a temporary name, flushed to the disk and renamed, so a crash at any moment leaves the earlier
    files intact. Only the user can read it (mode 0600); ``torch.load(path, weights_only=True)`` loads it, too.

    Args:
        folder: where the files are; made when the first one is written.
        keep: how many of the newest files are kept, at least 1; ``None`` means all. That of the best score is kept
            beside them.
        every: :meth:`save` writes at steps that are multiples of this number, at least 1, and at those of a new best
            score.
        background: write in a thread. :meth:`save` copies the tensors and returns; the next call raises what a write
            has raised. Call :meth:`close`, or use the checkpointer in a ``with``, so that the last file is whole.
        random_states: save the default generators, and restore them on rank 0.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``keep`` or ``every`` is less than 1, or ``folder`` is a file.

    Example:
        >>> import tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> net = torch.nn.Linear(1, 1)
        >>> Checkpointer(folder).save(7, {"net": net, "best": 0.5})
        True
        >>> Checkpointer(folder).restore({"net": torch.nn.Linear(1, 1), "best": 0.0})
        Restored(step=7, objects={'net': Linear(in_features=1, out_features=1, bias=True), 'best': 0.5})
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        every: int = 1,
        background: bool = False,
        random_states: bool = True,
    ) -> None:
        if not isinstance(folder, (str, os.PathLike)):
            raise TypeError(f"`folder` must be a path, got {type(folder).__name__} {folder!r}")
        for name, value in (("background", background), ("random_states", random_states)):
            if not isinstance(value, bool):
                raise TypeError(f"`{name}` must be True or False, got {type(value).__name__} {value!r}")
        self.folder = Path(folder).absolute()
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"`folder` must be a folder, or not be there yet, got the file {self.folder}")
        self.keep = None if keep is None else integer("keep", keep, 1)
        self.every = integer("every", every, 1)
        self._random_states = random_states
        self._corrupt: set[str] = set()
        self._thread = ThreadPoolExecutor(1, "todist-checkpoint") if background else None
        self._writing: Future[None] | None = None
        self._closed = False

    def restore(
        self, objects: Mapping[str, Any], *, step: int | Literal["best"] | None = None, partial: bool = False
    ) -> Restored:
        """Restore the newest checkpoint, if there is one, or a chosen one.

        Objects with a state and generators get the saved state. Leaf tensors that require grad are overwritten in
        place, since an optimizer may hold them, and so are those of a module's ``state_dict()``. Other tensors and
        plain values are returned as new objects. For a truncated or corrupt file there is a ``RuntimeWarning``, and the
        file before it is used.

        Args:
            objects: the objects by name, as they will be saved. Trees with tensors or objects in them must have
                the structure that was saved.
            step: the step of the checkpoint; ``"best"`` is that of the highest score. By default it is the newest.
            partial: restore these objects alone, and leave what else was saved, and the random generators: for example
                the model, for an evaluation.

        Returns:
            The saved step, and the objects by name. Without a checkpoint it is step 0, and the objects are as given.

        Raises:
            TypeError: an object has no state, or is of another kind than was saved.
            ValueError: names or shapes differ from those that were saved, or an object refuses its state; there is no
                checkpoint of ``step``, or none has a score.
            CheckpointError: there are checkpoints, but none is whole, or the chosen one is not; or a file with a
                checkpoint's name is not a checkpoint.
            OSError: files cannot be read, or an earlier file could not be written in the background.
        """
        self.wait()
        _check_objects(objects)
        _contents.check(objects)
        if not isinstance(partial, bool):
            raise TypeError(f"`partial` must be True or False, got {type(partial).__name__} {partial!r}")
        found = self._newest() if step is None else self._chosen(step)
        if found is None:
            return Restored(0, dict(objects))
        file, contents = found
        if not isinstance(contents, dict) or contents.get("format") != _FORMAT:
            raise CheckpointError(f"{file.path} is no checkpoint of this version of torchopt_dist")
        restored = _contents.restore(objects, contents["objects"], partial=partial)
        if not partial and self._random_states and get_rank() == 0 and contents["random_states"] is not None:
            restore_random_states(_contents.unpack_value(contents["random_states"]))
        return Restored(file.step, restored)

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are there, in ascending order."""
        self.wait()
        return sorted({file.step for file in _files.find(self.folder)})

    @hinted
    def save(
        self, step: int, objects: Mapping[str, Any], *, score: float | None = None, force: bool = False
    ) -> bool:
        """Write a checkpoint, if ``step`` is a multiple of ``every`` or has the best score, and this is rank 0.

        Args:
            step: the number of steps made, at least 0, which :meth:`restore` returns.
            objects: the objects by name.
            score: how good the objects are, for example an accuracy, or minus a loss. The checkpoint of the highest
                score is kept, and ``restore(objects, step="best")`` takes it. One that is higher than those of all
                checkpoints is written at any step.
            force: write even if ``step`` is not a multiple of ``every``, for example after the last step.

        Returns:
            Whether a checkpoint is written; with ``background=True``, whether it will be.

        Raises:
            TypeError: ``step`` is not an integer, or ``score`` not a number, an object has no state, or something in a
                state cannot be kept.
            ValueError: ``score`` is not a number (nan); ``step`` is negative, or less than that of a checkpoint which
                is there; this checkpointer is closed.
            OSError: the file cannot be written, for example to a full disk, and the older ones are still there; or this
                happened to an earlier one in the background.
        """
        if self._closed:
            raise ValueError("`save` must come before `close`")
        step = integer("step", step, 0)
        if score is not None:
            score = _score(score)
        _check_objects(objects)
        if self._writing is not None and self._writing.done():
            self.wait()
        if get_rank() != 0:
            return False
        if step % self.every and not force and not self._is_best(score):
            return False
        self.wait()
        self._check_newest(step)
        packer = _contents.Packer(copy=self._thread is not None)
        contents = {
            "format": _FORMAT,
            "step": step,
            "objects": _contents.pack(objects, packer),
            "random_states": packer.pack(capture_random_states(), "") if self._random_states else None,
        }
        if self._thread is None:
            self._write(step, contents, score)
        else:
            self._writing = self._thread.submit(self._write_and_tell, step, contents, score)
        return True

    def wait(self) -> None:
        """Wait until all files have been written in the background.

        Raises:
            OSError: a file could not be written; this is raised once.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Wait until all files have been written, and end the thread; nothing can be saved afterwards.

        Raises:
            OSError: a file could not be written.
        """
        self._closed = True
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _newest(self) -> tuple[_files.CheckpointFile, Any] | None:
        """The newest whole checkpoint and its contents."""
        while True:
            files = _files.find(self.folder)
            reasons = {}
            for file in files:
                try:
                    contents = _files.read(file)
                except FileNotFoundError:
                    break  # rank 0 has pruned it, so there is a newer one
                except _files.CorruptFileError as error:
                    reasons[file.path] = str(error)
                    continue
                for path, reason in reasons.items():
                    text = f"{path} is corrupt: {reason}. Step {file.step} is restored, from {file.path}"
                    warnings.warn(text, RuntimeWarning, stacklevel=3)
                    self._corrupt.add(path.name)
                return file, contents
            else:
                if reasons:
                    listed = "; ".join(f"{path}: {reason}" for path, reason in reasons.items())
                    raise CheckpointError(
                        f"no checkpoint is whole; remove the files to start afresh. {listed}"
                    )
                return None

    def _chosen(self, step: int | str) -> tuple[_files.CheckpointFile, Any]:
        """The checkpoint of a step, or the best one, and its contents."""
        files = _files.find(self.folder)
        if step == "best":
            file = _files.best(files)
            if file is None:
                raise ValueError(
                    "`step` can be 'best' where checkpoints were saved with `score=`, got none of these in "
                    f"{self.folder}"
                )
        else:
            number = integer("step", step, 0)
            file = next((each for each in files if each.step == number), None)
            if file is None:
                there = ", ".join(map(str, sorted({each.step for each in files}))) or "none"
                raise ValueError(
                    f"`step` must be that of a checkpoint in {self.folder}, which are {there}, got {number}"
                )
        try:
            return file, _files.read(file)
        except _files.CorruptFileError as error:
            raise CheckpointError(f"{file.path} is corrupt: {error}") from error

    def _is_best(self, score: float | None) -> bool:
        """Whether a score is above that of every checkpoint."""
        if score is None:
            return False
        self.wait()
        held = _files.best(_files.find(self.folder))
        return held is None or held.score is None or score > held.score

    def _check_newest(self, step: int) -> None:
        for file in _files.find(self.folder):
            if file.step > step and file.path.name not in self._corrupt:
                raise ValueError(
                    f"`step` must be at least {file.step}, that of {file.path}, or a later `restore` would take that "
                    f"one, got {step}: restore it first, or use another folder"
                )

    def _write(self, step: int, contents: dict[str, Any], score: float | None) -> None:
        written = _files.write(self.folder, step, contents, score)
        _files.prune(self.folder, written, self.keep, self._corrupt)

    def _write_and_tell(self, step: int, contents: dict[str, Any], score: float | None) -> None:
        try:
            self._write(step, contents, score)
        except Exception as error:
            log.error("the checkpoint of step %d: %s", step, error)  # also where no call comes any more
            raise


def _score(value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`score` must be a number, got {type(value).__name__} {value!r:.80}")
    if math.isnan(value):
        raise ValueError("`score` must be a number that can be compared, got nan")
    return float(value)


def _check_objects(objects: Any) -> None:
    if not isinstance(objects, Mapping):
        raise TypeError(f"`objects` must be a dict, name to object, got {type(objects).__name__}")
    if not objects:
        raise ValueError("`objects` must have at least one object, got none")
    for name in objects:
        if not isinstance(name, str):
            raise TypeError(f"`objects` must have texts as names, got {type(name).__name__} {name!r}")
