"""The recipes of docs/pytorch.md for Accelerate and Lightning, where those are installed."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'inanet[torch]'")


from inanet.demo.fabric import Fabric
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


@pytest.mark.parametrize(("package", "text"), [("accelerate", ACCELERATE), ("lightning", LIGHTNING)])
def test_gradients_go_through_the_fabric(
    torch_fabric: Fabric, tmp_path: Path, package: str, text: str
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    script = tmp_path / "train.py"
    script.write_text(text)
    Ranks([torch_fabric.worker_socket(0)], tmp_path).run(
        torchrun, script, 2, 0, {"OMP_NUM_THREADS": "1"}, None
    )
    # four rows of zeros on one rank and of ones on the other: the mean of 0 and 4
    assert sorted(output(script).split("\n"))[-2:] == ["gradient 2.0 True"] * 2
