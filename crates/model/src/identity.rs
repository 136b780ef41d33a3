//! Computation of the [`ModelId`]: digest of config, tensor list and samples of all weights.
//!
//! A sample is at a place that a hash of the tensor's name chooses, so that no region of the
//! weights is left out in all models. Each part of the experts of a layer is sampled: scales are
//! few bytes beside the weights. Bytes of experts are taken in slot order, the order of
//! a packed copy, which has the identity of its source.

use std::{collections::BTreeSet, ops::Range, panic::resume_unwind, thread};

use moeflux_base::Error;
use sha2::{Digest, Sha256};

use crate::{
    blueprint::{Blueprint, LayerExperts},
    checkpoint::{Checkpoint, ModelId, Segment, TensorInfo, digest},
};

/// Bytes of the samples of all dense tensors, and of all experts, exceeded only if there are very
/// many.
const TOTAL_SAMPLES: u64 = 16 << 20;
/// Minimum and maximum bytes of a tensor that are sampled.
const TENSOR_SAMPLES: (u64, u64) = (256, 16 << 10);
/// Samples of a tensor that is too long to be read whole, one in each equal part of it.
const PLACES: u64 = 4;
/// Samples of all experts, exceeded only if the layers have more parts.
const EXPERT_SAMPLES: usize = 4096;
/// Minimum and maximum bytes of a sample of an expert.
const EXPERT_SAMPLE: (u64, u64) = (64, 4 << 10);
/// Samples that are read at once: disks answer random reads soonest from a queue.
const QUEUE_DEPTH: usize = 8;
/// Stack of a thread that reads samples, in bytes.
const STACK: usize = 128 << 10;
/// Samples in memory at once.
const BATCH: usize = 256;

/// Bytes of a tensor or an expert that identify it.
struct Sample {
    /// Name of the tensor or the expert, in errors.
    name: String,
    segments: Vec<Segment>,
}

impl Sample {
    fn read(&self, checkpoint: &Checkpoint) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; self.segments.iter().map(|segment| segment.bytes).sum()];
        let mut rest = &mut bytes[..];
        for segment in &self.segments {
            let (part, after) = rest.split_at_mut(segment.bytes);
            checkpoint.read(&self.name, segment, part)?;
            rest = after;
        }
        Ok(bytes)
    }
}

/// A digest of fields. Each is preceded by its length, so that different lists of fields never have
/// the same bytes.
#[derive(Default)]
struct FieldDigest(Sha256);

impl FieldDigest {
    fn field(&mut self, bytes: &[u8]) {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    fn finish(self) -> ModelId {
        ModelId(self.0.finalize().into())
    }
}

/// Number below `limit`, which is at least 1, by a hash of the key.
fn hashed(key: &str, limit: u64) -> u64 {
    digest(key.as_bytes()) % limit.max(1)
}

impl Checkpoint {
    /// Identity of the model. Reads at most some megabytes, regardless of the size of the model.
    ///
    /// # Errors
    /// A file cannot be read, or the architecture is not supported.
    pub fn identity(&self) -> Result<ModelId, Error> {
        let blueprint = Blueprint::for_checkpoint(self)?;
        let experts = match self.packed_file() {
            Some(file) => self.names(|t| t.file == file),
            None => self.expert_tensors(&blueprint)?,
        };
        let dense = &self.names(|_| true) - &experts;
        let mut hash = FieldDigest::default();
        hash.field(self.text_file("config.json").map_or(&[][..], |file| file.bytes));
        if let Some(scaling) = self.rope_scaling() {
            hash.field(format!("{scaling:?}").as_bytes());
        }
        hash.field(self.listing().as_bytes());
        self.add_samples(&self.tensor_samples(&dense)?, &mut hash)?;
        self.add_samples(&expert_samples(&blueprint)?, &mut hash)?;
        Ok(hash.finish())
    }

    /// Identity of the model in these very files: also their lengths and times of modification.
    /// A copy has another one.
    #[doc(hidden)]
    pub fn identity_of_files(&self, model: ModelId) -> ModelId {
        let mut hash = FieldDigest::default();
        hash.field(&model.0);
        for file in self.own_files() {
            hash.field(format!("{:?}", file.stamp()).as_bytes());
        }
        hash.finish()
    }

    /// Appends the bytes of samples, in their order.
    fn add_samples(&self, samples: &[Sample], hash: &mut FieldDigest) -> Result<(), Error> {
        for batch in samples.chunks(BATCH) {
            let read = |samples: &[Sample]| -> Result<Vec<Vec<u8>>, Error> {
                samples.iter().map(|sample| sample.read(self)).collect()
            };
            let bytes = thread::scope(|scope| -> Result<Vec<_>, Error> {
                let readers = batch.chunks(batch.len().div_ceil(QUEUE_DEPTH)).map(|samples| {
                    let thread = thread::Builder::new().name("samples".into()).stack_size(STACK);
                    // Without a thread more, this one reads them.
                    let thread = thread.spawn_scoped(scope, move || read(samples));
                    thread.map_err(|_| samples)
                });
                let readers: Vec<_> = readers.collect();
                let mut bytes = Vec::new();
                for reader in readers {
                    bytes.push(match reader {
                        Ok(reader) => reader.join().unwrap_or_else(|panic| resume_unwind(panic))?,
                        Err(samples) => read(samples)?,
                    });
                }
                Ok(bytes)
            });
            bytes?.iter().flatten().for_each(|sample| hash.field(sample));
        }
        Ok(())
    }

    fn tensor_samples(&self, names: &BTreeSet<&str>) -> Result<Vec<Sample>, Error> {
        let (min, max) = TENSOR_SAMPLES;
        let limit = (TOTAL_SAMPLES / (names.len() as u64).max(1)).clamp(min, max);
        let mut samples = Vec::new();
        for name in names {
            let TensorInfo { file, offset, bytes, .. } = *self.tensor(name)?;
            let mut add = |range: Range<u64>| {
                let bytes = (range.end - range.start) as usize;
                let segment = Segment { file, offset: offset + range.start, bytes };
                samples.push(Sample { name: (*name).to_owned(), segments: vec![segment] });
            };
            if bytes <= limit {
                add(0..bytes);
                continue;
            }
            let (part, sample) = (bytes / PLACES, limit / PLACES);
            for index in 0..PLACES {
                let start = index * part + hashed(&format!("{name} {index}"), part - sample + 1);
                add(start..start + sample);
            }
        }
        Ok(samples)
    }

    /// Names of the tensors that satisfy `predicate`.
    fn names(&self, predicate: impl Fn(&TensorInfo) -> bool) -> BTreeSet<&str> {
        self.tensors().filter(|(_, t)| predicate(t)).map(|(name, _)| name).collect()
    }

    /// Sorted lines `name dtype [shape]` of all tensors.
    #[doc(hidden)]
    pub fn listing(&self) -> String {
        let mut lines: Vec<_> =
            self.tensors().map(|(name, t)| format!("{name} {} {:?}\n", t.dtype, t.shape)).collect();
        lines.sort_unstable();
        lines.concat()
    }

    /// Names of the tensors that experts are read from.
    ///
    /// # Errors
    /// An expert is not within a tensor.
    #[doc(hidden)]
    pub fn expert_tensors(&self, blueprint: &Blueprint) -> Result<BTreeSet<&str>, Error> {
        let mut sorted: Vec<_> = self.tensors().filter(|(_, t)| t.bytes > 0).collect();
        sorted.sort_by_key(|(_, t)| (t.file, t.offset));
        let mut names = BTreeSet::new();
        let has = |t: &TensorInfo, segment: &Segment| {
            t.file == segment.file
                && t.offset <= segment.offset
                && segment.offset + segment.bytes as u64 <= t.offset + t.bytes
        };
        for (layer, moe) in blueprint.moe_layers() {
            // Most tensors have all experts of a layer.
            let mut last: Vec<Option<&TensorInfo>> = Vec::new();
            for expert in 0..moe.experts.count {
                for (index, segment) in moe.experts.segments(expert).enumerate() {
                    last.resize(last.len().max(index + 1), None);
                    if last[index].is_some_and(|t| has(t, &segment)) {
                        continue;
                    }
                    let place = (segment.file, segment.offset);
                    let after = sorted.partition_point(|(_, t)| (t.file, t.offset) <= place);
                    let found = after.checked_sub(1).map(|i| sorted[i]);
                    let found = found.filter(|(_, t)| has(t, &segment));
                    let (name, tensor) = found.ok_or_else(|| Error::Checkpoint {
                        path: self.folder().into(),
                        problem: format!(
                            "an expert of layer {layer} is not within a tensor; please report this"
                        ),
                    })?;
                    last[index] = Some(tensor);
                    names.insert(name);
                }
            }
        }
        Ok(names)
    }
}

/// Samples of each part of the experts of each layer: of all experts where they are few, else of
/// some that a hash chooses.
fn expert_samples(blueprint: &Blueprint) -> Result<Vec<Sample>, Error> {
    let mut parts = Vec::new();
    for (layer, moe) in blueprint.moe_layers() {
        for part in expert_parts(&moe.experts)? {
            parts.push((layer, &moe.experts, part));
        }
    }
    let of_part = (EXPERT_SAMPLES / parts.len().max(1)).max(1);
    let count: usize = parts.iter().map(|(_, experts, _)| of_part.min(experts.count)).sum();
    let (min, max) = EXPERT_SAMPLE;
    let limit = (TOTAL_SAMPLES / (count as u64).max(1)).clamp(min, max);
    let mut samples = Vec::new();
    for (layer, experts, part) in parts {
        let count = of_part.min(experts.count);
        for index in 0..count {
            // One of each equal part of the list.
            let [first, end] = [index, index + 1].map(|index| index * experts.count / count);
            let key = format!("layer {layer} part {} expert", part.start);
            let expert = first + hashed(&format!("{key} {first}"), (end - first) as u64) as usize;
            let bytes = part.end - part.start;
            let sample = bytes.min(limit);
            let start = part.start + hashed(&format!("{key} at {expert}"), bytes - sample + 1);
            samples.push(Sample {
                name: format!("expert {expert} of layer {layer}"),
                segments: within(experts.segments(expert), start..start + sample),
            });
        }
    }
    Ok(samples)
}

/// Parts of the bytes of an expert in a file: planes of the matrices, and what is between them.
fn expert_parts(experts: &LayerExperts) -> Result<Vec<Range<u64>>, Error> {
    let planes = experts.shape.file_planes(experts.layouts);
    let planes = planes.map_err(Error::at(|| "sampling the experts"))?;
    let mut cuts = BTreeSet::from([0, experts.file_bytes as u64]);
    for plane in planes {
        cuts.extend([plane.offset as u64, (plane.offset + plane.bytes) as u64]);
    }
    let cuts: Vec<u64> = cuts.into_iter().collect();
    Ok(cuts.windows(2).map(|cut| cut[0]..cut[1]).collect())
}

/// Segments of a range of the bytes that `segments` have one after another.
fn within(segments: impl Iterator<Item = Segment>, range: Range<u64>) -> Vec<Segment> {
    let (mut found, mut at) = (Vec::new(), 0);
    for Segment { file, offset, bytes } in segments {
        let (start, end) = (range.start.max(at), range.end.min(at + bytes as u64));
        if start < end {
            let bytes = (end - start) as usize;
            found.push(Segment { file, offset: offset + start - at, bytes });
        }
        at += bytes as u64;
    }
    found
}

#[cfg(test)]
mod tests {
    use std::{fs, time::Duration};

    use super::*;

    fn golden(name: &str) -> Checkpoint {
        Checkpoint::open(&moeflux_goldens::golden(name)).unwrap()
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

    /// Each kind of tensor of a small model is sampled, or read whole; so is each expert.
    #[test]
    fn a_change_of_any_kind_of_tensor_is_another_model() {
        for name in ["qwen3_moe", "gpt_oss_mxfp4", "deepseek_v3_hub_fp8"] {
            let temp = tempfile::tempdir().unwrap();
            let source = golden(name);
            for entry in fs::read_dir(source.folder()).unwrap().flatten() {
                if entry.path().is_file() {
                    fs::copy(entry.path(), temp.path().join(entry.file_name())).unwrap();
                }
            }
            let id = || Checkpoint::open(temp.path()).unwrap().identity().unwrap();
            let (whole, copy) =
                (source.identity().unwrap(), Checkpoint::open(temp.path()).unwrap());
            assert_eq!(id(), whole, "{name}");
            // One tensor of each name without numbers of layers and experts.
            let kind = |name: &str| name.replace(|c: char| c.is_ascii_digit(), "");
            let mut kinds = BTreeSet::new();
            for (tensor, info) in copy.tensors().filter(|(_, t)| t.bytes > 0) {
                if !kinds.insert(kind(tensor)) {
                    continue;
                }
                let path = copy.files()[info.file as usize].path().to_owned();
                let before = fs::read(&path).unwrap();
                let mut bytes = before.clone();
                let range = info.offset as usize..(info.offset + info.bytes) as usize;
                bytes[range].iter_mut().for_each(|byte| *byte ^= 1);
                fs::write(&path, bytes).unwrap();
                assert_ne!(id(), whole, "{name}: {tensor}");
                fs::write(&path, before).unwrap();
            }
            assert!(kinds.len() > 10, "{kinds:?}");
        }
    }

    #[test]
    fn files_that_were_written_again_are_others() {
        let (temp, source) = (tempfile::tempdir().unwrap(), golden("qwen3_moe"));
        for name in ["config.json", "model.safetensors"] {
            fs::copy(source.folder().join(name), temp.path().join(name)).unwrap();
        }
        let weights = temp.path().join("model.safetensors");
        let id = || {
            let checkpoint = Checkpoint::open(temp.path()).unwrap();
            checkpoint.identity_of_files(checkpoint.identity().unwrap())
        };
        let before = id();
        assert_eq!(id(), before);
        // A change that no sample sees is seen by the time.
        let later = fs::metadata(&weights).unwrap().modified().unwrap() + Duration::from_secs(1);
        fs::File::options().write(true).open(&weights).unwrap().set_modified(later).unwrap();
        assert_ne!(id(), before);
    }
}
