"""Variants on the Ascend lane: what their kernels hold, without a device, and what they compute, in the simulator."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import re
import sys
import types

import pytest
import torch
from fa_multi.backends import Work
from fa_multi.backends.ascend import compiler, hazards, planner, runtime
from fa_multi.backends.ascend.emit import emit, scheduled
from fa_multi.backends.ascend.hazards import HazardError
from fa_multi.backends.ascend.instructions import Access, Barrier, Buffer, Flag, Instr, Node
from fa_multi.backends.ascend.lowering import lower_roles
from fa_multi.backends.ascend.runtime import Call, ring_shapes
from fa_multi.backends.ascend.simulator import load
from fa_multi.backends.ascend.simulator.build import Param
from fa_multi.backends.ascend.views import views

import fa_multi
from fa_multi import reference
from fa_multi.accuracy import judge
from fa_multi.masks import Mask
from fa_multi.programs import CombineSpec, Spec
from fa_multi.spec import Addressing, AttentionSpec
from tests.test_ascend_emit import syncs, without

PLAIN = AttentionSpec("float16", 32, 32, 0.125, return_lse=True)


def variant(mask: Mask | None = None, addressing: Addressing | None = None, **extras: object) -> AttentionSpec:
    return dataclasses.replace(PLAIN, mask=mask or Mask(), addressing=addressing or Addressing(), **extras)


SPECS: dict[str, Spec] = {
    "window": variant(Mask(window=(5, 3))),
    "block_causal": variant(Mask(window=(90, None), block_causal=7)),
    "scores": variant(Mask(causal=True), softcap=5.0, alibi=True, sink=True),
    "packed": variant(Mask(causal=True), Addressing("packed", "packed", key_lengths=True)),
    "pages": variant(Mask(causal=True), Addressing("packed", "paged", 48, True, True), alibi=True, sink=True),
    "split": variant(addressing=Addressing("dense", "paged", 16, True, True), split=True),
    "combine": CombineSpec("float16", 40, sink=True),
}


@functools.cache
def text_of(name: str, target: str = "pto") -> str:
    return emit(planner.planned(SPECS[name], "sim"), target)


# ---- the text ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
def test_every_variant_is_proven_and_python(name: str) -> None:
    assert planner.refusal(SPECS[name]) is None
    for target in ("pto", "ascendc"):
        compile(text_of(name, target), name, "exec")


def test_empty_tasks_do_nothing_on_either_core() -> None:
    """Neither sets a flag, so the flags stay balanced; where the grid is exact there is nothing to test."""
    assert text_of("packed").count("if rows > 0:") == 2
    assert "if rows > 0:" not in text_of("window")


def test_pieces_run_into_spare_bytes() -> None:
    """The copy of the last piece clears a block of columns behind its tile: nothing may lie there."""
    cube = next(c for c in lower_roles(planner.planned(SPECS["pages"], "sim"), "pto") if c.role == "cube")
    buffers = {b.name: b for b in cube.buffers if b.memory == "L1"}
    for name in ("q", "k", "v"):
        tile, blocks = buffers[f"{name}_l1"], buffers[f"{name}_l1_blocks"]
        assert blocks.offset == tile.offset
        assert blocks.bytes == tile.bytes + 32 * tile.shape[0]
        assert not [b for b in buffers.values() if b.overlaps(blocks) and b not in (tile, blocks)]


@pytest.mark.parametrize(("size", "pieces"), [(16, True), (96, True), (128, False), (384, False)])
def test_tiles_that_stay_in_their_page_are_one_copy(size: int, pieces: bool) -> None:
    spec = variant(addressing=Addressing("dense", "paged", size, True))
    assert ("if piece_count > 1:" in emit(planner.planned(spec, "sim"))) == pieces


def test_lengths_and_tables_are_read_once_where_they_are_used() -> None:
    code = text_of("pages")
    for read in ("cu_seqlens_q[b]", "cu_seqlens_q[b + 1]", "seqused_k[b]"):
        assert code.count(read) == 2, "once per task and kind of core"
    assert len(re.findall(r"= block_table\[b, piece\]", code)) == code.count("block_table[")


def test_argument_forms() -> None:
    forms = {name: (v.form, v.row_axis) for name, v in views(planner.planned(SPECS["pages"], "sim").program).items()}
    assert forms == {
        "q": ("window", "head"),
        "k": ("window", "slot"),
        "v": ("window", "slot"),
        "cu_seqlens_q": ("numbers", ""),
        "seqused_k": ("numbers", ""),
        "block_table": ("numbers", ""),
        "alibi_slopes": ("numbers", ""),
        "sink": ("numbers", ""),
        "out": ("window", "head"),
        "lse": ("window", "head"),
    }


def test_a_window_wider_than_any_sequence_is_none() -> None:
    far, open_ended = (variant(Mask(causal=True, window=(left, None))) for left in (1 << 31, None))
    assert emit(planner.planned(far, "sim")) == emit(planner.planned(open_ended, "sim"))
    reason = planner.refusal(variant(Mask(block_causal=1 << 31)))
    assert reason == "block_causal = 2147483648 is above 1073741823, what the npu kernel counts to"


def test_an_npu_launch_passes_every_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, whatever their order in the C++: pointers, strides in 64 bits, sizes in 32."""
    spec = SPECS["pages"]
    roles = planner.planned(spec, "a2")
    symbols = [s for v in views(roles.program).values() for s in v.symbols()]
    params = [Param(v.argument, "tensor", "uint8_t") for v in reversed(views(roles.program).values())]
    params += [Param(f"ring_{c.tile.name}", "tensor", "uint8_t") for c in roles.channels]
    params += [Param(name, "scalar", "int32_t") for name in roles.program.sizes()]
    params += [Param(name, "scalar", "int64_t") for name in symbols]
    calls: list[dict[str, object]] = []

    def entry(*arguments: object) -> None:
        calls.append(dict(zip([p.name for p in params], arguments)))

    npu = types.SimpleNamespace(current_stream=lambda: types.SimpleNamespace(npu_stream=77))
    monkeypatch.setitem(sys.modules, "torch_npu", types.SimpleNamespace(npu=npu))
    monkeypatch.setattr(runtime, "_compile_for_device", lambda source, name: (entry, params))
    q, k = normal(1, 20, 6, 32), normal(9, 48, 2, 40)[..., :32]
    cu, used, table = torch.tensor([0, 20]).int(), torch.tensor([100]).int(), torch.zeros(1, 3).int()
    tensors = [q, k, k, cu, used, table, torch.zeros(1, 6), torch.zeros(6), torch.zeros_like(q), torch.zeros(1, 6, 20)]
    runtime.Device().prepare(spec, {"q": q}, {"batch": 1, "max_seqlen_q": 20})(*tensors)
    got = {name: x.value for name, x in calls[0].items()}
    assert got["k_gm"] == k.data_ptr()
    assert got["block_table"] == table.data_ptr()
    assert (got["k_ss"], got["k_sh"], got["k_sb"], got["k_rows"]) == (80, 40, 48 * 80, (1 << 30) + 48)
    assert (got["q_sh"], got["q_ss"], got["q_rows"]) == (32, 192, (1 << 30) + 6)
    assert (got["lse_sh"], got["lse_ss"], got["block_table_pitch"], got["sink_len"]) == (20, 1, 3, 6)
    assert (got["heads_q"], got["heads_k"], got["pages"], got["table_width"]) == (6, 2, 9, 3)
    assert isinstance(calls[0]["k_sb"], ctypes.c_int64)


# ---- planted faults ------------------------------------------------------------------------------------------------


def touch(name: str, pipe: str, write: bool) -> Instr:
    return Instr(name, (Access(pipe, Buffer("a", "UB", (8,), "float32", 0), write),))


def test_the_scalar_unit_is_in_order_but_no_other_pipe_knows() -> None:
    nodes: list[Node] = [touch("a[0]", "S", True), touch("a[1]", "S", True), touch("add", "V", False)]
    with pytest.raises(HazardError, match=r"nothing orders `a\[1\]` \(S\) before `add` \(V\)"):
        hazards.verify(nodes)
    ordered = hazards.insert(nodes)
    hazards.verify(ordered)
    assert not [n for n in ordered if isinstance(n, Barrier)], "a barrier on S is an error of the hardware"
    assert [(n.source, n.target) for n in ordered if isinstance(n, Flag)] == [("S", "V")] * 2


@pytest.mark.parametrize("name", ["pages", "combine"])
def test_no_sync_of_a_variant_is_idle(name: str) -> None:
    """Leaving out any one flag (with its waits), or all barriers of one pipe, breaks the proof."""
    roles = planner.planned(SPECS[name], "sim")
    for code in lower_roles(roles, "pto"):
        nodes = scheduled(code, roles)
        for key in {_key(n) for n in syncs(nodes)}:
            with pytest.raises(HazardError, match="nothing orders"):
                hazards.verify(without(nodes, lambda n, k=key: isinstance(n, (Flag, Barrier)) and _key(n) == k))


def _key(node: Node) -> tuple[object, ...]:
    return (node.source, node.target, node.event) if isinstance(node, Flag) else (node.pipe,)


@pytest.mark.parametrize("divisor", [2, 3, 7, 31, 63, 64])
def test_steps_are_counted_exactly(divisor: int) -> None:
    """As the kernel does it: in fp32, times the reciprocal, half a unit off whole numbers."""
    x = torch.arange(2 * 64 + 1, dtype=torch.float32)
    assert torch.equal(((x + 0.5) * torch.tensor(1.0 / divisor)).floor(), (x.long() // divisor).float())


@pytest.mark.parametrize("group", [2, 7, 100, 1 << 14])
def test_rows_of_a_group_are_counted_exactly(group: int) -> None:
    x = torch.arange(group + 64, dtype=torch.float32)
    for quotient in ((x + 0.5) / group, torch.nextafter((x + 0.5) / group, torch.tensor(math.inf))):
        assert torch.equal(quotient.floor(), (x.long() // group).float())


def test_splits_fill_the_cores_and_no_more() -> None:
    spec = variant(addressing=Addressing("dense", "dense", 0, True, True))

    def splits(batch: int, keys: int) -> int:
        return planner.choose_splits(spec, "a2", Work(batch, 1, keys, 8, 1, False))

    assert [splits(batch, 1 << 16) for batch in (1, 4, 24, 1 << 14)] == [24, 6, 1, 1]
    assert [splits(1, keys) for keys in (1, 1000, 4096)] == [1, 2, 8]


# ---- in the simulator ----------------------------------------------------------------------------------------------


def agree(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> None:
    results = fa_multi.attention(q, k, v, return_lse=True, device="npu-sim", **options)
    golden, naive = (reference.attention(q, k, v, dtype=d, **options) for d in (torch.float64, q.dtype))
    for verdict in map(judge, results, golden, naive):
        assert verdict.ok, str(verdict)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape).half()


LENGTHS = [(40, 70), (70, 40), (1, 70), (300, 560)]


@pytest.mark.sim
@pytest.mark.parametrize("options", [{"window_size": (5, 3)}, {"window_size": (150, -1), "block_causal": 7}])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_intervals(lengths: tuple[int, int], options: dict[str, object]) -> None:
    """Windows smaller than a tile, whole tiles and whole rows that see nothing, tiles masked at both ends."""
    agree(normal(2, lengths[0], 2, 32), normal(2, lengths[1], 1, 32), normal(2, lengths[1], 1, 32), **options)


@pytest.mark.sim
@pytest.mark.parametrize("lengths", LENGTHS)
def test_scores(lengths: tuple[int, int]) -> None:
    q, k, v = normal(2, lengths[0], 4, 32), normal(2, lengths[1], 2, 32), normal(2, lengths[1], 2, 32)
    sink = torch.tensor([math.inf, 1.0, -math.inf, 30.0])
    agree(q, k, v, causal=True, softcap=5.0, alibi_slopes=torch.rand(2, 4), sink=sink)


def packed(lengths_q: list[int], lengths_k: list[int]) -> tuple[list[torch.Tensor], dict[str, object]]:
    cu = [torch.tensor([0, *n]).cumsum(0).int() for n in (lengths_q, lengths_k)]
    tensors = [normal(sum(n) + 9, heads, 32) for n, heads in ((lengths_q, 2), (lengths_k, 1), (lengths_k, 1))]
    keywords = {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1], "max_seqlen_q": 400, "max_seqlen_k": 400}
    return tensors, {**keywords, "causal": True, "return_lse": True, "device": "npu-sim"}


@pytest.mark.sim
def test_packed_with_empty_tasks_and_nan_around() -> None:
    lengths = [0, 140, 0, 1, 33], [7, 150, 3, 0, 200]
    used = torch.tensor([7, 120, 1, 0, 200]).int()
    (q, k, v), keywords = packed(*lengths)
    clean = fa_multi.attention_varlen(q, k, v, seqused_k=used, **keywords)
    begin = 0
    for n, u in zip(lengths[1], used.tolist()):
        for x in (k, v):
            x[begin + u : begin + n] = math.nan
        begin += n
    for x in (q[174:], k[360:], v[360:]):
        x[:] = math.nan
    dirty = fa_multi.attention_varlen(q, k, v, seqused_k=used, **keywords)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty))
    one, one_lse = reference.attention(q[:140][None], k[7:127][None], v[7:127][None], causal=True)
    torch.testing.assert_close(clean[0][:140].double(), one[0], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(clean[1][:, :140].double(), one_lse[0], rtol=1e-5, atol=1e-5)
    assert bool((clean[0][174:] == 0).all())
    assert bool((clean[1][:, 174:] == -math.inf).all())


def paged_inputs(size: int, sq: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    lengths, width = [0, 5, 700], -(-700 // size) + 1
    table = torch.randperm(3 * width + 2)[: 3 * width].view(3, width).int()
    tensors = [normal(3, sq, 6, 32), normal(3 * width + 2, size, 2, 32), normal(3 * width + 2, size, 2, 32)]
    return tensors, {"block_table": table, "cache_seqlens": torch.tensor(lengths).int()}


@pytest.mark.sim
@pytest.mark.parametrize("sq", [1, 30])
def test_pages_groups_and_splits_agree_with_the_cpu_lane(sq: int) -> None:
    (q, k, v), keywords = paged_inputs(48, sq)
    options = {**keywords, "causal": True, "sink": torch.randn(6), "return_lse": True}
    want = fa_multi.attention_paged(q, k, v, num_splits=1, **options)
    for splits in (3, 50):
        got = fa_multi.attention_paged(q, k, v, num_splits=splits, device="npu-sim", **options)
        torch.testing.assert_close(got[0], want[0], rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.sim
def test_pages_past_2_to_the_31_elements() -> None:
    """The kernels of the test above, over a pool of 4 GiB of which only the used pages are ever touched."""
    (q, k, v), keywords = paged_inputs(48, 1)
    pool, far = torch.empty(2100 << 20, dtype=torch.float16), 1 << 20
    wide_k, wide_v = (pool[at:].as_strided((2099, 48, 2, 32), (far, 64, 32, 1)) for at in (0, far // 2))
    for x, wide in ((k, wide_k), (v, wide_v)):
        wide[-len(x) :] = x
    options = {"causal": True, "sink": torch.randn(6), "return_lse": True, "num_splits": 3, "device": "npu-sim"}
    want = fa_multi.attention_paged(q, k, v, **keywords, **options)
    moved = {**keywords, "block_table": keywords["block_table"] + 2099 - len(k)}
    got = fa_multi.attention_paged(q, wide_k, wide_v, **moved, **options)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.sim
def test_a_planted_wrong_piece_shows() -> None:
    """The same kernel with every piece one row off."""
    spec = variant(addressing=Addressing("dense", "paged", 48, True), return_lse=False)
    roles = planner.planned(spec, "sim")
    (q, k, v), keywords = paged_inputs(48, 1)
    code = compiler.lower(emit(roles), name="pages")
    sound, off = (load(x, "pages") for x in (code, re.sub(r"at = (\(.*\));", r"at = \1 + 1;", code)))
    results = []
    for kernel in (sound, off):
        out = torch.zeros(3, 1, 6, 32).half()
        rings = [torch.full(shape, math.nan, dtype=dtype) for shape, dtype in ring_shapes(roles)]
        call = Call(roles, (q, k, v, keywords["cache_seqlens"], keywords["block_table"], out), {})
        kernel.run(roles.plan.cores, *call.arguments(kernel.params, rings))
        results.append(out)
    want = fa_multi.attention_paged(q, k, v, softmax_scale=0.125, **keywords)
    torch.testing.assert_close(results[0], want, rtol=2e-3, atol=2e-3)
    assert not torch.allclose(results[1], want, rtol=2e-2, atol=2e-2)


@pytest.mark.sim
@pytest.mark.parametrize("name", ["block_causal", "scores", "pages", "combine"])
def test_the_other_target_lowers(name: str) -> None:
    assert "AscendC::" in compiler.lower(text_of(name, "ascendc"), target="ascendc", name=name)
