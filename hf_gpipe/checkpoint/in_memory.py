"""Checkpoints in the memory of the machines, from which a run goes on that was started again, without those on disk.

Each machine has a folder under /dev/shm, whose files outlive the processes. The leaders of the stages write their files
there as into any checkpoint, and then the next machine gets a copy of them. So all files of a checkpoint are left where
one machine is lost, or several of which no two are neighbours. Before a run resumes, the machines that are there
complete their folders from each other.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from uuid import uuid4

import torch
import torch.distributed as dist

from hf_gpipe.checkpoint import digests
from hf_gpipe.checkpoint.digests import DIGESTS_FILE, Digests
from hf_gpipe.checkpoint.directory import checkpoint_path, checkpoints, last_checkpoint, remove, step_of, temporary_path
from hf_gpipe.checkpoint.save import replace_directory
from hf_gpipe.checkpoint.state import read_state, read_trainer_state
from hf_gpipe.checkpoint.together import write_together
from hf_gpipe.errors import CheckpointError, MessageError
from hf_gpipe.job.world import World

logger = logging.getLogger(__name__)

ROOT = Path("/dev/shm")
#: The file of the output directory with the run's name in the machines' memory. A new one knows no old checkpoints.
NAME_FILE = ".in_memory"
_NAME = re.compile(r"[0-9a-f]{32}")
#: Bytes of a file that are sent at a time.
_BLOCK_BYTES = 1 << 26


class MemoryCheckpoints:
    """The checkpoints of a run in memory. Every process has one and calls it in step with the others.

    Args:
        output_dir: of the run.
        world: of the run.

    Attributes:
        folder: of the checkpoints on this machine, `checkpoint-N` as in the output directory.

    Raises:
        CheckpointError: on every process, if a machine has no /dev/shm.
    """

    def __init__(self, output_dir: Path, world: World) -> None:
        self._world = world
        hosts = world.hosts
        lacking = [host for host, has in zip(hosts, world.gather_objects(ROOT.is_dir()), strict=True) if not has]
        if lacking:
            raise CheckpointError(f"machine {lacking[0]} has no {ROOT}; leave memory_save_steps out")
        #: The first process of each machine, which does what is done once on it.
        self._firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
        self._is_first = world.rank == world.neighbours[0]
        self._writer = self._firsts.index(hosts.index(hosts[world.writer]))
        self.folder = ROOT / world.from_writer(lambda: _name_of(output_dir))

    def find(self, after: int) -> Path | None:
        """The newest checkpoint after more updates than these that the machines have together, completed and checked.

        Every process calls it. Each machine has all files of it then.
        """
        mine = list(map(step_of, checkpoints(self.folder))) if self._is_first and _is_own(self.folder) else []
        for step in sorted({step for own in self._world.gather_objects(mine) for step in own}, reverse=True):
            path = checkpoint_path(self.folder, step)
            if step > after and self._is_complete(path):
                problem = self._completed(path)
                if not problem:
                    return path
                if self._world.is_reporter:
                    logger.warning("%s; an older checkpoint is used", problem)
        return None

    def prepare(self, final: Path) -> None:
        """On each machine, make the directory that the processes write a checkpoint into before it has its name."""

        def make() -> None:
            self._make_folder()
            for left in self.folder.glob(".*"):  # of a save that was interrupted
                remove(left)
            temporary_path(final).mkdir()

        write_together(self.folder, self._world, make, is_writing=self._is_first)

    def spread(self, directory: Path, world: World) -> None:
        """Copy what a machine has written to the next machine, and the small files to all.

        Args:
            directory: with all files of a checkpoint, the digests included.
            world: whose messages are used.
        """
        count = len(self._firsts)

        def wants(machine: int, owner: int, name: str) -> bool:
            return machine == (owner + 1) % count or (owner == self._writer and not name.endswith(".safetensors"))

        self._exchange(directory, world, wants)

    def publish(self, directory: Path, final: Path, world: World) -> None:
        """Give the checkpoint its name on each machine, and then delete all others."""

        def rename() -> None:
            if directory.exists():  # the writer has done it
                replace_directory(directory, final)

        write_together(final, world, rename, is_writing=self._is_first)
        if self._is_first:
            for path in checkpoints(self.folder):
                if path != final:
                    remove(path)

    def forget(self) -> None:
        """Delete all of them."""
        if self._is_first and _is_own(self.folder):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _make_folder(self) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if not _is_own(self.folder):
            raise PermissionError(f"{self.folder} is another user's")

    def _is_complete(self, path: Path) -> bool:
        """Whether the machines have all files together that the digests name."""
        named, problem = None, ""
        try:
            if self._is_first and (digests_here := Digests.read(path)) is not None:
                named = {DIGESTS_FILE, *digests_here.files}
        except CheckpointError as error:
            problem = str(error)
        everyone = self._world.gather_objects((named, set(_files(path)) if self._is_first else set(), problem))
        wanted = next((named for named, _, _ in everyone if named is not None), None)
        return wanted is not None and wanted <= set().union(*(files for _, files, _ in everyone))

    def _completed(self, path: Path) -> str:
        """Copy the files of a checkpoint that a machine lacks from the others, and check all; a problem, or empty."""
        problem = ""
        try:
            write_together(self.folder, self._world, self._make_folder, is_writing=self._is_first)
            self._exchange(path, self._world, lambda machine, owner, name: True)
            digests_here = Digests.read(path)
            assert digests_here is not None, "it was read before"
            own = self._world.neighbours
            digests_here.check_share(own.index(self._world.rank), len(own))
            read_state(path)
            read_trainer_state(path)
        except CheckpointError as error:
            problem = str(error)
        return next((text for text in self._world.gather_objects(problem) if text), "")

    def _exchange(self, directory: Path, world: World, wants: Callable[[int, int, str], bool]) -> None:
        """Send files of a directory to machines that lack and want them.

        Args:
            directory: on each machine.
            world: whose messages are used.
            wants: whether a machine, by its number, wants a file of another machine.

        Raises:
            CheckpointError: on every process, if one of them cannot read or write.
        """
        everyone = world.gather_objects(_files(directory) if self._is_first else {})
        for name in (name for files in everyone for name in files):
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise MessageError(f"another process has a file {name[:200]!r} of a checkpoint, which is outside of it")
        group = world.group_on(torch.device("cpu")) if len(self._firsts) > 1 else None
        lacking = [
            (self._firsts[owner], self._firsts[machine], name)
            for owner, machine, name in _lacking([everyone[rank] for rank in self._firsts], wants)
        ]

        def transfer() -> None:
            problem: OSError | None = None
            for sender, receiver, name in lacking:  # in the same order everywhere, so that nobody waits in a circle
                try:
                    if world.rank == sender:
                        _send(directory / name, everyone[sender][name], receiver, group)
                    elif world.rank == receiver:
                        _receive(directory / name, everyone[sender][name], sender, group)
                except OSError as error:
                    problem = error
            if problem is not None:
                raise problem

        write_together(directory, world, transfer)


def newest_checkpoint(output_dir: Path, world: World, memory: MemoryCheckpoints | None) -> Path | None:
    """The newest checkpoint that is whole, in memory or on disk. Every process must call it.

    Raises:
        CheckpointError: as `last_checkpoint`.
    """
    if memory is not None:
        on_disk = world.from_writer(lambda: list(map(step_of, checkpoints(output_dir))))
        checkpoint = memory.find(after=max(on_disk, default=0))
        if checkpoint is not None:
            return checkpoint
    return last_checkpoint(output_dir, world)


def _lacking(files: list[dict[str, int]], wants: Callable[[int, int, str], bool]) -> Iterator[tuple[int, int, str]]:
    """(owner, machine, file) of each file that a machine lacks and wants from another one, each once."""
    sent = [set(own) for own in files]
    for owner, own in enumerate(files):
        for name in sorted(own):
            for machine in range(len(files)):
                if name not in sent[machine] and wants(machine, owner, name):
                    sent[machine].add(name)
                    yield owner, machine, name


def _send(path: Path, size: int, receiver: int, group: dist.ProcessGroup | None) -> None:
    content = torch.from_file(str(path), size=size, dtype=torch.uint8) if size else torch.zeros(0, dtype=torch.uint8)
    for block in content.split(_BLOCK_BYTES):
        dist.send(block, group_dst=receiver, group=group)


def _receive(path: Path, size: int, sender: int, group: dist.ProcessGroup | None) -> None:
    """Receive a file. After an error of the file system the rest of the message is received all the same."""
    part, problem = path.with_name(f".{path.name}.part"), None
    for start in range(0, max(size, 1), _BLOCK_BYTES):
        block = torch.empty(min(_BLOCK_BYTES, size - start), dtype=torch.uint8)
        dist.recv(block, group_src=sender, group=group)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with part.open("ab" if start else "wb") as file:
                file.write(block.numpy())
        except OSError as error:
            problem = error
    if problem is not None:
        raise problem
    part.replace(path)


def _files(directory: Path) -> dict[str, int]:
    """The files of a directory and those below, with their sizes in bytes."""
    files = [path for path in directory.rglob("*") if path.is_file() and not path.name.endswith(".part")]
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}


def _is_own(folder: Path) -> bool:
    """Whether a folder is there and this user's: anybody may make one under /dev/shm."""
    return folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid()


def _name_of(output_dir: Path) -> str:
    """The name of a run's folder. It has the path of the output directory, which may be copied."""
    file = output_dir / NAME_FILE
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        name = file.read_text().strip() if file.exists() else ""
        if not _NAME.fullmatch(name):
            name = uuid4().hex
            file.write_text(f"{name}\n")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read or written: {error.strerror}") from error
    return f"hf_gpipe-{name}-{digests.digest(str(output_dir.resolve()).encode())[:8]}"
