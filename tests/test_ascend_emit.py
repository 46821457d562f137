"""What the Ascend backend checks before it emits: each check with a planted fault, and the emitted protocol itself."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator

import pytest
from fa_multi.backends.ascend import hazards, limits, planner
from fa_multi.backends.ascend.emit import emit, scheduled
from fa_multi.backends.ascend.hazards import HazardError
from fa_multi.backends.ascend.instructions import Access, Barrier, Buffer, Flag, If, Instr, Loop, Node
from fa_multi.backends.ascend.limits import LimitError
from fa_multi.backends.ascend.lowering import RoleCode, flag_ids, lower_roles

from fa_multi.masks import Mask
from fa_multi.plan import Plan
from fa_multi.programs import CombineSpec, build
from fa_multi.roles import Roles, cut
from fa_multi.spec import AttentionSpec


def roles_of(head_dim: int = 64, causal: bool = True, **plan: object) -> Roles:
    spec = AttentionSpec("float16", head_dim, head_dim, 0.125, Mask(causal=causal), return_lse=True)
    values = {"skew": 2, "cores": 2, "depth": {"s": 4, "p": 4, "o": 4}} | plan
    cutting = Plan(values.pop("block_m", 128), 128, head_dim, head_dim, **values)
    return cut(build(spec, cutting), cutting, planner.role_of, "global")


def code_of(role: str, **plan: object) -> tuple[RoleCode, Roles]:
    roles = roles_of(**plan)
    return next(c for c in lower_roles(roles, "pto") if c.role == role), roles


# ---- hazards: planted faults ---------------------------------------------------------------------------------------


def without(nodes: list[Node], drop: Callable[[Node], bool]) -> list[Node]:
    """The program with every node that `drop` names left out."""
    kept: list[Node] = []
    for node in nodes:
        if isinstance(node, (Loop, If)):
            node = dataclasses.replace(node, body=without(node.body, drop))
        if not drop(node):
            kept.append(node)
    return kept


def syncs(nodes: list[Node]) -> Iterator[Node]:
    for node in nodes:
        if isinstance(node, (Loop, If)):
            yield from syncs(node.body)
        elif isinstance(node, (Flag, Barrier)):
            yield node


@pytest.mark.parametrize("role", ["cube", "vector"])
@pytest.mark.parametrize("skew", [0, 1, 3])
def test_every_emitted_role_is_proven(role: str, skew: int) -> None:
    code, roles = code_of(role, skew=skew)
    scheduled(code, roles)  # raises if not


@pytest.mark.parametrize("role", ["cube", "vector"])
def test_no_sync_is_idle(role: str) -> None:
    """Leaving out any one flag (with its waits), or all barriers of one pipe, breaks the proof."""
    nodes = scheduled(*code_of(role))
    flags = {(n.source, n.target, n.event) for n in syncs(nodes) if isinstance(n, Flag)}
    assert len(flags) >= 4
    for key in flags:
        with pytest.raises(HazardError, match="nothing orders"):
            hazards.verify(without(nodes, lambda n, k=key: isinstance(n, Flag) and (n.source, n.target, n.event) == k))
    for pipe in {n.pipe for n in syncs(nodes) if isinstance(n, Barrier)}:
        with pytest.raises(HazardError, match=f"nothing orders .*{pipe}"):
            hazards.verify(without(nodes, lambda n, p=pipe: isinstance(n, Barrier) and n.pipe == p))


def test_forgotten_wait_and_forgotten_set() -> None:
    nodes = scheduled(*code_of("vector"))
    key = next((n.source, n.target, n.event) for n in syncs(nodes) if isinstance(n, Flag))

    def half(wait: bool) -> list[Node]:
        return without(nodes, lambda n: isinstance(n, Flag) and n.wait == wait and (n.source, n.target, n.event) == key)

    with pytest.raises(HazardError, match=r"set twice without a wait|left set at the end|nothing orders"):
        hazards.verify(half(wait=True))
    with pytest.raises(HazardError, match="waited for before it is set"):
        hazards.verify(half(wait=False))


A = Buffer("a", "UB", (8,), "float32", 0)
B = Buffer("b", "UB", (8,), "float32", 16)  # shares 16 bytes with a
C = Buffer("c", "UB", (8,), "float32", 64)


def touch(name: str, pipe: str, buffer: Buffer, write: bool) -> Instr:
    return Instr(name, (Access(pipe, buffer, write),))


def test_overlapping_buffers_are_one_hazard() -> None:
    nodes: list[Node] = [touch("load", "MTE2", A, True), touch("add", "V", B, True)]
    with pytest.raises(HazardError, match=r"nothing orders `load` \(MTE2\) before `add` \(V\)"):
        hazards.verify(nodes)
    hazards.verify(hazards.insert(nodes))
    hazards.verify([touch("load", "MTE2", A, True), touch("add", "V", C, True)])


def test_the_next_iteration_is_a_hazard_too() -> None:
    body: list[Node] = [
        touch("load", "MTE2", A, True),
        Flag(False, "MTE2", "V", 2),
        Flag(True, "MTE2", "V", 2),
        touch("add", "V", A, False),
    ]
    hazards.verify(body)
    with pytest.raises(HazardError, match="nothing orders"):
        hazards.verify([Loop("i", "n", body)])


def test_a_branch_orders_nothing_outside() -> None:
    flags: list[Node] = [Flag(False, "MTE2", "V", 2), Flag(True, "MTE2", "V", 2)]
    with pytest.raises(HazardError, match="nothing orders"):
        hazards.verify([touch("load", "MTE2", A, True), If("c", flags), touch("add", "V", A, False)])


def test_same_pipe_needs_a_barrier() -> None:
    nodes: list[Node] = [touch("mul", "V", A, True), touch("add", "V", A, False)]
    with pytest.raises(HazardError, match="nothing orders `mul`"):
        hazards.verify(nodes)
    assert [n for n in hazards.insert(nodes) if isinstance(n, Barrier)] == [Barrier("V")]


@pytest.mark.parametrize("event", [0, 1, 8])
def test_reserved_and_wrong_event_ids(event: int) -> None:
    with pytest.raises(HazardError, match="the id must be in"):
        hazards.verify([Flag(False, "V", "MTE3", event), Flag(True, "V", "MTE3", event)])


def test_event_ids_run_out() -> None:
    buffers = [Buffer(f"b{n}", "UB", (8,), "float32", 32 * n) for n in range(7)]
    first: list[Node] = [touch(f"w{b.name}", "MTE2", b, True) for b in buffers]
    last: list[Node] = [touch(f"r{b.name}", "V", b, False) for b in buffers]
    hazards.verify(hazards.insert(first[:6] + last[:6]))
    with pytest.raises(LimitError, match="more than 6 events are needed at once from pipe MTE2 to V"):
        hazards.insert(first + last)


# ---- limits: planted faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((128, 128, 40), "K = 40 is not a multiple of 16"),
        ((128, 128, 144), "K = 144 is above 128 and not a multiple of it"),
        ((272, 128, 128), "L0A would need 69632 bytes, it has 65536"),
        ((128, 512, 128), "L0B would need 131072 bytes"),
        ((24, 128, 64), "M = 24 is not a multiple of 16"),
    ],
)
def test_products_the_compiler_gets_wrong(shape: tuple[int, int, int], message: str) -> None:
    with pytest.raises(LimitError, match=message):
        limits.check_gemm("s", *shape, "float16")


def test_fp32_operands() -> None:
    with pytest.raises(LimitError, match="float32 operands are not supported"):
        limits.check_gemm("s", 128, 128, 64, "float32")


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (Buffer("x", "UB", (64, 1024), "float32", 0), "UB is full: buffer x ends at byte 262144"),
        (Buffer("x", "L1", (64, 64), "float16", 8), "starts at byte 8 of L1, which takes multiples of 32"),
        (Buffer("x", "L0C", (128, 512), "float32", 0), "L0C is full"),
        (Buffer("x", "UB", (64, 4), "float32", 0), "rows of 4 float32 are not a multiple of 32 bytes"),
    ],
)
def test_buffers(buffer: Buffer, message: str) -> None:
    with pytest.raises(LimitError, match=message):
        limits.check_buffers([buffer], {})


def test_what_the_compiler_adds_counts_too() -> None:
    fits = Buffer("x", "UB", (190, 256), "float32", 0)
    limits.check_buffers([fits], {})
    with pytest.raises(LimitError, match="the limit is 188160"):
        limits.check_buffers([fits], {"UB": 8192})


def test_tiles_too_large_for_the_core() -> None:
    with pytest.raises(LimitError, match=r"(UB|L0C) is full"):
        emit(roles_of(head_dim=256))


def test_depth_beyond_the_flag_counter() -> None:
    with pytest.raises(LimitError, match="channel s: 16 free signals can be outstanding, the hardware counts to 15"):
        emit(roles_of(depth={"s": 16, "p": 16, "o": 16}))
    emit(roles_of(depth={"s": 16, "p": 16, "o": 16}, signal_interval=2))


def test_needs_cores() -> None:
    with pytest.raises(LimitError, match="cores is 0"):
        emit(roles_of(cores=0))


@pytest.mark.parametrize(
    ("sizes", "tasks", "rows", "message"),
    [
        ({}, 1, {"seqlen_k": 1 << 30}, "seqlen_k = 1073741824 is above"),
        ({}, 1 << 31, {}, "2147483648 tasks do not fit 32 bits"),
        ({"heads_q": 1 << 15, "heads_k": 1}, 1, {}, "32768 query heads share a key head"),
    ],
)
def test_sizes_beyond_32_bits(sizes: dict[str, int], tasks: int, rows: dict[str, int], message: str) -> None:
    with pytest.raises(LimitError, match=message):
        limits.check_sizes(sizes, tasks, rows)


def test_flat_tensors_beyond_32_bits() -> None:
    limits.check_flat("lse", (1 << 31) - 1)
    with pytest.raises(LimitError, match="tensor lse: 2147483648 elements do not fit 32 bits"):
        limits.check_flat("lse", 1 << 31)


@pytest.mark.parametrize(
    ("strides", "span", "message"),
    [
        ((0, 32, 0), 64, "a stride of 32 along axis seq cannot address 64 elements"),
        ((0, 64, 0), 1 << 40, "cannot address 1099511627776 elements"),
        ((-64, 64, 64), 64, "negative strides"),
    ],
)
def test_strides_beyond_the_index_arithmetic(strides: tuple[int, int, int], span: int, message: str) -> None:
    by_axis = dict(zip(("batch", "seq", "head"), strides))
    with pytest.raises(LimitError, match=message):
        limits.check_window("q", by_axis, "seq", 64, span)


# ---- the emitted text ----------------------------------------------------------------------------------------------


def test_three_channels_six_flags() -> None:
    roles = roles_of()
    assert [(c.tile.name, c.producer, c.tile.dtype) for c in roles.channels] == [
        ("s", "cube", "float32"),
        ("p", "vector", "float16"),
        ("o", "cube", "float32"),
    ]
    assert sorted(flag_ids(roles).values()) == list(range(6))
    text = emit(roles)
    for (_, kind), flag in flag_ids(roles).items():
        places = 1 if kind == "ready" else 2  # a free flag is also preset at the start and drained at the end
        assert len(re.findall(rf'set_cross_flag\("\w+", {flag}\)', text)) == places
        assert text.count(f"wait_cross_flag({flag})") == places


def test_free_flags_are_preset_and_drained() -> None:
    cube, _ = code_of("cube")
    vector, _ = code_of("vector")
    presets = [n.body[0].text for code in (cube, vector) for n in code.before if isinstance(n, Loop)]
    drains = [n.body[0].text for code in (cube, vector) for n in code.after if isinstance(n, Loop)]
    assert len(presets) == len(drains) == 3
    assert all("free" in t for t in presets + drains)


def test_text_needs_no_device_and_is_stable() -> None:
    assert emit(roles_of()) == emit(roles_of())
    compile(emit(roles_of()), "kernel", "exec")


def test_both_targets_differ_only_in_row_broadcasts() -> None:
    pto, ascendc = emit(roles_of(), "pto").splitlines(), emit(roles_of(), "ascendc").splitlines()
    assert any("row_expand" in line for line in pto)
    assert not any("row_expand" in line for line in ascendc)


def test_mask_only_in_the_masked_phase() -> None:
    text = emit(roles_of())
    at = text.index("if j < stop0:")
    assert at < text.index("T.tile.axpy(")
    assert "stop0 = tile_hi - full_hi" in text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dims", [(8, 8), (32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_supported_head_dims(dtype: str, dims: tuple[int, int]) -> None:
    assert planner.refusal(AttentionSpec(dtype, *dims, 0.1, Mask(causal=True), return_lse=True)) is None


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (
            AttentionSpec("float32", 64, 64, 0.1),
            "q must be float16 or bfloat16 on npu, got float32: float32 runs on the cpu lane",
        ),
        (CombineSpec("float16", 512), "head dim 512 is above 256, the most that the npu kernel holds"),
        (AttentionSpec("float16", 512, 512, 0.1), "head dim 512 is above 256, the most that the npu kernel holds"),
    ],
)
def test_refusals(spec: AttentionSpec, reason: str) -> None:
    assert planner.refusal(spec) == reason
