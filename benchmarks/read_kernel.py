"""The kernel of the column "read" of decode.py: every byte of two arrays into shared memory and no more, in copies of
16 KiB in memory order. Built and launched as the kernel texts of the CUDA backend are."""

import tilelang.language as T

PASS_CONFIGS = {"tl.disable_thread_storage_sync": True}
ROWS, COLUMNS, SLOTS = 128, 64, 4


def build():
    rows = T.dynamic("rows", "int32")

    @T.prim_func
    def main(A: T.Tensor((rows, COLUMNS), "bfloat16"), B: T.Tensor((rows, COLUMNS), "bfloat16"), blocks: T.int32):
        with T.Kernel(blocks, threads=64) as block:
            tile = T.alloc_shared((2 * SLOTS, ROWS, COLUMNS), "bfloat16")
            ready = T.alloc_barrier([32] * (2 * SLOTS))
            thread = T.get_thread_binding()
            turns = T.truncdiv(T.truncdiv(rows, ROWS) + blocks - 1 - block, blocks)
            for n in T.serial(turns):
                row = (block + n * blocks) * ROWS
                slot = T.truncdiv(thread, 32) * SLOTS + n % SLOTS
                if n >= SLOTS:
                    T.barrier_wait(ready[slot], (n // SLOTS + 1) % 2)
                if thread < 32:
                    T.tma_copy(
                        A[row : row + ROWS, 0:COLUMNS],
                        tile[slot, :, :],
                        barrier=ready[slot],
                        eviction_policy="evict_first",
                    )
                else:
                    T.tma_copy(
                        B[row : row + ROWS, 0:COLUMNS],
                        tile[slot, :, :],
                        barrier=ready[slot],
                        eviction_policy="evict_first",
                    )
                T.barrier_arrive(ready[slot])
            for n in T.serial(T.max(turns - SLOTS, 0), turns):  # what is still on its way
                T.barrier_wait(ready[T.truncdiv(thread, 32) * SLOTS + n % SLOTS], n // SLOTS % 2)

    return main
