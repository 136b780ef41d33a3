//! Instruction sets (ISAs), and their detection on this machine.

use std::fmt;

use moeflux_ops::Error;

use super::table::{self, KernelTable, SamplingTable};

/// Instruction set with kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust: the baseline of the architecture.
    Generic,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// [`Isa::Avx2`] and AVX-VNNI: int8 dot products without AVX-512.
    AvxVnni,
    /// x86-64 with AVX-512 F, BW, VL, DQ and VNNI.
    Avx512,
    /// [`Isa::Avx512`] and AVX-512 VBMI: 128-byte table look-ups.
    Avx512Vbmi,
    /// AArch64 NEON, with int8 dot products where the processor has them.
    Neon,
}

impl Isa {
    /// In ascending order of speed.
    const ALL: [Isa; 6] =
        [Isa::Generic, Isa::Avx2, Isa::AvxVnni, Isa::Avx512, Isa::Avx512Vbmi, Isa::Neon];

    /// Instruction sets of this machine, the best last.
    pub fn available() -> Vec<Isa> {
        Self::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// Best instruction set of this machine.
    pub fn detect() -> Self {
        Self::ALL.into_iter().rfind(|isa| isa.is_available()).unwrap_or(Isa::Generic)
    }

    /// Instruction set by its `--isa` name.
    ///
    /// # Errors
    /// The name is unknown, or this machine does not have the instruction set. The message lists
    /// the available names.
    pub fn by_name(name: &str) -> Result<Self, Error> {
        let isa = Self::ALL.into_iter().find(|isa| isa.name() == name);
        isa.filter(|isa| isa.is_available()).ok_or_else(|| {
            let names: Vec<_> = Self::available().into_iter().map(Isa::name).collect();
            Error::Device(format!(
                "this machine has no instruction set {name:?}: choose {}",
                names.join(", ")
            ))
        })
    }

    /// Name for `--isa`.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Generic => "generic",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avxvnni",
            Isa::Avx512 => "avx512",
            Isa::Avx512Vbmi => "avx512vbmi",
            Isa::Neon => "neon",
        }
    }

    /// Whether this machine has the instruction set.
    fn is_available(self) -> bool {
        match self {
            Isa::Generic => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => is_x86_feature_detected!("avxvnni") && Isa::Avx2.is_available(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vnni")
                    && Isa::Avx2.is_available()
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vbmi => is_x86_feature_detected!("avx512vbmi") && Isa::Avx512.is_available(),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => true,
            // Those of other architectures.
            _ => false,
        }
    }

    /// Kernels of the instruction set; `None` if this machine does not have it.
    pub(super) fn table(self) -> Option<&'static KernelTable> {
        let table = match self {
            Isa::Generic => &table::on_generic::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &table::on_avx2::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => &table::on_avxvnni::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => &table::on_avx512::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vbmi => &super::avx512::WITH_VBMI,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon if std::arch::is_aarch64_feature_detected!("dotprod") => {
                &table::on_neon_dot::TABLE
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => &table::on_neon::TABLE,
            _ => return None,
        };
        self.is_available().then_some(table)
    }

    /// Sampling kernels of the instruction set; `None` if this machine does not have it.
    pub(super) fn sampling_table(self) -> Option<&'static SamplingTable> {
        let table = match self {
            Isa::Generic => &table::on_generic::SAMPLING,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => &table::on_avx2::SAMPLING,
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => &table::on_avxvnni::SAMPLING,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx512Vbmi => &table::on_avx512::SAMPLING,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon if std::arch::is_aarch64_feature_detected!("dotprod") => {
                &table::on_neon_dot::SAMPLING
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => &table::on_neon::SAMPLING,
            _ => return None,
        };
        self.is_available().then_some(table)
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Generic => "plain Rust",
            Isa::Avx2 => "AVX2",
            Isa::AvxVnni => "AVX2 with VNNI",
            Isa::Avx512 => "AVX-512 VNNI",
            Isa::Avx512Vbmi => "AVX-512 VNNI and VBMI",
            Isa::Neon => "NEON",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn isas_are_found_by_name_and_the_best_is_detected() {
        let available = Isa::available();
        assert_eq!((available[0], available.last()), (Isa::Generic, Some(&Isa::detect())));
        for isa in Isa::ALL {
            let same = Isa::ALL.into_iter().filter(|other| other.name() == isa.name());
            assert_eq!(same.count(), 1, "{isa}");
            assert_eq!(Isa::by_name(isa.name()).ok(), available.contains(&isa).then_some(isa));
        }
        // AVX-VNNI implies AVX2.
        assert!(!available.contains(&Isa::AvxVnni) || available.contains(&Isa::Avx2));
    }
}
