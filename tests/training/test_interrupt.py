from __future__ import annotations

import os
import signal

import pytest

from evojax.errors import Interrupted
from evojax.training.interrupt import InterruptGuard


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_is_a_request_second_ends(signum: int) -> None:
    before = signal.getsignal(signum)
    with InterruptGuard() as guard:
        guard.check()
        os.kill(os.getpid(), signum)
        assert guard.requested
        with pytest.raises(Interrupted):
            guard.check()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signum)
    assert signal.getsignal(signum) is before
