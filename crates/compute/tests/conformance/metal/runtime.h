// Threads of a threadgroup as fibers on one CPU thread. A fiber runs until it waits at a barrier or at
// an operation of its simdgroup.
#pragma once

namespace fibers {

typedef unsigned int uint;

// Operation and source line at which a fiber waits.
struct WaitPoint {
    const char* operation;
    int line;
};

// Runs body(data, thread) for `threads` threads in simdgroups of `width`. `descending` schedules the
// threads in descending order; with the ascending order of other calls, that exposes most missing
// barriers. Returns an error or null.
const char* run(uint threads, uint width, bool descending, void (*body)(void*, uint), void* data);

// Index of the running thread in its threadgroup.
uint current();
uint width();

// Waits until all threads of the threadgroup reach the same line.
void threadgroup_wait(int line);

// Inputs and outputs of the threads of a simdgroup for its next operation.
struct Slots {
    alignas(16) unsigned char in[64][16];
    alignas(16) unsigned char out[64][16];
};
Slots& slots();

// Waits until all threads of the simdgroup reach the same operation. The last one calls `finish`.
void simdgroup_wait(const char* operation, int line, void (*finish)(Slots&, uint width, const void*),
    const void* data);

// Aborts the kernel with an error.
[[noreturn]] void fail(const char* error);

}
