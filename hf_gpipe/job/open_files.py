"""The limit of open files: each connection to another process is one, and gloo aborts a process that runs out."""

from __future__ import annotations

import os
import resource

from hf_gpipe.errors import UserError

#: What a process opens in a job of one, and for each further process: five groups connect all with all, and there is
#: one for each edge and for each stage with replicas. Measured with 2 and 4 processes: 42 and 58 at most.
_FILES, _FILES_PER_PROCESS = 64, 8
#: What a process may open at most, where the system allows it: connections that are not of the run stay open too.
_MANY_FILES = 1 << 16


def check_open_files(num_processes: int) -> None:
    """Raise this process's limit of open files, so that nobody ends the job by some connections that say nothing.

    Raises:
        UserError: the system does not allow as many as the job needs.
    """
    needed = _FILES + _FILES_PER_PROCESS * num_processes
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    if highest != resource.RLIM_INFINITY and highest < needed:
        raise UserError(
            f"process {os.environ.get('RANK', '0')} may open {highest} files, and each process of a job of "
            f"{num_processes} needs {needed}, for its connections to the others; raise the limit before the start "
            "(ulimit -n 65536; in Docker --ulimit nofile=65536, in a service of systemd LimitNOFILE=65536)"
        )
    many = max(needed, _MANY_FILES)
    wanted = many if highest == resource.RLIM_INFINITY else min(many, highest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, wanted), highest))
