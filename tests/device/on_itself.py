"""The pretend device tells apart what a real one would."""

import pytest
import torch
from pretend import Gpu
from torch import nn


def test_tensors_are_on_cuda_and_their_numbers_are_real(gpu):
    x = torch.arange(6.0, device="cuda").view(2, 3)
    assert x.device == torch.device("cuda", 0)
    assert (x @ x.T).sum().item() == 83
    made = torch.tensor([1, 2], device="cuda")
    assert made.device.type == "cuda"
    assert made.tolist() == [1, 2]


def test_views_and_writes_reach_the_same_memory(gpu):
    x = torch.zeros(2, 3, device="cuda")
    x[0] += 1
    x.T[2].mul_(5)
    torch.mm(torch.ones(2, 2, device="cuda"), torch.ones(2, 3, device="cuda"), out=(out := torch.empty_like(x)))
    assert x.tolist() == [[1, 1, 5], [0, 0, 0]]
    assert out.tolist() == [[2, 2, 2], [2, 2, 2]]
    copy = x.cpu()
    x.zero_()
    assert copy.sum() == 7


def test_gradients_flow_and_autocast_casts(gpu):
    layer = nn.Linear(3, 2).to("cuda")
    with torch.autocast("cuda", torch.bfloat16):
        y = layer(torch.ones(4, 3, device="cuda"))
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    assert layer.weight.grad.device.type == "cuda"
    assert layer.weight.grad.sum().item() == 24


def test_a_move_keeps_ties(gpu):
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[1].weight = model[0].weight
    before = model[0].weight
    model.to("cuda")
    assert model[0].weight is model[1].weight is before


@pytest.mark.parametrize(
    "mix",
    [
        lambda a, b: torch.stack([a[0], b[0]]),
        lambda a, b: torch.cat([a, b]),
        lambda a, b: a + b,
        lambda a, b: b.add_(a),
        lambda a, b: b[0].add_(a[0]),
        lambda a, b: nn.functional.embedding(b.long(), a[:, None]),
    ],
)
def test_mixed_devices_are_refused(gpu, mix):
    with pytest.raises(RuntimeError, match="same device"):
        mix(torch.ones(3, device="cuda"), torch.ones(3))


def test_a_number_on_the_host_may_be_added(gpu):
    assert (torch.ones(3, device="cuda") * torch.tensor(2.0)).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x[0].item(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: torch.linalg.solve(x[:, None] * torch.eye(3, device="cuda"), x),
        lambda x: torch.zeros(3).to("cuda"),
        lambda x: x[torch.tensor([0, 1])],
    ],
)
def test_waits_are_noticed_with_their_line(gpu, wait):
    x = torch.ones(3, device="cuda")
    gpu.forget()
    wait(x)
    assert [line for _, line in gpu.waits] == ["device/on_itself.py:<lambda>"]


def test_what_does_not_wait_is_not_noted(gpu):
    x = torch.ones(3, device="cuda")
    gpu.forget()
    torch.where(x > 0, x, 0).sum().add_(1)
    torch.zeros(3).to("cuda", non_blocking=True)
    x[1].fill_(2.0)
    assert gpu.waits == []
    assert gpu.uploads == [(3,)]
    assert gpu.launches["sum"] == 1


def test_numpy_refuses(gpu):
    with pytest.raises((TypeError, RuntimeError)):
        torch.ones(3, device="cuda").numpy()


def test_no_other_device_is_left_behind():
    assert isinstance(Gpu(), Gpu)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.ones(3, device="cuda")
