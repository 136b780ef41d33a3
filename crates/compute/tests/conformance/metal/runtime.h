// How the threads of a threadgroup take turns on one CPU thread: each is a fiber that runs until it waits at a barrier or
// an operation of its simdgroup.
#pragma once

namespace fibers {

typedef unsigned int uint;

// Where a fiber waits: for its simdgroup or for all, at which operation and line.
struct Place {
    bool of_all;
    const char* operation;
    int line;
};

// Runs body(data, thread) for `threads` threads in simdgroups of `width`; downwards takes them in descending order, which
// with the ascending one finds most missing barriers. Returns an error or null.
const char* run(uint threads, uint width, bool downwards, void (*body)(void*, uint), void* data);

// The thread that runs, in its threadgroup.
uint current();
uint width();

// Waits until all threads meet at the same place.
void meet_all(int line);

// What each thread of the simdgroup has brought along to its next operation, and what each takes away.
struct Slots {
    alignas(16) unsigned char in[64][16];
    alignas(16) unsigned char out[64][16];
};
Slots& slots();

// Waits until all threads of the simdgroup meet at the same place; the last one to come calls finish first.
void meet(const char* operation, int line, void (*finish)(Slots&, uint width, const void*), const void* data);

// Gives up, whatever the other threads do.
[[noreturn]] void fail(const char* why);

}
