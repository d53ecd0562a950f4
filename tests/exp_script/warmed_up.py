"""Imported into the server that runs are forked from: all that a run imports, however late."""

import contextlib
import io
import threading

import torch
from tqdm import tqdm

import run_models

torch.set_num_threads(1)
tqdm.monitor_interval = 0  # no thread: what is forked must not have any
tqdm.set_lock(threading.RLock())  # one that a process which is killed does not hold for all others
with contextlib.redirect_stdout(io.StringIO()):
    run_models.main(["--limit-train=16", "--n-epochs=1"])
