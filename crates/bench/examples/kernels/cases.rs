//! List of kernel benchmarks: op, weight format, shape and numbers of rows.

use moeflux::Sampling;
use moeflux_compute::{Format, LogDecay, WordAxis};

use super::{
    activations, formats,
    mixers::{self, DeltaShape, HeadShape},
    op_bench::OpBench,
    products::{self, Routing},
};

type Measure = dyn Fn(&mut OpBench) -> anyhow::Result<()>;

/// Benchmark of an op in one format and shape, for one or more numbers of rows.
pub(super) struct KernelCase {
    pub(super) op: &'static str,
    /// Weight format; `None` for ops without weights.
    pub(super) format: Option<Format>,
    /// Runs the benchmark and adds its timings.
    pub(super) measure: Box<Measure>,
}

impl KernelCase {
    fn new(
        op: &'static str,
        format: Option<Format>,
        measure: impl Fn(&mut OpBench) -> anyhow::Result<()> + 'static,
    ) -> Self {
        Self { op, format, measure: Box::new(measure) }
    }

    pub(super) fn name(&self) -> String {
        self.format.map_or_else(|| self.op.to_owned(), |f| format!("{}, {}", self.op, f.name()))
    }
}

/// Hidden and intermediate size of the experts of Qwen3-30B-A3B (8 per token).
const EXPERT: [usize; 2] = [2048, 768];
/// Hidden and intermediate size of the experts of Qwen3.5-397B-A17B (10 per token).
const LARGE_EXPERT: [usize; 2] = [4096, 1024];
/// Decode: one token.
const DECODE: Routing = Routing { rows: 1, k: 8, distinct: 8 };
const DECODE_LARGE: Routing = Routing { rows: 1, k: 10, distinct: 10 };
/// Short prompt: eight rows per expert.
const SHORT_PROMPT: Routing = Routing { rows: 16, k: 8, distinct: 16 };
const LONG_PROMPT: Routing = Routing { rows: 128, k: 8, distinct: 16 };
/// Decode of as many sessions.
const BATCHES: [Routing; 8] =
    [batch(2), batch(4), batch(8), batch(16), batch(24), batch(32), batch(48), batch(64)];

/// Rows that spread over all 128 experts.
const fn batch(rows: usize) -> Routing {
    let distinct = if rows * 8 < 128 { rows * 8 } else { 128 };
    Routing { rows, k: 8, distinct }
}

/// Attention heads of Qwen3-30B-A3B (GQA).
const GROUPED: HeadShape =
    HeadShape { heads: 32, kv_heads: 4, key: 128, value: 128, latent: false };
/// Attention heads of DeepSeek-V2-Lite (MLA in the absorbed form).
const LATENT: HeadShape = HeadShape { heads: 16, kv_heads: 1, key: 576, value: 512, latent: true };

/// Delta rule of Qwen3-Next and Qwen3.5.
const GATED_DELTA_NET: DeltaShape =
    DeltaShape { key_heads: 16, decays: 1, decay: LogDecay::Softplus };
/// Delta rule of Ling-3.0-Flash.
const KIMI_DELTA_ATTENTION: DeltaShape =
    DeltaShape { key_heads: 32, decays: 128, decay: LogDecay::Bounded { bound: -5.0 } };

/// Every benchmark. Every format runs one matrix and one expert shape; the common formats run
/// further shapes.
pub(super) fn all() -> Vec<KernelCase> {
    let mut all = Vec::new();
    all.extend(
        formats::all().into_iter().map(|format| {
            mat_mul(format, [2048, 4096], &[1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 512])
        }),
    );
    all.extend(formats::COMMON.map(|format| mat_mul(format, [512, 2048], &[1, 8, 512])));
    let long = std::iter::once(formats::AFFINE4).chain(formats::GGUF);
    all.extend(long.map(|format| mat_mul(format, [12_288, 4096], &[1])));
    let heads = formats::COMMON.into_iter().chain(formats::GGUF);
    all.extend(heads.map(|format| mat_mul(format, [151_936, 2048], &[1])));
    all.push(mat_mul(formats::AFFINE4, [248_320, 2048], &[1]));
    all.extend(formats::all().into_iter().map(|format| experts(format, EXPERT, &[DECODE])));
    all.push(experts(formats::AFFINE4, LARGE_EXPERT, &[DECODE_LARGE]));
    all.extend(formats::all().into_iter().map(|format| experts(format, EXPERT, &[SHORT_PROMPT])));
    all.extend(formats::COMMON.map(|format| experts(format, EXPERT, &[LONG_PROMPT])));
    all.extend(formats::all().into_iter().map(|format| experts(format, EXPERT, &BATCHES)));
    all.extend(formats::COMMON.map(|format| {
        KernelCase::new("HeadMatMul", Some(format), move |bench| {
            products::head_mat_mul(bench, format)
        })
    }));
    all.extend(formats::COMMON.map(|format| {
        KernelCase::new("Embed", Some(format), move |bench| {
            products::embed(bench, format, [65_536, 2048], &[1, 512])
        })
    }));
    all.push(KernelCase::new("EmbedChosen", Some(formats::AFFINE4), |bench| {
        products::embed_chosen(bench, formats::AFFINE4, [65_536, 2048], 3)
    }));
    let contexts = [(GROUPED, 100, [1, 100]), (GROUPED, 8000, [1, 128]), (LATENT, 8000, [1, 16])];
    all.extend(contexts.map(|(heads, positions, rows)| {
        KernelCase::new("Attention", None, move |bench| {
            mixers::attention(bench, heads, positions, &rows)
        })
    }));
    all.push(KernelCase::new("LatentAttention", Some(formats::AFFINE4), |bench| {
        mixers::latent_attention(bench, formats::AFFINE4, 2048, 64)
    }));
    all.extend([256, 4096].map(|rows| {
        KernelCase::new("SegmentAttention", None, move |bench| {
            mixers::segment_attention(bench, rows)
        })
    }));
    all.push(KernelCase::new("TopPositions", None, |bench| mixers::top_positions(bench, 8000)));
    all.push(KernelCase::new("TopBlocks", None, |bench| mixers::top_blocks(bench, 8000)));
    for delta in [GATED_DELTA_NET, KIMI_DELTA_ATTENTION] {
        all.extend(decode_and_prefill("DeltaNet", move |bench, rows| {
            mixers::delta_net(bench, delta, rows)
        }));
    }
    all.extend(decode_and_prefill("Mamba2", mixers::mamba2));
    all.extend(decode_and_prefill("Conv1d", mixers::conv1d));
    for ratio in [4, 128] {
        all.extend(decode_and_prefill("Compress", move |bench, rows| {
            mixers::compress(bench, ratio, rows)
        }));
    }
    all.extend(decode_and_prefill("Rope", mixers::rope));
    for op in ["RmsNorm", "LayerNorm", "GatedRmsNorm"] {
        all.extend(decode_and_prefill(op, move |bench, rows| activations::norms(bench, op, rows)));
    }
    for op in ["Glu", "Add", "Scale", "Silu", "SoftCap"] {
        all.extend(decode_and_prefill(op, move |bench, rows| {
            activations::elementwise(bench, op, rows)
        }));
    }
    all.extend(decode_and_prefill("Glu", activations::gelu));
    for op in ["StreamWeights", "Collapse", "Expand"] {
        all.extend(decode_and_prefill(op, move |bench, rows| {
            activations::streams(bench, op, rows)
        }));
    }
    all.extend(decode_and_prefill("HeadGate", activations::head_gate));
    all.extend(decode_and_prefill("KeyedGate", activations::keyed_gate));
    all.extend(decode_and_prefill("GatherColumns", activations::gather_columns));
    all.extend(decode_and_prefill("ScatterRows", activations::scatter_rows));
    all.extend(decode_and_prefill("TopK", activations::top_k));
    all.extend(decode_and_prefill("Combine", activations::combine));
    all.extend([1, 64].map(|n| {
        KernelCase::new("TopLogits", None, move |bench| activations::top_logits(bench, n))
    }));
    let off = Sampling::default;
    let samplings = [
        ("top-p", off().top_p(0.9)),
        ("min-p", off().min_p(0.01)),
        ("no filter", off()),
        ("top-p and penalty", off().top_p(0.9).repetition_penalty(1.1)),
    ];
    let [hidden, intermediate] = EXPERT;
    for words in [WordAxis::Outputs, WordAxis::Inputs] {
        all.extend([4, 8].map(|bits| {
            KernelCase::new("Land", None, move |bench| {
                products::land_words(bench, words, bits, [intermediate, hidden])
            })
        }));
    }
    all.push(KernelCase::new("Land", None, move |bench| {
        products::land_transposed(bench, [2 * intermediate, hidden])
    }));
    all.extend(samplings.map(|(name, sampling)| {
        KernelCase::new("Sample", None, move |bench| activations::sample(bench, name, &sampling))
    }));
    all
}

fn mat_mul(format: Format, shape: [usize; 2], rows: &'static [usize]) -> KernelCase {
    KernelCase::new("MatMul", Some(format), move |bench| {
        products::mat_mul(bench, format, shape, rows)
    })
}

fn experts(format: Format, shape: [usize; 2], routings: &'static [Routing]) -> KernelCase {
    KernelCase::new("Experts", Some(format), move |bench| {
        products::experts(bench, format, shape, routings)
    })
}

/// The op with 1 row (decode) and with 512 rows (prefill).
fn decode_and_prefill(
    op: &'static str,
    measure: impl Fn(&mut OpBench, usize) -> anyhow::Result<()> + Copy + 'static,
) -> [KernelCase; 2] {
    [1, 512].map(|rows| KernelCase::new(op, None, move |bench| measure(bench, rows)))
}
