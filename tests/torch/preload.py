"""What the fork server imports once for all ranks."""

import pytest
import torch._dynamo
import torch.distributed
import torch.distributed.fsdp
import torch.distributed.launcher.api
import torch.distributed.optim
import torch.nn.parallel

import inanet.bench.peers.ddp
import inanet.launch.fabric

__all__ = ["inanet", "pytest", "torch"]

# a pool of threads would not survive the fork
torch.set_num_threads(1)
