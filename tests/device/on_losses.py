"""The vocabulary's loss on the device: three products a chunk, no wait, whatever the precision."""

import pytest
import torch
import torch.nn.functional as F

from oelm.models.loss import CHUNK, IGNORE, ROWS, chunked_loss


@pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)], ids=str
)
def test_three_products_a_chunk_and_the_plain_losss_numbers(gpu, dtype, within):
    vocabulary, chunks = 2 * ROWS + 5, 3
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * CHUNK + 7, 16, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, 16, generator=generator, requires_grad=True)
    targets = torch.randint(vocabulary, (len(x),), generator=generator)
    targets[::5] = IGNORE
    expected = F.cross_entropy(x @ weight.T, targets)
    wanted = torch.autograd.grad(expected, (x, weight))
    there = [tensor.detach().to("cuda").requires_grad_() for tensor in (x, weight)]
    targets = targets.to("cuda")
    gpu.forget()
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        loss = chunked_loss(*there, targets)
    found = torch.autograd.grad(loss, there)
    assert gpu.waits == []
    products = {name: n for name, n in gpu.launches.items() if name.split(".")[0] in ("mm", "addmm_", "bmm", "addmm")}
    assert sum(products.values()) == 3 * chunks
    assert loss.item() == pytest.approx(expected.item(), rel=within)
    for ours, plain in zip(found, wanted, strict=True):
        assert (ours.cpu() - plain).norm() < within * plain.norm()


def test_evaluation_takes_one_product_a_chunk(gpu):
    x, weight = torch.randn(CHUNK + 1, 8, device="cuda"), torch.randn(99, 8, device="cuda", requires_grad=True)
    targets = torch.zeros(len(x), dtype=torch.int64, device="cuda")
    gpu.forget()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        chunked_loss(x, weight, targets)
    assert gpu.launches["mm"] == 2
    assert gpu.waits == []
