// Before the simulator headers: the hooks into the host, and what the device compiler has built in.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
extern "C" void sim_cross_set(int pipe, int flag, int mode);
extern "C" void sim_cross_wait(int flag);
extern "C" void sim_sync_all(int kind);
extern "C" void sim_event(int set, int from, int to, int id);
inline void set_ffts_base_addr(uint64_t) {}
inline void ffts_cross_core_sync(int pipe, uint64_t config) { sim_cross_set(pipe, config >> 8, (config >> 4) & 0x3); }
inline void wait_flag_dev(int flag) { sim_cross_wait(flag); }
