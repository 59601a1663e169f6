"""The recipes of docs/pytorch.md: for Accelerate, Lightning, DeepSpeed and Ray Train, where those are installed (extra
``frameworks``), and for Slurm.

Of Slurm there are only stand-ins for the two programs that the script calls, on a cluster of this one host.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'inanet[torch]'")


from inanet.launch.fabric import Fabric
from inanet.launch.process import python_environment
from tests.torch.launch import output, torchrun
from tests.torch.ranks import Ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

ACCELERATE = """
import accelerate, torch, inanet.torch
accelerator = accelerate.Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(10, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
state, hook = inanet.torch.hook(require_ina=True)
model.register_comm_hook(state, hook)
accelerator.backward(model(torch.full((4, 10), float(accelerator.process_index))).sum())
optimizer.step()
print("gradient", model.module.weight.grad[0, 0].item(), state.verdict.use_ina)
"""

LIGHTNING = """
import lightning, torch, inanet.torch

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(10, 1)
    def training_step(self, batch, index):
        return self.layer(torch.full((4, 10), float(self.global_rank))).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def on_after_backward(self):
        print("gradient", self.layer.weight.grad[0, 0].item(), gradients.state.verdict.use_ina)

class Gradients(lightning.Callback):
    def on_fit_start(self, trainer, module):
        self.state, hook = inanet.torch.hook(require_ina=True)
        trainer.strategy.model.register_comm_hook(self.state, hook)

gradients = Gradients()
trainer = lightning.Trainer(
    strategy="ddp", accelerator="cpu", devices=2, max_steps=1, callbacks=[gradients],
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.zeros(8, 1)))
"""


GROUP = """
import lightning, torch, inanet.torch
from lightning.pytorch.strategies import DDPStrategy

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(10, 1)
    def training_step(self, batch, index):
        return self.layer(torch.full((4, 10), float(self.global_rank))).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def on_after_backward(self):
        group = torch.distributed.group.WORLD
        print("gradient", self.layer.weight.grad[0, 0].item(), group.verdict.use_ina)

trainer = lightning.Trainer(
    strategy=DDPStrategy(process_group_backend="ina"), accelerator="cpu", devices=2, max_steps=1,
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.zeros(8, 1)))
"""

DEEPSPEED = """
import torch, torch.distributed as dist, inanet.torch, deepspeed

# a reduction of its own for inference, which it would compile here
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
dist.init_process_group("ina")
torch.manual_seed(0)
model = torch.nn.Linear(10, 1)
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    config={
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1000.0,
        "zero_optimization": {"stage": STAGE}, "zero_allow_untested_optimizer": True,
    },
)
before = model.weight.detach().clone()
engine.backward(engine(torch.full((4, 10), float(dist.get_rank()))).sum())
engine.step()
gradient = (before - model.weight.detach())[0, 0].item() / 0.1
print("gradient", round(gradient, 5), dist.group.WORLD.verdict.use_ina)
"""

METRICS = """
import torch, torch.distributed as dist, torchmetrics, inanet.torch

dist.init_process_group("ina")
rank = dist.get_rank()
metrics = torchmetrics.MetricCollection(
    [torchmetrics.MeanMetric(), torchmetrics.MaxMetric(), torchmetrics.SumMetric()]
)
metrics.update(torch.tensor([4.0 * rank]))
found = metrics.compute()
assert (found["MaxMetric"].item(), found["SumMetric"].item()) == (4.0, 4.0), found
print("gradient", found["MeanMetric"].item(), dist.group.WORLD.verdict.use_ina)
"""

RAY = """
import sys, tempfile, ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

def train(config):
    import ray.train, ray.train.torch, torch, inanet.torch
    model = ray.train.torch.prepare_model(torch.nn.Linear(10, 1))
    state, hook = inanet.torch.hook(require_ina=True)
    model.register_comm_hook(state, hook)
    rank = ray.train.get_context().get_world_rank()
    model(torch.full((4, 10), float(rank))).sum().backward()
    with open(f"{config['folder']}/{rank}", "w") as file:
        print("gradient", model.module.weight.grad[0, 0].item(), state.verdict.use_ina, file=file)

with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
    ray.init(num_cpus=3, include_dashboard=False, _temp_dir=folder, object_store_memory=100 << 20, log_to_driver=False)
    trainer = TorchTrainer(
        train, train_loop_config={"folder": folder}, scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=folder),
    )
    trainer.fit()
    for rank in range(2):
        print(open(f"{folder}/{rank}").read(), flush=True)
    ray.shutdown()
"""

TRAIN = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import inanet.torch

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(10, 1))
state, hook = inanet.torch.hook(require_ina=True)
model.register_comm_hook(state, hook)
model(torch.full((4, 10), float(dist.get_rank()))).sum().backward()
print("gradient", model.module.weight.grad[0, 0].item(), state.verdict.use_ina, flush=True)
"""


@pytest.mark.parametrize(
    ("package", "text"),
    [
        ("accelerate", ACCELERATE),
        ("lightning", LIGHTNING),
        ("lightning", GROUP),
        ("deepspeed", DEEPSPEED.replace("STAGE", "0")),
        ("deepspeed", DEEPSPEED.replace("STAGE", "1")),
        ("torchmetrics", METRICS),
    ],
    ids=[
        "accelerate",
        "lightning",
        "lightning by the process group",
        "deepspeed",
        "deepspeed, ZeRO stage 1",
        "torchmetrics",
    ],
)
def test_gradients_go_through_the_fabric(
    torch_fabric: Fabric, tmp_path: Path, package: str, text: str
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'inanet[frameworks]'")
    script = tmp_path / "train.py"
    script.write_text(text)
    Ranks([torch_fabric.worker_socket(0)], tmp_path).run(
        torchrun, script, 2, 0, {"OMP_NUM_THREADS": "1", "INA_REQUIRE": "1"}, None
    )
    # four rows of zeros on one rank and of ones on the other: the mean of 0 and 4
    assert sorted(output(script).split("\n"))[-2:] == ["gradient 2.0 True"] * 2


@pytest.mark.timeout(400)
def test_ray_trains_through_the_fabric(torch_fabric: Fabric, tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'inanet[frameworks]'")
    script = tmp_path / "train.py"
    script.write_text(RAY)
    environment = python_environment() | {
        "INA_SOCKET": str(torch_fabric.worker_socket(0)),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.count("gradient 2.0 True") == 2


def test_the_script_for_slurm(torch_fabric: Fabric, tmp_path: Path) -> None:
    document = (Path(__file__).parents[2] / "docs/pytorch.md").read_text()
    found = re.search(r"^```bash\n(#!/bin/bash\n#SBATCH.*?)^```", document, re.DOTALL | re.MULTILINE)
    assert found is not None, "docs/pytorch.md has no script for sbatch"
    # fewer ranks, and a port that is free
    text, changed = re.subn(r"--nproc-per-node 4|:29500", lambda part: _SMALLER[part[0]], found[1])
    assert changed == 2
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, body in _SLURM.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "train.py").write_text(TRAIN)
    environment = python_environment() | {
        "PATH": os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "INA_SOCKET": str(torch_fabric.worker_socket(0)),
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NNODES": "1",
        "SLURM_JOB_ID": "4711",
    }
    done = subprocess.run(
        ["bash", "-c", text],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split("\n")[:2] == ["gradient 2.0 True"] * 2


_SMALLER = {"--nproc-per-node 4": "--nproc-per-node 2", ":29500": ":0"}
_SLURM = {
    "scontrol": 'test "$*" = "show hostnames localhost" && echo localhost',
    "srun": 'exec "$@"',
}
