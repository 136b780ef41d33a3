//! Computation of the [`ModelId`]: digest of config, tensor list and samples of the dense weights.

use std::collections::BTreeSet;

use sha2::{Digest, Sha256};

use crate::{
    base::error::Error,
    checkpoint::{Checkpoint, ModelId, Segment, TensorInfo},
    model::blueprint::Blueprint,
};

/// Maximum sample of one tensor, in bytes.
const MAX_SAMPLE: u64 = 4 << 10;
/// Bytes of the samples of all tensors, exceeded only if there are very many tensors.
const TOTAL_SAMPLES: u64 = 4 << 20;
/// Minimum sample of one tensor, in bytes, if it is that long.
const MIN_SAMPLE: u64 = 64;

impl Checkpoint {
    /// Identity of the model. Reads at most some megabytes, regardless of the size of the model.
    ///
    /// # Errors
    /// A file cannot be read, or the architecture is not supported.
    pub fn identity(&self) -> Result<ModelId, Error> {
        let experts = match self.packed_file() {
            Some(file) => self.names(|t| t.file == file),
            None => self.expert_tensors(&Blueprint::for_checkpoint(self)?)?,
        };
        let dense = &self.names(|_| true) - &experts;
        let max_sample =
            (TOTAL_SAMPLES / (dense.len() as u64).max(1)).clamp(MIN_SAMPLE, MAX_SAMPLE);
        let mut hash = Sha256::new();
        // Each field is preceded by its length, so that different lists of fields never have the
        // same bytes.
        let mut field = |bytes: &[u8]| {
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        field(self.text_file("config.json").map_or(&[][..], |file| file.bytes));
        if let Some(scaling) = self.rope_scaling() {
            field(format!("{scaling:?}").as_bytes());
        }
        field(self.listing().as_bytes());
        let mut sample = [0; MAX_SAMPLE as usize];
        for name in dense {
            let t = self.tensor(name)?;
            let bytes = t.bytes.min(max_sample);
            let middle = Segment {
                file: t.file,
                offset: t.offset + (t.bytes - bytes) / 2,
                bytes: bytes as usize,
            };
            let sample = &mut sample[..middle.bytes];
            self.read(name, &middle, sample)?;
            field(sample);
        }
        Ok(ModelId(hash.finalize().into()))
    }

    /// Names of the tensors that satisfy `predicate`.
    fn names(&self, predicate: impl Fn(&TensorInfo) -> bool) -> BTreeSet<&str> {
        self.tensors().filter(|(_, t)| predicate(t)).map(|(name, _)| name).collect()
    }

    /// Sorted lines `name dtype [shape]` of all tensors.
    pub(crate) fn listing(&self) -> String {
        let mut lines: Vec<_> =
            self.tensors().map(|(name, t)| format!("{name} {} {:?}\n", t.dtype, t.shape)).collect();
        lines.sort_unstable();
        lines.concat()
    }

    /// Names of the tensors that experts are read from.
    ///
    /// # Errors
    /// An expert is not within a tensor.
    pub(crate) fn expert_tensors(&self, blueprint: &Blueprint) -> Result<BTreeSet<&str>, Error> {
        let mut sorted: Vec<_> = self.tensors().filter(|(_, t)| t.bytes > 0).collect();
        sorted.sort_by_key(|(_, t)| (t.file, t.offset));
        let mut names = BTreeSet::new();
        for (layer, moe) in blueprint.moe_layers() {
            for segment in (0..moe.experts.count).flat_map(|e| moe.experts.segments(e)) {
                let after = sorted
                    .partition_point(|(_, t)| (t.file, t.offset) <= (segment.file, segment.offset));
                let found = after.checked_sub(1).map(|i| sorted[i]).filter(|(_, t)| {
                    t.file == segment.file
                        && segment.offset + segment.bytes as u64 <= t.offset + t.bytes
                });
                let (name, _) = found.ok_or_else(|| Error::Checkpoint {
                    path: self.folder().into(),
                    problem: format!(
                        "an expert of layer {layer} is not within a tensor; please report this"
                    ),
                })?;
                names.insert(name);
            }
        }
        Ok(names)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, ops::ControlFlow};

    use super::*;
    use crate::tools::pack::pack;

    fn golden(name: &str) -> Checkpoint {
        Checkpoint::open(&moeflux_goldens::golden(name)).unwrap()
    }

    #[test]
    fn a_packed_copy_is_the_same_model() {
        let names = [
            "qwen3_moe",
            "qwen3_moe_shards",
            "deepseek_v3_hub",
            "deepseek_v3_hub_fp8",
            "gpt_oss_mxfp4",
        ];
        let mut all = BTreeSet::new();
        for name in names {
            let (source, temp) = (golden(name), tempfile::tempdir().unwrap());
            let out = temp.path().join("out");
            pack(&source, &out, &mut |_, _| ControlFlow::Continue(())).unwrap();
            let id = source.identity().unwrap();
            assert_eq!(Checkpoint::open(&out).unwrap().identity().unwrap(), id, "{name}");
            assert_eq!(serde_json::from_str::<ModelId>(&format!("\"{id}\"")).unwrap(), id);
            all.insert(id.to_string());
        }
        assert_eq!(all.len(), names.len(), "different models have different identities");
        for text in ["", "0", "zz", "é0", &"0".repeat(63), &"0".repeat(66)] {
            assert!(serde_json::from_value::<ModelId>(text.into()).is_err(), "{text}");
        }
    }

    #[test]
    fn other_weights_or_another_config_are_another_model() {
        let (temp, source) = (tempfile::tempdir().unwrap(), golden("qwen3_moe"));
        let copy =
            |name: &str| fs::copy(source.folder().join(name), temp.path().join(name)).unwrap();
        let [config, weights] = ["config.json", "model.safetensors"];
        let id = || Checkpoint::open(temp.path()).unwrap().identity().unwrap();
        let change = |name: &str, at: usize| {
            let mut bytes = fs::read(temp.path().join(name)).unwrap();
            bytes[at] ^= 1;
            fs::write(temp.path().join(name), bytes).unwrap();
        };
        copy(config);
        copy(weights);
        let whole = source.identity().unwrap();
        assert_eq!(id(), whole);
        let norm = source.tensor("model.norm.weight").unwrap();
        change(weights, (norm.offset + norm.bytes / 2) as usize);
        assert_ne!(id(), whole);
        copy(weights);
        assert_eq!(id(), whole);
        let text = fs::read_to_string(temp.path().join(config)).unwrap();
        fs::write(temp.path().join(config), text + "\n").unwrap();
        assert_ne!(id(), whole);
    }
}
