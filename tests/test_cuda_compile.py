"""The real compilers accept the CUDA texts: no GPU, but TileLang and nvcc."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fa_multi.backends import Work
from fa_multi.backends.cuda import emit, emit_ops, inspection, limits, planner, runtime

import fa_multi
from fa_multi.masks import Mask
from fa_multi.spec import Addressing, AttentionSpec

compiled = pytest.mark.cuda_compile

DENSE = Addressing()
HEAD_DIMS = [(d, d) for d in planner.PADDED] + [(192, 128), (72, 40)]
PORTABLE = [("sm_80", 128, True), ("sm_90a", 128, False), ("sm_100a", 40, True), ("sm_120a", 256, True)]


def spec(
    d: int, dv: int, causal: bool = True, dtype: str = "bfloat16", lse: bool = True, addressing: Addressing = DENSE
) -> AttentionSpec:
    return AttentionSpec(dtype, d, dv, d**-0.5, Mask(causal=causal), lse, addressing=addressing)


@compiled
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("d", "dv", "lse"), [*((d, dv, True) for d, dv in HEAD_DIMS), (256, 256, False)])
def test_tuned_variants(d: int, dv: int, lse: bool, causal: bool) -> None:
    s = spec(d, dv, causal, "float16" if d == 96 else "bfloat16", lse)
    report = inspection.compile_cubin(s.name(), emit.lower_roles(s).source, limits.ROLES_ARCH)
    assert report.cubin
    assert report.spill_bytes == 0
    assert report.warnings == ()
    assert 0 < report.shared_bytes <= limits.SHARED_BYTES[limits.ROLES_ARCH]


PAGED_16 = Addressing("dense", "paged", 16, key_lengths=True, pack_group=True)
ADDRESSED = {
    "packed": spec(128, 128, addressing=Addressing("packed", "packed")),
    "packed full d64": spec(64, 64, causal=False, lse=False, addressing=Addressing("packed", "packed")),
    "pages of 16, split": replace(spec(128, 128, causal=False, addressing=PAGED_16), split=True),
    "pages of 48 d96": spec(96, 96, addressing=replace(PAGED_16, page_size=48)),
    "chunks": spec(64, 64, addressing=Addressing("packed", "paged", 32, key_lengths=True)),
    "pages of 1, heads folded": spec(128, 128, addressing=replace(PAGED_16, page_size=1, fold_heads=8)),
    "cache, heads folded, split": replace(
        spec(64, 64, addressing=Addressing(key_lengths=True, pack_group=True, fold_heads=2)), split=True
    ),
    "cache": spec(128, 128, causal=False, lse=False, addressing=Addressing(key_lengths=True, pack_group=True)),
}


@compiled
@pytest.mark.parametrize("name", ADDRESSED)
def test_packed_and_paged_role_form(name: str) -> None:
    s = ADDRESSED[name]
    assert emit.has_roles(s, limits.ROLES_ARCH)
    lowered = emit.lower_roles(s)
    report = inspection.compile_cubin(s.name(), lowered.source, limits.ROLES_ARCH)
    assert report.spill_bytes <= 32, "the loaders have few registers; the loop over keys has none to spill"
    assert report.warnings == ()
    source, _ = inspection.lower(s.name(), lowered.source, limits.ROLES_ARCH)
    barriers = re.findall(r"__sync_thread_partial\(\(*(.*?), \d+\)", source)
    own = [b for b in barriers if not b.isdigit() or int(b) >= 8]
    assert barriers == own, "a barrier of the compiler among warpgroups that take turns waits for ever"


def test_pages_without_boxes_take_the_portable_form() -> None:
    for size, roles in ((1, False), (4, False), (8, True), (16, True), (80, True), (256, True)):
        s = spec(64, 64, addressing=replace(PAGED_16, page_size=size))
        assert emit.lower(s, "sm_90a").form == ("roles" if roles else "portable")


def work(batch: int, keys: int, queries: int = 1, heads_q: int = 32, heads_k: int = 8, foldable: bool = True) -> Work:
    return Work(batch, queries, keys, heads_q, heads_k, foldable)


def divided(page_size: int, work: Work, d: int = 128, arch: str = "sm_90a") -> tuple[AttentionSpec, int]:
    group = work.heads_q > work.heads_k
    addressing = Addressing("dense", "paged" if page_size else "dense", page_size, True, pack_group=group)
    return runtime.CudaBackend().divide(spec(d, d, causal=False, lse=False, addressing=addressing), work, 0, arch)


def test_heads_are_folded_where_that_alone_makes_boxes_or_rows_are_short() -> None:
    def fold(*args: Any, **options: Any) -> int:
        return divided(*args, **options)[0].addressing.fold_heads

    assert [fold(page, work(64, 4096)) for page in (0, 1, 4, 8, 16)] == [1, 8, 8, 1, 1]
    assert [fold(16, work(batch, 4096), d=64) for batch in (1, 7, 8, 64)] == [1, 1, 8, 8]
    assert fold(1, work(64, 4096), arch="sm_80") == 1, "boxes are Hopper's"
    assert fold(1, work(64, 4096, foldable=False)) == 1
    assert [fold(1, work(64, 4096, queries=n)) for n in (2, 3)] == [8, 1], "64 rows to a tile"
    assert [fold(1, work(64, 4096, heads_q=n, heads_k=n)) for n in (1, 4, 8, 24, 32)] == [1, 1, 8, 1, 32]


def test_a_head_by_itself_takes_the_plan_for_few_queries() -> None:
    for queries, few in ((1, True), (32, True), (33, False)):
        chosen, _ = divided(16, work(64, 4096, queries=queries, heads_q=8))
        assert chosen.addressing.pack_group == few


def test_blocks_have_equally_many_tasks_where_that_idles_few_multiprocessors() -> None:
    assert [planner.even_blocks(n, 132) for n in (512, 1024, 520, 132, 133, 300)] == [128, 128, 130, 132, 132, 132]
    assert planner.even_blocks(7, 7) == 7


def test_splits_fill_the_multiprocessors() -> None:
    def splits(batch: int, keys: int, page_size: int = 0) -> int:
        return divided(page_size, work(batch, keys))[1]

    assert [splits(b, 32768, page_size=1) for b in (1, 8, 64)] == [128, 16, 2], "a task for all heads"

    assert [splits(b, 32768) for b in (1, 2, 4, 8)] == [16, 8, 4, 2], "128 of 132 multiprocessors, in one wave"
    assert splits(64, 8192) == 1, "many tasks need no splits"
    assert splits(1, 10) == 1, "a single tile cannot be split"
    assert splits(1, 200) <= 4, "no more splits than tiles"


@compiled
@pytest.mark.parametrize(("arch", "d", "aligned"), PORTABLE)
def test_portable_form(arch: str, d: int, aligned: bool) -> None:
    s = spec(d, d)
    report = inspection.compile_cubin(s.name(), emit.lower_portable(s, arch, aligned).source, arch)
    assert report.cubin
    assert report.shared_bytes <= limits.SHARED_BYTES[arch]


@compiled
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_portable_form_of_packed_queries_against_pages(arch: str) -> None:
    s = replace(spec(64, 64, addressing=replace(PAGED_16, queries="packed", page_size=1)), split=True)
    lowered = emit.lower_portable(s, arch, True)
    assert ("T.pdl_sync()" in lowered.source) == (arch == "sm_90a"), "there is no waiting inside before sm_90"
    assert inspection.compile_cubin(s.name(), lowered.source, arch).cubin


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FA_MULTI_CACHE", str(tmp_path))
    return tmp_path


@compiled
def test_a_second_process_calls_no_compiler(cache: Path, tmp_path: Path) -> None:
    s = spec(32, 32, causal=False, lse=False)
    text, before = emit.lower_roles(s).source, runtime.compilations()
    library = runtime.compile_text(s.name(), text, "sm_90a")
    assert runtime.compile_text(s.name(), text, "sm_90a") == library
    assert runtime.compilations() == before + 1
    script = (
        "from fa_multi.backends.cuda import runtime; import sys; from pathlib import Path\n"
        "text = Path(sys.argv[1]).read_text()\n"
        "runtime.load(sys.argv[2], text, 'sm_90a')\n"
        "assert runtime.compilations() == 0"
    )
    source = next((cache / runtime.KIND).glob("*.py"))
    empty = tmp_path / "no_compilers"
    empty.mkdir()
    subprocess.run(
        [sys.executable, "-c", script, str(source), s.name()], check=True, env={**os.environ, "PATH": str(empty)}
    )


def views(batch: int, seq: int, heads: int, d: int) -> list[torch.Tensor]:
    """The same shape in several layouts that TMA takes."""
    dense = torch.zeros(batch, seq, heads, d, dtype=torch.bfloat16)
    packed = torch.zeros(batch, seq, 3, heads, d, dtype=torch.bfloat16)
    return [
        dense,
        dense.transpose(1, 2).contiguous().transpose(1, 2),
        packed[:, :, 1],
        dense.as_strided(dense.shape, dense.stride()),
    ]


def test_sizes_and_strides_are_arguments() -> None:
    """One text for every shape and layout: the tensors do not reach the text at all, alignment apart."""
    s = spec(64, 64)
    texts = set()
    for batch, seq, heads in ((1, 1, 1), (2, 100, 6), (7, 4096, 40)):
        for x in views(batch, seq, heads, 64):
            assert runtime.takes_tma(x)
            texts.add(emit.lower(s, "sm_90a", aligned=runtime.aligned(x), tma=runtime.takes_tma(x)).source)
    assert len(texts) == 1


def test_what_tma_takes() -> None:
    x = torch.zeros(2, 10, 4, 64, dtype=torch.bfloat16)
    assert runtime.takes_tma(x)
    assert runtime.takes_tma(x[:1].as_strided((1, 10, 4, 64), (3, 256, 64, 1))), (
        "a stride of an axis of size 1 is unused"
    )
    expanded = x[:, :, :1].expand(2, 10, 4, 64)
    assert runtime.aligned(expanded)
    assert not runtime.takes_tma(expanded), "TMA refuses a stride of 0"
    odd = torch.zeros(2, 10, 4, 65, dtype=torch.bfloat16)[..., :64]
    assert not runtime.aligned(odd)
    assert not runtime.aligned(torch.zeros(2 * 10 * 4 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 10, 4, 64))


@pytest.mark.parametrize(("capability", "arch"), [((8, 0), "sm_80"), ((9, 0), "sm_90a"), ((12, 0), "sm_120a")])
def test_architecture_names(capability: tuple[int, int], arch: str) -> None:
    assert limits.arch_of(capability) == arch
    assert limits.unknown_arch(arch) is None


def test_old_architectures_are_refused_by_name() -> None:
    assert "compute capability 8.0" in str(limits.unknown_arch("sm_75"))
    assert "sm_91" in str(limits.unknown_arch("sm_91"))


def test_what_does_not_fit_is_said_in_bytes() -> None:
    s = spec(256, 256)
    program = emit.lower_roles(s).program
    with pytest.raises(limits.LimitError, match=r"sm_120a: \d+ bytes needed \(q 4 x \d+.*the limit is 101376"):
        limits.check_shared(((t, 4) for t in emit_ops.operands(program)), "sm_120a")


def test_text_needs_no_dsl() -> None:
    """Printing imports neither TileLang nor TVM."""
    script = (
        "import sys, torch, fa_multi\n"
        "x = torch.zeros(1, 16, 2, 64, dtype=torch.bfloat16)\n"
        "assert 'wgmma_gemm' in fa_multi.lower(x, x, x, device='cuda', arch='sm_90a').source\n"
        "assert 'T.gemm' in fa_multi.lower(x, x, x, device='cuda', arch='sm_80').source\n"
        "assert not {'tilelang', 'tvm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_form_says_which_it_is() -> None:
    x = torch.zeros(1, 16, 2, 64, dtype=torch.bfloat16)
    assert fa_multi.lower(x, x, x, device="cuda", arch="sm_90a").form == "roles"
    assert fa_multi.lower(x, x, x, device="cuda", arch="sm_89").form == "portable"
