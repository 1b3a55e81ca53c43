"""What the two errors say, and which of them end a run for good."""

import errno
import os
import pickle

import pytest
from torch._utils import ExceptionWrapper

from samestep.errors import RunError, remedy_of
from samestep.ranks import failure


class NoSpace(RunError):
    """An error of somebody else's data set."""


def test_a_worker_process_hands_an_error_on_without_its_traceback():
    try:
        raise NoSpace("disk full: 3 files")
    except NoSpace:
        raised = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(NoSpace) as error:
        raised.reraise()
    assert str(error.value) == "disk full: 3 files"
    assert str(RunError("NoSpace: RunError: as it is")) == "NoSpace: RunError: as it is"


@pytest.mark.parametrize(("is_final", "code"), [(None, 1), (False, 1), (True, 2)])
def test_an_error_says_whether_it_is_final(is_final, code):
    error = NoSpace("disk full")
    error.is_final = is_final
    assert failure.exit_code(pickle.loads(pickle.dumps(error))) == code


def test_only_a_full_disk_needs_space():
    said = {
        number: remedy_of(OSError(number, os.strerror(number)))
        for number in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO)
    }
    assert said == {
        errno.ENOSPC: "free some space",
        errno.EDQUOT: "free some space",
        errno.EACCES: "get permission to write there",
        errno.EROFS: "get permission to write there",
        errno.EIO: "mend that",
    }
