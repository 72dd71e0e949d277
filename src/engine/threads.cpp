#include "engine/threads.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

namespace pagedkv {
namespace {

// The CPU quota of this process's cgroup in cores; 0: none. cgroup v2 says "max 100000" or "150000 100000".
double cgroup_cores(const std::string& root) {
  std::ifstream v2(root + "/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (v2 >> quota >> period && quota != "max" && period > 0)
    return std::atof(quota.c_str()) / period;
  std::ifstream q(root + "/sys/fs/cgroup/cpu/cpu.cfs_quota_us"),
      p(root + "/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  double us = 0;
  if (q >> us && p >> period && us > 0 && period > 0) return us / period;
  return 0;
}

}  // namespace

int usable_cores(const std::string& root) {
  int cores = static_cast<int>(std::thread::hardware_concurrency());
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) cores = CPU_COUNT(&set);
  const double quota = cgroup_cores(root);
  if (quota > 0) cores = std::min(cores, static_cast<int>(std::ceil(quota)));
  return std::max(1, cores);
}

int default_num_threads() {
  const int cores = usable_cores();
  double load = 0;
  if (getloadavg(&load, 1) != 1) load = 0;
  return std::clamp(static_cast<int>(std::lround(cores - load)), 1, cores);
}

}  // namespace pagedkv
