//! Collects the matrices and vectors of a part of a blueprint.

use super::{
    compressed::EntryIndexerBlueprint,
    delta_net::ProjectionSource,
    layer::{BodyBlueprint, FeedForwardBlueprint, MixerBlueprint, SubBlockBlueprint},
    parts::{GqaIndexer, LatentHeads, LatentQuery, LinearSource, MlaIndexer},
};
use crate::checkpoint::{MatrixSource, VectorSource};

/// Weights of a part of a model.
#[derive(Debug, Default)]
pub(super) struct WeightList<'a> {
    pub(super) matrices: Vec<&'a MatrixSource>,
    pub(super) vectors: Vec<&'a VectorSource>,
}

impl<'a> WeightList<'a> {
    fn linear<'b: 'a>(&mut self, linear: impl IntoIterator<Item = &'b LinearSource>) {
        for linear in linear {
            self.matrices.push(&linear.weight);
            self.vectors.extend(&linear.bias);
        }
    }

    fn projection(&mut self, projection: &'a ProjectionSource) {
        match projection {
            ProjectionSource::Full(matrix) => self.matrices.push(matrix),
            ProjectionSource::LowRank { down, up } => {
                self.matrices.push(down);
                self.linear([up]);
            }
        }
    }

    pub(super) fn sub_block(&mut self, sub_block: &'a SubBlockBlueprint) {
        self.matrices.extend(sub_block.input.matrices());
        self.vectors.extend(sub_block.input.vectors());
        self.vectors.extend(sub_block.post_norm.iter().chain(&sub_block.scale));
        match &sub_block.body {
            BodyBlueprint::Mixer(mixer) => self.mixer(mixer),
            BodyBlueprint::FeedForward(feed_forward) => self.feed_forward(feed_forward),
        }
    }

    pub(super) fn mixer(&mut self, mixer: &'a MixerBlueprint) {
        match mixer {
            MixerBlueprint::Gqa(g) => {
                self.linear([&g.q_proj, &g.k_proj, &g.o_proj]);
                self.linear(g.v_proj.iter().chain(&g.gate_proj));
                self.vectors.extend(g.q_norm.iter().chain(&g.k_norm).chain(&g.sinks));
                match &g.indexer {
                    Some(GqaIndexer::Blocks(indexer)) => {
                        self.linear([&indexer.q_proj, &indexer.k_proj]);
                        self.vectors.extend([&indexer.q_norm, &indexer.k_norm]);
                    }
                    Some(GqaIndexer::Entries(indexer)) => self.entry_indexer(indexer),
                    None => {}
                }
            }
            MixerBlueprint::Mla(m) => {
                match &m.q {
                    LatentQuery::Direct(q_proj) => self.linear([q_proj]),
                    LatentQuery::LowRank { q_a_proj, q_a_layernorm, q_b_proj } => {
                        self.linear([q_a_proj, q_b_proj]);
                        self.vectors.push(q_a_layernorm);
                    }
                }
                self.linear([&m.kv_a_proj_with_mqa, &m.o_proj].into_iter().chain(&m.gate_proj));
                self.vectors.push(&m.kv_a_layernorm);
                match &m.kv_b {
                    LatentHeads::Whole(kv_b_proj) => self.matrices.push(kv_b_proj),
                    LatentHeads::Split { embed_q, unembed_out } => {
                        self.matrices.extend([embed_q, unembed_out])
                    }
                }
                match m.indexer() {
                    Some(MlaIndexer::Positions(indexer)) => {
                        self.linear([&indexer.wq_b, &indexer.wk, &indexer.weights_proj]);
                        self.vectors.extend(&indexer.k_norm);
                    }
                    Some(MlaIndexer::Entries(indexer)) => self.entry_indexer(indexer),
                    None => {}
                }
            }
            MixerBlueprint::Compressed(c) => {
                self.linear([&c.q_a_proj, &c.q_b_proj, &c.kv_proj]);
                self.matrices.push(&c.o_a_proj);
                self.linear([&c.o_b_proj]);
                self.vectors.extend([&c.q_a_norm, &c.kv_norm, &c.sinks]);
                if let Some(compressor) = &c.compressor {
                    self.linear(compressor.linears());
                    self.vectors.extend(compressor.vectors());
                }
                c.indexer.iter().for_each(|indexer| self.entry_indexer(indexer));
            }
            MixerBlueprint::DeltaNet(d) => {
                self.matrices.extend(&d.in_proj_qkv);
                self.projection(&d.in_proj_z);
                self.matrices.push(&d.in_proj_b);
                self.projection(&d.in_proj_a);
                self.matrices.push(&d.out_proj);
                self.vectors.extend(d.conv1d.iter().chain([&d.a_log, &d.dt_bias, &d.norm]));
            }
            MixerBlueprint::Mamba2(m) => {
                self.matrices.extend([&m.in_proj, &m.out_proj]);
                self.vectors.extend([&m.conv1d, &m.a_log, &m.d, &m.dt_bias, &m.norm]);
                self.vectors.extend(&m.conv_bias);
            }
            MixerBlueprint::ShortConv(c) => {
                self.matrices.extend(c.matrices());
                self.vectors.push(&c.conv);
            }
        }
    }

    fn entry_indexer(&mut self, indexer: &'a EntryIndexerBlueprint) {
        self.linear(indexer.linears());
        self.vectors.extend(indexer.vectors());
    }

    fn feed_forward(&mut self, feed_forward: &'a FeedForwardBlueprint) {
        match feed_forward {
            FeedForwardBlueprint::Dense(mlp) => self.matrices.extend(mlp.matrices()),
            FeedForwardBlueprint::Moe(moe) => {
                let router = &moe.router;
                self.linear([&router.weight]);
                self.vectors.extend(router.norm.iter().map(|norm| &norm.weight));
                self.vectors.extend(router.correction.iter().chain(&router.expert_scale));
                self.vectors.extend(moe.experts_norm.iter().chain(&moe.experts_post_norm));
                if let Some(latent) = &moe.latent {
                    self.matrices.extend([&latent.down_proj, &latent.up_proj]);
                }
                if let Some(shared) = &moe.shared {
                    self.matrices.extend(shared.mlp.matrices().chain(&shared.gate));
                    self.vectors.extend(&shared.post_norm);
                }
            }
        }
    }
}
