// After the simulator headers: what they lack or stub out.
#pragma once
#include <cstring>
#undef set_flag
#undef wait_flag
#define set_flag(from, to, id) sim_event(1, from, to, id)
#define wait_flag(from, to, id) sim_event(0, from, to, id)
inline void set_intra_block(int, int) { __builtin_trap(); }
inline void wait_intra_block(int, int) { __builtin_trap(); }
// scalar min and max are built into the device compiler
template <typename A, typename B> constexpr auto min(A a, B b) { return a < b ? a : b; }
template <typename A, typename B> constexpr auto max(A a, B b) { return a < b ? b : a; }
// the device's functions return int64_t; the CPU stubs return uint32_t, which makes (cid * a - b) wrap
#define get_block_idx() ((int64_t)get_block_idx())
#define get_subblockid() ((int64_t)get_subblockid())

namespace pto {
// the simulator's SYNCALL is an empty function
template <SyncCoreType C = SyncCoreType::AIVOnly> inline void SIM_SYNCALL() {
  sim_sync_all(C == SyncCoreType::AIVOnly ? 0 : C == SyncCoreType::Mix ? 2 : 1);
}
}  // namespace pto
#define SYNCALL SIM_SYNCALL

// On-chip memory starts as NaN in every float format, so that a read of what nobody wrote shows in the result.
inline void sim_poison_memory() {
  auto& memory = pto::NPUMemoryModel::Instance();
  char* bases[5] = {memory.GetUBBase(), memory.GetL1Base(), memory.GetL0ABase(), memory.GetL0BBase(), memory.GetL0CBase()};
  for (int i = 0; i < 5; i++) std::memset(bases[i], 0xff, memory.GetSizes()[i]);
}
