#include "runtime.h"

#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <vector>

#include <sys/mman.h>
#include <ucontext.h>

namespace fibers {
namespace {

constexpr size_t STACK = 128 << 10;
constexpr uint MAX_THREADS = 1024;

enum State { READY, WAITING, DONE };

struct Simdgroup {
    WaitPoint wait_point;
    uint arrived = 0;
    Slots slots;
};

struct Group {
    uint threads = 0, width = 0, current = 0, done = 0;
    bool descending = false;
    void (*body)(void*, uint) = nullptr;
    void* data = nullptr;
    unsigned char* stacks = nullptr;
    uint started = 0;
    ucontext_t main_context, fiber_contexts[MAX_THREADS];
    jmp_buf main, fibers[MAX_THREADS];
    State states[MAX_THREADS];
    WaitPoint wait_point;
    uint arrived = 0;
    std::vector<Simdgroup> simdgroups;
    char error[512];
    bool failed = false;

    ~Group() {
        if (stacks) munmap(stacks, STACK * MAX_THREADS);
    }
};

Group& group() {
    static thread_local Group instance;
    return instance;
}

[[noreturn]] void return_to_run(Group& g) { _longjmp(g.main, 1); }

// Switches to the next ready fiber. If none is ready but some are not done, the threads have diverged.
void switch_fiber(Group& g) {
    if (_setjmp(g.fibers[g.current])) return;
    for (uint i = 1; i <= g.threads; i++) {
        uint next = (g.current + (g.descending ? g.threads - i : i)) % g.threads;
        if (g.states[next] == READY) {
            g.current = next;
            _longjmp(g.fibers[next], 1);
        }
    }
    if (g.done < g.threads) {
        WaitPoint point = g.wait_point;
        for (auto& simdgroup : g.simdgroups) if (simdgroup.arrived) point = simdgroup.wait_point;
        g.failed = true;
        snprintf(g.error, sizeof g.error, "some threads wait at %s, line %d, which others never reach",
            point.operation, point.line);
    }
    return_to_run(g);
}

// Main loop of a fiber: one threadgroup after another.
void fiber_main() {
    Group& g = group();
    for (;;) {
        g.body(g.data, g.current);
        g.states[g.current] = DONE;
        g.done++;
        switch_fiber(g);
    }
}

void start(Group& g, uint i) {
    ucontext_t& context = g.fiber_contexts[i];
    getcontext(&context);
    context.uc_stack.ss_sp = g.stacks + STACK * i;
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    // The first switch to a fiber only saves its context.
    makecontext(&context, reinterpret_cast<void (*)()>(+[]() {
        Group& g = group();
        if (!_setjmp(g.fibers[g.current])) _longjmp(g.main, 1);
        fiber_main();
    }), 0);
    g.current = i;
    if (!_setjmp(g.main)) setcontext(&context);
}

[[noreturn]] void fail_divergent(const WaitPoint& a, const WaitPoint& b) {
    Group& g = group();
    g.failed = true;
    snprintf(g.error, sizeof g.error, "some threads are at %s, line %d, others at %s, line %d", a.operation,
        a.line, b.operation, b.line);
    return_to_run(g);
}

}

const char* run(uint threads, uint width, bool descending, void (*body)(void*, uint), void* data) {
    Group& g = group();
    if (threads > MAX_THREADS || threads % width || width > 64) {
        return "too many threads for an Apple GPU, or a partial simdgroup";
    }
    if (!g.stacks) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        void* stacks = mmap(nullptr, STACK * MAX_THREADS, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (stacks == MAP_FAILED) return "no memory for the stacks of fibers";
        g.stacks = static_cast<unsigned char*>(stacks);
    }
    for (; g.started < threads; g.started++) start(g, g.started);
    g.threads = threads, g.width = width, g.descending = descending, g.body = body, g.data = data;
    g.done = g.arrived = 0;
    g.failed = false;
    g.simdgroups.resize(threads / width);
    for (auto& simdgroup : g.simdgroups) simdgroup.arrived = 0;
    for (uint i = 0; i < threads; i++) g.states[i] = READY;
    g.current = descending ? threads - 1 : 0;
    if (!_setjmp(g.main)) _longjmp(g.fibers[g.current], 1);
    if (!g.failed) return nullptr;
    // The fibers of a failed kernel are in the middle of its body: start new ones.
    g.started = 0;
    return g.error;
}

uint current() { return group().current; }
uint width() { return group().width; }
Slots& slots() { return group().simdgroups[group().current / group().width].slots; }

static void wait(Group& g) {
    g.states[g.current] = WAITING;
    switch_fiber(g);
}

void threadgroup_wait(int line) {
    Group& g = group();
    WaitPoint here{"threadgroup_barrier", line};
    if (g.arrived && g.wait_point.line != line) fail_divergent(g.wait_point, here);
    g.wait_point = here;
    if (++g.arrived < g.threads) return wait(g);
    g.arrived = 0;
    for (uint i = 0; i < g.threads; i++) g.states[i] = READY;
}

void simdgroup_wait(const char* operation, int line, void (*finish)(Slots&, uint, const void*),
    const void* data) {
    Group& g = group();
    uint index = g.current / g.width;
    Simdgroup& simdgroup = g.simdgroups[index];
    WaitPoint here{operation, line};
    WaitPoint& point = simdgroup.wait_point;
    if (simdgroup.arrived && (point.line != line || strcmp(point.operation, operation))) {
        fail_divergent(point, here);
    }
    point = here;
    if (++simdgroup.arrived < g.width) return wait(g);
    simdgroup.arrived = 0;
    finish(simdgroup.slots, g.width, data);
    for (uint i = index * g.width; i < (index + 1) * g.width; i++) g.states[i] = READY;
}

void fail(const char* error) {
    Group& g = group();
    g.failed = true;
    snprintf(g.error, sizeof g.error, "%s", error);
    return_to_run(g);
}

}
