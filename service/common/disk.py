"""What a disk that is full, or otherwise in trouble, tells callers: no more than whose it is."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Callable, Iterator

from service.common import errors

log = logging.getLogger(__name__)

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextlib.contextmanager
def disk_trouble(what: str, full: Callable[[str], errors.StatusError]) -> Iterator[None]:
    """Disk errors of the body: logged, and `full(sentence)` is raised where there is no room."""
    try:
        yield
    except OSError as error:
        log.error("%s: %s", what, error.strerror)
        if error.errno in FULL:
            raise full(f"the disk of {what} is full") from error
        raise
