//! Peak FLOPs of the processor, measured: loops of one multiply-add instruction on registers.

use std::{hint::black_box, thread, time::Instant};

use moeflux_ops::{Error, MatrixShape};
use wide::{i16x8, i32x4};

use super::isa::Isa;

/// Independent accumulators: enough to hide the latency of any instruction, and few enough for 16
/// registers.
const CHAINS: usize = 12;
/// Iterations of a loop: some milliseconds, so that the start of a thread is negligible.
const STEPS: u64 = 1 << 21;
/// Repetitions; the best one counts.
const PASSES: usize = 5;

/// Peak operations per second of all threads together. A multiply-add is two operations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CpuPeak {
    /// f32 multiply-adds.
    pub f32: f64,
    /// int8 multiply-adds; `None` if they run as f32.
    pub int8: Option<f64>,
}

impl CpuPeak {
    /// Measures the peak of `threads` threads; takes some hundredths of a second.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn measure(isa: Isa, threads: usize) -> Result<Self, Error> {
        let loops = PeakLoops::new(isa);
        let int8 = loops.int8.map(|int8| int8.measure(threads)).transpose()?;
        Ok(Self { f32: loops.f32.measure(threads)?, int8 })
    }

    /// Peak for products with weights of a shape: int8 where the fast path quantizes activations.
    pub fn for_shape(&self, shape: MatrixShape, exact: bool) -> f64 {
        let quantized = !exact && super::activations::QuantLayout::new(shape).is_some();
        self.int8.filter(|_| quantized).unwrap_or(self.f32)
    }
}

/// A measured loop.
#[derive(Clone, Copy)]
struct PeakLoop {
    /// Runs the given number of iterations of [`CHAINS`] instructions.
    run: unsafe fn(u64),
    /// Operations of one instruction.
    operations: usize,
}

impl PeakLoop {
    fn measure(self, threads: usize) -> Result<f64, Error> {
        let mut best = 0.0f64;
        for _ in 0..PASSES {
            let since = Instant::now();
            thread::scope(|scope| {
                for _ in 0..threads {
                    // SAFETY: `PeakLoops::new` detected the instruction set on this machine.
                    let run = move || unsafe { (self.run)(STEPS) };
                    let failed = |e| Error::Device(format!("cannot start a compute thread: {e}"));
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

/// Loops of an instruction set.
struct PeakLoops {
    f32: PeakLoop,
    int8: Option<PeakLoop>,
}

impl PeakLoops {
    /// Loops of an instruction set, or of plain Rust if this machine does not have it.
    fn new(isa: Isa) -> Self {
        match Isa::available().contains(&isa).then_some(isa) {
            #[cfg(target_arch = "x86_64")]
            Some(Isa::Avx2) => Self {
                f32: PeakLoop { run: x86::f32_avx2, operations: 2 * 8 },
                int8: Some(PeakLoop { run: x86::int8_avx2, operations: 2 * 32 }),
            },
            #[cfg(target_arch = "x86_64")]
            Some(Isa::AvxVnni) => Self {
                f32: PeakLoop { run: x86::f32_avx2, operations: 2 * 8 },
                int8: Some(PeakLoop { run: x86::int8_avxvnni, operations: 2 * 32 }),
            },
            #[cfg(target_arch = "x86_64")]
            Some(Isa::Avx512 | Isa::Avx512Vbmi) => Self {
                f32: PeakLoop { run: x86::f32_avx512, operations: 2 * 16 },
                int8: Some(PeakLoop { run: x86::int8_avx512, operations: 2 * 64 }),
            },
            #[cfg(target_arch = "aarch64")]
            Some(Isa::Neon) => {
                let dot = std::arch::is_aarch64_feature_detected!("dotprod");
                Self {
                    f32: PeakLoop { run: arm::f32_neon, operations: 2 * 4 },
                    int8: dot.then_some(PeakLoop { run: arm::int8_neon, operations: 2 * 16 }),
                }
            }
            _ => Self {
                f32: PeakLoop { run: f32_generic, operations: 2 * 4 },
                int8: Some(PeakLoop { run: int8_generic, operations: 2 * 8 }),
            },
        }
    }
}

/// Vectors of four f32, which the baseline of every architecture has.
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

/// int8 is multiplied as i16.
fn int8_generic(steps: u64) {
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

    /// Three instructions. The sum itself is an operand, or the compiler would hoist the product
    /// out of the loop.
    #[target_feature(enable = "avx2")]
    pub(super) fn int8_avx2(steps: u64) {
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
    pub(super) fn int8_avxvnni(steps: u64) {
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
    pub(super) fn int8_avx512(steps: u64) {
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
    pub(super) fn int8_neon(steps: u64) {
        let (w, x) = black_box((vdupq_n_s8(1), vdupq_n_s8(3)));
        let mut sums = [vdupq_n_s32(0); CHAINS];
        for _ in 0..steps {
            for sum in &mut sums {
                // SAFETY: the processor has `sdot`: the loop is only used if it was detected.
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
    use moeflux_ops::{Format, Scalar};

    #[test]
    fn every_instruction_set_has_a_peak() {
        for isa in Isa::available() {
            let peak = CpuPeak::measure(isa, 1).unwrap();
            assert!(peak.f32.is_finite() && peak.f32 > 0.0, "{isa}: {peak:?}");
            assert!(
                peak.int8.is_none_or(|int8| int8.is_finite() && int8 > peak.f32 / 2.0),
                "{isa}: {peak:?}"
            );
        }
    }

    #[test]
    fn int8_is_the_peak_of_quantized_products() {
        let peak = CpuPeak { f32: 1.0, int8: Some(4.0) };
        let shape = |format| MatrixShape { rows: 64, cols: 64, format };
        assert_eq!(peak.for_shape(shape(Format::MXFP4), false), 4.0);
        assert_eq!(peak.for_shape(shape(Format::MXFP4), true), 1.0);
        assert_eq!(peak.for_shape(shape(Format::Plain(Scalar::BF16)), false), 1.0);
        assert_eq!(CpuPeak { int8: None, ..peak }.for_shape(shape(Format::MXFP4), false), 1.0);
    }
}
