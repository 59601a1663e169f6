"""What the fork server imports once for all ranks."""

import torch._dynamo
import torch.distributed
import torch.nn.parallel

import inanet.torch

__all__ = ["inanet", "torch"]

# a pool of threads would not survive the fork
torch.set_num_threads(1)
