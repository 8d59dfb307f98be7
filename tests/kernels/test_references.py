"""The references say what the kernels mean, so they are held against Hugging Face's formulas and plain statistics."""

import subprocess
import sys

import pytest
import torch

from headrace.kernels.filter import weights_reference
from headrace.kernels.gated_delta import DeltaHeads, DeltaWeights, Places
from headrace.kernels.paged import Sequences
from headrace.kernels.rotary import rotated
from headrace.kernels.sampling import hash_bits_reference
from headrace.kernels.table import REFERENCE_KERNELS as KERNELS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rms_norm_rounds_as_hugging_face_does(dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    theirs = LlamaRMSNorm(96, eps=1e-5).to(dtype)
    torch.nn.init.normal_(theirs.weight)
    x = torch.randn(70, 96).to(dtype)
    ours, expected = KERNELS.rms_norm(x, theirs.weight.data, 1e-5), theirs(x).detach()
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(ours, expected, rtol=4 * ulp, atol=ulp)
    if dtype != torch.float32:
        # A sum in another order may tip a rare rounding; multiplying before rounding would tip a quarter of them.
        assert (ours != expected).float().mean() < 0.01


@pytest.mark.parametrize("joined", [True, False], ids=["views of one tensor", "apart"])
def test_rotary_turns_as_hugging_face_does(joined):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k, v = torch.randn(6, 8, 16).split((4, 2, 2), dim=1)
    if not joined:
        q, k = q.clone(), k.clone()
    angles, positions = torch.rand(32, 8) * 6, torch.randint(0, 32, (6,))
    cache = torch.zeros(2, 3, 4, 2, 16)
    slots = torch.tensor([0, 5, -1, 11, 7, 2])
    original = k.clone()
    out = KERNELS.rotary_and_cache(q, k, v, torch.cat((angles.cos(), angles.sin()), dim=-1), positions, cache, slots)
    both = torch.cat((angles, angles), dim=-1)[positions]
    expected_q, expected_k = apply_rotary_pos_emb(q[None], k[None], both.cos(), both.sin(), unsqueeze_dim=1)
    torch.testing.assert_close(out, expected_q[0])
    assert torch.equal(k, original)
    written = slots >= 0
    flat = cache.view(2, 12, 2, 16)
    torch.testing.assert_close(flat[0, slots[written]], expected_k[0, written])
    torch.testing.assert_close(flat[1, slots[written]], v[written])
    assert flat[:, [1, 3, 4, 6, 8, 9, 10]].abs().sum() == 0


def test_rotary_turns_tensors_that_merely_lie_side_by_side_in_memory():
    memory = bytearray(torch.randn(1, 4, 16).numpy().tobytes())
    q, k = (torch.frombuffer(memory, dtype=torch.float32, count=32, offset=start).view(1, 2, 16) for start in (0, 128))
    angles = torch.rand(2, 1, 1, 16)
    turned = rotated(q, k, angles, None, None, None, 1e-6, interleaved=False)
    apart = rotated(q.clone(), k.clone(), angles, None, None, None, 1e-6, interleaved=False)
    assert all(map(torch.equal, turned, apart))


def test_hash_bits_are_balanced_and_change_with_every_bit_of_the_seed():
    seeds, position = torch.tensor([77]), torch.tensor([5])
    plain = hash_bits_reference(seeds, position, 4096)
    assert plain.min() >= 0
    assert plain.max() < 2**32
    for bit in range(32):
        share = ((plain >> bit) & 1).double().mean()
        assert abs(share - 0.5) < 0.05
    for bit in range(64):
        flipped = hash_bits_reference(seeds ^ torch.tensor(1).bitwise_left_shift(bit), position, 4096)
        changed = sum(((plain ^ flipped) >> place & 1).double().mean() for place in range(32))
        assert 14 < changed < 18


def brute_filter(logits, top_k, top_p, min_p):
    """Token ids kept, one row, straight from the definitions."""
    probs = logits.double().softmax(0)
    kept = {i for i in range(len(logits)) if probs[i] >= min_p * probs.max() and logits[i] > float("-inf")}
    if 0 < top_k < len(kept):
        kth = sorted((float(logits[i]) for i in kept), reverse=True)[top_k - 1]
        kept = {i for i in kept if logits[i] >= kth}
    total = sum(float(probs[i]) for i in kept)
    if top_p < 1:
        above = {i: sum(float(probs[j]) for j in kept if logits[j] > logits[i]) / total for i in kept}
        kept = {i for i in kept if above[i] < top_p or logits[i] == max(logits)}
    return kept


def test_filter_floor_keeps_what_the_definitions_say():
    logits = torch.randn(40, 24).mul(2).round(decimals=1)  # rounded, so that ties occur
    logits[3, 5:] = float("-inf")
    temperature = torch.rand(40) * 2 + 0.2
    top_k = torch.randint(-1, 26, (40,))
    top_p, min_p = torch.rand(40), torch.rand(40) * 0.3
    top_p[::4], min_p[::3], top_p[1] = 1.0, 0.0, 0.0
    floor = KERNELS.filter_floor(logits, temperature, top_k, top_p, min_p)
    for row in range(40):
        kept = {i for i in range(24) if logits[row, i] >= floor[row] and logits[row, i] > float("-inf")}
        expected = brute_filter(logits[row] / temperature[row], int(top_k[row]), float(top_p[row]), float(min_p[row]))
        assert kept == expected


def test_weights_are_exponentials_and_never_rise():
    distance = torch.cat((torch.linspace(0, 32, 1 << 17), torch.tensor([1e30, float("inf")])))
    weights = weights_reference(distance[None], torch.tensor([0.8]))[0]
    assert weights[0] == 1 << 40
    assert (weights.diff() <= 0).all()
    expected = (-distance.double() / 0.8).exp() * 2.0**40
    torch.testing.assert_close(weights.double(), expected, rtol=4e-6, atol=2.0)


def test_references_load_and_run_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from headrace.kernels.table import REFERENCE_KERNELS, select_kernels\n"
        "from headrace.kernels._triton import HAS_TRITON\n"
        "from headrace.attention.table import load_backend\n"
        "assert not HAS_TRITON and select_kernels('cpu') is REFERENCE_KERNELS\n"
        "assert load_backend('TORCH_SDPA').name == 'TORCH_SDPA'\n"
        "print(select_kernels('cpu').gate_and_mul(torch.ones(1, 4)).shape)\n"
        "try:\n    select_kernels('cuda')\nexcept RuntimeError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([1, 2])" in done.stdout
    assert "needs Triton" in done.stdout


@pytest.mark.parametrize("in_turn", [False, True], ids=["in chunks", "token by token"])
@pytest.mark.parametrize("slots", [1, 3])
def test_a_gated_delta_net_computes_what_hugging_face_does(in_turn, slots):
    """A prompt in two steps, cut within a chunk, then a decode; where several states are kept, decodes of which the
    last tokens were wrong guesses come first."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = Qwen3NextConfig(
        hidden_size=24, num_hidden_layers=1, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=8,
        linear_value_head_dim=12, linear_conv_kernel_dim=4, layer_types=["linear_attention"],
    )  # fmt: skip
    theirs = Qwen3NextGatedDeltaNet(config, 0)
    torch.nn.init.normal_(theirs.norm.weight)
    theirs.out_proj = torch.nn.Identity()
    x, apart = torch.randn(150, 24), 2 * 8 + 2 * 3 * 12
    heads = DeltaHeads(2, 6, 8, 12, 4, Places(0, 8, 16, 16 + 36, apart, apart, 0, 3, 6), slots)
    weights = DeltaWeights(theirs.conv1d.weight[:, 0], theirs.A_log, theirs.dt_bias, theirs.norm.weight, 1e-6)
    projected, gates = theirs.in_proj_qkvz(x), theirs.in_proj_ba(x)
    states, found = torch.full((3, heads.numbers), torch.nan), []
    table, row = torch.tensor([[0], [2]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    with torch.inference_mode():
        guesses = ((90, 93, 91), (91, 94, 93), (93, 95, 94)) if slots > 1 else ((90, 92, 92), (92, 94, 94))
        for begin, end, right in ((0, 90, 90), *guesses, (94, 149, 149), (149, 150, 150)):
            wrong = (torch.arange(begin, end) >= right)[:, None]
            step = (
                projected[begin:end] + wrong,
                gates[begin:end] - wrong.float(),
                heads,
                weights,
                states,
                Sequences(table, row, torch.tensor([0, end - begin]).int(), torch.tensor([end]).int()),
            )
            more = KERNELS.gated_delta_scan(*step, 0, None, in_turn) if end < 150 else KERNELS.gated_delta_step(*step)
            found.append(more[: right - begin])
        # 150 tokens of sums, then a norm that divides by what may be small: 3.2e-5 is the most of 200 draws
        torch.testing.assert_close(torch.cat(found), theirs(x[None])[0], rtol=1e-4, atol=2e-4)
    assert states[:2].isnan().all()
