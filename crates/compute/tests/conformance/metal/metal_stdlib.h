// The parts of Metal's standard library that the translated kernels use, in C++17 for g++. Kernels that
// use other names fail to compile.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "runtime.h"

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef _Float16 half;
constexpr half operator""h(long double x) { return half(x); }

#define kernel
#define device
#define constant const
#define threadgroup
#define thread
#define as_type metal::bits_as

namespace metal {

using ::uint;
using std::uint64_t;

template <class T, int N> struct vec;
template <class T, int N> struct packed;
template <class T> constexpr bool scalar = std::is_arithmetic_v<T> || std::is_same_v<T, half>;

template <class T, int N> struct storage;
template <class T> struct alignas(2 * sizeof(T)) storage<T, 2> { T x, y; };
template <class T> struct alignas(4 * sizeof(T)) storage<T, 3> { T x, y, z; };
template <class T> struct alignas(4 * sizeof(T)) storage<T, 4> { T x, y, z, w; };

template <class T, int N> struct vec : storage<T, N> {
    vec() { for (int i = 0; i < N; i++) (*this)[i] = T(); }
    template <class A, class = std::enable_if_t<scalar<A>>> vec(A a) { for (int i = 0; i < N; i++) (*this)[i] = T(a); }
    template <class U, class = std::enable_if_t<!std::is_same_v<T, U>>> explicit vec(const vec<U, N>& o) {
        for (int i = 0; i < N; i++) (*this)[i] = T(o[i]);
    }
    template <class U> vec(const packed<U, N>& o) { for (int i = 0; i < N; i++) (*this)[i] = T(o[i]); }
    template <class A, class B, class... C> vec(A a, B b, C... c) {
        int at = 0;
        put(at, a), put(at, b), (put(at, c), ...);
    }
    T& operator[](uint i) { return (&this->x)[i]; }
    const T& operator[](uint i) const { return (&this->x)[i]; }

#define SWIZZLE2(a, b) vec<T, 2> a##b() const { return vec<T, 2>(this->a, this->b); }
#define SWIZZLE3(a, b, c) vec<T, 3> a##b##c() const { return vec<T, 3>(this->a, this->b, this->c); }
#define SWIZZLE4(a, b, c, d) vec<T, 4> a##b##c##d() const { return vec<T, 4>(this->a, this->b, this->c, this->d); }
#define SWIZZLES4(a, b, c) SWIZZLE4(a, b, c, x) SWIZZLE4(a, b, c, y) SWIZZLE4(a, b, c, z) SWIZZLE4(a, b, c, w)
#define SWIZZLES3(a, b) \
    SWIZZLE3(a, b, x) SWIZZLE3(a, b, y) SWIZZLE3(a, b, z) SWIZZLE3(a, b, w) \
    SWIZZLES4(a, b, x) SWIZZLES4(a, b, y) SWIZZLES4(a, b, z) SWIZZLES4(a, b, w)
#define SWIZZLES(a) \
    SWIZZLE2(a, x) SWIZZLE2(a, y) SWIZZLE2(a, z) SWIZZLE2(a, w) \
    SWIZZLES3(a, x) SWIZZLES3(a, y) SWIZZLES3(a, z) SWIZZLES3(a, w)
    SWIZZLES(x) SWIZZLES(y) SWIZZLES(z) SWIZZLES(w)

private:
    template <class A> void put(int& at, const A& a) {
        if constexpr (scalar<A>) (*this)[at++] = T(a);
        else for (uint i = 0; i < sizeof a / sizeof a[0]; i++) (*this)[at++] = T(a[i]);
    }
};

#define VECTORS(name, type) \
    using name##2 = vec<type, 2>; using name##3 = vec<type, 3>; using name##4 = vec<type, 4>;
VECTORS(float, float) VECTORS(half, half) VECTORS(int, int) VECTORS(uint, uint) VECTORS(bool, bool)
VECTORS(short, short) VECTORS(ushort, ushort) VECTORS(char, signed char) VECTORS(uchar, unsigned char)

template <class T, int N> struct packed {
    T all[N];
    packed() = default;
    packed(const vec<T, N>& o) { for (int i = 0; i < N; i++) all[i] = o[i]; }
    T& operator[](uint i) { return all[i]; }
    const T& operator[](uint i) const { return all[i]; }
};
using packed_float3 = packed<float, 3>; using packed_uint3 = packed<uint, 3>; using packed_int3 = packed<int, 3>;
using packed_half3 = packed<half, 3>;
using packed_char4 = packed<signed char, 4>; using packed_uchar4 = packed<unsigned char, 4>;

template <class D, class S> D bits_as(S s) {
    static_assert(sizeof(D) == sizeof(S), "as_type of another size");
    D d;
    memcpy(&d, &s, sizeof d);
    return d;
}

// No integer promotion: the result has the element type, as in Metal.
#define BINARY(op, R) \
    template <class T, int N> auto operator op(const vec<T, N>& a, const vec<T, N>& b) { \
        vec<R, N> r; \
        for (int i = 0; i < N; i++) r[i] = R(a[i] op b[i]); \
        return r; \
    } \
    template <class T, int N, class S, class = std::enable_if_t<scalar<S>>> auto operator op(const vec<T, N>& a, S b) { \
        return a op vec<T, N>(b); \
    } \
    template <class T, int N, class S, class = std::enable_if_t<scalar<S>>> auto operator op(S a, const vec<T, N>& b) { \
        return vec<T, N>(a) op b; \
    }
#define ARITHMETIC(op) BINARY(op, T) \
    template <class T, int N, class B> vec<T, N>& operator op##=(vec<T, N>& a, const B& b) { return a = vec<T, N>(a op b); }
ARITHMETIC(+) ARITHMETIC(-) ARITHMETIC(*) ARITHMETIC(/) ARITHMETIC(%)
ARITHMETIC(&) ARITHMETIC(|) ARITHMETIC(^) ARITHMETIC(<<) ARITHMETIC(>>)
BINARY(<, bool) BINARY(>, bool) BINARY(<=, bool) BINARY(>=, bool) BINARY(==, bool) BINARY(!=, bool)
BINARY(&&, bool) BINARY(||, bool)
template <class T, int N> vec<T, N> operator-(vec<T, N> a) { for (int i = 0; i < N; i++) a[i] = -a[i]; return a; }
template <class T, int N> vec<T, N> operator~(vec<T, N> a) { for (int i = 0; i < N; i++) a[i] = ~a[i]; return a; }
template <int N> vec<bool, N> operator!(vec<bool, N> a) { for (int i = 0; i < N; i++) a[i] = !a[i]; return a; }

// Functions of scalars, and of vectors per element.
#define FUNCTION1(name, ...) \
    template <class T, class = std::enable_if_t<scalar<T>>> T name(T a) { __VA_ARGS__ } \
    template <class T, int N> vec<T, N> name(vec<T, N> a) { for (int i = 0; i < N; i++) a[i] = name(a[i]); return a; }
#define FUNCTION2(name, ...) \
    template <class T, class = std::enable_if_t<scalar<T>>> T name(T a, T b) { __VA_ARGS__ } \
    template <class T, int N> vec<T, N> name(vec<T, N> a, vec<T, N> b) { \
        for (int i = 0; i < N; i++) a[i] = name(a[i], b[i]); \
        return a; \
    }
#define FUNCTION3(name, ...) \
    template <class T, class = std::enable_if_t<scalar<T>>> T name(T a, T b, T c) { __VA_ARGS__ } \
    template <class T, int N> vec<T, N> name(vec<T, N> a, vec<T, N> b, vec<T, N> c) { \
        for (int i = 0; i < N; i++) a[i] = name(a[i], b[i], c[i]); \
        return a; \
    }
FUNCTION1(exp, return T(std::exp(float(a)));) FUNCTION1(exp2, return T(std::exp2(float(a)));)
FUNCTION1(log, return T(std::log(float(a)));) FUNCTION1(log2, return T(std::log2(float(a)));)
FUNCTION1(sqrt, return T(std::sqrt(float(a)));) FUNCTION1(rsqrt, return T(1.0f / std::sqrt(float(a)));)
FUNCTION1(sin, return T(std::sin(float(a)));) FUNCTION1(cos, return T(std::cos(float(a)));)
FUNCTION1(tanh, return T(std::tanh(float(a)));)
FUNCTION1(floor, return T(std::floor(float(a)));) FUNCTION1(ceil, return T(std::ceil(float(a)));)
FUNCTION1(rint, return T(std::nearbyint(float(a)));) FUNCTION1(trunc, return T(std::trunc(float(a)));)
FUNCTION1(fract, return a - T(std::floor(float(a)));)
FUNCTION1(abs, if constexpr (std::is_unsigned_v<T>) return a; else return a < T(0) ? T(-a) : a;)
FUNCTION1(sign, return a > T(0) ? T(1) : a < T(0) ? T(-1) : T(0);)
FUNCTION1(saturate, return a < T(0) ? T(0) : a > T(1) ? T(1) : a;)
FUNCTION1(popcount, return T(__builtin_popcount(a));)
FUNCTION1(clz, return T(a ? __builtin_clz(a) : 32);) FUNCTION1(ctz, return T(a ? __builtin_ctz(a) : 32);)
FUNCTION1(reverse_bits, T r = 0; for (int i = 0; i < 32; i++) r |= (a >> i & 1) << (31 - i); return r;)
FUNCTION2(min, return b < a ? b : a;) FUNCTION2(max, return a < b ? b : a;)
FUNCTION2(pow, return T(std::pow(float(a), float(b)));) FUNCTION2(fmod, return T(std::fmod(float(a), float(b)));)
FUNCTION2(step, return b < a ? T(0) : T(1);)
FUNCTION3(clamp, return a < b ? b : a > c ? c : a;)
FUNCTION3(fma, return T(std::fma(float(a), float(b), float(c)));) FUNCTION3(mix, return a + (b - a) * c;)
template <class T, int N> vec<T, N> ldexp(vec<T, N> a, vec<int, N> b) {
    for (int i = 0; i < N; i++) a[i] = T(std::ldexp(float(a[i]), b[i]));
    return a;
}
template <class T> T ldexp(T a, int b) { return T(std::ldexp(float(a), b)); }
template <class T> T extract_bits(T a, uint at, uint count) {
    if (count == 0) return T(0);
    return T(a << (32 - at - count)) >> (32 - count);
}
template <class T> T insert_bits(T a, T b, uint at, uint count) {
    uint mask = count == 0 ? 0 : (~0u >> (32 - count)) << at;
    return T((uint(a) & ~mask) | (uint(b) << at & mask));
}
template <class T> T select(T a, T b, bool c) { return c ? b : a; }
template <class T, int N> vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
    for (int i = 0; i < N; i++) if (c[i]) a[i] = b[i];
    return a;
}
inline bool all(bool a) { return a; }
inline bool any(bool a) { return a; }
template <int N> bool all(vec<bool, N> a) { bool r = true; for (int i = 0; i < N; i++) r = r && a[i]; return r; }
template <int N> bool any(vec<bool, N> a) { bool r = false; for (int i = 0; i < N; i++) r = r || a[i]; return r; }
template <class T, int N> T dot(vec<T, N> a, vec<T, N> b) {
    T r = a[0] * b[0];
    for (int i = 1; i < N; i++) r += a[i] * b[i];
    return r;
}

// Atomics need no synchronization: fibers switch only at barriers and simdgroup operations.
template <class T> struct atomic { T value; };
using atomic_uint = atomic<uint>;
using atomic_int = atomic<int>;
enum memory_order { memory_order_relaxed };
template <class T> T atomic_load_explicit(const atomic<T>* a, memory_order) { return a->value; }
template <class T> void atomic_store_explicit(atomic<T>* a, T v, memory_order) { a->value = v; }
template <class T> T atomic_exchange_explicit(atomic<T>* a, T v, memory_order) { T old = a->value; a->value = v; return old; }
template <class T> bool atomic_compare_exchange_weak_explicit(atomic<T>* a, T* expected, T v, memory_order, memory_order) {
    if (a->value == *expected) { a->value = v; return true; }
    *expected = a->value;
    return false;
}
#define ATOMIC(name, ...) \
    template <class T> T atomic_fetch_##name##_explicit(atomic<T>* to, T b, memory_order) { \
        T a = to->value; to->value = __VA_ARGS__; return a; \
    }
ATOMIC(add, a + b) ATOMIC(sub, a - b) ATOMIC(and, a & b) ATOMIC(or, a | b) ATOMIC(xor, a ^ b)
ATOMIC(min, b < a ? b : a) ATOMIC(max, a < b ? b : a)

enum class mem_flags { mem_none, mem_device, mem_threadgroup, mem_texture };
inline void threadgroup_barrier(mem_flags, int line = __builtin_LINE()) { fibers::threadgroup_wait(line); }
inline void simdgroup_barrier(mem_flags, int line = __builtin_LINE()) {
    fibers::simdgroup_wait("simdgroup_barrier", line, [](fibers::Slots&, uint, const void*) {}, nullptr);
}

// Collective operation of a simdgroup: each thread passes a T and receives an R, which
// finish(in, out, width, argument) computes for all threads.
template <class R, class T, class A> R collective(const char* name, int line, T value, A argument,
    void (*finish)(const T*, R*, uint, const A&)) {
    static_assert(sizeof(T) <= 16 && sizeof(R) <= 16, "larger than a slot");
    struct Job { A argument; void (*finish)(const T*, R*, uint, const A&); } job{argument, finish};
    uint lane = fibers::current() % fibers::width();
    memcpy(fibers::slots().in[lane], &value, sizeof value);
    fibers::simdgroup_wait(name, line, [](fibers::Slots& slots, uint width, const void* data) {
        const Job& job = *static_cast<const Job*>(data);
        T in[64];
        R out[64];
        for (uint i = 0; i < width; i++) memcpy(&in[i], slots.in[i], sizeof(T));
        job.finish(in, out, width, job.argument);
        for (uint i = 0; i < width; i++) memcpy(slots.out[i], &out[i], sizeof(R));
    }, &job);
    R result;
    memcpy(&result, fibers::slots().out[lane], sizeof result);
    return result;
}
struct NoArgument {};
#define REDUCE(name, ...) \
    template <class T> T simd_##name(T v, int line = __builtin_LINE()) { \
        return collective<T, T, NoArgument>("simd_" #name, line, v, {}, \
            [](const T* in, T* out, uint n, const NoArgument&) { \
                T tree[64]; \
                for (uint i = 0; i < n; i++) tree[i] = in[i]; \
                for (uint half = n / 2; half > 0; half /= 2) \
                    for (uint i = 0; i < half; i++) { T a = tree[i], b = tree[i + half]; tree[i] = __VA_ARGS__; } \
                for (uint i = 0; i < n; i++) out[i] = tree[0]; \
            }); \
    }
REDUCE(sum, a + b) REDUCE(product, a * b) REDUCE(and, a & b) REDUCE(or, a | b) REDUCE(xor, a ^ b)
REDUCE(min, metal::min(a, b)) REDUCE(max, metal::max(a, b))
#define PREFIX(name, first, ...) \
    template <class T> T simd_prefix_exclusive_##name(T v, int line = __builtin_LINE()) { \
        return collective<T, T, NoArgument>("simd_prefix_exclusive_" #name, line, v, {}, \
            [](const T* in, T* out, uint n, const NoArgument&) { \
                T a = T(first); \
                for (uint i = 0; i < n; i++) { T b = in[i]; out[i] = a; a = __VA_ARGS__; } \
            }); \
    } \
    template <class T> T simd_prefix_inclusive_##name(T v, int line = __builtin_LINE()) { \
        return collective<T, T, NoArgument>("simd_prefix_inclusive_" #name, line, v, {}, \
            [](const T* in, T* out, uint n, const NoArgument&) { \
                T a = T(first); \
                for (uint i = 0; i < n; i++) { T b = in[i]; a = __VA_ARGS__; out[i] = a; } \
            }); \
    }
PREFIX(sum, 0, a + b) PREFIX(product, 1, a * b)

// Shuffles: each thread receives the value of the lane that it selects.
template <class T> struct ShuffleInput { T value; uint source; };
template <class T> T shuffle(const char* name, int line, T v, uint source) {
    if constexpr (sizeof(T) > 12) {
        // In two halves: the value and the source lane together exceed a slot.
        struct Half { char bytes[sizeof(T) / 2]; } halves[2];
        memcpy(halves, &v, sizeof v);
        halves[0] = shuffle(name, line, halves[0], source);
        halves[1] = shuffle(name, line, halves[1], source);
        memcpy(&v, halves, sizeof v);
        return v;
    } else {
        return collective<T, ShuffleInput<T>, NoArgument>(name, line, {v, source}, {},
            [](const ShuffleInput<T>* in, T* out, uint n, const NoArgument&) {
                for (uint i = 0; i < n; i++) {
                    if (in[i].source >= n) fibers::fail("a shuffle from a lane outside the simdgroup");
                    out[i] = in[in[i].source].value;
                }
            });
    }
}
inline uint lane() { return fibers::current() % fibers::width(); }
template <class T> T simd_shuffle(T v, uint source, int line = __builtin_LINE()) {
    return shuffle("simd_shuffle", line, v, source);
}
template <class T> T simd_broadcast(T v, uint source, int line = __builtin_LINE()) {
    return shuffle("simd_broadcast", line, v, source);
}
template <class T> T simd_broadcast_first(T v, int line = __builtin_LINE()) {
    return shuffle("simd_broadcast_first", line, v, 0u);
}
template <class T> T simd_shuffle_xor(T v, uint mask, int line = __builtin_LINE()) {
    return shuffle("simd_shuffle_xor", line, v, lane() ^ mask);
}
// Beyond the ends, Metal leaves values undefined. Here a thread keeps its own value.
template <class T> T simd_shuffle_up(T v, uint delta, int line = __builtin_LINE()) {
    return shuffle("simd_shuffle_up", line, v, lane() < delta ? lane() : lane() - delta);
}
template <class T> T simd_shuffle_down(T v, uint delta, int line = __builtin_LINE()) {
    return shuffle("simd_shuffle_down", line, v, lane() + delta < fibers::width() ? lane() + delta : lane());
}
struct simd_vote {
    uint64_t bits;
    explicit operator uint64_t() const { return bits; }
};
inline simd_vote simd_ballot(bool v, int line = __builtin_LINE()) {
    return collective<simd_vote, bool, NoArgument>("simd_ballot", line, v, {},
        [](const bool* in, simd_vote* out, uint n, const NoArgument&) {
            uint64_t bits = 0;
            for (uint i = 0; i < n; i++) bits |= uint64_t(in[i]) << i;
            for (uint i = 0; i < n; i++) out[i] = {bits};
        });
}
inline bool simd_all(bool v, int line = __builtin_LINE()) {
    return uint64_t(simd_ballot(v, line)) == ~0ull >> (64 - fibers::width());
}
inline bool simd_any(bool v, int line = __builtin_LINE()) { return uint64_t(simd_ballot(v, line)) != 0; }

}

// MSL uses vector types without a namespace.
#define GLOBAL_VECTORS(name) using metal::name##2; using metal::name##3; using metal::name##4;
GLOBAL_VECTORS(float) GLOBAL_VECTORS(half) GLOBAL_VECTORS(int) GLOBAL_VECTORS(uint) GLOBAL_VECTORS(bool)
GLOBAL_VECTORS(short) GLOBAL_VECTORS(ushort) GLOBAL_VECTORS(char) GLOBAL_VECTORS(uchar)
using metal::packed_char4;
using metal::packed_uchar4;
