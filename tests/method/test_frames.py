import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from oelm.method.frames import ORTHONORMAL, make_frame, orthogonality_error
from oelm.method.names import KINDS

DRAWN = sorted(set(KINDS) - {"keep"})


def frame(kind="headwise", **changes):
    wanted = {"seed": 0, "layer": 0, "role": "q", "heads": 4, "head_dim": 16, "d_in": 64} | changes
    return make_frame(kind, **wanted)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(ORTHONORMAL & set(KINDS))), seed=st.integers(0, 2**31), heads=st.integers(1, 6),
    head_dim=st.integers(1, 24), d_in=st.integers(1, 48), gain=st.floats(0.05, 8.0), group=st.integers(1, 3),
)  # fmt: skip
def test_orthonormal_kinds_are_orthonormal_for_any_shape(kind, seed, heads, head_dim, d_in, gain, group):
    w = frame(kind, seed=seed, heads=heads, head_dim=head_dim, d_in=d_in, gain=gain, group=group)
    assert w.shape == (heads * head_dim, d_in)
    assert orthogonality_error(w.float(), heads, gain) < 1e-6
    # the gain is the singular value of every head, also when it has more rows than columns
    for head in w.reshape(heads, head_dim, d_in):
        torch.testing.assert_close(torch.linalg.svdvals(head), torch.full((min(head_dim, d_in),), gain).double())


def test_sign_fix_makes_the_frame_haar():
    # The first entry of a Haar frame is symmetric around 0 with variance 1/d; plain LAPACK QR is not.
    first = torch.stack([frame(seed=s, heads=1, head_dim=3, d_in=6)[:, 0] for s in range(4000)])
    assert first.mean(0).abs().max() < 4 * (1 / 6 / 4000) ** 0.5
    torch.testing.assert_close(first.var(0), torch.full((3,), 1 / 6).double(), rtol=0.08, atol=0)
    # a marginal of the sphere in R^6: E[x^4] = 3 / (d (d + 2))
    torch.testing.assert_close((first**4).mean(0), torch.full((3,), 3 / 48).double(), rtol=0.12, atol=0)


@pytest.mark.parametrize(("heads", "head_dim", "d_in"), [(8, 64, 512), (3, 40, 512), (4, 96, 64)])
@pytest.mark.parametrize("kind", sorted(set(DRAWN) - {"normal"}))
def test_equal_frobenius_norm_at_equal_gain(kind, heads, head_dim, d_in):
    norm = frame(kind, heads=heads, head_dim=head_dim, d_in=d_in, gain=1.5).norm()
    assert norm == pytest.approx(1.5 * (heads * min(head_dim, d_in)) ** 0.5, rel=0.02)


def test_normal_is_the_usual_initialisation():
    assert frame("normal", heads=8, head_dim=64, d_in=512).std().item() == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("kind", DRAWN)
def test_a_frame_is_a_pure_function_of_its_coordinates(kind):
    torch.manual_seed(1)
    one = frame(kind)
    torch.manual_seed(2)
    assert torch.equal(one, frame(kind))


@pytest.mark.parametrize("changed", [{"seed": 1}, {"layer": 1}, {"role": "k"}, {"stack": "cross"}])
def test_every_coordinate_matters(changed):
    assert not torch.allclose(frame(), frame(**changed))


def test_adding_heads_shifts_no_other_head():
    assert torch.equal(frame(heads=6)[: 4 * 16], frame(heads=4))


def test_global_rows_are_orthonormal_across_heads_and_headwise_rows_are_not():
    def across(w):
        return (w @ w.T - torch.eye(64).double()).abs().max().item()

    assert across(frame("global")) < 1e-12
    assert across(frame("headwise")) > 0.05


def test_identity_reads_its_own_coordinates_and_wraps():
    x = torch.arange(8.0).double()
    read = make_frame("identity", seed=0, layer=0, role="k", heads=2, head_dim=4, d_in=8, offset=4, gain=2.0)
    assert (read @ x).tolist() == [8.0, 10.0, 12.0, 14.0, 0.0, 2.0, 4.0, 6.0]


def test_grouped_keys_stand_with_the_first_query_of_their_group():
    q = frame("headwise", heads=4)
    k = frame("tied", heads=2, group=2, role="k")
    assert torch.equal(k[:16], q[:16])
    assert torch.equal(k[16:], q[32:48])
    assert frame("identity", heads=2, group=2)[16].nonzero().item() == 32


def test_unknown_kind_names_the_choices():
    with pytest.raises(ValueError, match="init: no frame kind 'haar'; choose one of headwise"):
        frame("haar")
