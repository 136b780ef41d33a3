//! What a processor computes at best: loops of one instruction, in registers.

use std::{hint::black_box, thread, time::Instant};

use wide::{i16x8, i32x4};

use super::Isa;
use crate::{Error, MatrixShape};

/// Sums that do not wait for each other: enough for the latency of any instruction, and few enough for 16 registers.
const CHAINS: usize = 12;
/// So many take some milliseconds, beside which starting a thread is nothing.
const STEPS: u64 = 1 << 21;
const PASSES: usize = 5;

/// Operations per second of all threads together: a product and its addition are two.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CpuPeak {
    /// Of f32.
    pub f32: f64,
    /// Of dot products of bytes, where they are not those of f32.
    pub bytes: Option<f64>,
}

impl CpuPeak {
    /// Measures `threads` threads for some hundredths of a second.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn measure(isa: Isa, threads: usize) -> Result<Self, Error> {
        let loops = Loops::of(isa);
        let bytes = loops.bytes.map(|bytes| bytes.measure(threads)).transpose()?;
        Ok(Self { f32: loops.f32.measure(threads)?, bytes })
    }

    /// What products with such weights are made of: bytes, where the fast path rounds activations for them.
    pub fn of_products(&self, shape: MatrixShape, exact: bool) -> f64 {
        let rounded = !exact && super::quants_of(shape).is_some();
        self.bytes.filter(|_| rounded).unwrap_or(self.f32)
    }
}

/// Runs so many steps of [`CHAINS`] instructions.
#[derive(Clone, Copy)]
struct Loop {
    run: unsafe fn(u64),
    /// Of one instruction.
    operations: usize,
}

impl Loop {
    fn measure(self, threads: usize) -> Result<f64, Error> {
        let mut best = 0.0f64;
        for _ in 0..PASSES {
            let since = Instant::now();
            thread::scope(|scope| {
                for _ in 0..threads {
                    // SAFETY: `Loops::of` has found the instruction set on this machine.
                    let run = move || unsafe { (self.run)(STEPS) };
                    let failed =
                        |e| Error::Device(format!("cannot start a thread that computes: {e}"));
                    thread::Builder::new().spawn_scoped(scope, run).map_err(failed)?;
                }
                Ok(())
            })?;
            let operations = STEPS as f64 * (CHAINS * self.operations * threads) as f64;
            best = best.max(operations / since.elapsed().as_secs_f64());
        }
        Ok(best)
    }
}

/// The loops of an instruction set.
struct Loops {
    f32: Loop,
    bytes: Option<Loop>,
}

impl Loops {
    /// Those of plain Rust where the machine has no such set.
    fn of(isa: Isa) -> Self {
        match Isa::available().contains(&isa).then_some(isa) {
            #[cfg(target_arch = "x86_64")]
            Some(Isa::Avx2) => Self {
                f32: Loop { run: x86::f32_avx2, operations: 2 * 8 },
                bytes: Some(Loop { run: x86::bytes_avx2, operations: 2 * 32 }),
            },
            #[cfg(target_arch = "x86_64")]
            Some(Isa::AvxVnni) => Self {
                f32: Loop { run: x86::f32_avx2, operations: 2 * 8 },
                bytes: Some(Loop { run: x86::bytes_avxvnni, operations: 2 * 32 }),
            },
            #[cfg(target_arch = "x86_64")]
            Some(Isa::Avx512 | Isa::Avx512Vbmi) => Self {
                f32: Loop { run: x86::f32_avx512, operations: 2 * 16 },
                bytes: Some(Loop { run: x86::bytes_avx512, operations: 2 * 64 }),
            },
            #[cfg(target_arch = "aarch64")]
            Some(Isa::Neon) => {
                let dot = std::arch::is_aarch64_feature_detected!("dotprod");
                Self {
                    f32: Loop { run: arm::f32_neon, operations: 2 * 4 },
                    bytes: dot.then_some(Loop { run: arm::bytes_neon, operations: 2 * 16 }),
                }
            }
            _ => Self {
                f32: Loop { run: f32_generic, operations: 2 * 4 },
                bytes: Some(Loop { run: bytes_generic, operations: 2 * 8 }),
            },
        }
    }
}

/// Four numbers are a vector of any instruction set that Rust is compiled for.
fn f32_generic(steps: u64) {
    let (a, b) = black_box(([0.5f32; 4], [1.0f32; 4]));
    let mut sums = [[0.0f32; 4]; CHAINS];
    for _ in 0..steps {
        for sum in &mut sums {
            for i in 0..4 {
                sum[i] = sum[i] * a[i] + b[i];
            }
        }
    }
    black_box(sums);
}

/// Bytes are multiplied as words.
fn bytes_generic(steps: u64) {
    let (a, b) = ([i16x8::splat(3); CHAINS], black_box(i16x8::splat(5)));
    let mut sums = [i32x4::ZERO; CHAINS];
    for _ in 0..steps {
        let a = black_box(&a);
        for (sum, a) in sums.iter_mut().zip(a) {
            *sum += a.dot(b);
        }
    }
    black_box(sums);
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::{arch::x86_64::*, hint::black_box};

    use super::CHAINS;

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn f32_avx2(steps: u64) {
        let (a, b) = black_box((_mm256_set1_ps(0.5), _mm256_set1_ps(1.0)));
        let mut sums = [_mm256_setzero_ps(); CHAINS];
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, a, b);
            }
        }
        black_box(sums);
    }

    /// Three instructions; what is multiplied is the sum itself, or the product would leave the loop.
    #[target_feature(enable = "avx2")]
    pub(super) fn bytes_avx2(steps: u64) {
        let (x, ones) = black_box((_mm256_set1_epi8(3), _mm256_set1_epi16(1)));
        let mut sums = [_mm256_setzero_si256(); CHAINS];
        for _ in 0..steps {
            for sum in &mut sums {
                let pairs = _mm256_maddubs_epi16(*sum, x);
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, ones));
            }
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx2,avxvnni")]
    pub(super) fn bytes_avxvnni(steps: u64) {
        let (w, x) = black_box((_mm256_set1_epi32(0x0101_0101), _mm256_set1_epi32(0x0303_0303)));
        let mut sums = [_mm256_setzero_si256(); CHAINS];
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = _mm256_dpbusd_avx_epi32(*sum, w, x);
            }
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx512f")]
    pub(super) fn f32_avx512(steps: u64) {
        let (a, b) = black_box((_mm512_set1_ps(0.5), _mm512_set1_ps(1.0)));
        let mut sums = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, a, b);
            }
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx512f,avx512vnni")]
    pub(super) fn bytes_avx512(steps: u64) {
        let (w, x) = black_box((_mm512_set1_epi32(0x0101_0101), _mm512_set1_epi32(0x0303_0303)));
        let mut sums = [_mm512_setzero_si512(); CHAINS];
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, w, x);
            }
        }
        black_box(sums);
    }
}

#[cfg(target_arch = "aarch64")]
mod arm {
    use std::{arch::aarch64::*, hint::black_box};

    use super::CHAINS;

    #[target_feature(enable = "neon")]
    pub(super) fn f32_neon(steps: u64) {
        let (a, b) = black_box((vdupq_n_f32(0.5), vdupq_n_f32(1.0)));
        let mut sums = [vdupq_n_f32(0.0); CHAINS];
        for _ in 0..steps {
            for sum in &mut sums {
                *sum = vfmaq_f32(*sum, a, b);
            }
        }
        black_box(sums);
    }

    #[target_feature(enable = "neon")]
    pub(super) fn bytes_neon(steps: u64) {
        let (w, x) = black_box((vdupq_n_s8(1), vdupq_n_s8(3)));
        let mut sums = [vdupq_n_s32(0); CHAINS];
        for _ in 0..steps {
            for sum in &mut sums {
                // SAFETY: the machine has the instruction.
                unsafe {
                    std::arch::asm!(
                        ".arch_extension dotprod",
                        "sdot {sum:v}.4s, {w:v}.16b, {x:v}.16b",
                        sum = inout(vreg) *sum, w = in(vreg) w, x = in(vreg) x,
                        options(pure, nomem, nostack, preserves_flags),
                    );
                }
            }
        }
        black_box(sums);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Format, Scalar};

    #[test]
    fn every_instruction_set_has_a_peak() {
        for isa in Isa::available() {
            let peak = CpuPeak::measure(isa, 1).unwrap();
            assert!(peak.f32.is_finite() && peak.f32 > 0.0, "{isa}: {peak:?}");
            assert!(
                peak.bytes.is_none_or(|bytes| bytes.is_finite() && bytes > peak.f32 / 2.0),
                "{isa}: {peak:?}"
            );
        }
    }

    #[test]
    fn bytes_are_the_peak_of_what_is_rounded() {
        let peak = CpuPeak { f32: 1.0, bytes: Some(4.0) };
        let shape = |format| MatrixShape { rows: 64, cols: 64, format };
        assert_eq!(peak.of_products(shape(Format::MXFP4), false), 4.0);
        assert_eq!(peak.of_products(shape(Format::MXFP4), true), 1.0);
        assert_eq!(peak.of_products(shape(Format::Plain(Scalar::BF16)), false), 1.0);
        assert_eq!(CpuPeak { bytes: None, ..peak }.of_products(shape(Format::MXFP4), false), 1.0);
    }
}
