//! What is measured: op, format, shape, rows.

use moeflux::Sampling;
use moeflux_compute::Format;

use super::{
    activations, formats,
    lab::Lab,
    mixers::{self, Heads},
    products::{self, Choice},
};

type Measure = dyn Fn(&mut Lab) -> anyhow::Result<()>;

/// An op in a format, in one shape and with several numbers of rows.
pub(super) struct Case {
    pub(super) op: &'static str,
    /// Of its weights, if it has any.
    pub(super) format: Option<Format>,
    /// Measures some figures.
    pub(super) measure: Box<Measure>,
}

impl Case {
    fn new(
        op: &'static str,
        format: Option<Format>,
        measure: impl Fn(&mut Lab) -> anyhow::Result<()> + 'static,
    ) -> Self {
        Self { op, format, measure: Box::new(measure) }
    }

    pub(super) fn name(&self) -> String {
        self.format
            .map_or_else(|| self.op.to_owned(), |f| format!("{}, {}", self.op, formats::name(f)))
    }
}

/// Hidden size and intermediate size of experts of Qwen3-30B-A3B, of which a token meets 8.
const EXPERT: [usize; 2] = [2048, 768];
/// Those of Qwen3.5-397B-A17B, of which a token meets 10.
const LARGE_EXPERT: [usize; 2] = [4096, 1024];
/// A token.
const DECODE: Choice = Choice { rows: 1, k: 8, met: 8 };
const DECODE_LARGE: Choice = Choice { rows: 1, k: 10, met: 10 };
/// A short prompt: eight rows for each expert that it meets.
const SHORT_PROMPT: Choice = Choice { rows: 16, k: 8, met: 16 };
const LONG_PROMPT: Choice = Choice { rows: 128, k: 8, met: 16 };

/// Heads of Qwen3-30B-A3B.
const GROUPED: Heads = Heads { heads: 32, kv_heads: 4, key: 128, value: 128, latent: false };
/// Heads of DeepSeek-V2-Lite in the absorbed form.
const LATENT: Heads = Heads { heads: 16, kv_heads: 1, key: 576, value: 512, latent: true };

/// All cases: every format meets one matrix and one expert, the usual ones meet others too.
pub(super) fn all() -> Vec<Case> {
    let mut all = Vec::new();
    all.extend(
        formats::ALL.map(|format| mat_mul(format, [2048, 4096], &[1, 2, 4, 8, 16, 128, 512])),
    );
    all.extend(formats::USUAL.map(|format| mat_mul(format, [512, 2048], &[1, 8, 512])));
    all.push(mat_mul(formats::FOUR, [12_288, 4096], &[1]));
    all.extend(formats::USUAL.map(|format| mat_mul(format, [151_936, 2048], &[1])));
    all.push(mat_mul(formats::FOUR, [248_320, 2048], &[1]));
    all.extend(formats::ALL.map(|format| experts(format, EXPERT, DECODE)));
    all.push(experts(formats::FOUR, LARGE_EXPERT, DECODE_LARGE));
    all.extend(formats::ALL.map(|format| experts(format, EXPERT, SHORT_PROMPT)));
    all.extend(formats::USUAL.map(|format| experts(format, EXPERT, LONG_PROMPT)));
    all.extend(formats::USUAL.map(|format| {
        Case::new("HeadMatMul", Some(format), move |lab| products::head_mat_mul(lab, format))
    }));
    all.extend(formats::USUAL.map(|format| {
        Case::new("Embed", Some(format), move |lab| {
            products::embed(lab, format, [65_536, 2048], &[1, 512])
        })
    }));
    let contexts = [(GROUPED, 100, [1, 100]), (GROUPED, 8000, [1, 128]), (LATENT, 8000, [1, 16])];
    all.extend(contexts.map(|(heads, positions, rows)| {
        Case::new("Attention", None, move |lab| mixers::attention(lab, heads, positions, &rows))
    }));
    all.push(Case::new("LatentAttention", Some(formats::FOUR), |lab| {
        mixers::latent_attention(lab, formats::FOUR, 2048, 64)
    }));
    all.push(Case::new("TopPositions", None, |lab| mixers::top_positions(lab, 8000)));
    all.extend(of_rows("DeltaNet", mixers::delta_net));
    all.extend(of_rows("Conv1d", mixers::conv1d));
    all.extend(of_rows("Rope", mixers::rope));
    for op in ["RmsNorm", "LayerNorm", "GatedRmsNorm"] {
        all.extend(of_rows(op, move |lab, rows| activations::norms(lab, op, rows)));
    }
    for op in ["Glu", "Add", "Scale", "SoftCap"] {
        all.extend(of_rows(op, move |lab, rows| activations::elementwise(lab, op, rows)));
    }
    all.extend(of_rows("TopK", activations::top_k));
    all.extend(of_rows("Combine", activations::combine));
    all.extend(
        [1, 64].map(|n| Case::new("TopLogits", None, move |lab| activations::top_logits(lab, n))),
    );
    let off = Sampling::default;
    let samplings = [
        ("top-p", Sampling { top_p: 0.9, ..off() }),
        ("min-p", Sampling { min_p: 0.01, ..off() }),
        ("no filter", off()),
        ("top-p and penalty", Sampling { top_p: 0.9, repetition_penalty: 1.1, ..off() }),
    ];
    all.extend(samplings.map(|(name, sampling)| {
        Case::new("Sample", None, move |lab| activations::sample(lab, name, &sampling))
    }));
    all
}

fn mat_mul(format: Format, shape: [usize; 2], rows: &'static [usize]) -> Case {
    Case::new("MatMul", Some(format), move |lab| products::mat_mul(lab, format, shape, rows))
}

fn experts(format: Format, shape: [usize; 2], choice: Choice) -> Case {
    Case::new("Experts", Some(format), move |lab| products::experts(lab, format, shape, choice))
}

/// A token, and a prompt of 512.
fn of_rows(
    op: &'static str,
    measure: impl Fn(&mut Lab, usize) -> anyhow::Result<()> + Copy + 'static,
) -> [Case; 2] {
    [1, 512].map(|rows| Case::new(op, None, move |lab| measure(lab, rows)))
}
