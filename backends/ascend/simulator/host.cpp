// Host side of the CPU simulation. Per block it runs one cube thread and two vector threads of the emitted kernel, and
// keeps the flags between them (cross-core) and between the pipes of one core (events) as counters. A wait that nobody
// can answer, a counter above the hardware's limit and a flag left set at the end are reported as text, never as a hang.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace {
constexpr int kFlags = 11;        // cross flag ids 0..10 are the user's; the rest belongs to sync_all
constexpr int kOutstanding = 15;  // sets of one id that the hardware can count
constexpr int kEvents = 8;        // event ids per directed pipe pair
const char* const kCore[3] = {"AIC", "AIV0", "AIV1"};
const char* const kPipe[8] = {"S", "V", "MTE1", "MTE2", "MTE3", "M", "ALL", "FIX"};

struct Stop {};  // unwinds one core's thread

struct Block {
  int count[3][kFlags] = {}, most[3][kFlags] = {}, sets[3][kFlags] = {}, waits[3][kFlags] = {};
  int pending[2][kFlags] = {};  // vector sets whose peer has not set yet
};
using EventKey = std::tuple<int, int, int>;  // source pipe, destination pipe, id

std::mutex mu;
std::condition_variable cv;
std::vector<Block> blocks;
std::vector<int> mode0[2][kFlags];  // [cube, vector][flag][core]: sets among all cores of a kind
std::string report;
std::atomic<bool> failed{false};
int block_count, together, delay_us[2];
double timeout_s;
struct { int arrived = 0; long generation = 0; } barriers[3];

thread_local int t_block, t_core = -1;  // core 0 is the cube, 1 and 2 are the vector cores
thread_local std::map<EventKey, int> t_events;
thread_local sigjmp_buf t_fault;

void say(const std::string& text) { report += text + "\n"; }
std::string here() { return "block " + std::to_string(t_block) + " " + kCore[t_core]; }

[[noreturn]] void stop_all(std::unique_lock<std::mutex>& lock, const std::string& text) {
  if (!failed || text.find("timed out") == std::string::npos) say(here() + " " + text);
  failed = true;
  cv.notify_all();
  lock.unlock();
  throw Stop{};
}

void check_id(int flag, const char* what) {
  if (flag >= 0 && flag < kFlags) return;
  std::unique_lock<std::mutex> lock(mu);
  stop_all(lock, std::string(what) + " cross flag " + std::to_string(flag) + ", outside 0.." + std::to_string(kFlags - 1));
}

void bump(int b, int core, int flag) {
  int now = ++blocks[b].count[core][flag];
  if (now > blocks[b].most[core][flag]) blocks[b].most[core][flag] = now;
}

bool wait_until(std::unique_lock<std::mutex>& lock, auto ready) {
  return cv.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return ready() || failed; }) && ready();
}

void waiting_core_report() {  // who else stands still is what a deadlock report needs
  for (int c = 0; c < 3; c++)
    for (int f = 0; f < kFlags; f++)
      if (blocks[t_block].count[c][f])
        say("  at that time " + std::string(kCore[c]) + " has flag " + std::to_string(f) + " = " + std::to_string(blocks[t_block].count[c][f]));
}
}  // namespace

extern "C" {
void pto_cpu_sim_get_execution_context(uint32_t* block, uint32_t* sub, uint32_t* sub_count) {
  *block = t_block;
  *sub = t_core ? t_core - 1 : 0;
  *sub_count = 2;
}

void sim_fail(const char* condition, const char* file, int line) {
  const char* base = strrchr(file, '/');
  std::unique_lock<std::mutex> lock(mu);
  stop_all(lock, std::string("broke a rule of the simulator: ") + condition + " (" + (base ? base + 1 : file) + ":" + std::to_string(line) + ")");
}

void sim_cross_set(int pipe, int flag, int mode) {
  check_id(flag, "sets");
  if (delay_us[t_core > 0]) std::this_thread::sleep_for(std::chrono::microseconds(delay_us[t_core > 0]));
  std::lock_guard<std::mutex> lock(mu);
  Block& k = blocks[t_block];
  k.sets[t_core][flag]++;
  if (mode == 2 && t_core == 0) {
    bump(t_block, 1, flag);
    bump(t_block, 2, flag);
  } else if (mode == 2 || mode == 1) {  // one vector core counts only once its peer has set too
    k.pending[t_core - 1][flag]++;
    if (k.pending[0][flag] && k.pending[1][flag]) {
      k.pending[0][flag]--, k.pending[1][flag]--;
      if (mode == 2) bump(t_block, 0, flag);
      else bump(t_block, 1, flag), bump(t_block, 2, flag);
    }
  } else {  // mode 0: all cubes, or all vector cores
    auto& seen = mode0[t_core > 0][flag];
    seen[t_core ? t_block * 2 + t_core - 1 : t_block]++;
    bool all = true;
    for (int x : seen) all &= x > 0;
    if (all) {
      for (int& x : seen) x--;
      for (int b = 0; b < block_count; b++)
        if (t_core) bump(b, 1, flag), bump(b, 2, flag);
        else bump(b, 0, flag);
    }
  }
  cv.notify_all();
}

void sim_cross_wait(int flag) {
  check_id(flag, "waits for");
  std::unique_lock<std::mutex> lock(mu);
  int& count = blocks[t_block].count[t_core][flag];
  int number = ++blocks[t_block].waits[t_core][flag];
  if (!wait_until(lock, [&] { return count > 0; })) {
    bool first = !failed;
    if (first) say("deadlock:");
    failed = false;  // let every stuck core say where it stands
    say(here() + " timed out waiting for cross flag " + std::to_string(flag) + " (its wait number " + std::to_string(number) + ")");
    if (first) waiting_core_report();
    failed = true;
    cv.notify_all();
    lock.unlock();
    throw Stop{};
  }
  count--;
}

void sim_event(int set, int from, int to, int id) {
  std::string name = std::string(kPipe[from & 7]) + "->" + kPipe[to & 7] + " event " + std::to_string(id);
  int& count = t_events[{from, to, id}];
  const char* wrong = id < 0 || id >= kEvents ? "uses" : set && count ? "sets twice without a wait" : !set && !count ? "waits before any set of" : nullptr;
  if (wrong) {
    std::unique_lock<std::mutex> lock(mu);
    stop_all(lock, std::string(wrong) + " " + name);
  }
  count += set ? 1 : -1;
}

void sim_sync_all(int kind) {  // 0: vector cores, 1: cubes, 2: both
  std::unique_lock<std::mutex> lock(mu);
  if (together < block_count) stop_all(lock, "calls sync_all, so all blocks must run at once: pass together=blocks");
  int need = (kind == 0 ? 2 : kind == 1 ? 1 : 3) * block_count;
  long generation = barriers[kind].generation;
  if (++barriers[kind].arrived == need) {
    barriers[kind].arrived = 0;
    barriers[kind].generation++;
    cv.notify_all();
  } else if (!wait_until(lock, [&] { return barriers[kind].generation != generation; })) {
    stop_all(lock, "timed out in sync_all");
  }
}

typedef void (*entry_t)(uint8_t**, int64_t*);

static struct sigaction old_segv;
static void on_segv(int sig, siginfo_t* info, void* context) {
  if (t_core >= 0) siglongjmp(t_fault, 1);
  if (old_segv.sa_flags & SA_SIGINFO) old_segv.sa_sigaction(sig, info, context);
  else signal(sig, SIG_DFL);
}

static void run_core(int b, int core, entry_t entry, uint8_t** args, int64_t* scalars) {
  t_block = b;
  t_core = core;
  t_events.clear();
  if (sigsetjmp(t_fault, 1)) {
    std::lock_guard<std::mutex> lock(mu);
    say(here() + " touched memory outside every tensor (segmentation fault)");
    failed = true;
    cv.notify_all();
  } else {
    try {
      entry(args, scalars);
      std::lock_guard<std::mutex> lock(mu);
      for (auto& [key, count] : t_events)
        if (count) say(here() + " leaves " + kPipe[std::get<0>(key)] + "->" + kPipe[std::get<1>(key)] + " event " + std::to_string(std::get<2>(key)) + " set at the end"), failed = true;
    } catch (Stop&) {
    }
  }
  t_core = -1;
}

static bool check_end() {
  bool bad = false;
  for (int b = 0; b < block_count; b++)
    for (int f = 0; f < kFlags; f++) {
      std::string where = "block " + std::to_string(b) + " ", flag = " cross flag " + std::to_string(f);
      for (int c = 0; c < 3; c++) {
        if (blocks[b].count[c][f]) say(where + kCore[c] + " leaves" + flag + " at " + std::to_string(blocks[b].count[c][f]) + " at the end"), bad = true;
        if (blocks[b].most[c][f] > kOutstanding) say(where + kCore[c] + flag + " reached " + std::to_string(blocks[b].most[c][f]) + " outstanding sets, the limit is " + std::to_string(kOutstanding)), bad = true;
      }
      for (int v = 0; v < 2; v++)
        if (blocks[b].pending[v][f]) say(where + kCore[v + 1] + " set" + flag + " without its peer"), bad = true;
    }
  return bad;
}

// Runs the blocks, `at_once` of them side by side. Returns 0 when all is well; text gets the report, counts (3*11*2
// ints: core, flag, sets/waits) what block 0 did.
int sim_run(entry_t cube, entry_t vec, int nblocks, int at_once, uint8_t** args, int64_t* scalars, double timeout, int delay_cube_us, int delay_vec_us, char* text, int text_size, int* counts) {
  block_count = nblocks, together = at_once, timeout_s = timeout;
  delay_us[0] = delay_cube_us, delay_us[1] = delay_vec_us;
  failed = false;
  report.clear();
  blocks.assign(nblocks, Block{});
  for (auto& b : barriers) b = {};
  for (int f = 0; f < kFlags; f++) mode0[0][f].assign(nblocks, 0), mode0[1][f].assign(2 * nblocks, 0);
  struct sigaction action = {};
  action.sa_sigaction = on_segv;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &old_segv);
  for (int first = 0; first < nblocks && !failed; first += at_once) {
    std::vector<std::thread> threads;
    for (int b = first; b < nblocks && b < first + at_once; b++)
      for (int c = 0; c < 3; c++) threads.emplace_back(run_core, b, c, c ? vec : cube, args, scalars);
    for (auto& t : threads) t.join();
  }
  sigaction(SIGSEGV, &old_segv, nullptr);
  bool bad = failed || check_end();
  for (int c = 0, i = 0; nblocks && c < 3; c++)
    for (int f = 0; f < kFlags; f++) counts[i++] = blocks[0].sets[c][f], counts[i++] = blocks[0].waits[c][f];
  snprintf(text, text_size, "%s", report.c_str());
  return bad;
}
}
