// The simulator asserts what the hardware would silently get wrong: report it, do not end the process.
#undef assert
#ifndef SIM_ASSERT_H
#define SIM_ASSERT_H
extern "C" void sim_fail(const char* condition, const char* file, int line);
#endif
#define assert(x) ((x) ? (void)0 : sim_fail(#x, __FILE__, __LINE__))
