/* How many cores this process may use: the smallest of its affinity mask and the CPU quotas of its control groups. */
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "core/size.h"
#include "core/workers.h"

static int64_t affinity_cores(void) {
    /* The kernel refuses a set smaller than its own, so the set grows until it fits. */
    for (int cpus = 1024; cpus <= 1 << 20; cpus *= 2) {
        cpu_set_t *set = CPU_ALLOC((size_t)cpus);
        if (!set) return 1;
        size_t bytes = CPU_ALLOC_SIZE((size_t)cpus);
        bool fits = sched_getaffinity(0, bytes, set) == 0;
        int count = fits ? CPU_COUNT_S(bytes, set) : 0;
        CPU_FREE(set);
        if (fits) return count;
    }
    return 1;
}

/* cgroup v2's cpu.max holds "quota period" or "max period". No file, no limit. */
static int64_t quota_cores_v2(const char *directory) {
    char path[4096 + 64];
    long long quota, period;
    snprintf(path, sizeof path, "/sys/fs/cgroup%s/cpu.max", directory);
    FILE *file = fopen(path, "re");
    if (!file) return INT64_MAX;
    int fields = fscanf(file, "%lld %lld", &quota, &period);
    fclose(file);
    return fields == 2 && quota > 0 && period > 0 ? ra_ceil_div(quota, period) : INT64_MAX;
}

static long long read_number(const char *path) {
    long long number = -1;
    FILE *file = fopen(path, "re");
    if (!file) return -1;
    if (fscanf(file, "%lld", &number) != 1) number = -1;
    fclose(file);
    return number;
}

static int64_t quota_cores_v1(void) {
    long long quota = read_number("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
    long long period = read_number("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
    return quota > 0 && period > 0 ? ra_ceil_div(quota, period) : INT64_MAX;
}

/* The process's own group and each of its parents may have a quota. */
static int64_t quota_cores(void) {
    int64_t cores = ra_min(quota_cores_v2(""), quota_cores_v1());
    char line[4096];
    FILE *file = fopen("/proc/self/cgroup", "re");
    if (!file) return cores;
    while (fgets(line, sizeof line, file)) {
        if (strncmp(line, "0::/", 4) != 0) continue;
        char *path = line + 3;
        path[strcspn(path, "\n")] = '\0';
        for (char *end = path + strlen(path); end > path; end = strrchr(path, '/')) {
            *end = '\0';
            cores = ra_min(cores, quota_cores_v2(path));
        }
    }
    fclose(file);
    return cores;
}

int ra_usable_cores(void) {
    int64_t cores = ra_min(affinity_cores(), quota_cores());
    return (int)ra_max(cores, 1);
}
