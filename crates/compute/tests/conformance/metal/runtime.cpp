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
constexpr uint MOST = 1024;

enum State { READY, WAITING, DONE };

struct Simdgroup {
    Place place;
    uint arrived = 0;
    Slots slots;
};

struct Group {
    uint threads = 0, width = 0, current = 0, done = 0;
    bool downwards = false;
    void (*body)(void*, uint) = nullptr;
    void* data = nullptr;
    unsigned char* stacks = nullptr;
    uint started = 0;
    ucontext_t main_context, fiber_contexts[MOST];
    jmp_buf main, fibers[MOST];
    State states[MOST];
    Place place;
    uint arrived = 0;
    std::vector<Simdgroup> simdgroups;
    char error[512];
    bool failed = false;

    ~Group() {
        if (stacks) munmap(stacks, STACK * MOST);
    }
};

Group& group() {
    static thread_local Group of_thread;
    return of_thread;
}

[[noreturn]] void leave(Group& g) { _longjmp(g.main, 1); }

// Another thread's turn. Where there is none the threads have diverged.
void turn(Group& g) {
    if (_setjmp(g.fibers[g.current])) return;
    for (uint i = 1; i <= g.threads; i++) {
        uint next = (g.current + (g.downwards ? g.threads - i : i)) % g.threads;
        if (g.states[next] == READY) {
            g.current = next;
            _longjmp(g.fibers[next], 1);
        }
    }
    if (g.done < g.threads) {
        Place at = g.place;
        for (auto& simdgroup : g.simdgroups) if (simdgroup.arrived) at = simdgroup.place;
        g.failed = true;
        snprintf(g.error, sizeof g.error, "some threads wait at %s, line %d, where others never come", at.operation, at.line);
    }
    leave(g);
}

// A fiber's life: one threadgroup after another.
void live() {
    Group& g = group();
    for (;;) {
        g.body(g.data, g.current);
        g.states[g.current] = DONE;
        g.done++;
        turn(g);
    }
}

void start(Group& g, uint i) {
    ucontext_t& context = g.fiber_contexts[i];
    getcontext(&context);
    context.uc_stack.ss_sp = g.stacks + STACK * i;
    context.uc_stack.ss_size = STACK;
    context.uc_link = nullptr;
    // The first step of a fiber only leaves a place to jump to.
    makecontext(&context, reinterpret_cast<void (*)()>(+[]() {
        Group& g = group();
        if (!_setjmp(g.fibers[g.current])) _longjmp(g.main, 1);
        live();
    }), 0);
    g.current = i;
    if (!_setjmp(g.main)) setcontext(&context);
}

[[noreturn]] void mixed(const Place& a, const Place& b) {
    Group& g = group();
    g.failed = true;
    snprintf(g.error, sizeof g.error, "some threads are at %s, line %d, others at %s, line %d", a.operation, a.line,
        b.operation, b.line);
    leave(g);
}

}

const char* run(uint threads, uint width, bool downwards, void (*body)(void*, uint), void* data) {
    Group& g = group();
    if (threads > MOST || threads % width || width > 64) return "more threads than an Apple GPU has, or parts of a simdgroup";
    if (!g.stacks) {
        void* stacks = mmap(nullptr, STACK * MOST, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stacks == MAP_FAILED) return "no memory for the stacks of threads";
        g.stacks = static_cast<unsigned char*>(stacks);
    }
    for (; g.started < threads; g.started++) start(g, g.started);
    g.threads = threads, g.width = width, g.downwards = downwards, g.body = body, g.data = data;
    g.done = g.arrived = 0;
    g.failed = false;
    g.simdgroups.resize(threads / width);
    for (auto& simdgroup : g.simdgroups) simdgroup.arrived = 0;
    for (uint i = 0; i < threads; i++) g.states[i] = READY;
    g.current = downwards ? threads - 1 : 0;
    if (!_setjmp(g.main)) _longjmp(g.fibers[g.current], 1);
    if (!g.failed) return nullptr;
    // Where its fibers stand nobody will come back to.
    g.started = 0;
    return g.error;
}

uint current() { return group().current; }
uint width() { return group().width; }
Slots& slots() { return group().simdgroups[group().current / group().width].slots; }

static void wait(Group& g) {
    g.states[g.current] = WAITING;
    turn(g);
}

void meet_all(int line) {
    Group& g = group();
    Place here{true, "threadgroup_barrier", line};
    if (g.arrived && g.place.line != line) mixed(g.place, here);
    g.place = here;
    if (++g.arrived < g.threads) return wait(g);
    g.arrived = 0;
    for (uint i = 0; i < g.threads; i++) g.states[i] = READY;
}

void meet(const char* operation, int line, void (*finish)(Slots&, uint, const void*), const void* data) {
    Group& g = group();
    uint number = g.current / g.width;
    Simdgroup& mine = g.simdgroups[number];
    Place here{false, operation, line};
    if (mine.arrived && (mine.place.line != line || strcmp(mine.place.operation, operation))) mixed(mine.place, here);
    mine.place = here;
    if (++mine.arrived < g.width) return wait(g);
    mine.arrived = 0;
    finish(mine.slots, g.width, data);
    for (uint i = number * g.width; i < (number + 1) * g.width; i++) g.states[i] = READY;
}

void fail(const char* why) {
    Group& g = group();
    g.failed = true;
    snprintf(g.error, sizeof g.error, "%s", why);
    leave(g);
}

}
