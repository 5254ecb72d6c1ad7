"""What the server that processes of tests are forked from has imported: see `fork_server`, which alone names it.

No backend of the native core is tried here: a process may set limits first.
"""

import gc

import lightning  # noqa: F401
import pytest  # noqa: F401
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.profiler  # noqa: F401

import swapper.cli
import swapper.dcp
import swapper.fabric
import swapper.lightning  # noqa: F401

# Else the first collection in each process writes to all of this, and so copies it.
gc.collect()
gc.freeze()
