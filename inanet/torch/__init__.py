"""PyTorch over the fabric: a communication hook for DDP, and a process group.

>>> import inanet.torch
>>> ddp.register_comm_hook(*inanet.torch.hook())          # keeps the process group, moves the gradients

>>> dist.init_process_group("ina")                         # or: all-reduce by the fabric, the rest by Gloo

Importing this package imports torch, and registers the backend "ina".
"""

from inanet.torch.ddp import GradientHook as GradientHook
from inanet.torch.ddp import hook as hook
from inanet.torch.group import ProcessGroup as ProcessGroup
from inanet.torch.group import register
from inanet.torch.ledger import explain as explain
from inanet.torch.options import Options as Options
from inanet.torch.verdict import Verdict as Verdict

register()
